"""The verbs of a language model: completions, streams, stop strings, errors, memory, closing."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_llama
from limits import LONGEST_S

import rlx
from rlx.engine import call_sizes
from rlx.engine.decoder import Decoder
from rlx.engine.language_model import LanguageModel
from rlx.engine.load import load
from rlx.errors import BindError, CapabilityError, FormatError, NotEndedError, RequestError, ResourceError
from rlx.formats.chat import ChatTemplate
from rlx.formats.tokenizer import Tokenizer

from .conftest import STORIES, language_model

EXPECTED = STORIES.parent / "expected_greedy_200tok.txt"
needs_stories = pytest.mark.skipif(not STORIES.exists(), reason=f"{STORIES} is absent")


@pytest.fixture(scope="module")
def told() -> str:
    """What llama2.c says."""
    if not EXPECTED.exists():
        pytest.skip(f"{EXPECTED} is absent")
    return EXPECTED.read_text().strip()


# -- completions --
def test_a_completion_says_how_it_came_about(stories: LanguageModel, told: str) -> None:
    done = stories.generate([1], max_tokens=200)
    assert str(done) == done.text and done.text.strip() == told
    assert done.finish_reason == "length" and len(done.tokens) == 200
    assert (done.usage.prompt_tokens, done.usage.cached_tokens, done.usage.completion_tokens) == (1, 0, 200)
    assert done.usage.total_tokens == 201 and done.logprobs is None
    t = done.timings
    assert t.prompt_seconds > 0 and t.answer_seconds > 0
    assert math.isclose(t.prompt_per_second, 1 / t.prompt_seconds)
    assert math.isclose(t.answer_per_second, 199 / t.answer_seconds)
    assert rlx.__version__ in done.fingerprint and stories.target in done.fingerprint
    assert str(done.seed) in done.fingerprint and stories.digest in done.fingerprint


def test_an_f16_cache_tells_the_same_story(told: str) -> None:
    assert language_model(STORIES, cache="f16").generate([1], max_tokens=60).text.strip() in told


def test_a_continuation_joins_its_prompt(stories: LanguageModel, told: str) -> None:
    for start in ("Once upon a time", "Once upon a time, there was a little girl named Lily."):
        assert told.startswith(start + stories.generate(start, max_tokens=20).text)


def test_a_seed_is_returned_and_repeats_the_text(stories: LanguageModel) -> None:
    sampling: dict[str, Any] = {"max_tokens": 30, "temperature": 1.0, "top_p": 0.9}
    first = stories.generate("Once", **sampling)
    assert stories.generate("Once", **sampling, seed=first.seed).tokens == first.tokens
    others = {tuple(stories.generate("Once", **sampling, seed=n).tokens) for n in range(5)}
    assert len(others) == 5


def test_lists_give_lists(stories: LanguageModel) -> None:
    texts = ["Once upon a time", "The dog", "Lily"]
    single = [stories.generate(t, max_tokens=12).text for t in texts]
    assert [c.text for c in stories.generate(texts, max_tokens=12)] == single
    ids = [stories.tokenizer.encode(t) for t in texts]
    assert [c.text for c in stories.generate(ids, max_tokens=12)] == single
    assert [c.text for c in stories.generate([texts[0]], max_tokens=12)] == single[:1]
    assert stories.generate(np.array(ids[0]), max_tokens=12).text == single[0]  # type: ignore[call-overload]


# -- stop strings --
def test_a_text_ends_before_a_stop_string(stories: LanguageModel, told: str) -> None:
    for stop in (["Lily"], "Lily", ("nowhere", "Lily")):
        done = stories.generate([1], max_tokens=100, stop=stop)
        assert done.text.strip() == told[: told.index("Lily")].strip() and done.finish_reason == "stop"


def test_the_first_of_several_stop_strings_counts(stories: LanguageModel, told: str) -> None:
    assert stories.generate([1], stop=["little girl", "a little"]).text == told[: told.index("a little")]


def test_prompts_of_a_batch_have_stop_strings_of_their_own(stories: LanguageModel, told: str) -> None:
    stop = [["Lily"], ["a little"], []]
    texts = [c.text for c in stories.generate([[1]] * 3, max_tokens=30, stop=stop)]
    assert texts == [stories.generate([1], max_tokens=30, stop=s).text for s in stop]
    assert len(set(texts)) == 3
    both = stories.generate([[1]] * 2, max_tokens=30, stop=["Lily", "a little"])  # texts: for all prompts
    assert [c.text for c in both] == texts[1:2] * 2
    with pytest.raises(RequestError, match="generate: stop has 1 value for 2 prompts"):
        stories.generate([[1]] * 2, stop=[["Lily"]])


def test_a_stop_string_is_found_across_tokens_and_never_shown(stories: LanguageModel, told: str) -> None:
    stop = told[60:75]  # begins and ends inside words
    pieces = list(stories.stream([1], stop=stop))
    assert "".join(pieces) == told[:60]
    pieces = list(stories.stream([1], max_tokens=30, stop=told[60:70] + "never"))
    assert "".join(pieces) == stories.generate([1], max_tokens=30).text  # what was held back comes in the end


# -- streams --
def test_pieces_join_to_the_text(stories: LanguageModel) -> None:
    stream = stories.stream("Once upon a time", max_tokens=50)
    with pytest.raises(RequestError, match="has not ended"):
        _ = stream.completion
    pieces = list(stream)
    completion = stories.generate("Once upon a time", max_tokens=50)
    assert len(pieces) > 20 and all(pieces)
    assert "".join(pieces) == stream.completion.text == completion.text
    assert stream.completion.tokens == completion.tokens and stream.completion.finish_reason == "length"


def test_closing_a_stream_stops_the_work(stories: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_calls(stories, monkeypatch)
    with stories.stream([1], max_tokens=500) as stream:
        first = [next(stream) for _ in range(3)]
    steps = len(calls)
    with pytest.raises(StopIteration):
        next(stream)
    done = stream.completion
    assert done.text == "".join(first) and done.finish_reason == "closed"
    assert len(calls) == steps == len(done.tokens)
    after = stories.generate([1], max_tokens=40)
    assert after.text.startswith(done.text) and len(calls) == steps + 40


def test_a_stream_that_is_left_ends_at_once(stories: LanguageModel) -> None:
    """Without the garbage collector, and so with its cache free for the next call."""
    gc.disable()
    try:
        stream = stories.stream([1], max_tokens=500)
        for _ in stream:
            break
        left = weakref.ref(stream)
        del stream
        assert left() is None
        assert stories.generate([1, 5], max_tokens=1).usage.cached_tokens == 1
    finally:
        gc.enable()


def test_a_stream_that_the_garbage_collector_ends_does_not_wait(stories: LanguageModel) -> None:
    """It may come while the same thread has the lock of the caches."""
    stream = stories.stream([1, 5, 6, 7])
    next(stream)
    round_trip: list[Any] = [stream]
    round_trip.append(round_trip)
    del stream, round_trip

    def collect() -> None:
        with stories.caches._lock:
            gc.collect()

    collector = threading.Thread(target=collect, daemon=True)
    collector.start()
    collector.join(LONGEST_S)
    assert not collector.is_alive()
    assert stories.generate([1, 5, 6, 7, 8], max_tokens=1).usage.cached_tokens == 4


def test_a_stream_that_was_never_read_does_nothing(stories: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_calls(stories, monkeypatch)
    stream = stories.stream([1])
    stream.close()
    assert not calls and stream.completion.text == "" and list(stream) == []


def test_a_stream_can_be_closed_from_another_thread(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a prompt, which is left after the chunk that is being read."""
    monkeypatch.setattr(call_sizes, "CHUNK", 8)
    run, calls, begun, closed = tiny.compiled.run, [], threading.Event(), threading.Event()

    def slow(inputs: Any) -> Any:
        calls.append(inputs)
        begun.set()
        closed.wait(LONGEST_S)
        return run(inputs)

    monkeypatch.setattr(tiny.compiled, "run", slow)
    stream = tiny.stream([5] * 200)
    reader = threading.Thread(target=lambda: list(stream))
    reader.start()
    begun.wait()
    stream.close()
    closed.set()
    reader.join()
    assert len(calls) == 1
    assert stream.completion.finish_reason == "closed" and stream.completion.tokens == []


