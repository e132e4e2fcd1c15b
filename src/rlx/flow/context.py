"""The emission surface: the graph, weights and shared state that a stage works with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.arrays import Array
from rlx.dtypes import F32, DTypeLike
from rlx.errors import BindError, FormatError, GraphError, RlxError, ShapeError, nearest
from rlx.fast_dataclass import dataclass
from rlx.flow.state import FlowState, FlowValue, Shape
from rlx.flow.weights import MapWeights, TakenWeights, Wanting, WeightSource, as_source
from rlx.ir import provenance
from rlx.ir.graph import Graph, Value
from rlx.module import GraphModule
from rlx.profile import CompileProfile
from rlx.types import ShapeLike, Size, TensorType, as_shape, known_equal, tensor

if TYPE_CHECKING:
    from rlx.flow.stages.base import FlowStage

_IN_STAGE = "  in stage: "


@dataclass
class FlowCtx:
    """A module under construction, its weights, and the state that stages share."""

    module: Graph | GraphModule  # at HIR
    params: dict[str, Array] = field(default_factory=dict)  # computed by stages, not from the weight source
    weights: WeightSource = field(default_factory=MapWeights)
    profile: CompileProfile = field(default_factory=CompileProfile)
    state: FlowState = field(default_factory=FlowState)

    def __post_init__(self) -> None:
        self.weights = as_source(self.weights)

    # -- the graph --
    def hir(self) -> Graph:
        """Return the graph under construction, which has every block and op as a method."""
        if isinstance(self.module, Graph):
            return self.module
        graph = self.module.as_hir()
        if graph is None:
            raise GraphError(f"flow: module {self.module.name!r} is at {self.module.stage.name}, stages build at HIR")
        return graph

    def node_shape(self, id: Value | FlowValue) -> Shape:
        """Return the shape of a value."""
        if not isinstance(id, (Value, FlowValue)):
            raise GraphError(f"node_shape: {id!r} is not a value")
        return id.shape

    def wrap(self, id: Value | FlowValue, shape: ShapeLike | None = None) -> FlowValue:
        """Wrap a graph value as a flow value; `shape`, if given, is checked."""
        id = id.id if isinstance(id, FlowValue) else id
        if not isinstance(id, Value) or id.graph is not self.hir():
            raise GraphError(f"wrap: {id!r} is not a value of graph {self.hir().name!r}")
        if shape is not None and id.shape != as_shape(shape):
            raise ShapeError(f"wrap: the value is {id.type}, the shape given is {_text(as_shape(shape))}")
        return FlowValue.of(id)

    def need(self, value: FlowValue | None, stage: str) -> Value:
        """Return the graph value; raises an error that names the stage if there is none."""
        if value is None:
            raise GraphError(
                f"stage {stage}: needs a value, and none flows here", hint="put an Embed or an input before it"
            )
        return value.id

    def need_sequence(self, value: FlowValue | None, stage: str) -> Value:
        """Return the graph value, which must be `[batch, seq, hidden]`."""
        x = self.need(value, stage)
        if x.rank != 3:
            raise GraphError(f"stage {stage}: takes [batch, seq, hidden], found {x.type}")
        return x

    # -- weights --
    def load_param(
        self, key: str, transpose: bool = False, *, shape: Sequence[Size] | None = None, init: Any = None,
        known: Sequence[Size | None] | None = None,
    ) -> Value:  # fmt: skip
        """Load a weight by key as f32: one param node per tensor, in the file's dtype, then a cast or `dequantise`.

        If a matmul or a gather reads the weight, its kernel reads the stored dtype directly.

        `transpose` turns `[out, in]` into `[in, out]`, as a view. `shape`, if given, is checked (after transposing).
        `init` is how `ModelFlow.init` initialises it: a number, or a function of a key and a shape. `known` has the
        sizes that are known without a `shape`, for errors.
        """
        value = self.stored_param(key, transpose, shape=shape, init=init, known=known)
        if value.dtype.is_packed:
            value = value.dequantise()
        elif value.dtype is not F32:
            value = value.astype(F32)
        self.state.loaded_params[key] = value
        return value.mT if transpose else value

    def stored_param(
        self, key: str, transpose: bool = False, *, shape: Sequence[Size] | None = None, init: Any = None,
        known: Sequence[Size | None] | None = None,
    ) -> Value:  # fmt: skip
        """Return a weight for a block that converts and transposes it: as stored, or as f32 if it was loaded before.

        With `transpose`, `shape` is the shape after the block has transposed it. `known` has the sizes that are known
        without a `shape`, for errors.
        """
        if key in self.params:  # computed by a stage, so not the file's values
            raise GraphError(
                f"param: {key!r} exists already in graph {self.hir().name!r}, made by a stage",
                hint="names of inputs and params are unique",
            )
        value = self.state.loaded_params.get(key)
        if value is None:
            if isinstance(self.weights, Wanting):
                sizes = known if shape is None else shape
                self.weights.want(key, (*sizes[:-2], *reversed(sizes[-2:])) if transpose and sizes else sizes, init)
            if not self.weights.has(key):
                hint = nearest(key, self.weights.keys())
                place = "is not among the weights" if self._file is None else "is not in the file"
                raise self._unfit(BindError, f"weight {key!r} {place}", hint or self._no_weights())
            type_ = self.weights.type(key)
            if not (type_.dtype.is_float or type_.dtype.is_packed):
                hint = "convert it: astype(np.float32); tables of integers are emit.synth_param(name, table)"
                raise self._unfit(BindError, f"weight {key!r}: is {type_}, expected floats", hint)
            value = self.state.loaded_params[key] = self.hir().param(key, type_.shape, type_.dtype)
        actual = value.shape
        if transpose:
            if value.rank < 2:
                raise self._unfit(ShapeError, f"weight {key!r}: {value.type} cannot be transposed, it has no two axes")
            actual = (*actual[:-2], actual[-1], actual[-2])
        if shape is not None and actual != tuple(shape):
            shapes = (_stored(actual, transpose), _stored(shape, transpose))
            raise self._unfit(ShapeError, f"weight {key!r}: shape is {shapes[0]}, expected {shapes[1]}")
        return value

    @property
    def _file(self) -> Any:
        """The file that the weights come from, if any."""
        return getattr(self.weights, "file", None)

    def _no_weights(self) -> str | None:
        """Return a hint if there are no weights at all; `TakenWeights` does not know its keys."""
        has_weights = isinstance(self.weights, TakenWeights) or next(iter(self.weights.keys()), None) is not None
        return None if has_weights else "no weights were given: build(weights)"

    def _unfit(self, kind: type[RlxError], problem: str, hint: str | None = None) -> RlxError:
        """Return an error about a weight: of this kind, or a FormatError if the weights come from a file."""
        file = self._file
        error = kind(problem, hint=hint) if file is None else FormatError(f"{file.path}: {problem}", hint=hint)
        note_stage(error)
        return error

    def synth_param(self, name: str, data: Any, shape: Sequence[int] | None = None) -> Value:
        """Add a weight that the model computes itself, such as a RoPE table; asking again returns the same one.

        Flows compute in f32, so f64 becomes f32; Python integers become i32, other arrays keep their dtype. The data is
        reshaped to `shape` if given.
        """
        array = np.asarray(data, order="C")
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        elif array.dtype.kind == "i" and not isinstance(data, (np.ndarray, np.generic)):
            array = array.astype(np.int32)
        if shape is not None:
            if array.size != int(np.prod(shape)):
                raise ShapeError(f"param {name!r}: {array.size} numbers cannot have the shape {_text(shape)}")
            array = array.reshape(shape)
        existing = self.params.get(name)
        if existing is None:
            self.state.loaded_params[name] = self.hir().param(name, array.shape, array.dtype)
            self.hir().fixed.add(name)
            self.params[name] = array
        elif existing is not array and not (
            existing.dtype == array.dtype and np.array_equal(existing, array, equal_nan=True)
        ):
            raise GraphError(f"param {name!r}: exists already with other values", hint="give it a name of its own")
        return self.state.loaded_params[name]

    def synth_zeros(self, name: str, len: int) -> Value:
        """Add a vector of zeros as a param."""
        if not hasattr(len, "__index__") or len < 0:
            raise ShapeError(f"param {name!r}: {len!r} is not a length")
        return self.synth_param(name, np.zeros(len, np.float32))

    # -- parts of stages --
    def stage(self, stage: FlowStage, value: FlowValue | Value | None, name: str = "") -> FlowValue | None:
        """Apply another stage to a value, under the path `name`, or under the stage's own path."""
        from rlx.flow.stages.structure import emit_stage  # lazy: stages import this module

        return emit_stage(self, stage, self.wrap(value) if isinstance(value, Value) else value, name)

    def zeros(self, shape: ShapeLike, dtype: DTypeLike = "f32") -> FlowValue:
        """Return zeros of a shape, whose sizes may be symbolic: `emit.zeros((value.shape[0], 3, 16))`."""
        return self.wrap(self.hir().one("expand", self.hir().constant(0, dtype), shape=as_shape(shape)))

    def positions(self, value: FlowValue | Value) -> FlowValue:
        """Return the positions `[batch, seq]` of the tokens of a value; those of padding are negative."""
        from rlx.flow.positions import token_positions  # lazy: imports this module

        return self.wrap(token_positions(self, value.id if isinstance(value, FlowValue) else value))

    def carried(self, name: str, *shape: int) -> FlowValue | None:
        """Return a state `[batch, *shape]`, zeros before the first token of a sequence; None in a flow without a cache.

        An op that carries it on, such as `depthwise_conv1d_causal_carry`, updates it in place: the next call of the
        sequence continues from there. Without a cache, flows are functions of entire sequences.
        """
        return None if self.state.cache is None else self.wrap(self.state.cache.state(name, shape))

    # -- inputs and names --
    def input(self, name: str, shape: ShapeLike | TensorType, dtype: DTypeLike = "f32") -> Value:
        """Declare a graph input; asking again returns the same one. A type in place of the shape gives both.

        The first declaration decides its sizes, so a flow can fix sizes that a stage leaves open.
        """
        wanted = tensor(shape, dtype)
        if name in self.state.inputs:
            value = self.state.inputs[name][0]
            if not _may_be(value.type, wanted):
                raise ShapeError(f"input {name!r}: is {value.type}, this stage wants {wanted}")
            return value
        value = self.hir().input(name, wanted.shape, wanted.dtype)
        self.state.inputs[name] = (value, value.shape)
        return value

    def mask_input(self, name: str, shape: ShapeLike) -> Value:
        """Declare a mask input, 1 or true for tokens that count: f32 unless the flow declares another dtype."""
        declared = self.state.inputs.get(name)
        mask = self.input(name, shape, "f32" if declared is None else declared[0].dtype)
        return mask >= 1 if mask.dtype.is_integer else mask

    def flow_input(self, name: str) -> FlowValue:
        """Return an input that the flow declares."""
        if name not in self.state.inputs:
            raise GraphError(f"flow: no input is called {name!r}", hint=nearest(name, self.state.inputs))
        return FlowValue(*self.state.inputs[name])

    def set_named(self, name: str, value: Value | FlowValue) -> None:
        """Store a value under a name, for other stages and for `ModelFlow.outputs`."""
        self.state.set_named(name, value.id if isinstance(value, FlowValue) else value)

    def named(self, name: str) -> Value:
        """Return a value that a stage has named."""
        return self.state.value(name, "flow")


def _may_be(have: TensorType, wanted: TensorType) -> bool:
    """Whether an input fits: symbolic sizes may turn out equal, and integers of any width are indices."""
    same_kind = have.dtype is wanted.dtype or (have.dtype.is_integer and wanted.dtype.is_integer)
    sizes = zip(have.shape, wanted.shape, strict=False)
    return same_kind and have.rank == wanted.rank and all(known_equal(a, b) is not False for a, b in sizes)


def note_stage(error: Exception, otherwise: str = "") -> None:
    """Note the innermost stage on an error, once."""
    path = provenance.here().stage or otherwise
    if not path or any(note.startswith(_IN_STAGE) for note in getattr(error, "__notes__", ())):
        return
    error.add_note(f"{_IN_STAGE}{path}")
    if isinstance(error, AttributeError) and getattr(error.obj, "__name__", "") == FlowCtx.hir.__name__:
        error.add_note(f"  hint: hir is a method: hir().{error.name}")


def _stored(shape: Sequence[Size], transposed: bool) -> str:
    """Return a shape in file layout, as text."""
    return _text((*shape[:-2], *reversed(shape[-2:])) if transposed else shape)


def _text(shape: Sequence[Size]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
