"""Documentation that runs: Python blocks of a page are executed in order, the output block after each must match.

`pytest --update tests/test_docs.py` rewrites the outputs and the generated pages.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import stand_ins
from targets import AVX2, supported

import rlx
from rlx import errors
from rlx.cli import stages
from rlx.cli.main import COMMANDS
from rlx.cli.ops import markdown
from rlx.cli.tour import read
from rlx.inspect.lineage import lineage
from rlx.inspect.picture import picture

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
BLOCK = re.compile(r"```python\n(?P<code>.*?)```\n(?:```output\n(?P<output>.*?)```\n)?", re.S)
PAGES = [
    "tour.md",
    "errors.md",
    "looking-inside.md",
    "flow.md",
    "functions.md",
    "coming-from-jax.md",
    "slow.md",
    "numpy.md",
    "training.md",
    "adding-an-op.md",
    "adding-a-model.md",
    "architecture.md",
    "adding-a-backend.md",
    "export.md",
    "search.md",
    "from-rlx-rust.md",
]


def executed(text: str, page: str) -> str:
    """The text with what its blocks print, run one after the other."""
    scope: dict[str, Any] = {}

    def run(match: re.Match[str]) -> str:
        printed = io.StringIO()
        line = text[: match.start()].count("\n") + 2
        code = compile("\n" * (line - 1) + match["code"], page, "exec", dont_inherit=True)
        with contextlib.redirect_stdout(printed):
            exec(code, scope)
        output = f"```output\n{printed.getvalue()}```\n" if printed.getvalue() else ""
        return f"```python\n{match['code']}```\n{output}"

    return BLOCK.sub(run, text)


@pytest.mark.usefixtures("own_ops", "own_families")
@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_what_its_code_prints(
    page: str, update: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # pages may write files
    path = DOCS / page
    text = path.read_text()
    if 'target="avx2"' in text and AVX2 not in supported():
        pytest.skip("this machine has no AVX2")
    result = executed(text, page)
    if update:
        path.write_text(result)
    assert result == text or update


def test_the_function_of_the_readme_prints_what_it_shows(update: bool) -> None:
    path = ROOT / "README.md"
    text = path.read_text()
    (match,) = (m for m in BLOCK.finditer(text) if "rlx.grad" in m["code"])
    result = executed(match[0], "README.md")
    if update:
        path.write_text(text.replace(match[0], result))
    assert match["output"] and (result == match[0] or update)


# -- pages on models -------------------------------------------------------------------------------------------------
MODEL_PAGES = ["using-models.md", "research.md"]


@pytest.fixture(scope="module")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small models in place of those that pages load by name."""
    chat, encoder = tmp_path_factory.mktemp("chat"), tmp_path_factory.mktemp("encoder")
    return {"smollm2-135m": stand_ins.write_chat(chat), "minilm-l6": stand_ins.write_encoder(encoder)}


@pytest.mark.parametrize("page", MODEL_PAGES)
def test_a_page_on_models_runs_on_small_ones(
    page: str, model_folders: dict[str, Path], update: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    load = rlx.load
    monkeypatch.setattr(rlx, "load", lambda name, **settings: load(model_folders[name], **settings))
    path = DOCS / page
    result = executed(path.read_text(), page)
    if update:
        path.write_text(result)
    assert result == path.read_text()


@pytest.mark.weights
@pytest.mark.parametrize("page", MODEL_PAGES)
def test_a_page_on_models_runs_on_the_ones_that_it_names(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (DOCS / page).read_text()
    assert executed(text, page) == text


# -- pages that are generated -----------------------------------------------------------------------------------------
def test_the_page_of_ops_is_what_the_registry_says(update: bool) -> None:
    page = DOCS / "ops.md"
    if update:
        page.write_text(markdown())
    assert page.read_text() == markdown(), "out of date: rlx ops --markdown > docs/ops.md"


def test_the_page_of_numpy_is_what_the_functions_say(update: bool) -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "numpy_page.py"))
    page = script["PATH"]
    if update:
        page.write_text(script["page"]())
    assert page.read_text() == script["page"](), "out of date: python scripts/numpy_page.py"


