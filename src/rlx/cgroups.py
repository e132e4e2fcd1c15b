"""Control groups: the cgroup v1 and v2 folders in which Linux limits the resources of this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Group(NamedTuple):
    """The folder of a control group, and the cgroup version of its files."""

    folder: Path
    version: int


def groups(root: Path, controller: str) -> Iterator[Group]:
    """Yields the groups of this process that have a controller (`cpu`, `memory`), each followed by its parents.

    In a container the innermost group may be mounted as the root, so that its path on the host does not exist. The root
    of the mount is therefore always included.
    """
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, ValueError):  # /proc is hidden
        lines = [f":{controller}:/", "0::/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)  # hierarchy number, controllers, group path
        if controllers and controller not in controllers.split(","):
            continue
        mounts = [mount / controllers, mount / controller] if controllers else [mount, mount / "unified"]
        for top in dict.fromkeys(mounts):
            inner = top / path.lstrip("/")
            parents = [folder for folder in inner.parents if folder.is_relative_to(top)]
            for folder in dict.fromkeys([inner, *parents, top]):
                yield Group(folder, 1 if controllers else 2)
