"""Small encoders whose answers `transformers` gave once, so that tests need neither it nor torch.

`python tests/golden_encoders.py` writes `tests/fixtures/encoders/*.json`: a configuration, the shapes of the
weights, and what the model gave. The weights and inputs are not stored: they are numbers that any machine computes the
same way, from their names. Needs torch, transformers and Pillow.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
FOLDER = Path(__file__).parent / "fixtures" / "encoders"
LENGTHS = (11, 4, 1)
TEXT: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40,
    "max_position_embeddings": 32,
}  # fmt: skip
IMAGE = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 24, "patch_size": 8}
TOKENS = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", TEXT),
    "roberta": ("Roberta", {**TEXT, "type_vocab_size": 1, "pad_token_id": 1}),
    "mpnet": ("MPNet", {**TEXT, "pad_token_id": 1}),
    "nomic_bert": ("NomicBert", TEXT),
    "modernbert": ("ModernBert", {**TEXT, **TOKENS, "num_hidden_layers": 3, "local_attention": 6}),
    "embeddinggemma": (
        "Gemma3Text",
        {
            **TEXT, "num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 6,
            "use_bidirectional_attention": True, "query_pre_attn_scalar": 8, "bos_token_id": 2, "eos_token_id": 1,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "vit": ("ViT", {**IMAGE, "intermediate_size": 40}),
    "dinov2": ("Dinov2", {**IMAGE, "image_size": 40}),
    "dinov2_registers": ("Dinov2WithRegisters", {**IMAGE, "image_size": 40, "use_swiglu_ffn": True}),
    "siglip": ("SiglipVision", {**IMAGE, "intermediate_size": 40}),
}  # fmt: skip
PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViT", {"size": {"height": 24, "width": 24}}),
    "dinov2": ("Bit", {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}}),
    "dinov2_registers": ("Bit", {"size": {"shortest_edge": 24}, "crop_size": {"height": 16, "width": 24}}),
    "siglip": ("Siglip", {"size": {"height": 24, "width": 24}}),
}


# -- numbers that any machine computes the same way ------------------------------------------------------------------
def numbers(name: str, shape: Sequence[int]) -> Array:
    """Uniform in -1 to 1 (SplitMix64 of the name and the place)."""
    with np.errstate(over="ignore"):
        count = np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint64)
        x = (count + np.uint64(zlib.crc32(name.encode()) << 20)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    result: Array = ((x >> np.uint64(40)).astype(np.float64) / (1 << 23) - 1).reshape(shape)
    return result


def weights(shapes: Mapping[str, Sequence[int]]) -> dict[str, Array]:
    """Weights by name: norms and scales about 1, matrices such that activations keep their size."""
    arrays = {}
    for name, shape in shapes.items():
        x = numbers(name, shape)
        if name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "Norm.weight", "ln.weight", "lambda1")):
            x = 1 + 0.5 * x
        elif len(shape) == 2 and "embedding" not in name:
            x = x * 1.7 * shape[-1] ** -0.5
        arrays[name] = x.astype(np.float32)
    return arrays


def batch() -> dict[str, Array]:
    """Texts of unequal length."""
    longest = max(LENGTHS)
    tokens = (np.abs(numbers("tokens", (len(LENGTHS), longest))) * 35).astype(np.int32) + 4
    mask = (np.arange(longest) < np.array(LENGTHS)[:, None]).astype(np.float32)
    positions = np.repeat(np.arange(longest, dtype=np.int32)[None], len(LENGTHS), axis=0)
    return {"tokens": tokens, "attention_mask": mask, "positions": positions, "token_types": np.zeros_like(tokens)}


def picture() -> Array:
    """[24, 37, 3] bytes: it is resized along one axis, or cut."""
    return np.asarray((numbers("picture", (24, 37, 3)) + 1) * 127.5).astype(np.uint8)


def write_folder(folder: Path, golden: Mapping[str, Any]) -> None:
    """The model as files."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights(golden["shapes"]), str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(golden["config"]))
    if "processor" in golden:
        (folder / "preprocessor_config.json").write_text(json.dumps(golden["processor"]))


# -- what transformers gives -----------------------------------------------------------------------------------------
def make(name: str, folder: Path) -> dict[str, Any]:
    import torch
    import transformers
    from safetensors.numpy import load_file

    family, settings = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**settings)
    kind = getattr(transformers, f"{family}Model")
    kind(config).save_pretrained(folder)
    shapes = {n: list(a.shape) for n, a in load_file(folder / "model.safetensors").items()}
    golden: dict[str, Any] = {"config": json.loads((folder / "config.json").read_text()), "shapes": shapes}
    write_folder(folder, golden)
    model = kind.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        if name not in PROCESSORS:
            inputs = batch()
            result = model(torch.from_numpy(inputs["tokens"]).long(), torch.from_numpy(inputs["attention_mask"]))
            states = result.last_hidden_state.numpy()
            return golden | {"states": [_short(s[:n]) for s, n in zip(states, LENGTHS, strict=True)]}
        kind_of, said = PROCESSORS[name]
        processor = getattr(transformers, f"{kind_of}ImageProcessorPil")(**said)
        pixels = np.asarray(processor(picture(), input_data_format="channels_last")["pixel_values"])
        result = model(torch.from_numpy(pixels).float())
        states = result.last_hidden_state[0].numpy()
        pooled = states[0] if family == "ViT" else result.pooler_output[0].numpy()
        processor.save_pretrained(folder)
        golden["processor"] = json.loads((folder / "preprocessor_config.json").read_text())
        return golden | {"pixels": _short(pixels[0]), "pooled": _short(pooled), "states": _short(states)}


def _short(array: Array) -> Any:
    return [_short(part) for part in array] if array.ndim else float(f"{float(array):.6g}")


def main() -> None:
    import tempfile

    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or MODELS:
        with tempfile.TemporaryDirectory() as folder:
            golden = make(name, Path(folder))
        (FOLDER / f"{name}.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
