"""The keywords of `generate`, `chat` and `stream`, checked: for one prompt, or for each prompt of a list."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlx.engine.load_settings import as_int
from rlx.engine.request import Request
from rlx.engine.sampler import RANGES, Sampling, short_repr
from rlx.errors import RequestError
from rlx.fast_dataclass import dataclass

if TYPE_CHECKING:
    from rlx.engine.language_model import LanguageModel
    from rlx.engine.structured import Structure


@dataclass(frozen=True)
class GenerationSettings:
    """The checked settings of a request."""

    max_tokens: int | None
    stop: tuple[str, ...]
    logprobs: int
    sampling: Sampling
    structure: Structure | None = None

    @classmethod
    def of(cls, max_tokens: Any, stop: Any, logprobs: Any, sampling: Mapping[str, Any]) -> GenerationSettings:
        stop = () if stop is None else stop
        strings = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else (None,)
        if not all(isinstance(s, str) and s for s in strings):
            raise RequestError(f"stop: expected texts that are not empty, found {short_repr(stop)}")
        limit = None if max_tokens is None else checked_count("max_tokens", max_tokens)
        structure, plain = _structure(sampling)
        return cls(limit, strings, checked_count("logprobs", logprobs), Sampling.of(plain), structure)

    @classmethod
    def per_prompt(cls, common: Mapping[str, Any], prompts: int | None) -> list[GenerationSettings]:
        """The settings of each prompt, where a list has one value per prompt; None is a single prompt."""
        lists = {name: value for name, value in common.items() if _is_per_prompt(name, value)}
        for name, values in lists.items():
            count = f"{len(values)} value{'s' * (len(values) != 1)}"
            if prompts is None:
                raise RequestError(
                    f"generate: {name} has {count} for one prompt",
                    hint=f"a list of prompts takes a value for each: generate([prompt, prompt], {name}=[...])",
                )
            if len(values) != prompts:
                raise RequestError(f"generate: {name} has {count} for {prompts} prompts")
        if not lists:
            return [cls._of_keywords(**common)] * (1 if prompts is None else prompts)
        rows = zip(*lists.values(), strict=True)
        return [cls._of_keywords(**{**common, **dict(zip(lists, row, strict=True))}) for row in rows]

    @classmethod
    def _of_keywords(cls, max_tokens: Any, stop: Any, logprobs: Any, **sampling: Any) -> GenerationSettings:
        return cls.of(max_tokens, stop, logprobs, sampling)

    def request(self, model: LanguageModel, tokens: list[int], answer: bool = False) -> Request:
        """A request; each one follows the structure by itself."""
        sampling = self.sampling
        if self.structure is not None:
            sampling = replace(sampling, allowed=model.grammars.follow(self.structure, tokens, answer))
        return Request(tokens, self.max_tokens, self.stop, self.logprobs, sampling, answer)


def _is_per_prompt(name: str, value: Any) -> bool:
    """Whether a setting is a list with one value per prompt: of numbers, or of lists of stop strings."""
    if not isinstance(value, (list, tuple)):
        return False
    if name == "stop":  # a list of texts is for all prompts
        return any(item is None or isinstance(item, (list, tuple)) for item in value)
    return name in ("max_tokens", "logprobs", "seed", *RANGES)


def _structure(settings: Mapping[str, Any]) -> tuple[Structure | None, Mapping[str, Any]]:
    """The structure that settings ask for, and the other settings."""
    if not any(name in settings for name in ("schema", "regex", "choice", "grammar")):
        return None, settings
    from rlx.engine.structured import KINDS, Structure

    structure = Structure.of(settings)
    if structure is not None and settings.get("allowed") is not None:
        raise RequestError(f"sampling: allowed and {structure.kind} exclude each other")
    return structure, {name: value for name, value in settings.items() if name not in KINDS}


def checked_count(name: str, value: Any) -> int:
    """A whole number from 0; `logprobs=True` is 1."""
    count = 1 if value is True and name == "logprobs" else as_int(value)
    if count is None or count < 0:
        raise RequestError(f"{name}: expected a whole number from 0, found {short_repr(value)}")
    return count
