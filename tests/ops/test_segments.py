"""Packed sequences: with segment ids, each sequence has what it has alone, and windows reach to both sides."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from targets import compiled, widths

import rlx
from rlx.errors import GraphError
from rlx.ops.attention import LARGEST_WINDOW, MaskKind
from rlx.ops.recurrent import CHUNK
from rlx.transforms import vjp

Array = npt.NDArray[Any]
PLACES = ["reference", "toy", *(t.name for t in widths())]
EVERY_PLACE = pytest.mark.parametrize("place", PLACES)
KINDS = (MaskKind.NONE, MaskKind.CAUSAL, MaskKind.sliding(9), MaskKind.near(5))
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
LENGTHS = (64, 30, 1, 33, 5)  # of the sequences in a row; the second one begins at a block of keys


def operands(seq: int, heads: int = 4, kv_heads: int = 2, dim: int = 16, value: int = 20) -> dict[str, Array]:
    rng = np.random.default_rng(seq)
    shapes = {"q": (heads, dim), "k": (kv_heads, dim), "v": (kv_heads, value), "dy": (heads, value)}
    return {n: rng.standard_normal((1, seq, *shape)).astype(np.float32) for n, shape in shapes.items()}


def attend(arrays: dict[str, Array], kind: str, place: str, ids: Array | None = None) -> list[Array]:
    """Attention, and the gradients of q, k and v."""
    graph = rlx.Graph("attention")
    q, k, v = (graph.input(n, arrays[n].shape, "f32") for n in "qkv")
    mask = None if ids is None else graph.input("ids", ids.shape, "i32")
    graph.set_outputs([graph.attention(q, k, v, mask, mask_kind=kind)])
    inputs = {n: arrays[n] for n in "qkv"} | {"d_output": arrays["dy"]} | ({} if ids is None else {"ids": ids})
    return [np.asarray(x) for x in compiled(vjp(graph, ["q", "k", "v"]), place).run(inputs)]


def packed_ids(lengths: tuple[int, ...], padding: int = 0) -> Array:
    numbers = [*range(len(lengths)), -1]
    return np.repeat(np.array(numbers, np.int32), (*lengths, padding))[None]


@EVERY_PLACE
@EVERY_KIND
def test_packed_sequences_are_what_they_are_alone(kind: str, place: str) -> None:
    ids = packed_ids(LENGTHS, padding=7)
    arrays = operands(ids.shape[1])
    actual = attend(arrays, MaskKind.segments(kind), place, ids)
    start = 0
    for length in LENGTHS:
        piece = slice(start, start + length)
        alone = attend({n: a[:, piece] for n, a in arrays.items()}, kind, place)
        for ours, exact in zip(actual, alone, strict=True):
            np.testing.assert_allclose(ours[:, piece], exact, rtol=0, atol=1e-6 * max(1, np.abs(exact).max()))
        if start % 64 == 0 and place not in ("reference", "toy"):
            np.testing.assert_array_equal(actual[0][:, piece], alone[0])
        start += length
    for array in actual:
        np.testing.assert_array_equal(array[:, start:], 0)  # padding sees nothing and is not seen


@EVERY_PLACE
@EVERY_KIND
def test_ids_may_come_in_any_order(kind: str, place: str) -> None:
    rng = np.random.default_rng(3)
    ids = rng.integers(-1, 4, (1, 150)).astype(np.int32)
    arrays = operands(150)
    seen = (ids[0][:, None] == ids[0]) & (ids[0] >= 0)
    gap = np.arange(150)[:, None] - np.arange(150)
    seen &= {"c": gap >= 0, "s": (gap >= 0) & (gap < 9), "near": abs(gap) <= 5}.get(
        "near" if kind.startswith("near") else kind[0], np.True_
    )
    q, k, v = (arrays[n].astype(np.float64)[0] for n in "qkv")
    k, v = (np.repeat(x, 2, axis=1) for x in (k, v))
    weights = np.where(seen, np.exp(np.einsum("qhd,khd->hqk", q, k) / 4), 0)
    total = weights.sum(-1, keepdims=True)
    exact = np.einsum("hqk,khe->qhe", weights / np.where(total == 0, 1, total), v)
    (y, *_) = attend(arrays, MaskKind.segments(kind), place, ids)
    np.testing.assert_allclose(y[0], exact, rtol=0, atol=2e-6)


@EVERY_PLACE
@pytest.mark.parametrize("kind", (MaskKind.SEGMENTS, MaskKind.segments(MaskKind.CAUSAL)))
@pytest.mark.parametrize("dim", (16, 20))
def test_another_sequence_may_hold_nan(dim: int, kind: str, place: str) -> None:
    ids = packed_ids((20, 20, 30))
    arrays = operands(70, value=dim)
    clean = attend(arrays, kind, place, ids)[0]
    for name in "kv":
        arrays[name][:, 20:40] = np.nan
    arrays["v"][:, 45] = np.inf
    actual = attend(arrays, kind, place, ids)[0]
    np.testing.assert_array_equal(actual[:, :20], clean[:, :20])
    assert np.isnan(actual[:, 20:40]).all() and not np.isnan(actual[:, 40:45]).any()


@EVERY_KIND
def test_nothing_as_large_as_the_scores_is_kept(kind: str) -> None:
    graph = rlx.Graph("attention")
    q, k, v = (graph.input(n, (1, "seq", 2, 16), "f32") for n in "qkv")
    ids = graph.input("ids", (1, "seq"), "i32")
    graph.set_outputs([graph.attention(q, k, v, ids, mask_kind=MaskKind.segments(kind))])
    report = rlx.compile(vjp(graph, ["q", "k", "v"]), threads=1).memory({"seq": 1024})
    assert max(buffer.bytes for buffer in report.buffers) == 4 * 1024 * 2 * 16  # that of q
    assert report.scratch < 1024 * 1024


def test_kinds_that_do_not_combine() -> None:
    assert MaskKind.segments() == MaskKind.SEGMENTS
    with pytest.raises(GraphError, match=r"custom\+segments"):
        MaskKind.segments(MaskKind.CUSTOM)
    with pytest.raises(GraphError, match="at least 0, found -1"):
        MaskKind.near(-1)


def test_positions_that_restart_turn_each_sequence_as_alone() -> None:
    graph = rlx.Graph("rope")
    x = graph.input("x", (1, "seq", 2, 8), "f32")
    cos, sin = (graph.input(n, (64, 4), "f32") for n in ("cos", "sin"))
    graph.set_outputs([x.rope(cos, sin, graph.input("positions", (1, "seq"), "i32"))])
    run = rlx.compile(graph).run
    rng = np.random.default_rng(0)
    angles = np.outer(np.arange(64), 100.0 ** -(np.arange(4) / 4))
    tables = {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    values, lengths = rng.standard_normal((1, 40, 2, 8)).astype(np.float32), (9, 1, 30)
    at = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)[None]
    (packed,) = run({"x": values, "positions": at, **tables})
    ends = np.cumsum(lengths)
    for end, length in zip(ends, lengths, strict=True):
        piece = slice(end - length, end)
        (alone,) = run({"x": values[:, piece], "positions": at[:, piece], **tables})
        np.testing.assert_array_equal(packed[:, piece], alone)


# -- recurrences ------------------------------------------------------------------------------------------------------
def drawn(seed: int, *shape: int, low: float = -1.0, high: float = 1.0) -> Array:
    return np.random.default_rng([seed, *shape]).uniform(low, high, shape).astype(np.float32)


SEQ = 80
RECURRENCES: dict[str, tuple[dict[str, Array], set[str], dict[str, int]]] = {  # operands, those of tokens, attributes
    "selective_scan": (
        {"x": drawn(0, 1, SEQ, 6), "delta": drawn(1, 1, SEQ, 6, low=0.01, high=0.5),
         "a": drawn(2, 6, 3, low=-2, high=0), "b": drawn(3, 1, SEQ, 3), "c": drawn(4, 1, SEQ, 3), "d": drawn(5, 6)},
        {"x", "delta", "b", "c"}, {"state_size": 3},
    ),
    "gated_delta_net": (
        {"q": drawn(0, 1, SEQ, 2, 16) / 4, "k": drawn(1, 1, SEQ, 2, 16) / 4, "v": drawn(2, 1, SEQ, 2, 16),
         "g": drawn(3, 1, SEQ, 2, low=-1, high=0), "beta": drawn(4, 1, SEQ, 2, low=0)},
        {"q", "k", "v", "g", "beta"}, {"state_size": 16},
    ),
    "gated_linear_attention_carry": (
        {"q": drawn(0, 1, SEQ, 1, 4), "k": drawn(1, 1, SEQ, 1, 4), "v": drawn(2, 1, SEQ, 2, 8),
         "g": drawn(3, 1, SEQ, 2, low=-1, high=0), "state": np.zeros((1, 2, 4, 8), np.float32)},
        {"q", "k", "v", "g"}, {},
    ),
    "depthwise_conv1d_causal": (
        {"x": drawn(0, 1, SEQ, 6), "weight": drawn(1, 6, 4), "left_pad": np.zeros((1, 3, 6), np.float32)},
        {"x"}, {"kernel_size": 4},
    ),
}  # fmt: skip


@functools.cache
def recurrence(op: str, place: str, segments: bool, gradients: bool = True) -> Any:
    """The first result of an op for any number of tokens, and the gradients of all operands if wanted."""
    arrays, of_tokens, attrs = RECURRENCES[op]
    graph = rlx.Graph(op)
    operands = [graph.input(n, (1, "seq", *a.shape[2:]) if n in of_tokens else a.shape) for n, a in arrays.items()]
    ids = [graph.input("ids", (1, "seq"), "i32")] if segments else []
    results = graph.apply(op, *operands, *ids, **attrs)
    graph.set_outputs([results[0] if op.endswith("_carry") else results])
    return compiled(vjp(graph, list(arrays)) if gradients else graph, place)


def recur(op: str, arrays: dict[str, Array], dy: Array, place: str, ids: Array | None = None) -> dict[str, Array]:
    """The first result and the gradients of all operands."""
    inputs = {n: np.ascontiguousarray(a) for n, a in (arrays | {"d_output": dy}).items()}
    inputs |= {} if ids is None else {"ids": ids}
    result = recurrence(op, place, ids is not None).run(inputs)
    return dict(zip(("y", *arrays), map(np.asarray, result), strict=True))


def pieces_alone(
    op: str, lengths: tuple[int, ...], place: str
) -> Iterator[tuple[int, dict[str, Array], dict[str, Array]]]:
    """Where each sequence begins, what it has of the results of all together, and what it has alone."""
    arrays, of_tokens, _ = RECURRENCES[op]
    dy = drawn(9, *arrays.get("v", arrays.get("x")).shape)  # type: ignore[union-attr]
    result, start = recur(op, arrays, dy, place, packed_ids(lengths)), 0
    for length in lengths:
        piece = slice(start, start + length)
        alone = {n: a[:, piece] if n in of_tokens else a for n, a in arrays.items()}
        packed = {n: a[:, piece] if n in {"y", *of_tokens} else a for n, a in result.items()}
        yield start, packed, recur(op, alone, dy[:, piece], place)
        start += length


PACKED = pytest.mark.parametrize("lengths", [(37, 1, 2, 40), (32, 32, 16), (5, 27, 16, 16, 1, 15), (1, 79), (63, 17)])


def near(actual: Array, exact: Array, name: str) -> None:
    """Within 1e-6 of the largest value."""
    np.testing.assert_allclose(actual, exact, rtol=0, atol=1e-6 * np.abs(exact).max(initial=0), err_msg=name)


@EVERY_PLACE
@PACKED
@pytest.mark.parametrize("op", RECURRENCES)
def test_a_recurrence_is_reset_where_ids_change(op: str, lengths: tuple[int, ...], place: str) -> None:
    arrays, of_tokens, _ = RECURRENCES[op]
    shared = arrays.keys() - of_tokens - {"state", "left_pad"}  # weights of all sequences
    sums: dict[str, Array] = {}
    for _, packed, alone in pieces_alone(op, lengths, place):
        for name in ("y", *of_tokens):
            first = int(
                name == "g"
            )  # the first gate of a sequence gates nothing: its gradient is 0, or what rounding left
            near(packed[name][:, first:], alone[name][:, first:], name)
        for name in shared:
            sums[name] = sums.get(name, 0) + alone[name].astype(np.float64)
    for name in shared:
        near(packed[name], sums[name], name)


@EVERY_PLACE
@PACKED
@pytest.mark.parametrize("op", RECURRENCES)
def test_a_sequence_that_begins_with_a_chunk_has_the_bits_that_it_has_alone(
    op: str, lengths: tuple[int, ...], place: str
) -> None:
    """Results and gradients. The first gate of a sequence gates nothing: its gradient is exactly 0."""
    _, of_tokens, _ = RECURRENCES[op]
    for start, packed, alone in pieces_alone(op, lengths, place):
        if start % CHUNK:
            continue
        for name in {"y", *of_tokens} - {"g"}:
            np.testing.assert_array_equal(packed[name], alone[name], name)
        if "g" in of_tokens:
            np.testing.assert_array_equal(packed["g"][:, 1:], alone["g"][:, 1:])
            assert start == 0 or not packed["g"][:, 0].any()


@EVERY_PLACE
@PACKED
@pytest.mark.parametrize("op", RECURRENCES)
def test_a_recurrence_without_a_gradient_is_that_of_its_sequences(
    op: str, lengths: tuple[int, ...], place: str
) -> None:
    """To the bit for a sequence that begins with a chunk, however short it is."""
    arrays, of_tokens, _ = RECURRENCES[op]
    (packed,) = recurrence(op, place, True, gradients=False).run(arrays | {"ids": packed_ids(lengths)})
    start = 0
    for length in lengths:
        piece = slice(start, start + length)
        tokens = {n: a[:, piece].copy() for n, a in arrays.items() if n in of_tokens}
        (alone,) = recurrence(op, place, False, gradients=False).run(arrays | tokens)
        if start % CHUNK == 0:
            np.testing.assert_array_equal(np.asarray(packed)[:, piece], np.asarray(alone))
        near(np.asarray(packed)[:, piece], np.asarray(alone), "y")
        start += length


def test_a_selective_scan_with_segments_is_as_many_launches_as_without() -> None:
    arrays, _, attrs = RECURRENCES["selective_scan"]

    def launches(segments: bool) -> list[str]:
        graph = rlx.Graph("scan")
        operands = [graph.input(n, a.shape) for n, a in arrays.items()]
        ids = [graph.input("ids", (1, SEQ), "i32")] if segments else []
        graph.set_outputs([graph.selective_scan(*operands, *ids, **attrs)])
        plan = rlx.compile(vjp(graph, ["x", "a"])).plan.main
        return [launch.kernel.name for launch in plan.launches]

    assert launches(True) == launches(False)


def test_the_gradient_of_a_scan_keeps_no_state_of_every_token() -> None:
    graph, seq, channels, n = rlx.Graph("scan"), 512, 64, 16
    shapes = {
        "x": (1, seq, channels),
        "delta": (1, seq, channels),
        "a": (channels, n),
        "b": (1, seq, n),
        "c": (1, seq, n),
    }
    operands = [graph.input(name, shape, "f32") for name, shape in shapes.items()]
    ids = graph.input("ids", (1, seq), "i32")
    graph.set_outputs([graph.apply("selective_scan", *operands, None, ids, state_size=n)])
    report = rlx.compile(vjp(graph, ["x", "a"]), threads=1).memory()
    assert max(buffer.bytes for buffer in report.buffers) < 4 * seq * channels * n / 4


@EVERY_PLACE
@pytest.mark.parametrize("kind", [MaskKind.near(LARGEST_WINDOW), MaskKind.sliding(LARGEST_WINDOW)])
def test_windows_of_any_size_see_every_key(kind: str, place: str) -> None:
    arrays = operands(70)
    wide = MaskKind.NONE if kind.startswith("near") else MaskKind.CAUSAL
    for actual, expected in zip(attend(arrays, kind, place), attend(arrays, wide, place), strict=True):
        assert actual.tobytes() == expected.tobytes()


@pytest.mark.parametrize("size", [LARGEST_WINDOW + 1, 2**63 - 1, 2**64, 10**40])
@pytest.mark.parametrize("name", ["near", "sliding"])
def test_windows_that_positions_cannot_reach_are_refused(name: str, size: int) -> None:
    g = rlx.Graph("g")
    q = g.input("q", (1, 4, 2, 8))
    with pytest.raises(GraphError, match=f"the window of mask kind .* is larger than {LARGEST_WINDOW}"):
        g.attention(q, q, q, mask_kind=f"{name}({size})")
    with pytest.raises(GraphError, match="is larger than"):
        getattr(MaskKind, name)(size)
