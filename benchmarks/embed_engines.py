"""What `embed.py` asks of a library: sentences to vectors, timed all at once or one by one. Runs in its own process.

A case's subject is a folder with the sentences of each case, the scores of their pairs, and what `minilm_files` needs.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import minilm_files
import numpy as np
from minilm_files import EPSILON, LIMIT, Batch
from worker import Case, Prepared

BATCH = 32  # for libraries that are fed batches, and the default of sentence-transformers
CHECKED = 100  # sentences whose vectors are compared

Embed = Callable[[Sequence[str]], np.ndarray]
Pool = Callable[[Sequence[Batch]], Sequence[np.ndarray]]  # means over tokens of each batch
_engines: dict[str, Embed] = {}  # what the cases of a process share


def prepare(make: Callable[[Path, int], Embed], case: Case, threads: int) -> Prepared:
    # Sentences are tokenised in parallel by the same library everywhere; these bound it.
    os.environ |= {"RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true"}
    folder = Path(case.subject)
    if not _engines:
        _engines[case.subject] = make(folder, threads)
    embed = _engines[case.subject]
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

    note = f"Spearman {agreement(embed(texts), folder):.4f}" if case.name == "all" else ""
    timing = one_by_one if case.name == "one" else at_once
    return Prepared(wake, lambda: embed(texts[:CHECKED]), note=note, seconds=timing)


def agreement(vectors: np.ndarray, folder: Path) -> float:
    """Spearman's correlation of what people say of pairs with the cosines: first halves of the pairs come first."""
    from scipy.stats import spearmanr

    scores: list[float] = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
    first, second = vectors[: len(scores)], vectors[len(scores) :]
    return float(spearmanr((first * second).sum(1), scores).statistic)


# ---------------------------------------------------------------------------------------------------------------------
# The libraries.


def rlx_embed(folder: Path, threads: int, *, precision: str) -> Embed:
    import rlx

    model: Any = rlx.load(folder / "model", threads=threads, precision=precision)
    embed: Embed = model.embed
    return embed


def sentence_transformers_embed(folder: Path, threads: int) -> Embed:
    """At its defaults, which sort sentences by length."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    model: Any = SentenceTransformer(str(folder / "model"), device="cpu")
    return lambda texts: model.encode(list(texts), show_progress_bar=False)


def onnxruntime_embed(folder: Path, threads: int, *, file: Callable[[Path], Path]) -> Embed:
    """At its own graph optimisations: those of onnxruntime.transformers made it slower."""
    session = onnxruntime_session(file(folder), threads)

    def pool(work: Sequence[Batch]) -> list[np.ndarray]:
        return [session.run(None, {"input_ids": tokens, "attention_mask": mask})[0] for tokens, mask in work]

    return batched(folder, pool)


def onnxruntime_session(path: Path, threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def openvino_embed(folder: Path, threads: int, *, file: Callable[[Path], Path]) -> Embed:
    """One batch with all threads; several at once, each with a thread of its own, which is faster."""
    import openvino

    path = file(folder)
    request: Any = openvino_model(path, threads).create_infer_request()
    queue: Any = openvino.AsyncInferQueue(openvino_model(path, threads, streams=threads), threads)
    outputs: dict[int, np.ndarray] = {}
    queue.set_callback(lambda done, at: outputs.__setitem__(at, done.get_output_tensor().data.copy()))

    def pool(work: Sequence[Batch]) -> list[np.ndarray]:
        if len(work) == 1:
            tokens, mask = work[0]
            return [request.infer({"input_ids": tokens, "attention_mask": mask}, share_outputs=True)[0]]
        for at, (tokens, mask) in enumerate(work):
            queue.start_async({"input_ids": tokens, "attention_mask": mask}, at)
        queue.wait_all()
        return [outputs[at] for at in range(len(work))]

    return batched(folder, pool)


def openvino_model(path: Path, threads: int, streams: int = 1) -> Any:
    import openvino

    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "NUM_STREAMS": streams}
    return openvino.Core().compile_model(path, "CPU", settings)


def batched(folder: Path, pool: Pool) -> Embed:
    """Means over tokens made sentences to vectors: sorted by length, which is the best case of such a library."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    tokenizer.enable_truncation(LIMIT)
    tokenizer.no_padding()

    def embed(texts: Sequence[str]) -> np.ndarray:
        rows = [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts))]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        parts = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
        pooled = np.concatenate(pool([minilm_files.padded([rows[i] for i in part]) for part in parts]))
        vectors = np.empty_like(pooled)
        vectors[order] = pooled / np.maximum(np.linalg.norm(pooled, axis=1, keepdims=True), EPSILON)
        return vectors

    return embed


def engine(make: Callable[..., Embed], **options: Any) -> Callable[[Case, int], Prepared]:
    return functools.partial(prepare, functools.partial(make, **options))


rlx = engine(rlx_embed, precision="f32")
rlx_int8 = engine(rlx_embed, precision="int8")
sentence_transformers = engine(sentence_transformers_embed)
onnxruntime = engine(onnxruntime_embed, file=minilm_files.onnx_file)
onnxruntime_int8 = engine(onnxruntime_embed, file=minilm_files.onnx_int8_file)
openvino = engine(openvino_embed, file=minilm_files.onnx_file)
openvino_int8 = engine(openvino_embed, file=minilm_files.openvino_int8_file)
