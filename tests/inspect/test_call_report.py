"""Reports and timelines of whole calls of models: parts that add up, and phases, kernels and stages by name."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_bert
import tiny_llama

from rlx.engine.embedding_model import EmbeddingModel
from rlx.engine.language_model import LanguageModel
from rlx.engine.load import load
from rlx.errors import FormatError, RequestError
from rlx.inspect.call_report import EXPLAINED, CallReport

PROMPT = np.random.default_rng(0).integers(0, 97, 20).tolist()


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder = tmp_path_factory.mktemp("decoder")
    tiny_llama.write(folder)
    model = load(folder)
    assert isinstance(model, LanguageModel)
    return model


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> EmbeddingModel:
    folder = tmp_path_factory.mktemp("encoder")
    small_bert.write(folder)
    model = load(folder)
    assert isinstance(model, EmbeddingModel)
    return model


def check_sums(report: CallReport) -> None:
    kernels = sum(phase.kernel_seconds for phase in report.phases.values())
    assert kernels + sum(report.host.values()) == pytest.approx(report.seconds, rel=1e-6)
    assert set(report.host) == set(EXPLAINED)
    for phase in report.phases.values():
        for totals in (phase.kernels, phase.stages):
            assert sum(total.seconds for total in totals.values()) == pytest.approx(phase.kernel_seconds)
        assert 0 < phase.kernel_seconds <= phase.seconds


def test_the_time_of_generating_is_explained(decoder: LanguageModel) -> None:
    report = decoder.report(PROMPT, max_tokens=5)
    check_sums(report)
    prefill, decode = report.phases["prefill"], report.phases["decode"]
    assert list(report.phases) == ["prefill", "decode"]
    assert (prefill.runs, prefill.tokens, decode.runs, decode.tokens) == (1, 20, 4, 4)
    launches = len(decoder.compiled.plan.main.launches)
    assert sum(total.launches for total in decode.kernels.values()) == 4 * launches
    assert {"matmul", "attention", "sample_tokens"} <= set(decode.kernels)
    assert {"embed", "layers.*.attn", "layers.*.ffn", "head"} <= set(decode.stages)
    assert report.host["sampling in Python"] > 0 and report.host["starting runs"] > 0
    shown = str(report)
    assert "decode by stage" in shown and "4 runs of 4 tokens" in shown and "generate of" in repr(report)
    assert "<table" in report._repr_html_()
    for phase in report.phases.values():
        shares = [total.share(report.ceilings) for total in (*phase.kernels.values(), *phase.stages.values())]
        assert all(share is None or 0 < share.fraction <= 1 for share in shares)
        assert phase.kernels["attention"].share(report.ceilings) is None  # its work depends on positions


def test_without_a_prompt_there_is_one(decoder: LanguageModel) -> None:
    report = decoder.report(max_tokens=3)
    assert report.phases["prefill"].tokens == 64 and report.phases["decode"].runs == 2
    with pytest.raises(RequestError, match="no setting is called 'top_kk'"):
        decoder.report(top_kk=3)


def test_the_time_of_embedding_is_explained(encoder: EmbeddingModel) -> None:
    report = encoder.report(["bal bam", "dal"])
    check_sums(report)
    assert list(report.phases) == ["embed"] and report.host["tokenizing"] > 0
    assert {"layers.*.attn", "pool"} <= set(report.phases["embed"].stages)
    assert "sampling" not in str(report)  # an encoder has none
    assert encoder.report().phases["embed"].runs >= 1


def events(path: Path) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return listed


def test_a_timeline_has_runs_launches_and_python(decoder: LanguageModel, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    done = decoder.generate(PROMPT, max_tokens=4, trace=path)
    assert done.tokens == decoder.generate(PROMPT, max_tokens=4).tokens
    spans = [e for e in events(path) if e["ph"] == "X"]
    names = [e["args"]["name"] for e in events(path) if e["ph"] == "M"]
    assert "Python" in names and "thread 0" in names
    runs = [e for e in spans if e["cat"] == "run"]
    assert [e["name"] for e in runs] == ["prefill", "decode", "decode", "decode"]
    assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in itertools.pairwise(runs))
    assert any(e["name"].startswith("matmul") for e in spans) and any(e["name"] == "tokenizing" for e in spans)
    edited = tmp_path / "edited.json"
    decoder.generate(PROMPT, max_tokens=2, trace=edited, edit={"layers.0": lambda x: x * 2})
    assert [e["name"] for e in events(edited) if e.get("cat") == "run"] == ["prefill", "decode"]


def test_a_timeline_of_embedding(encoder: EmbeddingModel, tmp_path: Path) -> None:
    plain = encoder.embed(["bal bam", "dal"])
    assert np.array_equal(encoder.embed(["bal bam", "dal"], trace=tmp_path / "t.json"), plain)
    assert {e["name"] for e in events(tmp_path / "t.json") if e.get("cat") in ("run", "host")} == {
        "tokenizing",
        "embed",
    }


def test_timelines_that_cannot_be(decoder: LanguageModel, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="there is no folder"):
        decoder.generate(PROMPT, max_tokens=1, trace=tmp_path / "absent" / "t.json")
    with pytest.raises(RequestError, match="stream: has no trace"):
        decoder.stream(PROMPT, trace="t.json")
