"""Names of other programs: errors say what a thing is called here, and every name that they mention exists."""

from __future__ import annotations

import copy
import pickle
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import small_bert
import stand_ins

from rlx.engine.embedding_model import EmbeddingModel
from rlx.engine.foreign_names import ADVICE, ATTRIBUTES, RECORD_ATTRIBUTES, SETTINGS, attribute_hint
from rlx.engine.language_model import LanguageModel
from rlx.engine.load import load
from rlx.engine.sampler import Sampling
from rlx.engine.vision_model import VisionModel
from rlx.errors import RequestError, UnknownAttribute
from rlx.index.index import Index

KINDS = {"decoder": LanguageModel, "encoder": EmbeddingModel, "vision model": VisionModel}
OWN = {field.name for field in fields(Sampling)} | {
    "max_tokens",
    "stop",
    "logprobs",
    "system",
    "edit",
    "capture",
    "trace",
    "schema",
    "regex",
    "choice",
    "grammar",
}


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ("json", "schema= takes a JSON schema"), ("response_format", "schema= takes"),
        ("history", "chat takes the conversation as a list of messages"), ("stream", "model.stream"),
        ("tools", r"chat\(messages, tools=\[function\]\)"), ("n", r"generate\(\[prompt\] \* 3"), ("echo",
        "model.score"),
        ("max_new_tokens", "here it is called max_tokens"), ("hooks", "here it is called edit"),
        ("system", r"chat\(messages, system=...\)"), ("temprature", "did you mean 'temperature'"),
        ("choices", "did you mean 'choice'"), ("top_logprobs", "logprobs=2 returns"),
        ("zzzzzzzz", "known: .*schema, regex, choice, grammar.*system, tools"),
    ],
)  # fmt: skip
def test_settings_of_other_programs(tiny: LanguageModel, setting: str, hint: str) -> None:
    with pytest.raises(RequestError, match=f"no setting is called {setting!r}") as caught:
        tiny.generate([1], **{setting: 1})
    assert re.search(hint, caught.value.hint or "")


def test_settings_that_are_named_exist() -> None:
    for name, own in SETTINGS.items():
        assert own.removesuffix(" in rlx.load") in OWN | {"context", "threads"} and name not in OWN
    assert not OWN & (ADVICE.keys() - {"system"})


def test_attributes_that_are_named_exist(tiny: LanguageModel) -> None:
    for name, hints in ATTRIBUTES.items():
        for kind, hint in hints.items():
            for cls in [KINDS[kind]] if kind else KINDS.values():
                assert not hasattr(cls, name), f"{cls.__name__} has {name}"
                for attribute in re.findall(r"model\.(\w+)", hint):
                    assert hasattr(cls, attribute) or attribute in vars(tiny), f"{name}: {hint}"


def test_attributes_of_other_libraries(tiny: LanguageModel, tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="encode: LanguageModel has no such attribute") as caught:
        tiny.encode("a")
    assert getattr(caught.value, "hint", None) == "model.token_ids(text) returns token ids"
    assert not hasattr(tiny, "tokenize") and not hasattr(tiny, "nothing_like_it")
    assert attribute_hint("encode", "encoder") == "model.embed(texts)" and attribute_hint("nothing", "decoder") is None
    small_bert.write(tmp_path)
    encoder: Any = load(tmp_path)
    with pytest.raises(AttributeError, match="score") as other:
        encoder.score("text")
    assert getattr(other.value, "hint", None) == "use .embed(), or load a decoder such as smollm2-135m for .score()"
    with pytest.raises(RequestError, match="a model is not called") as called:
        encoder("a text")
    assert called.value.hint == "use .embed(), .embed_tokens(), .similarity()"


@pytest.fixture
def talker(tmp_path: Path) -> Any:
    """A small model with a tokenizer and a chat template."""
    return load(stand_ins.write_chat(tmp_path))


def test_attributes_of_results_in_other_libraries(talker: Any) -> None:
    answer, score = talker.generate("Hello", max_tokens=2), talker.score("Hello")
    cases = [(answer, "choices", "completion.text"), (answer, "content", "completion.text"),
             (answer, "message", "completion.text"), (answer.timings, "tokens_per_second", "answer_per_second"),
             (score, "logprobs", "score.tokens")]  # fmt: skip
    for owner, name, hint in cases:
        with pytest.raises(UnknownAttribute, match=f"{name}: {type(owner).__name__} has no such attribute") as caught:
            getattr(owner, name)
        assert hint in (caught.value.hint or "")
        with pytest.raises(AttributeError, match="has no attribute 'nothing_like_it'"):
            _ = owner.nothing_like_it
        assert pickle.loads(pickle.dumps(owner)) == copy.copy(owner) == owner


