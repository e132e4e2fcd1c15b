"""Gradients of whole model families, and Hessian products of a layer, against torch's autograd."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.models.load import open_checkpoint
from rlx.transforms import grad, hvp, jvp, value_and_grad

pytestmark = pytest.mark.parity
torch: Any = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")

Array = np.ndarray[Any, Any]
TOLERANCE = 1e-4
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
    "max_position_embeddings": 64,
}  # fmt: skip


def saved(folder: Path, name: str, kind: str, **settings: Any) -> Any:
    """A random model of transformers, with nothing at its first value, in a folder."""
    torch.manual_seed(0)
    kind_of = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    config = kind_of(**SIZES | settings)
    model = getattr(transformers, f"{name}{kind}")(config).eval()
    with torch.no_grad():
        for label, value in model.named_parameters():
            if label.endswith("bias"):
                value.normal_(0, 0.3)
            elif "norm" in label.lower():
                value.normal_(0 if name.startswith("Gemma") else 1, 0.3)
            else:
                value.mul_(4)
    model.save_pretrained(folder)
    return model


def graph_of(folder: Path) -> tuple[rlx.Graph, dict[str, Array]]:
    """The family's graph without a cache, all positions of its output, and its weights."""
    checkpoint = open_checkpoint(folder)
    arguments = (checkpoint.config, 64) if checkpoint.family.kind == "decoder" else (checkpoint.config,)
    flow = checkpoint.family.flow(*arguments)
    stages = tuple(s for s in flow.stages if type(s).__name__ not in ("GatherLastToken", "Pool", "Normalize"))
    built = dataclasses.replace(flow, cache=None, stages=stages).build(checkpoint.weights)
    graph = built.into_graph()
    return graph, {n.attrs["name"]: np.asarray(built.params[n.attrs["name"]]) for n in graph.params}


def in_f64(graph: rlx.Graph) -> rlx.Graph:
    return rlx.Graph.parse(graph.text(full=True).replace("f32", "f64"))


def run(graph: rlx.Graph, inputs: dict[str, Array], params: dict[str, Array], device: str) -> list[Array]:
    f = rlx.compile(graph, device)
    f.set_params(params)
    return list(f.run(inputs))


def close(actual: Array, wanted: Any, where: str, tolerance: float = TOLERANCE) -> None:
    wanted = wanted.detach().numpy()
    assert actual.shape == wanted.shape, where
    error = np.abs(actual - wanted).max() / np.abs(wanted).max()
    assert error < tolerance, f"{where}: {error:.1e}"


def trained(model: Any, graph: rlx.Graph) -> dict[str, Any]:
    """The parameters of torch by the names of the graph."""
    theirs = dict(model.named_parameters())
    names = [n.attrs["name"] for n in graph.params if n.attrs["name"] in theirs]
    assert len(names) > 0.7 * len(theirs)  # some are joined there and apart here: q, k and v, or experts
    return {n: theirs[n] for n in names}


HEADS = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 7}  # of Gemma: softcaps come with it
EXPERTS = {
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "mlp_only_layers": [],
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": False}),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 7}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 3}),
    "qwen2 tied": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 8}),
    "gemma2": ("Gemma2", {"num_key_value_heads": 2, **HEADS}),
    "gemma3": ("Gemma3", {"num_key_value_heads": 2, **HEADS}),
    "phi3": ("Phi3", {"num_key_value_heads": 2, "pad_token_id": 0}),
    "mixtral": ("Mixtral", {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3 moe": ("Qwen3Moe", {"num_key_value_heads": 2, **EXPERTS}),
}


@pytest.mark.parametrize("which", FAMILIES)
@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_a_decoder_has_the_gradients_of_torch(which: str, device: str, tmp_path: Path) -> None:
    family, settings = FAMILIES[which]
    model = saved(tmp_path, family, "ForCausalLM", attn_implementation="eager", **settings)
    graph, params = graph_of(tmp_path)
    labels = graph.input("labels", ("batch", "seq"), "i32")
    graph.set_outputs([graph.outputs[0].cross_entropy(labels).mean()])
    rng = np.random.default_rng(0)
    tokens, wanted = (rng.integers(0, 96, (2, 11)).astype(np.int32) for _ in range(2))
    theirs = trained(model, graph)
    logits = model(torch.tensor(tokens.astype(np.int64)), use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 96), torch.tensor(wanted.astype(np.int64)).reshape(-1))
    loss.backward()
    results = run(value_and_grad(graph, list(theirs)), {"tokens": tokens, "labels": wanted}, params, device)
    close(results[0], loss, "loss")
    for (name, value), ours in zip(theirs.items(), results[1:], strict=True):
        close(ours, value.grad, name)


