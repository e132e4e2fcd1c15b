"""Random small decoders of `transformers`: saved as it saves them, and compared with in every way of reading tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_llama import Driver, difference

from rlx.models.load import open_checkpoint

Array = np.ndarray[Any, Any]
TOLERANCE = 2e-4
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip


def save(folder: Path, family: str, *, dtype: str = "float32", shards: str | None = None, **settings: Any) -> Any:
    """A model with random weights in a folder; what it gives is computed in float32 from the weights as saved."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    torch.manual_seed(0)
    kind = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    config = kind(**{**SIZES, **settings})
    make = getattr(transformers, f"{family}ForCausalLM", None) or getattr(transformers, f"{family}LMHeadModel")
    model = make(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():  # biases begin as zeros and norms as ones: nothing to see
            if name.endswith("bias"):
                value.normal_()
            elif "norm" in name or ".ln_" in name:
                value.normal_(0 if family.startswith("Gemma") else 1, 0.3)
            else:
                value.mul_(4)
    model.to(getattr(torch, dtype)).save_pretrained(folder, **({"max_shard_size": shards} if shards else {}))
    # read again: `.to` has rounded the frequencies of RoPE too, which are in no file
    return type(model).from_pretrained(folder, dtype=torch.float32).eval()


def logits(model: Any, tokens: list[int]) -> Array:
    """[seq, vocab]."""
    import torch

    with torch.no_grad():
        result: Array = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    return result


def check(folder: Path, model: Any, *, context: int | None = None, length: int = 90) -> None:
    """The same logits at every position: a whole prompt, in chunks, token by token, and among unequal neighbours."""
    checkpoint = open_checkpoint(folder)
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, checkpoint.config.vocab, length).tolist()
    wanted = logits(model, tokens)
    for chunk in (length, 37, 1):
        driver = Driver.of(checkpoint, context=context)
        assert difference(driver.by_chunks(tokens, chunk), wanted) < TOLERANCE
    others = [tokens, tokens[:17][::-1], tokens[:1]]
    if context is not None:  # kinds of RoPE that go by length: all rows as long as the context
        others = [tokens, tokens[::-1]]
    driver = Driver.of(checkpoint, batch=len(others), context=context)
    for actual, row in zip(driver.forward(others, [0] * len(others)), others, strict=True):
        assert difference(actual, logits(model, row)) < TOLERANCE
    if context is None:  # and further, each row from where it is
        actual = driver.forward([[5], [6, 7, 8], [9, 10]], [len(row) for row in others])
        for more, got, row in zip(([5], [6, 7, 8], [9, 10]), actual, others, strict=True):
            assert difference(got, logits(model, row + more)[len(row) :]) < TOLERANCE
