"""Stages of encoders and vision models, one by one: against NumPy's float64 and against torch, lowered both ways.

What a stage should give is written once, over a few functions that both have.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.special import erf

import rlx
from rlx.errors import GraphError
from rlx.flow import Emit, FlowStage, FlowValue, ModelFlow
from rlx.flow.context import FlowCtx
from rlx.flow.stages import (
    AttnMask,
    BertEncoderLayer,
    ClsTokenPool,
    Custom,
    DualStream,
    GatherAdd,
    GatherFromInput,
    GeluFfn,
    LayerNorm,
    LayerScale,
    NomicEncoderLayer,
    RopeTables,
    VisionSwiGluFfn,
    VitSelfAttn,
)
from rlx.flow.stages.encoder import ATTENTION_BIAS, attend
from rlx.ops.attention import MaskKind
from rlx.profile import Fusion

Array = np.ndarray[Any, Any]
BATCH, SEQ, HIDDEN, HEADS, HEAD, FFN, EPS = 3, 7, 24, 3, 8, 20, 1e-5
RNG = np.random.default_rng(0)
X = RNG.standard_normal((BATCH, SEQ, HIDDEN)).astype(np.float32)
MASK = (np.arange(SEQ) < np.array([7, 4, 1])[:, None]).astype(np.float32)
POSITIONS = np.repeat(np.arange(SEQ, dtype=np.int32)[None], BATCH, axis=0)
ANGLES = np.arange(SEQ)[:, None] * 0.3 ** np.arange(HEAD // 2)


# -- what both NumPy and torch have ----------------------------------------------------------------------------------
def numpy_functions() -> Any:
    def softmax(x: Array) -> Array:
        e = np.exp(x - x.max(-1, keepdims=True))
        return np.asarray(e / e.sum(-1, keepdims=True))

    def norm(x: Array, weight: Any = 1.0, bias: Any = 0.0) -> Array:
        return np.asarray((x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + EPS) * weight + bias)

    def attend(q: Array, k: Array, v: Array, mask: Array | None) -> Array:
        scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
        scores = scores if mask is None else np.where(mask[:, None, None] > 0, scores, -np.inf)
        return np.asarray(np.einsum("bhqk,bkhd->bqhd", softmax(scores), v))

    return SimpleNamespace(
        array=lambda a: np.asarray(a, np.float64 if np.asarray(a).dtype.kind == "f" else np.int64), norm=norm,
        attend=attend, gelu=lambda x: x * (1 + erf(x / np.sqrt(2))) / 2, silu=lambda x: x / (1 + np.exp(-x)),
        gelu_tanh=lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
        join=lambda parts, axis: np.concatenate(parts, axis), split=np.split, numpy=np.asarray,
    )  # fmt: skip


def torch_functions() -> Any:
    torch = pytest.importorskip("torch")
    f = torch.nn.functional

    def norm(x: Any, weight: Any = None, bias: Any = None) -> Any:
        return f.layer_norm(x, x.shape[-1:], weight, bias, EPS)

    def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        seen = None if mask is None else mask[:, None, None].bool()
        return f.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2)

    return SimpleNamespace(
        array=lambda a: torch.from_numpy(np.ascontiguousarray(a)), norm=norm, attend=attend, gelu=f.gelu, silu=f.silu,
        gelu_tanh=lambda x: f.gelu(x, approximate="tanh"), join=lambda parts, axis: torch.cat(tuple(parts), axis),
        split=lambda x, n, axis: x.chunk(n, axis), numpy=lambda x: x.numpy(),
    )  # fmt: skip


class Oracle:
    """Weights and functions; `o.linear(x, "name")` has a bias where there is one."""

    def __init__(self, functions: Any, weights: dict[str, Array]) -> None:
        self.f = functions
        self.w = {name: functions.array(array) for name, array in weights.items()}

    def linear(self, x: Any, name: str) -> Any:
        y = x @ self.w[f"{name}.weight"].T
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def norm(self, x: Any, name: str) -> Any:
        return self.f.norm(x, self.w[f"{name}.weight"], self.w[f"{name}.bias"])

    def heads(self, x: Any) -> Any:
        return x.reshape(*x.shape[:2], HEADS, HEAD)

    def attention(self, *qkv: Any, mask: Any = None) -> Any:
        return self.f.attend(*map(self.heads, qkv), mask).reshape(qkv[0].shape)

    def turn(self, x: Any) -> Any:
        """Rotary positions: halves of each head."""
        cos, sin = (self.f.array(t(ANGLES).astype(np.float32))[None, :, None] for t in (np.cos, np.sin))
        a, b = self.heads(x)[..., : HEAD // 2], self.heads(x)[..., HEAD // 2 :]
        return self.f.join((a * cos - b * sin, b * cos + a * sin), -1).reshape(x.shape)


def dense(out: int, inside: int, *, bias: bool = True, name: str) -> dict[str, Array]:
    arrays = {f"{name}.weight": (RNG.standard_normal((out, inside)) * inside**-0.5).astype(np.float32)}
    return arrays | ({f"{name}.bias": RNG.standard_normal(out).astype(np.float32)} if bias else {})


def vectors(*names: str, size: int = HIDDEN) -> dict[str, Array]:
    arrays = {}
    for name in names:
        arrays[f"{name}.weight"] = (1 + 0.3 * RNG.standard_normal(size)).astype(np.float32)
        arrays[f"{name}.bias"] = RNG.standard_normal(size).astype(np.float32)
    return arrays


# -- the stages and what they should give ----------------------------------------------------------------------------
BERT = {
    **{k: v for n in ("query", "key", "value") for k, v in dense(HIDDEN, HIDDEN, name=f"p.attention.self.{n}").items()},
    **dense(HIDDEN, HIDDEN, name="p.attention.output.dense"), **dense(FFN, HIDDEN, name="p.intermediate.dense"),
    **dense(HIDDEN, FFN, name="p.output.dense"), **vectors("p.attention.output.LayerNorm", "p.output.LayerNorm"),
}  # fmt: skip
_MPNET = {"self.query": "attn.q", "self.key": "attn.k", "self.value": "attn.v", "output.dense": "attn.o"}
NOMIC = {
    **dense(3 * HIDDEN, HIDDEN, bias=False, name="p.attn.Wqkv"),
    **dense(HIDDEN, HIDDEN, bias=False, name="p.attn.out_proj"),
    **dense(FFN, HIDDEN, bias=False, name="p.mlp.fc11"), **dense(FFN, HIDDEN, bias=False, name="p.mlp.fc12"),
    **dense(HIDDEN, FFN, bias=False, name="p.mlp.fc2"), **vectors("p.norm1", "p.norm2"),
}  # fmt: skip
VIT = {**dense(3 * HIDDEN, HIDDEN, name="qkv"), **dense(HIDDEN, HIDDEN, name="out")}
SPLIT = {f"{n}.{p}": a for n, part in zip("qkv", np.split(np.arange(3 * HIDDEN), 3), strict=True)
         for p, a in (("weight", VIT["qkv.weight"][part]), ("bias", VIT["qkv.bias"][part]))}  # fmt: skip
SWIGLU = {
    **dense(FFN, HIDDEN, name="p.mlp.fc11"), **dense(FFN, HIDDEN, name="p.mlp.fc12"),
    **dense(HIDDEN, FFN, name="p.mlp.fc2"), **vectors("p.mlp.norm", size=FFN),
}  # fmt: skip
DINO = {**dense(FFN, HIDDEN, name="p.mlp.fc1"), **dense(HIDDEN, FFN, name="p.mlp.fc2")}
TABLE = {"table": RNG.standard_normal((9, HIDDEN)).astype(np.float32)}
ROWS = RNG.integers(0, 9, (BATCH, SEQ)).astype(np.int32)


def mpnet_names(name: str) -> str:
    for theirs, ours in _MPNET.items():
        name = name.replace(f"attention.{theirs}.", f"attention.{ours}.")
    return name.replace("attention.output.LayerNorm", "attention.LayerNorm")


def bert(o: Oracle, x: Any, mask: Any) -> Any:
    q, k, v = (o.linear(x, f"p.attention.self.{n}") for n in ("query", "key", "value"))
    seen = o.linear(o.attention(q, k, v, mask=mask), "p.attention.output.dense")
    x = o.norm(x + seen, "p.attention.output.LayerNorm")
    inner = o.linear(o.f.gelu(o.linear(x, "p.intermediate.dense")), "p.output.dense")
    return o.norm(x + inner, "p.output.LayerNorm")


def mpnet(o: Oracle, x: Any, mask: Any) -> Any:
    return bert(Oracle(o.f, BERT), x, mask)


def nomic(o: Oracle, x: Any, mask: Any) -> Any:
    q, k, v = o.f.split(o.linear(x, "p.attn.Wqkv"), 3, -1)
    x = o.norm(x + o.linear(o.attention(o.turn(q), o.turn(k), v, mask=mask), "p.attn.out_proj"), "p.norm1")
    inner = o.linear(x, "p.mlp.fc11") * o.f.silu(o.linear(x, "p.mlp.fc12"))
    return o.norm(x + o.linear(inner, "p.mlp.fc2"), "p.norm2")


def vit(o: Oracle, x: Any, mask: Any) -> Any:
    return o.linear(o.attention(*o.f.split(o.linear(x, "qkv"), 3, -1), mask=mask), "out")


def vit_unmasked(o: Oracle, x: Any, mask: Any) -> Any:
    return vit(o, x, None)


def vision_swiglu(o: Oracle, x: Any, mask: Any) -> Any:
    inner = o.linear(x, "p.mlp.fc11") * o.f.silu(o.linear(x, "p.mlp.fc12"))
    return o.linear(o.norm(inner, "p.mlp.norm"), "p.mlp.fc2")


def gelu_ffn(o: Oracle, x: Any, mask: Any) -> Any:
    return o.linear(o.f.gelu(o.linear(x, "p.intermediate.dense")), "p.output.dense")


def dino_ffn(o: Oracle, x: Any, mask: Any) -> Any:
    return o.linear(o.f.gelu(o.linear(x, "p.mlp.fc1")), "p.mlp.fc2")


def tanh_ffn(o: Oracle, x: Any, mask: Any) -> Any:
    return o.linear(o.f.gelu_tanh(o.linear(x, "p.mlp.fc1")), "p.mlp.fc2")


_FC = ("p.mlp.fc1.weight", "p.mlp.fc1.bias", "p.mlp.fc2.weight", "p.mlp.fc2.bias")
_LAYER: dict[str, Any] = {"layer_prefix": "p", "hidden_size": HIDDEN, "num_heads": HEADS, "head_dim": HEAD, "eps": EPS}
_QKV: dict[str, Any] = {"out_weight": "out.weight", "out_bias": "out.bias", "num_heads": HEADS, "head_dim": HEAD}
CASES: dict[str, tuple[list[FlowStage], dict[str, Array], Callable[..., Any]]] = {
    "BertEncoderLayer": ([BertEncoderLayer(**_LAYER)], BERT, bert),
    "BertEncoderLayer, mpnet": (
        [BertEncoderLayer(**_LAYER, qkv_style="mpnet")], {mpnet_names(n): a for n, a in BERT.items()}, mpnet,
    ),
    "NomicEncoderLayer": (
        [RopeTables(cos=np.cos(ANGLES), sin=np.sin(ANGLES)), NomicEncoderLayer(**_LAYER)], NOMIC, nomic,
    ),
    "VitSelfAttn": ([VitSelfAttn(qkv_weight="qkv.weight", qkv_bias="qkv.bias", **_QKV)], VIT, vit_unmasked),
    "VitSelfAttn, masked": (
        [AttnMask(batch=BATCH, seq=SEQ, input_name="attention_mask"),
         VitSelfAttn(qkv_weight="qkv.weight", qkv_bias="qkv.bias", **_QKV)], VIT, vit,
    ),
    "VitSelfAttn, ones": (
        [AttnMask(batch=BATCH, seq=SEQ), VitSelfAttn(qkv_weight="qkv.weight", qkv_bias="qkv.bias", **_QKV)], VIT,
        vit_unmasked,
    ),
    "VitSelfAttn, three weights": (
        [VitSelfAttn(qkv_weight=("q.weight", "k.weight", "v.weight"), qkv_bias=("q.bias", "k.bias", "v.bias"), **_QKV)],
        {**VIT, **SPLIT}, vit_unmasked,
    ),
    "VisionSwiGluFfn": ([VisionSwiGluFfn(layer_prefix="p", eps=EPS)], SWIGLU, vision_swiglu),
    "GeluFfn.hf_bert": ([GeluFfn.hf_bert("p")], BERT, gelu_ffn),
    "GeluFfn.dinov2": ([GeluFfn.dinov2("p")], DINO, dino_ffn),
    "GeluFfn, tanh": ([GeluFfn(*_FC, approx_gelu=True)], DINO, tanh_ffn),
    "LayerScale": ([LayerScale(gamma_key="n.weight")], vectors("n"), lambda o, x, mask: x * o.w["n.weight"]),
    "LayerNorm": (
        [LayerNorm(gamma_key="n.weight", beta_key="n.bias", eps=EPS)], vectors("n"), lambda o, x, mask: o.norm(x, "n"),
    ),
    "ClsTokenPool": ([ClsTokenPool()], {}, lambda o, x, mask: x[:, 0]),
    "GatherFromInput": (
        [GatherFromInput(input_name="rows", weight_key="table")], TABLE,
        lambda o, x, mask: o.w["table"][o.f.array(ROWS)],
    ),
    "GatherAdd": (
        [GatherAdd(input_name="rows", weight_key="table")], TABLE, lambda o, x, mask: x + o.w["table"][o.f.array(ROWS)],
    ),
}  # fmt: skip
INPUTS = {"x": X, "attention_mask": MASK, "positions": POSITIONS, "rows": ROWS}


def results_of(stages: list[FlowStage], weights: dict[str, Array], policy: str, device: str = "cpu") -> Array:
    profile = rlx.CompileProfile(fusion=Fusion(policy=rlx.FusionPolicy(policy)))
    flow = ModelFlow("f").input("x", X.shape).with_stages(stages).profile(profile)
    f = flow.build(weights).compile(device)
    return np.asarray(f.run({name: INPUTS[name] for name in f.input_types})[0])


def wanted(functions: Any, weights: dict[str, Array], oracle: Callable[..., Any]) -> Array:
    inputs = functions.array(X), functions.array(MASK)
    return np.asarray(functions.numpy(oracle(Oracle(functions, weights), *inputs)))


def close(have: Array, want: Array, name: str) -> None:
    if name.startswith(("Bert", "Nomic", "VitSelfAttn, masked")):  # what padding becomes is nobody's business
        have, want = have[MASK > 0], want[MASK > 0]
    assert np.abs(have - want).max() / np.abs(want).max() < 3e-6


@pytest.mark.parametrize("policy", ["direct", "fusable"])
@pytest.mark.parametrize("name", CASES)
def test_a_stage_gives_what_numpy_gives(name: str, policy: str) -> None:
    stages, weights, oracle = CASES[name]
    want = wanted(numpy_functions(), weights, oracle)
    close(results_of(stages, weights, policy), want, name)
    close(results_of(stages, weights, policy, "reference"), want, name)


@pytest.mark.parity
@pytest.mark.parametrize("name", CASES)
def test_a_stage_gives_what_torch_gives(name: str) -> None:
    stages, weights, oracle = CASES[name]
    close(results_of(stages, weights, "fusable"), wanted(torch_functions(), weights, oracle), name)


# -- whole layers ----------------------------------------------------------------------------------------------------
DINO_LAYERS: dict[str, Array] = {}
VISION_LAYERS: dict[str, Array] = {}
NOMIC_LAYERS: dict[str, Array] = {}
for _i in range(2):
    _at = f"blocks.{_i}"
    DINO_LAYERS |= {
        **vectors(f"{_at}.norm1", f"{_at}.norm2"), **dense(3 * HIDDEN, HIDDEN, name=f"{_at}.attn.qkv"),
        **dense(HIDDEN, HIDDEN, name=f"{_at}.attn.proj"), **dense(FFN, HIDDEN, name=f"{_at}.mlp.fc1"),
        **dense(HIDDEN, FFN, name=f"{_at}.mlp.fc2"), f"{_at}.ls1.gamma": X[0, _i], f"{_at}.ls2.gamma": X[1, _i],
    }  # fmt: skip
    VISION_LAYERS |= {
        **vectors(f"{_at}.norm1", f"{_at}.norm2"), **dense(3 * HIDDEN, HIDDEN, name=f"{_at}.attn.Wqkv"),
        **dense(HIDDEN, HIDDEN, name=f"{_at}.attn.out_proj"),
        **{f"{_at}.{name[2:]}": array for name, array in SWIGLU.items()},
    }  # fmt: skip
    NOMIC_LAYERS |= {f"{_at}.{name[2:]}": array for name, array in NOMIC.items()}


def dino_layers(o: Oracle, x: Any, mask: Any) -> Any:
    for i in range(2):
        at = f"blocks.{i}"
        q, k, v = o.f.split(o.linear(o.norm(x, f"{at}.norm1"), f"{at}.attn.qkv"), 3, -1)
        x = x + o.w[f"{at}.ls1.gamma"] * o.linear(o.attention(q, k, v), f"{at}.attn.proj")
        inner = o.f.gelu(o.linear(o.norm(x, f"{at}.norm2"), f"{at}.mlp.fc1"))
        x = x + o.w[f"{at}.ls2.gamma"] * o.linear(inner, f"{at}.mlp.fc2")
    return x


def vision_layers(o: Oracle, x: Any, mask: Any) -> Any:
    for i in range(2):
        at = f"blocks.{i}"
        q, k, v = o.f.split(o.linear(o.norm(x, f"{at}.norm1"), f"{at}.attn.Wqkv"), 3, -1)
        x = x + o.linear(o.attention(q, k, v), f"{at}.attn.out_proj")
        x = x + vision_swiglu(Oracle(o.f, SWIGLU), o.norm(x, f"{at}.norm2"), mask)
    return x


def nomic_layers(o: Oracle, x: Any, mask: Any) -> Any:
    inner = Oracle(o.f, NOMIC)
    return nomic(inner, nomic(inner, x, mask), mask)


_FLOW = ModelFlow("f")
_ROTATED = _FLOW.rope_tables(np.cos(ANGLES), np.sin(ANGLES))
LAYERS: dict[str, tuple[list[FlowStage], dict[str, Array], Callable[..., Any]]] = {
    "DINOv2": (list(_FLOW.repeat_dinov2_layers(2, "blocks", HEADS, HEAD, EPS).stages), DINO_LAYERS, dino_layers),
    "NomicVision": (
        list(_FLOW.repeat_vision_layers(2, "blocks", HEADS, HEAD, EPS).stages), VISION_LAYERS, vision_layers,
    ),
    "NomicBERT": (
        list(_ROTATED.repeat_nomic_layers(2, "blocks", HIDDEN, HEADS, EPS).stages),
        NOMIC_LAYERS, nomic_layers,
    ),
}  # fmt: skip


@pytest.mark.parametrize("policy", ["direct", "fusable"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_give_what_numpy_gives(name: str, policy: str) -> None:
    stages, weights, oracle = LAYERS[name]
    close(results_of(stages, weights, policy), wanted(numpy_functions(), weights, oracle), name)


@pytest.mark.parity
@pytest.mark.parametrize("name", LAYERS)
def test_layers_give_what_torch_gives(name: str) -> None:
    stages, weights, oracle = LAYERS[name]
    close(results_of(stages, weights, "fusable"), wanted(torch_functions(), weights, oracle), name)


# -- an image and a text side by side --------------------------------------------------------------------------------
IMG, TXT = 5, 3  # tokens
STREAMS: dict[str, Array] = {}
for _layer in range(2):
    for _name in ("img", "txt"):
        _at = f"{_layer}.{_name}"
        STREAMS |= {**dense(6 * HIDDEN, HIDDEN, name=f"{_at}.mod"), **dense(3 * HIDDEN, HIDDEN, name=f"{_at}.qkv"),
                    **dense(HIDDEN, HIDDEN, name=f"{_at}.out"), **dense(FFN, HIDDEN, name=f"{_at}.up"),
                    **dense(HIDDEN, FFN, name=f"{_at}.down")}  # fmt: skip
SIDE = {"img": X[:, :IMG], "txt": X[:, IMG - 1 : IMG - 1 + TXT], "cond": X[:, 0]}


def joint_oracle(o: Oracle, inputs: dict[str, Any]) -> tuple[Any, Any]:
    """Two blocks of SD3's MMDiT: each stream is modulated by the condition; both attend over the tokens of both."""
    x = {name: inputs[name] for name in ("txt", "img")}
    for layer in range(2):
        mods, heads = {}, []
        for name in x:
            at = f"{layer}.{name}"
            mods[name] = [m[:, None] for m in o.f.split(o.linear(o.f.silu(inputs["cond"]), f"{at}.mod"), 6, -1)]
            shift, scale = mods[name][:2]
            heads.append(o.f.split(o.linear(o.f.norm(x[name]) * (1 + scale) + shift, f"{at}.qkv"), 3, -1))
        seen = o.attention(*(o.f.join([h[i] for h in heads], 1) for i in range(3)))
        parts = {"txt": seen[:, :TXT], "img": seen[:, TXT:]}
        for name in x:
            at = f"{layer}.{name}"
            _, _, gate, shift, scale, last = mods[name]
            x[name] = x[name] + gate * o.linear(parts[name], f"{at}.out")
            inner = o.linear(o.f.norm(x[name]) * (1 + scale) + shift, f"{at}.up")
            x[name] = x[name] + last * o.linear(o.f.gelu_tanh(inner), f"{at}.down")
    return x["img"], x["txt"]


