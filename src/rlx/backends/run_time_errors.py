"""Errors that kernels report at run time: the same text on every device."""

from __future__ import annotations

from collections.abc import Mapping

from rlx.errors import BindError, KernelError
from rlx.lir.kernels import (
    BEYOND_CAPACITY,
    OUT_OF_RANGE,
    OUT_OF_STEPS,
    OUTSIDE_POOL,
    OUTSIDE_STATES,
    OUTSIDE_TABLE,
    UNFIT_SIZES,
)
from rlx.lir.program import Assertion, Launch, Program
from rlx.types import evaluate

TEXTS = {
    OUT_OF_RANGE: "an index lies outside the axis it selects from",
    BEYOND_CAPACITY: "a position lies outside the capacity of a cache",
    OUTSIDE_TABLE: "a row number lies outside the table of a cache",
    OUTSIDE_STATES: "a row number lies outside the states of a cache",
    OUTSIDE_POOL: "a page number in the table of a cache lies outside its pool of pages",
    OUT_OF_STEPS: "its condition still holds after max_steps",
}


def fault(program: Program, launch: Launch | None, code: int, sizes: Mapping[str, int]) -> KernelError | BindError:
    """The error for a fault code that a launch has reported; None if it is not known which."""
    if code >= UNFIT_SIZES:
        return unfit(program.assertions[code - UNFIT_SIZES], sizes)
    where = launch.kernel.symbol if launch is not None else "a kernel"
    notes = [f"built at: {launch.where}"] if launch is not None and launch.where else []
    return KernelError(f"{where}: {TEXTS.get(code, f'fault {code}')}", notes=notes)


def unfit(assertion: Assertion, sizes: Mapping[str, int]) -> BindError:
    """The error for an assertion that does not hold for these sizes."""
    a, b = evaluate(assertion.a, sizes), evaluate(assertion.b, sizes)
    return BindError(assertion.message(a, b), notes=[assertion.where])


def check_sizes(program: Program, sizes: Mapping[str, int]) -> None:
    """Raise unless every assertion holds that a run does not check itself."""
    for assertion in program.assertions:
        runs = not assertion.launched and all(evaluate(steps, sizes) > 0 for steps in assertion.steps)
        if runs and not assertion.holds(evaluate(assertion.a, sizes), evaluate(assertion.b, sizes)):
            raise unfit(assertion, sizes)
