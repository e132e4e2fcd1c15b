"""Control groups: the folders in which Linux limits what this process may use, of version 1 and of version 2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Group(NamedTuple):
    """The folder of a control group, and the version of its files."""

    folder: Path
    version: int


def groups(root: Path, controller: str) -> Iterator[Group]:
    """The groups of this process that have a controller (`cpu`, `memory`), each followed by its parents.

    In a container the innermost one may be mounted as the root; its path on the host then leads nowhere. So the root of
    the mount always comes, too.
    """
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, ValueError):  # /proc is hidden
        lines = [f":{controller}:/", "0::/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)  # number of the hierarchy, its controllers, the group
        if controllers and controller not in controllers.split(","):
            continue
        mounts = [mount / controllers, mount / controller] if controllers else [mount, mount / "unified"]
        for top in dict.fromkeys(mounts):
            inner = top / path.lstrip("/")
            parents = [folder for folder in inner.parents if folder.is_relative_to(top)]
            for folder in dict.fromkeys([inner, *parents, top]):
                yield Group(folder, 1 if controllers else 2)
