"""Warnings of loaded models, through Python's `logging` under `rlx.load`, `rlx.generate` and `rlx.embed`."""

from __future__ import annotations

from typing import Any


def warn(logger: str, message: str, *values: Any) -> None:
    """Logs a warning. `logging` is imported here because most runs have nothing to say, and a warm start counts."""
    import logging

    logging.getLogger(logger).warning(message, *values)
