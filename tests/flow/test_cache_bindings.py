"""The runtime's cache in a flow: a layer's mask decides what is kept for it, and each layer attends once."""

from __future__ import annotations

import pytest

import rlx
from rlx.errors import CapabilityError, GraphError
from rlx.flow.state import CacheBindings
from rlx.hir.lower import lower
from rlx.ir.graph import Node, Value
from rlx.kv_layout import KvLayout
from rlx.ops.attention import MaskKind
from rlx.runtime.kv_spec import KvCacheSpec


def attend(cache: CacheBindings, layer: int, mask: str = MaskKind.CAUSAL) -> Value:
    graph, name = cache.graph, f"{len(cache.graph.nodes)}"
    q = graph.input(f"q{name}", ("batch", "seq", 4, 32))
    k, v = (graph.input(f"{n}{name}", ("batch", "seq", 2, 32)) for n in "kv")
    return cache.attend(layer, q, k, v, graph.input(f"at{name}", ("batch", "seq"), "i32"), mask_kind=mask)


@pytest.mark.parametrize("dtype", ("f32", "q8_0"))
def test_layers_with_a_window_have_rings(dtype: str) -> None:
    layout = rlx.Session().target.kv_layout
    cache = CacheBindings(rlx.Graph("layers", level="hir"), KvCacheSpec(4, 2, 32, dtype, layout=layout))
    for layer, mask in enumerate((MaskKind.sliding(40), MaskKind.CAUSAL, MaskKind.sliding(7))):
        assert attention_of(cache, attend(cache, layer, mask)).attrs["ring"] == (mask != MaskKind.CAUSAL)
    block = "64, 32" if dtype == "q8_0" else "32, 64"
    for layer, (window, symbol) in enumerate((("40", "ring40"), ("", "blocks"), ("7", "ring7"))):
        assert str(cache.graph.named(f"keys.{layer}").type) == f"{dtype}[2, pages{window}, {block}]"
        assert str(cache.graph.named(f"values.{layer}").type) == f"{dtype}[2, pages{window}, 64, 32]"
        assert str(cache.graph.named(f"table{window}").type) == f"i32[batch, {symbol}]"
    assert cache.bound == KvCacheSpec(4, 2, 32, dtype, (40, 0, 7, None), layout=layout)


def attention_of(cache: CacheBindings, out: Value) -> Node:
    """The op that a block which attends becomes."""
    low = lower(cache.graph.set_outputs([out])).outputs[0].node
    assert low.op == "reshape" and low.operands[0] is not None
    return low.operands[0].node


def test_pages_are_laid_out_as_the_backend_says() -> None:
    layout = KvLayout(16, keys="dphs")
    cache = CacheBindings(rlx.Graph("layers", level="hir"), KvCacheSpec(1, 2, 32, layout=layout))
    assert attention_of(cache, attend(cache, 0)).attrs["key_axes"] == "dphs"
    assert str(cache.graph.named("keys.0").type) == "f32[32, pages, 2, 16]"
    assert str(cache.graph.named("values.0").type) == "f32[pages, 2, 16, 32]"


def test_a_layer_attends_once_and_has_to_be_there() -> None:
    cache = CacheBindings(rlx.Graph("layers", level="hir"), KvCacheSpec(2, 2, 32))
    attend(cache, 0)
    with pytest.raises(GraphError, match="kv_cache: layer 0 attends twice"):
        attend(cache, 0)
    with pytest.raises(GraphError, match="kv_cache: layer 2 is not one of its 2"):
        attend(cache, 2)


def test_packed_heads_are_whole_blocks() -> None:
    with pytest.raises(CapabilityError, match="q8_0 packs 32 numbers per block, heads of 80 do not fit"):
        KvCacheSpec(2, 2, 80, "q8_0")
