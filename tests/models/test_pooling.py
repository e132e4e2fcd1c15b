"""What a model's files say of pooling: read as sentence-transformers does, and refused where they cannot mean it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_bert import ST, sentence_transformers

from rlx.errors import CapabilityError, FormatError, RlxError
from rlx.formats import TensorFile
from rlx.models.pooling import EmbedSettings, read_settings

POOLING = "1_Pooling/config.json"
PROMPTS = "config_sentence_transformers.json"


def read(folder: Path, files: dict[str, Any]) -> EmbedSettings:
    """The settings that these files of a folder make."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    checkpoint: Any = SimpleNamespace(path=folder, file=SimpleNamespace(format="safetensors"))
    return read_settings(checkpoint)


def read_gguf(metadata: dict[str, Any]) -> EmbedSettings:
    file = TensorFile(Path("m.gguf"), "gguf", [], {"general.architecture": "bert", **metadata}, [])
    checkpoint: Any = SimpleNamespace(path=Path("m.gguf"), file=file)
    return read_settings(checkpoint)


# -- what is said ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode_lasttoken": True}, "lasttoken"),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, "mean_sqrt_len_tokens"),
        ({"pooling_mode_weightedmean_tokens": True}, "weightedmean"),
        ({"word_embedding_dimension": 384}, "mean"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode": ["lasttoken"]}, "lasttoken"),
        ({"pooling_mode": "max", "pooling_mode_mean_tokens": True}, "max"),
    ],
)
def test_both_manners_of_naming_a_kind_are_read(tmp_path: Path, config: dict[str, Any], kind: str) -> None:
    actual = read(tmp_path, sentence_transformers() | {POOLING: config})
    assert actual.kind == kind and actual.source == str(tmp_path / POOLING)


def test_modules_are_known_under_their_old_and_new_names(tmp_path: Path) -> None:
    names = ("base.modules.transformer.Transformer", "sentence_transformer.modules.pooling.Pooling")
    modules = [{"path": p, "type": f"sentence_transformers.{n}"} for p, n in zip(("", "1_Pooling"), names, strict=True)]
    actual = read(tmp_path, {"modules.json": modules, POOLING: {"pooling_mode": "cls"}})
    assert (actual.kind, actual.normalize) == ("cls", False)
    modules.append({"path": "2_Normalize", "type": "sentence_transformers.base.modules.normalize.Normalize"})
    assert read(tmp_path, {"modules.json": modules}).normalize


def test_a_folder_that_says_nothing_has_a_source_of_none(tmp_path: Path) -> None:
    assert read(tmp_path, {}) == EmbedSettings("mean", normalize=False)


def test_settings_of_the_transformer_may_carry_another_name(tmp_path: Path) -> None:
    actual = read(tmp_path, sentence_transformers() | {"sentence_roberta_config.json": {"max_seq_length": 77}})
    assert actual.limit == 77 and not actual.lower


@pytest.mark.parametrize(("number", "kind"), [(1, "mean"), (2, "cls"), (3, "lasttoken")])
def test_gguf_has_a_number_for_the_kind(number: int, kind: str) -> None:
    assert read_gguf({"bert.pooling_type": number}) == EmbedSettings(kind, normalize=True, source="m.gguf")


def test_a_gguf_file_that_says_nothing_is_averaged_and_normalised() -> None:
    assert read_gguf({}) == EmbedSettings("mean", normalize=True)


# -- what rlx does not have ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["LSTM", "CNN", "StaticEmbedding", "Router", "Evil"])
def test_a_module_that_rlx_does_not_have_is_named(tmp_path: Path, name: str) -> None:
    files = sentence_transformers()
    files["modules.json"].append({"idx": 3, "path": f"3_{name}", "type": f"{ST}.{name}"})
    with pytest.raises(CapabilityError, match=f"modules.json: module 3 is a '{name}'"):
        read(tmp_path, files)


