"""What `embed.py` asks of a library: sentences to vectors, timed all at once or one by one. Runs in its own process.

A case's subject is a folder with the sentences of each case, a link to the model, and the ONNX file once it is made.
"""

from __future__ import annotations

import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from worker import Case, Prepared

BATCH = 32  # for libraries that are fed batches, and the default of sentence-transformers
LIMIT = 256  # tokens of a sentence that the model reads
CHECKED = 100  # sentences whose vectors are compared

Embed = Callable[[Sequence[str]], np.ndarray]
_made: dict[str, Embed] = {}  # what the cases of a process share


def rlx(case: Case, threads: int) -> Prepared:
    return prepare(rlx_embed, case, threads)


def sentence_transformers(case: Case, threads: int) -> Prepared:
    return prepare(sentence_transformers_embed, case, threads)


def onnxruntime(case: Case, threads: int) -> Prepared:
    return prepare(onnxruntime_embed, case, threads)


def openvino(case: Case, threads: int) -> Prepared:
    return prepare(openvino_embed, case, threads)


def prepare(make: Callable[[Path, int], Embed], case: Case, threads: int) -> Prepared:
    # Sentences are tokenised in parallel by the same library everywhere; these bound it.
    os.environ |= {"RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true"}
    folder = Path(case.subject)
    if not _made:
        _made[case.subject] = make(folder, threads)
    embed = _made[case.subject]
    texts: list[str] = json.loads((folder / f"{case.name}.json").read_text(encoding="utf-8"))

    def wake() -> object:
        return embed(texts[:BATCH])

    def at_once() -> float:
        wake()
        return lap(texts)

    def one_by_one() -> float:
        return statistics.median(lap([text]) for text in texts)

    def lap(some: Sequence[str]) -> float:
        begin = time.perf_counter()
        embed(some)
        return time.perf_counter() - begin

    return Prepared(wake, lambda: embed(texts[:CHECKED]), seconds=one_by_one if case.name == "one" else at_once)


# ---------------------------------------------------------------------------------------------------------------------
# The libraries.


def rlx_embed(folder: Path, threads: int) -> Embed:
    import rlx

    model: Any = rlx.load(folder / "model", threads=threads)
    embed: Embed = model.embed
    return embed


def sentence_transformers_embed(folder: Path, threads: int) -> Embed:
    """At its defaults, which sort sentences by length."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    model: Any = SentenceTransformer(str(folder / "model"), device="cpu")
    return lambda texts: model.encode(list(texts), show_progress_bar=False)


def onnxruntime_embed(folder: Path, threads: int) -> Embed:
    """At its own graph optimisations: those of onnxruntime.transformers made it slower."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session: Any = onnxruntime.InferenceSession(onnx_file(folder), options, providers=["CPUExecutionProvider"])
    return batched(folder, lambda tokens, mask: session.run(None, {"input_ids": tokens, "attention_mask": mask})[0])


def openvino_embed(folder: Path, threads: int) -> Embed:
    import openvino

    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    request: Any = openvino.Core().compile_model(onnx_file(folder), "CPU", settings).create_infer_request()
    return batched(
        folder,
        lambda tokens, mask: request.infer({"input_ids": tokens, "attention_mask": mask}, share_outputs=True)[0],
    )


def batched(folder: Path, hidden: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Embed:
    """Tokens to hidden states made sentences to vectors: sorted by length, which is the best case of such a library."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    tokenizer.enable_truncation(LIMIT)
    tokenizer.no_padding()

    def embed(texts: Sequence[str]) -> np.ndarray:
        rows = [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts))]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        vectors: list[np.ndarray] = [np.empty(0)] * len(rows)
        for start in range(0, len(order), BATCH):
            picked = order[start : start + BATCH]
            width = len(rows[picked[-1]])
            tokens, mask = (np.zeros((len(picked), width), np.int64) for _ in range(2))
            for at, i in enumerate(picked):
                tokens[at, : len(rows[i])] = rows[i]
                mask[at, : len(rows[i])] = 1
            counts = mask.astype(np.float32)
            pooled = np.matmul(counts[:, None], hidden(tokens, mask))[:, 0] / counts.sum(1, keepdims=True)
            pooled /= np.maximum(np.linalg.norm(pooled, axis=1, keepdims=True), 1e-12)
            for at, i in enumerate(picked):
                vectors[i] = pooled[at]
        return np.stack(vectors)

    return embed


def onnx_file(folder: Path) -> str:
    """The same weights as ONNX, made by torch; the first that needs the file makes it."""
    path = folder / "model.onnx"
    if path.exists():
        return str(path)
    import torch
    import transformers

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert: Any = transformers.AutoModel.from_pretrained(
                folder / "model", attn_implementation="eager"
            ).eval()

        def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            states: torch.Tensor = self.bert(input_ids=tokens, attention_mask=mask).last_hidden_state
            return states

    tokens, mask = torch.ones(2, 7, dtype=torch.long), torch.ones(2, 7, dtype=torch.long)
    mask[0, 4:] = 0  # padding in the example, so that nothing of the mask is traced away
    given, made = ["input_ids", "attention_mask"], ["hidden"]
    names = {"input_names": given, "output_names": made}
    axes = {name: {0: "batch", 1: "seq"} for name in (*given, *made)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that tracing may go wrong; the vectors are compared
        torch.onnx.export(Encoder().eval(), (tokens, mask), str(path), **names, dynamic_axes=axes, dynamo=False)
    return str(path)
