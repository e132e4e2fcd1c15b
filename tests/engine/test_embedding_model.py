"""Embeddings: vectors against NumPy's float64, the same bits in any company, and what is refused."""

from __future__ import annotations

import csv
import io
import logging
import os
import re
from collections import UserDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_bert
import tiny_llama
from scipy.stats import spearmanr
from small_bert import CLS, SEP, WORDS, hidden_states, pooled, sentence_transformers, tokens_of

from rlx.engine import embedding_model as module
from rlx.engine.embedding_model import TOKENS, EmbeddingModel, batches
from rlx.engine.load import load
from rlx.errors import CapabilityError, FormatError, RequestError
from rlx.formats.tokenizer import Tokenizer
from rlx.models.pooling import KINDS
from rlx.profile import CompileProfile, Precision

Array = np.ndarray[Any, Any]
ASSETS = Path(os.environ.get("RLX_ASSETS", Path(__file__).parents[3] / "shared" / "assets"))
MORE = WORDS * 2
# On both sides of 64, where blocks of keys and of sums end.
TEXTS = [" ".join(MORE[i : i + n]) for i, n in enumerate((3, 1, 62, 0, 140, 3, 63, 16, 61, 5))]


def encoder(path: Path, **options: Any) -> EmbeddingModel:
    model = load(path, **options)
    assert isinstance(model, EmbeddingModel)
    return model


def unit(x: Array) -> Array:
    normalised: Array = x / np.linalg.norm(x, axis=-1, keepdims=True)
    return normalised


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bert")
    small_bert.write(path)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> EmbeddingModel:
    return encoder(folder)


@pytest.fixture(scope="module")
def weights(folder: Path) -> dict[str, Array]:
    return small_bert.random_weights(small_bert.settings())


# -- what vectors are ------------------------------------------------------------------------------------------------
def test_vectors_equal_those_of_numpy(model: EmbeddingModel, weights: dict[str, Array]) -> None:
    wanted = unit(np.stack([pooled(hidden_states(weights, tokens_of(text)), "mean") for text in TEXTS]))
    vectors = model.embed(TEXTS)
    assert vectors.dtype == np.float32 and vectors.shape == (len(TEXTS), 24)
    assert np.abs(vectors - wanted).max() < 2e-6
    assert (model.pooling, model.normalize, model.limit, model.dim) == ("mean", True, 160, 24)


