"""Reports and traces: times that make sense, a table that can be read, a timeline that a browser loads."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import numpy as np
import pytest
from layers import MINILM, TINY_LLAMA, bert_graph, bert_inputs, compiled, llama_graph, llama_inputs, same_bits, weights
from targets import host

import rlx
from rlx.backends.reports import Ceilings, Share, Work
from rlx.errors import CapabilityError
from rlx.inspect.profiler import LaunchReport, Report


@pytest.fixture(scope="module")
def encoder() -> rlx.CompiledGraph:
    return compiled(bert_graph(MINILM), weights(MINILM), threads=1)  # one: other programs disturb it least


@pytest.fixture(scope="module")
def report(encoder: rlx.CompiledGraph) -> rlx.Report:
    encoder.run(bert_inputs(MINILM, 1, 64))
    return encoder.report()


def test_before_a_run_there_are_bytes_but_no_times() -> None:
    report = compiled(llama_graph(TINY_LLAMA), weights(TINY_LLAMA)).report()
    assert len(report.launches) == 8 and report.seconds == 0 and report.ceilings is None
    assert all(x.seconds == x.gflops == x.gb_per_second == 0 for x in report.launches)
    assert all(x.bytes > 0 for x in report.launches)
    assert "no times: run it first" in str(report) and str(report).count("\n") == 2 + 8


def test_after_a_run_every_launch_has_a_time(report: rlx.Report) -> None:
    assert len(report.launches) == 7 and report.kernels == 5
    assert all(x.seconds > 0 and x.gb_per_second > 0 and x.gflops > 0 for x in report.launches)
    assert sum(x.seconds for x in report.launches) <= report.seconds * 1.1
    assert report.weight_bytes == sum(w.nbytes for w in weights(MINILM).values())
    assert 0 < report.arena_bound <= report.arena_bytes


def test_flops_and_bytes_are_those_of_the_layer(report: rlx.Report) -> None:
    matmuls = [x for x in report.launches if x.kind == "matmul"]
    wanted = [2 * 64 * k * n for k, n in ((384, 3 * 384), (384, 384), (384, 1536), (1536, 384))]
    for launch, multiplies in zip(matmuls, wanted, strict=True):
        assert multiplies <= launch.flops <= multiplies * 1.1  # and the epilogue
    assert matmuls[0].bytes >= 4 * (64 * 384 + 384 * 3 * 384 + 64 * 3 * 384)


def test_fractions_of_the_ceiling_are_fractions(report: rlx.Report) -> None:
    assert report.ceilings is not None
    for launch in report.launches:
        share = launch.share(report.ceilings)
        assert share is None or 0 < share.fraction <= 1, launch
        assert share is not None or launch.kind != "matmul", launch


def packed_product(storage: str, rows: int = 64) -> rlx.Report:
    """A product of packed weights and activations of 8 bits, all in one cache."""
    rng = np.random.default_rng(5)
    g = rlx.Graph("packed")
    g.set_outputs([g.input("x", ("m", 512)) @ g.param("w", (256, 512), storage).dequantise().mT])
    profile = rlx.CompileProfile.from_toml('precision.activations = "int8"')
    f = rlx.compile(g, threads=1, profile=profile)
    packed = np.zeros(int(f.param_types["w"].bytes), np.uint8)  # scales of zero: the numbers do not matter here
    f.set_param("w", packed)
    return f.report({"x": rng.standard_normal((rows, 512), dtype=np.float32)})


def test_every_kernel_is_measured_against_its_own_arithmetic() -> None:
    kinds = {storage: {x.arithmetic for x in packed_product(storage).launches} for storage in ("q4_0", "q8_0")}
    assert kinds == {"q4_0": {"f32", "dot_u7"}, "q8_0": {"f32", "dot_u8"}}
    wide = rlx.Graph("wide")
    wide.set_outputs([wide.input("x", (8, 8), "f64") @ wide.input("y", (8, 8), "f64")])
    assert [x.arithmetic for x in rlx.compile(wide).report().launches] == ["f64"]


@pytest.mark.parametrize("storage", ["q4_0", "q8_0"])
def test_integer_kernels_reach_no_more_than_all_of_their_ceiling(storage: str) -> None:
    report = packed_product(storage)
    assert report.ceilings is not None
    shares = [x.share(report.ceilings) for x in report.launches if x.kind == "matmul"]
    assert all(share is not None and 0 < share.fraction <= 1 for share in shares)


def test_a_share_is_of_the_arithmetic_in_use() -> None:
    limits = Ceilings({"f32": 100.0, "f64": 50.0, "dot_u7": 400.0, "dot_u8": 200.0}, 1e6, 1e6)
    shares = {
        kind: LaunchReport("k", "matmul", "", 1, 100_000_000, 2e-3, work=Work({kind: 1e8}, 1)).share(limits)
        for kind in ("f32", "f64", "dot_u7", "dot_u8")
    }
    assert shares == {
        "f32": Share(0.5, "f32"), "f64": Share(1.0, "f64"),
        "dot_u7": Share(0.125, "int8"), "dot_u8": Share(0.25, "int8"),
    }  # fmt: skip


def test_operands_of_which_data_selects_a_part_are_not_counted() -> None:
    """The rows of a table that an index picks, the page of a cache that a position is in."""
    g = rlx.Graph("lookup")
    table, at = g.input("table", (10_000, 64)), g.input("at", ("n",), "i32")
    g.set_outputs([table.gather(at)])
    (launch,) = (
        rlx.compile(g).report({"table": np.ones((10_000, 64), np.float32), "at": np.zeros(3, np.int32)}).launches
    )
    assert launch.bytes <= 3 * 64 * 4 * 2 + 3 * 4
    f = compiled(llama_graph(TINY_LLAMA, past=True), weights(TINY_LLAMA))
    report = f.report(llama_inputs(TINY_LLAMA, 2, 3, 5))
    assert report.ceilings is not None
    shares = [launch.share(report.ceilings) for launch in report.launches]
    assert all(share is None or share.fraction <= 1 for share in shares)


def test_masks_of_a_report_hide_nothing(report: rlx.Report, encoder: rlx.CompiledGraph) -> None:
    """Inputs that stand for the last ones keep every key, so attention takes its time."""
    explicit = encoder.report(bert_inputs(MINILM, 1, 64) | {"mask": np.ones((1, 64), np.float32)})
    stand_in, real = (next(x for x in r.launches if x.kind == "attention").seconds for r in (report, explicit))
    assert stand_in > real / 5


def test_a_report_is_a_table(report: rlx.Report) -> None:
    head, machine, columns, *rows = str(report).splitlines()
    assert "7 launches of 5 kernels" in head and "1 thread:" in head and host().name in head
    assert "GFLOPS" in machine and "GB/s" in machine
    assert columns.split() == ["kernel", "kind", "µs", "GB/s", "GFLOPS", "ceiling", "where"]
    assert len(rows) == 7 and all("layers.py:" in row and "%" in row for row in rows)
    columns = {row.index("layers.0") for row in rows}
    assert len(columns) == 1  # columns line up


def test_kernels_below_a_microsecond_have_three_digits() -> None:
    launches = [LaunchReport(f"k{i}", "loops", "", 8, 8, seconds) for i, seconds in enumerate((4.2e-8, 1.26e-6))]
    rows = str(Report("f", "cpu", 1, launches=launches)).splitlines()[-2:]
    assert [row.split()[2] for row in rows] == ["0.042", "1.3"]


def test_a_report_with_inputs_needs_no_run_before() -> None:
    f = compiled(llama_graph(TINY_LLAMA, past=True), weights(TINY_LLAMA))
    report = f.report(llama_inputs(TINY_LLAMA, 2, 3, 5))
    assert len(report.launches) == 9 and all(x.seconds > 0 for x in report.launches)


def test_a_run_with_the_inputs_of_a_report_is_a_run() -> None:
    f, inputs = compiled(llama_graph(TINY_LLAMA), weights(TINY_LLAMA)), llama_inputs(TINY_LLAMA, 2, 3)
    f.report(inputs)
    f.run(inputs)
    assert f.report().seconds > 0 and f.memory().sizes == {"batch": 2, "seq": 3}


@pytest.mark.parametrize("sizes", [(0, 0, 0), (1, 0, 3), (0, 3, 3)], ids=str)
def test_a_report_of_a_run_of_nothing(sizes: tuple[int, int, int]) -> None:
    f = compiled(llama_graph(TINY_LLAMA, past=True), weights(TINY_LLAMA))
    f.run(llama_inputs(TINY_LLAMA, *sizes))
    assert len(f.report().launches) == 9 and "9 launches" in str(f.report())


def test_a_report_in_checked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_CHECK", "1")
    f = compiled(llama_graph(TINY_LLAMA), weights(TINY_LLAMA))
    f.run(llama_inputs(TINY_LLAMA, 1, 3))
    assert all(x.seconds > 0 for x in f.report().launches)


def test_a_report_after_new_weights_has_no_times_yet() -> None:
    f = compiled(llama_graph(TINY_LLAMA), weights(TINY_LLAMA))
    f.run(llama_inputs(TINY_LLAMA, 1, 3))
    f.set_params(weights(TINY_LLAMA, seed=3))
    assert f.report().seconds == 0


# -- traces -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("threads", [1, 2])
def test_a_trace_has_an_event_for_each_launch_and_thread(threads: int, tmp_path: Path) -> None:
    f = compiled(llama_graph(TINY_LLAMA), weights(TINY_LLAMA), threads=threads)
    inputs = llama_inputs(TINY_LLAMA, 2, 33)
    begin = time.perf_counter()
    outputs = f.run(inputs, trace=tmp_path / "trace.json")
    wall = (time.perf_counter() - begin) * 1e6
    assert same_bits(outputs, f.run(inputs))
    everything = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["args"]["name"] for e in everything if e["name"] == "thread_name"}
    assert names == {f"thread {t}" for t in range(threads)}
    events = [e for e in everything if e["ph"] == "X"]
    # The caller has an event for each launch, a worker for those that it was in time for.
    assert [e["tid"] for e in events].count(0) == 8 and len(events) <= 8 * threads
    for event in events:
        assert event["ts"] >= 0 and event["dur"] > 0 and "layers.py" in event["args"]["where"]
        assert event["args"]["bytes"] > 0 and event["args"]["flops"] > 0 and event["args"]["units"] > 0
        assert event["ts"] + event["dur"] <= wall  # microseconds, as the format wants them
    for thread in range(threads):
        mine = [e for e in events if e["tid"] == thread]
        for before, after in itertools.pairwise(mine):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3


def test_a_trace_by_name(tmp_path: Path) -> None:
    f = compiled(llama_graph(TINY_LLAMA), weights(TINY_LLAMA))
    f.run(llama_inputs(TINY_LLAMA, 1, 1), trace=str(tmp_path / "trace.json"))
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_the_reference_has_no_trace_and_says_so(tmp_path: Path) -> None:
    g = rlx.Graph("small")
    g.set_outputs([g.input("x", (2,)) * 2.0])
    f = rlx.compile(g, "reference")
    with pytest.raises(CapabilityError, match="no launches"):
        f.run({"x": np.ones(2, np.float32)}, trace=tmp_path / "trace.json")
    assert f.report().launches == [] and "reference" in str(f.report())


def test_times_without_limits_of_the_machine_are_shown_as_they_are() -> None:
    g = rlx.Graph("g")
    g.set_outputs([g.input("x", (4,)).tanh()])
    report = str(rlx.compile(g, device="toy").report({"x": np.ones(4, np.float32)}))
    assert "no times" not in report and "µs" in report
