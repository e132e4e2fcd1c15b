"""`rlx.load` for commands, with a handler for bus errors that names the file that was truncated while in use."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from rlx.backends.base import device
from rlx.cli.console import BAD_FILE
from rlx.engine.load import load as load_model

if TYPE_CHECKING:
    from rlx.engine.load import Loaded

DEVICE_HELP = "where it runs: cpu, cuda, cuda:1, or auto: a GPU with room for it, else the CPU (cpu)"
_BEFORE = "\nrlx: "
_AFTER = (
    ": the file was cut short, or cannot be read, while it was in use\n"
    "  hint: run the command again, and replace files by renaming new ones over them\n"
)


@functools.wraps(load_model)
def load(*args: Any, **settings: Any) -> Loaded:
    # Install the handler before the first load if its code is cached. A cold start loads LLVM in the background and
    # should not wait for it here.
    name = settings.get("device", "cpu")
    backend = device("cpu" if name == "auto" else name).backend
    backend.catch_bus_errors(BAD_FILE, _BEFORE, _AFTER, compiling=False)
    model = load_model(*args, **settings)
    backend.catch_bus_errors(BAD_FILE, _BEFORE, _AFTER)
    return model
