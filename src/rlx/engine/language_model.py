"""Language models. `generate` continues a raw text, `chat` answers through the model's chat template."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from rlx.arrays import Array
from rlx.engine import call_sizes
from rlx.engine.completion import Completion as Completion
from rlx.engine.conversation import Messages, as_conversation, encode_conversation, is_conversation, warn_of_answer
from rlx.engine.counters import GrammarTimes
from rlx.engine.generation_settings import GenerationSettings, checked_count
from rlx.engine.interventions import Captures, Execution, execution
from rlx.engine.logits import values_per_token
from rlx.engine.model import NOTHING, Model
from rlx.engine.page_pool import PagePool
from rlx.engine.request import Request
from rlx.engine.sampler import Sampler
from rlx.engine.scheduler import Scheduler
from rlx.engine.sequence import Sequence as TokenSequence
from rlx.engine.sequence import Timings as Timings
from rlx.engine.sequence import Usage as Usage
from rlx.engine.text_stream import TextStream as TextStream
from rlx.errors import CapabilityError, ContextError, RequestError
from rlx.fork_safe_locks import cached_property
from rlx.runtime.compiled import CompiledGraph

if TYPE_CHECKING:
    from rlx.engine.async_stream import AsyncTextStream
    from rlx.engine.edits import Edit
    from rlx.engine.logprobs import Score, TokenBytes
    from rlx.engine.structured import Constraint, GrammarCompiler
    from rlx.engine.tools import ToolFormat
    from rlx.flow.built import BuiltModel
    from rlx.formats.chat import ChatTemplate
    from rlx.inspect.call_report import CallRecorder, CallReport


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
        return encode_conversation(self, self.template, as_conversation(messages, system), tools, variables)

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
        settings = GenerationSettings.per_prompt(common, len(prompt) if many else None)

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
        settings = GenerationSettings.of(max_tokens, stop, logprobs, sampling)
        warn_of_answer(messages, "chat")
        if tools is not None and not (isinstance(tools, Sequence) and len(tools) == 0):  # `tools=[]`: no tools
            from rlx.engine.tool_loop import answer_with_tools

            if edit is not None or capture is not None or trace is not None:
                raise RequestError("chat: tools exclude edit, capture and trace")
            conversation = as_conversation(messages, system)

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

    def _answer(self, tokens: list[int], settings: GenerationSettings, allowed: Constraint | None) -> Completion:
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
        settings = GenerationSettings.of(max_tokens, stop, logprobs, sampling)
        is_chat = is_conversation(prompt) or (chat and isinstance(prompt, str))
        if system is not None and not is_chat:
            raise RequestError("stream: a system message is for a conversation", hint="stream(text, chat=True)")
        if is_chat:
            warn_of_answer(prompt, "stream")
        start = execution(self, edit, capture)
        tokens = (
            self.chat_tokens(prompt, system=system) if is_chat else self.prompt_ids(prompt, "stream")  # type: ignore[arg-type]
        )
        sequence, run = self.new_sequence(settings.request(self, tokens, chat or is_chat), "stream"), start()
        return TextStream(self, sequence, self._scheduler(run, 1), run.captures)

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
        many, top = _is_batch(text, "score"), checked_count("logprobs", logprobs)
        rows = [text_after(self, t, prompt, f"score: text {i}") for i, t in enumerate(text if many else [text])]
        scores = scores_of(self, rows, top)
        return scores if many else scores[0]

    def report(self, prompt: str | Sequence[int] | None = None, *, max_tokens: int = 32, **settings: Any) -> CallReport:
        """Where the time of `generate(prompt, ...)` goes: phases, kernels and stages, tokenizing, sampling, Python.

        The call is made twice, and the second one is timed. Without a prompt it is a random one of 64 tokens; the end
        of the text is then ignored, so that `max_tokens` are generated. Time stamps cost a few percent.
        """
        self.check_usable()
        checked = GenerationSettings.of(max_tokens, settings.pop("stop", ()), settings.pop("logprobs", 0), settings)
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
        return values_per_token(self, compiled, ids, more)

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


def _is_batch(prompt: Any, where: str = "generate") -> bool:
    """Whether a prompt is a list of prompts."""
    if isinstance(prompt, str):
        return False
    listed = hasattr(prompt, "__len__") and hasattr(prompt, "__getitem__") and getattr(prompt, "shape", None) != ()
    if isinstance(prompt, (bytes, bytearray, Mapping)) or not listed:
        raise RequestError(f"{where}: expected a text, token ids or a list of them, found {type(prompt).__name__}")
    if is_conversation(prompt):
        raise RequestError(f"{where}: messages are for chat", hint="use chat(messages)")
    first = prompt[0] if len(prompt) else ""  # no prompts: no completions
    return isinstance(first, str) or hasattr(first, "__len__")
