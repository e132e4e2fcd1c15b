"""Stages of decoders: whole layers, their parts, and steps with a past that the caller keeps.

Each is compared with NumPy's float64 on both devices and under both fusion policies, and (mark parity) with torch.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from oracles import ORACLES

from rlx.dtypes import dtype
from rlx.errors import GraphError, ShapeError
from rlx.flow import ModelFlow, SideOutputs
from rlx.flow.stages import (
    BindDecodeInputs,
    FlowStage,
    GatherLastToken,
    GeGlu,
    GemmaDecodeLayer,
    GemmaDecoder,
    GemmaKvTap,
    GemmaRmsNorm,
    GemmaStyle,
    LlamaDecodeLayer,
    LlamaDecoder,
    LlamaKvTap,
    MoeFfn,
    Qwen3DecodeLayer,
    Qwen3Decoder,
    RmsNorm,
    RopeTables,
    SelfAttnPrefill,
    Sequence,
)
from rlx.ir.registry import packed
from rlx.ops.attention import MaskKind

Array = np.ndarray[Any, Any]
BATCH, PAST, HIDDEN, HEADS, KV, HEAD, FFN, EPS = 2, 9, 20, 6, 2, 8, 12, 1e-2
P = "model.layers.1"
POLICIES = {"direct": "llama32_prefill", "fusable": "llama32_decode"}


def draws(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def layer_weights() -> dict[str, Array]:
    """Weights of a layer that has everything; stages take what they want."""
    sizes = {
        "self_attn.q_proj": (HEADS * HEAD, HIDDEN), "self_attn.k_proj": (KV * HEAD, HIDDEN),
        "self_attn.v_proj": (KV * HEAD, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
        "mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN), "mlp.down_proj": (HIDDEN, FFN),
    }  # fmt: skip
    arrays = {f"{P}.{n}.weight": draws(i, *s) / s[1] ** 0.5 for i, (n, s) in enumerate(sizes.items())}
    arrays |= {f"{P}.{n}.bias": draws(20 + i, sizes[n][0]) for i, n in enumerate(list(sizes)[:3])}
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    arrays |= {f"{P}.{n}_layernorm.weight": 1 + 0.3 * draws(30 + i, HIDDEN) for i, n in enumerate(norms)}
    return arrays | {f"{P}.self_attn.{n}_norm.weight": 1 + 0.3 * draws(40 + i, HEAD) for i, n in enumerate("qk")}


W = layer_weights()
ANGLES = np.arange(40)[:, None] / 100.0 ** (np.arange(0, HEAD, 2) / HEAD)
COS, SIN = np.cos(ANGLES).astype(np.float32), np.sin(ANGLES).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """A stage, and what its layer computes."""

    stage: FlowStage
    new: int
    past: bool = False
    masked: bool = False  # with a custom mask
    window: int | None = None
    scale: float | None = None
    cap: float | None = None
    bias: bool = False
    qk_norm: bool = False
    post: bool = False
    one: float = 0.0
    gelu: bool = False
    side: SideOutputs | None = field(default=None, compare=False)

    @property
    def mask(self) -> Array:
        """[batch, new, keys] truth values."""
        keys = self.new + (PAST if self.past else 0)
        back = (np.arange(self.new)[:, None] + keys - self.new) - np.arange(keys)
        seen = (back >= 0) & (back < (self.window or keys))
        return seen & (UNMASKED[:, :keys] > 0.5)[:, None] if self.masked else np.repeat(seen[None], BATCH, 0)


UNMASKED = np.array([[1, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1]], np.float32)


def cases() -> dict[str, Case]:
    heads: dict[str, Any] = {"num_heads": HEADS, "num_kv_heads": KV, "head_dim": HEAD, "eps": EPS, "layer_prefix": P}
    table = {
        "llama": Case(LlamaDecoder(**heads), 7),
        "llama, window": Case(LlamaDecoder(**heads, mask=MaskKind.sliding(3)), 7, window=3),
        "qwen3": Case(Qwen3Decoder(**heads), 7, qk_norm=True),
        "qwen2": Case(Qwen3Decoder(**heads, qk_norm=False, attention_bias=True), 5, bias=True),
    }
    styles: dict[str, dict[str, Any]] = {
        GemmaStyle.GEMMA: {}, GemmaStyle.GEMMA2: {"post": True}, GemmaStyle.GEMMA3: {"post": True, "qk_norm": True}
    }  # fmt: skip
    for style, has in styles.items():
        has = {**has, "one": 1.0, "gelu": True}
        layer = GemmaDecoder(**heads, style=style, score_scale=0.3, attn_logit_softcap=2.0)
        table[style] = Case(layer, 6, scale=0.3, cap=2.0, **has)
        for new in (1, 3):
            for masked in (False, True):
                for window in (None, 4):
                    step = GemmaDecodeLayer(
                        **heads, layer_idx=1, style=style, mask=MaskKind.sliding(window) if window else MaskKind.CAUSAL,
                        score_scale=0.3, attn_logit_softcap=2.0, use_custom_mask=masked,
                    )  # fmt: skip
                    name = f"{style} step, {new} new{', mask' if masked else ''}{', window' if window else ''}"
                    table[name] = Case(step, new, True, masked, window, 0.3, 2.0, **has)
    for new in (1, 3):
        for masked in (False, True):
            name = f"step, {new} new{', mask' if masked else ''}"
            stage = LlamaDecodeLayer(**heads, layer_idx=1, use_custom_mask=masked)
            table[f"llama {name}"] = Case(stage, new, True, masked)
            stage = Qwen3DecodeLayer(**heads, layer_idx=1, use_custom_mask=masked)
            table[f"qwen3 {name}"] = Case(stage, new, True, masked, qk_norm=True)
    return table


CASES = cases()
X = draws(60, BATCH, 7, HIDDEN)
PASTS = draws(61, BATCH, PAST, KV * HEAD), draws(62, BATCH, PAST, KV * HEAD)


def flow_of(case: Case, policy: str, stage: FlowStage | None = None) -> tuple[ModelFlow, dict[str, Array]]:
    """A flow with the layer, and the inputs of a run."""
    flow = ModelFlow("layer").profile(POLICIES[policy]).input("x", ("batch", case.new, HIDDEN))
    feeds = {"x": X[:, : case.new]}
    if case.past:
        for i in range(2):
            for name, value in zip("kv", PASTS, strict=True):
                flow = flow.input(f"past_{name}_{i}", ("batch", "past", KV * HEAD))
                feeds[f"past_{name}_{i}"] = value if i == 1 else np.zeros_like(value)
        rows = slice(PAST, PAST + case.new)
        flow = flow.input("rope_cos", (case.new, HEAD // 2)).input("rope_sin", (case.new, HEAD // 2))
        feeds |= {"rope_cos": COS[rows], "rope_sin": SIN[rows]}
        if case.masked:
            flow = flow.input("mask", ("batch", "keys"))
            feeds["mask"] = UNMASKED[:, : PAST + case.new]
        flow = flow.stage(BindDecodeInputs(2, case.masked))
    else:
        flow = flow.stage(RopeTables(COS, SIN))
    return flow.stage(stage or case.stage), feeds


def numpy_layer(case: Case) -> tuple[Array, Array, Array]:
    """What the layer gives, and the keys and values that it attends to, in float64."""
    w = {name: value.astype(np.float64) for name, value in W.items()}
    at = PAST if case.past else 0

    def norm(x: Array, name: str) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * (w[f"{P}.{name}.weight"] + case.one)

    def linear(x: Array, name: str) -> Array:
        return x @ w[f"{P}.{name}.weight"].T + (w[f"{P}.{name}.bias"] if case.bias and "attn" in name else 0)

    def heads(x: Array, which: str, count: int) -> Array:
        x = linear(x, f"self_attn.{which}_proj").reshape(BATCH, case.new, count, HEAD)
        x = norm(x, f"self_attn.{which}_norm") if case.qk_norm and which in "qk" else x
        if which == "v":
            return x
        cos, sin = (np.cos(ANGLES), np.sin(ANGLES))
        cos, sin = cos[at : at + case.new, None], sin[at : at + case.new, None]
        a, b = x[..., : HEAD // 2], x[..., HEAD // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = X[:, : case.new].astype(np.float64)
    h = norm(x, "input_layernorm")
    q, k, v = heads(h, "q", HEADS), heads(h, "k", KV), heads(h, "v", KV)
    if case.past:
        k, v = (np.concatenate([p.reshape(BATCH, PAST, KV, HEAD), n], 1) for p, n in zip(PASTS, (k, v), strict=True))
    scores = np.einsum("bqhd,bkhd->bhqk", q, np.repeat(k, HEADS // KV, 2)) * (case.scale or HEAD**-0.5)
    scores = case.cap * np.tanh(scores / case.cap) if case.cap else scores
    scores = np.where(case.mask[:, None], scores, -np.inf)
    odds = np.exp(scores - scores.max(-1, keepdims=True))
    odds = odds / odds.sum(-1, keepdims=True)
    seen = np.einsum("bhqk,bkhd->bqhd", odds, np.repeat(v, HEADS // KV, 2)).reshape(BATCH, case.new, -1)
    out = seen @ w[f"{P}.self_attn.o_proj.weight"].T
    x = x + (norm(out, "post_attention_layernorm") if case.post else out)
    h = norm(x, "pre_feedforward_layernorm" if case.post else "post_attention_layernorm")
    gate = linear(h, "mlp.gate_proj")
    if case.gelu:
        gate = gate / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    else:
        gate = gate / (1 + np.exp(-gate))
    out = linear(gate * linear(h, "mlp.up_proj"), "mlp.down_proj")
    return x + (norm(out, "post_feedforward_layernorm") if case.post else out), k, v


def torch_layer(case: Case) -> Array:
    """The same in torch's float32, with its own norms, activations and attention."""
    import torch
    from torch.nn import functional as f

    w = {name: torch.from_numpy(value) for name, value in W.items()}
    at = PAST if case.past else 0

    def norm(x: Any, name: str) -> Any:
        weight = w[f"{P}.{name}.weight"] + case.one
        return f.rms_norm(x, weight.shape, weight, EPS)

    def linear(x: Any, name: str) -> Any:
        return f.linear(x, w[f"{P}.{name}.weight"], w[f"{P}.{name}.bias"] if case.bias and "attn" in name else None)

    cos, sin = (torch.from_numpy(t[at : at + case.new]).repeat(1, 2)[None, :, None] for t in (COS, SIN))

    def heads(x: Any, which: str, count: int) -> Any:
        x = linear(x, f"self_attn.{which}_proj").view(BATCH, case.new, count, HEAD)
        x = norm(x, f"self_attn.{which}_norm") if case.qk_norm and which in "qk" else x
        if which == "v":
            return x
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    x = torch.from_numpy(X[:, : case.new])
    h = norm(x, "input_layernorm")
    q, k, v = heads(h, "q", HEADS), heads(h, "k", KV), heads(h, "v", KV)
    if case.past:
        pasts = (torch.from_numpy(p).view(BATCH, PAST, KV, HEAD) for p in PASTS)
        k, v = (torch.cat([past, new], 1) for past, new in zip(pasts, (k, v), strict=True))
    mask = torch.from_numpy(case.mask)[:, None]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if case.cap:
        k, v = (t.repeat_interleave(HEADS // KV, 1) for t in (k, v))
        scores = torch.tanh(q @ k.mT * (case.scale or HEAD**-0.5) / case.cap) * case.cap
        seen = scores.masked_fill(~mask, -math.inf).softmax(-1) @ v
    else:
        seen = f.scaled_dot_product_attention(q, k, v, mask, scale=case.scale, enable_gqa=True)
    out = f.linear(seen.transpose(1, 2).reshape(BATCH, case.new, -1), w[f"{P}.self_attn.o_proj.weight"])
    x = x + (norm(out, "post_attention_layernorm") if case.post else out)
    h = norm(x, "pre_feedforward_layernorm" if case.post else "post_attention_layernorm")
    gate = linear(h, "mlp.gate_proj")
    gate = f.gelu(gate, approximate="tanh") if case.gelu else f.silu(gate)
    out = linear(gate * linear(h, "mlp.up_proj"), "mlp.down_proj")
    return (x + (norm(out, "post_feedforward_layernorm") if case.post else out)).numpy()


def close(actual: Array, wanted: Array, tolerance: float = 2e-5) -> None:
    assert actual.shape == wanted.shape
    assert np.abs(actual - wanted).max() <= tolerance * max(1.0, float(np.abs(wanted).max()))


# -- layers ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CASES)
def test_a_layer_is_what_numpy_computes(name: str, policy: str) -> None:
    flow, feeds = flow_of(CASES[name], policy)
    built, wanted = flow.build(W), numpy_layer(CASES[name])[0]
    assert built.module.level == "hir" and built.into_hir().fusion_policy is not None
    close(built.compile("reference").run(feeds)[0], wanted)
    if policy == "fusable" or "step" not in name:  # every step once on the CPU; compiling is what takes the time
        close(built.compile("cpu").run(feeds)[0], wanted)


@pytest.mark.parity
@pytest.mark.parametrize("name", CASES)
def test_a_layer_is_what_torch_computes(name: str) -> None:
    pytest.importorskip("torch")
    flow, feeds = flow_of(CASES[name], "fusable")
    close(flow.build(W).compile("cpu").run(feeds)[0], torch_layer(CASES[name]))


@pytest.mark.parametrize("name", ["llama step, 3 new", "qwen3 step, 1 new", "gemma3 step, 3 new"])
def test_a_step_gives_back_all_keys_and_values(name: str) -> None:
    side, case = SideOutputs(), CASES[name]
    flow, feeds = flow_of(case, "fusable", replace(case.stage, kv_out=side))  # type: ignore[type-var]
    built = flow.with_extra_outputs(side).build(W)
    assert built.output_names == ["output", f"{P}.k", f"{P}.v"]
    for result, wanted in zip(built.compile("cpu").run(feeds), numpy_layer(case), strict=True):
        close(result, wanted.reshape(result.shape))


@pytest.mark.parametrize(
    ("name", "tap"),
    [
        ("llama", lambda side: LlamaKvTap(P, HEAD, EPS, side)),
        ("gemma3", lambda side: Sequence([GemmaRmsNorm(f"{P}.input_layernorm.weight", EPS),
                                          GemmaKvTap(P, HEAD, side, EPS)])),
        ("qwen3", lambda side: replace(CASES["qwen3"].stage, kv_sink=side)),  # type: ignore[type-var]
    ],
)  # fmt: skip
def test_keys_after_rope_and_values_are_side_outputs(name: str, tap: Any) -> None:
    side, case = SideOutputs(), CASES[name]
    norms = {n for n in W if n.endswith(("q_norm.weight", "k_norm.weight"))}  # a tap takes what the weights have
    weights = {n: w for n, w in W.items() if (case.qk_norm or n not in norms) and (case.bias or "bias" not in n)}
    flow, feeds = flow_of(case, "direct", tap(side))
    _, *wanted = numpy_layer(case)
    _, *tapped = flow.with_extra_outputs(side).build(weights).compile("reference").run(feeds)
    for mine, theirs in zip(tapped, wanted, strict=True):
        close(mine, theirs.reshape(mine.shape))


def test_a_tap_lets_the_value_pass() -> None:
    flow, feeds = flow_of(CASES["llama"], "direct", LlamaKvTap(P, HEAD, EPS, SideOutputs()))
    close(flow.build(W).compile("reference").run(feeds)[0], feeds["x"])


def test_a_prefill_and_its_steps_agree() -> None:
    """Keys and values that a prefill gives are the past of the next step: the layer's own outputs go round."""
    side, case = SideOutputs(), replace(CASES["llama"], new=7)
    layer = LlamaDecoder(P, HEADS, KV, HEAD, EPS, kv_sink=side)
    flow, feeds = flow_of(replace(case, new=6), "fusable", layer)
    _, k, v = flow.with_extra_outputs(side).build(W).compile("cpu").run(feeds)
    step, more = flow_of(CASES["llama step, 1 new"], "fusable")
    more |= {"x": X[:, 6:7], "past_k_1": k, "past_v_1": v, "rope_cos": COS[6:7], "rope_sin": SIN[6:7]}
    more |= {"past_k_0": np.zeros_like(k), "past_v_0": np.zeros_like(v)}
    close(step.build(W).compile("cpu").run(more)[0], numpy_layer(case)[0][:, 6:7])


def test_a_step_without_a_past_says_so() -> None:
    flow = ModelFlow("f").input("x", (1, 1, HIDDEN)).stage(RopeTables(COS, SIN))
    with pytest.raises(GraphError, match="stage LlamaDecodeLayer: no earlier keys and values flow here"):
        flow.stage(LlamaDecodeLayer(P, HEADS, KV, HEAD, EPS, layer_idx=0)).build(W)
    with pytest.raises(GraphError, match="stage GemmaDecodeLayer: style 'gemma9' is not known"):
        GemmaDecodeLayer(P, HEADS, KV, HEAD, EPS, layer_idx=0, style="gemma9")
    case = CASES["llama step, 1 new"]
    with pytest.raises(GraphError, match="use_custom_mask, but no mask is bound"):
        flow_of(case, "direct", replace(case.stage, use_custom_mask=True))[0].build(W)  # type: ignore[type-var]
    with pytest.raises(GraphError, match="layer 2 has no past, 2 are bound"):
        flow_of(case, "direct", replace(case.stage, layer_idx=2))[0].build(W)  # type: ignore[type-var]
    with pytest.raises(ShapeError, match=r"has 16 rows, not a multiple of head_dim 7"):
        flow_of(CASES["llama"], "direct", LlamaKvTap(P, 7, EPS, SideOutputs()))[0].build(W)


# -- parts -----------------------------------------------------------------------------------------------------------
def run(stage: FlowStage, weights: dict[str, Array], device: str, **inputs: Array) -> Array:
    flow = ModelFlow("part").input("x", X.shape).stage(RopeTables(COS, SIN)).stage(stage)
    result: Array = flow.build(weights).compile(device).run({"x": X, **inputs})[0]
    return result


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_attention_by_itself_has_no_output_projection(device: str) -> None:
    keys = [f"{P}.self_attn.{n}_proj.weight" for n in "qkv"]
    stage = SelfAttnPrefill(*keys, HEADS, KV, HEAD, mask=MaskKind.sliding(3), score_scale=0.3, attn_logit_softcap=2.0)
    x = X.astype(np.float64)
    q, k, v = (
        (x @ W[key].T).reshape(BATCH, 7, -1, HEAD) for key in keys
    )  # fmt: skip
    cos, sin = np.cos(ANGLES)[:7, None], np.sin(ANGLES)[:7, None]
    q, k = (
        np.concatenate([t[..., :4] * cos - t[..., 4:] * sin, t[..., 4:] * cos + t[..., :4] * sin], -1) for t in (q, k)
    )
    k, v = (np.repeat(t, HEADS // KV, 2) for t in (k, v))
    scores = 2 * np.tanh(np.einsum("bqhd,bkhd->bhqk", q, k) * 0.3 / 2)
    back = np.arange(7)[:, None] - np.arange(7)
    odds = np.exp(np.where((back >= 0) & (back < 3), scores, -np.inf))
    wanted = np.einsum("bhqk,bkhd->bqhd", odds / odds.sum(-1, keepdims=True), v).reshape(BATCH, 7, -1)
    close(run(stage, W, device), wanted)


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_gemmas_norm_adds_one_and_its_gate_is_gelu(device: str) -> None:
    g = W[f"{P}.input_layernorm.weight"]
    x = X.astype(np.float64)
    unit = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)
    close(run(GemmaRmsNorm("g", EPS), {"g": g}, device), unit * (1 + g))
    close(run(RmsNorm("g", EPS), {"g": g}, device), unit * g)
    gate, up, down = (W[f"{P}.mlp.{n}_proj.weight"].astype(np.float64) for n in ("gate", "up", "down"))
    h = x @ gate.T
    h = h / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    close(run(GeGlu.hf_mlp(P), W, device), (h * (x @ up.T)) @ down.T)


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_the_last_token_is_picked_in_three_ways(device: str) -> None:
    close(run(GatherLastToken(index=-1), {}, device), X[:, -1], 0)
    close(run(GatherLastToken(index=2), {}, device), X[:, 2], 0)
    rows = np.array([4, 0], np.int32)
    close(run(GatherLastToken(batch=BATCH), {}, device, last_token_idx=rows), X[[0, 1], rows], 0)
    close(run(GatherLastToken(batch=BATCH, input_name="at"), {}, device, at=rows), X[[0, 1], rows], 0)
    picked = np.array([3, 9, 13], np.int32)
    close(run(GatherLastToken(), {}, device, last_token_idx=picked), X.reshape(-1, HIDDEN)[picked], 0)


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("normalise", [True, False])
def test_a_mixture_computes_the_experts_that_the_router_picks(device: str, normalise: bool) -> None:
    experts, chosen = 5, 2
    weights = {"m.gate.weight": draws(70, experts, HIDDEN)} | {
        f"m.experts.{n}_proj.weight": draws(71 + i, experts, *s)
        for i, (n, s) in enumerate({"gate": (FFN, HIDDEN), "up": (FFN, HIDDEN), "down": (HIDDEN, FFN)}.items())
    }
    x = X.reshape(-1, HIDDEN).astype(np.float64)
    odds = np.exp(x @ weights["m.gate.weight"].T.astype(np.float64))
    odds = odds / odds.sum(-1, keepdims=True)
    wanted = np.zeros_like(x)
    for row, p in enumerate(odds):
        best = np.argsort(-p)[:chosen]
        for e in best:
            gate, up, down = (weights[f"m.experts.{n}_proj.weight"][e] for n in ("gate", "up", "down"))
            h = gate @ x[row]
            share = p[e] / (p[best].sum() if normalise else 1)
            wanted[row] += share * (down @ (h / (1 + np.exp(-h)) * (up @ x[row])))
    stage = MoeFfn("m", experts, chosen, normalise, FFN)
    close(run(stage, weights, device), wanted.reshape(X.shape))


@pytest.mark.parametrize("kind", ["q8_0", "q4_k", "mxfp4", "f16"])
def test_experts_stay_as_they_are_stored(kind: str) -> None:
    """Packed ones take as many bytes as in their file; the numbers are those of the same experts in f32."""
    experts, chosen, hidden, inner = 6, 2, 256, 512
    storage, rng = dtype(kind), np.random.default_rng(80)
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    stored = {n: packed(kind, experts, *s).array(rng) for n, s in shapes.items()} if storage.is_packed else {
        n: draws(81, experts, *s).astype(np.float16) for n, s in shapes.items()
    }  # fmt: skip
    wide = {n: ORACLES["dequantise"](w) if storage.is_packed else w.astype(np.float32) for n, w in stored.items()}
    x, router = draws(82, 1, 9, hidden), {"m.gate.weight": draws(83, experts, hidden)}
    results, bytes_bound = [], []
    for weights in (stored, wide):
        named = {f"m.experts.{n}_proj.weight": w for n, w in weights.items()}
        flow = ModelFlow("part").input("x", ("batch", 9, hidden)).stage(MoeFfn("m", experts, chosen, True, inner))
        f = flow.build(router | named).compile("cpu")
        results.append(f.run({"x": x})[0])
        main = f.plan.main  # type: ignore[attr-defined]
        bytes_bound.append(sum(main.buffers[name].type.bytes for name in main.weights))
        grouped = [launch for launch in main.launches if "matmul" in launch.kernel.kind and launch.kernel.grouped]
        assert [launch.kernel.weights for launch in grouped] == [2, 1]
    close(results[0], results[1], 1e-4)
    small = sum(w.nbytes for w in (*router.values(), *stored.values()))
    if storage.is_packed:
        assert bytes_bound[0] <= small + 64 * hidden * 4  # the router's panel is padded
        assert bytes_bound[0] < bytes_bound[1] / 3


def test_a_mixture_of_fewer_experts_than_are_chosen_is_refused() -> None:
    with pytest.raises(GraphError, match="stage MoeFfn: 3 of 2 experts cannot be chosen"):
        MoeFfn("m", 2, 3)


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        (LlamaDecoder, "layer_prefix num_heads num_kv_heads head_dim eps mask"),
        (LlamaDecodeLayer, "layer_prefix layer_idx num_heads num_kv_heads head_dim eps use_custom_mask kv_out"),
        (LlamaKvTap, "layer_prefix head_dim eps outputs"),
        (SelfAttnPrefill, "q_key k_key v_key num_heads num_kv_heads head_dim mask score_scale attn_logit_softcap"),
        (Qwen3Decoder, "layer_prefix num_heads num_kv_heads head_dim eps qk_norm attention_bias kv_sink"),
        (Qwen3DecodeLayer, "layer_prefix num_heads num_kv_heads head_dim eps qk_norm attention_bias kv_sink layer_idx "
                           "use_custom_mask kv_out"),
        (GemmaDecodeLayer, "layer_prefix layer_idx num_heads num_kv_heads head_dim eps style mask score_scale "
                           "attn_logit_softcap use_custom_mask kv_out"),
        (GemmaKvTap, "layer_prefix head_dim outputs"),
        (GemmaRmsNorm, "weight_key eps"),
        (GeGlu, "gate_key up_key down_key"),
        (GatherLastToken, "batch input_name index"),
    ],
    ids=lambda x: x.__name__ if isinstance(x, type) else "",
)  # fmt: skip
def test_stages_take_their_settings_by_name(stage: type[FlowStage], words: str) -> None:
    taken = inspect.signature(stage).parameters
    assert set(words.split()) <= set(taken)
    others = set(taken) - set(words.split())
    assert all(taken[name].default is not inspect.Parameter.empty for name in others)
