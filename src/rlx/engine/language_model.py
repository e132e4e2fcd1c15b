"""Language models. `generate` continues a raw text, `chat` answers through the model's chat template."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, overload

import numpy as np

from rlx.arrays import Array
from rlx.engine import call_sizes
from rlx.engine.counters import GrammarTimes
from rlx.engine.decoder import Decoder
from rlx.engine.interventions import Captures, Execution, execution
from rlx.engine.kv_cache import aligned
from rlx.engine.load_settings import as_int
from rlx.engine.logs import warn
from rlx.engine.model import NOTHING, Model
from rlx.engine.page_pool import PagePool
from rlx.engine.request import Request, Ticket
from rlx.engine.sampler import RANGES, Sampler, Sampling, short_repr
from rlx.engine.scheduler import Scheduler
from rlx.engine.sequence import Sequence as TokenSequence
from rlx.engine.sequence import Timings as Timings
from rlx.engine.sequence import Usage as Usage
from rlx.errors import CapabilityError, ContextError, FormatError, NotEndedError, RequestError, RlxError, shortened
from rlx.fast_dataclass import dataclass
from rlx.fork_safe_locks import cached_property
from rlx.formats.tokenizer import CHARS_PER_ID
from rlx.free_memory import require
from rlx.runtime.compiled import CompiledGraph
from rlx.types import TensorType, sym

if TYPE_CHECKING:
    from rlx.engine.async_stream import AsyncTextStream
    from rlx.engine.edits import Edit
    from rlx.engine.logprobs import Logprob, Score, TokenBytes
    from rlx.engine.structured import Constraint, GrammarCompiler, Structure
    from rlx.engine.tools import ToolCall, ToolFormat
    from rlx.flow.built import BuiltModel
    from rlx.formats.chat import ChatTemplate
    from rlx.inspect.call_report import CallRecorder, CallReport

Messages = Sequence[Mapping[str, Any]]
MAX_CHARS = 256  # of messages per token of the context: templates drop some text, but not that much
SHORT = 64  # characters: a text that is not too long for any template
LOGIT_BYTES = 64 << 20  # of temporary logits per chunk, besides the result


@dataclass(frozen=True)
class Completion:
    """A generated text with its tokens, usage and timings. `str(completion)` is the text."""

    text: str
    tokens: list[int]  # including those of a stop string and the end-of-text token
    finish_reason: str  # "stop": the model or a stop string ended it; "length"; "closed": a stream was closed early
    usage: Usage
    timings: Timings
    seed: int  # reproduces the text
    fingerprint: str
    logprobs: list[Logprob] | None = None
    captured: dict[str, Array] | None = None  # values by stage: a row per token of prompt and text but the last
    tool_calls: tuple[ToolCall, ...] = ()  # of `chat(..., tools=...)`, with results where `chat` has called them

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<completion {shortened(self.text, 60)!r}: {len(self.tokens)} tokens, {self.finish_reason}>"

    def _repr_html_(self) -> str:
        from rlx.notebook import box, note, prose  # few programs need it

        usage, times = self.usage, self.timings
        cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
        counts = (
            f"{usage.prompt_tokens} prompt tokens{cached}, {usage.completion_tokens} generated, {self.finish_reason}"
        )
        speed = f"; {times.answer_per_second:.1f} tokens/s" if times.answer_per_second else ""
        return box("completion", prose(self.text), note(f"{counts}{speed}; seed {self.seed}"))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Called for missing attributes: names of other libraries raise an explanation."""
            from rlx.engine.foreign_names import missing_attribute  # only errors need it

            raise missing_attribute(self, name)