def test_vectors_of_tokens_equal_those_of_numpy(model: EmbeddingModel, weights: dict[str, Array]) -> None:
    rows = [tokens_of(text) for text in TEXTS]
    wanted = np.stack([pooled(hidden_states(weights, row), "mean") for row in rows])
    assert np.abs(model.embed_tokens(rows, normalize=False) - wanted).max() < 1e-5
    assert np.abs(model.embed_tokens(iter(rows)) - unit(wanted)).max() < 2e-6
    arrays = [np.array(row, np.int64) for row in rows]
    assert np.array_equal(model.embed_tokens(arrays, batch_size=3), model.embed(TEXTS))
    assert model.embed_tokens([]).shape == (0, 24)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([[CLS, SEP], [CLS, -1, SEP]], "row 1: token -1 at 1 is outside the vocabulary"),
        ([[CLS, 10**6]], "row 0: token 1000000 at 1 is outside the vocabulary"),
        ([[CLS, 1.5]], "row 0: expected a text or token ids"),
        ([[CLS] * 161], "row 0 has 161 tokens, the model reads 160"),
        ("bal", "row 0: expected token ids, found 'b'"),
        ([CLS, SEP], f"row 0: expected token ids, found {CLS}"),
        (np.array([CLS, SEP]), "row 0: expected token ids, found"),
        ([[CLS, SEP], "bal"], "row 1: expected token ids, found 'bal'"),
        ({"input_ids": [[CLS, SEP]]}, "expected rows of token ids, found dict"),
        (UserDict(input_ids=[[CLS, SEP]]), "expected rows of token ids, found UserDict"),  # transformers' results
        (None, "expected rows of token ids, found NoneType"),
        (np.array(5), "expected rows of token ids, found ndarray"),
    ],
)
def test_rows_that_are_no_tokens_are_refused(model: EmbeddingModel, rows: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        model.embed_tokens(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_pooling_equals_numpy(tmp_path: Path, kind: str) -> None:
    weights = small_bert.write(tmp_path, files=sentence_transformers(kind, normalize=False))
    model = encoder(tmp_path)
    wanted = np.stack([pooled(hidden_states(weights, tokens_of(text)), kind) for text in TEXTS])
    assert model.pooling == kind and not model.normalize
    vectors = model.embed(TEXTS)
    assert np.abs(vectors - wanted).max() / np.abs(wanted).max() < 2e-6
    for text, row in zip(TEXTS, vectors, strict=True):
        assert np.array_equal(model.embed(text), row)


def test_normalisation_may_be_asked_for_or_not(model: EmbeddingModel) -> None:
    raw = model.embed(TEXTS, normalize=False)
    assert np.abs(np.linalg.norm(raw, axis=1) - 1).min() > 0.01
    assert np.allclose(unit(raw), model.embed(TEXTS), atol=1e-6)
    assert np.array_equal(model.embed(TEXTS, normalize=True), model.embed(TEXTS))


def test_one_text_gives_one_vector_and_none_give_none(model: EmbeddingModel) -> None:
    assert f"texts of up to {model.limit} tokens" in repr(model)
    assert model.embed("bal").shape == (24,)
    assert model.embed("").shape == (24,) and np.isfinite(model.embed("")).all()
    assert model.embed(["bal"]).shape == (1, 24)
    empty = model.embed([])
    assert empty.shape == (0, 24) and empty.dtype == np.float32
    rows = model.embed(TEXTS)
    for texts in (tuple(TEXTS), iter(TEXTS), np.array(TEXTS), dict.fromkeys(TEXTS).keys()):
        assert np.array_equal(model.embed(texts)[:3], rows[:3])


def test_texts_that_differ_only_in_special_tokens_are_texts(model: EmbeddingModel, weights: dict[str, Array]) -> None:
    assert not np.array_equal(model.embed("bal [SEP]"), model.embed("bal"))
    vector = model.embed("[SEP]")
    assert SEP not in model.tokenizer.encode("[SEP]")[1:-1] and np.isfinite(vector).all()


# -- the same bits ---------------------------------------------------------------------------------------------------
def test_no_bit_depends_on_neighbours_batches_or_threads(folder: Path, model: EmbeddingModel) -> None:
    alone = np.stack([model.embed(text) for text in TEXTS])
    for size in (None, 1, 2, 3, 100):
        assert np.array_equal(model.embed(TEXTS, batch_size=size), alone)
    assert np.array_equal(model.embed(TEXTS[::-1])[::-1], alone)
    for threads in (1, 2):
        assert np.array_equal(encoder(folder, threads=threads).embed(TEXTS), alone)


def test_no_bit_depends_on_where_a_window_ends(model: EmbeddingModel, monkeypatch: pytest.MonkeyPatch) -> None:
    together = model.embed(TEXTS)
    monkeypatch.setattr(module, "WINDOW", 3)
    assert np.array_equal(model.embed(TEXTS), together)


def test_eight_threads_at_once_get_the_same_bits(model: EmbeddingModel) -> None:
    wanted = model.embed(TEXTS)
    with ThreadPoolExecutor(8) as pool:
        for vectors in pool.map(lambda size: model.embed(TEXTS, batch_size=size), [1, 2, 3, 4] * 4):
            assert np.array_equal(vectors, wanted)


def test_equal_texts_are_computed_once(model: EmbeddingModel, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["bal dam", "fom", "bal  dam", "bal dam", "fom"]
    wanted = np.stack([model.embed(text) for text in texts])
    seen: list[int] = []
    run = EmbeddingModel._run_batch
    counted = lambda self, rows, *more: seen.append(len(rows)) or run(self, rows, *more)
    monkeypatch.setattr(EmbeddingModel, "_run_batch", counted)
    assert np.array_equal(model.embed(texts), wanted)
    assert sum(seen) == 2


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_batches_hold_every_row_once_and_hardly_any_padding(threads: int) -> None:
    rng = np.random.default_rng(0)
    lengths = dict(enumerate(rng.integers(1, 256, 3000).tolist())) | {3000: 4 * TOKENS}
    all_batches = list(batches(lengths, threads=threads))
    assert sorted(i for rows in all_batches for i in rows) == sorted(lengths)
    computed = 0
    for rows in all_batches:
        width = max(lengths[i] for i in rows)
        assert len(rows) == 1 or len(rows) * width <= TOKENS * threads
        computed += len(rows) * width
    assert computed < 1.015 * sum(lengths.values())
    assert [len(rows) for rows in batches(dict.fromkeys(range(7), 5), 3)] == [3, 3, 1]


# -- length ----------------------------------------------------------------------------------------------------------
def test_long_texts_are_cut_but_keep_their_end_and_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = small_bert.write(tmp_path, files=sentence_transformers(max_seq_length=8))
    model = encoder(tmp_path)
    assert model.limit == 8
    words = WORDS[:30]
    with caplog.at_level(logging.WARNING, "rlx.embed"):
        vectors = model.embed([" ".join(words), "bal", " ".join(words[:7]), " ".join(words[:6])])
    assert [record.getMessage() for record in caplog.records] == [
        "2 of 4 texts were cut to the 8 tokens that the model reads"
    ]
    cut = [CLS, *tokens_of(" ".join(words))[1:7], SEP]
    wanted = unit(pooled(hidden_states(weights, cut), "mean"))
    assert np.abs(vectors[0] - wanted).max() < 2e-6
    assert np.array_equal(vectors[0], vectors[2]) and np.array_equal(vectors[0], vectors[3])


def test_of_a_huge_text_only_the_beginning_is_encoded(model: EmbeddingModel, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    encode = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text, **o: sizes.append(len(text)) or encode(self, text, **o))
    start = " ".join(MORE[:170])
    vectors = model.embed(["bal", f"{start} {' '.join(MORE)}" + " bal" * 1_000_000])
    assert sizes and sum(sizes) < 20_000
    assert np.array_equal(vectors[1], model.embed(start))
    with pytest.raises(RequestError, match="text 0 has more than 160 tokens, the model reads 160"):
        model.embed(" ".join(MORE) + " bal" * 1_000_000, truncate=False)


def test_without_truncation_a_long_text_is_an_error_with_both_numbers(model: EmbeddingModel) -> None:
    long = " ".join(MORE[:170])
    with pytest.raises(RequestError, match="text 1 has 172 tokens, the model reads 160"):
        model.embed(["bal", long], truncate=False)
    assert model.embed(["bal", " ".join(MORE[:158])], truncate=False).shape == (2, 24)


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, 160),
        ({"tokenizer_config.json": {"model_max_length": 20}}, 20),
        ({"tokenizer_config.json": {"model_max_length": 1e30}}, 160),
        ({"tokenizer_config.json": {"model_max_length": 20}, "sentence_bert_config.json": {"max_seq_length": 30}}, 30),
        ({"sentence_bert_config.json": {"max_seq_length": None}}, 160),
        ({"sentence_bert_config.json": {"max_seq_length": 512}}, 160),
    ],
)
def test_the_limit_is_the_smallest_that_is_said(tmp_path: Path, files: dict[str, Any], limit: int) -> None:
    small_bert.write(tmp_path, files=sentence_transformers() | files)
    assert encoder(tmp_path).limit == limit
    assert encoder(tmp_path, context=16).limit == 16


