"""The switch of the watch for NaN and infinity (`runtime/nan_check.py`). Runs are not slower while it is off."""

from __future__ import annotations

watching = False  # of the whole process: models may run in threads of their own


class nans:
    """Every run that gives NaN or infinity raises `NonFiniteError` from here on; after a `with`, as it was before.

    `nans(False)` switches it off.
    """

    def __init__(self, on: bool = True) -> None:
        self._on = on
        self._before = _switch(on)

    def __enter__(self) -> nans:
        _switch(self._on)
        return self

    def __exit__(self, *_: object) -> None:
        _switch(self._before)


def _switch(on: bool) -> bool:
    """Watch or not; gives what was before."""
    global watching
    before, watching = watching, on
    return before