class TextStream(Iterator[str]):
    """Iterates over pieces of a text while it is generated. Use it in `with`, or close it, to stop early.

    Closing, from any thread, stops the computation within one decode step or prefill chunk. `completion` is available
    once the stream has ended or was closed; `text`, `tokens` and `logprobs` are what there is so far.
    """

    def __init__(self, model: LanguageModel, sequence: TokenSequence, run: Execution) -> None:
        self._model = model
        self._sequence = sequence
        self._captures = run.captures
        scheduler, new = model._scheduler(run, 1), list[str]()
        self._ticket = scheduler.add(sequence, on_piece=lambda _, piece: new.append(piece))
        self._pieces = _pieces(model, scheduler, self._ticket, new)

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def text(self) -> str:
        """The text so far: all pieces that were returned."""
        return self._sequence.text

    @property
    def tokens(self) -> list[int]:
        """The tokens so far. A piece may be the text of several: one token need not be a whole character."""
        return list(self._sequence.tokens)

    @property
    def logprobs(self) -> list[Logprob] | None:
        """The log-probabilities of `tokens`; None unless `logprobs=` was given."""
        logprobs = self._sequence.logprobs
        return None if logprobs is None else list(logprobs)

    def close(self) -> None:
        """Stop generating and release the cache for other calls."""
        self._ticket.cancel()
        with suppress(ValueError):  # the generator runs in another thread and ends by itself
            self._pieces.close()

    def _not_ended(self) -> NotEndedError:
        return NotEndedError("stream: it has not ended", hint="read it to its end or close it")

    @property
    def completion(self) -> Completion:
        """The text so far, its tokens, usage and timings. Raises NotEndedError while the stream is running."""
        if inspect.getgeneratorstate(self._pieces) != inspect.GEN_CLOSED:
            raise self._not_ended()
        return self._model.completion_of(self._sequence, self._captures)

    def __repr__(self) -> str:
        ended = inspect.getgeneratorstate(self._pieces) == inspect.GEN_CLOSED
        state = "ended" if ended else "running"
        return f"<stream {shortened(self.text, 60)!r}: {len(self._sequence.tokens)} tokens, {state}>"

    def _repr_html_(self) -> str:
        from rlx.notebook import box, note, prose  # few programs need it

        return box("stream", prose(self.text), note(repr(self).rpartition(": ")[2].removesuffix(">")))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Called for missing attributes: names of other libraries raise an explanation."""
            if name == "completion":
                raise self._not_ended()
            hint = ": close() stops it" if name in ("stop", "cancel", "abort", "stop_event", "interrupt") else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pieces(model: LanguageModel, scheduler: Scheduler, ticket: Ticket, new: list[str]) -> Generator[str, None, None]:
    """Not a method: that would keep the stream alive, so leaving a loop by `break` would not close it."""
    with closing(scheduler):
        model.check_usable()  # again: the stream may start long after it was created
        while not ticket.done:
            scheduler.step()
            pieces = [piece for piece in new if piece]
            new.clear()
            yield from pieces
        if ticket.exception is not None:
            raise ticket.exception


class LanguageModel(Model):
    """A decoder. Thread-safe: each call has its own KV cache, and later prompts with the same prefix reuse it."""

    caches: PagePool  # pages of running sequences and of the prefix cache

    def build_graph(self, capture: Sequence[str] | None = None) -> BuiltModel:
        """The main graph also samples; graphs with captures do not."""
        from rlx.engine.sampling_graph import with_sampler  # a warm start builds no graph

        built = super().build_graph(capture)
        return with_sampler(built, self.vocab_size, feeds=self.runs_behind) if capture is None else built

    # -- parts --
    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template; None if the model has none."""
        from rlx.formats.chat import ChatTemplate  # jinja2 is slow to import, and raw text does not need it

        source = self.tokenizer.chat_template
        if source is None:
            return None
        tokens = {"bos_token": self.tokenizer.bos_id, "eos_token": self.tokenizer.eos_id}
        named = {k: self.tokenizer.token_bytes(v).decode() for k, v in tokens.items() if v is not None}
        return ChatTemplate(source, **named)

    @cached_property
    def vocab_size(self) -> int:
        """Size of the vocabulary. The model may have logits for more tokens, as padding."""
        logits = self.facts.vocab
        tokenizer = self.checkpoint.tokenizer
        return logits if tokenizer is None else min(logits, tokenizer.vocab_size)

    @cached_property
    def thinking(self) -> tuple[str, str] | None:
        """The markers around the model's thoughts, by its chat template; None if it does not think."""
        from rlx.engine.thinking import learn_thinking

        source = None if self.checkpoint.tokenizer is None else self.tokenizer.chat_template
        return None if source is None or self.template is None else learn_thinking(self.template, source)

    @cached_property
    def tool_format(self) -> ToolFormat:
        """How the model writes tool calls, learnt from its chat template; raises CapabilityError if it writes none."""
        from rlx.engine.tools import TOOL_MODELS, learn_format

        if self.template is None:
            raise CapabilityError(f"tools: {self.name} has no chat template", hint=TOOL_MODELS)
        return learn_format(self.template)

    @cached_property
    def marker_ids(self) -> frozenset[int]:
        """Special tokens that are part of answers: markers of thoughts and of tool calls."""
        source = self.tokenizer.chat_template or ""
        texts = list(self.thinking or ())
        if "tool_calls" in source:
            with suppress(CapabilityError):
                texts += self.tool_format.markers
        spans = (span for text in texts for span in self.tokenizer.special_spans(text))
        return frozenset(token for _, _, token in spans) - frozenset(self.tokenizer.stop_ids)

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Compiles grammars for structured output; needs llguidance (the extra `serve`)."""
        from rlx.engine.structured import GrammarCompiler

        return GrammarCompiler(self.tokenizer, self.vocab_size, thinking=self.thinking, times=self.grammar_times)

    @cached_property
    def grammar_times(self) -> GrammarTimes:
        """How long grammars take, since the model was loaded."""
        return GrammarTimes()

    def chat_tokens(
        self, messages: str | Messages, *, system: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any,
    ) -> list[int]:  # fmt: skip
        """Token ids of a message or conversation, rendered by the chat template; `system` is its system message.

        `tools` are descriptions of functions in OpenAI's form. `variables` are those of the template, such as
        `enable_thinking=False`.
        """
        if self.template is None:
            raise CapabilityError(f"chat: {self.name} has no chat template", hint="use generate(...)")
        messages = _conversation(messages, system)
        size = _characters(messages) + _characters(tools or ())
        if size > MAX_CHARS * self.context:
            raise self._too_long("chat", f"{size:,} characters have")
        try:
            if size > CHARS_PER_ID * self.context:
                prompt = self.template.render(messages, tools=tools, **variables)
                if len(self.tokenizer.clip_text(prompt, self.context, parse_special=True)) < len(prompt):
                    raise self._too_long("chat", f"the conversation of {size:,} characters has")
            return self.template.encode(self.tokenizer, messages, tools=tools, **variables)
        except FormatError as error:
            if size > SHORT and self._renders(_shorten(messages)):
                raise RequestError(
                    f"chat: {size:,} characters are more than the model's chat template takes: {error}",
                    hint="shorten the conversation",
                ) from error
            if not self._renders([{"role": "user", "content": "x"}]):
                raise  # the template's fault
            raise RequestError(f"messages: the model's chat template does not take them: {error}") from error

    def _renders(self, messages: Messages) -> bool:
        """Whether the chat template renders a conversation without error."""
        try:
            assert self.template is not None
            self.template.render(messages)
        except RlxError:
            return False
        return True

    # -- verbs --
    @overload
    def generate(
        self, prompt: str | Sequence[int], *, max_tokens: int | None = 256, stop: str | Sequence[str] = (),
        logprobs: int = 0, edit: Mapping[str, Edit] | None = None, capture: str | Iterable[str] | None = None,
        trace: str | Path | None = None, **sampling: Any,
    ) -> Completion: ...  # fmt: skip

    @overload
    def generate(
        self, prompt: Sequence[str] | Sequence[Sequence[int]], *,
        max_tokens: int | Sequence[int | None] | None = 256,
        stop: str | Sequence[str] | Sequence[Sequence[str]] = (), logprobs: int | Sequence[int] = 0,
        edit: Mapping[str, Edit] | None = None, capture: str | Iterable[str] | None = None,
        trace: str | Path | None = None, **sampling: Any,
    ) -> list[Completion]: ...  # fmt: skip

    def generate(
        self, prompt: Any, *, max_tokens: Any = 256, stop: Any = (), logprobs: Any = 0,
        edit: Mapping[str, Edit] | None = None, capture: str | Iterable[str] | None = None,
        trace: str | Path | None = None, **sampling: Any,
    ) -> Completion | list[Completion]:  # fmt: skip
        """Continue a text or token ids, without a chat template. A list of prompts returns a list of completions.

        `max_tokens` limits the length (None: as long as the context allows). If the context has less room than that,
        the text is cut there and a warning is logged. The text ends before the first `stop` string. `logprobs=n`
        returns the log-probability of each token and of the n likeliest ones (True: 1). The other keywords are those of
        `Sampling`: temperature (default 0: the likeliest token), top_k, top_p, min_p, repetition_penalty,
        frequency_penalty, presence_penalty, logit_bias, allowed, logits_processor, seed.

        With a list of prompts, every setting that is a number may be a list, with one number per prompt, and `stop` a
        list of lists: `generate([a, b], temperature=[0, 0.5], stop=[["."], []])`.

        One of `schema` (a JSON schema or a pydantic class), `regex`, `choice` (a list of texts) and `grammar` (Lark or
        GBNF) makes the text follow it; what cannot be enforced is an error. Such a text is complete unless its
        `finish_reason` is "length".

        `edit={"layers.3": f}` replaces the value of a stage by `f(value)`, for every token of prompt and text. `f` is
        traced and compiled: it gets `[tokens, ...]` and treats tokens one by one, as in `lambda x: x + 4.0 * vector`.
        Its numbers are run-time inputs, so other ones need no compilation. `capture=["layers.*"]` returns the values
        of stages in `completion.captured`, with a row for every token that ran: all but the last one.

        `trace` is a file for a timeline of the whole call, for ui.perfetto.dev or chrome://tracing.
        """
        self.check_usable()
        many = _is_batch(prompt)
        common = {"max_tokens": max_tokens, "stop": stop, "logprobs": logprobs, **sampling}
        settings = _Settings.per_prompt(common, len(prompt) if many else None)

        def call(recorder: CallRecorder | None) -> list[Completion]:
            start = execution(self, edit, capture, recorder)
            places = [f"generate: prompt {i}" for i in range(len(prompt))] if many else ["generate"]
            with _tokenizing(recorder):
                rows = zip(prompt if many else [prompt], places, strict=True)
                tokens = [self.prompt_ids(p, where) for p, where in rows]
            requests = [s.request(self, t) for s, t in zip(settings, tokens, strict=True)]
            sequences = [self.new_sequence(r, where) for r, where in zip(requests, places, strict=True)]
            return self._complete(_watched(sequences, recorder), start)

        completions = self._recorded(trace, "generate", call)
        return completions if many else completions[0]

    def chat(
        self, messages: str | Messages, *, system: str | None = None, tools: Sequence[Any] | None = None,
        tool_choice: Any = None, max_tokens: int | None = 256, stop: str | Sequence[str] = (), logprobs: int = 0,
        edit: Mapping[str, Edit] | None = None, capture: str | Iterable[str] | None = None,
        trace: str | Path | None = None, **sampling: Any,
    ) -> Completion:  # fmt: skip
        """Answer a message or a conversation through the model's chat template; the keywords are those of `generate`.

        A conversation is a list of messages such as `{"role": "user", "content": "Hello"}`; append each answer with the
        role `assistant` and the next question to continue it. Earlier turns come from the
        prefix cache. `system` is the system message.

        `tools` are Python functions with typed arguments: the model may call them, `chat` runs them and gives it the
        results until it answers with text. Tools in OpenAI's form are not run: the calls are in
        `completion.tool_calls`. `tool_choice` is "auto" (the model decides), "none", "required" (at least one call),
        or the name of the function that must be called. `completion.tool_calls` lists all calls, and may be the
        `tool_calls` of a message. An exception in a function is raised by `chat`. With `schema` and the like, an answer
        that calls no tool follows it; a call that is required excludes it.
        """
        self.check_usable()
        settings = _Settings.of(max_tokens, stop, logprobs, sampling)
        _warn_of_answer(messages, "chat")
        if tools is not None and not (isinstance(tools, Sequence) and len(tools) == 0):  # `tools=[]`: no tools
            from rlx.engine.tool_loop import answer_with_tools

            if edit is not None or capture is not None or trace is not None:
                raise RequestError("chat: tools exclude edit, capture and trace")
            conversation = _conversation(messages, system)

            def answer(tokens: list[int], allowed: Constraint | None) -> Completion:
                return self._answer(tokens, settings, allowed)

            return answer_with_tools(self, conversation, tools, tool_choice, answer, settings.structure)

        def call(recorder: CallRecorder | None) -> Completion:
            start = execution(self, edit, capture, recorder)
            with _tokenizing(recorder):
                tokens = self.chat_tokens(messages, system=system)
            sequence = self.new_sequence(settings.request(self, tokens, answer=True), "chat")
            return self._complete(_watched([sequence], recorder), start)[0]

        return self._recorded(trace, "chat", call)

    def _answer(self, tokens: list[int], settings: _Settings, allowed: Constraint | None) -> Completion:
        """The completion of a rendered conversation under a constraint, which has the structure in it."""
        if allowed is not None:
            if settings.sampling.allowed is not None:
                raise RequestError("sampling: allowed and tools exclude each other", hint="leave one out")
            settings = replace(settings, structure=None, sampling=replace(settings.sampling, allowed=allowed))
        sequence = self.new_sequence(settings.request(self, tokens, answer=True), "chat")
        return self._complete([sequence], execution(self, None, None))[0]

    def astream(self, prompt: str | Sequence[int] | Messages, **settings: Any) -> AsyncTextStream:
        """`stream` for asyncio: `async for piece in model.astream(...)`. The keywords are those of `stream`.

        The model runs in a thread of its own. Leaving the loop, or cancelling the task, stops it within a step; `async
        with` makes sure of it.
        """
        from rlx.engine.async_stream import AsyncTextStream

        return AsyncTextStream(self.stream(prompt, **settings))

    def stream(
        self, prompt: str | Sequence[int] | Messages, *, chat: bool = False, system: str | None = None,
        max_tokens: int | None = 256, stop: str | Sequence[str] = (), logprobs: int = 0,
        edit: Mapping[str, Edit] | None = None, capture: str | Iterable[str] | None = None, **sampling: Any,
    ) -> TextStream:  # fmt: skip
        """Generate a text piece by piece: the continuation of a text or token ids, or the answer to messages.

        `chat=True` treats a text as a user's message, and token ids as a rendered conversation that is to be answered;
        `system` adds a system message. The other keywords are those of `generate`.
        """
        self.check_usable()
        if "trace" in sampling:
            raise RequestError("stream: has no trace", hint="generate(..., trace=...) and chat write one")
        settings = _Settings.of(max_tokens, stop, logprobs, sampling)
        is_chat = _is_conversation(prompt) or (chat and isinstance(prompt, str))
        if system is not None and not is_chat:
            raise RequestError("stream: a system message is for a conversation", hint="stream(text, chat=True)")
        if is_chat:
            _warn_of_answer(prompt, "stream")
        start = execution(self, edit, capture)
        tokens = (
            self.chat_tokens(prompt, system=system) if is_chat else self.prompt_ids(prompt, "stream")  # type: ignore[arg-type]
        )
        return TextStream(self, self.new_sequence(settings.request(self, tokens, chat or is_chat), "stream"), start())

    @overload
    def score(  # type: ignore[overload-overlap]  # a str is also a sequence of strings
        self, text: str | Sequence[int], *, prompt: str | Sequence[int] | None = None, logprobs: int = 0
    ) -> Score: ...

    @overload
    def score(
        self, text: Sequence[str] | Sequence[Sequence[int]], *, prompt: str | Sequence[int] | None = None,
        logprobs: int = 0,
    ) -> list[Score]: ...  # fmt: skip

    def score(
        self, text: Any, *more: Any, prompt: str | Sequence[int] | None = None, logprobs: int = 0, **unknown: Any
    ) -> Score | list[Score]:
        """Log-probabilities of a given text, token by token; a list of texts returns a list of scores.

        With a `prompt`, those of the text after it, as for choosing the likeliest of several answers; after a
        conversation it is `prompt=model.chat_tokens(messages)`. `logprobs=n` also returns the n likeliest
        tokens at each position.
        """
        from rlx.engine.scoring import scores_of, text_after  # a warm start generates

        self.check_usable()
        if more:
            raise RequestError(
                "score: takes one text, or a list", hint="score(text, prompt=...) is the text after a prompt"
            )
        for name in unknown:
            from rlx.engine.foreign_names import score_hint  # only errors need it

            raise RequestError(f"score: no setting is called {name!r}", hint=score_hint(name))
        many, top = _is_batch(text, "score"), _count("logprobs", logprobs)
        rows = [text_after(self, t, prompt, f"score: text {i}") for i, t in enumerate(text if many else [text])]
        scores = scores_of(self, rows, top)
        return scores if many else scores[0]

    def report(self, prompt: str | Sequence[int] | None = None, *, max_tokens: int = 32, **settings: Any) -> CallReport:
        """Where the time of `generate(prompt, ...)` goes: phases, kernels and stages, tokenizing, sampling, Python.

        The call is made twice, and the second one is timed. Without a prompt it is a random one of 64 tokens; the end
        of the text is then ignored, so that `max_tokens` are generated. Time stamps cost a few percent.
        """
        self.check_usable()
        checked = _Settings.of(max_tokens, settings.pop("stop", ()), settings.pop("logprobs", 0), settings)
        size = min(64, max(self.context - max_tokens, 1))
        random = np.random.default_rng(0).integers(0, self.vocab_size, size).tolist() if prompt is None else []

        def call(recorder: CallRecorder) -> None:
            self.caches.clear()  # so that the prompt is prefilled
            start = execution(self, None, None, recorder)
            with _tokenizing(recorder):
                tokens = random if prompt is None else self.prompt_ids(prompt, "report")
            sequence = self.new_sequence(checked.request(self, tokens), "report", ends=prompt is not None)
            self._complete(_watched([sequence], recorder), start)

        return self._measured("generate", call)

    def logits(self, prompt: str | Sequence[int]) -> Array:
        """Logits `[seq, vocab]` after each token of the prompt."""
        self.check_usable()
        compiled = self.compiled
        return self._values(compiled, self.check_fits(self.prompt_ids(prompt, "logits"), 0, "logits"))[0]

    def _values(self, compiled: CompiledGraph, ids: Sequence[int], more: Mapping[str, Array] = NOTHING) -> list[Array]:
        decoder = Decoder(compiled, self.caches.new(1))
        chunk = aligned(min(LOGIT_BYTES // (4 * self.facts.vocab), call_sizes.CHUNK), self.caches.spec)
        results: list[Array] = []
        for at in range(0, len(ids), chunk):
            piece = ids[at : at + chunk]
            inputs = {name: array[at : at + len(piece)] for name, array in more.items()}
            inputs = {name: a[None] if _has_rows(compiled.input_types[name]) else a for name, a in inputs.items()}
            every = np.arange(len(piece), dtype=np.int32)
            parts = decoder.run([piece], [at], every, more=inputs, lengths=[len(ids)])
            # Values of stages are [batch, seq, ...]; those after the last-token gather are [seq, ...].
            types = compiled.signature.outputs
            if decoder.samples:
                parts, types = parts[: -decoder.sampled_outputs], types[: -decoder.sampled_outputs]
            parts = [np.asarray(a)[0] if _has_rows(t) else np.asarray(a) for a, t in zip(parts, types, strict=True)]
            if not results:
                size = sum(a[:1].nbytes for a in parts) * len(ids)
                require(f"the values of {len(ids)} tokens", size, hint="fewer tokens, or fewer stages")
                results = [np.empty((len(ids), *a.shape[1:]), a.dtype) for a in parts]
            for array, part in zip(results, parts, strict=True):
                array[at : at + len(piece)] = part
        return results

    # -- inside --
    def check_fits(
        self, tokens: list[int], max_tokens: int | None, where: str, context: int | None = None
    ) -> list[int]:
        """Return the tokens of a prompt; raises if there are none, or too many for the context."""
        if not tokens:
            raise RequestError(f"{where}: there are no tokens", hint="give a text or token ids")
        context = self.context if context is None else context
        size, room = len(tokens), context - len(tokens)
        if room < 0 or (room == 0 and max_tokens != 0):
            raise ContextError(
                f"{where}: the prompt has {size} token{'s' * (size != 1)}, the context holds {context}"
                + (" and an answer needs room too" if room == 0 else ""),
                context=context,
                tokens=size,
                hint="shorten the prompt or load the model with a larger context=",
            )
        return tokens

    def new_sequence(
        self, request: Request, where: str, *, ends: bool = True, context: int | None = None
    ) -> TokenSequence:
        """A checked sequence; unless it `ends`, the model's end-of-text tokens are tokens like others."""
        context = self.context if context is None else context
        tokens = self.check_fits(self.token_ids(request.tokens, where), request.max_tokens, where, context)
        tokenizer = self.checkpoint.tokenizer
        room = context - len(tokens)
        text, stop_ids = None, frozenset[int]()
        if tokenizer is not None:
            # An answer is a new text; a continuation keeps the space before its first word.
            continues = not request.answer and not tokenizer.special_ids.issuperset(tokens)
            keep = self.marker_ids if request.answer else frozenset[int]()
            text = tokenizer.stream(skip_special=True, continues=continues, keep=keep)
            stop_ids = frozenset(tokenizer.stop_ids if ends else ())
        sampler = Sampler(request.sampling, tokens, self.vocab_size, scored=request.logprobs > 0)
        return TokenSequence(
            tokens, sampler, vocab=self.vocab_size, text=text,
            limit=room if request.max_tokens is None else min(request.max_tokens, room),
            asked=request.max_tokens, stop=request.stop, stop_ids=stop_ids, top=request.logprobs,
            token_bytes=self.token_bytes,
        )  # fmt: skip

    @property
    def token_bytes(self) -> TokenBytes | None:
        """The function from a token id to its bytes; None without a tokenizer."""
        tokenizer = self.checkpoint.tokenizer
        return None if tokenizer is None else tokenizer.token_bytes

    def _complete(self, sequences: list[TokenSequence], start: Callable[[], Execution]) -> list[Completion]:
        run = start()
        if run.captures is not None and len(sequences) > 1:  # a record has the values of one sequence
            return [self._complete([sequence], start)[0] for sequence in sequences]
        scheduler = self._scheduler(run, len(sequences))
        with closing(scheduler):
            # longest first: prompts of similar length are prefilled together
            tickets = [scheduler.add(s) for s in sorted(sequences, key=lambda s: -len(s.prompt))]
            busy = True
            while busy:
                busy = scheduler.step()
                for ticket in tickets:
                    if ticket.exception is not None:
                        raise ticket.exception
        return [self.completion_of(s, run.captures) for s in sequences]

    def _scheduler(self, run: Execution, count: int) -> Scheduler:
        """A scheduler for the sequences of one call: nobody waits for the next token, so prompts come first."""
        rows = max(min(count, call_sizes.ROWS), 1)
        return Scheduler(self, rows=rows, max_queued=count, stall=math.inf, execution=run)

    def completion_of(self, s: TokenSequence, captures: Captures | None = None) -> Completion:
        """The completion of a sequence that has ended."""
        return Completion(
            s.text, s.tokens, s.finish_reason or "closed", s.usage, s.timings, s.sampler.seed,
            self.fingerprint(s.sampler.seed), s.logprobs,
            None if captures is None else captures.arrays(len(s.prompt)),
        )  # fmt: skip


