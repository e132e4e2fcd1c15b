"""Random small encoders of `transformers`: saved as it saves them, and compared with in batches of unequal texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.models.load import open_checkpoint

Array = np.ndarray[Any, Any]
TOLERANCE = 2e-4


def save(
    folder: Path, family: str, *, dtype: str = "float32", seed: int = 0, kind: str = "Model", **settings: Any
) -> Any:
    """A model with random weights in a folder; it computes in float32, from the weights as saved."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    torch.manual_seed(seed)
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"this version of transformers has no {family}")
    config = getattr(transformers, f"{family}Config")(**settings)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}{kind}")(config).eval()
    randomise(model)
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(folder)
    return model.float()


def randomise(model: Any) -> None:
    """Biases begin as zeros, norms and scales as ones, and most weights so small that layers do hardly anything."""
    import torch

    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("bias") and value.ndim == 1:
                value.normal_(0, 0.3)
            elif "norm" in name.lower() or "lambda" in name or "emb_ln" in name:
                value.normal_(1, 0.3)
            else:
                value.normal_(0, 0.3 if "embedding" in name or value.ndim != 2 else value.shape[-1] ** -0.5)


def difference(actual: Array, wanted: Array) -> float:
    return float(np.abs(actual - wanted).max() / np.abs(wanted).max())


def check(folder: Path, model: Any, *, length: int = 75, avoid: int | None = None) -> None:
    """The same states at every token of a batch of unequal texts: what is masked reaches no other token."""
    import torch

    checkpoint = open_checkpoint(folder)
    built = checkpoint.family.flow(checkpoint.config).build(checkpoint.weights)
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, checkpoint.config.vocab, (4, length)).astype(np.int32)
    mask = np.ones(tokens.shape, np.float32)
    mask[0, 9:], mask[2, 1:], mask[3, length - 10 :] = 0, 0, 0
    if avoid is not None:  # a token that means padding lies where padding is, and nowhere else
        tokens[tokens == avoid] = avoid + 1
        tokens[mask == 0] = avoid
    inputs = {
        "tokens": tokens, "token_types": np.zeros_like(tokens), "attention_mask": mask,
        "positions": np.repeat(np.arange(length, dtype=np.int32)[None], 4, axis=0),
    }  # fmt: skip
    with torch.no_grad():
        wanted = model(torch.from_numpy(tokens).long(), torch.from_numpy(mask)).last_hidden_state.numpy()
    seen = mask.astype(bool)
    for device in ("cpu", "reference"):
        f = built.compile(device)
        (actual,) = f.run({name: inputs[name] for name in f.input_types})
        assert difference(actual[seen], wanted[seen]) < TOLERANCE


def embedded(folder: Path, model: Any, texts: list[str]) -> None:
    """`embed` gives the mean of the states of each text alone, in any company."""
    import torch

    ours = rlx.load(folder)
    assert isinstance(ours, rlx.EmbeddingModel)
    rows = [ours.tokenizer.encode(text) for text in texts]
    with torch.no_grad():
        wanted = np.stack([model(torch.tensor([row])).last_hidden_state[0].mean(0).numpy() for row in rows])
    actual = ours.embed(texts, normalize=False)
    assert difference(actual, wanted) < TOLERANCE
    for text, row in zip(texts, actual, strict=True):
        assert np.array_equal(ours.embed(text, normalize=False), row)
