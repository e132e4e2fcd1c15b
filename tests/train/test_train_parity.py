"""Training against torch: its optimisers, and the losses of a Llama of transformers from the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import char_model
import numpy as np
import pytest
from test_step import batches, regression, start

from rlx import random
from rlx.train import Optimiser, adamw, sgd, step

pytestmark = pytest.mark.parity
torch: Any = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are so small that torch's threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


CASES: dict[str, tuple[Optimiser, Callable[[Any], Any]]] = {
    "adamw": (adamw(0.02), lambda p: torch.optim.AdamW(p, lr=0.02)),
    "adamw, all settings": (
        adamw(0.03, (0.8, 0.95), 1e-5, 0.2),
        lambda p: torch.optim.AdamW(p, lr=0.03, betas=(0.8, 0.95), eps=1e-5, weight_decay=0.2),
    ),
    "sgd": (sgd(0.1, weight_decay=0.05), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.05)),
    "momentum": (sgd(0.05, 0.9), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
    "nesterov": (sgd(0.05, 0.9, nesterov=True), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True)),
}


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("case", CASES)
def test_an_optimiser_does_what_torch_does(case: str, clip: float | None) -> None:
    optimiser, make = CASES[case]
    train = step(regression(), optimiser, clip=clip)
    train.set_params(start())
    p = {n: torch.nn.Parameter(torch.from_numpy(a.copy())) for n, a in start().items()}
    peer = make(list(p.values()))
    for batch in batches(20):
        x, y = (torch.from_numpy(batch[n]) for n in "xy")
        loss = ((torch.tanh(x @ p["w"]) @ p["v"] + p["b"] - y) ** 2).mean()
        peer.zero_grad()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(list(p.values()), clip)
        peer.step()
        assert train.run(batch) == pytest.approx(loss.item(), rel=1e-5)
    for name, want in p.items():
        np.testing.assert_allclose(train.params[name], want.detach().numpy(), rtol=0, atol=1e-5)


SIZES = {"vocab": 65, "dim": 48, "layers": 2, "heads": 4, "context": 32}


def hugging_face(weights: Mapping[str, Any]) -> Any:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=SIZES["vocab"], hidden_size=SIZES["dim"], num_hidden_layers=SIZES["layers"],
        intermediate_size=weights["model.layers.0.mlp.gate_proj.weight"].shape[0],
        num_attention_heads=SIZES["heads"], num_key_value_heads=SIZES["heads"], rms_norm_eps=char_model.EPS,
        max_position_embeddings=SIZES["context"], tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict({n: torch.from_numpy(a.copy()) for n, a in weights.items()})
    return model.train()


@pytest.mark.parametrize("clip", [None, 1.0])
def test_the_losses_of_a_llama_are_those_of_torch(clip: float | None) -> None:
    flow = char_model.decoder(**SIZES)
    weights = flow.init(random.key(0))
    built = flow.custom(char_model.mean_loss).build(weights)
    train = step(built.module, adamw(3e-3, weight_decay=0.1), list(weights), clip=clip)
    train.set_params(built.params)
    model = hugging_face(weights)
    peer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    rng = np.random.default_rng(0)
    words = rng.integers(0, SIZES["vocab"], (12, 33)).astype(np.int32)  # few, so that there is something to learn
    losses, theirs = [], []
    for _ in range(50):
        rows = words[rng.integers(0, len(words), 4)]
        losses.append(train.run({"tokens": rows[:, :-1].copy(), "labels": rows[:, 1:].copy()}))
        logits = model(torch.from_numpy(rows[:, :-1].astype(np.int64))).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.from_numpy(rows[:, 1:].astype(np.int64)).flatten()
        )
        peer.zero_grad()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        peer.step()
        theirs.append(loss.item())
    assert losses[-1] < losses[0] - 1
    np.testing.assert_allclose(losses, theirs, rtol=0, atol=1e-3)