@dataclass(frozen=True)
class _Settings:
    """The checked settings of a request."""

    max_tokens: int | None
    stop: tuple[str, ...]
    logprobs: int
    sampling: Sampling
    structure: Structure | None = None

    @classmethod
    def of(cls, max_tokens: Any, stop: Any, logprobs: Any, sampling: Mapping[str, Any]) -> _Settings:
        stop = () if stop is None else stop
        strings = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else (None,)
        if not all(isinstance(s, str) and s for s in strings):
            raise RequestError(f"stop: expected texts that are not empty, found {short_repr(stop)}")
        limit = None if max_tokens is None else _count("max_tokens", max_tokens)
        structure, plain = _structure(sampling)
        return cls(limit, strings, _count("logprobs", logprobs), Sampling.of(plain), structure)

    @classmethod
    def per_prompt(cls, common: Mapping[str, Any], prompts: int | None) -> list[_Settings]:
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
    def _of_keywords(cls, max_tokens: Any, stop: Any, logprobs: Any, **sampling: Any) -> _Settings:
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


def _conversation(messages: str | Messages, system: str | None) -> Messages:
    """A text as a user's message; with a system message before the others."""
    conversation = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    if isinstance(messages, (list, tuple)) and any(isinstance(m, (list, tuple)) for m in messages):
        raise RequestError(
            f"chat: found a list of {len(messages)} lists, expected one conversation, a list of messages",
            hint="several conversations: generate([model.chat_tokens(a), model.chat_tokens(b)])",
        )
    if isinstance(messages, Mapping):
        hint = 'a conversation is a list of messages: [{"role": "user", "content": "Hello"}]'
        raise RequestError("chat: found one message, expected a list of messages", hint=hint)
    if _is_conversation(conversation):
        conversation = [_with_plain_calls(message) for message in conversation]
    if system is None:
        return conversation
    if not isinstance(system, str):
        raise RequestError(f"chat: system is {short_repr(system)}, expected a text")
    if _is_conversation(conversation) and conversation[0].get("role") == "system":
        raise RequestError("chat: the messages begin with a system message, and system= is another")
    return [{"role": "system", "content": system}, *conversation]


