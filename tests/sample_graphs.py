"""The samples of an op in one element type as one graph: its inputs, and what each output should be.

One graph for all samples compiles once, which is what makes the product of ops, types and targets affordable.
"""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from oracles import EXACT, FLOATS, INTEGERS, NUMPY, Array, assert_matches, expected, magnitude, tolerance

import rlx
from rlx.errors import RlxError
from rlx.ir import registry
from rlx.ir.registry import OpDef, Sample, Spec

VIEWS = ("strided", "sized")
FEW = 2  # samples of an op that are taken for views
BLOCK_TOLERANCE = 1e-5  # that of matmul
# One for each op inside, in narrow floats; of whole layers, whose softmax makes more of differences, a few more.
BLOCK_ROUNDINGS = {
    "linear": 3, "linear_fused": 3, "shared_linear_pair": 1, "swiglu_ffn": 5, "residual_rms_norm": 2,
    "attention_block": 1, "rope_block": 1, "llama_decoder_block": 9, "qwen35_mtp_head": 12,
    "linear_stored": 3,
    "norm": 3, "normed_heads": 6, "gated_queries": 5, "attention_pool": 5, "split_qkv": 1, "self_attention": 5,
    "cached_self_attention": 5, "gated_ffn": 5, "fused_gated_ffn": 5, "moe_ffn": 9, "patch_embedding": 2,
    "mamba_block": 9, "mamba2_block": 12, "delta_net_block": 12,
}  # fmt: skip


def user_ops() -> list[OpDef]:
    """Every op that a user may call: all but leaves, what passes make, and loops (which `test_control.py` tests)."""
    rlx.Graph("any")  # declares the ops
    return [o for o in registry.OPS.values() if not o.traits & {registry.LEAF, registry.FUSED, registry.CONTROL}]


def samples_of(op: OpDef) -> list[Sample]:
    return list(op.samples)


def kinds(s: Sample) -> set[str]:
    """What a sample's operands are: float, int, bool, bytes, or packed weights (which `test_quant.py` runs)."""
    names = {"f32": "float", "i32": "int", "bool": "bool", "i8": "byte", "u8": "byte"}
    return {names.get(o.dtype, "packed") for o in s.operands if o is not None}


def element_types(op: OpDef) -> list[str]:
    """The element types that the samples of an op can be run in."""
    result = set().union(*map(kinds, samples_of(op)))
    types: list[str] = []
    types += FLOATS if "float" in result else ()
    types += INTEGERS if "int" in result else ()
    return types or (["bool"] if "bool" in result else [])


def _in_type(spec: Spec, name: str) -> Spec:
    """The operand in an element type of its own kind, with numbers that the type has."""
    if spec.dtype == "f32" and name in FLOATS:
        return replace(spec, dtype=name)
    if spec.dtype == "i32" and name in INTEGERS:
        limits = np.iinfo(NUMPY[name])
        return replace(spec, dtype=name, low=max(spec.low, limits.min), high=min(spec.high, limits.max))
    return spec


def _wanted(s: Sample, name: str) -> bool:
    kind, result = "float" if name in FLOATS else "int" if name in INTEGERS else "bool", kinds(s)
    return "packed" not in result and (kind in result or (name in ("f32", "i32") and result == {"bool"}))


@dataclass(frozen=True)
class Answer:
    """What the oracle says of one output, and how near an implementation has to come (see `assert_matches`)."""

    exact: Array
    relative: float
    least: float
    where: str


def limit(op: OpDef, element_type: str) -> float:
    """The tolerance of an op's float results."""
    if op.name in EXACT:
        return 0.0
    if op.level == registry.HIR:
        return tolerance(element_type, BLOCK_TOLERANCE) * (BLOCK_ROUNDINGS[op.name] if "16" in element_type else 1)
    return tolerance(element_type, op.tolerance)


@dataclass(frozen=True)
class SampleGraph:
    """A graph of all samples, their numbers, and the oracle's answer to each output."""

    graph: rlx.Graph
    inputs: dict[str, Array]
    answers: tuple[Answer, ...]

    def check(self, outputs: list[Array], rounds_to: str | None = None) -> None:
        """`rounds_to`: a type to which the device rounds factors, also of results that are wider."""
        least_tolerance = 0.0 if rounds_to is None else tolerance(rounds_to, 0.0)
        for output, value, answer in zip(outputs, self.graph.outputs, self.answers, strict=True):
            assert output.dtype == value.dtype.numpy, answer.where
            relative = max(answer.relative, least_tolerance)
            assert_matches(output, answer.exact, relative=relative, least=answer.least, where=answer.where)


