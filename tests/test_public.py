"""The public surface: exactly these names, each of which can be had."""

from __future__ import annotations

import rlx

NAMES = {
    "Activation", "BuiltModel", "CompilationMode", "CompileProfile", "CompiledGraph", "Completion", "DecodeBindings",
    "Dim", "DimBinding", "DispatchReport", "EmbeddingModel", "Emit", "FlowCtx", "FlowStage", "FlowState", "FlowValue",
    "FusionPolicy", "FusionReport", "GdnInputSlots", "Graph", "GraphModule", "GraphStage", "LanguageModel",
    "LayerStack",
    "LirModule", "MapWeights", "MaskKind", "MemoryReport", "Model", "ModelExecutionConfig", "ModelFlow", "ModelPhase",
    "ModelRecipe", "ModelVariant", "MultiOutputHandle", "QuantScheme", "Report", "Session", "SideOutputs", "TensorType",
    "Value", "WeightSource", "compile",
    "diff", "dim", "dim_max", "dim_min", "dtype", "errors", "export", "flow", "load", "load_exported", "op", "stage",
    "sym", "__version__",
}  # fmt: skip


def test_all_is_exact() -> None:
    assert set(rlx.__all__) == NAMES
    assert len(rlx.__all__) == len(NAMES)


def test_every_public_name_can_be_had() -> None:
    for name in rlx.__all__:
        assert getattr(rlx, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(rlx, "no_such_name")
