"""Switch for the NaN and infinity checks (`runtime/nan_check.py`). Runs cost nothing extra while it is off."""

from __future__ import annotations

watching = False  # process-wide, because models may run in other threads


class nans:
    """Make every run that returns NaN or infinity raise `NonFiniteError`. A `with` block restores the previous setting.

    `nans(False)` switches the check off.
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
    """Set the switch and return its previous value."""
    global watching
    before, watching = watching, on
    return before
