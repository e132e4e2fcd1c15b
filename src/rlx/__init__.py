"""rlx: an ML compiler and runtime. Graphs become machine code through three levels, each of which can be inspected.

Importing rlx loads NumPy and nothing heavier; everything else is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlx.garbage import paused
from rlx.version import __version__ as __version__

if TYPE_CHECKING:
    from rlx import batch as batch
    from rlx import debug as debug
    from rlx import errors as errors
    from rlx import flow as flow
    from rlx import functional as functional
    from rlx import numpy as numpy
    from rlx import ray as ray
    from rlx import train as train
    from rlx import transforms as transforms
    from rlx.dtypes import dtype as dtype
    from rlx.engine.embedding_model import EmbeddingModel as EmbeddingModel
    from rlx.engine.export import export as export
    from rlx.engine.export import load_exported as load_exported
    from rlx.engine.language_model import Completion as Completion
    from rlx.engine.language_model import LanguageModel as LanguageModel
    from rlx.engine.load import load as load
    from rlx.engine.model import Model as Model
    from rlx.engine.vision_model import VisionModel as VisionModel
    from rlx.flow.built import BuiltModel as BuiltModel
    from rlx.flow.context import FlowCtx as FlowCtx
    from rlx.flow.emit import Emit as Emit
    from rlx.flow.flow import ModelFlow as ModelFlow
    from rlx.flow.layers import LayerStack as LayerStack
    from rlx.flow.recipe import ModelRecipe as ModelRecipe
    from rlx.flow.side_outputs import SideOutputs as SideOutputs
    from rlx.flow.stages.base import FlowStage as FlowStage
    from rlx.flow.state import DecodeBindings as DecodeBindings
    from rlx.flow.state import FlowState as FlowState
    from rlx.flow.state import FlowValue as FlowValue
    from rlx.flow.state import GdnInputSlots as GdnInputSlots
    from rlx.flow.weights import MapWeights as MapWeights
    from rlx.flow.weights import WeightSource as WeightSource
    from rlx.functional import random as random
    from rlx.functional import tree as tree
    from rlx.functional.control import associative_scan as associative_scan
    from rlx.functional.control import cond as cond
    from rlx.functional.control import fori_loop as fori_loop
    from rlx.functional.control import scan as scan
    from rlx.functional.control import switch as switch
    from rlx.functional.control import while_loop as while_loop
    from rlx.functional.custom import custom_jvp as custom_jvp
    from rlx.functional.custom import custom_vjp as custom_vjp
    from rlx.functional.jitted import explain as explain
    from rlx.functional.jitted import jit as jit
    from rlx.functional.tracing import eval_shape as eval_shape
    from rlx.functional.tracing import trace as trace
    from rlx.functional.transforms import checkpoint as checkpoint
    from rlx.functional.transforms import grad as grad
    from rlx.functional.transforms import hessian as hessian
    from rlx.functional.transforms import hvp as hvp
    from rlx.functional.transforms import jacfwd as jacfwd
    from rlx.functional.transforms import jacrev as jacrev
    from rlx.functional.transforms import jvp as jvp
    from rlx.functional.transforms import linearize as linearize
    from rlx.functional.transforms import value_and_grad as value_and_grad
    from rlx.functional.transforms import vjp as vjp
    from rlx.functional.transforms import vmap as vmap
    from rlx.hir.blocks import Activation as Activation
    from rlx.index.index import Hit as Hit
    from rlx.index.index import Index as Index
    from rlx.inspect.dispatch import DispatchReport as DispatchReport
    from rlx.inspect.memory import MemoryReport as MemoryReport
    from rlx.inspect.profiler import Report as Report
    from rlx.ir.custom import MultiOutputHandle as MultiOutputHandle
    from rlx.ir.diff import diff as diff
    from rlx.ir.graph import Graph as Graph
    from rlx.ir.graph import Value as Value
    from rlx.ir.provenance import stage as stage
    from rlx.lir.forms.custom import op as op
    from rlx.lir.module import LirModule as LirModule
    from rlx.mir.report import FusionReport as FusionReport
    from rlx.module import GraphModule as GraphModule
    from rlx.module import GraphStage as GraphStage
    from rlx.module import Level as Level
    from rlx.ops.attention import MaskKind as MaskKind
    from rlx.profile import CompileProfile as CompileProfile
    from rlx.profile import FusionPolicy as FusionPolicy
    from rlx.profile import KernelDispatchConfig as KernelDispatchConfig
    from rlx.profile import KernelDispatchPolicy as KernelDispatchPolicy
    from rlx.quant_schemes import QuantScheme as QuantScheme
    from rlx.runtime.compiled import CompiledGraph as CompiledGraph
    from rlx.runtime.session import Session as Session
    from rlx.runtime.session import compile as compile
    from rlx.runtime.variants import CompilationMode as CompilationMode
    from rlx.runtime.variants import ModelExecutionConfig as ModelExecutionConfig
    from rlx.runtime.variants import ModelPhase as ModelPhase
    from rlx.runtime.variants import ModelVariant as ModelVariant
    from rlx.types import Dim as Dim
    from rlx.types import DimBinding as DimBinding
    from rlx.types import TensorType as TensorType
    from rlx.types import dim as dim
    from rlx.types import dim_max as dim_max
    from rlx.types import dim_min as dim_min
    from rlx.types import sym as sym

# name -> (module, attribute); an empty attribute is the module itself
_PUBLIC = {
    "Activation": ("rlx.hir.blocks", "Activation"),
    "BuiltModel": ("rlx.flow.built", "BuiltModel"),
    "CompilationMode": ("rlx.runtime.variants", "CompilationMode"),
    "CompileProfile": ("rlx.profile", "CompileProfile"),
    "CompiledGraph": ("rlx.runtime.compiled", "CompiledGraph"),
    "Completion": ("rlx.engine.language_model", "Completion"),
    "DecodeBindings": ("rlx.flow.state", "DecodeBindings"),
    "Dim": ("rlx.types", "Dim"),
    "DimBinding": ("rlx.types", "DimBinding"),
    "DispatchReport": ("rlx.inspect.dispatch", "DispatchReport"),
    "EmbeddingModel": ("rlx.engine.embedding_model", "EmbeddingModel"),
    "Emit": ("rlx.flow.emit", "Emit"),
    "FlowCtx": ("rlx.flow.context", "FlowCtx"),
    "FlowStage": ("rlx.flow.stages.base", "FlowStage"),
    "FlowState": ("rlx.flow.state", "FlowState"),
    "FlowValue": ("rlx.flow.state", "FlowValue"),
    "FusionPolicy": ("rlx.profile", "FusionPolicy"),
    "FusionReport": ("rlx.mir.report", "FusionReport"),
    "GdnInputSlots": ("rlx.flow.state", "GdnInputSlots"),
    "Graph": ("rlx.ir.graph", "Graph"),
    "GraphModule": ("rlx.module", "GraphModule"),
    "GraphStage": ("rlx.module", "GraphStage"),
    "Hit": ("rlx.index.index", "Hit"),
    "Index": ("rlx.index.index", "Index"),
    "KernelDispatchConfig": ("rlx.profile", "KernelDispatchConfig"),
    "KernelDispatchPolicy": ("rlx.profile", "KernelDispatchPolicy"),
    "Level": ("rlx.module", "Level"),
    "LanguageModel": ("rlx.engine.language_model", "LanguageModel"),
    "LayerStack": ("rlx.flow.layers", "LayerStack"),
    "LirModule": ("rlx.lir.module", "LirModule"),
    "MapWeights": ("rlx.flow.weights", "MapWeights"),
    "MaskKind": ("rlx.ops.attention", "MaskKind"),
    "MemoryReport": ("rlx.inspect.memory", "MemoryReport"),
    "Model": ("rlx.engine.model", "Model"),
    "ModelExecutionConfig": ("rlx.runtime.variants", "ModelExecutionConfig"),
    "ModelFlow": ("rlx.flow.flow", "ModelFlow"),
    "ModelPhase": ("rlx.runtime.variants", "ModelPhase"),
    "ModelRecipe": ("rlx.flow.recipe", "ModelRecipe"),
    "ModelVariant": ("rlx.runtime.variants", "ModelVariant"),
    "MultiOutputHandle": ("rlx.ir.custom", "MultiOutputHandle"),
    "QuantScheme": ("rlx.quant_schemes", "QuantScheme"),
    "Report": ("rlx.inspect.profiler", "Report"),
    "Session": ("rlx.runtime.session", "Session"),
    "SideOutputs": ("rlx.flow.side_outputs", "SideOutputs"),
    "TensorType": ("rlx.types", "TensorType"),
    "Value": ("rlx.ir.graph", "Value"),
    "VisionModel": ("rlx.engine.vision_model", "VisionModel"),
    "WeightSource": ("rlx.flow.weights", "WeightSource"),
    "batch": ("rlx.batch", ""),
    "compile": ("rlx.runtime.session", "compile"),
    "debug": ("rlx.debug", ""),
    "diff": ("rlx.ir.diff", "diff"),
    "dim": ("rlx.types", "dim"),
    "dim_max": ("rlx.types", "dim_max"),
    "dim_min": ("rlx.types", "dim_min"),
    "dtype": ("rlx.dtypes", "dtype"),
    "errors": ("rlx.errors", ""),
    "export": ("rlx.engine.export", "export"),
    "flow": ("rlx.flow", ""),
    "functional": ("rlx.functional", ""),
    "load": ("rlx.engine.load", "load"),
    "load_exported": ("rlx.engine.export", "load_exported"),
    "numpy": ("rlx.numpy", ""),
    "op": ("rlx.lir.forms.custom", "op"),
    "random": ("rlx.functional.random", ""),
    "ray": ("rlx.ray", ""),
    "stage": ("rlx.ir.provenance", "stage"),
    "sym": ("rlx.types", "sym"),
    "train": ("rlx.train", ""),
    "transforms": ("rlx.transforms", ""),
    "tree": ("rlx.functional.tree", ""),
}

# Array functions, under their names in rlx.functional.
_FUNCTION_NAMES = (
    "associative_scan dynamic_slice dynamic_update_slice eval_shape linearize switch "
    "abs add all any arange arctan argmax argmin argsort asarray astype at attention broadcast_to ceil checkpoint "
    "clip concatenate cond conv1d conv2d cos cross_entropy cumsum custom_jvp custom_vjp dequantise divide dot "
    "einsum equal erf exp expand_dims explain expm1 eye fake_quantise flip floor floor_divide fori_loop full "
    "gated_delta_net gather gelu grad greater greater_equal hessian hvp isfinite isinf isnan jacfwd jacrev jit jvp "
    "layer_norm less less_equal linspace log log1p log_softmax logaddexp logical_and logical_not logical_or "
    "logsumexp matmul max maximum mean min minimum mod moveaxis mul multiply negative not_equal one_hot ones "
    "ones_like outer pad pool1d pool2d power prod quantise ravel reciprocal relu repeat reshape rms_norm roll rope "
    "round rsqrt scan scatter scatter_add selective_scan sigmoid sign silu sin softmax softplus sort split sqrt "
    "square squeeze stack std stop_gradient sub subtract sum swapaxes take take_along_axis tan tanh tensordot tile "
    "topk trace transpose tril triu value_and_grad var vjp vmap where while_loop zeros zeros_like "
)
_FUNCTIONS = _FUNCTION_NAMES.split()

__all__ = ["__version__", *_PUBLIC, *_FUNCTIONS]


def __getattr__(name: str) -> Any:
    place = ("rlx.functional", name) if name in _FUNCTIONS else _PUBLIC.get(name)
    if place is None:
        from rlx.errors import nearest  # only needed for errors
        from rlx.jax_names import hint

        known = None if name.startswith("_") else hint(name) or nearest(name, __all__)
        raise AttributeError(f"module 'rlx' has no attribute {name!r}" + (f": {known}" if known else ""))
    importlib.import_module("numpy")  # not from within other imports: deep stacks are slow in Python 3.11 and 3.12
    with paused():
        if name in ("Graph", "Value", "MaskKind", "op"):
            importlib.import_module("rlx.hir.blocks")  # registers the ops and blocks
        module = importlib.import_module(place[0])
    value = getattr(module, place[1]) if place[1] else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
