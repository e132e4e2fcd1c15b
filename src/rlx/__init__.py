"""rlx: an ML compiler and runtime. Graphs become machine code through three levels that can all be looked at.

Importing rlx loads NumPy and nothing heavier; everything else is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rlx import errors as errors
    from rlx.dtypes import dtype as dtype
    from rlx.engine.model import Completion as Completion
    from rlx.engine.model import Model as Model
    from rlx.engine.model import load as load
    from rlx.ir.graph import Graph as Graph
    from rlx.ir.graph import Value as Value
    from rlx.ir.provenance import stage as stage
    from rlx.mir.report import FusionReport as FusionReport
    from rlx.ops.attention import MaskKind as MaskKind
    from rlx.runtime.compiled import CompiledGraph as CompiledGraph
    from rlx.runtime.profiler import Report as Report
    from rlx.runtime.session import Session as Session
    from rlx.runtime.session import compile as compile
    from rlx.types import Dim as Dim
    from rlx.types import DimBinding as DimBinding
    from rlx.types import TensorType as TensorType
    from rlx.types import dim as dim
    from rlx.types import dim_max as dim_max
    from rlx.types import dim_min as dim_min
    from rlx.types import sym as sym

# name -> (module, attribute); an empty attribute is the module itself
_PUBLIC = {
    "Completion": ("rlx.engine.model", "Completion"),
    "CompiledGraph": ("rlx.runtime.compiled", "CompiledGraph"),
    "Dim": ("rlx.types", "Dim"),
    "DimBinding": ("rlx.types", "DimBinding"),
    "FusionReport": ("rlx.mir.report", "FusionReport"),
    "Graph": ("rlx.ir.graph", "Graph"),
    "MaskKind": ("rlx.ops.attention", "MaskKind"),
    "Model": ("rlx.engine.model", "Model"),
    "Report": ("rlx.runtime.profiler", "Report"),
    "Session": ("rlx.runtime.session", "Session"),
    "TensorType": ("rlx.types", "TensorType"),
    "Value": ("rlx.ir.graph", "Value"),
    "compile": ("rlx.runtime.session", "compile"),
    "dim": ("rlx.types", "dim"),
    "dim_max": ("rlx.types", "dim_max"),
    "dim_min": ("rlx.types", "dim_min"),
    "dtype": ("rlx.dtypes", "dtype"),
    "errors": ("rlx.errors", ""),
    "load": ("rlx.engine.model", "load"),
    "stage": ("rlx.ir.provenance", "stage"),
    "sym": ("rlx.types", "sym"),
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    found = _PUBLIC.get(name)
    if found is None:
        raise AttributeError(f"module 'rlx' has no attribute {name!r}")
    if name in ("Graph", "Value", "MaskKind"):
        importlib.import_module("rlx.hir.blocks")  # the ops and blocks that graphs are built from
    module = importlib.import_module(found[0])
    value = getattr(module, found[1]) if found[1] else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