def test_a_limit_without_room_for_text_is_a_format_error(tmp_path: Path) -> None:
    small_bert.write(tmp_path, files=sentence_transformers(max_seq_length=2))
    with pytest.raises(FormatError, match="2 tokens, of which 2 are special"):
        encoder(tmp_path).embed("bal")


# -- what files say --------------------------------------------------------------------------------------------------
def test_a_bare_model_is_averaged_and_not_normalised_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = small_bert.write(tmp_path, files={})
    with caplog.at_level(logging.WARNING, "rlx.embed"):
        model = encoder(tmp_path)
    assert caplog.text.count("no file says how to pool") == 1
    assert (model.pooling, model.normalize) == ("mean", False)
    wanted = pooled(hidden_states(weights, tokens_of("bal dam")), "mean")
    assert np.abs(model.embed("bal dam") - wanted).max() < 5e-6


def test_prompts_go_before_texts_by_name_or_by_default(tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "kol kom ", "document": ""}, "default_prompt_name": None}
    small_bert.write(tmp_path, files=sentence_transformers() | {"config_sentence_transformers.json": prompts})
    model = encoder(tmp_path)
    with_prompt = model.embed("kol kom bal")
    assert np.array_equal(model.embed("bal", prompt="query"), with_prompt)
    assert np.array_equal(model.embed("bal", prompt="document"), model.embed("bal"))
    with pytest.raises(RequestError, match="no prompt 'quary'") as caught:
        model.embed("bal", prompt="quary")
    assert "did you mean 'query'" in str(caught.value.hint)

    prompts["default_prompt_name"] = "query"
    small_bert.write(tmp_path, files=sentence_transformers() | {"config_sentence_transformers.json": prompts})
    assert np.array_equal(encoder(tmp_path).embed("bal"), with_prompt)