def test_results_have_the_attributes_that_hints_name(talker: Any, tmp_path: Path) -> None:
    completion = talker.generate("Hello", max_tokens=2)
    owners = {"Index": Index.create(tmp_path / "index", dim=2), "Completion": completion,
              "Timings": completion.timings, "Score": talker.score("Hello")}  # fmt: skip
    assert owners.keys() == RECORD_ATTRIBUTES.keys()
    for kind, hints in RECORD_ATTRIBUTES.items():
        for name, hint in hints.items():
            assert not hasattr(owners[kind], name), f"{kind} has {name}"
            for attribute in re.findall(rf"{kind.lower()}\.(\w+)", hint):
                assert hasattr(owners[kind], attribute), f"{kind}.{name}: {hint}"


def test_wrong_arguments_of_score(talker: Any) -> None:
    for call, hint in (
        (lambda: talker.score(" blue", "The sky is"), "score(text, prompt=...)"),
        (lambda: talker.score(" blue", chat=True), "prompt=model.chat_tokens(messages)"),
        (lambda: talker.score(" blue", edit={}), "model.run(tokens, edit=..., capture="),
        (lambda: talker.score(" blue", promt="a"), "did you mean 'prompt'?"),
    ):
        with pytest.raises(RequestError, match=r"^score: ") as caught:
            call()
        assert hint in (caught.value.hint or "")
    assert talker.score(" blue", prompt=talker.chat_tokens("What colour is the sky?")).logprob < 0


def test_several_prompts_for_one(talker: Any) -> None:
    hello = [{"role": "user", "content": "Hello"}]
    for call, hint in (
        (lambda: talker.stream(["a", "b"]), "generate([text, text])"),
        (lambda: talker.report(["a", "b"]), 'trace="t.json"'),
        (lambda: talker.run([[1], [2]]), "[model.run(text) for text in texts]"),
        (lambda: talker.chat([hello, hello]), "generate([model.chat_tokens(a), model.chat_tokens(b)])"),
        (lambda: talker.chat(hello[0]), "a conversation is a list of messages"),
        (lambda: talker.chat(hello[0], system="Be kind."), "a conversation is a list of messages"),
        (lambda: talker.run("a", capture=1), 'capture="layers.1"'),
        (lambda: talker.generate("a", capture=[1]), 'capture="layers.1"'),
    ):
        with pytest.raises(RequestError) as caught:
            call()
        assert hint in (caught.value.hint or "")


def test_an_answered_conversation_gets_another_answer_and_a_warning(
    talker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    assert talker.chat(messages, max_tokens=2).tokens and "chat: the last message is the assistant's" in caplog.text
    talker.stream(messages, max_tokens=2).close()
    assert "stream: the last message is the assistant's" in caplog.text
    caplog.clear()
    talker.chat([*messages, {"role": "user", "content": "Bye"}], max_tokens=2)
    assert not caplog.text


def test_the_cache_shows_its_size(talker: Any) -> None:
    talker.generate("Hello", max_tokens=2)
    assert re.fullmatch(
        r"<page pool: [\d.]+ MiB in use, [\d.]+ MiB allocated, prefix cache up to 512 MiB>", repr(talker.caches)
    )
    talker.caches.limit = 3 << 20
    assert repr(talker.caches).endswith(" allocated, limit 3.0 MiB>")


def test_settings_of_embed(tmp_path: Path) -> None:
    small_bert.write(tmp_path)
    encoder: Any = load(tmp_path)
    for name, hint in (
        ("normalize_embeddings", "called normalize"),
        ("trunkate", "'truncate'"),
        ("zzz", "known: batch"),
    ):
        with pytest.raises(RequestError, match=f"embed: no setting is called '{name}'") as caught:
            encoder.embed("bal", **{name: True})
        assert hint in (caught.value.hint or "")


def test_stages_are_what_can_be_captured(tiny: LanguageModel) -> None:
    assert {"embed", "layers.0", "layers.1.attn", "layers.1.ffn", "norm", "head"} <= set(tiny.stages)
    assert set(tiny.run([1, 2], capture=tiny.stages)) >= set(tiny.stages)


@pytest.mark.parametrize("name", ["set_params", "set_param", "load_params", "load_state_dict"])
def test_weights_of_models_are_not_set(tiny: LanguageModel, name: str) -> None:
    with pytest.raises(AttributeError) as error:
        getattr(tiny, name)
    assert "model.apply(params, tokens)" in str(getattr(error.value, "hint", ""))
    with pytest.raises(RequestError) as request:
        tiny.generate("a", params={})
    assert "model.save(path, params)" in str(request.value.hint)
