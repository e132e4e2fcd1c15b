"""`rlx bench`: its rows, its plain table and JSON, and shares that cannot be."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import rlx
from rlx.backends.reports import Ceilings, Work
from rlx.cli import bench
from rlx.cli.bench import Row
from rlx.cli.main import main
from rlx.engine.load import load

ASSETS = Path(os.environ.get("RLX_ASSETS", Path(__file__).parents[3] / "shared" / "assets"))
STORIES = ASSETS / "stories260K" / "stories260K.bin"
needs_stories = pytest.mark.skipif(not STORIES.exists(), reason=f"{STORIES} is absent")


@needs_stories
def test_a_decoder_has_all_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(STORIES), "--repeat", "1", "--json", "--threads", "1"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == ["load", "compile", "pp128", "tg128", "memory"]
    assert "pp512: left out, the context holds 512 tokens" in err
    assert all(row["value"] > 0 for row in rows.values())
    assert report["threads"] == 1 and report["machine"]["memory_gb_per_second"] > 0
    assert 0 < rows["pp128"]["fraction"] < 1
    assert rows["tg128"]["limit"] == "the bandwidth of the cache"  # a megabyte of weights


@needs_stories
def test_a_token_reads_the_weights_and_what_came_before() -> None:
    with load(STORIES) as model:
        program = model.compiled.plan.main
    weights = 4 * (5 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 172) + 512 * 64)
    first, later = bench.token_bytes(program, 0), bench.token_bytes(program, 64)
    assert weights < first < 1.25 * weights  # rows of activations, the padding of panels and a first block of keys
    page = 5 * 2 * 64 * 32 * 4  # layers, keys and values, positions, kv size, bytes
    assert later - first == page + 5 * 4  # and the page's number, once per layer


def test_the_least_time_of_a_prompt_goes_by_what_its_kernels_multiply() -> None:
    g = rlx.Graph("packed")
    x = g.input("x", ("seq", 512))
    g.set_outputs([x @ g.param("w", (256, 512), "q4_0").dequantise().mT, x @ g.param("v", (512, 256))])
    f = rlx.compile(g, threads=1, profile=rlx.CompileProfile.from_toml('precision.activations = "int8"'))
    program = f.plan.main
    product = 2 * 128 * 512 * 256 / 1e9

    work = bench.prefill_work(program, 1, 128)
    assert work.flops["f32"] / 1e9 == pytest.approx(product, rel=0.1)  # and the rounding of activations
    assert work.flops["dot_u7"] / 1e9 == pytest.approx(product, rel=0.1)
    assert work.memory_bytes == 0 < 512 * 256 * 4 < work.bytes  # they fit into a cache


LIMITS = Ceilings({"f32": 100.0, "dot_u7": 400.0}, 100.0, 10.0)


@pytest.mark.parametrize(
    ("work", "seconds", "shown"),
    [
        (Work({"dot_u7": 2e9}, 0, 0), 0.01, "50% of the int8 multiply-adds"),
        (Work({"dot_u7": 2e9, "f32": 0.25e9}, 0, 0), 0.01, "50% of the int8 multiply-adds"),
        (Work({}, 1e8, 1e8), 0.02, "50% of the bandwidth of memory"),
        (Work({}, 1e8, 0), 0.01, "10% of the bandwidth of the cache"),
        (Work({}, 1e8, 1e8), 0.0095, "100% of the bandwidth of memory"),  # within the noise of measurements
        (Work({}, 1e8, 1e8), 0.002, "50% of the bandwidth of the cache"),  # too fast for memory
        (Work({}, 1e8, 1e8), 0.0005, "faster than the limits, which were measured while the machine was busy"),
    ],
)
def test_a_share_is_of_the_limit_that_applies_and_never_above_one(work: Work, seconds: float, shown: str) -> None:
    row = Row("tg128", 100.0, "tok/s").compared(LIMITS, work, seconds)
    assert row.cells() == ("tg128", "100", "tok/s", shown)


def test_repeating_less_than_once_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--repeat", "0"]) == 2
    assert "--repeat is 0" in capsys.readouterr().err
