"""Convert errors of the Rust `tokenizers` library to FormatError.

A Rust panic is raised as pyo3's PanicException, which derives from BaseException, so `except Exception` would miss it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlx.errors import FormatError, RlxError, shortened


@contextmanager
def rust_call(where: str) -> Iterator[None]:
    """Wrap a block that calls Rust; `where` names the file and the part of it that the call depends on."""
    try:
        yield
    except (RlxError, MemoryError):
        raise
    except Exception as error:
        # exceptions raised by our own pre-tokenizer come back as text
        inner, _, message = str(error).removeprefix("Exception: ").partition(": ")
        if inner == KeyboardInterrupt.__name__:
            raise KeyboardInterrupt from error
        raise FormatError(f"{where}: {message if inner == FormatError.__name__ else _short_message(error)}") from error
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise  # KeyboardInterrupt, SystemExit
        raise FormatError(f"{where}: the tokenizers library panicked: {_short_message(error)}") from error


def _short_message(error: BaseException) -> str:
    return shortened(str(error) or type(error).__name__, 300)