def test_the_page_of_stages_is_what_their_classes_and_builds_say(update: bool) -> None:
    page = DOCS / "stages.md"
    if update:
        page.write_text(stages.markdown())
    assert page.read_text() == stages.markdown(), "out of date: rlx stages --markdown > docs/stages.md"


@pytest.mark.parametrize("name", [*stages.all_stages(), *stages.LAYERS])
def test_every_stage_and_layer_has_an_entry_with_a_formula(name: str) -> None:
    entry = re.search(rf"^### {name}\n`{name}\((.*?)(?=^##|\Z)", (DOCS / "stages.md").read_text(), re.S | re.M)
    assert entry, f"docs/stages.md has no entry on {name}"
    assert re.search(r"`[^`]* = [^`]*`", entry[1]), f"the docstring of {name} has no formula"
    assert "- value: " in entry[1]


def test_weights_and_inputs_are_those_of_a_build() -> None:
    """Against what the published models store, for a few stages."""
    bert = stages.record(stages.EXAMPLES["BertEncoderLayer"])
    assert bert.weights["encoder.layer.0.attention.self.query.weight"] == (48, 24) and len(bert.weights) == 16
    assert list(bert.declared) == ["attention_mask"] and not bert.read and not bert.computed
    step = stages.record(stages.EXAMPLES["BindDecodeInputs"])
    assert set(step.read) == {"rope_cos", "rope_sin", "past_k_0", "past_v_0", "mask"} and not step.declared
    assert set(stages.record(stages.EXAMPLES["RopeTables"]).computed) == {"rope.cos", "rope.sin"}
    assert set(stages.record(stages.EXAMPLES["LlamaKvTap"]).side) == {"model.layers.0.k", "model.layers.0.v"}
    assert set(stages.record(stages.EXAMPLES["DecoderLayer"]).states) == {"keys.0", "values.0"}


def test_the_picture_of_the_readme_is_drawn_by_the_tour(update: bool) -> None:
    expression = "softmax(gelu(x @ w1 + b1) @ w2)"
    drawn = picture(lineage(read(expression), AVX2), AVX2, expression)
    path = DOCS / "tour.svg"
    if update:
        path.write_text(drawn)
    assert path.read_text() == drawn, f'out of date: rlx tour "{expression}" --target avx2 --svg docs/tour.svg'


# -- errors -----------------------------------------------------------------------------------------------------------
def test_every_error_has_a_section_with_a_message_of_its_own() -> None:
    page = (DOCS / "errors.md").read_text()
    classes = [c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, errors.RlxError)]
    for name in [c.__name__ for c in classes if c is not errors.RlxError] + ["UsageError"]:
        section = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", page, re.S | re.M)
        assert section, f"docs/errors.md has no section on {name}"
        assert re.search(rf"^{name}: ", section[1], re.M), f"the section on {name} shows no such error"
        assert f"[{name}](#{name.lower()})" in page, f"{name} is not in the table"


# -- glossary ---------------------------------------------------------------------------------------------------------
ENTRY = re.compile(r"^- \*\*(?P<word>[^*]+)\*\*: (?P<text>.*?)(?=^- |^#|\Z)", re.S | re.M)
# The words of section 1e of the user study, and those of the task that the page was written for.
MET_BY_NEWCOMERS = {
    "stage", "level", "block", "phase", "variant", "profile", "recipe", "session", "target", "device", "panel",
    "region", "epilogue", "bind program", "derived weight", "launch", "unit", "arena", "kernel", "pass", "node",
    "graph", "operand", "attribute", "rule", "buffer", "prefill", "decode", "KV cache", "quantised weight", "RoPE",
    "snapshot", "integer kernel", "side output", "weight source", "cached prefix", "stride", "alias", "JVP", "VJP",
}  # fmt: skip


def glossary() -> dict[str, str]:
    return {m["word"]: m["text"] for m in ENTRY.finditer((DOCS / "glossary.md").read_text())}


def test_the_glossary_has_the_words_that_newcomers_meet() -> None:
    assert not MET_BY_NEWCOMERS - set(glossary())


def test_words_of_the_glossary_are_words_of_the_code() -> None:
    source = "\n".join(p.read_text().lower() for p in (ROOT / "src").rglob("*.py"))
    for word in glossary():
        spellings = {word, word.replace(" ", "_"), word.replace(" ", "-"), f"{word}s"}
        assert any(re.search(rf"\b{re.escape(s.lower())}", source) for s in spellings), f"{word!r} is in no source file"


