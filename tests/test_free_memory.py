"""Memory is asked for before it is taken."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rlx
from rlx import free_memory
from rlx.errors import ResourceError
from rlx.runtime.compiled import CompiledGraph


def test_what_is_available_is_a_number_of_bytes() -> None:
    room = free_memory.available()
    assert room is None or 0 < room < 1 << 50


def test_too_much_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "available", lambda: 100 << 20)
    free_memory.require("small things", 1 << 20)
    free_memory.require("what fits", 100 << 20)
    with pytest.raises(ResourceError, match="KV cache: needs 300 MiB, 100 MiB are free") as caught:
        free_memory.require("KV cache", 300 << 20)
    assert isinstance(caught.value, MemoryError) and caught.value.hint


def test_weights_that_do_not_fit_are_refused_before_they_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    g = rlx.Graph("large")
    g.set_outputs([g.input("x", ("m", 4096)) @ g.param("w", (4096, 4608))])
    f = rlx.compile(g)
    f.set_param("w", np.zeros((4096, 4608), np.float32))
    monkeypatch.setattr(free_memory, "available", lambda: 70 << 20)
    with pytest.raises(ResourceError, match="weights of 'large': needs 72 MiB, 70 MiB are free"):
        f.prepare()
    monkeypatch.undo()
    f.prepare()


def test_the_limit_of_the_process_counts() -> None:
    """A child with little address space left."""
    code = """
import resource, rlx.free_memory as r
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), resource.RLIM_INFINITY))
print(r.available() <= 200 << 20)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


