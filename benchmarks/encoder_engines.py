"""What `encoder.py` asks of a library: token ids and a mask to the mean over tokens. Runs in its own process.

A case's subject is the folder that `minilm_files` describes; `tokens_of` makes the same ids in every process.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import minilm_files
import numpy as np
from embed_engines import onnxruntime_session, openvino_model
from minilm_files import Batch
from worker import Case, Prepared

FIRST, LAST, START, END = 2000, 29000, 101, 102  # whole words of BERT's vocabulary, [CLS] and [SEP]
Run = Callable[[np.ndarray, np.ndarray], np.ndarray]


def tokens_of(case: Case) -> Batch:
    """Random words. The first text is as long as the batch is wide, others have `shortest` tokens at least."""
    batch, seq = case.dims["batch"], case.dims["seq"]
    rng = np.random.default_rng(seq)
    lengths = [seq, *rng.integers(case.dims["shortest"], seq + 1, batch - 1)]
    return minilm_files.padded([[START, *rng.integers(FIRST, LAST, n - 2), END] for n in lengths])


def prepare(make: Callable[[Path, int], Run], case: Case, threads: int) -> Prepared:
    tokens, mask = tokens_of(case)
    run = _engine(make, case.subject, threads)
    return Prepared(lambda: run(tokens, mask), lambda: np.asarray(run(tokens, mask)))


@functools.cache
def _engine(make: Callable[[Path, int], Run], subject: str, threads: int) -> Run:
    """One model for all cases of a process."""
    return make(Path(subject), threads)


# ---------------------------------------------------------------------------------------------------------------------
# The libraries.


def rlx_run(folder: Path, threads: int, *, precision: str) -> Run:
    import rlx

    model: Any = rlx.load(folder / "model", threads=threads, precision=precision)

    def run(tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """The padding is cut off here, and so is part of the time."""
        rows = [row[:length] for row, length in zip(tokens, mask.sum(1), strict=True)]
        return np.asarray(model.embed_tokens(rows, normalize=False))

    return run


def torch_compile_run(folder: Path, threads: int) -> Run:
    """With weights frozen into the code, and compiled anew for each shape."""
    import torch

    torch.set_num_threads(threads)
    config: Any = torch._inductor.config
    config.freezing = True
    encoder: Any = torch.compile(minilm_files.torch_encoder(folder), dynamic=False)

    def run(tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(encoder(torch.from_numpy(tokens), torch.from_numpy(mask)))

    return run


def onnxruntime_run(folder: Path, threads: int, *, file: Callable[[Path], Path]) -> Run:
    session = onnxruntime_session(file(folder), threads)
    return lambda tokens, mask: np.asarray(session.run(None, {"input_ids": tokens, "attention_mask": mask})[0])


def openvino_run(folder: Path, threads: int, *, file: Callable[[Path], Path]) -> Run:
    request: Any = openvino_model(file(folder), threads).create_infer_request()
    return lambda tokens, mask: np.asarray(
        request.infer({"input_ids": tokens, "attention_mask": mask}, share_outputs=True)[0]
    )


def jax_run(folder: Path, threads: int) -> Run:
    """The formulas under `jax.jit`. Its pool has a thread for each core that the process may use."""
    if "jax" in sys.modules:
        raise RuntimeError("jax is imported already: its pool has its threads")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    import jax
    import jax.numpy as jnp
    from safetensors.numpy import load_file
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(folder / "model")
    w = {name: jnp.asarray(array) for name, array in load_file(folder / "model" / "model.safetensors").items()}
    heads = config.num_attention_heads

    def linear(x: Any, name: str) -> Any:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x: Any, name: str) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        scale = jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + config.layer_norm_eps)
        return centred * scale * w[f"{name}.weight"] + w[f"{name}.bias"]

    def attention(x: Any, bias: Any, name: str) -> Any:
        parts = [linear(x, f"{name}.self.{n}").reshape(*x.shape[:2], heads, -1) for n in ("query", "key", "value")]
        q, k, v = parts
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1]).astype(np.float32) + bias
        seen = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)
        return linear(seen.reshape(x.shape), f"{name}.output.dense")

    @jax.jit
    def forward(tokens: Any, mask: Any) -> Any:
        tables = [w[f"embeddings.{n}_embeddings.weight"] for n in ("word", "position", "token_type")]
        x = tables[0][tokens] + tables[1][: tokens.shape[1]] + tables[2][0]
        x = norm(x, "embeddings.LayerNorm")
        bias = jnp.where(mask[:, None, None, :] > 0, 0.0, -1e30).astype(jnp.float32)
        for i in range(config.num_hidden_layers):
            layer = f"encoder.layer.{i}"
            x = norm(x + attention(x, bias, f"{layer}.attention"), f"{layer}.attention.output.LayerNorm")
            inner = jax.nn.gelu(linear(x, f"{layer}.intermediate.dense"), approximate=False)
            x = norm(x + linear(inner, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
        counts = mask[..., None].astype(jnp.float32)
        return (x * counts).sum(1) / counts.sum(1)

    return lambda tokens, mask: np.asarray(forward(tokens, mask))


def engine(make: Callable[..., Run], **options: Any) -> Callable[[Case, int], Prepared]:
    return functools.partial(prepare, functools.partial(make, **options))


rlx = engine(rlx_run, precision="f32")
rlx_int8 = engine(rlx_run, precision="int8")
torch_compile = engine(torch_compile_run)
onnxruntime = engine(onnxruntime_run, file=minilm_files.onnx_file)
onnxruntime_int8 = engine(onnxruntime_run, file=minilm_files.onnx_int8_file)
openvino = engine(openvino_run, file=minilm_files.onnx_file)
openvino_int8 = engine(openvino_run, file=minilm_files.openvino_int8_file)
jax = engine(jax_run)