def test_each_concept_has_one_name() -> None:
    """No word stands twice, and none that the page advises against is a name."""
    page = (DOCS / "glossary.md").read_text()
    words = [m["word"].lower() for m in ENTRY.finditer(page)]
    assert len(words) == len(set(words)) > 100
    rows = re.findall(r"^\| (.+) \| (.+) \|$", page, re.M)[2:]
    avoided = {word.strip() for _, row in rows for word in row.split(",")}
    assert len(rows) > 5 and not avoided & set(words)


def test_the_glossary_is_short_and_in_order() -> None:
    for word, text in glossary().items():
        assert len(text) < 420, f"{word}: one or two sentences"
    for section in re.split(r"^## ", (DOCS / "glossary.md").read_text(), flags=re.M)[1:]:
        words = [m["word"].lower() for m in ENTRY.finditer(section)]
        assert words == sorted(words), section.splitlines()[0]


# -- names in prose ---------------------------------------------------------------------------------------------------
PATH = re.compile(r"`((?:src|docs|tests|examples|benchmarks)/[\w./-]+)`|\(((?:\.\./)?[\w./-]+\.(?:md|py|svg))[)#]")


WRITTEN = ["README.md", "benchmarks/README.md", *(f"docs/{p.name}" for p in sorted(DOCS.glob("*.md")))]


@pytest.mark.parametrize("page", WRITTEN)
def test_files_that_a_page_names_exist(page: str) -> None:
    for plain, link in PATH.findall((ROOT / page).read_text()):
        place = ROOT / plain if plain else (ROOT / page).parent / link
        assert place.exists(), f"{page} names {plain or link}"


def test_all_settings_commands_and_pages_are_named() -> None:
    using, readme = (DOCS / "using.md").read_text(), (ROOT / "README.md").read_text()
    source = "\n".join(p.read_text() for p in (ROOT / "src").rglob("*.py"))
    for setting in set(re.findall(r"\bRLX_[A-Z_]+\b", source)):
        assert f"| `{setting}` |" in using, f"{setting} is not in the table of settings"
    assert set(re.findall(r"^\| `(RLX_\w+)` \|", using, re.M)) <= set(re.findall(r"\bRLX_[A-Z_]+\b", source))
    for command in COMMANDS:
        assert re.search(rf"rlx {command}\b|also .*\b{command}\b", using), f"rlx {command} is not mentioned"
    for page in (p for p in DOCS.iterdir() if p.is_file() and p.name != "conf.py"):
        assert f"docs/{page.name}" in readme, f"docs/{page.name} is not mentioned"


def test_the_readme_fits_two_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


def test_the_index_has_each_page_once_under_what_a_reader_wants_to_do() -> None:
    index = (DOCS / "index.md").read_text()
    wanted = ["Run a model", "Assemble a model", "Do research", "Extend the compiler"]
    assert re.findall(r"^## (.*)$", index, re.M)[:4] == wanted
    linked = re.findall(r"^- \[[^\]]+\]\(([^)]+)\): .*\.$", index, re.M)
    pages = [p.name for p in DOCS.iterdir() if p.suffix in (".md", ".py")]
    assert sorted(linked) == sorted(set(pages) - {"index.md", "conf.py"})


def test_the_graph_by_hand_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = (m["code"] for m in BLOCK.finditer((DOCS / "using.md").read_text()) if "rlx.Graph" in m["code"])
    exec(compile(code, "using.md", "exec"), {})
    assert re.search(r"\[3\.99987\d* 3\.99987\d*\]", capsys.readouterr().out)  # 4 times Φ(4)


def test_the_tour_leads_to_the_other_pages() -> None:
    tour = (DOCS / "tour.md").read_text()
    for page in ("glossary.md", "errors.md", "ops.md", "looking-inside.md", "small.py"):
        assert f"({page})" in tour


