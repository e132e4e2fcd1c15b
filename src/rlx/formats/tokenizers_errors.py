"""Calls into the Rust `tokenizers` library: whatever goes wrong inside becomes a FormatError.

A panic of Rust arrives as pyo3's PanicException, which derives from BaseException, so that `except Exception` would
miss it and end the program.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlx.errors import FormatError, RlxError, shortened


@contextmanager
def rust_call(where: str) -> Iterator[None]:
    """Run a block that calls Rust; `where` names the file and the part of it that the call depends on."""
    try:
        yield
    except (RlxError, MemoryError):
        raise
    except Exception as error:
        # what code of ours raised inside, in a pre-tokenizer, comes back as text
        inner, _, said = str(error).removeprefix("Exception: ").partition(": ")
        if inner == KeyboardInterrupt.__name__:
            raise KeyboardInterrupt from error
        raise FormatError(f"{where}: {said if inner == FormatError.__name__ else _shown(error)}") from error
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise  # KeyboardInterrupt, SystemExit
        raise FormatError(f"{where}: the tokenizers library gave up: {_shown(error)}") from error


def _shown(error: BaseException) -> str:
    return shortened(str(error) or type(error).__name__, 300)
