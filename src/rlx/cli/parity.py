"""Logits or vectors of the same model in `transformers`, for comparison. Needs torch and transformers."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlx.arrays import Array
from rlx.fast_dataclass import dataclass
from rlx.formats.gguf_quants import dequantise
from rlx.models.load import Checkpoint

CLASSES = {"llama": "Llama", "qwen2": "Qwen2"}
OVERHEAD = 1.3  # memory, relative to the weights in f32


class Unavailable(Exception):
    """The comparison is not possible, for a reason that is not a defect."""


@dataclass(frozen=True)
class Difference:
    """The difference between two sets of logits or vectors."""

    largest: float  # maximum, relative to the largest value
    divergence: float | None  # mean KL divergence, for logits
    agreement: float | None  # share of rows with the same argmax

    @classmethod
    def of(cls, actual: Array, wanted: Array, *, logits: bool) -> Difference:
        a, b = actual.astype(np.float64), wanted.astype(np.float64)
        largest = float(np.abs(a - b).max() / np.abs(b).max())
        if not logits:
            return cls(largest, None, None)
        p, q = _log_softmax(b), _log_softmax(a)
        divergence = float((np.exp(p) * (p - q)).sum(1).mean())
        return cls(largest, divergence, float((a.argmax(1) == b.argmax(1)).mean()))

    def __str__(self) -> str:
        text = f"largest difference {self.largest:.1e} of the largest value"
        if self.divergence is None:
            return text
        return f"{text}, KL {max(self.divergence, 0):.1e}, top-1 agrees on {self.agreement:.0%}"


def _log_softmax(x: Array) -> Array:
    shifted = x - x.max(1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return result


def logits(checkpoint: Checkpoint, tokens: Sequence[int]) -> Array:
    """Logits `[seq, vocab]` of a decoder."""
    _check_memory(checkpoint)
    with _quiet():
        import torch

        is_plain = (
            _is_folder(checkpoint) and checkpoint.config.quantization is None
        )  # transformers would read quantised weights as bf16
        model = _from_folder(checkpoint, "AutoModelForCausalLM") if is_plain else _from_parts(checkpoint)
        with torch.inference_mode():
            result: Array = model(torch.tensor([list(tokens)]), use_cache=False).logits[0].float().numpy()
    return result


def vectors(checkpoint: Checkpoint, model: Any, texts: Sequence[str]) -> Array:
    """Vectors `[texts, hidden]` of an encoder, pooled and normalised as `model` does it."""
    if not _is_folder(checkpoint):
        raise Unavailable("an encoder is compared only where it is a folder of safetensors")
    pooling = str(model.pooling)
    if pooling not in ("mean", "cls"):
        raise Unavailable(f"{pooling} pooling is not known here")
    with _quiet():
        import torch

        reference = _from_folder(checkpoint, "AutoModel")
        rows = []
        for text in texts:
            ids = torch.tensor([model.tokenizer.encode(text, limit=model.limit)])
            with torch.inference_mode():
                hidden = reference(input_ids=ids).last_hidden_state[0].float().numpy()
            rows.append(hidden.mean(0) if pooling == "mean" else hidden[0])
    pooled = np.stack(rows)
    return pooled / np.linalg.norm(pooled, axis=1, keepdims=True) if model.normalize else pooled


def states(checkpoint: Checkpoint, tokens: Sequence[int]) -> Array:
    """Hidden states `[seq, hidden]` of an encoder."""
    if not _is_folder(checkpoint):
        raise Unavailable("an encoder is compared only where it is a folder of safetensors")
    with _quiet():
        import torch

        with torch.inference_mode():
            output = _from_folder(checkpoint, "AutoModel")(torch.tensor([list(tokens)]))
        hidden: Array = output.last_hidden_state[0].float().numpy()
    return hidden


def image_vectors(checkpoint: Checkpoint, pixels: Sequence[Array]) -> Array:
    """Vectors `[images, hidden]` of a vision model, from preprocessed images."""
    with _quiet():
        import torch

        model = _from_folder(checkpoint, "AutoModel")
        model = getattr(model, "vision_model", model)  # of a model that also encodes texts
        with torch.inference_mode():
            rows = [model(torch.from_numpy(image[None])) for image in pixels]
        pooled = checkpoint.family.name != "vit"  # ViT's pooler is used only in training
        pooled_rows = [(row.pooler_output if pooled else row.last_hidden_state[:, 0])[0] for row in rows]
    return np.stack([vector.float().numpy() for vector in pooled_rows])


def _is_folder(checkpoint: Checkpoint) -> bool:
    return checkpoint.file.format == "safetensors"


def _from_folder(checkpoint: Checkpoint, kind: str) -> Any:
    import torch
    import transformers

    if checkpoint.config.quantization is not None:
        raise Unavailable("transformers reads quantised weights as bf16 where there is no GPU")
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    # f32 whatever the file's type, because rlx computes in f32
    return getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


def _from_parts(checkpoint: Checkpoint) -> Any:
    """A transformers model with the weights as rlx reads them."""
    import torch
    import transformers

    family, c = checkpoint.family, checkpoint.config
    if family.name not in CLASSES:
        raise Unavailable(f"a {family.name} out of a {checkpoint.file.format} file is not compared")
    if checkpoint.rope_factors is not None:
        raise Unavailable("transformers takes no table of RoPE factors from a GGUF file")
    name = CLASSES[family.name]
    settings = getattr(transformers, f"{name}Config")(
        vocab_size=c.vocab, hidden_size=c.dim, intermediate_size=c.ffn, num_hidden_layers=c.layers,
        num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, head_dim=c.head_dim, rms_norm_eps=c.eps,
        max_position_embeddings=c.context, tie_word_embeddings=c.tied,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_base, **(c.rope_scaling or {})},
    )  # fmt: skip
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(settings).eval()
    weights = {key: torch.from_numpy(_weight(checkpoint, key)) for key in list(checkpoint.weights.keys())}
    if c.tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(settings)  # its frequencies are not weights
    return model


def _weight(checkpoint: Checkpoint, key: str) -> Array:
    """A weight as f32; rows of queries and keys are reordered from pairs to halves."""
    type_, c = checkpoint.weights.type(key), checkpoint.config
    shape = tuple(int(n) for n in type_.shape)
    values = dequantise(checkpoint.weights.array(key), type_.dtype, int(np.prod(shape))).reshape(shape)
    if getattr(c, "pairs", False) and ("q_proj" in key or "k_proj" in key):
        pairs = values.reshape(-1, c.head_dim // 2, 2, *shape[1:])
        values = pairs.swapaxes(1, 2).reshape(shape)
    return np.array(values, np.float32)  # torch needs writable memory


def _check_memory(checkpoint: Checkpoint) -> None:
    needed = int(4 * OVERHEAD * sum(checkpoint.file.entry(n).size for n in checkpoint.file.names))
    free = free_memory()
    if free is not None and needed > free:
        raise Unavailable(f"needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free")


def free_memory() -> int | None:
    """Available memory in bytes, or None if the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the libraries, and keep them off the network."""
    before = {
        n: os.environ.get(n) for n in ("HF_HUB_OFFLINE", "TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS")
    }
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