def joint_block(layer: int) -> Callable[[Emit, FlowValue, FlowValue], tuple[Any, Any]]:
    def linear(emit: Emit, x: Any, name: str) -> Any:
        return x @ emit.load_param(f"{name}.weight", transpose=True) + emit.load_param(f"{name}.bias")

    def cut(x: Any, n: int) -> list[Any]:
        size = x.shape[-1] // n
        return [x[..., i * size : (i + 1) * size] for i in range(n)]

    def block(emit: Emit, img: FlowValue, txt: FlowValue) -> tuple[Any, Any]:
        cond = emit.flow_input("cond").silu()
        streams = {"txt": txt, "img": img}
        mods, heads = {}, []
        for name, x in streams.items():
            at = f"{layer}.{name}"
            mods[name] = [m.reshape(BATCH, 1, HIDDEN) for m in cut(linear(emit, cond, f"{at}.mod"), 6)]
            qkv = linear(emit, x.layer_norm(eps=EPS) * (1 + mods[name][1]) + mods[name][0], f"{at}.qkv")
            heads.append([h.reshape(BATCH, x.shape[1], HEADS, HEAD) for h in cut(qkv, 3)])
        q, k, v = (emit.concatenate(heads[0][i], heads[1][i], axis=1) for i in range(3))
        seen = emit.attention(q, k, v).reshape(BATCH, TXT + IMG, HIDDEN)
        parts = {"txt": seen[:, :TXT], "img": seen[:, TXT:]}
        for name, x in streams.items():
            at = f"{layer}.{name}"
            _, _, gate, shift, scale, last = mods[name]
            x = x + gate * linear(emit, parts[name], f"{at}.out")
            inner = linear(emit, x.layer_norm(eps=EPS) * (1 + scale) + shift, f"{at}.up")
            streams[name] = x + last * linear(emit, inner.gelu_tanh(), f"{at}.down")
        return streams["img"], streams["txt"]

    return block