def rounded_on_gpus(op: str, element_type: str) -> str | None:
    """The type of the weights whose sums tensor cores compute, where the sums are results themselves."""
    return element_type if op == "attention_lse" and element_type in ("f16", "bf16") else None


@functools.cache
def sample_graph(name: str, element_type: str, leaf: str = "input") -> SampleGraph:
    """All samples of an op that have operands of the kind of `element_type`, in that type.

    Operands are inputs, params or constants (`leaf`), an input first and then params (`first input`), or views into
    larger inputs: with known sizes but strides and an offset that only run time knows (`strided`), or with sizes too
    that only run time knows (`sized`), as far as the op takes those.
    """
    op = registry.get(name)
    rng = np.random.default_rng(zlib.crc32(f"{name} {element_type}".encode()))
    graph = rlx.Graph(name, level=op.level)
    inputs: dict[str, Array] = {}
    outputs: list[rlx.Value] = []
    answers: list[Answer] = []
    for number, s in enumerate(samples_of(op)[: FEW if leaf in VIEWS else None]):
        if not _wanted(s, element_type):
            continue
        arrays: list[Array | None] = []
        values: list[Any] = []
        for position, spec in enumerate(s.operands):
            if spec is None:
                arrays.append(None)
                values.append(None)
                continue
            with np.errstate(over="ignore"):  # numbers that f16 does not have become inf
                array = _in_type(spec, element_type).array(rng)
            label = f"x{number}_{position}"
            if leaf in VIEWS:
                value, inputs[label] = _view(graph, leaf, label, array, f"n{number}")
            else:
                value, inputs[label] = _leaf(graph, leaf, label, position, array), array
            values.append(value)
            arrays.append(array)
        try:
            result = graph.apply(name, *values, **s.attrs)
        except RlxError:
            if leaf != "sized":
                raise
            continue  # the op wants sizes that are known
        results = result if isinstance(result, tuple) else (result,)
        outputs += results
        for value, exact in zip(results, expected(name, arrays, s.attrs), strict=True):
            relative = limit(op, str(value.dtype)) if value.dtype.is_float else 0.0
            where = f"{name} sample {number} in {element_type}: {s}"
            answers.append(Answer(exact, relative, magnitude(name, arrays, s.attrs), where))
    return SampleGraph(graph.set_outputs(outputs), inputs, tuple(answers))


def _view(graph: rlx.Graph, leaf: str, label: str, array: Array, sizes: str) -> tuple[rlx.Value, Array]:
    """The end of each axis of an input whose axes are in reverse order, and the array for that input."""
    larger = np.ones([2 * d for d in reversed(array.shape)], array.dtype)
    larger[tuple(slice(d, None) for d in reversed(array.shape))] = array.T
    reverse = tuple(reversed(range(array.ndim)))
    if leaf == "strided":
        symbols = [rlx.dim(f"{label}_{axis}") for axis in reverse]
        start = [n - d // 2 for n, d in zip(symbols, larger.shape, strict=True)]
    else:  # equal sizes of one sample stay equal; a symbol would not broadcast as 1
        symbols = [rlx.dim(f"{sizes}_{d}") if d > 2 else d for d in larger.shape]
        start = [n // 2 for n in symbols]
    full = graph.input(label, symbols, array.dtype)
    inner = graph.slice(full, start=start, stop=symbols, step=[1] * array.ndim) if array.ndim else full
    return (graph.transpose(inner, axes=reverse) if array.ndim else inner), larger


def _leaf(graph: rlx.Graph, leaf: str, label: str, position: int, array: Array) -> rlx.Value:
    if leaf == "constant":
        return graph.constant(array)
    is_input = leaf == "input" or (leaf == "first input" and position == 0)
    return (graph.input if is_input else graph.param)(label, array.shape, array.dtype)


def compile_sample(name: str, element_type: str, where: str, **options: Any) -> rlx.CompiledGraph:
    """The sample graph on the reference device, or on the CPU as a target."""
    graph = sample_graph(name, element_type).graph
    return rlx.compile(graph, "reference") if where == "reference" else rlx.compile(graph, target=where, **options)
