"""Errors that kernels report at run time: the same messages on every device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

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
from rlx.lir.wrong_index import Read, wrong_indices
from rlx.types import evaluate

TEXTS = {
    OUT_OF_RANGE: "an index lies outside the axis it selects from",
    BEYOND_CAPACITY: "a position lies outside the capacity of a cache",
    OUTSIDE_TABLE: "a row number lies outside the table of a cache",
    OUTSIDE_STATES: "a row number lies outside the states of a cache",
    OUTSIDE_POOL: "a page number in the table of a cache lies outside its pool of pages",
    OUT_OF_STEPS: "its condition still holds after max_steps",
}


def fault(
    program: Program,
    launch: Launch | None,
    code: int,
    sizes: Mapping[str, int],
    read: Read | None = None,
    *,
    is_piece: bool = False,
) -> KernelError | BindError:
    """The error for a fault code reported by a launch; `launch` is None if it is not known which.

    With `read`, an index out of range is named: kernels report only that there is one, so that checks cost nothing.
    Inputs of a piece of a run are rows of the caller's, so positions in them are not shown.
    """
    if code >= UNFIT_SIZES:
        return assertion_error(program.assertions[code - UNFIT_SIZES], sizes)
    where = launch.kernel.symbol.partition(".")[0] if launch is not None else "a kernel"
    notes = [f"built at: {launch.where}"] if launch is not None and launch.where else []
    text = TEXTS.get(code, f"fault {code}")
    if code == OUT_OF_RANGE and launch is not None and read is not None:
        wrong = next(wrong_indices(program, launch, sizes, read), None)
        if wrong is not None and is_piece:
            wrong = replace(wrong, position=())
        text = text if wrong is None else str(wrong)
    return KernelError(f"{where}: {text}", notes=notes)


# -- sizes ------------------------------------------------------------------------------------------------------------
def assertion_error(assertion: Assertion, sizes: Mapping[str, int]) -> BindError:
    """The error for an assertion that these sizes violate."""
    a, b = evaluate(assertion.a, sizes), evaluate(assertion.b, sizes)
    return BindError(assertion.message(a, b), notes=[assertion.where])


def negative_shape(output: int, shape: tuple[int, ...]) -> BindError:
    """The error for an output of which a symbolic size is negative."""
    return BindError(f"output {output}: its shape is {shape}", hint="a symbolic size came out negative")


def check_sizes(program: Program, sizes: Mapping[str, int]) -> None:
    """Raises if the sizes violate an assertion that the run does not check itself."""
    for assertion in program.assertions:
        runs = not assertion.launched and all(evaluate(steps, sizes) > 0 for steps in assertion.steps)
        if runs and not assertion.holds(evaluate(assertion.a, sizes), evaluate(assertion.b, sizes)):
            raise assertion_error(assertion, sizes)
