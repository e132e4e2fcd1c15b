"""Vision models: images to vectors, made ready as the model's files say."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.arrays import Array
from rlx.engine.apply import apply_params
from rlx.engine.capture import captured_values
from rlx.engine.load_settings import whole
from rlx.engine.model import Model
from rlx.engine.sampler import shown
from rlx.errors import FormatError, RequestError
from rlx.fork_safe_locks import cached_property
from rlx.formats.images import as_pixels, read_image
from rlx.models.image_preprocessing import FILE, ImageSettings, read_image_settings
from rlx.runtime.compiled import CompiledGraph

if TYPE_CHECKING:
    from rlx.engine.edits import Edit

BATCH = 8  # images at a time: enough to keep all cores busy, while activations stay small


class VisionModel(Model):
    """A vision model: `encode_image` makes vectors of images. Safe from several threads at once."""

    @cached_property
    def settings(self) -> ImageSettings:
        """What the model's files say of its images."""
        return read_image_settings(self.checkpoint)

    @property
    def dim(self) -> int:
        """How many numbers a vector has."""
        return self.facts.dim

    def encode_image(
        self, images: Any, *, tokens: bool = False, normalize: bool = False, batch_size: int = BATCH
    ) -> Array:
        """The vector `[dim]` of an image, or the vectors `[images, dim]` of a list of them, as f32.

        An image is the path of a file, an array (`[height, width, 3]` of bytes, or of floats from 0 to 1) or one of
        Pillow's. Files are PNG, PPM, PGM or NPY; with Pillow installed (`pip install 'rlx[vision]'`) they are of any
        format, and PNG is read faster. With `tokens` it is the vectors of all its tokens, `[tokens, dim]`: the class
        token and registers, where the model has them, then the patches row by row. With `normalize` vectors have length
        1.
        """
        self._check_usable()
        size = whole(batch_size)
        if size is None or size < 1:
            raise RequestError(f"encode_image: batch_size is {shown(batch_size)}, expected a whole number from 1")
        one = _is_one(images)
        listed = [images] if one else list(images)
        found: list[Array] = []
        for start in range(0, len(listed), size):
            ready = [self.prepare(image, start + i) for i, image in enumerate(listed[start : start + size])]
            found += self._run_images(ready, 1 if tokens else 0)
        if not found:
            return np.zeros((0, self.dim), np.float32)
        if normalize:
            found = [v / np.maximum(np.linalg.norm(v, axis=-1, keepdims=True), 1e-12) for v in found]
        if one:
            return found[0]
        if len({v.shape for v in found}) > 1:
            raise RequestError("encode_image: the images have different numbers of tokens", hint="give one at a time")
        return np.stack(found)

    def prepare(self, image: Any, place: int = 0) -> Array:
        """The pixels `[3, height, width]` that the model sees of an image."""
        settings = self.settings
        if not settings.source:
            path = self.checkpoint.path
            raise FormatError(f"{path}: no {FILE} says how images are made ready", hint="it lies beside the weights")
        if isinstance(image, (str, os.PathLike)):
            return settings.prepare(read_image(image))
        if hasattr(image, "convert") and hasattr(image, "mode"):  # Pillow's, whose arrays may be indices of colours
            image = np.asarray(image.convert("RGB"))
        where = f"encode_image: image {place}"
        if not hasattr(image, "__array__"):
            raise RequestError(f"{where}: expected a path or an array, found {type(image).__name__}")
        return settings.prepare(as_pixels(image, where))

    def _run_images(self, ready: list[Array], output: int) -> list[Array]:
        """What the model gives for each image; those of one size are computed together."""
        sizes: dict[tuple[int, ...], list[int]] = {}
        for i, pixels in enumerate(ready):
            sizes.setdefault(pixels.shape, []).append(i)
        found: dict[int, Array] = {}
        for rows in sizes.values():
            made = self.compiled.run(self.inputs(np.stack([ready[i] for i in rows])))[output]
            found |= dict(zip(rows, made, strict=True))
        return [found[i] for i in range(len(ready))]

    def inputs(self, pixels: Array) -> dict[str, Array]:
        """What the graph wants for images that are made ready, `[images, 3, height, width]`."""
        found: dict[str, Array] = self.checkpoint.config.inputs(pixels)
        return found

    # -- looking inside --
    def run(
        self, image: Any, capture: Iterable[str] | str | None = (), edit: Mapping[str, Edit] | None = None
    ) -> dict[str, Array]:
        """Values inside the model by stage path, for one image; without `capture`, `pooled` and `states`."""
        self._check_usable()
        pixels = self.prepare(image)[None]
        return captured_values(self, capture, edit, lambda compiled, more: self._of_one(compiled, pixels, more))

    def apply(self, params: Mapping[str, Any], image: Any) -> Array:
        """The hidden states `[tokens, dim]` that the model computes of an image with other parameters."""
        self._check_usable()
        pixels = self.prepare(image)[None]
        return apply_params(self, params, lambda compiled: self._of_one(compiled, pixels, {})[::-1])

    def _of_one(self, compiled: CompiledGraph, pixels: Array, more: Mapping[str, Array]) -> list[Array]:
        inputs = self.inputs(pixels) | {name: array[None] for name, array in more.items()}
        return [a[0] for a in compiled.run({name: inputs[name] for name in compiled.input_types})]


def _is_one(images: Any) -> bool:
    """Whether it is one image. An array with four axes is several."""
    if isinstance(images, (str, bytes, os.PathLike)) or not isinstance(images, Iterable):
        return True
    return hasattr(images, "__array__") and np.asarray(images).ndim < 4