def joint_found(policy: str, device: str = "cpu") -> list[Array]:
    profile = rlx.CompileProfile(fusion=Fusion(policy=rlx.FusionPolicy(policy)))
    flow = ModelFlow("joint").profile(profile)
    for name, array in SIDE.items():
        flow = flow.input(name, array.shape)
    flow = flow.bind_inputs_to_streams([("img", "img"), ("txt", "txt")])
    flow = flow.stage(DualStream(name="block0", a="img", b="txt", f=joint_block(0)))
    flow = flow.stage(DualStream(name="block1", a="img", b="txt", f=joint_block(1))).load_stream("img")
    return flow.outputs("img", "txt").build(STREAMS).compile(device).run(SIDE)


def joint_wanted(functions: Any) -> list[Array]:
    inputs = {name: functions.array(array) for name, array in SIDE.items()}
    return [np.asarray(functions.numpy(x)) for x in joint_oracle(Oracle(functions, STREAMS), inputs)]


@pytest.mark.parametrize("policy", ["direct", "fusable"])
@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_joint_attention_of_two_streams_equals_numpy(policy: str, device: str) -> None:
    for have, want in zip(joint_found(policy, device), joint_wanted(numpy_functions()), strict=True):
        assert np.abs(have - want).max() / np.abs(want).max() < 1e-5


