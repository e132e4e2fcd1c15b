"""Write `src/rlx/ir/op_methods.pyi`: for type checkers, every op as a method, from the registry.

`python scripts/stubs.py` writes it, and so does `pytest --update tests/test_stubs.py`; the test compares it.
"""

from __future__ import annotations

import ast
import enum
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import rlx
from rlx.dtypes import DType
from rlx.flow.emit import Emit
from rlx.flow.state import FlowValue
from rlx.ir.builders import builder_signature, op_names
from rlx.ir.graph import Graph, Value
from rlx.ir.registry import OPS, SPELLINGS
from rlx.module import GraphModule

PATH = Path(rlx.__file__).parent / "ir" / "op_methods.pyi"
WIDTH = 120

HEAD = '''\
# Written by scripts/stubs.py from the registry of ops; do not edit.
# fmt: off
# ruff: noqa: E501
"""Ops as methods, for type checkers."""

'''
# Where the names in annotations come from. Those that no annotation has are not imported.
IMPORTS = {
    "Enum": "enum",
    "Callable": "collections.abc", "Iterable": "collections.abc", "Iterator": "collections.abc",
    "Mapping": "collections.abc", "Sequence": "collections.abc",
    "AbstractContextManager": "contextlib",
    "Any": "typing", "Protocol": "typing", "Self": "typing", "TypeAlias": "typing",
    "DType": "rlx.dtypes", "DTypeLike": "rlx.dtypes",
    "MultiOutputHandle": "rlx.ir.custom",
    "Graph": "rlx.ir.graph", "Node": "rlx.ir.graph", "Value": "rlx.ir.graph",
    "Origin": "rlx.ir.provenance",
    "OpDef": "rlx.ir.registry",
    "Layout": "rlx.operand_layouts",
    "GraphModule": "rlx.module",
    "Dim": "rlx.types", "ShapeLike": "rlx.types", "Size": "rlx.types", "TensorType": "rlx.types",
}  # fmt: skip
OPERAND = """\
class _HoldsValue(Protocol):
    def __rlx_value__(self) -> Value: ...

# Numbers and arrays become constants.
Operand: TypeAlias = Value | _HoldsValue | float | np.ndarray[Any, Any] | np.generic | Sequence[Any]
"""


def stubs() -> str:
    """The text of the file."""
    ops = [name for name in op_names() if OPS[SPELLINGS.get(name, name)].is_builtin]
    building = {"GraphOps": Graph, "ModuleOps": GraphModule, "EmitOps": Emit}
    shared = [name for name in ops if not any(_has(holder, name) for holder in building.values())]
    parts = [OPERAND, _class("_Builders", "", (_op(name) for name in shared))]
    for name, holder in building.items():
        rest = [_op(op) for op in ops if op not in shared and not _has(holder, op)]
        rest += _members(Graph, holder, set(ops)) if holder is not Graph else []
        parts.append(_class(name, "_Builders", rest))
    methods = [name for name in ops if not _has(Value, name)]
    parts.append(_class("ValueOps", "", (_op(name, of_value=True) for name in methods)))
    parts.append(_class("FlowValueOps", "ValueOps", _members(Value, FlowValue, set(methods), own="Self")))
    body = "\n\n".join(parts)
    return f"{HEAD}{_imports(body)}\n\n{body}"


def _has(holder: type, name: str) -> bool:
    """Whether a class itself has a member, a field of a dataclass included."""
    return hasattr(holder, name) or any(name in inspect.get_annotations(base) for base in holder.__mro__)


def _imports(body: str) -> str:
    words = set(re.findall(r"\w+", re.sub(r'""".*?"""', "", body, flags=re.S)))
    modules: dict[str, list[str]] = {}
    for name, module in IMPORTS.items():
        if name in words:
            modules.setdefault(module, []).append(name)
    lines = {module: f"from {module} import {', '.join(sorted(names))}" for module, names in modules.items()}
    ours = [lines[module] for module in sorted(lines) if module.startswith("rlx.")]
    theirs = [lines[module] for module in sorted(lines) if not module.startswith("rlx.")]
    return "\n".join([*theirs, "", "import numpy as np", "", *ours])


def _class(name: str, base: str, members: Iterable[str]) -> str:
    body = "".join(members) or "    ...\n"
    return f"class {name}{f'({base})' if base else ''}:\n{body}"


