"""The layering of the package: a layer imports only lower ones."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from pathlib import Path

import pytest

import rlx
from rlx.backends.base import BUILT_IN, backend
from rlx.ir.registry import LEAF, OPS
from rlx.lir import kernels
from rlx.lir.loops import SCALAR_OPS

ROOT = Path(rlx.__file__).parent
# Lowest first; layers of one row do not import each other.
ROWS = [
    ["fast_dataclass"], ["arrays", "garbage", "jax_names", "notebook", "version"],
    ["errors", "fork_safe_locks", "cgroups", "host_memory", "sampling"],
    ["free_memory", "dtypes"], ["dims"], ["dim_binding"], ["types"], ["operand_layouts", "kv_layout"],
    ["profile", "target", "quant_schemes"], ["ir", "formats"],
    ["ops"], ["hir"], ["mir", "transforms"], ["lir"], ["module"], ["backends"], ["inspect"],
    ["runtime"], ["functional"], ["numpy"], ["debug"], ["flow", "hub"], ["models"], ["engine", "train"], ["index"],
    ["server", "batch"], ["ray"], ["cli"], ["__main__"],
]  # fmt: skip
RANK = {layer: rank for rank, row in enumerate(ROWS) for layer in row}
# Lazy reaches upwards: `Graph.define` and `Graph.hir` give modules, a notebook shows a graph folded as `rlx inspect`
# does, unpickling a graph declares the ops, `GraphModule.plan` is for this machine by default, and a layout in the text
# of a graph is one of the backend that it names.
ALLOWED = {
    ("ir/graph.py", "rlx.module.GraphModule"),
    ("ir/graph.py", "rlx.hir"),
    ("ir/numpy_functions.py", "rlx.functional.graph_values.on_values"),
    ("ir/numpy_functions.py", "rlx.functional.graph_values.method_on_values"),
    ("ir/numpy_functions.py", "rlx.functional.graph_values.property_on_values"),
    ("ir/graph.py", "rlx.inspect.notebook.graph_html"),
    ("module.py", "rlx.backends.base.backend"),
    ("module.py", "rlx.backends.base.known_target"),
    ("operand_layouts.py", "rlx.backends.base.backend"),
}
FILES = sorted(p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")


def layer_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "rlx" else None


@functools.cache
def imports(path: Path) -> list[str]:
    result = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            result += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            result += [f"{node.module}.{alias.name}" for alias in node.names]
    return result


def module_name(path: Path) -> str:
    return ".".join(["rlx", *path.relative_to(ROOT).with_suffix("").parts])


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_layer_imports_only_lower_ones(path: Path) -> None:
    own = layer_of(module_name(path))
    assert own in RANK, f"{own} is not a known layer"
    for name in imports(path):
        other = layer_of(name)
        if (str(path.relative_to(ROOT)), name) in ALLOWED:
            continue
        if name.split(".")[0] != "rlx" or own in ("cli", "__main__"):
            continue
        assert other in RANK, f"{path.name} imports {name}: the package itself, above all layers"
        assert other == own or RANK[other] < RANK[own], f"{path.name} ({own}) imports {name}"


def test_llvmlite_is_imported_only_in_the_cpu_backend() -> None:
    users = [p for p in FILES if any(n.split(".")[0] == "llvmlite" for n in imports(p))]
    assert {p.relative_to(ROOT).parts[:2] for p in users} == {("backends", "cpu")}


# Where a backend may know ops: loop forms of its own, and layouts of weights.
BACKENDS = [p for p in FILES if p.is_relative_to(ROOT / "backends")]
WITHOUT_OPS = [p for p in BACKENDS if p.relative_to(ROOT).parts[2:3] not in (("forms",), ("packing",))]
# Names of ops that mean something else in a backend: reductions of LIR, a routine of attention.
OTHER_MEANINGS = {"sum", "prod", "softmax"}


def op_names() -> set[str]:
    """All but those that scalar expressions of LIR share, and leaves."""
    rlx.Graph("any")  # declares the ops
    return {o.name for o in OPS.values() if LEAF not in o.traits} - set(SCALAR_OPS) - OTHER_MEANINGS


@pytest.mark.parametrize("path", WITHOUT_OPS, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_backend_sees_no_op(path: Path) -> None:
    named = [n for n in imports(path) if n.startswith(("rlx.ops", "rlx.ir.registry", "rlx.hir", "rlx.mir"))]
    assert not named, f"{path.name} imports {named}"
    texts = {n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)}
    assert not texts & op_names(), f"{path.name} names ops"


def test_forms_of_a_backend_are_those_of_known_ops() -> None:
    rlx.Graph("any")  # declares the ops
    targets = [target for name in BUILT_IN for target in backend(name).known_targets().values()]
    assert {target.device for target in targets} == set(BUILT_IN)
    for target in targets:
        assert set(target.forms()) <= set(OPS), target.name


def test_the_rest_of_the_package_does_not_import_forms_of_a_backend() -> None:
    for path in WITHOUT_OPS:
        inside = [n for n in imports(path) if re.match(r"rlx\.backends\.\w+\.(forms|packing)\b", n)]
        assert path.name == "targets.py" or not inside, f"{path.name} imports {inside}"


# What the rest of rlx may know of backends: the protocol, and the cache folder.
OPEN = ("rlx.backends.base", "rlx.backends.cache_folder", "rlx.backends.reports")


def closed(path: Path) -> list[str]:
    """Imports of single backends."""
    inside = [name for name in imports(path) if name.startswith("rlx.backends.")]
    return [name for name in inside if name not in OPEN and not name.startswith(tuple(f"{o}." for o in OPEN))]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nobody_else_imports_a_backend(path: Path) -> None:
    """They are found by name, and answer through `backends/base.py`."""
    if not path.is_relative_to(ROOT / "backends"):
        assert not [name for name in closed(path) if name != "rlx.backends.cache_folder"]


def test_tests_import_a_backend_only_in_its_folder() -> None:
    tests = Path(__file__).parent
    others = [p for p in tests.rglob("*.py") if not p.is_relative_to(tests / "backends")]
    assert not {str(p.relative_to(tests)): actual for p in others if (actual := closed(p))}


def test_only_its_own_tests_name_the_inside_of_the_cpu_backend() -> None:
    """Neither in imports nor in texts, such as paths of patches and programs of child processes."""
    tests = Path(__file__).parent
    folders = [tests, *(tests.parent / name for name in ("benchmarks", "examples", "scripts"))]
    own = {tests / "cpu_internals.py", Path(__file__)}
    others = [p for folder in folders for p in folder.rglob("*.py") if p not in own]
    others = [p for p in others if not p.is_relative_to(tests / "backends" / "cpu") and "node_modules" not in p.parts]
    assert not [str(p) for p in others if re.search(r"rlx\.backends\.cpu\b", p.read_text())]


def test_a_backend_sees_no_other() -> None:
    backends = ROOT / "backends"
    for path in sorted(backends.rglob("*.py")):
        own = path.relative_to(backends).with_suffix("").parts[0]
        for name in imports(path):
            parts = name.split(".")
            if parts[:2] == ["rlx", "backends"] and len(parts) > 2 and own != "base":
                shared = ("base", "cache_folder", "program_executable", "run_time_errors", "reports")
                assert parts[2] in (own, *shared), f"{path.name} imports {name}"


# Names that only the CPU backend has a use for.
OF_PROCESSORS = re.compile(r"avx\w*|vnni|panels?|lanes?|vector_bytes|tile_rows|tile_vectors|has_fma|has_dot|HEIGHTS")
ELSEWHERE = [p for p in FILES if not any(p.is_relative_to(ROOT / "backends" / b) for b in ("cpu", "cuda"))]


def names(path: Path) -> set[str]:
    """All names in the code of a file: variables, attributes, parameters, functions and classes."""
    result: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        fields = (getattr(node, field, None) for field in ("id", "attr", "arg", "name"))
        result |= {text for text in fields if isinstance(text, str)}
    return result


def test_nobody_else_knows_what_a_processor_is_made_of() -> None:
    known = {str(p.relative_to(ROOT)): {n for n in names(p) if OF_PROCESSORS.fullmatch(n)} for p in ELSEWHERE}
    assert not {path for path, actual in known.items() if actual}


def device_tests(path: Path) -> list[int]:
    """Lines that compare something with the name of a built-in device."""
    compared = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Compare)]
    sides = [(n.lineno, side) for n in compared for side in ast.walk(n) if isinstance(side, ast.Constant)]
    return sorted({line for line, side in sides if side.value in BUILT_IN})


def test_what_a_device_can_do_is_asked_of_its_backend() -> None:
    """Not of its name; commands may treat the default device apart."""
    others = [p for p in FILES if p.relative_to(ROOT).parts[0] not in ("backends", "cli")]
    assert not {str(p.relative_to(ROOT)): lines for p in others if (lines := device_tests(p))}


# How a backend cuts problems, and what its machine code calls: launches give operands, sizes and strides.
OF_NESTS = re.compile(r"row_blocks?|\w*ROW_BLOCK|ATTENTION_ROWS|panels?|panel_\w+|tiles?|tile_\w+|x_words|parts")


def test_the_language_says_nothing_of_units_and_addresses_of_a_backend() -> None:
    for path in sorted((ROOT / "lir").glob("*.py")):
        texts = {n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)}
        words = names(path) | {text for text in texts if isinstance(text, str)}
        assert not {word for word in words if OF_NESTS.fullmatch(word)}, path.name


def test_problems_hold_no_loops_and_no_units() -> None:
    """Records of matmul and attention: loops of a backend, and how it cuts them, are its own."""
    for record in (kernels.MatmulKernel, kernels.AttentionKernel, kernels.AttentionGradKernel):
        kinds = " ".join(str(field.type) for field in dataclasses.fields(record))
        assert "LoopKernel" not in kinds and "For" not in kinds.split()


def test_the_page_of_the_architecture_names_every_layer() -> None:
    page = (ROOT.parents[1] / "docs" / "architecture.md").read_text()
    rows = [line.split("|") for line in page.partition("## Layers")[2].partition("## ")[0].splitlines() if "|" in line]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row[2])}
    assert named == {layer_of(module_name(path)) for path in FILES} - {"__main__"}