@pytest.mark.parity
def test_joint_attention_of_two_streams_equals_torch() -> None:
    for have, want in zip(joint_found("fusable"), joint_wanted(torch_functions()), strict=True):
        assert np.abs(have - want).max() / np.abs(want).max() < 1e-5


# -- constructors and errors -----------------------------------------------------------------------------------------
SIGNATURES = {
    BertEncoderLayer: "layer_prefix, hidden_size, num_heads, head_dim, eps, qkv_style='bert', "
                      "attention_mask_input='attention_mask'",
    NomicEncoderLayer: "layer_prefix, hidden_size, num_heads, head_dim, eps, attention_mask_input='attention_mask'",
    VitSelfAttn: "qkv_weight, qkv_bias, out_weight, out_bias, num_heads, head_dim",
    LayerScale: "gamma_key",
    VisionSwiGluFfn: "layer_prefix, eps",
    ClsTokenPool: "",
    LayerNorm: "gamma_key, beta_key, eps",
    GeluFfn: "intermediate_w, intermediate_b, output_w, output_b, approx_gelu=False",
    GatherFromInput: "input_name, weight_key, axis=0",
    GatherAdd: "input_name, weight_key, axis=0",
    AttnMask: "batch, seq, input_name=None",
    DualStream: "name, a, b, f",
}  # fmt: skip


