"""Vision models: vectors of images, preprocessed as the model's files say."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.arrays import Array
from rlx.engine.apply import apply_params, traced_outputs
from rlx.engine.capture import captured_values
from rlx.engine.interventions import run_of
from rlx.engine.load_settings import as_int
from rlx.engine.model import Model
from rlx.engine.sampler import short_repr
from rlx.errors import FormatError, RequestError
from rlx.fork_safe_locks import cached_property
from rlx.formats.images import as_pixels, read_image
from rlx.models.image_preprocessing import FILE, ImageSettings, read_image_settings
from rlx.runtime.compiled import CompiledGraph

if TYPE_CHECKING:
    from rlx.engine.edits import Edit
    from rlx.inspect.call_report import CallRecorder, CallReport

BATCH = 8  # images per batch: keeps all cores busy, while activations stay small


class VisionModel(Model):
    """A vision model: `encode_image` returns vectors of images. Thread-safe."""

    @cached_property
    def settings(self) -> ImageSettings:
        """Image preprocessing settings from the model's files."""
        return read_image_settings(self.checkpoint)

    @property
    def dim(self) -> int:
        """Size of a vector."""
        return self.facts.dim

    def encode_image(
        self, images: Any, *, tokens: bool = False, normalize: bool = False, batch_size: int = BATCH
    ) -> Array:
        """The vector `[dim]` of an image, or the vectors `[images, dim]` of a list of them, as f32.

        An image is a path, an array (`[height, width, 3]` of bytes, or of floats from 0 to 1) or a Pillow image. Files
        are PNG, PPM, PGM or NPY; with Pillow installed (the extra `vision`) any format works, and PNG is read
        faster. `tokens` returns the vectors of all tokens, `[tokens, dim]`: the class token and registers, if the model
        has them, then the patches row by row. `normalize` scales vectors to unit length.
        """
        self.check_usable()
        size = as_int(batch_size)
        if size is None or size < 1:
            raise RequestError(f"encode_image: batch_size is {short_repr(batch_size)}, expected a whole number from 1")
        one = _is_one(images)
        vectors = self._encode([images] if one else list(images), 1 if tokens else 0, size)
        if not vectors:
            return np.zeros((0, self.dim), np.float32)
        if normalize:
            vectors = [v / np.maximum(np.linalg.norm(v, axis=-1, keepdims=True), 1e-12) for v in vectors]
        if one:
            return vectors[0]
        if len({v.shape for v in vectors}) > 1:
            raise RequestError("encode_image: the images have different numbers of tokens", hint="give one at a time")
        return np.stack(vectors)

    def report(self, images: Any = None, *, batch_size: int = BATCH) -> CallReport:
        """Where the time of `encode_image(images)` goes: kernels and stages, reading images, Python.

        The call is made twice, and the second one is timed. Without images, one of noise is encoded.
        """
        self.check_usable()
        if images is None:
            side = self.checkpoint.config.image
            images = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)
        listed = [images] if _is_one(images) else list(images)
        return self._measured("encode_image", lambda recorder: self._encode(listed, 0, batch_size, recorder))

    def _encode(
        self, images: list[Any], output: int, batch_size: int, recorder: CallRecorder | None = None
    ) -> list[Array]:
        """An output of the model for each image, in batches."""
        vectors: list[Array] = []
        for start in range(0, len(images), batch_size):
            with nullcontext() if recorder is None else recorder.span("reading images"):
                pixels = [self.prepare(image, start + i) for i, image in enumerate(images[start : start + batch_size])]
            vectors += self._run_images(pixels, output, recorder)
        return vectors

    def prepare(self, image: Any, place: int = 0) -> Array:
        """Preprocess an image to the model's pixels `[3, height, width]`."""
        settings = self.settings
        if not settings.source:
            path = self.checkpoint.path
            raise FormatError(
                f"{path}: no {FILE} says how images are preprocessed", hint="it belongs next to the weights"
            )
        if isinstance(image, (str, os.PathLike)):
            return settings.prepare(read_image(image))
        if hasattr(image, "convert") and hasattr(image, "mode"):  # a Pillow image, whose array may be palette indices
            image = np.asarray(image.convert("RGB"))
        where = f"encode_image: image {place}"
        if not hasattr(image, "__array__"):
            raise RequestError(f"{where}: expected a path or an array, found {type(image).__name__}")
        return settings.prepare(as_pixels(image, where))

    def _run_images(self, images: list[Array], output: int, recorder: CallRecorder | None) -> list[Array]:
        """The output of the model for each image; images of the same size are batched."""
        sizes: dict[tuple[int, ...], list[int]] = {}
        for i, pixels in enumerate(images):
            sizes.setdefault(pixels.shape, []).append(i)
        results: dict[int, Array] = {}
        for rows in sizes.values():
            run = run_of(self.compiled, recorder)
            outputs = run(self.inputs(np.stack([images[i] for i in rows])))[output]
            results |= dict(zip(rows, outputs, strict=True))
        return [results[i] for i in range(len(images))]

    def inputs(self, pixels: Array) -> dict[str, Array]:
        """Graph inputs for preprocessed images `[images, 3, height, width]`."""
        inputs: dict[str, Array] = self.checkpoint.config.inputs(pixels)
        return inputs

    # -- looking inside --
    def run(
        self, image: Any, capture: Iterable[str] | str | None = (), edit: Mapping[str, Edit] | None = None
    ) -> dict[str, Array]:
        """Values inside the model by stage path, for one image; without `capture`, `pooled` and `states`."""
        self.check_usable()
        pixels = self.prepare(image)[None]
        return captured_values(self, capture, edit, lambda compiled, more: self._run_one(compiled, pixels, more))

    def apply(
        self, params: Mapping[str, Any], image: Any, *, edit: Mapping[str, Edit] | None = None,
        capture: Iterable[str] | str | None = None,
    ) -> Any:  # fmt: skip
        """Run the model on an image with other parameters: returns the hidden states `[tokens, dim]`.

        Under `rlx.grad` and `rlx.jit`, parameters may be traced arrays; see `Model.apply` for edits and captures.
        """
        from rlx.functional.tracers import current

        self.check_usable()
        pixels = self.prepare(image)[None]
        if current() is None and not edit and not capture:
            return apply_params(self, params, lambda compiled: self._run_one(compiled, pixels, {})[::-1])
        outputs, captured = traced_outputs(self, params, self.inputs(pixels), edit, capture)
        return captured if capture else outputs[-1][0]

    def _run_one(self, compiled: CompiledGraph, pixels: Array, more: Mapping[str, Array]) -> list[Array]:
        inputs = self.inputs(pixels) | {name: array[None] for name, array in more.items()}
        return [a[0] for a in compiled.run({name: inputs[name] for name in compiled.input_types})]


def _is_one(images: Any) -> bool:
    """Whether it is a single image. An array with four axes is a batch."""
    if isinstance(images, (str, bytes, os.PathLike)) or not isinstance(images, Iterable):
        return True
    return hasattr(images, "__array__") and np.asarray(images).ndim < 4
