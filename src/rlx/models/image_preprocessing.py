"""Image preprocessing: settings from `preprocessor_config.json`, and their application to images.

The steps and their order are those of `transformers`: resize, centre crop, rescale, subtract the mean, divide by the
standard deviation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlx.arrays import Array
from rlx.errors import CapabilityError
from rlx.fast_dataclass import dataclass
from rlx.formats.images import BICUBIC, BILINEAR, FILTERS, NEAREST, resize
from rlx.formats.tensor_file import broken, quoted
from rlx.models.load import Checkpoint
from rlx.models.sidecar_json import JsonObject

FILE = "preprocessor_config.json"
MAX_SIDE = 1 << 14  # pixels per side
# Steps of some processors that are not implemented: the values with which they do nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "do_pad": (None, False), "do_thumbnail": (None, False), "do_align_long_axis": (None, False),
    "rescale_offset": (None, False), "crop_pct": (None,), "do_color_quantize": (None, False),
    "do_split_image": (None, False), "do_image_splitting": (None, False), "do_pan_and_scan": (None, False),
}  # fmt: skip
# Defaults per processor: the resampling filter, and whether a single number is the shorter side.
_PROCESSORS = {"Bit": (BICUBIC, True), "CLIP": (BICUBIC, True), "Siglip": (BICUBIC, False), "DeiT": (BICUBIC, False)}


@dataclass(frozen=True)
class ImageSettings:
    """Image preprocessing settings of a model."""

    source: str = ""  # the settings file; empty if there is none
    size: tuple[int, int] | None = None  # height and width to resize to
    shorter: int | None = None  # the shorter side to resize to, instead
    resample: int = BILINEAR  # Pillow's filter numbers
    crop: tuple[int, int] | None = None
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    reversed: bool = False  # BGR channel order

    def prepare(self, image: Array) -> Array:
        """Converts `[height, width, 3]` bytes to `[3, height, width]` f32."""
        height, width = image.shape[:2]
        if self.size is not None:
            image = resize(image, *self.size, self.resample)
        elif self.shorter is not None:
            long = int(self.shorter * max(height, width) / min(height, width))
            if long > MAX_SIDE:
                raise CapabilityError(f"image: {height} × {width} pixels would become {long} long, at most {MAX_SIDE}")
            image = resize(image, *((self.shorter, long) if height < width else (long, self.shorter)), self.resample)
        image = image if self.crop is None else centre_crop(image, *self.crop)
        image = image[:, :, ::-1] if self.reversed else image
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        normalised = (image * np.float32(self.scale) - mean) / std
        return np.ascontiguousarray(normalised.transpose(2, 0, 1), np.float32)


def centre_crop(image: Array, height: int, width: int) -> Array:
    """Centre crop; images that are too small are padded with black."""
    for axis, wanted in ((0, height), (1, width)):
        size = image.shape[axis]
        if size < wanted:
            before = math.ceil((wanted - size) / 2)
            sides = [(0, 0), (0, 0), (0, 0)]
            sides[axis] = (before, wanted - size - before)
            image = np.pad(image, sides)
        else:
            start = (size - wanted) // 2
            image = image[start : start + wanted] if axis == 0 else image[:, start : start + wanted]
    return image


# -- settings in files -----------------------------------------------------------------------------------------------
def read_image_settings(checkpoint: Checkpoint) -> ImageSettings:
    """Reads the settings of an opened model. Unsupported steps raise CapabilityError."""
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    config = JsonObject.read(folder / FILE)
    if not config.members:  # newer files store it next to the tokenizer's settings
        processor = JsonObject.read(folder / "processor_config.json")
        config = JsonObject(processor.path, processor.get("image_processor", dict) or {})
    return _settings(config) if config.members else ImageSettings()


def _settings(said: JsonObject) -> ImageSettings:
    for name, allowed in _NEUTRAL.items():
        value = said.members.get(name)
        if not any(value is a for a in allowed):
            raise CapabilityError(f"{said.path}: {name} is {quoted(value)}, which rlx does not have")
    kind = said.get("image_processor_type", str) or said.get("feature_extractor_type", str) or ""
    resample, shorter = next((v for name, v in _PROCESSORS.items() if kind.startswith(name)), (BILINEAR, False))
    method = said.get("resample", int)
    settings: dict[str, Any] = {"source": str(said.path), "resample": resample if method is None else method}
    if settings["resample"] not in (NEAREST, *FILTERS):
        raise broken(said.path, "resample", expected="0 to 5", actual=method)
    if said.get("do_resize", bool) is not False:
        settings |= _size(said, "size", shorter)
    if said.get("do_center_crop", bool):
        settings["crop"] = _size(said, "crop_size", False).get("size")
        if settings["crop"] is None:
            stated = quoted(said.members["crop_size"])
            raise broken(said.path, "crop_size", expected="a height and a width", actual=stated)
    if said.get("do_rescale", bool) is False:
        settings["scale"] = 1.0
    elif (scale := said.get("rescale_factor", int, float)) is not None:
        settings["scale"] = float(scale)
    if said.get("do_normalize", bool) is not False:
        settings |= {name: _colours(said, f"image_{name}") for name in ("mean", "std")}
        if 0 in settings["std"]:
            raise broken(said.path, "image_std", expected="numbers other than 0", actual=quoted(settings["std"]))
    settings["reversed"] = bool(said.get("do_flip_channel_order", bool))
    return ImageSettings(**settings)


def _size(said: JsonObject, name: str, shorter: bool) -> dict[str, Any]:
    """A single number for a square or the shorter side, or a height and a width."""
    setting = said.get(name, int, dict, list)
    match setting:
        case int():
            sides: list[Any] = [setting]
        case [height, width]:
            sides = [height, width]
        case {"height": height, "width": width, **others} if not any(others.values()):
            sides = [height, width]
        case {"shortest_edge": side, **others} if not any(others.values()):
            sides, shorter = [side], True
        case None:
            raise broken(said.path, f"{quoted(name)} is missing")
        case _:
            raise CapabilityError(
                f"{said.path}: {name} is {quoted(setting)}, which rlx does not have",
                hint="known: a number, a height and a width, a shortest_edge",
            )
    if not all(type(side) is int and 0 < side <= MAX_SIDE for side in sides):
        raise broken(said.path, name, expected=f"1 to {MAX_SIDE} pixels", actual=quoted(setting))
    if shorter and len(sides) == 1:
        return {"shorter": sides[0]}
    return {"size": (sides[0], sides[-1])}


def _colours(said: JsonObject, name: str) -> tuple[float, ...]:
    setting = said.get(name, list, int, float)
    if setting is None:
        raise broken(said.path, f"{quoted(name)} is missing")
    values = setting if isinstance(setting, list) else [setting] * 3
    if len(values) != 3 or not all(type(v) in (int, float) for v in values):
        raise broken(said.path, name, expected="a number for each of three colours", actual=quoted(setting))
    return tuple(map(float, values))
