"""Attention over a KV cache as a launch: the kernel reads keys and values in place."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cpu.targets import KEY_BLOCK
from rlx.dtypes import DType
from rlx.ir.graph import Node
from rlx.lir.forms import attention_launch
from rlx.lir.forms.kv_cache import cached_attention as portable
from rlx.lir.forms.kv_cache import pools
from rlx.lir.schedule import Scheduler
from rlx.lir.views import View


def cached_attention(s: Scheduler, node: Node) -> Sequence[View]:
    keys, values = pools(s, node)
    storage = node.operands[1].dtype  # type: ignore[union-attr]
    if not _has_own_pages(keys, values, storage):
        return portable(s, node)  # pages of another backend
    return attention_launch.cached_attention(s, node, keys, values, key_axes="ds")


def _has_own_pages(keys: View, values: View, storage: DType) -> bool:
    """Whether pages have the kernel's layout: values as rows, keys as [head_dim, 64], or as rows if they are packed.

    The order of heads and pages does not matter.
    """
    page, head_dim = keys.shape[2:]
    wanted = (head_dim, 1) if storage.is_packed else (1, page)
    return page == KEY_BLOCK and keys.strides[2:] == wanted and values.strides[3] == 1
