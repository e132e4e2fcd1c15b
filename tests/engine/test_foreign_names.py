"""Names of other programs: errors say what a thing is called here, and every name that they mention exists."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import small_bert

from rlx.engine.embedding_model import EmbeddingModel
from rlx.engine.foreign_names import ADVICE, ATTRIBUTES, SETTINGS, attribute_hint
from rlx.engine.language_model import LanguageModel
from rlx.engine.load import load
from rlx.engine.sampler import Sampling
from rlx.engine.vision_model import VisionModel
from rlx.errors import RequestError

KINDS = {"decoder": LanguageModel, "encoder": EmbeddingModel, "vision model": VisionModel}
OWN = {field.name for field in fields(Sampling)} | {
    "max_tokens",
    "stop",
    "logprobs",
    "system",
    "edit",
    "capture",
    "trace",
}


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ("json", "schema= takes a JSON schema"), ("response_format", "schema= takes"),
        ("history", "chat takes the conversation as a list of messages"), ("stream", "model.stream"),
        ("tools", r"chat\(messages, tools=\[function\]\)"), ("n", "once per seed"), ("echo",
        "model.score"),
        ("max_new_tokens", "here it is called max_tokens"), ("hooks", "here it is called edit"),
        ("system", r"chat\(messages, system=...\)"), ("temprature", "did you mean 'temperature'"),
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
    assert getattr(other.value, "hint", None) == "use .embed()"
    with pytest.raises(RequestError, match="a model is not called") as called:
        encoder("a text")
    assert called.value.hint == "use .embed(), .embed_tokens(), .similarity()"


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