# -- the small compiler -----------------------------------------------------------------------------------------------
Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def small() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("small", DOCS / "small.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["small"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["small"]


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_the_small_compiler_uses_nothing_of_rlx_and_names_files_that_exist() -> None:
    source = (DOCS / "small.py").read_text()
    assert not re.search(r"^\s*(import|from) rlx", source, re.M)
    named = re.findall(r"src/rlx/[\w/.]*\w", source)
    assert len(named) > 10 and all((ROOT / name).exists() for name in named)
    assert len(source.splitlines()) <= 520


def test_the_small_compiler_shows_its_levels(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(DOCS / "small.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert "%2 = matmul(%0, %1) : f32[rows, 4]" in out
    assert "for i0 in rows:" in out and "t1[i0, 0] = max(t0[i0, k1] for k1 in 4)" in out
    assert out.count("for i0 in rows:") == 1  # five nests became one


@pytest.mark.parametrize("rows", [0, 1, 3, 64])
def test_the_small_compiler_computes_softmax_and_an_mlp(small: ModuleType, rows: int) -> None:
    rng = np.random.default_rng(rows)
    x, w = rng.standard_normal((rows, 16)), rng.standard_normal((16, 4))
    compiled = small.compile(small.softmax(small.arg("x", "rows", 16) @ small.arg("w", 16, 4)))
    np.testing.assert_allclose(compiled(x=x, w=w), softmax(x @ w) if rows else np.zeros((0, 4)), rtol=1e-5, atol=1e-7)
    arrays = {"x": x, "w1": rng.standard_normal((16, 32)), "b1": rng.standard_normal(32)}
    arrays |= {"w2": rng.standard_normal((32, 10)), "b2": rng.standard_normal(10)}
    hidden = np.maximum(x @ arrays["w1"] + arrays["b1"], 0)
    expected = softmax(hidden @ arrays["w2"] + arrays["b2"]) if rows else np.zeros((0, 10))
    np.testing.assert_allclose(small.compile(small.mlp())(**arrays), expected, rtol=1e-4, atol=1e-6)


def test_the_passes_of_the_small_compiler(small: ModuleType) -> None:
    x = small.arg("x", "n", 4)
    same = small.optimise(x * (small.const(2.0) * 0.5) / 1.0)
    assert str(same) == "%0 = input(x) : f32[n, 4]"
    twice = small.optimise(small.exp(x) + small.exp(x))
    assert [n.op for n in small.walk(twice)] == ["input", "exp", "add"]
    zeros = small.optimise((x + 0.0) * (x + -0.0))
    assert sum(n.op == "const" for n in small.walk(zeros)) == 2  # 0.0 and -0.0 are not one constant
    array = np.array([[-0.0, 1, -2, 3]], np.float32)
    for graph in (same, twice, zeros):
        np.testing.assert_allclose(small.compile(graph)(x=array), small.evaluate(graph, {"x": array}), rtol=1e-6)


def test_the_small_compiler_merges_loops_only_where_it_may(small: ModuleType) -> None:
    x, w = small.arg("x", "n", 4), small.arg("w", 4, "n")
    power = small.exp(x @ w)  # [n, n], read by rows and by columns
    graph = power @ (power + 1.0)
    compiled = small.compile(graph)
    assert len(compiled.program.loops) == 2  # the product needs all rows of its right side
    rng = np.random.default_rng(0)
    arrays = {"x": rng.standard_normal((5, 4)) / 4, "w": rng.standard_normal((4, 5)) / 4}
    e = np.exp(arrays["x"] @ arrays["w"])
    np.testing.assert_allclose(compiled(**arrays), e @ (e + 1), rtol=1e-5)


def test_mistakes_in_the_small_compiler_are_found_where_they_are_made(small: ModuleType) -> None:
    x = small.arg("x", "n", 4)
    with pytest.raises(ValueError, match=r"matmul: \['n', 4\] by \[5, 2\]"):
        x @ small.arg("w", 5, 2)
    with pytest.raises(ValueError, match="sizes differ, n and m"):
        x + small.arg("y", "m", 4)
    compiled = small.compile(x + small.arg("y", "n", 4))
    with pytest.raises(ValueError, match="expected x, y, found x"):
        compiled(x=np.zeros((2, 4)))
    with pytest.raises(ValueError, match=r"y has shape \[3, 4\], expected \['n', 4\] with {'n': 2}"):
        compiled(x=np.zeros((2, 4)), y=np.zeros((3, 4)))
