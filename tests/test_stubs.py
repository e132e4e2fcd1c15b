"""The stubs of ops are those of the registry, and run time says the same as they do."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import rlx
from rlx.ir.registry import LEAF, OPS, SPELLINGS

SCRIPT = Path(__file__).parents[1] / "scripts" / "stubs.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stubs", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_stubs_are_what_the_registry_says(script: ModuleType, update: bool) -> None:
    if update:
        script.PATH.write_text(script.stubs())
    assert script.PATH.read_text() == script.stubs(), "out of date: python scripts/stubs.py"


def test_every_op_is_in_the_stub_of_each_class_or_the_class_has_it_itself(script: ModuleType) -> None:
    classes = {c.name: c for c in ast.parse(script.PATH.read_text()).body if isinstance(c, ast.ClassDef)}

    def methods(name: str) -> set[str]:
        actual = {f.name for f in classes[name].body if isinstance(f, ast.FunctionDef)}
        return actual.union(*(methods(base.id) for base in classes[name].bases if isinstance(base, ast.Name)))

    ops = {o.name for o in OPS.values() if o.is_builtin and LEAF not in o.traits} | set(SPELLINGS)
    assert {"softmax", "matmul", "quantize", "llama_decoder_block"} <= ops
    holders = {"GraphOps": rlx.Graph, "ValueOps": rlx.Value, "ModuleOps": rlx.GraphModule}
    holders |= {"EmitOps": rlx.Emit, "FlowValueOps": rlx.FlowValue}
    for name, holder in holders.items():
        assert ops <= methods(name) | set(dir(holder)), name


def test_an_op_of_a_user_is_not_in_the_stubs(script: ModuleType) -> None:
    from rlx.lir.forms.custom import forget

    before = script.stubs()
    rlx.op("my_own_op", reference=lambda x: x)(lambda x: x)
    try:
        assert script.stubs() == before
        assert "my_own_op" in dir(rlx.Graph("g"))
    finally:
        forget("my_own_op")