def _with_plain_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose tool calls are in OpenAI's form, where they were `ToolCall` objects of an answer."""
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(calls, (list, tuple)):
        return message
    from rlx.engine.tools import ToolCall

    if not any(isinstance(call, ToolCall) for call in calls):
        return message
    plain = [call.message() if isinstance(call, ToolCall) else call for call in calls]
    return {"content": "", **message, "tool_calls": plain}


def _warn_of_answer(messages: Any, where: str) -> None:
    """Log a warning if the last message of a conversation is an answer already."""
    if _is_conversation(messages) and messages[-1].get("role") == "assistant":
        warn(
            "rlx.generate",
            "%s: the last message is the assistant's: it stays, and the model writes another; append a user's message",
            where,
        )


def _tokenizing(recorder: CallRecorder | None) -> AbstractContextManager[None]:
    return nullcontext() if recorder is None else recorder.span("tokenizing")


def _watched(sequences: list[TokenSequence], recorder: CallRecorder | None) -> list[TokenSequence]:
    """The sequences, with their host work and the phase of each run recorded."""
    if recorder is not None:
        for sequence in sequences:
            sequence.watch(recorder)
        recorder.phase = lambda inputs: (
            "decode" if inputs["tokens"].shape[1] == 1 and any(s.tokens for s in sequences) else "prefill"
        )
    return sequences


