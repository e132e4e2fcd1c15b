"""The number of cores this process may use: limited by its affinity mask and the CPU quota of its cgroups."""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path

from rlx.cgroups import groups

ROOT = Path("/")


def usable_cores() -> int:
    """Number of cores that this process may use at once; a quota of 1.5 cores counts as two."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, quota(ROOT))))


@functools.cache
def quota(root: Path) -> float:
    """The smallest CPU quota of the process's cgroups and their parents, in cores; infinity if there is none."""
    return min((_quota_of(folder, version) for folder, version in groups(root, "cpu")), default=math.inf)


def _quota_of(folder: Path, version: int) -> float:
    """The quota of one cgroup: `cpu.max` in version 2, two files in version 1."""
    try:
        if version == 2:
            limit, period = (folder / "cpu.max").read_text().split()
        else:
            limit, period = ((folder / name).read_text().strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
        return int(limit) / int(period) if limit != "max" and int(limit) > 0 else math.inf
    except (OSError, ValueError, ZeroDivisionError):  # no such controller here
        return math.inf