# -- control groups --------------------------------------------------------------------------------------------------
def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in ({"proc/meminfo": "MemTotal: 900 kB\nMemAvailable: 800000 kB\n"} | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_an_outer_control_group_of_version_2_limits_too(tmp_path: Path) -> None:
    root = machine(tmp_path, {
        "proc/self/cgroup": "0::/user.slice/app.scope\n",
        "sys/fs/cgroup/user.slice/memory.max": "5000000",
        "sys/fs/cgroup/user.slice/memory.current": "4000000",
        "sys/fs/cgroup/user.slice/memory.stat": "anon 1\ninactive_file 500000\n",
        "sys/fs/cgroup/user.slice/app.scope/memory.max": "max",
        "sys/fs/cgroup/user.slice/app.scope/memory.current": "4000000",
        "sys/fs/cgroup/user.slice/app.scope/memory.stat": "inactive_file 0\n",
    })  # fmt: skip
    assert free_memory.available(root) == 1_500_000


def test_a_control_group_of_version_1_limits(tmp_path: Path) -> None:
    """In a container: the path of the host leads nowhere, and the root of the mount is the group."""
    root = machine(tmp_path, {
        "proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/0123\n1:name=systemd:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "7000000",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "6000000",
        "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 2000000\n",
    })  # fmt: skip
    assert free_memory.available(root) == 3_000_000


def test_without_control_groups_the_machine_counts(tmp_path: Path) -> None:
    assert free_memory.available(machine(tmp_path, {})) == 800_000 * 1024
    assert free_memory.available(tmp_path / "nothing") is None


# -- runs ------------------------------------------------------------------------------------------------------------
def products() -> rlx.Graph:
    """Two buffers [n, n] from inputs of n."""
    g = rlx.Graph("products")
    z = g.input("x", ("n", 1)) * g.input("y", (1, "n"))
    g.set_outputs([z.cumsum(axis=0).cumsum(axis=1).max(axis=0)])
    return g


def vectors(n: int) -> dict[str, np.ndarray]:
    return {"x": np.ones((n, 1), np.float32), "y": np.ones((1, n), np.float32)}


def expanded(*times: int) -> rlx.Graph:
    """One output of n numbers, repeated."""
    g = rlx.Graph("expanded")
    n = rlx.dim("n")
    g.set_outputs([g.input("x", (n,)).expand(shape=(*times, n))])
    return g


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_a_run_beyond_memory_is_refused_before_it_begins(device: str) -> None:
    f = rlx.compile(products(), device=device)
    with pytest.raises(ResourceError, match=r"'products'.*needs [48],.* MiB.*MiB are free") as caught:
        f.run(vectors(1 << 20))
    notes = "\n".join(caught.value.notes)
    assert "f32[n, n]" in f"{caught.value}{notes}" and "test_free_memory.py" in notes and "smaller" in notes
    f.run(vectors(8))
    (actual,) = f.run(vectors(8))
    np.testing.assert_array_equal(actual, 8 * np.arange(1, 9, dtype=np.float32))


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("times", [(1 << 40,), (1 << 40, 1 << 40), (1 << 40,) * 30], ids=["2^42", "2^82", "2^1202"])
def test_sizes_beyond_all_addresses_are_refused_too(device: str, times: tuple[int, ...]) -> None:
    f = rlx.compile(expanded(*times), device=device)
    with pytest.raises(ResourceError, match=r"needs .* MiB are free"):
        f.run({"x": np.ones(1, np.float32)})


def test_more_elements_than_can_be_counted_are_refused() -> None:
    g = rlx.Graph("counted")
    n = rlx.dim("n")
    g.set_outputs([g.input("x", (n,)).expand(shape=(1 << 30, 1 << 30, 1 << 30, n)).max(axis=(0, 1, 2))])
    with pytest.raises(ResourceError):
        rlx.compile(g).run({"x": np.ones(4, np.float32)})


def test_an_input_that_would_be_copied_is_refused() -> None:
    f = rlx.compile(products())
    with pytest.raises(ResourceError, match=r"input 'x': a contiguous copy: needs 4,194,304 MiB"):
        f.run({"x": np.broadcast_to(np.float32(1), (1 << 40, 1)), "y": np.ones((1, 1), np.float32)})


def test_the_reference_has_views_of_any_size() -> None:
    g = rlx.Graph("views")
    n = rlx.dim("n")
    g.set_outputs([g.input("x", (n,)).expand(shape=(1 << 42, n))[5:6, :]])
    (actual,) = rlx.compile(g, device="reference").run({"x": np.ones(1, np.float32)})
    assert actual.shape == (1, 1)


def test_a_cut_batch_counts_all_of_its_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    g = rlx.Graph("cut")
    x = g.input("x", ("batch", 256))
    for i in range(3):
        x = (x @ g.param(f"w{i}", (256, 256 if i < 2 else 8192))).gelu()
    g.set_outputs([x])
    f = rlx.compile(g, threads=1)
    f.set_params({n: np.ones([int(d) for d in t.shape], np.float32) for n, t in f.param_types.items()})
    f.prepare()
    monkeypatch.setattr(free_memory, "available", lambda: 70 << 20)
    with pytest.raises(ResourceError, match=r"batch = 4096 needs .* 128 MiB for outputs, 70 MiB are free"):
        f.run({"x": np.ones((4096, 256), np.float32)})


class Asked:
    """Counts how often somebody looks at what is free."""

    def __init__(self, room: int) -> None:
        self.times, self.room = 0, room

    def __call__(self) -> int:
        self.times += 1
        return self.room


def test_only_new_and_large_sizes_cost_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    f = rlx.compile(products(), threads=1)
    asked = Asked(1 << 40)
    monkeypatch.setattr(free_memory, "available", asked)
    for n in (4, 64, 1000):
        f.run(vectors(n))
    assert asked.times == 0
    f.run(vectors(2900))
    first = asked.times
    assert 0 < first <= 2
    for _ in range(3):
        f.run(vectors(2900))
    assert asked.times == first


def arena_of(f: CompiledGraph, n: int) -> int:
    return f.memory({"n": n}).arena


def test_where_a_size_class_does_not_fit_its_exact_sizes_may(monkeypatch: pytest.MonkeyPatch) -> None:
    n, room = 2900, 100 << 20
    assert arena_of(rlx.compile(products(), threads=1), n) > room
    f = rlx.compile(products(), threads=1)
    monkeypatch.setattr(free_memory, "available", lambda: room)
    (actual,) = f.run(vectors(n))
    np.testing.assert_array_equal(actual, n * np.arange(1, n + 1, dtype=np.float32))
    assert arena_of(f, n) <= room
