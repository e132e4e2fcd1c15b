"""The end of writing a GGUF file, which is the same for every family."""

from __future__ import annotations

from typing import Any


def finish(writer: Any) -> None:
    """Write what a `gguf.GGUFWriter` was given, and close its file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
