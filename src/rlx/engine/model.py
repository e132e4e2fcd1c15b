"""Loaded models: what `rlx.load` gives. Text in, text or vectors out."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlx.engine.embed import embed_texts
from rlx.engine.generate import Decoder, generate_tokens
from rlx.engine.sampler import Sampler, Sampling
from rlx.errors import CapabilityError, RequestError
from rlx.formats.chat import ChatTemplate
from rlx.formats.tokenizer import Tokenizer
from rlx.hub.pull import resolve
from rlx.models.load import Checkpoint, open_checkpoint
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.session import Session

Array = np.ndarray[Any, Any]
LAST = -1  # in place of a token: the end of the text, with what was held back
CONTEXT = 4096  # positions, where the model has more and nothing else is asked


@dataclass(frozen=True)
class Completion:
    """A generated text and how it came about."""

    text: str
    tokens: list[int]
    finish_reason: str  # stop or length
    prompt_tokens: int
    seed: int
    seconds_prompt: float
    seconds_answer: float

    def __str__(self) -> str:
        return self.text


class Model:
    """A model ready to use. Safe from several threads; each generation has its own cache."""

    def __init__(self, checkpoint: Checkpoint, *, threads: int | None = None, context: int | None = None) -> None:
        self.checkpoint = checkpoint
        self.family = checkpoint.family
        longest = int(checkpoint.config.context)
        self.context = min(context or CONTEXT, longest)
        if context is not None and context > longest:
            raise RequestError(f"load: context {context} is asked for, the model has {longest}")
        if self.family.kind == "decoder":
            flow = self.family.flow(checkpoint.config, self.context, checkpoint.rope_factors)
        else:
            flow = self.family.flow(checkpoint.config)
        self.built = flow.build(checkpoint.weights)
        self.compiled: CompiledGraph = Session("cpu", threads=threads).compile(self.built.module)
        made = self.built.params
        for name in self.compiled.param_types:
            self.compiled.set_param(name, made[name] if name in made else checkpoint.weights.array(name))

    # -- parts --
    @property
    def tokenizer(self) -> Tokenizer:
        if self.checkpoint.tokenizer is None:
            raise CapabilityError(
                f"{self.checkpoint.path}: the model has no tokenizer", hint="put tokenizer.json beside it"
            )
        return self.checkpoint.tokenizer

    @functools.cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template, where the model has one."""
        source = self.tokenizer.chat_template
        if source is None:
            return None
        tokens = {"bos_token": self.tokenizer.bos_id, "eos_token": self.tokenizer.eos_id}
        named = {k: self.tokenizer.token_bytes(v).decode() for k, v in tokens.items() if v is not None}
        return ChatTemplate(source, **named)

    def _need(self, kind: str, what: str) -> None:
        if self.family.kind != kind:
            raise CapabilityError(f"{what}: {self.checkpoint.path.name} is a {self.family.name} {self.family.kind}")

    # -- text --
    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
    ) -> Iterator[str]:
        """Pieces of the continuation as they come; closing the iterator stops the work."""
        for piece, _ in self.pieces(self._tokens(prompt), max_tokens, sampling or Sampling(), stop):
            yield piece

    def generate(
        self, prompt: str | Sequence[int], *, max_tokens: int = 256, stop: Sequence[str] = (), **sampling: Any
    ) -> Completion:
        """The continuation of a prompt. Keywords are those of `Sampling`: temperature, top_k, top_p, seed, ..."""
        return self._complete(self._tokens(prompt), max_tokens, _settings(sampling), stop)

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        max_tokens: int = 256,
        stop: Sequence[str] = (),
        **sampling: Any,
    ) -> Completion:
        """The answer to a message, or to a conversation, through the model's chat template."""
        return self._complete(self.chat_tokens(messages), max_tokens, _settings(sampling), stop)

    def chat_tokens(self, messages: str | Sequence[Mapping[str, Any]]) -> list[int]:
        """A conversation as the model was trained to read it."""
        self._need("decoder", "chat")
        if self.template is None:
            raise CapabilityError("chat: the model has no chat template", hint="use generate(...)")
        talk = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        return self.tokenizer.encode(self.template.render(talk), add_special=False, parse_special=True)

    def logits(self, prompt: str | Sequence[int]) -> Array:
        """[seq, vocab]: the logits after each token of the prompt."""
        self._need("decoder", "logits")
        tokens = self._tokens(prompt)
        decoder = self._decoder()
        return np.stack([decoder.feed([[t]], [i])[0] for i, t in enumerate(tokens)])

    def _tokens(self, prompt: str | Sequence[int]) -> list[int]:
        self._need("decoder", "generate")
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _decoder(self) -> Decoder:
        assert self.built.cache is not None
        return Decoder.start(self.compiled, self.built.cache, 1, self.context)

    def pieces(
        self, tokens: list[int], max_tokens: int, sampling: Sampling, stop: Sequence[str]
    ) -> Iterator[tuple[str, int]]:
        """(text, token) of each step; text that may turn out to be the start of a stop string is held back."""
        text = self.tokenizer.stream(skip_special=True)
        held = ""
        for step in generate_tokens(
            self._decoder(), [tokens], sampling, max_tokens, frozenset(self.tokenizer.stop_ids)
        ):
            ((_, token),) = step
            held += "" if token in self.tokenizer.stop_ids else text.push(token)
            cut = min((held.find(s) for s in stop if s in held), default=-1)
            if cut >= 0:
                yield held[:cut], token
                return
            keep = max((n for s in stop for n in range(1, len(s)) if held.endswith(s[:n])), default=0)
            yield held[: len(held) - keep], token
            held = held[len(held) - keep :]
        yield held + text.flush(), LAST

    def _complete(self, tokens: list[int], max_tokens: int, sampling: Sampling, stop: Sequence[str]) -> Completion:
        seed = Sampler(sampling).seed
        begin = first = time.perf_counter()
        texts: list[str] = []
        made: list[int] = []
        cut = True  # by a stop string, unless the last piece comes
        for piece, token in self.pieces(tokens, max_tokens, replace(sampling, seed=seed), stop):
            first = first if made else time.perf_counter()
            texts.append(piece)
            if token == LAST:
                cut = False
            else:
                made.append(token)
        stopped = cut or made[-1] in self.tokenizer.stop_ids
        return Completion(
            text="".join(texts),
            tokens=made,
            finish_reason="stop" if stopped else "length",
            prompt_tokens=len(tokens),
            seed=seed,
            seconds_prompt=first - begin,
            seconds_answer=time.perf_counter() - first,
        )

    # -- vectors --
    def embed(self, texts: str | Sequence[str]) -> Array:
        """[texts, hidden] normalised vectors; one string gives one vector."""
        self._need("encoder", "embed")
        single = isinstance(texts, str)
        listed = [texts] if isinstance(texts, str) else list(texts)
        rows = embed_texts(self.compiled, self.tokenizer, listed, self.context)
        return rows[0] if single else rows

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        self.checkpoint.file.close()

    def __repr__(self) -> str:
        return f"<model {self.checkpoint.path.name!r}: {self.family.name} {self.family.kind}, context {self.context}>"


def _settings(given: Mapping[str, Any]) -> Sampling:
    try:
        return Sampling(**given)
    except TypeError as error:
        raise RequestError(f"sampling: {error}", hint=f"known: {', '.join(Sampling.__dataclass_fields__)}") from error


def load(name: str | Path, *, threads: int | None = None, context: int | None = None, offline: bool = False) -> Model:
    """A model by catalogue name, file, folder or `org/name[:quant]`."""
    files = resolve(name, offline=offline)
    return Model(open_checkpoint(files.path), threads=threads, context=context)