def _op(name: str, *, of_value: bool = False) -> str:
    """An op as a method of what builds, or of the value that is its first operand."""
    op = SPELLINGS.get(name, name)
    if hasattr(Graph, op):
        builder = inspect.getattr_static(Graph, op)
        signature, doc = inspect.signature(builder), inspect.getdoc(builder)
    else:
        signature, doc = builder_signature(OPS[op]), OPS[op].doc
    if not of_value:
        return _method(name, signature, doc)
    first, operand, *rest = signature.parameters.values()
    kept = [operand] if operand.kind is operand.VAR_POSITIONAL else []
    return _method(name, signature.replace(parameters=[first, *kept, *rest]), doc, own="Self")


def _members(source: type, holder: type, ops: set[str], own: str = "Value") -> Iterator[str]:
    """What a class hands over to another, beside ops: its public methods, properties and attributes."""
    for name, kind in _attributes(source).items():
        if not _has(holder, name):
            yield f"    {name}: {kind}\n"
    for name in dir(source):
        if name.startswith("_") or name in ops or _has(holder, name):
            continue
        member = inspect.getattr_static(source, name)
        if isinstance(member, property):
            assert member.fget is not None
            yield f"    @property\n{_method(name, inspect.signature(member.fget), inspect.getdoc(member), own)}"
        elif isinstance(member, staticmethod):
            function = member.__func__
            yield f"    @staticmethod\n{_method(name, inspect.signature(function), inspect.getdoc(function), own)}"
        elif inspect.isfunction(member):
            yield _method(name, inspect.signature(member), inspect.getdoc(member), own)


def _attributes(source: type) -> dict[str, str]:
    """The public attributes that `__init__` sets with an annotation or from an argument, annotated slots, and types."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(source.__init__)))
    arguments = {name: str(p.annotation) for name, p in inspect.signature(source.__init__).parameters.items()}
    slots = getattr(source, "__slots__", ())
    found: dict[str, str] = {name: str(kind) for name, kind in inspect.get_annotations(source).items() if name in slots}
    for node in ast.walk(tree):
        match node:
            case ast.AnnAssign(target=ast.Attribute(attr=name), annotation=kind):
                found[name] = ast.unparse(kind)
            case ast.Assign(targets=[ast.Attribute(attr=name)], value=ast.Name(id=argument)) if argument in arguments:
                found[name] = arguments[argument]
    return {name: kind for name, kind in found.items() if not name.startswith("_")}


def _method(name: str, signature: inspect.Signature, doc: str | None, own: str = "Value") -> str:
    parameters = list(signature.parameters.values())
    texts = []
    for i, parameter in enumerate(parameters):
        is_keyword = parameter.kind is parameter.KEYWORD_ONLY
        if is_keyword and not any(p.kind in (p.VAR_POSITIONAL, p.KEYWORD_ONLY) for p in parameters[:i]):
            texts.append("*")
        texts.append(_parameter(parameter))
    result = re.sub(r"\bValue\b", own, _annotation(signature.return_annotation))
    lines = _wrapped(f"    def {name}(", texts, f") -> {result}:")
    if not doc:
        return f"{lines} ...\n"
    return f"{lines}\n{_docstring(doc)}"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    if parameter.annotation is parameter.empty:
        return f"{stars}{parameter.name}"
    text = f"{stars}{parameter.name}: {_annotation(parameter.annotation)}"
    return text if parameter.default is parameter.empty else f"{text} = {_default(parameter.default)}"


def _annotation(annotation: Any) -> str:
    if annotation is inspect.Signature.empty:
        return "Any"
    text = str(annotation) if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"^Iterator\[None\]$", "AbstractContextManager[None]", text)  # a generator under @contextmanager


def _default(value: Any) -> str:
    if isinstance(value, DType):
        return repr(value.name)
    if isinstance(value, enum.Enum):
        return "..."
    return repr(value) if isinstance(value, (bool, int, float, str, tuple, type(None))) else "..."


def _wrapped(head: str, texts: list[str], tail: str) -> str:
    line = f"{head}{', '.join(texts)}{tail}"
    if len(line) <= WIDTH:
        return line
    body = textwrap.fill(
        ", ".join(text.replace(" ", "\0") for text in texts), WIDTH, initial_indent=" " * 8,
        subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return f"{head}\n{body}\n    {tail}".replace("\0", " ")


def _docstring(doc: str) -> str:
    text = doc.replace("\\", "\\\\").replace('"""', r"\"\"\"")
    if "\n" not in text and len(text) + 14 <= WIDTH and not text.endswith('"'):
        return f'        """{text}"""\n'
    lines = textwrap.indent(text, " " * 8).lstrip()
    return f'        """{lines}\n        """\n'


if __name__ == "__main__":
    PATH.write_text(stubs())
