"""Launch plans as text: which kernels run, on how many blocks and threads, by the sizes of a call and the GPU."""

from __future__ import annotations

import re

import pytest

import rlx
from rlx.backends.cuda.launch_plan import plan_launches
from rlx.backends.cuda.targets import SM_86, SM_90, CudaTarget
from rlx.module import plan_lir
from rlx.profile import CompileProfile


def planned(graph: rlx.Graph, target: CudaTarget, **sizes: int) -> str:
    """The plan, without digests of kernels."""
    launches = plan_launches(plan_lir(graph, target, CompileProfile()).main, sizes, target)
    return "\n".join(re.sub(r"(_[0-9a-f]{8})+_", "_", str(launch)) for launch in launches)


def product() -> rlx.Graph:
    g = rlx.Graph("product")
    return g.set_outputs([(g.input("x", ("rows", 640)) @ g.param("w", (640, 1000))).softmax(axis=-1)])


@pytest.mark.parametrize("target", [SM_86, SM_90], ids=lambda target: target.name)
def test_rows_change_grids_and_variants(target: CudaTarget) -> None:
    assert planned(product(), target, rows=1) == (
        "launch 0: matmul_fmarows1_n<<<32x1x1, 160, 24960 B>>>\nlaunch 1: softmax_rows_128_v4_n_d<<<1x1x1, 128>>>"
    )
    assert planned(product(), target, rows=300) == (
        "launch 0: matmul_fma64_n<<<80x1x1, 256, 17408 B>>>\n"
        "launch 1: softmax_rows_128_v4_n_d<<<300x1x1, 128>>>"
    )  # fmt: skip


def test_the_threads_of_a_row_do_not_depend_on_the_number_of_rows() -> None:
    variants = {re.search(r"softmax_(\w+)", planned(product(), SM_90, rows=n))[1] for n in (1, 2, 9, 5000)}  # type: ignore[index]
    assert variants == {"rows_128_v4_n_d"}


def test_no_rows_launch_nothing() -> None:
    assert planned(product(), SM_90, rows=0) == "launch 0: \nlaunch 1: "


def decoding(appended: str) -> rlx.Graph:
    """A token per row attends to a cache, to which tokens are appended at the positions of that input."""
    g = rlx.Graph("decoding")
    q = g.input("q", ("batch", 1, 8, 64), "bf16")
    k, v = (g.input(name, ("batch", 1, 2, 64), "bf16") for name in ("k", "v"))
    places = {name: g.input(name, ("batch", 1), "i32") for name in ("positions", "others")}
    table = g.input("table", ("batch", "blocks"), "i32")
    keys, values = (g.state(name, ("pages", 2, 64, 64), "bf16") for name in ("keys", "values"))
    keys, values = (pool.kv_append(new, places[appended], table, axes="phsd") for pool, new in ((keys, k), (values, v)))
    out = g.one("cached_attention", q, keys, values, places["positions"], table, key_axes="phsd")
    return g.set_outputs([out, keys, values])


def test_keys_are_copied_early_if_the_program_appends_none_but_those_of_its_queries() -> None:
    sizes = {"batch": 1, "blocks": 16, "pages": 16}
    assert "_token_each<<<2x8x1" in planned(decoding("positions"), SM_90, **sizes)
    assert "_splits<<<2x8x1" in planned(decoding("others"), SM_90, **sizes)
