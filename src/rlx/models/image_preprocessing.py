"""How a model wants its images: what `preprocessor_config.json` says, and images made so.

The steps are those of `transformers`, in its order: resize, cut out the middle, scale to small numbers, take off the
mean and divide by the spread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx.arrays import Array
from rlx.errors import CapabilityError
from rlx.formats.images import BICUBIC, BILINEAR, FILTERS, NEAREST, resize
from rlx.formats.tensor_file import broken, quoted
from rlx.models.load import Checkpoint
from rlx.models.sidecar_json import JsonObject

FILE = "preprocessor_config.json"
MOST = 1 << 14  # pixels along a side
# Steps that some processors take and that are not taken here: with these values they change nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "do_pad": (None, False), "do_thumbnail": (None, False), "do_align_long_axis": (None, False),
    "rescale_offset": (None, False), "crop_pct": (None,), "do_color_quantize": (None, False),
    "do_split_image": (None, False), "do_image_splitting": (None, False), "do_pan_and_scan": (None, False),
}  # fmt: skip
# What processors do where their files do not say: how to resize, and whether one number is the shorter side.
_PROCESSORS = {"Bit": (BICUBIC, True), "CLIP": (BICUBIC, True), "Siglip": (BICUBIC, False), "DeiT": (BICUBIC, False)}


@dataclass(frozen=True)
class ImageSettings:
    """What a model's files say of its images."""

    source: str = ""  # the file that says it; empty where there is none
    size: tuple[int, int] | None = None  # height and width to resize to
    shorter: int | None = None  # the shorter side to resize to, instead
    resample: int = BILINEAR  # by Pillow's numbers
    crop: tuple[int, int] | None = None
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    reversed: bool = False  # blue, green, red

    def prepare(self, image: Array) -> Array:
        """`[3, height, width]` f32 of `[height, width, 3]` bytes."""
        height, width = image.shape[:2]
        if self.size is not None:
            image = resize(image, *self.size, self.resample)
        elif self.shorter is not None:
            long = int(self.shorter * max(height, width) / min(height, width))
            if long > MOST:
                raise CapabilityError(f"image: {height} × {width} pixels would become {long} long, at most {MOST}")
            image = resize(image, *((self.shorter, long) if height < width else (long, self.shorter)), self.resample)
        image = image if self.crop is None else middle(image, *self.crop)
        image = image[:, :, ::-1] if self.reversed else image
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        made = (image * np.float32(self.scale) - mean) / std
        return np.ascontiguousarray(made.transpose(2, 0, 1), np.float32)


def middle(image: Array, height: int, width: int) -> Array:
    """The middle of an image; where it is too small, black lies around it."""
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


# -- what files say --------------------------------------------------------------------------------------------------
def read_image_settings(checkpoint: Checkpoint) -> ImageSettings:
    """The settings of an opened model. Steps that rlx does not have are a CapabilityError."""
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    found = JsonObject.read(folder / FILE)
    if not found.members:  # newer files keep it beside the tokenizer's part
        whole = JsonObject.read(folder / "processor_config.json")
        found = JsonObject(whole.path, whole.get("image_processor", dict) or {})
    return _settings(found) if found.members else ImageSettings()


def _settings(said: JsonObject) -> ImageSettings:
    for name, allowed in _NEUTRAL.items():
        value = said.members.get(name)
        if not any(value is a for a in allowed):
            raise CapabilityError(f"{said.path}: {name} is {quoted(value)}, which rlx does not have")
    kind = said.get("image_processor_type", str) or said.get("feature_extractor_type", str) or ""
    resample, shorter = next((v for name, v in _PROCESSORS.items() if kind.startswith(name)), (BILINEAR, False))
    given = said.get("resample", int)
    settings: dict[str, Any] = {"source": str(said.path), "resample": resample if given is None else given}
    if settings["resample"] not in (NEAREST, *FILTERS):
        raise broken(said.path, "resample", expected="0 to 5", actual=given)
    if said.get("do_resize", bool) is not False:
        settings |= _size(said, "size", shorter)
    if said.get("do_center_crop", bool):
        settings["crop"] = _size(said, "crop_size", False).get("size")
        if settings["crop"] is None:
            found = quoted(said.members["crop_size"])
            raise broken(said.path, "crop_size", expected="a height and a width", actual=found)
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
    """One number for a square or for the shorter side, or a height and a width."""
    found = said.get(name, int, dict, list)
    match found:
        case int():
            sides: list[Any] = [found]
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
                f"{said.path}: {name} is {quoted(found)}, which rlx does not have",
                hint="known: a number, a height and a width, a shortest_edge",
            )
    if not all(type(side) is int and 0 < side <= MOST for side in sides):
        raise broken(said.path, name, expected=f"1 to {MOST} pixels", actual=quoted(found))
    if shorter and len(sides) == 1:
        return {"shorter": sides[0]}
    return {"size": (sides[0], sides[-1])}


def _colours(said: JsonObject, name: str) -> tuple[float, ...]:
    found = said.get(name, list, int, float)
    if found is None:
        raise broken(said.path, f"{quoted(name)} is missing")
    values = found if isinstance(found, list) else [found] * 3
    if len(values) != 3 or not all(type(v) in (int, float) for v in values):
        raise broken(said.path, name, expected="a number for each of three colours", actual=quoted(found))
    return tuple(map(float, values))
