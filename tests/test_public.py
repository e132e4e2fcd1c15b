"""The public surface: exactly these names, each of which can be had."""

from __future__ import annotations

import rlx

NAMES = {
    "Activation", "BuiltModel", "CompilationMode", "CompileProfile", "CompiledGraph", "Completion", "DecodeBindings",
    "Dim", "DimBinding", "DispatchReport", "EmbeddingModel", "Emit", "FlowCtx", "FlowStage", "FlowState", "FlowValue",
    "FusionPolicy", "FusionReport", "GdnInputSlots", "Graph", "GraphModule", "GraphStage", "Hit", "Index",
    "KernelDispatchConfig",
    "KernelDispatchPolicy", "LanguageModel",
    "LayerStack",
    "LirModule", "MapWeights", "MaskKind", "MemoryReport", "Model", "ModelExecutionConfig", "ModelFlow", "ModelPhase",
    "ModelRecipe", "ModelVariant", "MultiOutputHandle", "QuantScheme", "Report", "Session", "SideOutputs", "TensorType",
    "Value", "VisionModel", "WeightSource", "compile",
    "debug", "diff", "dim", "dim_max", "dim_min", "dtype", "errors", "export", "flow", "load", "load_exported", "op",
    "numpy", "stage", "sym", "functional", "random", "train", "transforms", "tree", "__version__",
}  # fmt: skip

# Functions of arrays, NumPy's names among them.
NAMES |= {"batch", "ray"}
NAMES |= {
    "abs", "add", "all", "any", "arange", "arctan", "argmax", "argmin", "argsort", "asarray", "astype", "at",
    "attention", "broadcast_to", "ceil", "checkpoint", "clip", "concatenate", "cond", "conv1d", "conv2d", "cos",
    "cross_entropy", "cumsum", "custom_jvp", "custom_vjp", "dequantise", "divide", "dot", "einsum", "equal", "erf",
    "exp", "expand_dims", "explain", "expm1", "eye", "fake_quantise", "flip", "floor", "floor_divide", "fori_loop",
    "full", "gated_delta_net", "gather", "gelu", "grad", "greater", "greater_equal", "hessian", "hvp", "isfinite",
    "isinf", "isnan", "jacfwd", "jacrev", "jit", "jvp", "layer_norm", "less", "less_equal", "linspace", "log",
    "log1p", "log_softmax", "logaddexp", "logical_and", "logical_not", "logical_or", "logsumexp", "matmul", "max",
    "maximum", "mean", "min", "minimum", "mod", "moveaxis", "mul", "multiply", "negative", "not_equal", "one_hot",
    "ones", "ones_like", "outer", "pad", "pool1d", "pool2d", "power", "prod", "quantise", "ravel", "reciprocal",
    "relu", "repeat", "reshape", "rms_norm", "roll", "rope", "round", "rsqrt", "scan", "scatter", "scatter_add",
    "selective_scan", "sigmoid", "sign", "silu", "sin", "softmax", "softplus", "sort", "split", "sqrt", "square",
    "squeeze", "stack", "std", "stop_gradient", "sub", "subtract", "sum", "swapaxes", "take", "take_along_axis",
    "tan", "tanh", "tensordot", "tile", "topk", "trace", "transpose", "tril", "triu", "value_and_grad", "var",
    "vjp", "vmap", "where", "while_loop", "zeros", "zeros_like",
    "associative_scan", "dynamic_slice", "dynamic_update_slice", "eval_shape", "linearize", "switch",
}  # fmt: skip


def test_all_is_exact() -> None:
    assert set(rlx.__all__) == NAMES
    assert len(rlx.__all__) == len(NAMES)


def test_every_public_name_can_be_had() -> None:
    for name in rlx.__all__:
        assert getattr(rlx, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(rlx, "no_such_name")
