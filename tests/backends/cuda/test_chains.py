"""Plans of small launches: which become one kernel, in how many groups, and which sizes are constants of the code."""

from __future__ import annotations

import pytest
from emulator import TARGET, emulated_gpu

import rlx
from rlx.backends.cuda import sized
from rlx.backends.cuda.chains import ChainKernel
from rlx.backends.cuda.launch_plan import PlannedLaunch, plan_launches
from rlx.backends.cuda.loops.footprints import footprints
from rlx.lir.program import Program


def program_of(graph: rlx.Graph) -> Program:
    with emulated_gpu():
        return rlx.compile(graph, "cuda").executable.program


def planned(graph: rlx.Graph, **sizes: int) -> list[PlannedLaunch]:
    """The launches that run."""
    return [one for one in plan_launches(program_of(graph), sizes, TARGET) if one.plan.passes]


def normed_heads(*, mixed: bool = False) -> rlx.Graph:
    """A norm of each head and a softmax of pairs of heads; `mixed`: pairs begin at odd heads."""
    g = rlx.Graph("heads")
    x = g.input("x", ("rows", 6, 16))
    normed = g.rms_norm(x, g.param("gamma", (16,)), eps=1e-6)
    if mixed:
        first, rest = normed[:, :1], normed[:, 1:]
        normed = g.concatenate([rest, first], axis=1)
    return g.set_outputs([g.reshape(normed, shape=("rows", 3, 32)).softmax(axis=-1)])


def chain_of(launches: list[PlannedLaunch]) -> tuple[ChainKernel, int]:
    (launch,) = launches
    assert isinstance(launch.kernel, ChainKernel)
    return launch.kernel, launch.plan.passes[0].grid[0]


@pytest.mark.parametrize("rows", [1, 5])
def test_launches_that_depend_by_pairs_have_a_block_per_pair(rows: int) -> None:
    launches = planned(normed_heads(), rows=rows)
    chain, blocks = chain_of(launches)
    assert len(chain.tracks) == 1 and [piece.waits for piece in chain.pieces] == [False, True]
    words = dict(zip(chain.words, launches[0].words.tolist(), strict=True))
    assert blocks == 3 * rows and (words["share.0"], words["share.1"]) == (2, 1)


def test_launches_that_read_other_heads_stay_in_one_block() -> None:
    for launch in planned(normed_heads(mixed=True), rows=1):
        if isinstance(launch.kernel, ChainKernel):
            assert launch.plan.passes[0].grid[0] == 1


def test_independent_launches_are_tracks_of_their_own() -> None:
    g = rlx.Graph("two")
    x, y = g.input("x", ("rows", 4, 16)), g.input("y", ("rows", 2, 16))
    gamma = g.param("gamma", (16,))
    outputs = [g.rms_norm(z, gamma, eps=1e-6).softmax(axis=-1) for z in (x, y)]
    chain, blocks = chain_of(planned(g.set_outputs(outputs), rows=3))
    assert len(chain.tracks) == 2 and blocks == 3 * (4 + 2)


def test_a_large_launch_stays_by_itself() -> None:
    assert not any(isinstance(one.kernel, ChainKernel) for one in planned(normed_heads(), rows=500_000))


def test_footprints_are_the_elements_that_a_unit_touches() -> None:
    launches = planned(normed_heads(), rows=2)
    chain, _ = chain_of(launches)
    for piece, units in zip(chain.pieces, (12, 6), strict=True):
        first = list(chain.words).index(f"{piece.kernel.words[0]}.{chain.pieces.index(piece)}")
        values = launches[0].words[first : first + len(piece.kernel.words)].tolist()
        touched = footprints(piece.kernel, dict(zip(piece.kernel.words, values, strict=True)), units)
        (written,) = {(tuple(f.low), tuple(f.high)) for f in touched if f.written}
        width = 192 // units
        assert written == (tuple(range(0, 192, width)), tuple(range(width - 1, 192, width)))


def test_sizes_that_programs_fix_are_constants_and_rows_are_not() -> None:
    chain, _ = chain_of(planned(normed_heads(), rows=5))
    for piece in chain.pieces:
        sizes = dict(piece.sizes)
        assert sizes["r0"] in (16, 32) and "units" not in sizes
    other, _ = chain_of(planned(normed_heads(), rows=7))
    assert other.symbol == chain.symbol  # the same code


def test_constants_keep_their_place_in_the_struct() -> None:
    text = sized.with_sizes("struct Words {\n  const float* x;\n  i64 k;\n  i64 n;\n};\nint f;", (("k", 64),))
    assert (
        text == "struct Words {\n  const float* x;\n  i64 word_k;\n  static constexpr i64 k = 64;\n  i64 n;\n};\nint f;"
    )