def test_a_decoder_has_the_gradients_of_torch_in_f64(tmp_path: Path) -> None:
    model = saved(tmp_path, "Llama", "ForCausalLM", num_key_value_heads=2).double()
    graph, params = graph_of(tmp_path)
    graph = in_f64(graph)
    labels = graph.input("labels", ("batch", "seq"), "i32")
    graph.set_outputs([graph.outputs[0].cross_entropy(labels).mean()])
    rng = np.random.default_rng(0)
    tokens, wanted = (rng.integers(0, 96, (2, 11)).astype(np.int32) for _ in range(2))
    theirs = trained(model, graph)
    logits = model(torch.tensor(tokens.astype(np.int64)), use_cache=False).logits
    torch.nn.functional.cross_entropy(
        logits.reshape(-1, 96), torch.tensor(wanted.astype(np.int64)).reshape(-1)
    ).backward()
    wide = {n: a.astype(np.float64) for n, a in params.items()}
    gradients = run(grad(graph, list(theirs)), {"tokens": tokens, "labels": wanted}, wide, "reference")
    for (name, value), ours in zip(theirs.items(), gradients, strict=True):
        close(ours, value.grad, name, 2e-5)  # torch's tables of sines are of f32


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_bert_has_the_gradients_of_torch(device: str, tmp_path: Path) -> None:
    model = saved(tmp_path, "Bert", "Model")
    (tmp_path / "tokenizer.json").unlink(missing_ok=True)
    graph, params = graph_of(tmp_path)
    out = graph.outputs[0]
    weight = graph.input("weight", out.shape)
    graph.set_outputs([(out * weight).sum()])
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 96, (2, 11)).astype(np.int32)
    factor = rng.normal(size=(2, 11, 48)).astype(np.float32)
    theirs = {n: p for n, p in model.named_parameters() if graph.has(n)}
    states = model(torch.tensor(tokens.astype(np.int64))).last_hidden_state
    (states * torch.tensor(factor)).sum().backward()
    inputs = {
        "tokens": tokens, "token_types": 0 * tokens, "positions": np.arange(11, dtype=np.int32)[None] + 0 * tokens,
        "attention_mask": np.ones((2, 11), np.float32), "weight": factor,
    }  # fmt: skip
    gradients = run(grad(graph, list(theirs)), inputs, params, device)
    for (name, value), ours in zip(theirs.items(), gradients, strict=True):
        if np.abs(value.grad.numpy()).max() > 1e-4:  # keys have no use for a bias: its gradient is rounding
            close(ours, value.grad, name)


def layer(g: rlx.Graph, x: rlx.Value, w: dict[str, rlx.Value]) -> rlx.Value:
    """A transformer layer: norm, grouped causal attention, norm, gated feed-forward."""
    batch, seq, _ = x.shape
    h = x.rms_norm(w["n1"], eps=1e-6)
    q, k, v = ((h @ w[n]).reshape(batch, seq, heads, 8) for n, heads in (("q", 4), ("k", 2), ("v", 2)))
    x = x + g.attention(q, k, v, mask_kind="causal").reshape(batch, seq, 32) @ w["o"]
    h = x.rms_norm(w["n2"], eps=1e-6)
    gate: rlx.Value = (h @ w["gate"]).silu()
    y: rlx.Value = x + (gate * (h @ w["up"])) @ w["down"]
    return y


SHAPES = {"n1": (24,), "q": (24, 32), "k": (24, 16), "v": (24, 16), "o": (32, 24), "n2": (24,), "gate": (24, 40),
          "up": (24, 40), "down": (40, 24)}  # fmt: skip


def torch_layer(x: Any, *weights: Any) -> Any:
    w = dict(zip(SHAPES, weights, strict=True))
    h = torch.nn.functional.rms_norm(x, (24,), w["n1"], 1e-6)
    q, k, v = ((h @ w[n]).reshape(2, 5, heads, 8).transpose(1, 2) for n, heads in (("q", 4), ("k", 2), ("v", 2)))
    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) / 8**0.5
    scores = scores.masked_fill(torch.triu(torch.ones(5, 5, dtype=torch.bool), 1), -torch.inf)
    mixed = (scores.softmax(-1) @ v.repeat_interleave(2, 1)).transpose(1, 2).reshape(2, 5, 32)
    x = x + mixed @ w["o"]
    h = torch.nn.functional.rms_norm(x, (24,), w["n2"], 1e-6)
    x = x + (torch.nn.functional.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]
    return (x**3).sum()


def test_a_layer_has_the_hessian_products_of_torch() -> None:
    g = rlx.Graph("layer")
    x = g.input("x", (2, 5, 24), "f64")
    w = {n: g.param(n, s, "f64") for n, s in SHAPES.items()}
    y = layer(g, x, w)
    g.set_outputs([(y * y * y).sum()])
    rng = np.random.default_rng(0)
    arrays = {"x": rng.normal(size=(2, 5, 24))} | {n: rng.normal(size=s) / 5 for n, s in SHAPES.items()}
    tangents = {n: rng.normal(size=a.shape) for n, a in arrays.items()}
    inputs = {"x": arrays["x"]} | {f"tangent_{n}": t for n, t in tangents.items()}
    params = {n: arrays[n] for n in SHAPES}
    primals, directions = (tuple(torch.tensor(a) for a in part.values()) for part in (arrays, tangents))
    _, wanted = torch.autograd.functional.hvp(torch_layer, primals, directions)
    for device in ("reference", "cpu"):
        for name, ours, theirs in zip(arrays, run(hvp(g, list(arrays)), inputs, params, device), wanted, strict=True):
            close(ours, theirs, f"{name} on {device}", 1e-9)
    again = jvp(grad(g, list(arrays)), list(arrays))  # the same by hand
    for ours, theirs in zip(run(again, inputs, params, "reference")[len(arrays) :], wanted, strict=True):
        close(ours, theirs, "jvp of grad", 1e-9)
