"""What happens to LIR programs, on the cases of `tests/fixtures/lir/<pass>.lir`: title, before, `---`, after.

`pytest --update tests/lir` rewrites what comes after. Kernels are written without digests before, launches come with
all their words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlx.lir import memory
from rlx.lir.barriers import place_barriers
from rlx.lir.merge_launches import merge_launches
from rlx.lir.program import Program, launch_text
from rlx.types import evaluate

FIXTURES = Path(__file__).parent.parent / "fixtures" / "lir"


def merged(program: Program) -> str:
    merge_launches(program)
    return program.text(full=True)


def with_barriers(program: Program) -> str:
    place_barriers(program)
    return "\n".join(program.launch_lines(launch_text))


def planned(program: Program) -> str:
    """Lifetimes and places of arena buffers, where n is 100."""
    lives = memory.lifetimes(program)
    sizes = {x.name: evaluate(program.buffers[x.name].type.bytes, {"n": 100}) for x in lives}
    plan = memory.plan(lives, sizes)
    lines = [
        f"{x.name}: phases {x.first} to {x.last}, {plan.sizes[x.name]} bytes at {plan.offsets[x.name]}" for x in lives
    ]
    return "\n".join([*lines, f"arena: {plan.size} bytes, at least {plan.bound}"])


PASSES: dict[str, Callable[[Program], str]] = {
    "merge_launches": merged, "barriers": with_barriers, "memory": planned,
}  # fmt: skip


def cases(name: str) -> Iterator[tuple[str, str, str]]:
    for part in (FIXTURES / f"{name}.lir").read_text().split("=== ")[1:]:
        title, _, rest = part.partition("\n")
        before, _, after = rest.partition("\n---\n")
        yield title, before, after.strip("\n")


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_does_what_its_fixture_says(name: str, update: bool) -> None:
    results = [(title, before, PASSES[name](Program.parse(before)).strip("\n")) for title, before, _ in cases(name)]
    assert results, "a fixture has cases"
    if update:
        text = "\n".join(f"=== {title}\n{before}\n---\n{after}\n" for title, before, after in results)
        (FIXTURES / f"{name}.lir").write_text(text)
    for (title, _, after), (_, _, wanted) in zip(results, cases(name), strict=True):
        assert after == wanted, title