def test_a_prompt_that_must_not_be_pooled_is_refused(tmp_path: Path) -> None:
    files = sentence_transformers() | {"config_sentence_transformers.json": {"prompts": {"query": "kol "}}}
    files["1_Pooling/config.json"]["include_prompt"] = False
    small_bert.write(tmp_path, files=files)
    model = encoder(tmp_path)
    assert model.embed("bal").shape == (24,)
    with pytest.raises(CapabilityError, match="'query'"):
        model.embed("bal", prompt="query")


def test_texts_are_put_in_lower_case_where_files_say_so(tmp_path: Path, model: EmbeddingModel) -> None:
    small_bert.write(tmp_path, files=sentence_transformers(do_lower_case=True))
    lower = encoder(tmp_path)
    assert np.array_equal(lower.embed("BAL Dam"), lower.embed("bal dam"))
    assert not np.array_equal(model.embed("BAL Dam"), model.embed("bal dam"))


# -- similarity ------------------------------------------------------------------------------------------------------
def test_similarity_is_the_cosine_of_texts_or_vectors(model: EmbeddingModel) -> None:
    rows = model.embed(TEXTS[:3], normalize=False)
    wanted = unit(rows.astype(np.float64)) @ unit(rows.astype(np.float64)).T
    assert np.abs(model.similarity(TEXTS[:3], TEXTS[:3]) - wanted).max() < 1e-6
    assert np.abs(model.similarity(rows, rows) - wanted).max() < 1e-6
    assert np.abs(model.similarity(TEXTS[0], rows) - wanted[0]).max() < 1e-6
    assert np.abs(model.similarity(np.array(TEXTS[:2]), rows) - wanted[:2]).max() < 1e-6
    one = model.similarity(TEXTS[0], TEXTS[1])
    assert isinstance(one, float) and abs(one - wanted[0, 1]) < 1e-6


def test_similarity_is_what_the_files_ask_for(tmp_path: Path) -> None:
    said = {"similarity_fn_name": "dot"}
    small_bert.write(
        tmp_path, files=sentence_transformers(normalize=False) | {"config_sentence_transformers.json": said}
    )
    model = encoder(tmp_path)
    rows = model.embed(TEXTS[:2])
    assert np.allclose(model.similarity(TEXTS[0], TEXTS[1]), rows[0] @ rows[1])
    said["similarity_fn_name"] = "manhattan"
    small_bert.write(tmp_path, files=sentence_transformers() | {"config_sentence_transformers.json": said})
    with pytest.raises(CapabilityError, match="manhattan"):
        encoder(tmp_path).similarity("bal", "dam")


