"""BPE over mapped tables matches the Rust library's model, for random small vocabularies and real ones."""

from __future__ import annotations

import copy
import json
import pickle
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_files import asset, pulled
from test_tokenizer import HARD_TEXTS, bpe_metadata, sentencepiece_metadata, vocab
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from rlx.errors import FormatError
from rlx.formats import bpe, open_gguf
from rlx.formats.tokenizer import Tokenizer

LETTERS = "ab▁ .é🙂"
VOCABS = ("gpt-2", "llama-bpe", "llama-spm", "qwen2")
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
WORDS = (
    "the", "The", "naïve", "don't", "12345", "東京", "🙂", "👍🏽", "e\u0301", "\n", "\n\n\n", "\t", "  ", "    ",
    " ", "", "\r\n", "\x00", "\x7f", "\u200d", "<s>", "</s>", "> </", "<|im_end|>", "▁", "▁▁a", "<0x0A>", "...", "//",
    "{}", "=", "<start_of_turn>", "<unused7>", "import", "x" * 40, "\ufffd", "\u00a0", "ﬁ", "नमस्ते",
)  # fmt: skip


def texts_of_words(rng: random.Random, count: int) -> list[str]:
    return ["".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 25))) for _ in range(count)]


def assert_same(ours: Tokenizer, rust: RustTokenizer, texts: list[str]) -> None:
    """Check that ids and offsets match the library, with special tokens parsed."""
    wanted = rust.encode_batch(texts, add_special_tokens=False)
    assert ours.encode_batch(texts, add_special=False, parse_special=True) == [e.ids for e in wanted]
    for text, theirs in zip(texts, wanted, strict=True):
        assert ours.encode(text, add_special=False, parse_special=True) == theirs.ids, text
        assert ours._parsing.encode(text, add_special_tokens=False).offsets == theirs.offsets, text


# -- small vocabularies ----------------------------------------------------------------------------------------------
def random_rust(rng: random.Random) -> RustTokenizer:
    """A library tokenizer with random tokens, merges and options."""
    prefix, suffix = rng.choice([(None, None)] * 4 + [("##", None), (None, "</w>"), ("##", "</w>")])
    letters = [c for c in LETTERS if rng.random() < 0.85]
    forms = letters + [f"{p or ''}{c}{s or ''}" for c in letters for p in ("", prefix) for s in ("", suffix)]
    tokens = dict.fromkeys(forms)
    missing = rng.choice([None, None, 0xC3])  # of é and ñ
    if rng.random() < 0.5:
        tokens |= dict.fromkeys(f"<0x{b:02X}>" for b in range(256) if b != missing)
    unknown = rng.choice([None, "<unk>", "<unk>"])
    if unknown:
        tokens[unknown] = None
    merges: list[tuple[str, str]] = []
    for _ in range(rng.randrange(25)):
        left, right = rng.choice(list(tokens)), rng.choice(list(tokens))
        joined = left + right[len(prefix or "") :]
        if right.startswith(prefix or "") and len(joined) < 12:
            tokens[joined] = None
            merges.append((left, right))
    merges += rng.sample(merges, min(len(merges), 3))  # duplicate pairs
    ids = list(range(len(tokens) + 5))
    rng.shuffle(ids)
    numbers = dict(zip(tokens, ids, strict=False)) if rng.random() < 0.3 else {t: i for i, t in enumerate(tokens)}
    texts = {"unk_token": unknown, "continuing_subword_prefix": prefix, "end_of_word_suffix": suffix}
    rust = RustTokenizer(
        models.BPE(
            numbers, merges, fuse_unk=rng.random() < 0.5, byte_fallback=rng.random() < 0.5,
            ignore_merges=rng.random() < 0.2, **{name: value for name, value in texts.items() if value},
        )
    )  # fmt: skip
    if rng.random() < 0.5:
        rust.normalizer = normalizers.Replace(" ", "▁")
    if rng.random() < 0.4:
        rust.pre_tokenizer = pre_tokenizers.Split(Regex(r"\.|▁+"), rng.choice(["isolated", "merged_with_next"]))
    rust.add_tokens([AddedToken("bb", special=True, normalized=rng.random() < 0.5), AddedToken("a.", special=False)])
    return rust


