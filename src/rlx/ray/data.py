"""Classes for `map_batches` of Ray Data: a model per actor, columns in, columns out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlx.arrays import Array
from rlx.batch.generate_task import Generate
from rlx.engine.load import load
from rlx.errors import RequestError
from rlx.ray.cluster import assigned

Batch = Mapping[str, Array]  # columns; views of the object store, which cannot be written


class _Mapped:
    """A model in an actor. `settings` are those of `rlx.load`; threads and device are what Ray gave."""

    def __init__(self, model: str, column: str, output: str, settings: Mapping[str, Any]) -> None:
        self.model: Any = load(model, **{**assigned(), **settings})
        self.column, self.output = column, output

    def texts(self, batch: Batch) -> list[str]:
        if self.column not in batch:
            raise RequestError(f"map_batches: no column is called {self.column!r}, there are {', '.join(batch)}")
        return [str(text) for text in batch[self.column].tolist()]


class Embedder(_Mapped):
    """Adds a column with the vector of a text column: `ds.map_batches(rlx.ray.Embedder, ...)`."""

    def __init__(
        self, model: str = "minilm-l6", *, column: str = "text", output: str = "vector", prompt: str | None = None,
        **settings: Any,
    ) -> None:  # fmt: skip
        super().__init__(model, column, output, settings)
        self.prompt = prompt

    def __call__(self, batch: Batch) -> dict[str, Array]:
        return {**batch, self.output: self.model.embed(self.texts(batch), prompt=self.prompt)}


class Generator(_Mapped):
    """Adds a column with the texts after prompts; with `chat`, with answers to them.

    `sampling` are keywords of `LanguageModel.generate`. Without a seed of its own, each text is sampled by its prompt.
    """

    def __init__(
        self, model: str, *, column: str = "prompt", output: str = "completion", chat: bool = False,
        system: str | None = None, max_tokens: int | None = 256, stop: str | Sequence[str] = (),
        sampling: Mapping[str, Any] | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        super().__init__(model, column, output, settings)
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        self._task = Generate(str(model), {}, column, chat, system, max_tokens, stops, dict(sampling or {}))
        self._task.check(self.model)

    def __call__(self, batch: Batch) -> dict[str, Array]:
        completions = self._task.complete_texts(self.model, self.texts(batch))
        return {**batch, self.output: np.array([completion.text for completion in completions], object)}
