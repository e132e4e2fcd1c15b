"""all-MiniLM-L6-v2 as other libraries want it: an ONNX file with the pooling inside, and its 8-bit forms.

Files are made once, in the folder that a benchmark shares among its processes, by the first that needs them. `folder`
has a link `model` to the model as Hugging Face has it, and `calibration.json`, texts that 8-bit ranges are found on.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

LIMIT = 256  # tokens of a sentence that the model reads
EPSILON = 1e-12
Batch = tuple[np.ndarray, np.ndarray]  # token ids and mask, i64[batch, seq]


def torch_encoder(folder: Path, **options: Any) -> Any:
    """Token ids and mask to the mean over tokens, as a torch module."""
    import torch
    import transformers

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert: Any = transformers.AutoModel.from_pretrained(folder / "model", **options).eval()

        def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            states = self.bert(input_ids=tokens, attention_mask=mask).last_hidden_state
            counts = mask.unsqueeze(-1).to(states.dtype)
            pooled: torch.Tensor = (states * counts).sum(1) / counts.sum(1)
            return pooled

    return Encoder().eval()


def onnx_file(folder: Path) -> Path:
    """The same weights as ONNX, made by torch."""
    path = folder / "model.onnx"
    if path.exists():
        return path
    import torch

    tokens, mask = torch.ones(2, 7, dtype=torch.long), torch.ones(2, 7, dtype=torch.long)
    mask[0, 4:] = 0  # padding in the example, so that nothing of the mask is traced away
    input_names = ["input_ids", "attention_mask"]
    axes = {name: {0: "batch", 1: "seq"} for name in input_names} | {"pooled": {0: "batch"}}
    encoder = torch_encoder(folder, attn_implementation="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that tracing may go wrong; the vectors are compared
        torch.onnx.export(
            encoder,
            (tokens, mask),
            str(path),
            input_names=input_names,
            output_names=["pooled"],
            dynamic_axes=axes,
            dynamo=False,
        )
    return path


def onnx_int8_file(folder: Path) -> Path:
    """ONNX Runtime's dynamic quantisation at its defaults: signed weights, a range a tensor, ranges of activations."""
    path = folder / "model-int8.onnx"
    if path.exists():
        return path
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(str(onnx_file(folder)), str(path), weight_type=QuantType.QInt8)
    return path


def openvino_int8_file(folder: Path) -> Path:
    """NNCF's post-training quantisation for transformers, calibrated on real sentences."""
    path = folder / "model-int8.xml"
    if path.exists():
        return path
    import nncf
    import openvino

    texts: list[str] = json.loads((folder / "calibration.json").read_text(encoding="utf-8"))
    samples = [{"input_ids": tokens, "attention_mask": mask} for tokens, mask in batches(folder, texts, 1)]
    model = openvino.Core().read_model(onnx_file(folder))
    dataset = nncf.Dataset(samples)
    quantised = nncf.quantize(model, dataset, model_type=nncf.ModelType.TRANSFORMER, subset_size=len(samples))
    openvino.save_model(quantised, path, compress_to_fp16=False)
    return path


def batches(folder: Path, texts: Sequence[str], size: int) -> Iterator[Batch]:
    """Texts in order, `size` at a time, padded to the longest."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    tokenizer.enable_truncation(LIMIT)
    tokenizer.no_padding()
    rows = [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts))]
    for start in range(0, len(rows), size):
        yield padded(rows[start : start + size])


def padded(rows: Sequence[Sequence[int]]) -> Batch:
    tokens, mask = (np.zeros((len(rows), max(map(len, rows))), np.int64) for _ in range(2))
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
        mask[i, : len(row)] = 1
    return tokens, mask
