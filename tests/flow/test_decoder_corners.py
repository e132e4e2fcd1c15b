"""Decoder stages in the settings that go wrong silently: local RoPE tables, positions after a past, taps, gates, picks.

The oracle of each is plain NumPy in float64, or (mark parity) a small random model of transformers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlx.errors import GraphError, RlxError, ShapeError
from rlx.flow import ModelFlow, SideOutputs
from rlx.flow.stages import (
    DecodeRopeParams,
    DeltaNetLayer,
    FlowStage,
    GatedAttentionLayer,
    GatherLastToken,
    GemmaDecodeLayer,
    GemmaDecoder,
    GemmaKvTap,
    GemmaRmsNorm,
    LlamaDecodeLayer,
    LlamaDecoder,
    LlamaKvTap,
    Qwen3DecodeLayer,
    Qwen3Decoder,
    RopeTables,
    Sequence,
)

Array = np.ndarray[Any, Any]
HIDDEN, HEADS, KV, HEAD, FFN, EPS = 8, 4, 2, 4, 12, 1e-2
SIZES: dict[str, Any] = {
    "layer_prefix": "l", "num_heads": HEADS, "num_kv_heads": KV, "head_dim": HEAD, "eps": EPS
}  # fmt: skip
DEVICES = ["cpu", "reference"]


def draws(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def weights(*, norm: bool = False, bias: bool = False, gate: bool = False, post: bool = False) -> dict[str, Array]:
    rows = {"q": HEADS * HEAD * (1 + gate), "k": KV * HEAD, "v": KV * HEAD}
    arrays = {f"l.self_attn.{n}_proj.weight": draws(i, r, HIDDEN) / 2 for i, (n, r) in enumerate(rows.items())}
    arrays["l.self_attn.o_proj.weight"] = draws(4, HIDDEN, HEADS * HEAD) / 2
    arrays |= {f"l.mlp.{n}_proj.weight": draws(5 + i, FFN, HIDDEN) / 2 for i, n in enumerate(("gate", "up"))}
    arrays["l.mlp.down_proj.weight"] = draws(7, HIDDEN, FFN) / 2
    names = ["input", "post_attention", *(["pre_feedforward", "post_feedforward"] if post else [])]
    arrays |= {f"l.{n}_layernorm.weight": 1 + draws(10 + i, HIDDEN) / 3 for i, n in enumerate(names)}
    if norm:
        arrays |= {f"l.self_attn.{n}_norm.weight": 1 + draws(20 + i, HEAD) / 3 for i, n in enumerate("qk")}
    if bias:
        arrays |= {f"l.self_attn.{n}_proj.bias": draws(30 + i, r) for i, (n, r) in enumerate(rows.items())}
    return arrays


def table(base: float, rows: int = 16) -> tuple[Array, Array]:
    angles = np.outer(np.arange(rows), 1 / base ** (np.arange(HEAD // 2) / (HEAD // 2)))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


GLOBAL, LOCAL = table(1e4), table(3.0)
BOTH = (RopeTables(*LOCAL, cos_key="rope.local.cos", sin_key="rope.local.sin"), RopeTables(*GLOBAL))


class Oracle:
    """A decoder layer in float64; `gemma` has norms by 1 + weight, norms after what is added, and a GELU gate."""

    def __init__(self, weights: dict[str, Array], tables: tuple[Array, Array], *, eps: float = EPS, gemma: bool = False,
                 gated: bool = False, scale: float = HEAD**-0.5, cap: float | None = None) -> None:  # fmt: skip
        self.w = {name: w.astype(np.float64) for name, w in weights.items()}
        self.tables, self.eps, self.gemma, self.gated = tables, eps, gemma, gated
        self.scale, self.cap = scale, cap

    def norm(self, x: Array, name: str) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * (self.w[f"l.{name}.weight"] + self.gemma)

    def linear(self, x: Array, name: str) -> Array:
        return x @ self.w[f"l.{name}.weight"].T + self.w.get(f"l.{name}.bias", 0.0)

    def heads(self, x: Array, which: str, at: Array, *, normed: bool = True) -> Array:
        x = x.reshape(*x.shape[:2], -1, HEAD)
        if normed and which in "qk" and f"l.self_attn.{which}_norm.weight" in self.w:
            x = self.norm(x, f"self_attn.{which}_norm")
        if which == "v":
            return x
        cos, sin = (t.astype(np.float64)[at][:, :, None] for t in self.tables)
        a, b = x[..., : HEAD // 2], x[..., HEAD // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def kv(self, x: Array, at: Array) -> tuple[Array, Array]:
        h = self.norm(x, "input_layernorm")
        k, v = (self.heads(self.linear(h, f"self_attn.{n}_proj"), n, at) for n in "kv")
        return k, v

    def __call__(self, x: Array, at: Array, past: tuple[Array, Array] | None = None) -> Array:
        batch, new, _ = x.shape
        q = self.linear(self.norm(x, "input_layernorm"), "self_attn.q_proj")
        gate: Array | float = 1.0
        if self.gated:
            both = q.reshape(batch, new, HEADS, 2 * HEAD)
            q, gate = both[..., :HEAD], 1 / (1 + np.exp(-both[..., HEAD:].reshape(batch, new, -1)))
        q, (k, v) = self.heads(q, "q", at), self.kv(x, at)
        if past is not None:
            k, v = (np.concatenate([p.reshape(batch, -1, KV, HEAD), n], 1) for p, n in zip(past, (k, v), strict=True))
        k, v = (np.repeat(t, HEADS // KV, 2) for t in (k, v))
        scores = np.einsum("bqhd,bkhd->bhqk", q, k) * self.scale
        scores = scores if self.cap is None else self.cap * np.tanh(scores / self.cap)
        behind = np.arange(new)[:, None] + k.shape[1] - new - np.arange(k.shape[1])
        odds = np.exp(np.where(behind >= 0, scores, -np.inf))
        seen = np.einsum("bhqk,bkhd->bqhd", odds / odds.sum(-1, keepdims=True), v).reshape(batch, new, -1)
        out = self.linear(seen * gate, "self_attn.o_proj")
        x = x + (self.norm(out, "post_attention_layernorm") if self.gemma else out)
        h = self.norm(x, "pre_feedforward_layernorm" if self.gemma else "post_attention_layernorm")
        g = self.linear(h, "mlp.gate_proj")
        g = g / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) if self.gemma else g / (1 + np.exp(-g))
        out = self.linear(g * self.linear(h, "mlp.up_proj"), "mlp.down_proj")
        return x + (self.norm(out, "post_feedforward_layernorm") if self.gemma else out)


def close(actual: Array, wanted: Array, tolerance: float = 3e-5) -> None:
    atol = tolerance * max(1.0, np.abs(wanted).max())
    np.testing.assert_allclose(actual, wanted.reshape(actual.shape), rtol=0, atol=atol)


# -- picking tokens --------------------------------------------------------------------------------------------------
def last_tokens(shape: tuple[Any, ...], batch: int) -> Any:
    return ModelFlow("f").input("x", shape).stage(GatherLastToken(batch=batch)).build()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(2, 3, 1), ("batch", "seq", 1)])
def test_a_last_token_is_one_of_its_own_row(device: str, shape: Any) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3, 1)
    f = last_tokens(shape, 2).compile(device)
    for index in ([2, 0], [0, 2]):
        rows = f.run({"x": x, "last_token_idx": np.array(index, np.int32)})[0]
        np.testing.assert_array_equal(rows, x[[0, 1], index])
    for index in ([3, 0], [0, -1], [0, 3]):  # of the next row, of the one before, of none
        with pytest.raises(RlxError):
            f.run({"x": x, "last_token_idx": np.array(index, np.int32)})


def test_the_batch_of_last_tokens_is_that_of_the_value() -> None:
    with pytest.raises(ShapeError, match=r"stage GatherLastToken: batch is 3, the value is f32\[2, 3, 1\]"):
        last_tokens((2, 3, 1), 3)
    f = last_tokens(("batch", "seq", 1), 3).compile("cpu")
    with pytest.raises(RlxError, match="2"):
        f.run({"x": np.zeros((2, 3, 1), np.float32), "last_token_idx": np.zeros(3, np.int32)})


# -- which tables ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rope", ["rope", "rope.local"])
def test_a_tap_gives_the_keys_that_its_layer_sees(rope: str) -> None:
    w = weights(norm=True, bias=True, post=True)
    side, x = SideOutputs(), draws(40, 2, 5, HIDDEN)
    tap = GemmaKvTap("l", HEAD, side, EPS, rope=rope)
    flow = ModelFlow("f").input("x", x.shape).sequence(*BOTH, GemmaRmsNorm("l.input_layernorm.weight", EPS), tap)
    _, *tapped = flow.with_extra_outputs(side).build(w).compile("reference").run({"x": x})
    oracle = Oracle(w, LOCAL if rope == "rope.local" else GLOBAL, gemma=True)
    for mine, wanted in zip(tapped, oracle.kv(x.astype(np.float64), np.arange(5)[None]), strict=True):
        close(mine, wanted)


@pytest.mark.parametrize(("norm", "bias", "eps"), [(True, False, 1e-1), (False, True, 1e-5), (True, True, 1e-2)])
def test_a_llama_tap_norms_keys_by_its_eps_and_adds_biases(norm: bool, bias: bool, eps: float) -> None:
    w, side, x = weights(norm=norm, bias=bias), SideOutputs(), draws(41, 2, 5, HIDDEN) / 10
    flow = ModelFlow("f").input("x", x.shape).rope_tables(*GLOBAL).stage(LlamaKvTap("l", HEAD, eps, side))
    _, *tapped = flow.with_extra_outputs(side).build(w).compile("reference").run({"x": x})
    oracle = Oracle(w, GLOBAL, eps=eps)
    for mine, wanted in zip(tapped, oracle.kv(x.astype(np.float64), np.arange(5)[None]), strict=True):
        close(mine, wanted)


PAST = draws(42, 2, 3, KV * HEAD), draws(43, 2, 3, KV * HEAD)


def step(
    stage: FlowStage, before: tuple[FlowStage, ...] = (), after: tuple[FlowStage, ...] = (), symbolic: bool = False,
    new: int = 2, **inputs: Array,
) -> tuple[ModelFlow, dict[str, Array]]:  # fmt: skip
    """A flow of one step after three tokens whose keys and values the caller keeps, and its inputs."""
    feeds = {"x": draws(44, 2, new, HIDDEN), "past_k_0": PAST[0], "past_v_0": PAST[1], **inputs}
    flow = ModelFlow("step").input("x", ("batch", "seq", HIDDEN) if symbolic else feeds["x"].shape)
    for name in ("past_k_0", "past_v_0"):
        flow = flow.input(name, ("batch", "past", KV * HEAD) if symbolic else PAST[0].shape)
    for name, array in inputs.items():
        open_sizes = symbolic and name == "positions"
        flow = flow.input(
            name, ("batch", "seq") if open_sizes else array.shape, "f32" if array.dtype.kind == "f" else "i32"
        )
    return flow.sequence(*before).bind_decode_inputs(1).sequence(*after, stage), feeds


ROWS = slice(3, 5)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("rope", ["rope", "rope.local"])
@pytest.mark.parametrize("how", ["tables before", "tables after", "positions", "rows"])
def test_a_step_turns_by_the_tables_that_it_names(rope: str, how: str, symbolic: bool) -> None:
    w = weights(norm=True, post=True)
    stage = GemmaDecodeLayer(**SIZES, layer_idx=0, style="gemma3", rope=rope)
    at = np.arange(3, 5)[None]
    global_rows = {"rope_cos": GLOBAL[0][ROWS], "rope_sin": GLOBAL[1][ROWS]}
    match how:
        case "tables before":
            flow, feeds = step(stage, BOTH, symbolic=symbolic)
        case "tables after":  # rows of the global tables are bound, others flow as whole tables
            flow, feeds = step(stage, (), BOTH, symbolic, **global_rows)
        case "positions":
            at = np.array([[7, 8], [1, 2]])
            flow, feeds = step(stage, BOTH, (), symbolic, positions=at.astype(np.int32))
        case _:
            local_rows = {"rope.local_cos": LOCAL[0][ROWS], "rope.local_sin": LOCAL[1][ROWS]}
            flow, feeds = step(stage, (), (), symbolic, **global_rows, **local_rows)
    oracle = Oracle(w, LOCAL if rope == "rope.local" else GLOBAL, gemma=True)
    wanted = oracle(feeds["x"].astype(np.float64), at, PAST)
    close(flow.build(w).compile("reference").run(feeds)[0], wanted)
    if symbolic:
        close(flow.build(w).compile("cpu").run(feeds)[0], wanted)


def test_rows_of_one_step_are_not_tables() -> None:
    w = weights()
    stage = LlamaDecodeLayer(**SIZES, layer_idx=0)
    flow, feeds = step(stage, (DecodeRopeParams(GLOBAL[0][ROWS], GLOBAL[1][ROWS]),))
    close(
        flow.build(w).compile("reference").run(feeds)[0],
        Oracle(w, GLOBAL)(feeds["x"].astype(np.float64), np.arange(3, 5)[None], PAST),
    )


@pytest.mark.parametrize("symbolic", [False, True])
def test_a_step_has_one_row_per_new_token(symbolic: bool) -> None:
    """A whole table in place of the rows of a step would turn new tokens as the first ones."""
    stage = LlamaDecodeLayer(**SIZES, layer_idx=0)
    tables = {"rope_cos": GLOBAL[0], "rope_sin": GLOBAL[1]}
    if not symbolic:
        with pytest.raises(ShapeError, match="stage LlamaDecodeLayer: a step of 2 tokens has 16 rows of RoPE tables"):
            step(stage, **tables)[0].build(weights())
        return
    flow = ModelFlow("step").input("x", ("batch", "seq", HIDDEN))
    for name in ("past_k_0", "past_v_0"):
        flow = flow.input(name, ("batch", "past", KV * HEAD))
    flow = flow.input("rope_cos", ("rows", HEAD // 2)).input("rope_sin", ("rows", HEAD // 2))
    run = flow.bind_decode_inputs(1).stage(stage).build(weights()).compile("cpu")
    feeds = {"x": draws(44, 2, 2, HIDDEN), "past_k_0": PAST[0], "past_v_0": PAST[1]}
    result = run.run({**feeds, "rope_cos": GLOBAL[0][ROWS], "rope_sin": GLOBAL[1][ROWS]})[0]
    close(result, Oracle(weights(), GLOBAL)(feeds["x"].astype(np.float64), np.arange(3, 5)[None], PAST))
    with pytest.raises(RlxError):
        run.run({**feeds, **tables})


def pairs_of_halves(w: dict[str, Array]) -> dict[str, Array]:
    """Weights whose queries and keys lie in pairs where those given lie in halves."""
    order = np.arange(HEAD).reshape(2, HEAD // 2).T.reshape(-1)
    moved = dict(w)
    for n in "qk":
        rows = w[f"l.self_attn.{n}_proj.weight"]
        moved[f"l.self_attn.{n}_proj.weight"] = rows.reshape(-1, HEAD, HIDDEN)[:, order].reshape(rows.shape)
    return moved


@pytest.mark.parametrize("how", ["fixed rows", "rows of the main tables", "rows of other tables"])
def test_rows_of_a_step_turn_in_their_own_style(how: str) -> None:
    w, rows = weights(), {"rope_cos": GLOBAL[0][ROWS], "rope_sin": GLOBAL[1][ROWS]}
    other = {f"rope.local_{of}": table for of, table in zip(("cos", "sin"), (t[ROWS] for t in GLOBAL), strict=True)}
    pairs = RopeTables(*LOCAL, style="pairs", cos_key="rope.local.cos", sin_key="rope.local.sin")
    past = tuple(p.reshape(2, 3, KV, HEAD // 2, 2).swapaxes(-1, -2).reshape(p.shape) for p in PAST)
    match how:
        case "fixed rows":  # after tables of the other style
            before = (RopeTables(*LOCAL), DecodeRopeParams(GLOBAL[0][ROWS], GLOBAL[1][ROWS], "pairs"))
            flow, feeds = step(LlamaDecodeLayer(**SIZES, layer_idx=0), before)
            w, wanted_past = pairs_of_halves(w), (past[0], PAST[1])
        case "rows of the main tables":  # which are halves, whatever was made last
            flow, feeds = step(LlamaDecodeLayer(**SIZES, layer_idx=0), (RopeTables(*GLOBAL), pairs), **rows)
            wanted_past = PAST
        case _:
            stage = LlamaDecodeLayer(**SIZES, layer_idx=0, rope="rope.local")
            flow, feeds = step(stage, (pairs, RopeTables(*GLOBAL)), **rows, **other)
            w, wanted_past = pairs_of_halves(w), (past[0], PAST[1])
    wanted = Oracle(weights(), GLOBAL)(feeds["x"].astype(np.float64), np.arange(3, 5)[None], wanted_past)
    close(flow.build(w).compile("reference").run(feeds)[0], wanted)


def test_rows_of_a_step_do_not_change_the_style_of_tables() -> None:
    """A layer of a prefill turns by the tables, in their style, whatever rows are given for a step."""
    w, x = weights(), draws(45, 1, 4, HIDDEN)
    rows = DecodeRopeParams(LOCAL[0][:1], LOCAL[1][:1], "pairs")
    flow = ModelFlow("f").input("x", x.shape).sequence(RopeTables(*GLOBAL), rows, LlamaDecoder(**SIZES))
    wanted = Oracle(w, GLOBAL)(x.astype(np.float64), np.arange(4)[None])
    close(flow.build(w).compile("reference").run({"x": x})[0], wanted)


def test_a_step_of_layers_that_do_not_turn_needs_no_rows() -> None:
    w, still = weights(), (np.ones_like(GLOBAL[0]), np.zeros_like(GLOBAL[1]))
    feeds = {"x": draws(44, 2, 2, HIDDEN), "past_k_0": PAST[0], "past_v_0": PAST[1]}
    flow = ModelFlow("step").input("x", (2, 2, HIDDEN)).input("past_k_0", PAST[0].shape)
    flow = flow.input("past_v_0", PAST[1].shape).bind_decode_inputs(1, rope=False)
    result = flow.stage(LlamaDecodeLayer(**SIZES, layer_idx=0, rope=None)).build(w).compile("reference").run(feeds)[0]
    close(result, Oracle(w, still)(feeds["x"].astype(np.float64), np.arange(3, 5)[None], PAST))
    with pytest.raises(GraphError, match="stage LlamaDecodeLayer: no RoPE tables flow here"):
        flow.stage(LlamaDecodeLayer(**SIZES, layer_idx=0)).build(w)


def test_rows_of_a_step_have_one_shape() -> None:
    with pytest.raises(ShapeError, match="stage DecodeRopeParams: cos and sin"):
        DecodeRopeParams(GLOBAL[0][:1], GLOBAL[1][:2])
    with pytest.raises(GraphError, match="stage DecodeRopeParams: style is 'half'"):
        DecodeRopeParams(GLOBAL[0][:1], GLOBAL[1][:1], "half")


@pytest.mark.parametrize(
    "stage",
    [
        LlamaDecoder(**SIZES, rope="typo"), Qwen3Decoder(**SIZES, rope="typo"), GemmaDecoder(**SIZES, rope="typo"),
        GatedAttentionLayer(**SIZES, rope="typo"), LlamaDecodeLayer(**SIZES, rope="typo", layer_idx=0),
        Qwen3DecodeLayer(**SIZES, rope="typo", layer_idx=0), GemmaDecodeLayer(**SIZES, rope="typo", layer_idx=0),
        GemmaKvTap("l", HEAD, SideOutputs(), rope="typo"), LlamaKvTap("l", HEAD, EPS, SideOutputs(), rope="typo"),
    ],
    ids=lambda stage: type(stage).__name__,
)  # fmt: skip
def test_tables_that_nobody_made_are_an_error(stage: FlowStage) -> None:
    gate = isinstance(stage, GatedAttentionLayer)
    flow, _ = step(stage, BOTH)
    with pytest.raises(GraphError, match=f"stage {type(stage).__name__}: no RoPE tables flow here under the name"):
        flow.build(weights(norm=True, gate=gate))


def test_tables_of_another_style_do_not_change_the_first() -> None:
    """Each pair of tables turns in its own style, whichever was made last."""
    w, x = weights(), draws(45, 1, 4, HIDDEN)
    pairs = RopeTables(*GLOBAL, style="pairs", cos_key="rope.local.cos", sin_key="rope.local.sin")
    flow = ModelFlow("f").input("x", x.shape).sequence(RopeTables(*GLOBAL), pairs, LlamaDecoder(**SIZES))
    wanted = Oracle(w, GLOBAL)(x.astype(np.float64), np.arange(4)[None])
    close(flow.build(w).compile("reference").run({"x": x})[0], wanted)
    with pytest.raises(GraphError, match=r"stage RopeTables: style is 'interleaved'") as caught:
        RopeTables(*GLOBAL, style="interleaved")
    assert "halves, pairs" in (caught.value.hint or "")
    with pytest.raises(ShapeError, match="stage RopeTables: cos and sin are"):
        RopeTables(GLOBAL[0], GLOBAL[1][:3])


def test_tables_that_are_too_short_are_seen_while_building() -> None:
    short = RopeTables(GLOBAL[0][:4], GLOBAL[1][:4])
    flow = ModelFlow("f").input("x", (1, 5, HIDDEN)).sequence(short, LlamaDecoder(**SIZES))
    with pytest.raises(ShapeError, match="stage LlamaDecoder: RoPE tables have 4 rows, positions go up to 4"):
        flow.build(weights())
    with pytest.raises(ShapeError, match="RoPE tables have 4 rows, positions go up to 4"):
        step(LlamaDecodeLayer(**SIZES, layer_idx=0), (short,))[0].build(weights())
    with pytest.raises(ShapeError, match="a step of 2 tokens has 1 rows of RoPE tables"):
        one = DecodeRopeParams(GLOBAL[0][:1], GLOBAL[1][:1])
        step(LlamaDecodeLayer(**SIZES, layer_idx=0), (one,))[0].build(weights())


# -- which settings --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stage", [LlamaDecodeLayer, Qwen3DecodeLayer, GemmaDecodeLayer, DeltaNetLayer])
def test_a_layer_of_a_step_says_whose_past_it_reads(stage: Any) -> None:
    with pytest.raises(TypeError, match="layer_idx"):
        stage("l", EPS) if stage is DeltaNetLayer else stage(**SIZES)


@pytest.mark.parametrize(
    "stage", [LlamaDecoder, LlamaDecodeLayer, Qwen3Decoder, Qwen3DecodeLayer, GemmaDecoder, GemmaDecodeLayer,
              GatedAttentionLayer],
)  # fmt: skip
def test_options_are_given_by_name(stage: Any) -> None:
    with pytest.raises(TypeError, match="positional"):
        stage("l", HEADS, KV, HEAD, EPS, True)


def test_layers_over_a_cache_that_do_not_say_which_they_are_are_counted() -> None:
    flow = ModelFlow("f").input("x", ("batch", "seq", HIDDEN)).kv_cache(2, KV, HEAD).sequence(*BOTH)
    counted = flow.stage(LlamaDecoder(**SIZES)).stage(LlamaDecoder(**SIZES))
    told = flow.stage(LlamaDecoder(**SIZES, layer_idx=0)).stage(LlamaDecoder(**SIZES, layer_idx=1))
    assert counted.build(weights()).module.text(full=True) == told.build(weights()).module.text(full=True)


def test_a_prefill_has_no_mask_of_the_caller() -> None:
    for name in ("use_custom_mask", "kv_out", "decodes"):
        with pytest.raises(TypeError, match=name):
            LlamaDecoder(**SIZES, **{name: True})
    for name in ("post_norms", "qk_norm"):  # the style says so
        with pytest.raises(TypeError, match=name):
            GemmaDecoder(**SIZES, **{name: True})


@pytest.mark.parametrize("device", DEVICES)
def test_a_gated_layer_honours_its_settings(device: str) -> None:
    w, x, side = weights(norm=True, gate=True), draws(46, 2, 5, HIDDEN), SideOutputs()
    stage = GatedAttentionLayer(
        **SIZES, unit_offset=False, score_scale=0.2, attn_logit_softcap=0.7, rope="rope.local", kv_sink=side
    )
    flow = ModelFlow("f").input("x", x.shape).sequence(*BOTH, stage).with_extra_outputs(side)
    out, k, v = flow.build(w).compile(device).run({"x": x})
    oracle, at = Oracle(w, LOCAL, gated=True, scale=0.2, cap=0.7), np.arange(5)[None]
    close(out, oracle(x.astype(np.float64), at))
    for mine, wanted in zip((k, v), oracle.kv(x.astype(np.float64), at), strict=True):
        close(mine, wanted)


# -- transformers ----------------------------------------------------------------------------------------------------
@pytest.mark.parity
def test_a_gemma_3_with_the_callers_cache_is_what_transformers_computes() -> None:
    """Local and global layers turn by tables of their own, in a prefill, its taps and the steps after it."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = transformers.Gemma3TextConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, query_pre_attn_scalar=4, sliding_window=64, layer_types=kinds,
        rms_norm_eps=1e-6, attn_implementation="eager",
        rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
                         "full_attention": {"rope_type": "default", "rope_theta": 1e6}},
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Gemma3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn_like(p) * (0.3 if "norm" in name else 0.2))
    w = {n: p.detach().numpy() for n, p in model.state_dict().items() if n != "lm_head.weight"}
    tokens = np.random.default_rng(0).integers(0, 32, (2, 9)).astype(np.int64)
    with torch.no_grad():
        wanted = model(torch.from_numpy(tokens), use_cache=True)
    tables = (RopeTables(*table(10.0), cos_key="rope.local.cos", sin_key="rope.local.sin"), RopeTables(*table(1e6)))
    ropes = ["rope.local" if kind == "sliding_attention" else "rope" for kind in kinds]
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "eps": 1e-6, "style": "gemma3"}

    def ends(flow: ModelFlow) -> ModelFlow:
        return flow.gemma_rms_norm("model.norm.weight", 1e-6).lm_head(32, 16, tied=True)

    side = SideOutputs()
    prefill = ModelFlow("p").input("tokens", ("batch", "seq"), "i64").sequence(*tables).token_embed().embed_scale(16)
    for i, rope in enumerate(ropes):
        at = f"model.layers.{i}"
        tapped = Sequence([GemmaRmsNorm(f"{at}.input_layernorm.weight", 1e-6), GemmaKvTap(at, 4, side, rope=rope)])

        def tap(emit: Any, value: Any, tapped: FlowStage = tapped) -> None:
            emit.stage(tapped, value)

        prefill = prefill.custom(tap).stage(GemmaDecoder(at, rope=rope, **sizes))
    built = ends(prefill).with_extra_outputs(side).build(w)
    logits, *cached = built.compile("cpu").run({"tokens": tokens[:, :6]})
    close(logits, wanted.logits[:, :6].numpy(), 1e-4)
    step = ModelFlow("s").input("tokens", ("batch", "seq"), "i64")
    for i in range(3):
        step = step.input(f"past_k_{i}", ("batch", "past", 8)).input(f"past_v_{i}", ("batch", "past", 8))
    step = step.sequence(*tables).bind_decode_inputs(3).token_embed().embed_scale(16)
    for i, rope in enumerate(ropes):
        step = step.stage(GemmaDecodeLayer(f"model.layers.{i}", rope=rope, layer_idx=i, **sizes))
    names = [f"past_{n}_{i}" for i in range(3) for n in "kv"]
    outputs = ends(step).build(w).compile("cpu").run({"tokens": tokens[:, 6:], **dict(zip(names, cached, strict=True))})
    close(outputs[0], wanted.logits[:, 6:].numpy(), 1e-4)