@pytest.mark.parametrize(
    "config",
    [{"pooling_mode": ["mean", "max"]}, {"pooling_mode": "attention"},
     {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}],
)  # fmt: skip
def test_kinds_that_rlx_does_not_have_are_named(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(CapabilityError, match=r"1_Pooling/config\.json: pooling by"):
        read(tmp_path, sentence_transformers() | {POOLING: config})


def test_only_vectors_of_texts_are_normalised(tmp_path: Path) -> None:
    config = {"module_input_name": "sentence_embedding"}
    assert read(tmp_path, sentence_transformers() | {"2_Normalize/config.json": config}).normalize
    config["module_input_name"] = "token_embeddings"
    with pytest.raises(CapabilityError, match="normalises 'token_embeddings'"):
        read(tmp_path, {"2_Normalize/config.json": config})


@pytest.mark.parametrize(("number", "name"), [(0, "none"), (4, "rank")])
def test_gguf_kinds_without_one_vector_a_text_are_refused(number: int, name: str) -> None:
    with pytest.raises(CapabilityError, match=f"bert.pooling_type is {number} .{name}"):
        read_gguf({"bert.pooling_type": number})


# -- hostile files ---------------------------------------------------------------------------------------------------
WRONG: list[tuple[str, Any]] = [
    *(("modules.json", content) for content in ({}, 3, "", "[", "[NaN]", '["x"]', [3], [{}], [{"type": 3}], [None])),
    *(
        ("modules.json", [{"type": f"{ST}.Pooling", "path": p}])
        for p in ("../x", "/etc", "a/../b", "a\\b", "c:x", "a\0b", "a" * 4096, 3)
    ),
    (POOLING, "[]"),
    (POOLING, "{"),
    (POOLING, {"pooling_mode": 3}),
    (POOLING, {"pooling_mode": [3]}),
    (POOLING, {"pooling_mode": {}}),
    (POOLING, {"pooling_mode_mean_tokens": "yes"}),
    (POOLING, {"pooling_mode_cls_token": 1}),
    (POOLING, {"include_prompt": "no"}),
    *(("sentence_bert_config.json", {"max_seq_length": v}) for v in (0, -1, "256", True, 2.5, [], 2**40)),
    ("sentence_bert_config.json", {"do_lower_case": 1}),
    ("sentence_bert_config.json", "[1]"),
    ("tokenizer_config.json", {"model_max_length": "512"}),
    (PROMPTS, {"prompts": ["a"]}),
    (PROMPTS, {"prompts": {"query": 3}}),
    (PROMPTS, {"prompts": {"query": "q"}, "default_prompt_name": "other"}),
    (PROMPTS, {"default_prompt_name": 3}),
    (PROMPTS, {"similarity_fn_name": 3}),
    (PROMPTS, '{"prompts": {"a": "b", "a": "c"}}'),
]


@pytest.mark.parametrize(("name", "content"), WRONG)
def test_a_file_that_cannot_mean_it_is_a_format_error_with_its_name(tmp_path: Path, name: str, content: Any) -> None:
    files = sentence_transformers(max_seq_length=8) | {name: content}
    with pytest.raises(FormatError) as caught:
        read(tmp_path, files)
    assert str(tmp_path / name) in str(caught.value)


def test_a_pooling_module_without_its_file_is_a_format_error(tmp_path: Path) -> None:
    files = sentence_transformers()
    del files[POOLING]
    with pytest.raises(FormatError, match="not there"):
        read(tmp_path, files)


@pytest.mark.parametrize("actual", [5, -1, "mean", True, 1.0, [1]])
def test_a_gguf_kind_that_cannot_be_is_a_format_error(actual: Any) -> None:
    with pytest.raises(FormatError, match=r"m\.gguf: bert\.pooling_type: expected a number from 0 to 4"):
        read_gguf({"bert.pooling_type": actual})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = ("pooling_mode", "pooling_mode_cls_token", "include_prompt", "max_seq_length", "do_lower_case", "type", "path",
         "prompts", "default_prompt_name", "similarity_fn_name", "model_max_length")  # fmt: skip


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["modules.json", POOLING, PROMPTS, "sentence_bert_config.json", "tokenizer_config.json"]),
    content=st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4) | st.lists(JSON, max_size=2),
)
def test_whatever_a_file_holds_is_read_or_refused(tmp_path: Path, name: str, content: Any) -> None:
    try:
        actual = read(tmp_path, sentence_transformers(max_seq_length=8) | {PROMPTS: {}, name: content})
    except RlxError:
        return
    assert isinstance(actual, EmbedSettings)
