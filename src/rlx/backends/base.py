"""Devices: what can run a compiled graph. `device(name)` gives the record; backends are imported when first used."""

from __future__ import annotations

from dataclasses import dataclass

from rlx.errors import CapabilityError, nearest

MAX_THREADS = 4096  # that may be asked for: more is a slip of the keyboard


@dataclass(frozen=True, slots=True)
class Device:
    """A device by name and what it is for."""

    name: str
    about: str


DEVICES = {
    "cpu": Device("cpu", "machine code for this processor, on all its cores"),
    "reference": Device("reference", "NumPy, one op at a time: the oracle, for tests and doubts"),
}


def device(name: str) -> Device:
    """The device called `name`."""
    if name not in DEVICES:
        raise CapabilityError(f"device: {name!r} is not known", hint=nearest(name, DEVICES) or "known: cpu, reference")
    return DEVICES[name]
