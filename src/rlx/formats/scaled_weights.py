"""Hugging Face checkpoints with separate scale tensors: FP8 and MXFP4.

`with_scales` presents each weight and its scales as one block-quantised tensor. Blocks are assembled when a tensor is
read, by copying codes and repeating scales, without dequantising.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from rlx.arrays import Array
from rlx.dtypes import BY_NAME, F32, FLOAT8_PACKED, U8, DType
from rlx.errors import CapabilityError, FormatError
from rlx.fast_dataclass import dataclass
from rlx.formats.tensor_file import F8E4M3, F8E5M2, F8E8M0, TensorEntry, TensorFile, broken, quoted

METHODS = ("fp8", "fbgemm_fp8", "mxfp4")
MXFP4 = BY_NAME["mxfp4"]
DEFAULT_GRID = (128, 128)  # of transformers, if the configuration has none
MAX_BLOCK = 1 << 24  # rows or columns that share a scale
SCALES = ("_scale_inv", "_scale")  # suffixes of FP8 weight names; both kinds multiply the weight
ACTIVATION_SCALES = ("activation_scale", "input_scale")  # in the weight's module; ignored, since activations stay f32
NIBBLE_BYTES = 16  # of codes per MXFP4 block
CHUNK = 1 << 20  # bytes of MXFP4 codes reordered at a time
ALTERNATIVES = "use the model without quantisation, or its GGUF file (Q4_K_M is about as small); folders may be {}"


# -- the configuration -----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Quantization:
    """The weight quantisation described by a `quantization_config`."""

    method: str
    grid: tuple[int, int] | None = None  # rows and columns that share a scale
    by_row: bool = True  # whether one scale per row or per tensor is allowed instead of a grid


def read_quantization(settings: Mapping[str, Any], where: str) -> Quantization:
    """Parse the `quantization_config` of a config.json; errors name the unsupported method or the wrong field."""
    at = f"{where}: quantization_config"
    method = settings.get("quant_method")
    if method is None and any(settings.get(name) is True for name in ("load_in_4bit", "load_in_8bit")):
        method = "bitsandbytes"  # whose early configurations omit quant_method
    if not isinstance(method, str):
        raise CapabilityError(f"{at} is {quoted(settings)}, which is not supported", hint=_alternatives())
    if method not in METHODS:
        raise CapabilityError(f"{at}: quant_method is {quoted(method)}, which is not supported", hint=_alternatives())
    for name in ("modules_to_not_convert", "ignored_layers"):
        listed = settings.get(name)
        if listed is not None and not (isinstance(listed, list) and all(isinstance(n, str) for n in listed)):
            raise FormatError(f"{at}: {name}: expected a list of names, found {quoted(listed)}")
    for name, known in _SWITCHES.items():
        value = settings.get(name)
        if value is not None and value not in known:
            expected = " or ".join(map(repr, known))
            raise CapabilityError(f"{at}: {name} is {quoted(value)}, which is not supported", hint=f"known: {expected}")
    if method != "fp8" or ("weight_block_size" in settings and settings["weight_block_size"] is None):
        return Quantization(method)
    if "weight_block_size" not in settings:
        return Quantization(method, DEFAULT_GRID)
    sizes = settings["weight_block_size"]
    if not (isinstance(sizes, list) and len(sizes) == 2 and all(type(n) is int and 0 < n <= MAX_BLOCK for n in sizes)):
        raise FormatError(f"{at}: weight_block_size: expected two sizes from 1 to {MAX_BLOCK}, found {quoted(sizes)}")
    return Quantization(method, (sizes[0], sizes[1]), by_row=False)


_SWITCHES = {
    "activation_scheme": ("dynamic", "static"), "fmt": ("e4m3",), "scale_fmt": ("float", "ue8m0"),
    "expert_dtype": ("fp8",),
}  # fmt: skip


def _alternatives() -> str:
    return ALTERNATIVES.format(", ".join(METHODS))


# -- weights and their scales ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Float8:
    """An FP8 weight [..., n, k] and scales [..., rows, columns], each shared by a `grid` rectangle."""

    weight: TensorEntry
    scale: TensorEntry
    grid: tuple[int, int]
    scales_shape: tuple[int, ...]

    @property
    def parts(self) -> tuple[TensorEntry, ...]:
        return self.weight, self.scale

    @property
    def storage(self) -> DType:
        """The longest block type that divides rows and scale runs; f32 if there is none."""
        k = self.weight.shape[-1]
        run = min(self.grid[1], k)
        return next((d for d in FLOAT8_PACKED if k % d.block == 0 and run % d.block == 0), F32)

    @property
    def entry(self) -> TensorEntry:
        return replace(self.weight, storage=self.storage)

    def read(self, file: TensorFile) -> Array:
        storage, (*lead, n, k) = self.storage, self.weight.shape
        codes, scales = file.array(self.weight.name), self._scales(file)
        rows = np.arange(n) // self.grid[0]
        if storage is F32:
            numbers: Array = codes.astype(np.float32)
            numbers *= scales[..., np.arange(k) // self.grid[1]][..., rows, :]
            return numbers
        blocks = np.empty((*lead, n, k // storage.block), storage.numpy)
        blocks["codes"] = codes.view(np.uint8).reshape(*blocks.shape, storage.block)
        blocks["d"] = scales[..., np.arange(blocks.shape[-1]) * storage.block // self.grid[1]][..., rows, :]
        return blocks

    def _scales(self, file: TensorFile) -> Array:
        """Read the scales as f32; infinities and NaN are rejected."""
        stored = file.array(self.scale.name)
        values = (stored.view(ml_dtypes.float8_e8m0fnu) if self.scale.storage is U8 else stored).astype(np.float32)
        finite = np.isfinite(values)
        if not finite.all():
            raise _wrong(self.scale, "a scale", "a finite number", values[~finite][0])
        return np.broadcast_to(values.reshape(() if values.size == 1 else self.scales_shape), self.scales_shape)


@dataclass(frozen=True)
class Mxfp4:
    """MXFP4 codes [..., n, k / 32, 16], two per byte, and scale exponents [..., n, k / 32]."""

    name: str
    blocks: TensorEntry
    scale: TensorEntry

    @property
    def parts(self) -> tuple[TensorEntry, ...]:
        return self.blocks, self.scale

    @property
    def entry(self) -> TensorEntry:
        *rows, count, _ = self.blocks.shape
        return replace(self.blocks, name=self.name, shape=(*rows, count * MXFP4.block), storage=MXFP4)

    def read(self, file: TensorFile) -> Array:
        exponents = file.array(self.scale.name).view(np.uint8)
        if exponents.size and int(exponents.max()) == 255:
            raise _wrong(self.scale, "an exponent", "0 to 254", "255, which is NaN")
        blocks = np.empty(exponents.shape, MXFP4.numpy)
        blocks["e"] = exponents
        source = file.array(self.blocks.name).reshape(-1, NIBBLE_BYTES)
        codes = blocks.reshape(-1)["codes"]
        step = CHUNK // NIBBLE_BYTES
        for at in range(0, len(source), step):
            # Checkpoints pack neighbours into a byte; GGUF blocks hold elements 0-15 in low nibbles, 16-31 in high.
            first, second = np.split(source[at : at + step], 2, axis=1)
            codes[at : at + step, 0::2] = first & 15 | second << 4
            codes[at : at + step, 1::2] = first >> 4 | second & 0xF0
        return blocks


def _wrong(entry: TensorEntry, subject: str, expected: object, actual: object, hint: str | None = None) -> FormatError:
    where = f"tensor {quoted(entry.name)}: {subject}"
    return broken(entry.file, where, at=entry.offset, expected=expected, actual=actual, hint=hint)


# -- pairs of a file -------------------------------------------------------------------------------------------------
Joined = Float8 | Mxfp4


def with_scales(file: TensorFile, settings: Mapping[str, Any] | None, where: str) -> TensorFile:
    """Join each weight with its scales, as `quantization_config` says; returns the file itself without one."""
    if settings is None:
        return file
    quantization = read_quantization(settings, where)
    if quantization.method == "mxfp4":
        return ScaledFile(file, _mxfp4_pairs(file))
    pairs = _float8_pairs(file, quantization)
    modules = [pair.weight.name.removesuffix("weight") for pair in pairs]
    return ScaledFile(file, pairs, (module + name for module in modules for name in ACTIVATION_SCALES))


def _float8_pairs(file: TensorFile, quantization: Quantization) -> list[Float8]:
    pairs = []
    for entry in map(file.entry, file.names):
        if entry.storage is F8E5M2:
            raise CapabilityError(
                f"{entry.file}: tensor {quoted(entry.name)} is stored as {F8E5M2}, expected {F8E4M3}",
                hint=_alternatives(),
            )
        if entry.storage is not F8E4M3:
            continue
        names = [entry.name + suffix for suffix in SCALES if entry.name + suffix in file]
        if len(names) != 1:
            expected = " or ".join(quoted(entry.name + suffix) for suffix in SCALES)
            raise _wrong(entry, "its scales", f"tensor {expected}", " and ".join(map(quoted, names)) or "neither")
        pairs.append(_float8(entry, file.entry(names[0]), quantization))
    used = {pair.scale.name for pair in pairs}
    for name in file.names:
        weight = next((name.removesuffix(s) for s in SCALES if name.endswith(f".weight{s}")), None)
        if weight is not None and name not in used:
            actual = f"one of {file.entry(weight).storage}" if weight in file else "none"
            raise _wrong(file.entry(name), "the weight of these scales", f"one of {F8E4M3}", actual)
    return pairs


def _float8(weight: TensorEntry, scale: TensorEntry, quantization: Quantization) -> Float8:
    if len(weight.shape) < 2:
        raise _wrong(weight, "8-bit floats with scales", "2 axes or more", f"shape {list(weight.shape)}")
    if not (scale.storage.is_float or scale.storage is U8):
        raise _wrong(scale, "scales", "floats, or u8 for exponents", scale.storage)
    *axes, n, k = weight.shape
    lead, grid = tuple(axes), quantization.grid
    allowed: list[tuple[int, ...]] = []
    if grid is not None:
        allowed.append((*lead, -(-n // grid[0]), -(-k // grid[1])))
        if scale.shape == allowed[0]:
            return Float8(weight, scale, grid, allowed[0])
    if quantization.by_row:
        allowed += [(*lead, n, 1), (*lead, n), (*lead, 1, 1), (*lead, 1), lead, ()]
        if scale.shape in ((*lead, n, 1), (*lead, n)):
            return Float8(weight, scale, (1, max(k, 1)), (*lead, n, 1))
        if scale.shape in allowed or scale.shape == (1,):
            return Float8(weight, scale, (max(n, 1), max(k, 1)), (*lead, 1, 1))
    blocks = "" if grid is None else f" with a scale per {grid[0]} x {grid[1]} numbers"
    expected = " or ".join(str(list(shape)) for shape in dict.fromkeys(allowed))
    subject = f"the shape of scales of {list(weight.shape)}{blocks}"
    raise _wrong(scale, subject, expected, list(scale.shape), "is weight_block_size in config.json right?")


def _mxfp4_pairs(file: TensorFile) -> list[Mxfp4]:
    pairs = []
    for entry in map(file.entry, file.names):
        if not entry.name.endswith("_blocks"):
            continue
        name = entry.name.removesuffix("_blocks")
        if f"{name}_scales" not in file:
            raise _wrong(entry, "its scales", f"tensor {quoted(f'{name}_scales')}", "none")
        if name in file:
            raise _wrong(entry, f"weight {quoted(name)}", "one tensor or the other", "both")
        scale = file.entry(f"{name}_scales")
        if entry.storage is not U8 or len(entry.shape) < 3 or entry.shape[-1] != NIBBLE_BYTES:
            actual = f"{entry.storage}{list(entry.shape)}"
            raise _wrong(entry, "blocks of MXFP4", f"u8[..., rows, blocks, {NIBBLE_BYTES}]", actual)
        if scale.storage not in (U8, F8E8M0) or scale.shape != entry.shape[:-1]:
            actual = f"{scale.storage}{list(scale.shape)}"
            raise _wrong(scale, "scales of MXFP4", f"u8{list(entry.shape[:-1])}, one per block", actual)
        pairs.append(Mxfp4(name, entry, scale))
    used = {pair.scale.name for pair in pairs}
    for name in file.names:
        if name.endswith("_scales") and name not in used:
            blocks = quoted(name.removesuffix("_scales") + "_blocks")
            raise _wrong(file.entry(name), "the blocks of these scales", f"tensor {blocks}", "none")
    return pairs


class ScaledFile(TensorFile):
    """A file whose weights and scales are joined into one tensor. Entry offsets and sizes are those of the codes."""

    def __init__(self, stored: TensorFile, joined: Iterable[Joined], ignored: Iterable[str] = ()) -> None:
        self._joined = {pair.entry.name: pair for pair in joined}
        joined_parts = {part.name for pair in self._joined.values() for part in pair.parts} | set(ignored)
        plain = [stored.entry(name) for name in stored.names if name not in joined_parts]
        entries = [*(pair.entry for pair in self._joined.values()), *plain]
        super().__init__(stored.path, stored.format, entries, stored.metadata, ())
        self._stored = stored
        self.maps = stored.maps

    @property
    def stored(self) -> TensorFile:
        return self._stored

    @property
    def widened(self) -> tuple[str, ...]:
        """Weights read as f32, because no block type divides their rows."""
        return tuple(name for name, pair in self._joined.items() if pair.entry.storage is F32)

    def parts(self, name: str) -> tuple[str, ...]:
        pair = self._joined.get(name)
        return (name,) if pair is None else tuple(part.name for part in pair.parts)

    def array(self, name: str) -> Array:
        """The elements of a tensor; a read-only copy if weights and scales are joined."""
        pair = self._joined.get(self.entry(name).name)
        if pair is None:
            return self._stored.array(name)
        try:
            blocks = pair.read(self._stored)
        finally:
            self._stored.release()  # the copied pages
        blocks.flags.writeable = False  # lets tensors derived from it be shared
        return blocks

    def release(self) -> None:
        self._stored.release()

    def close(self) -> None:
        self._stored.close()
        super().close()
