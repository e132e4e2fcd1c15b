"""`rlx tour`: expressions that are read and never run, each level shown, mistakes with a mark below them."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from targets import AVX2, supported

import rlx
from rlx.cli.console import UsageError
from rlx.cli.main import main
from rlx.cli.tour import read, tour
from rlx.errors import GraphError, RlxError, ShapeError

HAS_AVX2 = pytest.mark.skipif(AVX2 not in supported(), reason="needs AVX2")


# -- reading ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("expression", "shapes"),
    [
        ("softmax(x @ w)", {"x": "f32[rows, 64]", "w": "f32[64, 32]"}),
        ("relu(a @ w1 + b1) @ w2", {"a": "f32[rows, 64]", "w1": "f32[64, 32]", "b1": "f32[32]", "w2": "f32[32, 16]"}),
        ("linear(x, w, b, activation='gelu')", {"x": "f32[rows, 64]", "w": "f32[64, 32]", "b": "f32[32]"}),
        ("swiglu_ffn(x, up, gate, down)", {"up": "f32[64, 32]", "gate": "f32[64, 32]", "down": "f32[32, 64]"}),
        ("x.rms_norm(g, eps=1e-6) * 2", {"g": "f32[64]"}),
        ("-x @ x.mT", {"x": "f32[rows, 64]"}),
    ],
)
def test_shapes_are_chosen_so_that_they_fit(expression: str, shapes: dict[str, str]) -> None:
    graph = read(expression)
    for name, shape in shapes.items():
        assert str(graph.named(name).type) == shape


def test_the_first_name_is_an_input_and_the_others_are_weights() -> None:
    graph = read("x @ w + y", inputs=["y"])
    assert [n.attrs["name"] for n in graph.inputs] == ["x", "y"] and [n.attrs["name"] for n in graph.params] == ["w"]


def test_blocks_make_an_hir_graph() -> None:
    assert read("linear(x, w)").level == "hir" and read("x @ w").level == "mir"


def test_shapes_and_types_may_be_given() -> None:
    graph = read("gather(t, ids) * 2", {"t": ((10, 4), "f16"), "ids": ((3,), "i32")})
    assert str(graph.outputs[0].type) == "f16[3, 4]"


def test_results_of_ops_with_several_can_be_picked() -> None:
    assert [str(v.type) for v in read("topk(x, k=2)").outputs] == ["f32[rows, 2]", "i32[rows, 2]"]
    assert str(read("topk(x, k=2)[1]").outputs[0].type) == "i32[rows, 2]"


def test_what_was_read_means_what_python_means() -> None:
    rng = np.random.default_rng(0)
    x, w, b = rng.standard_normal((3, 64)), rng.standard_normal((64, 32)), rng.standard_normal(32)
    f = rlx.compile(read("where(x @ w + b > 0, -(x @ w), 2 * (x @ w - b) / 4)"), "reference")
    f.set_params({"w": w.astype(np.float32), "b": b.astype(np.float32)})
    (y,) = f.run({"x": x.astype(np.float32)})
    np.testing.assert_allclose(y, np.where(x @ w + b > 0, -(x @ w), 2 * (x @ w - b) / 4), atol=1e-4)


# -- mistakes ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("expression", "message", "mark"),
    [
        ("softmaxx(x @ w)", "no op is called 'softmaxx'", "^~~~~~~~"),
        ("softmax(x @ ", "this is not an expression", "       ^"),
        ("exp(x, axis=y)", "this is not a number, a text or a tuple", "            ^"),
        ("[x for x in y]", "not part of the language", "^~~~~~~~~~~~~~"),
        ("x + 'text'", "not part of the language", "    ^~~~~~"),
        ("x + é[0:2]", "not part of the language", "    ^~~~~~"),  # columns of characters, not of bytes
        ("exp(*x)", "not part of the language", "    ^~"),
        ("exp(**x)", "not part of the language", "^~~~~~~~"),
        ("(lambda: x)()", "not part of the language", "^"),
        ("x.__class__", "not part of the language", "^~~~~~~~~~~"),
        ("__import__('os').system('true')", "no op is called 'system'", "^~~~~"),
        ("open('/etc/passwd')", "no op is called 'open'", "^~~~"),
        ("input(x)", "no op is called 'input'", "^~~~~"),
        ("fused_matmul(x, w)", "no op is called 'fused_matmul'", "^~~"),
        ("topk(x, k=2) + 1", "an operand has 2 results", "^~~"),
        ("exp(x)[0]", "this picks nothing", "^~~"),
        ("3", "this is a number", "^"),
        ("x if y else z", "not part of the language", "^~~"),
        ("x := 3", "this is not an expression", "  ^"),
        ("x + 99999999999999999999", "this number is too large", "    ^~~"),
    ],
)
def test_a_mistake_is_marked(expression: str, message: str, mark: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        read(expression)
    shown = [note.removeprefix("  ") for note in caught.value.notes]
    assert shown[0] == expression.strip() and shown[1].startswith(mark) and shown[1].strip(" ~") == "^"


def test_mistakes_of_shapes_keep_their_type_and_are_marked() -> None:
    with pytest.raises(ShapeError, match="matmul: inner sizes differ") as caught:
        read("exp(x @ w)", {"x": ((2, 3), "f32"), "w": ((4, 5), "f32")})
    assert caught.value.notes[:2] == ["  exp(x @ w)", "      ^~~~~"]
    assert not any("built at" in note for note in caught.value.notes)
    with pytest.raises(GraphError, match="has no attribute 'axes'"):
        read("softmax(x, axes=1)")


@pytest.mark.parametrize("text", ["x" * 3000, "(" * 500, "-" * 1500 + "x", "x\0", "9" * 1900 + " + x", "", " ", "\n"])
def test_whatever_is_typed_the_error_is_typed(text: str) -> None:
    with pytest.raises(RlxError):
        read(text)


def test_options_that_name_nothing_are_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tour", "exp(x)", "--shape", "y=4"]) == 2
    assert "'y' is not in the expression" in capsys.readouterr().err
    assert main(["tour", "exp(x)", "--input", "z"]) == 2
    assert main(["tour", "exp(x)", "--shape", "x"]) == 2
    assert "expected NAME=SIZES" in capsys.readouterr().err


# -- showing ----------------------------------------------------------------------------------------------------------
@HAS_AVX2
def test_every_level_is_shown_with_the_pass_that_changed_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tour", "softmax(linear(x, w, b))", "--target", "avx2", "--shape", "x=4,8", "--lines", "5"]) == 0
    out = capsys.readouterr().out
    titles = [line for line in out.splitlines() if line[:1].isdigit()]
    assert titles == [
        "1. The graph", "2. Lowered to MIR", "3. Passes", "4. MIR, optimised", "5. The bind program", "6. LIR",
        "7. LLVM", "8. Assembly", "9. A run",
    ]  # fmt: skip
    assert "hoist_weights: Split the graph" in out and re.search(r"^ +\+ %\d+ = param\(name=\"@0\"\)", out, re.M)
    assert "launch softmax." in out and "x float>" in out and "ymm" in out
    assert "The result has shape [4, 32]" in out
    assert "\x1b" not in out  # no colours where nobody looks


def test_a_graph_without_work_can_be_toured() -> None:
    lines = [line for _, line in tour(read("x"), AVX2, "x", 4)]
    assert any("launch copy." in line for line in lines)


@HAS_AVX2
def test_a_picture_and_a_page_are_files_of_their_own(tmp_path: Path) -> None:
    svg, page = tmp_path / "tour.svg", tmp_path / "tour.html"
    words = ["tour", "softmax(gelu(x @ w + b) @ v)", "--target", "avx2", "--svg", str(svg), "--html", str(page)]
    assert main(words) == 0
    drawn = ElementTree.fromstring(svg.read_text())
    texts = [t.text or "" for t in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert any("fused_matmul" in t for t in texts) and any("vfmadd" in t for t in texts)
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}path"))) > 8  # ribbons
    assert "href" not in svg.read_text() and "url(" not in svg.read_text()
    assert page.read_text().startswith("<!DOCTYPE html>")
