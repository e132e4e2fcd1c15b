"""The LLVM code of eleven programs is what `kernel_hashes.json` says: changes of kernels are meant, and seen.

Digests are of the text of each routine, without the digests in its name. Where kernels are meant to change,
`pytest --update tests/backends/cpu/test_kernel_hashes.py` rewrites the file; the commit says which changed and why.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernel_programs import PROGRAMS, plan
from targets import AVX2, AVX512

from rlx.backends.cpu.kernel_generators import entry, module_text
from rlx.backends.cpu.routine import Routine
from rlx.target import Target

HASHES = Path(__file__).parent / "kernel_hashes.json"
DIGESTS = re.compile(r"\.[0-9a-f]{16}\b|\.[0-9a-f]{8}\b")  # of LIR kernels, in names
Routines = dict[str, list[str]]  # by target: the name and digest of each routine


def routine_digest(routine: Routine) -> str:
    """Name and digest of a routine's text."""
    text = DIGESTS.sub("", module_text([routine]))
    return f"{DIGESTS.sub('', routine.symbol)} {hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"


@pytest.fixture(scope="module")
def digests() -> dict[tuple[Target, str], str]:
    """What was generated already: programs share many routines."""
    return {}


def generate(name: str, folder: Path, known: dict[tuple[Target, str], str]) -> Routines:
    by_target: Routines = {}
    for target in (AVX512, AVX2):
        path = folder / target.name
        path.mkdir()
        module = plan(name, path, target)
        kernels = module.main.kernels() | module.bind.kernels()
        routines = {r.symbol: r for k in kernels.values() for r in entry(k, target).routines()}
        for symbol, routine in routines.items():
            if (target, symbol) not in known:
                known[target, symbol] = routine_digest(routine)
        by_target[target.name] = sorted(known[target, symbol] for symbol in routines)
    return by_target


def changes(name: str, actual: Routines, wanted: Routines) -> Iterator[str]:
    for target, now in actual.items():
        before = wanted.get(target, [])
        gone, new = Counter(before) - Counter(now), Counter(now) - Counter(before)
        if gone or new:
            names = sorted({line.split()[0] for line in (*gone, *new)})
            counts = f"{gone.total()} of {len(before)} kernels changed or left, {new.total()} changed or new"
            yield f"{name} for {target}: {counts}: {', '.join(names)}"


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_of_a_program_are_as_recorded(
    tmp_path: Path, name: str, digests: dict[tuple[Target, str], str], update: bool
) -> None:
    routines = generate(name, tmp_path, digests)
    recorded: dict[str, Routines] = json.loads(HASHES.read_text()) if HASHES.exists() else {}
    if update:
        HASHES.write_text(json.dumps(dict(sorted({**recorded, name: routines}.items())), indent=1) + "\n")
        return
    different = "\n".join(changes(name, routines, recorded.get(name, {})))
    assert not different, different