def _has_rows(type_: TensorType) -> bool:
    """Whether the type is batched: [batch, seq, ...]."""
    return type_.shape[0] == sym.BATCH


def _count(name: str, value: Any) -> int:
    count = 1 if value is True and name == "logprobs" else as_int(value)
    if count is None or count < 0:
        raise RequestError(f"{name}: expected a whole number from 0, found {short_repr(value)}")
    return count


def _is_batch(prompt: Any, where: str = "generate") -> bool:
    """Whether a prompt is a list of prompts."""
    if isinstance(prompt, str):
        return False
    listed = hasattr(prompt, "__len__") and hasattr(prompt, "__getitem__") and getattr(prompt, "shape", None) != ()
    if isinstance(prompt, (bytes, bytearray, Mapping)) or not listed:
        raise RequestError(f"{where}: expected a text, token ids or a list of them, found {type(prompt).__name__}")
    if _is_conversation(prompt):
        raise RequestError(f"{where}: messages are for chat", hint="use chat(messages)")
    first = prompt[0] if len(prompt) else ""  # no prompts: no completions
    return isinstance(first, str) or hasattr(first, "__len__")


def _characters(value: Any, depth: int = 32) -> int:
    """Number of characters in messages."""
    if isinstance(value, str):
        return len(value)
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return sum(_characters(v, depth - 1) for v in inner) if depth else 0


def _shorten(value: Any) -> Any:
    """Messages with their texts truncated to SHORT characters."""
    if isinstance(value, str):
        return value[:SHORT]
    if isinstance(value, Mapping):
        return {key: _shorten(inner) for key, inner in value.items()}
    return [_shorten(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _is_conversation(prompt: Any) -> bool:
    """Whether a prompt is a list of messages."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
