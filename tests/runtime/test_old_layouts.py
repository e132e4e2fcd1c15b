"""Files of an older layout: exports are refused by version, snapshots and cache entries are made again."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import numpy as np
import pytest
import small_bert

import rlx
from rlx.backends import cache_folder
from rlx.errors import FormatError
from rlx.runtime import container, program_cache
from rlx.runtime.plan import CompiledPlan, make_plan, plan_records
from rlx.runtime.program_cache import Keys
from rlx.runtime.session import DEFAULT

X = np.ones((2, 4), np.float32)


def product() -> rlx.Graph:
    g = rlx.Graph("product")
    return g.set_outputs([g.input("x", ("n", 4)) @ g.param("w", (4, 8))])


def aged(path: Path) -> None:
    """Write the version before the current one into the head of a container."""
    data = bytearray(path.read_bytes())
    assert data[:4] == container.MAGIC and struct.unpack_from("<I", data, 4)[0] == container.VERSION
    struct.pack_into("<I", data, 4, container.VERSION - 1)
    path.write_bytes(data)


def test_an_old_export_is_refused_with_both_versions(tmp_path: Path) -> None:
    path = rlx.compile(product()).export(tmp_path / "product.rlxp")
    aged(path)
    with pytest.raises(FormatError, match=f"expected {container.VERSION}, found {container.VERSION - 1}") as caught:
        rlx.load_exported(path)
    assert "export it again" in str(caught.value.hint)


def test_an_old_snapshot_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    small_bert.write(folder)
    time.sleep(0.1)  # files that changed just now are not trusted to stay
    expected = rlx.load(folder).embed("one")
    (snapshot,) = (tmp_path / "cache" / "starts").glob("*")
    aged(snapshot)
    assert rlx.load(folder).embed("one").tobytes() == expected.tobytes()
    assert struct.unpack_from("<I", snapshot.read_bytes(), 4)[0] == container.VERSION


def test_an_old_cache_entry_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_CACHE", str(tmp_path))
    graph, session = product(), rlx.Session()
    session.compile(graph)
    key = Keys.of(graph, session.target, DEFAULT).code
    assert key is not None and cache_folder.current().read("compiled", key) is not None
    # A record of another kind, as an older version could have stored under the same name.
    old = program_cache.pack(make_plan(graph, session.target, DEFAULT), plan_records())
    assert isinstance(program_cache.unpack(old, plan_records(), CompiledPlan), CompiledPlan)
    cache_folder.current().write("compiled", key, old)
    again = rlx.Session().compile(graph)
    again.set_param("w", np.ones((4, 8), np.float32))
    assert again.run({"x": X})[0].tolist() == [[4.0] * 8] * 2
    assert cache_folder.current().read("compiled", key) != old