def test_random_vocabularies_merge_as_the_rust_library_merges_them() -> None:
    rng = random.Random(0)
    cuts, texts = 0, [""]
    texts += ["".join(rng.choice(LETTERS + "xñ") for _ in range(rng.randrange(1, 30))) for _ in range(25)]
    for _ in range(250):
        rust = random_rust(rng)
        ours = Tokenizer.from_json(rust.to_str().encode())
        assert ours._bpe is not None
        cuts += bool(len(ours._bpe.tables["cut"]))
        assert_same(ours, rust, texts)
    assert 30 < cuts < 220


@settings(max_examples=150)
@given(st.integers(0, 10**9), st.lists(st.text(LETTERS + "xyñ", max_size=40), min_size=1, max_size=4))
def test_any_text_of_any_small_vocabulary_is_the_rust_librarys(seed: int, texts: list[str]) -> None:
    rust = random_rust(random.Random(seed))
    assert_same(Tokenizer.from_json(rust.to_str().encode()), rust, texts)


def test_a_text_is_cut_before_spaces_but_not_where_a_merge_goes_across() -> None:
    data = sentencepiece_metadata()
    data["tokenizer.ggml.tokens"] = [*data["tokenizer.ggml.tokens"], "b▁", "b▁a", "▁▁"]
    data["tokenizer.ggml.token_type"] = [*data["tokenizer.ggml.token_type"], 1, 1, 1]
    data["tokenizer.ggml.scores"] = [*data["tokenizer.ggml.scores"], -0.5, -0.25, -0.75]
    tokenizer = Tokenizer.from_gguf(data)
    assert tokenizer._bpe is not None and "".join(map(chr, tokenizer._bpe.tables["cut"])) == "▁b"
    words: list[str] = []
    tokenizer._bpe.tokens, tokens = lambda word: [words.append(word), tokens(word)][1], tokenizer._bpe.tokens  # type: ignore[method-assign,func-returns-value]
    assert tokenizer.encode("a ab a  a", add_special=False) == [262, 262, 265, 266, 260]
    assert words == ["▁a", "▁ab▁a", "▁▁a"]


# -- real vocabularies -----------------------------------------------------------------------------------------------
@cache
def library(name: str) -> RustTokenizer:
    return RustTokenizer.from_buffer(vocab(name).to_json())


@pytest.mark.parametrize("name", VOCABS)
def test_real_vocabularies_merge_as_the_rust_library_merges_them(name: str) -> None:
    wiki = asset("text", "wiki.test.raw").read_text()
    code = Path(bpe.__file__).read_text()
    texts = [*HARD_TEXTS, *texts_of_words(random.Random(name), 200), wiki[:30_000], wiki[30_000:32_000], code]
    assert_same(vocab(name), library(name), texts)
    for text in texts:
        encoding = library(name).encode(text, add_special_tokens=False)
        special = [
            (*at, i) for at, i in zip(encoding.offsets, encoding.ids, strict=True) if i in vocab(name).special_ids
        ]
        assert vocab(name).special_spans(text) == special


@pytest.mark.parametrize("name", ["gpt-2", "llama-spm"])
def test_any_text_of_a_real_vocabulary_is_the_rust_librarys(name: str) -> None:
    ours, rust = vocab(name), library(name)

    @settings(max_examples=150)
    @given(st.lists(st.one_of(TEXTS, st.sampled_from(WORDS)), max_size=6))
    def check(parts: list[str]) -> None:
        assert_same(ours, rust, ["".join(parts), " ".join(parts)])

    check()


@pytest.mark.parametrize("name", ["gpt-2", "qwen2"])
def test_tokenizer_json_has_the_merges_of_the_file(name: str) -> None:
    metadata = open_gguf(asset("vocab", f"ggml-vocab-{name}.gguf")).metadata
    model = json.loads(vocab(name).to_json())["model"]
    assert list(model["vocab"]) == list(metadata["tokenizer.ggml.tokens"])
    assert list(model["vocab"].values()) == list(range(len(model["vocab"])))
    assert [" ".join(merge) for merge in model["merges"]] == list(metadata["tokenizer.ggml.merges"])


