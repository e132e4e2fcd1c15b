"""The number of usable cores: affinity and the CPU quotas of both versions of cgroups."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from rlx.backends.cpu import cores


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


SYSTEMS: dict[str, tuple[dict[str, str], float]] = {
    "no /proc": ({}, math.inf),
    "version 2, no limit": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, math.inf),
    "version 2 in a container": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
    "version 2, the limit of a parent": (
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/cpu.max": "200000 100000\n",
            "sys/fs/cgroup/a/b/cpu.max": "800000 100000\n",
        },
        2.0,
    ),
    "version 2, a path that the container does not see": (
        {"proc/self/cgroup": "0::/kubepods/pod1\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"},
        0.5,
    ),
    "version 1": (
        {
            "proc/self/cgroup": "3:memory:/x\n2:cpu,cpuacct:/x\n",
            "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "300000\n",
            "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000\n",
        },
        3.0,
    ),
    "version 1, no limit": (
        {
            "proc/self/cgroup": "2:cpu:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        math.inf,
    ),
    "what is no number": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "many\n"}, math.inf),
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_smallest_quota_counts(tmp_path: Path, name: str) -> None:
    files, expected = SYSTEMS[name]
    assert cores.quota(write(tmp_path, files)) == expected


@pytest.mark.parametrize("limit, expected", [("50000", 1), ("100000", 1), ("150000", 2), ("199900000", 1000)])
def test_a_part_of_a_core_counts_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, expected: int
) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{limit} 100000\n"}
    monkeypatch.setattr(cores, "ROOT", write(tmp_path, files))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(1000)))
    assert cores.usable_cores() == expected
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert cores.usable_cores() == 1