# -- what is refused -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["bal", 3], "text 1: expected str, found int"),
        ([None], "text 0: expected str, found NoneType"),
        (["bal", b"dam"], "text 1: expected str, found bytes"),
        ([["bal"]], "text 0: expected str, found list"),
        (b"bal", "found bytes"),
        (None, "found NoneType"),
        (7, "found int"),
        ({"text": "bal"}, "found dict"),
        (["bal", "\ud800"], "text 1: half of a surrogate pair"),
    ],
)
def test_what_is_no_text_is_refused_by_its_place(model: EmbeddingModel, texts: Any, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        model.embed(texts)


def test_a_place_beyond_the_first_window_can_be_found(model: EmbeddingModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW", 2)
    with pytest.raises(RequestError) as caught:
        model.embed(["bal", "bal", "bal", "\ud800"])
    assert "text 1" in str(caught.value) and "counted from text 2" in "".join(caught.value.notes)


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "3"])
def test_a_batch_size_is_a_number_from_one(model: EmbeddingModel, size: Any) -> None:
    with pytest.raises(RequestError, match=r"^embed: batch_size is"):
        model.embed(["bal"], batch_size=size)
    with pytest.raises(RequestError, match=r"^embed_tokens: batch_size is"):
        model.embed_tokens([[1]], batch_size=size)


@pytest.mark.parametrize("verb", ["generate", "chat", "stream", "logits"])
def test_an_encoder_says_what_it_is_for(model: EmbeddingModel, verb: str) -> None:
    with pytest.raises(CapabilityError, match="is an encoder") as caught:
        getattr(model, verb)("bal")
    assert caught.value.hint == f"use .embed(), or load a decoder such as smollm2-135m for .{verb}()"
    assert not hasattr(model, verb)


def test_a_model_without_a_tokenizer_says_what_is_missing(tmp_path: Path) -> None:
    small_bert.write(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CapabilityError, match="no tokenizer"):
        encoder(tmp_path).embed("bal")


def test_a_closed_model_refuses(tmp_path: Path) -> None:
    small_bert.write(tmp_path)
    with encoder(tmp_path) as model:
        model.embed("bal")
    with pytest.raises(RequestError, match="closed"):
        model.embed("bal")


# -- 8-bit integers --------------------------------------------------------------------------------------------------
WIDE = {"hidden_size": 96, "intermediate_size": 128}  # wide enough for weights to become integers


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide")
    small_bert.write(path, files={}, **WIDE)
    return path


def test_vectors_of_integers_are_close_to_those_of_numpy(wide_folder: Path) -> None:
    weights = small_bert.random_weights(small_bert.settings(**WIDE))
    wanted = unit(np.stack([pooled(hidden_states(weights, tokens_of(text)), "mean") for text in TEXTS]))
    vectors = unit(encoder(wide_folder, precision="int8").embed(TEXTS))
    assert (vectors * wanted).sum(1).min() > 0.999
    assert np.abs(vectors - wanted).max() > 1e-5, "it is not f32"
    assert np.abs(unit(encoder(wide_folder, precision="f32").embed(TEXTS)) - wanted).max() < 2e-6


def test_vectors_of_integers_depend_on_their_text_alone(wide_folder: Path) -> None:
    model = encoder(wide_folder, precision="int8")
    together = model.embed(TEXTS)
    for text, row in zip(TEXTS, together, strict=True):
        assert np.array_equal(model.embed(text), row)
    assert np.array_equal(model.embed(TEXTS, batch_size=3), together)
    assert np.array_equal(encoder(wide_folder, precision="int8", threads=2).embed(TEXTS), together)


def test_a_precision_overrules_the_profile(wide_folder: Path) -> None:
    plain, integer = (encoder(wide_folder, precision=p) for p in ("auto", "int8"))
    assert plain.profile.precision.compute == "f32" and integer.profile.precision.compute == "int8"
    assert plain.fingerprint(0) != integer.fingerprint(0)
    profile = CompileProfile(precision=Precision("int8"))
    assert encoder(wide_folder, profile=profile).profile.precision == Precision("int8", activations="int8")
    exact = encoder(wide_folder, profile=profile, precision="f32").profile
    assert exact.precision == Precision("f32", activations="f32")
    assert integer.memory().total < plain.memory().total


def test_what_cannot_be_computed_in_integers_says_so(wide_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match="precision 'int4' is not supported for encoders") as caught:
        encoder(wide_folder, precision="int4")
    assert caught.value.hint == "there is: auto, f32, int8"
    tiny_llama.write(tmp_path)
    with pytest.raises(CapabilityError, match="precision 'int8' is not supported for decoders") as caught:
        load(tmp_path, precision="int8")
    assert caught.value.hint == "there is: auto, f32"