@pytest.mark.weights
@pytest.mark.parametrize("model", ["smollm2-135m", "qwen2.5-coder-1.5b", "gemma3-270m"])
def test_the_tokenizers_of_real_models_are_the_rust_librarys(model: str) -> None:
    ours = Tokenizer.from_gguf(open_gguf(pulled(model)).metadata)
    document = ours.to_json()
    rust, again = RustTokenizer.from_buffer(document), Tokenizer.from_json(document)
    wiki = asset("text", "wiki.test.raw").read_text()
    files = [path.read_text() for path in sorted(Path(bpe.__file__).parent.glob("*.py"))]
    texts = [*HARD_TEXTS, *texts_of_words(random.Random(model), 1000), *wiki[:200_000].splitlines(), wiki[:100_000]]
    assert_same(ours, rust, texts + files)
    other = restored(ours)
    for parse in (False, True):
        ids = ours.encode_batch(texts, parse_special=parse)
        assert again.encode_batch(texts, parse_special=parse) == ids == other.encode_batch(texts, parse_special=parse)
    for text in HARD_TEXTS:
        assert other.decode(other.encode(text), skip_special=True) == text.replace(
            "▁", " " if "gemma" in model else "▁"
        )

    @settings(max_examples=300)
    @given(st.lists(st.one_of(TEXTS, st.sampled_from(WORDS)), max_size=8))
    def check(parts: list[str]) -> None:
        assert_same(ours, rust, ["".join(parts), " ".join(parts)])

    check()


# -- keeping ---------------------------------------------------------------------------------------------------------
def restored(tokenizer: Tokenizer) -> Tokenizer:
    data, tables = tokenizer.pack()
    mapped = {name: np.frombuffer(bytes(a.data), a.dtype) if a.size else a for name, a in tables.items()}  # read-only
    return Tokenizer.restore(tokenizer.describe(), data, mapped, "kept")


@pytest.mark.parametrize("name", ["bert-bge", "gpt-2", "llama-spm"])
def test_a_tokenizer_that_was_kept_is_the_same(name: str) -> None:
    ours, other = vocab(name), restored(vocab(name))
    for parse in (False, True):
        assert other.encode_batch(HARD_TEXTS, parse_special=parse) == ours.encode_batch(HARD_TEXTS, parse_special=parse)
    assert [other.token_bytes(i) for i in range(2000)] == [ours.token_bytes(i) for i in range(2000)]
    assert other.to_json() == ours.to_json() and other.describe() == ours.describe()


@pytest.mark.parametrize("name", ["bert-bge", "gpt-2", "llama-spm"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda tokenizer: pickle.loads(pickle.dumps(tokenizer))])
def test_a_tokenizer_goes_to_other_processes(name: str, copied: Callable[[Tokenizer], Tokenizer]) -> None:
    ours, other = vocab(name), copied(vocab(name))
    assert other.encode_batch(HARD_TEXTS) == ours.encode_batch(HARD_TEXTS)
    assert (repr(other), other.describe()) == (repr(ours), ours.describe())


def test_what_is_stored_outside_the_tables_does_not_grow_with_the_vocabulary() -> None:
    data, tables = vocab("qwen2").pack()
    assert len(data) < 100_000 and set(tables) == {"text", "ends", "order", "letters", "first", "right", "merge", "cut"}


# -- names and files -------------------------------------------------------------------------------------------------
def rust_document(**changes: Any) -> bytes:
    rust = RustTokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    document = json.loads(rust.to_str())
    document["model"] |= changes
    return json.dumps(document).encode()


def test_ids_with_gaps_and_added_tokens_have_the_librarys_numbers() -> None:
    document = json.loads(rust_document(vocab={"a": 0, "b": 9, "ab": 4, "": 5}))
    named = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    document["added_tokens"] = [named | {"id": i, "content": c} for i, c in ((70, "<x>"), (3, "ab"), (80, "<y>"))]
    data = json.dumps(document).encode()
    ours, rust = Tokenizer.from_json(data), RustTokenizer.from_buffer(data)
    assert ours.vocab_size == max(rust.get_vocab().values()) + 1
    assert_same(ours, rust, ["a<x>b<y>ab", "<y><x>"])
    names = [ours._bpe.name(i) for i in range(-1, 12)] if ours._bpe else []
    assert names == [None, "a", *[None] * 3, "ab", "", *[None] * 3, "b", None, None]


