"""A GGUF file with every weight as f32, dequantised by the `gguf` package: llama.cpp computes in f32 on it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np


def float_copy(path: Path, copy: Path) -> None:
    reader = gguf.GGUFReader(path)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    writer = gguf.GGUFWriter(copy, fields.pop("general.architecture").contents())
    for name, field in fields.items():
        kind, *inner = field.types
        writer.add_key_value(name, field.contents(), kind, inner[-1] if inner else None)
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), 4 * int(tensor.n_elements))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:  # one at a time: all of them may be larger than the memory
        writer.write_tensor_data(gguf.dequantize(tensor.data, tensor.tensor_type))
    writer.close()