@pytest.mark.parametrize("stage", SIGNATURES, ids=lambda stage: stage.__name__)
def test_constructors_are_those_that_were_promised(stage: type[FlowStage]) -> None:
    parameters = [p.strip() for p in SIGNATURES[stage].split(",") if p]
    has = [
        p.name if p.default is p.empty else f"{p.name}={p.default!r}"
        for p in inspect.signature(stage).parameters.values()
    ]
    assert has[: len(parameters)] == parameters
    assert all("=" in extra for extra in has[len(parameters) :])


@pytest.mark.parametrize(
    "stage",
    [CASES[n][0][-1] for n in CASES if "," not in n and n != "GatherFromInput"],
    ids=lambda stage: type(stage).__name__,
)
def test_a_stage_that_gets_no_value_says_so(stage: FlowStage) -> None:
    first = Custom(lambda emit, value: None)
    ctx = rlx.FlowCtx(rlx.GraphModule.hir("m"))
    assert first.emit(ctx, None) is None
    with pytest.raises(GraphError, match=f"stage {type(stage).__name__}: needs a value"):
        stage.emit(ctx, None)


def test_mistakes_are_named() -> None:
    with pytest.raises(GraphError, match="qkv_style is 'mpent'") as caught:
        BertEncoderLayer(**_LAYER, qkv_style="mpent")
    assert caught.value.hint == "did you mean 'mpnet'?"
    with pytest.raises(GraphError, match="NomicEncoderLayer: no RoPE tables flow here"):
        results_of([NomicEncoderLayer(**_LAYER)], NOMIC, "direct")
    with pytest.raises(GraphError, match="both one key, or both three"):
        VitSelfAttn("qkv", ("a", "b", "c"), "o", "b", 3, 8)
    with pytest.raises(GraphError, match="has no qkv_weight"):
        VitSelfAttn(None, None, "o", "b", 3, 8)
    with pytest.raises(GraphError, match=r"takes \[batch, seq, hidden\]"):
        results_of([ClsTokenPool(), VitSelfAttn("qkv", None, "o", "b", 3, 8)], {}, "direct")
    short = {**VIT, "qkv.weight": VIT["qkv.weight"][:-1]}
    with pytest.raises(GraphError, match=r"weight 'qkv.weight': shape is \[71, 24\], expected \[72, 24\]"):
        results_of([VitSelfAttn("qkv.weight", "qkv.bias", "out.weight", "out.bias", HEADS, HEAD)], short, "direct")