def test_an_added_token_of_the_model_does_not_move_the_ids_of_those_after_it() -> None:
    document = json.loads(rust_document(vocab={"a": 0, "b": 10, "ab": 20}))
    named = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    document["added_tokens"] = [named | {"id": i, "content": c} for i, c in ((20, "ab"), (21, "<x>"), (22, "<y>"))]
    data = json.dumps(document).encode()
    assert_same(Tokenizer.from_json(data), RustTokenizer.from_buffer(data), ["a<x>b<y>ab", "ab<y><x>"])


def test_the_first_character_may_be_the_first_token() -> None:
    rust = RustTokenizer(models.BPE({"\x00": 0, "\U0010ffff": 1, "\x00\x00": 2}, [("\x00", "\x00")]))
    assert_same(Tokenizer.from_json(rust.to_str().encode()), rust, ["\x00", "\x00\x00\x00\U0010ffff", "\x01\x00"])


def test_a_space_inside_a_token_is_kept_where_merges_are_pairs() -> None:
    rust = RustTokenizer(models.BPE({"a": 0, " ": 1, " a": 2, "a a": 3}, [(" ", "a"), ("a", " a")]))
    assert_same(Tokenizer.from_json(rust.to_str().encode()), rust, ["a a a", "  a", "a  a a"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab": {"a": 0, "b": 1, "ab": 1}}, "'b' and 'ab' have the same id, 1"),
        ({"vocab": {"a": -1}}, "expected an id, found -1 for 'a'"),
        ({"vocab": {"a": True}}, "expected an id, found True for 'a'"),
        ({"vocab": ["a"]}, "expected a vocab, found list"),
        ({"merges": {"a": "b"}}, "expected merges, found dict"),
        ({"merges": [["a", "b", "a"]]}, "expected two tokens, found ['a', 'b', 'a'] at 0"),
        ({"merges": ["a b", "ab"]}, "expected two tokens, found ['ab'] at 1"),
        ({"merges": [["a", "b"], "a b"]}, "expected two tokens, found 'a b' at 1"),
        ({"merges": [["b", "a"]]}, "token 'ba' of a merge is out of vocabulary"),
        ({"unk_token": 3}, "expected a string"),
    ],
)
def test_a_broken_model_says_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError) as caught:
        Tokenizer.from_json(rust_document(**changes))
    assert str(caught.value).startswith("tokenizer.json: ") and message in str(caught.value)


def test_an_unknown_token_that_is_absent_is_named_when_it_is_needed() -> None:
    tokenizer = Tokenizer.from_json(rust_document(unk_token="<gone>"))
    assert tokenizer.encode("ab") == [2]
    with pytest.raises(FormatError, match=r"^tokenizer\.json: unk_token: the vocabulary has no '<gone>'$"):
        tokenizer.encode("x")


def test_old_files_have_merges_as_lines() -> None:
    data = rust_document(merges=["#version: 0.2", "a b"])
    assert_same(Tokenizer.from_json(data), RustTokenizer.from_buffer(data), ["abab", "ba"])


def test_an_interrupt_while_words_are_merged_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    tokenizer = Tokenizer.from_gguf(bpe_metadata())
    monkeypatch.setattr(bpe.Bpe, "_merge", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("the")


# -- threads and time ------------------------------------------------------------------------------------------------
def test_threads_share_what_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bpe, "MAX_CACHED", 3)  # evicts constantly
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata())
    texts = texts_of_words(random.Random(5), 20)
    wanted = Tokenizer.from_gguf(sentencepiece_metadata()).encode_batch(texts)
    with ThreadPoolExecutor(8) as pool:
        assert all(ids == wanted for ids in pool.map(lambda _: tokenizer.encode_batch(texts), range(16)))


@pytest.mark.parametrize("name", ["gpt-2", "llama-spm"])
def test_long_words_and_long_texts_take_their_time_in_proportion(name: str) -> None:
    wiki = asset("text", "wiki.test.raw").read_text()[:100_000]
    for text in ("ab" * 20_000, "=" * 40_000, wiki):
        begin = time.process_time()
        ids = vocab(name).encode(text, add_special=False)
        assert time.process_time() - begin < 2  # a quadratic loop takes minutes
        assert ids == library(name).encode(text, add_special_tokens=False).ids