def test_an_interrupted_stream_has_a_completion(stories: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = stories.stream([1], max_tokens=100)
    shown = [next(stream) for _ in range(4)]
    run = stories.compiled.run

    def interrupted(inputs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(stories.compiled, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    monkeypatch.setattr(stories.compiled, "run", run)
    assert stream.completion.text == "".join(shown) and stream.completion.finish_reason == "closed"


def count_calls(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    run = model.compiled.run
    monkeypatch.setattr(model.compiled, "run", lambda inputs: calls.append(1) or run(inputs))  # type: ignore[func-returns-value]
    return calls


# -- chat --
@pytest.fixture
def chatty(stories: LanguageModel) -> LanguageModel:
    """The stories with a template, as if it had been trained to talk."""
    stories.__dict__["template"] = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]", bos_token="<s>"
    )
    return stories


def test_prompts_that_are_far_too_long_are_refused_before_they_are_encoded(
    chatty: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    encode_batch = Tokenizer.encode_batch

    def counting(self: Tokenizer, texts: Any, **options: Any) -> list[list[int]]:
        batch = list(texts)
        sizes.append(sum(map(len, batch)))
        return encode_batch(self, batch, **options)

    monkeypatch.setattr(Tokenizer, "encode_batch", counting)
    for size in (90_000, 20_000_000):
        text = "Once upon a time. " * (size // 18)
        calls: list[Callable[[], Any]] = [
            lambda t=text: chatty.generate(t),  # type: ignore[misc]
            lambda t=text: chatty.generate(["Once", t]),  # type: ignore[misc]
            lambda t=text: chatty.stream(t),  # type: ignore[misc]
            lambda t=text: chatty.logits(t),  # type: ignore[misc]
            lambda t=text: chatty.run(t),  # type: ignore[misc]
            lambda t=text: chatty.apply({}, t),  # type: ignore[misc]
            lambda t=text: chatty.chat(t),  # type: ignore[misc]
            lambda t=text: chatty.stream([{"role": "user", "content": t}]),  # type: ignore[misc]
        ]
        for call in calls:
            with pytest.raises(RequestError, match=rf"more tokens than the context, which holds {chatty.context}"):
                call()
    assert max(sizes) < 50_000 and sum(sizes) < 1_000_000


def test_a_conversation_too_long_for_the_template_is_the_callers(chatty: LanguageModel) -> None:
    text = "Once upon a time. " * 5000
    chatty.__dict__["template"] = ChatTemplate("{{ messages[0].content * 200 }}")
    with pytest.raises(RequestError, match=r"chat: 90,004 characters are more than the model's chat template takes"):
        chatty.chat(text)
    chatty.__dict__["template"] = ChatTemplate("{{ messages[0].content[:20] }}")
    assert len(chatty.chat_tokens(text)) < 20
    chatty.__dict__["template"] = ChatTemplate("{{ 'a' * 100000000 }}")
    with pytest.raises(FormatError):
        chatty.chat(text)


def test_a_message_goes_through_the_template(chatty: LanguageModel) -> None:
    talk = [{"role": "user", "content": "Tell me of Lily."}]
    tokens = chatty.chat_tokens("Tell me of Lily.")
    assert tokens[0] == 1 and chatty.tokenizer.decode(tokens[1:]) == "[user] Tell me of Lily.\n[assistant]"
    answer = chatty.chat("Tell me of Lily.", max_tokens=20)
    assert chatty.chat(talk, max_tokens=20).tokens == answer.tokens
    assert chatty.chat(talk, tools=[], max_tokens=20).tokens == answer.tokens
    for stream in (
        chatty.stream(talk, max_tokens=20),
        chatty.stream("Tell me of Lily.", chat=True, max_tokens=20),
        chatty.stream(tokens, chat=True, max_tokens=20),
    ):
        assert "".join(stream) == answer.text
    raw = chatty.stream("Tell me of Lily.", max_tokens=1)
    list(raw)
    assert raw.completion.usage.prompt_tokens == len(chatty.tokenizer.encode("Tell me of Lily."))


def test_what_is_no_conversation_is_told_what_one_is(chatty: LanguageModel) -> None:
    answer = chatty.chat("Hello.", max_tokens=1)
    of_answer, of_message = "answer.text", '{"role": "user", "content"'
    for messages, hint in (
        ([], of_message), (["hi"], of_message), ([answer], of_answer),
        ([{"role": "user", "content": answer}], of_answer),
    ):  # fmt: skip
        with pytest.raises(RequestError, match="messages") as caught:
            chatty.chat(messages)  # type: ignore[arg-type]
        assert hint in str(caught.value.hint)
    with pytest.raises(RequestError, match="report: expected a text or token ids") as caught:
        chatty.report([{"role": "user", "content": "hi"}])  # type: ignore[list-item]
    assert "model.chat_tokens" in str(caught.value.hint)
    with pytest.raises(BindError, match=r"no parameter matches \['layers.3.ffn.\*'\]") as bind:
        chatty.float_params("layers.3.ffn.*")
    assert "names of the file, such as 'model.layers.0" in str(bind.value.hint)
    stream = chatty.stream("One day", max_tokens=1)
    with pytest.raises(AttributeError, match=r"no attribute 'stop': close\(\) stops it"):
        stream.stop()  # type: ignore[attr-defined]
    assert chatty.facts.layers == 5 and not hasattr(stream, "other")


def test_a_conversation_reads_only_what_is_new(chatty: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    talk: list[dict[str, str]] = []
    fresh: list[int] = []
    for said in ("One day", "And then?", "What did the dog say?", "Good."):
        talk.append({"role": "user", "content": said})
        done = chatty.chat(talk, max_tokens=15)
        fresh.append(done.usage.prompt_tokens - done.usage.cached_tokens)
        talk.append({"role": "assistant", "content": done.text})
    assert fresh[0] == len(chatty.chat_tokens([talk[0]]))
    assert max(fresh[1:]) < 60 < len(chatty.chat_tokens(talk[:-1]))
    chatty.caches.clear()
    assert chatty.chat(talk[:-1], max_tokens=15).text == talk[-1]["content"]


def test_no_template_no_chat(stories: LanguageModel) -> None:
    with pytest.raises(CapabilityError, match="has no chat template"):
        stories.chat("hello")
    with pytest.raises(RequestError, match="messages are for chat"):
        stories.generate([{"role": "user", "content": "hello"}])  # type: ignore[list-item]


# -- what cannot be --
@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([[1], []], {}, "prompt 1: there are no tokens"),
        ([1, 512], {}, "token 512 at 1 is outside the vocabulary of 512 tokens"),
        ([-1], {}, "token -1 at 0"),
        ([1.5], {}, "expected a text or token ids"),
        ([["a"]], {}, "prompt 0: expected a text or token ids"),
        (b"abc", {}, "found bytes"),
        (None, {}, "found NoneType"),
        (7, {}, "found int"),
        ([5] * 513, {}, "the prompt has 513 tokens, the context holds 512"),
        ([5] * 512, {}, "the prompt has 512 tokens, the context holds 512 and an answer needs room"),
        (np.array(3), {}, "found ndarray"),
        (np.array("a"), {}, "found ndarray"),
        (bytearray(b"abc"), {}, "found bytearray"),
        ([b"abc"], {}, "prompt 0: expected a text or token ids, found b'abc'"),
        ([10**5000], {}, "token a huge int at 0"),
        ([1], {"top_p": 0.9}, "top_p is 0.9, which needs a temperature"),
        ([1], {"top_k": math.inf, "temperature": 1}, "top_k is inf"),
        ([1], {"max_tokens": True}, "max_tokens"),
        ([1], {"max_tokens": -1}, "max_tokens: expected a whole number from 0, found -1"),
        ([1], {"max_tokens": 1.5}, "max_tokens"),
        ([1], {"logprobs": -1}, "logprobs"),
        ([1], {"stop": [1]}, "stop: expected texts"),
        ([1], {"stop": ""}, "stop: expected texts"),
        ([1], {"stop": 5}, "stop: expected texts"),
        ([1], {"temperature": math.nan}, "temperature is nan"),
        ([1], {"max_new_tokens": 5}, "no setting is called 'max_new_tokens'"),
        ([1], {"logit_bias": {512: 1}}, "logit_bias has token 512, the vocabulary has 512 tokens"),
    ],
)
def test_a_request_that_cannot_be_says_why(
    stories: LanguageModel, prompt: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        stories.generate(prompt, **settings)


@pytest.mark.parametrize("tokens", [5, None, b"abc", {1: 2}, np.array(3), [None], [[1]]])
def test_what_is_no_tokens_is_refused_by_every_verb(tiny: LanguageModel, tokens: Any) -> None:
    for verb in (tiny.stream, tiny.logits, tiny.run):
        with pytest.raises(RequestError, match="expected a text or token ids, found"):
            verb(tokens)


def test_numbers_of_numpy_and_no_stop_are_fine(tiny: LanguageModel) -> None:
    done = tiny.generate([1], max_tokens=np.int64(3), logprobs=np.int32(2), stop=None)  # type: ignore[call-overload]
    assert len(done.tokens) == 3 and done.logprobs is not None and len(done.logprobs[0].top) == 2


def test_logits_ask_for_memory(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(what: str, needed: int, hint: str | None = None) -> None:
        asked.append((what, needed))
        raise ResourceError(what)

    monkeypatch.setattr("rlx.engine.logits.require", refuse)
    for verb in (tiny.logits, tiny.run):
        with pytest.raises(ResourceError):
            verb([1] * 200)
    assert asked == [("the values of 200 tokens", 200 * 97 * 4)] * 2


def test_errors_of_a_stream_come_at_once(stories: LanguageModel) -> None:
    with pytest.raises(RequestError, match="the prompt has 600 tokens"):
        stories.stream([5] * 600)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"device": "abacus"}, CapabilityError, "device: 'abacus' is not known"),
        ({"precision": "q4"}, CapabilityError, "precision 'q4'"),
        ({"cache": "q8"}, CapabilityError, "cache 'q8'"),
        ({"context": 0}, RequestError, "context is 0"),
        ({"context": True}, RequestError, "context is True"),
        ({"profile": 5}, RequestError, "profile is 5"),
        ({"patch": 5}, RequestError, "patch is 5"),
        ({"context": 10**5000}, RequestError, "context a huge int is asked for"),
        ({"context": 513}, RequestError, "context 513 is asked for, the model has 512"),
        ({"threads": 0}, CapabilityError, "threads"),
        ({"n_ctx": 512}, RequestError, "no setting is called 'n_ctx'"),
    ],
)
@needs_stories
def test_loading_what_cannot_be_says_why(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load(STORIES, **settings)


@pytest.mark.parametrize("name", [None, b"x", 5, ["a"]])
def test_what_is_no_name_is_refused(name: Any) -> None:
    with pytest.raises(RequestError, match="expected a model's name or path, found") as caught:
        load(name)
    assert repr(name) in str(caught.value)


def test_words_of_other_programs_are_told_ours_by_load(tiny_folder: Path) -> None:
    with pytest.raises(RequestError) as caught:
        load(tiny_folder, num_ctx=100)
    assert caught.value.hint == "here it is called context"


def test_the_verbs_of_other_models_say_where_they_belong(stories: LanguageModel) -> None:
    with pytest.raises(CapabilityError, match="is a decoder") as caught:
        stories.embed("a")  # type: ignore[attr-defined]
    assert caught.value.hint == "use .generate(), or load an encoder such as minilm-l6 for .embed()"
    with pytest.raises(CapabilityError, match=r"^embed_tokens: .* is a decoder"):
        stories.embed_tokens([[1]])  # type: ignore[attr-defined]
    assert not hasattr(stories, "embed") and not hasattr(stories, "nonsense") and hasattr(stories, "generate")


# -- memory and life --
def test_memory_is_counted(tiny_folder: Path) -> None:
    model = language_model(tiny_folder)
    before = model.memory()
    size = sum(a.nbytes for a in model.built.params.values())
    assert before.cache == 0 and size <= before.weights + before.mapped <= 3 * size
    model.generate([5] * 100, max_tokens=2)
    after = model.memory()
    assert after.cache == 2 * 2 * 2 * 12 * 128 * 4  # layers, keys and values, kv heads, head size, two pages, f32
    assert after.arena > 0 and after.weights == before.weights
    assert after.total == after.weights + after.mapped + after.cache + after.arena
    assert "MiB (weights" in str(after)


def test_a_closed_model_refuses_every_verb(tiny_folder: Path) -> None:
    with language_model(tiny_folder) as model:
        model.generate([1], max_tokens=1)
        caches = model.caches
        assert caches.nbytes
    assert caches.nbytes == 0 and "closed" in repr(model)
    verbs: Iterator[Any] = iter(
        [
            lambda: model.generate([1]), lambda: model.chat("a"), lambda: model.stream([1]), lambda: model.logits([1]),
            lambda: model.run([1]), lambda: model.memory(), lambda: model.compiled, lambda: model.built,
        ]
    )  # fmt: skip
    for verb in verbs:
        with pytest.raises(RequestError, match="the model is closed"):
            verb()
    model.close()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="/proc/self/maps is absent")
def test_a_closed_model_lets_go_of_its_file(tmp_path: Path) -> None:
    tiny_llama.write(tmp_path)
    model = language_model(tmp_path)
    file = str(tmp_path / "model.safetensors")
    assert file in Path("/proc/self/maps").read_text()
    model.close()
    assert file not in Path("/proc/self/maps").read_text()


def test_closing_while_a_stream_runs_lets_it_end(stories: LanguageModel) -> None:
    wanted = stories.generate([1], max_tokens=20).text
    stream = stories.stream([1], max_tokens=20)
    first = next(stream)
    stories.close()
    assert first + "".join(stream) == wanted == stream.completion.text
    del stream
    assert stories.caches.nbytes == 0  # what it gave back was not kept


def test_the_digest_tells_models_apart(tiny: LanguageModel, tiny_folder: Path, tmp_path: Path) -> None:
    tiny_llama.write(tmp_path / "same")
    tiny_llama.write(tmp_path / "other", seed=1)
    assert language_model(tmp_path / "same").digest == tiny.digest
    assert language_model(tmp_path / "other").digest != tiny.digest


def test_names(stories: LanguageModel) -> None:
    assert rlx.LanguageModel is LanguageModel and rlx.load is load
    assert repr(stories) == "<LanguageModel 'stories260K.bin': llama decoder, context 512>"


def test_a_stream_that_is_closed_while_its_prompt_is_read_has_no_negative_times(tmp_path: Path) -> None:
    from small_llama import SETTINGS, random_weights, write_folder

    from rlx.engine import call_sizes

    write_folder(tmp_path, random_weights(SETTINGS), SETTINGS)
    run = Decoder.run
    with rlx.load(tmp_path) as model:
        for closed_after in (0, 1, 2):  # before it began, in the first chunk of the prompt, in the second
            model.caches.clear()
            stream = model.stream([5] * 200, max_tokens=3)
            calls = 0

            def counted(self: Any, *args: Any, stream: Any = stream, limit: int = closed_after, **named: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == limit:
                    stream._ticket.cancel()
                return run(self, *args, **named)

            if closed_after:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(call_sizes, "CHUNK", 64)
                    patch.setattr(Decoder, "run", counted)
                    assert list(stream) == []
            stream.close()
            done = stream.completion
            times = done.timings
            assert done.finish_reason == "closed" and done.tokens == []
            assert times.prompt_seconds >= 0 and times.answer_seconds == 0 == times.answer_per_second
            assert times.prompt_per_second == 0


def test_no_prompts_give_no_completions(stories: LanguageModel) -> None:
    assert stories.generate([]) == [] and stories.score([]) == []
    with pytest.raises(RequestError, match="stream: there are no tokens"):
        stories.stream([])


def test_a_stream_has_a_completion_once_it_has_ended(stories: LanguageModel) -> None:
    with stories.stream("Once", max_tokens=3) as stream:
        assert not hasattr(stream, "completion")
        with pytest.raises(NotEndedError, match="it has not ended"):
            _ = stream.completion
    assert hasattr(stream, "completion") and stream.completion.finish_reason == "closed"