@dataclass(frozen=True)
class BiasedAttention(FlowStage):
    """Attention of a value to itself in one head, with the value of an input added to the scores."""

    kind: str

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        ctx.set_named(ATTENTION_BIAS, ctx.flow_input("bias"))
        x = ctx.need(value, "BiasedAttention")
        heads = x.reshape(*x.shape[:2], 1, HIDDEN)
        return ctx.wrap(attend(ctx, heads, heads, heads, "attention_mask", self.kind))


@pytest.mark.parametrize(
    ("kind", "behind", "ahead"),
    [(MaskKind.NONE, SEQ, SEQ), (MaskKind.CAUSAL, SEQ, 0), (MaskKind.sliding(3), 2, 0), (MaskKind.near(2), 2, 2)],
)
def test_a_named_bias_is_added_to_the_scores_whatever_an_encoder_sees(kind: str, behind: int, ahead: int) -> None:
    bias = RNG.standard_normal((BATCH, 1, SEQ, SEQ)).astype(np.float32)
    bias[:, :, :, 5] = -np.inf  # as at padding
    flow = ModelFlow("biased").input("x", X.shape).input("bias", bias.shape).stage(BiasedAttention(kind))
    (attended,) = rlx.compile(flow.build().module).run({"x": X, "bias": bias})
    back = np.arange(SEQ)[:, None] - np.arange(SEQ)
    x = X.astype(np.float64)
    scores = np.einsum("bqd,bkd->bqk", x, x) / np.sqrt(HIDDEN) + bias[:, 0]
    scores = np.where((back <= behind) & (back >= -ahead), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(attended, weights @ x, rtol=2e-5, atol=2e-6)