@pytest.mark.weights
def test_integers_rank_sentences_as_people_do() -> None:
    """MiniLM on pairs of STS-B: Spearman's correlation is at most 0.002 below that of f32, which is 0.8203."""
    file = ASSETS / "text" / "stsb-en-test.csv"
    if not file.exists():
        pytest.skip(f"{file} is absent")
    with file.open(encoding="utf-8", newline="") as lines:
        first, second, scores = zip(*csv.reader(lines), strict=True)
    model = load("minilm-l6", precision="int8")
    assert isinstance(model, EmbeddingModel)
    a, b = model.embed(first), model.embed(second)
    assert spearmanr((a * b).sum(1), [float(score) for score in scores]).statistic > 0.8183
    plain = load("minilm-l6")
    assert isinstance(plain, EmbeddingModel)
    assert (plain.embed(first[:100]) * a[:100]).sum(1).min() > 0.99


# -- progress --------------------------------------------------------------------------------------------------------
class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_a_terminal_when_asked_for(model: EmbeddingModel, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = model.embed(TEXTS)
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", terminal)
    model.embed(TEXTS)
    assert not terminal.getvalue()
    assert np.array_equal(model.embed([*TEXTS, TEXTS[0]], show_progress=True)[:-1], wanted)
    assert "embedding" in terminal.getvalue()


def test_progress_is_not_shown_elsewhere(
    model: EmbeddingModel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model.embed(TEXTS, show_progress=True)
    captured = capsys.readouterr()
    assert not captured.out and not captured.err
    monkeypatch.setattr("sys.stderr", None)
    model.embed(TEXTS, show_progress=True)


# -- requests that cannot be ---------------------------------------------------------------------------------------
DIM = 24


@pytest.mark.parametrize(
    ("texts", "settings", "message"),
    [
        (np.array("bal"), {}, "found ndarray"),
        (np.array(3), {}, "found ndarray"),
        (5, {}, "found int"),
        ("bal", {"prompt": 5}, "prompt is 5, expected the name of one"),
        ("bal", {"prompt": ["a"]}, "prompt is"),
        ("bal", {"normalize": "no"}, "normalize is 'no', expected True, False or None"),
        ("bal", {"normalize": 1}, "normalize is 1"),
        ("bal", {"batch_size": True}, "batch_size is True"),
        ("bal", {"batch_size": 0}, "batch_size is 0"),
        ("bal", {"batch_size": 2.5}, "batch_size is 2.5"),
    ],
)
def test_a_request_that_cannot_be_says_why(
    model: EmbeddingModel, texts: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        model.embed(texts, **settings)


def test_numbers_of_numpy_are_fine(model: EmbeddingModel) -> None:
    vectors = model.embed(["bal", "dam"], batch_size=np.int64(1), normalize=np.bool_(False))  # type: ignore[arg-type]
    assert np.array_equal(vectors, model.embed(["bal", "dam"], normalize=False))


@pytest.mark.parametrize("shape", [(), (5,), (2, DIM + 1), (1, 2, DIM)])
def test_vectors_that_do_not_fit_are_refused_with_both_shapes(model: EmbeddingModel, shape: tuple[int, ...]) -> None:
    for sides in ((np.zeros(shape), "bal"), ("bal", np.zeros(shape))):
        with pytest.raises(RequestError, match="similarity: the sides have the shapes") as caught:
            model.similarity(*sides)
        assert str(list(shape)) in str(caught.value) and f"[{DIM}]" in str(caught.value)


def test_a_context_without_room_for_text_is_the_mistake_of_whoever_asked(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="at most 2 tokens, of which 2 are special") as caught:
        encoder(folder, context=2).embed("bal")
    assert "larger context" in (caught.value.hint or "")
    small_bert.write(tmp_path, files=sentence_transformers(max_seq_length=1))
    with pytest.raises(FormatError, match="at most 1 token, of which 2 are special"):
        encoder(tmp_path).embed("bal")
