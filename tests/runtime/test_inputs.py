"""What a compiled graph refuses, and how it says so: names, element types, ranks, sizes, symbols, limits, weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from targets import best

import rlx
from rlx.errors import BindError, CapabilityError, GraphError

f32, i32 = np.float32, np.int32
DEVICES = ["cpu", "reference"]
X, IDS, W = np.ones((2, 4), f32), np.zeros(2, i32), np.arange(12, dtype=f32).reshape(4, 3)


@pytest.fixture(params=DEVICES)
def f(request: pytest.FixtureRequest) -> rlx.CompiledGraph:
    """`x @ weight` and `ids + 1`, with n rows of each."""
    g = rlx.Graph("table")
    x, ids = g.input("hidden", ("n", 4)), g.input("ids", ("n",), "i32")
    g.set_outputs([x @ g.param("weight", (4, 3)), ids + 1])
    compiled = rlx.compile(g, request.param)
    compiled.set_param("weight", W)
    return compiled


def refusal(f: rlx.CompiledGraph, inputs: Any) -> BindError:
    """The error of a run; the same one when the shapes have been seen before, and the next good run works."""
    errors = []
    for _ in range(2):
        with pytest.raises(BindError) as caught:
            f.run(inputs)
        errors.append(caught.value)
        np.testing.assert_array_equal(f.run({"hidden": X, "ids": IDS})[0], X @ W)
    assert str(errors[0]) == str(errors[1]) and errors[0].notes == errors[1].notes
    return errors[0]


# -- names --------------------------------------------------------------------------------------------------------
def test_a_misspelt_name_gets_the_nearest(f: rlx.CompiledGraph) -> None:
    error = refusal(f, {"hiden": X, "ids": IDS})
    assert "'hiden'" in str(error) and str(error.hint).startswith("did you mean 'hidden'")


def test_an_unknown_name_gets_the_known_ones(f: rlx.CompiledGraph) -> None:
    error = refusal(f, {"hidden": X, "ids": IDS, "qqqqqq": X})
    assert "'qqqqqq'" in str(error) and error.hint == "known: hidden, ids"


def test_a_name_that_is_no_string(f: rlx.CompiledGraph) -> None:
    assert "nothing is called 3" in str(refusal(f, {"hidden": X, 3: IDS}))


@pytest.mark.parametrize("values", [{"hidden": X}, {"hidden": X, "ids": IDS} | {"ids": None}, {}, None], ids=str)
def test_missing_inputs_are_named(f: rlx.CompiledGraph, values: Any) -> None:
    error = refusal(f, values)
    assert "'ids'" in str(error)


@pytest.mark.parametrize("values", [X, [X, IDS], [("hidden", X)], (X, IDS), "hidden", 3, np.float32(3)], ids=type)
def test_inputs_that_are_no_mapping(f: rlx.CompiledGraph, values: Any) -> None:
    error = refusal(f, values)
    assert type(values).__name__ in str(error) and error.hint == "give {'hidden': ..., 'ids': ...}"


def test_inputs_by_keyword(f: rlx.CompiledGraph) -> None:
    np.testing.assert_array_equal(f(hidden=X, ids=IDS)[0], X @ W)


# -- element types ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("dtype", "shown"),
    [
        ("f8", "f64"), ("f2", "f16"), (ml_dtypes.bfloat16, "bf16"), ("i4", "i32"), (">f4", ">f4"), ("c8", "complex64"),
        (object, "object"),
    ],
)  # fmt: skip
def test_a_wrong_element_type_names_both(f: rlx.CompiledGraph, dtype: Any, shown: str) -> None:
    error = refusal(f, {"hidden": X.astype(dtype), "ids": IDS})
    assert str(error) == f"input 'hidden': element type is {shown}, expected f32"
    assert error.hint == "cast it with .astype('float32')"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1.5, 2.0], "float"), ([1, 2**40], "1099511627776 does not fit into i32"), ([1, 2**80], "object"),
        (["a", "b"], "str"), ([None, 1], "object"), ([[1], [2, 3]], "list"), ([1j, 2], "complex"),
    ],
)  # fmt: skip
def test_python_values_that_would_lose_something(f: rlx.CompiledGraph, value: Any, said: str) -> None:
    error = refusal(f, {"hidden": X, "ids": value})
    assert "input 'ids'" in str(error) and said in str(error)


def test_python_values_that_fit_are_taken(f: rlx.CompiledGraph) -> None:
    y, ids = f.run({"hidden": [[1, 1, 1, 1], [1.0, 1.0, 1.0, 1.0]], "ids": (0, 5)})
    np.testing.assert_array_equal(y, X @ W)
    assert ids.tolist() == [1, 6]
    y, ids = f.run({"hidden": np.zeros((0, 4), f32), "ids": []})
    assert y.shape == (0, 3) and ids.shape == (0,)


class Foreign:
    """An array of another library."""

    def __init__(self, array: Any) -> None:
        self.array, self.dtype, self.shape = array, "whatever", array.shape

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.array


def test_arrays_of_other_libraries_are_taken_and_never_cast(f: rlx.CompiledGraph) -> None:
    for _ in range(2):
        np.testing.assert_array_equal(f.run({"hidden": Foreign(X), "ids": IDS})[0], X @ W)
    assert "f64" in str(refusal(f, {"hidden": Foreign(X.astype("f8")), "ids": IDS}))


# -- memory -------------------------------------------------------------------------------------------------------
def awkward() -> dict[str, Any]:
    base = np.arange(40, dtype=f32)
    raw = np.empty(33, np.uint8)
    unaligned = raw[1:].view(f32).reshape(2, 4)
    unaligned[:] = base[:8].reshape(2, 4)
    frozen = base[:8].reshape(2, 4).copy()
    frozen.flags.writeable = False
    return {
        "columns": np.asfortranarray(base[:8].reshape(2, 4)), "every other": base[:16:2].reshape(2, 4),
        "backwards": base[8:0:-1].reshape(2, 4), "broadcast": np.broadcast_to(base[3], (2, 4)),
        "read-only": frozen, "unaligned": unaligned, "subclass": np.ma.masked_array(base[:8].reshape(2, 4)),
        "slice": np.arange(80, dtype=f32).reshape(10, 8)[3:5, 2:6],
    }  # fmt: skip


@pytest.mark.parametrize("kind", awkward())
def test_any_memory_layout_is_read_right(f: rlx.CompiledGraph, kind: str) -> None:
    x = awkward()[kind]
    for _ in range(2):
        np.testing.assert_array_equal(f.run({"hidden": x, "ids": IDS})[0], np.asarray(x) @ W)


@pytest.mark.parametrize("device", DEVICES)
def test_numpy_scalars_are_read_right_every_time(device: str) -> None:
    """They look like arrays of no axes, but their data moves away with them."""
    g = rlx.Graph("scalars")
    g.set_outputs([g.input("a", ()) * 2.0, g.input("b", (), "i32") + 1])
    f = rlx.compile(g, device)
    for i in range(200):
        a, b = f.run({"a": f32(i), "b": i32(i)})
        assert a == 2 * i and b == i + 1
    a, b = f.run({"a": 3, "b": 4})
    assert a == 6 and b == 5 and a.shape == b.shape == ()


# -- ranks and sizes ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(4,), (2, 4, 1), (), (2, 5), (2, 0)], ids=str)
def test_a_wrong_rank_or_fixed_size_shows_both_shapes(f: rlx.CompiledGraph, shape: tuple[int, ...]) -> None:
    shown = "[" + ", ".join(map(str, shape)) + "]"
    error = refusal(f, {"hidden": np.zeros(shape, f32), "ids": IDS})
    assert str(error) == f"input 'hidden': shape is {shown}, expected f32[n, 4]"


def test_a_symbol_with_two_sizes_names_both_inputs_and_both_sizes(f: rlx.CompiledGraph) -> None:
    error = refusal(f, {"hidden": X, "ids": np.zeros(3, i32)})
    assert str(error) == "input 'ids': n is 3 on axis 0, but 2 in input 'hidden'"


def graph_of(build: Callable[[rlx.Graph], list[rlx.Value]], device: str = "cpu") -> rlx.CompiledGraph:
    g = rlx.Graph("small")
    return rlx.compile(g.set_outputs(build(g)), device)


@pytest.mark.parametrize("device", DEVICES)
def test_a_limit_is_enforced(device: str) -> None:
    f = graph_of(lambda g: [g.input("x", (rlx.dim("n", max=3), 2)) * 2.0], device)
    assert f.run({"x": np.ones((3, 2), f32)})[0].shape == (3, 2)
    with pytest.raises(BindError, match=r"^input 'x': n is 4, its limit is 3"):
        f.run({"x": np.ones((4, 2), f32)})


@pytest.mark.parametrize("device", DEVICES)
def test_expressions_of_symbols_are_checked(device: str) -> None:
    n = rlx.dim("n")
    f = graph_of(lambda g: [g.input("pairs", (n * 2,)) + 1.0, g.input("x", (n,)) * 2.0], device)
    assert [o.shape for o in f.run({"pairs": np.zeros(6, f32), "x": np.zeros(3, f32)})] == [(6,), (3,)]
    with pytest.raises(BindError, match=r"input 'pairs': axis 0 has 5, 2\*n is 6"):
        f.run({"pairs": np.zeros(5, f32), "x": np.zeros(3, f32)})
    with pytest.raises(BindError, match=r"cannot tell n from a size of 2\*n"):
        graph_of(lambda g: [g.input("pairs", (n * 2,)) + 1.0], device).run({"pairs": np.zeros(6, f32)})


def test_assume_equal_is_checked_and_names_its_line() -> None:
    def build(g: rlx.Graph) -> list[rlx.Value]:
        return [g.input("a", ("n",)).assume_equal(shape=("m",)) + g.input("b", ("m",))]

    f = graph_of(build)
    for _ in range(2):
        with pytest.raises(BindError, match=r"assume_equal: .* 2.* 3") as caught:
            f.run({"a": np.zeros(2, f32), "b": np.zeros(3, f32)})
        assert any(f"test_inputs.py:{build.__code__.co_firstlineno + 1}" in n for n in caught.value.notes)
        assert f.report().seconds == 0  # a run that was refused is nothing to time
    assert f.run({"a": np.ones(3, f32), "b": np.ones(3, f32)})[0].tolist() == [2.0] * 3


# -- weights ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("device", DEVICES)
def test_weights_that_are_not_set_are_named(device: str) -> None:
    def build(g: rlx.Graph) -> list[rlx.Value]:
        total = g.input("x", (3,))
        for i in range(7):
            total = total + g.param(f"w{i}", (3,))
        return [total]

    f = graph_of(build, device)
    f.set_param("w1", np.ones(3, f32))
    with pytest.raises(BindError, match=r"^params: 'w0', 'w2', 'w3', 'w4', 'w5' and 1 more not set") as caught:
        f.run({"x": np.ones(3, f32)})
    assert "set_param" in str(caught.value.hint)


def test_a_misspelt_weight_gets_the_nearest(f: rlx.CompiledGraph) -> None:
    with pytest.raises(BindError, match="'weigth'") as caught:
        f.set_param("weigth", W)
    assert caught.value.hint == "did you mean 'weight'?"


def test_a_transposed_weight_gets_a_hint(f: rlx.CompiledGraph) -> None:
    with pytest.raises(BindError, match=r"param 'weight': shape is \[3, 4\], expected f32\[4, 3\]") as caught:
        f.set_param("weight", W.T)
    assert "transpose" in str(caught.value.hint)


def test_weights_that_are_no_mapping(f: rlx.CompiledGraph) -> None:
    with pytest.raises(BindError, match="params: expected a mapping from names to arrays, found list"):
        f.set_params([W])  # type: ignore[arg-type]


def test_a_weight_of_a_wrong_type_or_rank(f: rlx.CompiledGraph) -> None:
    with pytest.raises(BindError, match="param 'weight': element type is f64, expected f32"):
        f.set_param("weight", W.astype("f8"))
    with pytest.raises(BindError, match=r"param 'weight': shape is \[12\], expected f32\[4, 3\]"):
        f.set_param("weight", W.reshape(-1))


def test_of_weights_with_a_wrong_one_none_is_set(f: rlx.CompiledGraph) -> None:
    with pytest.raises(BindError, match="param: nothing is called 'bias'"):
        f.set_params({"weight": W + 1, "bias": W})
    np.testing.assert_array_equal(f.run({"hidden": X, "ids": IDS})[0], X @ W)


def test_a_refused_weight_leaves_the_old_one(f: rlx.CompiledGraph) -> None:
    with pytest.raises(BindError):
        f.set_param("weight", W.T)
    np.testing.assert_array_equal(f.run({"hidden": X, "ids": IDS})[0], X @ W)


def test_a_new_weight_takes_effect_in_the_next_run(f: rlx.CompiledGraph) -> None:
    f.run({"hidden": X, "ids": IDS})
    for scale in (2, 3):
        f.set_param("weight", W * f32(scale))
        np.testing.assert_array_equal(f.run({"hidden": X, "ids": IDS})[0], X @ W * scale)


def test_a_strided_weight_is_taken(f: rlx.CompiledGraph) -> None:
    f.set_param("weight", np.asfortranarray(W))
    np.testing.assert_array_equal(f.run({"hidden": X, "ids": IDS})[0], X @ W)


@pytest.mark.parametrize("device", DEVICES)
def test_a_weight_with_a_symbol_must_agree_with_the_inputs(device: str) -> None:
    f = graph_of(lambda g: [g.input("x", ("n", 4)) + g.param("p", ("n", 4))], device)
    for rows in (2, 5, 2):
        f.set_param("p", np.ones((rows, 4), f32))
        assert f.run({"x": np.ones((rows, 4), f32)})[0].tolist() == [[2.0] * 4] * rows
        with pytest.raises(BindError, match=rf"input 'x': n is 3 on axis 0, but {rows} in param 'p'"):
            f.run({"x": np.ones((3, 4), f32)})


@pytest.mark.parametrize("device", DEVICES)
def test_a_symbol_that_only_a_weight_has(device: str) -> None:
    m = rlx.dim("m", max=6)
    f = graph_of(lambda g: [g.input("x", (2, 3)) @ g.param("w", (3, m)), g.param("v", (m,)).exp()], device)
    for columns in (5, 1, 0):
        f.set_params({"w": np.ones((3, columns), f32), "v": np.zeros(columns, f32)})
        y, v = f.run({"x": np.ones((2, 3), f32)})
        assert y.tolist() == [[3.0] * columns] * 2 and v.tolist() == [1.0] * columns
    f.set_params({"w": np.ones((3, 2), f32), "v": np.zeros(3, f32)})
    with pytest.raises(BindError, match="param 'v': m is 3 on axis 0, but 2 in param 'w'"):
        f.run({"x": np.ones((2, 3), f32)})
    f.set_params({"w": np.ones((3, 7), f32), "v": np.zeros(7, f32)})
    with pytest.raises(BindError, match="m is 7, its limit is 6"):
        f.run({"x": np.ones((2, 3), f32)})


# -- sessions -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("threads", [0, -1, 1.5, "2", True, 4097])
def test_a_number_of_threads_that_is_none(threads: Any) -> None:
    with pytest.raises(CapabilityError, match=f"threads: .* found {threads!r}"):
        rlx.Session("cpu", threads=threads)


def test_a_number_of_threads_with_too_many_digits() -> None:
    with pytest.raises(CapabilityError, match=r"threads: expected a number from 1 to 4096, .* found a huge number"):
        rlx.Session("cpu", threads=10**5000)


def test_devices_and_targets_that_are_not_there() -> None:
    with pytest.raises(CapabilityError, match="'cpuu'") as caught:
        rlx.Session("cpuu")
    assert caught.value.hint == "did you mean 'cpu' or 'cuda'?"
    with pytest.raises(CapabilityError, match="'avx51'") as caught:
        rlx.Session(target="avx51")
    assert "avx512" in str(caught.value.hint)
    for target in (replace(best(), arch="vax"), 3):
        with pytest.raises(CapabilityError, match="target: expected one of cpu"):
            rlx.Session(target=target)  # type: ignore[arg-type]


def test_a_target_of_ones_own_has_kernels_of_its_own() -> None:
    g = rlx.Graph("own")
    g.set_outputs([g.input("x", ("n", 4)) @ g.param("w", (4, 3))])
    for rows in (2, 3):
        own = rlx.compile(g, target=replace(best(), tile_rows=rows))
        own.set_param("w", W)
        np.testing.assert_array_equal(own.run({"x": X})[0], X @ W)


def test_what_cannot_be_compiled() -> None:
    with pytest.raises(GraphError, match="takes a Graph, found int"):
        rlx.compile(3)  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="graph 'empty' has no outputs"):
        rlx.compile(rlx.Graph("empty"))


@pytest.mark.parametrize("spoil", [lambda a: a.T.copy().T, lambda a: _read_only(a), lambda a: a.tolist()])
def test_a_state_that_cannot_be_changed_in_place_is_refused(spoil: Callable[[Any], Any]) -> None:
    g = rlx.Graph("state")
    cache = g.state("cache", (1, 1, 64, 8))
    new = g.input("new", (1, 1, 1, 8))
    at = g.input("at", (1, 1), "i32")
    table = g.constant(np.zeros((1, 1), np.int32))
    f = rlx.compile(g.set_outputs([cache.kv_append(new, at, table).sum()]))
    inputs = {"new": np.ones((1, 1, 1, 8), np.float32), "at": np.array([[3]], np.int32)}
    good = np.zeros((1, 1, 64, 8), np.float32)
    f.run({**inputs, "cache": good})
    assert good[0, 0, 3].tolist() == [1.0] * 8 and good.sum() == 8
    with pytest.raises(BindError, match="state 'cache': is changed in place"):
        f.run({**inputs, "cache": spoil(good)})


def _read_only(array: Any) -> Any:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def test_integers_of_another_width_are_taken_if_they_fit(f: rlx.CompiledGraph) -> None:
    for kind in ("i8", "u1", ">i4", "u8"):
        assert f.run({"hidden": X, "ids": np.array([3, 7], kind)})[1].tolist() == [4, 8]
    assert "1099511627776 does not fit into i32" in str(refusal(f, {"hidden": X, "ids": np.array([1, 2**40])}))
    assert "element type is bool" in str(refusal(f, {"hidden": X, "ids": np.array([True, False])}))
