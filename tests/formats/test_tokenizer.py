"""Tokenizers against llama.cpp's expectations, a rewrite of llama2.c's rules and transformers; broken files."""

from __future__ import annotations

import copy
import csv
import json
import random
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_files import ASSETS, asset
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, pre_tokenizers

from rlx.errors import FormatError, RequestError, RlxError
from rlx.formats import open_gguf
from rlx.formats.pretokenize import PRE_TOKENIZERS
from rlx.formats.tokenizer import Tokenizer

VOCABS = ("bert-bge", "gpt-2", "llama-bpe", "llama-spm", "qwen2")
SEPARATOR = "\n__ggml_vocab_test__\n"
HARD_TEXTS = (
    "", " ", "  a", "a\n\n b", "Äpfel", "'ll 'LL 'ſ", "3.14159 1234567", "你好，世界",
    "\U0001f642\U0001f44d\U0001f3fd \U0001f468\u200d\U0001f469", "\u0928\u092e\u0938\u094d\u0924\u0947", "\u0301e",
    "\x00\x7f\x85", "▁x", "<s>", "</s>", "<|im_end|>", "<0x0A>", "[CLS]", "##ing", "Ġthe", "\r\n\t", "x" * 300,
    "  " * 40, "-" * 37,
)  # fmt: skip


@cache
def metadata_of(name: str) -> dict[str, Any]:
    return dict(open_gguf(asset("vocab", f"ggml-vocab-{name}.gguf")).metadata)


@cache
def vocab(name: str) -> Tokenizer:
    return Tokenizer.from_gguf(metadata_of(name), source=name)


@cache
def stories() -> Tokenizer:
    return Tokenizer.from_tok512(asset("stories260K", "tok512.bin"), 512)


# -- expectations of others ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", VOCABS)
def test_llama_cpps_expectations_hold(name: str) -> None:
    file = asset("vocab", f"ggml-vocab-{name}.gguf")
    texts = Path(f"{file}.inp").read_bytes().decode().split(SEPARATOR)
    expected = [[int(i) for i in line.split()] for line in Path(f"{file}.out").read_text().splitlines()]
    assert texts.pop() == "" and len(texts) == len(expected) == 46
    assert vocab(name).encode_batch(texts, add_special=False) == expected
    assert [vocab(name).encode(text, add_special=False) for text in texts] == expected


@pytest.mark.parametrize(
    ("name", "prefix", "suffix", "stops"),
    [
        ("bert-bge", (101,), (102,), set()),
        ("gpt-2", (), (), {50256}),
        ("llama-bpe", (128000,), (), {128001, 128009}),
        ("llama-spm", (1,), (), {2}),
        ("qwen2", (), (), {151643, 151645}),
    ],
)
def test_special_ids_are_the_files(
    name: str, prefix: tuple[int, ...], suffix: tuple[int, ...], stops: set[int]
) -> None:
    tokenizer = vocab(name)
    assert (tokenizer.prefix, tokenizer.suffix) == (prefix, suffix) and tokenizer.stop_ids == stops
    assert tokenizer.encode("") == [*prefix, *suffix]
    assert tokenizer.encode("a b") == [*prefix, *tokenizer.encode("a b", add_special=False), *suffix]
    assert tokenizer.vocab_size == len(metadata_of(name)["tokenizer.ggml.tokens"])
    assert (tokenizer.cls_id, tokenizer.sep_id) == ((101, 102) if name == "bert-bge" else (None, None))


@pytest.mark.parametrize("name", [n for n in VOCABS if n != "bert-bge"])
def test_text_survives_a_round_trip(name: str) -> None:
    tokenizer = vocab(name)
    for text in HARD_TEXTS:
        ids = tokenizer.encode(text)
        expected = text.replace("▁", " ") if name == "llama-spm" else text  # SentencePiece cannot tell the two apart
        assert tokenizer.decode(ids, skip_special=True) == expected


def test_bert_joins_words_as_its_decoder_does() -> None:
    ids = vocab("bert-bge").encode("Don't unbelievably stop, O.K.?")
    assert vocab("bert-bge").decode(ids) == "[CLS] don ' t unbelievably stop, o. k.? [SEP]"
    assert vocab("bert-bge").decode(ids, skip_special=True) == "don ' t unbelievably stop, o. k.?"


# -- llama2.c --------------------------------------------------------------------------------------------------------
def read_tokenizer_bin(path: Path, size: int) -> tuple[list[bytes], list[float]]:
    data = path.read_bytes()
    tokens, scores, at = [], [], 4
    for _ in range(size):
        score, length = struct.unpack_from("<fi", data, at)
        tokens.append(data[at + 8 : at + 8 + length])
        scores.append(score)
        at += 8 + length
    return tokens, scores


def llama2c_encode(tokens: list[bytes], scores: list[float], text: str) -> list[int]:
    """`encode` of run.c: bos, a space before the text, characters or their bytes + 3, then the best pair, leftmost."""
    index = {token: i for i, token in reversed(list(enumerate(tokens)))}
    ids = [1]
    if text:
        ids.append(index[b" "])
    for character in text:
        raw = character.encode()
        ids += [index[raw]] if raw in index else [byte + 3 for byte in raw]
    while True:
        best, where = -1e10, -1
        for i in range(len(ids) - 1):
            joined = index.get(tokens[ids[i]] + tokens[ids[i + 1]])
            if joined is not None and scores[joined] > best:
                best, where, token = scores[joined], i, joined
        if where < 0:
            return ids
        ids[where : where + 2] = [token]


def test_tok512_follows_llama2cs_rules() -> None:
    tokens, scores = read_tokenizer_bin(asset("stories260K", "tok512.bin"), 512)
    story = asset("stories260K", "expected_greedy_200tok.txt").read_text()
    rng = random.Random(0)
    random_texts = [
        "".join(rng.choice("aeinst  ▁LO.,'\n\"é你🙂") for _ in range(rng.randrange(60))) for _ in range(200)
    ]
    for text in [story, story[100:250], "Zoo", " Zoo", *random_texts]:
        assert stories().encode(text) == llama2c_encode(tokens, scores, text), text


def test_the_known_greedy_text_is_two_hundred_tokens() -> None:
    story = asset("stories260K", "expected_greedy_200tok.txt").read_text()
    ids = stories().encode(story)
    assert len(ids) == 201 and ids[0] == 1
    assert stories().decode(ids, skip_special=True) == story
    assert stories().decode(ids) == "<s>" + story
    assert stories().decode(ids[1:]) == story
    assert stories().encode("你", add_special=False)[1:] == [0xE4 + 3, 0xBD + 3, 0xA0 + 3]


def test_tok512_and_the_gguf_of_the_same_model_agree() -> None:
    gguf = Tokenizer.from_gguf(open_gguf(asset("stories260K", "tinyllamas-stories-260k-f32.gguf")).metadata)
    texts = [t for t in HARD_TEXTS if "▁" not in t]
    assert gguf.encode_batch(texts) == stories().encode_batch(texts)
    assert (gguf.bos_id, gguf.eos_id, gguf.unk_id, gguf.vocab_size) == (1, 2, 0, 512)


def llama2c_vocabulary() -> tuple[list[str], list[float]]:
    letters = [" ", "a", "b", " a", "ab"]
    names = ["<unk>", "\n<s>\n", "\n</s>\n", *(f"<0x{b:02X}>" for b in range(256)), *letters]
    return names, [0.0] * 259 + [-9.0, -8.0, -7.0, -2.0, -1.0]


@pytest.mark.parametrize("header", [b"", struct.pack("<i", 6), struct.pack("<f", 6.0)])
@pytest.mark.parametrize("old_bytes", [False, True])
def test_every_layout_of_tokenizer_bin_is_read(tmp_path: Path, header: bytes, old_bytes: bool) -> None:
    names, scores = llama2c_vocabulary()
    if old_bytes:
        names[3:259] = [chr(b) for b in range(256)]
    body = b"".join(
        struct.pack("<fi", score, len(name.encode())) + name.encode() for name, score in zip(names, scores, strict=True)
    )
    (tmp_path / "t.bin").write_bytes(header + body)
    tokenizer = Tokenizer.from_tok512(tmp_path / "t.bin", len(names))
    assert tokenizer.encode("ab\n") == [1, 259, 263, 13]  # "ab" scores better than " a"
    assert tokenizer.decode([259, 263, 13]) == "ab\n"


def test_a_tokenizer_bin_without_scores_merges_in_the_order_of_ids(tmp_path: Path) -> None:
    names, _ = llama2c_vocabulary()
    (tmp_path / "t.bin").write_bytes(b"".join(struct.pack("<i", len(n.encode())) + n.encode() for n in names))
    assert Tokenizer.from_tok512(tmp_path / "t.bin", len(names)).encode("ab") == [1, 262, 261]


def test_a_tokenizer_bin_of_another_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"not a tokenizer\.bin of 511 tokens"):
        Tokenizer.from_tok512(asset("stories260K", "tok512.bin"), 511)
    with pytest.raises(FormatError, match="vocabulary size: expected 259 to"):
        Tokenizer.from_tok512(asset("stories260K", "tok512.bin"), 3)


# -- special tokens --------------------------------------------------------------------------------------------------
def test_special_text_is_text_unless_parsed() -> None:
    tokenizer = vocab("qwen2")
    text = "<|im_start|>user\nhi<|im_end|>"
    plain, parsed = tokenizer.encode(text), tokenizer.encode(text, parse_special=True)
    assert tokenizer.special_ids.isdisjoint(plain)
    assert parsed[0] == 151644 and parsed[-1] == 151645 == tokenizer.eot_id
    assert tokenizer.decode(plain) == tokenizer.decode(parsed) == text
    assert tokenizer.decode(parsed, skip_special=True) == "user\nhi"
    assert tokenizer.encode("</s>") == tokenizer.encode("</s>", parse_special=True)  # to Qwen it is HTML


def test_sentencepiece_puts_a_space_after_a_special_token_as_llama_cpp_does() -> None:
    tokenizer = vocab("llama-spm")
    assert tokenizer.encode("<s>Hello</s>", parse_special=True) == [1, 1, 15043, 2]
    assert tokenizer.decode([1, 15043, 2]) == "<s>Hello</s>"
    assert tokenizer.decode([15043, 15043]) == "Hello Hello"


def test_user_defined_tokens_are_always_matched() -> None:
    data = bpe_metadata()
    data["tokenizer.ggml.tokens"] = [*data["tokenizer.ggml.tokens"], "</s>", "<tool>", "<|im_end|>"]
    data["tokenizer.ggml.token_type"] = [*data["tokenizer.ggml.token_type"], 4, 4, 1]
    tokenizer = Tokenizer.from_gguf(data)
    tag, tool, end = range(261, 264)
    assert tag in tokenizer.encode("</s>") and tag not in tokenizer.stop_ids  # an HTML tag, as in Gemma's vocabulary
    assert tool in tokenizer.encode("a<tool>b") and tokenizer.decode([tool], skip_special=True) == "<tool>"
    assert end in tokenizer.special_ids and end in tokenizer.stop_ids  # by name, though the file marks it as text
    assert end not in tokenizer.encode("<|im_end|>")


@pytest.mark.parametrize("name", VOCABS)
def test_no_text_makes_a_control_token(name: str) -> None:
    tokenizer = vocab(name)
    control = tokenizer.special_ids - {tokenizer.unk_id}
    specials = [tokenizer.decode([i]) for i in sorted(control)[:40]]
    texts = [*specials, *(f"x {s}{s} y" for s in specials), "".join(specials)]
    for ids in tokenizer.encode_batch(texts, add_special=False):
        assert control.isdisjoint(ids)


def test_no_text_makes_a_control_token_of_a_unigram_model() -> None:
    tokenizer = Tokenizer.from_gguf(unigram_metadata())
    assert tokenizer.encode("ab</s>a", add_special=False, parse_special=True).count(1) == 1
    ids = tokenizer.encode("ab</s>a</s></s>", add_special=False)
    assert tokenizer.special_ids.isdisjoint(ids)
    assert tokenizer.decode(ids).replace(" ", "") == "ab</s>a</s></s>"
    assert tokenizer.encode("a</s>")[-1] == 1 and tokenizer.encode("a</s>").count(1) == 1


def test_the_end_of_a_message_does_not_stop_harmony() -> None:
    data = bpe_metadata()
    names = ["<|end|>", "<|return|>", "<|call|>"]
    data["tokenizer.ggml.tokens"] = [*data["tokenizer.ggml.tokens"], *names]
    data["tokenizer.ggml.token_type"] = [*data["tokenizer.ggml.token_type"], 3, 3, 3]
    tokenizer = Tokenizer.from_gguf(data)
    stops = {tokenizer.decode([i]) for i in tokenizer.stop_ids}
    assert "<|return|>" in stops and "<|call|>" in stops and "<|end|>" not in stops


# -- small tokenizers written by hand --------------------------------------------------------------------------------
def byte_alphabet() -> list[str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def bpe_metadata() -> dict[str, Any]:
    tokens = [*byte_alphabet(), "th", "the", "Ġthe", "in", "<|endoftext|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 260 + [3],
        "tokenizer.ggml.merges": ["t h", "th e", "Ġ the", "i n"],
        "tokenizer.ggml.eos_token_id": 260,
    }


def unigram_metadata() -> dict[str, Any]:
    tokens = ["<pad>", "</s>", "<unk>", "▁", "a", "b", "▁ab", "ab", "<", "/", "s", ">"]
    return {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 2, *[1] * 9],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -2.0, -3.0, -3.0, -2.5, -4.0, -5.0, -5.0, -5.0, -5.0],
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.remove_extra_whitespaces": True,
    }


def sentencepiece_metadata() -> dict[str, Any]:
    names, scores = llama2c_vocabulary()
    names[1:3] = ["<s>", "</s>"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [n.replace(" ", "▁") for n in names],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 5],
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def bert_metadata() -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "▁un", "able", "▁a", "▁.", "[unused0]"],
        "tokenizer.ggml.token_type": [3, 3, 3, 3, 3, 1, 1, 1, 1, 1],
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.cls_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
    }


SMALL: dict[str, Callable[[], dict[str, Any]]] = {
    "gpt2": bpe_metadata, "t5": unigram_metadata, "llama": sentencepiece_metadata, "bert": bert_metadata,
}  # fmt: skip


def test_small_tokenizers_of_every_model() -> None:
    bpe = Tokenizer.from_gguf(bpe_metadata())
    assert bpe.encode("the in") == [257, 32, 259] and bpe.encode(" then") == [258, 110]
    unigram = Tokenizer.from_gguf(unigram_metadata())
    assert unigram.encode("  ab   a ") == [6, 3, 4, 1] and unigram.decode([6, 3, 4]) == "ab a"
    assert unigram.encode("xx") == [3, 2, 1]  # unknown characters are one token
    llama = Tokenizer.from_gguf(sentencepiece_metadata())
    assert llama.encode("ab\n") == [1, 259, 263, 13]
    bert = Tokenizer.from_gguf(bert_metadata())
    assert bert.encode("Unable a. what") == [2, 5, 6, 7, 8, 1, 3]
    assert bert.decode(bert.encode("Unable a.")) == "[CLS] unable a. [SEP]"
    assert (bert.mask_id, bert.pad_id, bert.unk_id) == (4, 0, 1)  # mask by its name


def test_flags_of_the_file_decide_what_is_added() -> None:
    data = sentencepiece_metadata() | {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}
    assert Tokenizer.from_gguf(data).encode("ab") == [259, 263, 2]
    data["tokenizer.ggml.add_space_prefix"] = False
    assert Tokenizer.from_gguf(data).encode("ab") == [263, 2]
    assert Tokenizer.from_gguf(data).decode([262]) == " a"
    assert Tokenizer.from_gguf(data | {"tokenizer.ggml.bos_token_id": 0xFFFFFFFF}).encode("ab") == [263, 2]


def test_empty_tokens_are_holes() -> None:
    data = sentencepiece_metadata()
    data["tokenizer.ggml.tokens"][260] = data["tokenizer.ggml.tokens"][261] = ""
    assert Tokenizer.from_gguf(data).decode([260]) == "[EMPTY_260]"


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_cuts_and_loses_nothing(pre: str) -> None:
    data = bpe_metadata() | {"tokenizer.ggml.pre": pre, "tokenizer.ggml.bos_token_id": 260}
    if PRE_TOKENIZERS[pre].raw:
        data |= {"tokenizer.ggml.tokens": sentencepiece_metadata()["tokenizer.ggml.tokens"]}
        data |= {"tokenizer.ggml.token_type": sentencepiece_metadata()["tokenizer.ggml.token_type"]}
        data |= {"tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.bos_token_id": 1}
    tokenizer = Tokenizer.from_gguf(data)
    for text in HARD_TEXTS:
        if PRE_TOKENIZERS[pre].raw and "▁" in text:
            continue
        assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


# -- tokenizer.json --------------------------------------------------------------------------------------------------
def as_json(metadata: dict[str, Any]) -> dict[str, Any]:
    """The equivalent tokenizer.json."""
    document: dict[str, Any] = json.loads(Tokenizer.from_gguf(metadata).to_json())
    return document


def encoded(document: dict[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode()


@pytest.mark.parametrize("model", SMALL)
def test_tokenizer_json_gives_what_gguf_gives(model: str) -> None:
    metadata = SMALL[model]()
    ours, theirs = Tokenizer.from_gguf(metadata), Tokenizer.from_json(encoded(as_json(metadata)))
    for text in (*HARD_TEXTS, "the in unable ab </s>"):
        for parse in (False, True):
            ids = ours.encode(text, parse_special=parse)
            assert theirs.encode(text, parse_special=parse) == ids
            assert theirs.decode(ids) == ours.decode(ids)
    for name in ("vocab_size", "stop_ids", "special_ids", "prefix", "suffix", "eos_id", "unk_id", "pad_id", "cls_id"):
        assert getattr(ours, name) == getattr(theirs, name), name


@pytest.mark.parametrize("name", VOCABS)
def test_decoding_agrees_with_the_rust_library(name: str) -> None:
    tokenizer = vocab(name)
    rust = RustTokenizer.from_buffer(tokenizer.to_json())
    rng = random.Random(1)
    normal = sorted(set(range(tokenizer.vocab_size)) - tokenizer.special_ids)
    first = tokenizer.encode("a", add_special=False)[0]  # the library leaves "##" before a text that begins with it
    for _ in range(300):
        ids = [first, *(rng.choice(normal) for _ in range(rng.randrange(1, 12)))]
        theirs = rust.decode(ids, skip_special_tokens=False)
        if "\ufffd" not in theirs:  # the library replaces entire runs of bytes if one is invalid
            assert tokenizer.decode(ids) == theirs
    wiki = asset("text", "wiki.test.raw").read_text()[:20000]
    ids = tokenizer.encode(wiki)
    assert tokenizer.decode(ids, skip_special=True) == rust.decode(ids, skip_special_tokens=True)


def test_padding_truncation_and_dropout_of_the_file_are_left_alone() -> None:
    document = as_json(bpe_metadata())
    document["padding"] = {
        "strategy": {"Fixed": 16}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "!",
    }  # fmt: skip
    document["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    document["model"]["dropout"] = 0.9
    tokenizer = Tokenizer.from_json(encoded(document))
    assert all(tokenizer.encode("the the the in") == [257, 258, 258, 32, 259] for _ in range(20))


def test_the_sidecar_files_of_tokenizer_json_name_its_tokens(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(encoded(as_json(bpe_metadata())))
    bare = Tokenizer.from_json(tmp_path / "tokenizer.json")
    assert (bare.bos_id, bare.eos_id, bare.chat_template) == (None, 260, None)
    config: dict[str, Any] = {"bos_token": {"content": "the"}, "eos_token": "in", "pad_token": "<absent>"}
    config["chat_template"] = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    full = Tokenizer.from_json(tmp_path / "tokenizer.json")
    assert (full.bos_id, full.eos_id, full.pad_id, full.chat_template) == (257, 259, None, "d")
    assert full.stop_ids == {259, 260}
    (tmp_path / "chat_template.jinja").write_text("newer")
    assert Tokenizer.from_json(tmp_path / "tokenizer.json").chat_template == "newer"
    assert Tokenizer.from_json(tmp_path / "tokenizer.json", config={}).chat_template is None
    with pytest.raises(FormatError, match=r"eos_token: the vocabulary has no '<gone>'"):
        Tokenizer.from_json(tmp_path / "tokenizer.json", config={"eos_token": "<gone>"})


def test_ids_with_gaps_keep_their_numbers() -> None:
    document = as_json(bert_metadata())
    document["model"]["vocab"]["far"] = 1000
    tokenizer = Tokenizer.from_json(encoded(document))
    assert tokenizer.vocab_size == 1001 and tokenizer.encode("far", add_special=False) == [1000]
    assert tokenizer.token_bytes(1000) == b" far" and tokenizer.token_bytes(500) == b""


def test_a_decoder_that_cannot_be_streamed_still_encodes() -> None:
    document = as_json(bpe_metadata()) | {"decoder": {"type": "BPEDecoder", "suffix": "</w>"}}
    tokenizer = Tokenizer.from_json(encoded(document))
    assert tokenizer.encode("the") == [257]
    with pytest.raises(FormatError, match="decoder 'BPEDecoder' is not supported"):
        tokenizer.decode([257])


# -- streams ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", VOCABS)
def test_pieces_of_a_stream_join_to_the_whole(name: str) -> None:
    tokenizer = vocab(name)
    rng = random.Random(2)
    texts = [tokenizer.encode(text) for text in HARD_TEXTS]
    noise = [[rng.randrange(tokenizer.vocab_size) for _ in range(20)] for _ in range(200)]
    for ids in [*texts, *noise]:
        for skip in (False, True):
            stream = tokenizer.stream(skip_special=skip)
            pieces = [stream.push(i) for i in ids]
            assert "".join(pieces) + stream.flush() == tokenizer.decode(ids, skip_special=skip)


def test_a_stream_never_splits_a_character() -> None:
    tokenizer = vocab("gpt-2")
    ids = tokenizer.encode("né🙂你")
    assert len(ids) > 5
    stream = tokenizer.stream()
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) == "né🙂你" and "\ufffd" not in "".join(pieces) and "" in pieces and stream.flush() == ""
    stream = tokenizer.stream()
    assert [stream.push(i) for i in tokenizer.encode("🙂")[:-1]] == [""] * (len(tokenizer.encode("🙂")) - 1)
    assert stream.flush() == "\ufffd"


def test_a_stream_that_continues_keeps_the_space() -> None:
    hello = 15043
    assert vocab("llama-spm").stream().push(hello) == "Hello"
    assert vocab("llama-spm").stream(continues=True).push(hello) == " Hello"
    assert vocab("llama-spm").token_bytes(hello) == b" Hello"


@settings(max_examples=200)
@given(st.lists(st.integers(0, 263), max_size=30))
def test_any_ids_stream_as_they_decode(ids: list[int]) -> None:
    for tokenizer in (_small("llama"), _small("gpt2")):
        known = [i for i in ids if i < tokenizer.vocab_size]
        stream = tokenizer.stream()
        assert "".join(map(stream.push, known)) + stream.flush() == tokenizer.decode(known)


@settings(max_examples=200)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_comes_back(text: str) -> None:
    assert _small("gpt2").decode(_small("gpt2").encode(text)) == text
    if "▁" not in text:
        assert _small("llama").decode(_small("llama").encode(text), skip_special=True) == text


@cache
def _small(model: str) -> Tokenizer:
    return Tokenizer.from_gguf(SMALL[model]())


# -- batches ---------------------------------------------------------------------------------------------------------
def test_a_batch_is_each_of_its_texts() -> None:
    for model in SMALL:
        tokenizer = _small(model)
        assert tokenizer.encode_batch(HARD_TEXTS) == [tokenizer.encode(text) for text in HARD_TEXTS]
    assert _small("gpt2").encode_batch([]) == []


def test_a_limit_cuts_the_text_and_keeps_the_special_tokens() -> None:
    tokenizer = vocab("bert-bge")
    ids = tokenizer.encode("one two three four")
    assert tokenizer.encode("one two three four", limit=4) == [101, *ids[1:3], 102]
    assert tokenizer.encode_batch(["one two", "one two three four"], limit=4) == [[*ids[:3], 102]] * 2
    assert tokenizer.encode("one two three four", limit=6) == ids
    assert tokenizer.encode("one", limit=2) == [101, 102]
    with pytest.raises(RequestError, match="room for 2 special tokens, found 1"):
        tokenizer.encode("one", limit=1)


def test_threads_share_a_tokenizer() -> None:
    tokenizer = _small("gpt2")

    def ids(_: object = None) -> tuple[list[int], list[int]]:
        text = "the in<|endoftext|>"
        return tokenizer.encode(text), tokenizer.encode(text, parse_special=True)

    expected = ids()
    with ThreadPoolExecutor(8) as pool:
        assert all(result == expected for result in pool.map(ids, range(1600)))


# -- requests that cannot be -----------------------------------------------------------------------------------------
def test_half_a_surrogate_pair_is_named() -> None:
    with pytest.raises(RequestError, match="text 0: half of a surrogate pair, 0xd83d at 2"):
        _small("gpt2").encode("ab\ud83d")
    with pytest.raises(RequestError, match="text 1: half of a surrogate pair"):
        _small("gpt2").encode_batch(["fine", "\udc80"])


@pytest.mark.parametrize("text", [None, 3, b"bytes", ["a"]])
def test_only_strings_are_texts(text: Any) -> None:
    with pytest.raises(RequestError, match="text 0: expected str, found"):
        _small("gpt2").encode(text)
    with pytest.raises(RequestError, match="expected texts, found one"):
        _small("gpt2").encode_batch("one")


@pytest.mark.parametrize("token", [-1, 261, 2**70, 1.5, "a", None])
def test_ids_outside_the_vocabulary_are_refused(token: Any) -> None:
    for call in (_small("gpt2").token_bytes, lambda i: _small("gpt2").decode([i]), _small("gpt2").stream().push):
        with pytest.raises(RequestError, match="token id"):
            call(token)


def test_numpy_ids_decode() -> None:
    assert _small("gpt2").decode(np.array([257, 258], np.int32)) == "the the"


# -- broken metadata -------------------------------------------------------------------------------------------------
BROKEN: list[tuple[str, str, Any, str]] = [
    ("gpt2", "model", "gtp2", "no such tokenizer: 'gtp2'"),
    ("gpt2", "model", None, "no such tokenizer: None"),
    ("gpt2", "model", 3, "expected a string, found 3"),
    ("gpt2", "pre", "qwen-2", "no such pre-tokenizer: 'qwen-2'"),
    ("gpt2", "tokens", None, "expected the vocabulary, found None"),
    ("gpt2", "tokens", [], "expected the vocabulary, found 'nothing'"),
    ("gpt2", "tokens", "abc", "expected strings, found 'abc'"),
    ("gpt2", "tokens", ["a", 3], "expected strings, found 3"),
    ("gpt2", "token_type", [1, 2], "expected 261 numbers, one per token, found 2"),
    ("gpt2", "token_type", ["x"] * 261, "expected numbers, found"),
    ("gpt2", "token_type", np.array(3), "expected numbers, found"),
    ("gpt2", "merges", None, "expected the merges of the vocabulary, found None"),
    ("gpt2", "merges", ["t q q"], "out of vocabulary"),
    ("gpt2", "merges", ["nospace"], "merges"),
    ("gpt2", "eos_token_id", 261, "expected a token id below 261, found 261"),
    ("gpt2", "eos_token_id", "261", "expected a token id, found '261'"),
    ("gpt2", "bos_token_id", True, "expected a token id, found True"),
    ("gpt2", "add_bos_token", 7, "expected true or false, found 7"),
    ("gpt2", "add_bos_token", True, "expected tokenizer.ggml.bos_token_id as well"),
    ("llama", "scores", None, "expected a score for each token, found None"),
    ("llama", "scores", [float("nan")] * 264, "expected finite numbers, found nan"),
    ("llama", "tokens", ["▁"] * 264, "token '▁' twice, at 0 and 1"),
    ("t5", "precompiled_charsmap", np.array([1, 2, 3], np.int8), "precompiled_charsmap"),
    ("t5", "unknown_token_id", None, ""),
    ("bert", "tokens", ["x"] * 9 + ["▁x"], "twice"),
]


@pytest.mark.parametrize(("model", "key", "value", "message"), BROKEN)
def test_broken_metadata_names_the_key(model: str, key: str, value: Any, message: str) -> None:
    data = SMALL[model]()
    data[f"tokenizer.ggml.{key}"] = value
    if message == "":
        Tokenizer.from_gguf(data)  # found by its name
        return
    with pytest.raises(FormatError) as caught:
        Tokenizer.from_gguf(data, source="m.gguf")
    assert message in str(caught.value) and str(caught.value).startswith("m.gguf: metadata tokenizer.ggml.")


def test_an_unknown_name_comes_with_the_nearest() -> None:
    with pytest.raises(FormatError) as caught:
        Tokenizer.from_gguf(bpe_metadata() | {"tokenizer.ggml.pre": "llama-bp"})
    assert "llama-bpe" in str(caught.value.hint)


def test_absurd_sizes_are_refused() -> None:
    data = sentencepiece_metadata()
    data["tokenizer.ggml.tokens"][263] = "a" * 600
    with pytest.raises(FormatError, match="expected at most 512 characters, found 600"):
        Tokenizer.from_gguf(data)
    data["tokenizer.ggml.tokens"][263] = "a" * 20000
    with pytest.raises(FormatError, match="tokens of at most 16384 characters, found 20000"):
        Tokenizer.from_gguf(data)


# -- broken tokenizer.json -------------------------------------------------------------------------------------------
def test_a_normalizer_that_expands_text_is_refused() -> None:
    double = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    document = as_json(bpe_metadata()) | {"normalizer": {"type": "Sequence", "normalizers": [double] * 100}}
    with pytest.raises(FormatError, match="normalizer: expected texts at most 256 times as long"):
        Tokenizer.from_json(encoded(document))
    between = {"type": "Replace", "pattern": {"Regex": ""}, "content": "a"}
    document["normalizer"]["normalizers"] = [between] * 100
    with pytest.raises(FormatError, match="normalizer"):
        Tokenizer.from_json(encoded(document))


def test_a_pattern_that_never_ends_becomes_an_error() -> None:
    split = {"type": "Split", "pattern": {"Regex": "(a|aa)+[bc]"}, "behavior": "Isolated", "invert": False}
    tokenizer = Tokenizer.from_json(encoded(as_json(bpe_metadata()) | {"pre_tokenizer": split}))
    with pytest.raises(FormatError, match=r"tokenizer.json: the tokenizers library panicked: .*retry-limit"):
        tokenizer.encode("a" * 2000)  # a Rust panic
    assert tokenizer.encode("b")  # and it still works


BLANK = dict.fromkeys(("single_word", "lstrip", "rstrip"), False) | {"normalized": True, "special": True}
STRIP = {"type": "Strip", "strip_left": True, "strip_right": True}
FAR_BOS = {"type": "BertProcessing", "sep": ["</s>", 1], "cls": ["<s>", 4_000_000_000]}
CLAIMS = {"type": "Precompiled", "precompiled_charsmap": "/P///wAAAAA="}  # claims a trie of 4 GB
NO_TEXT = {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["model"]["vocab"].update({"far": 4_000_000_000}), "token ids, found 4000000001"),
        (lambda d: d.update(post_processor=NO_TEXT), "a template without the text"),
        (lambda d: d.update(post_processor=FAR_BOS), "post_processor: expected ids below 261"),
        (lambda d: d.update(normalizer=CLAIMS), "expected a trie inside 8 bytes, found one of 4294967292"),
        (lambda d: d.update(normalizer=STRIP, added_tokens=[BLANK | {"id": 261, "content": " "}]),
         "added token 261: nothing is left of ' '"),
        (lambda d: d["model"].update(type="Nothing"), "tokenizer.json: "),
        (lambda d: d.pop("model"), "tokenizer.json: "),
        (lambda d: d["model"]["merges"].append(["q", "nothing"]), "out of vocabulary"),
    ],
)  # fmt: skip
def test_a_broken_tokenizer_json_says_what_is_wrong(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    document = as_json(bpe_metadata())
    change(document)
    data = encoded(document)
    for written in (data, data.replace(b'"precompiled', b'"\\u0070recompiled')):
        with pytest.raises(FormatError) as caught:
            Tokenizer.from_json(written)
        assert message in str(caught.value)


def test_an_absent_file_is_a_format_error(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="cannot be opened"):
        Tokenizer.from_json(tmp_path / "tokenizer.json")
    with pytest.raises(FormatError, match="cannot be opened"):
        Tokenizer.from_tok512(tmp_path / "tokenizer.bin", 512)


# -- mutation --------------------------------------------------------------------------------------------------------
STRANGE: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**32 - 1, 2**63, 1e300, float("nan"), "", "x", "\ud800", "\x00", "a" * 5000, [], {},
    [[]], ["a", "b"], [1, 2, 3], {"type": "Sequence"}, {"String": ""}, {"Regex": "("}, {"Regex": "(?=a)"}, "ByteLevel",
    "Removed",
)  # fmt: skip


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths inside a document; only a few of long lists and tables."""
    yield path
    if isinstance(value, dict):
        for key in list(value)[:12]:
            yield from paths_of(value[key], (*path, key))
    elif isinstance(value, list):
        for i in range(min(len(value), 4)):
            yield from paths_of(value[i], (*path, i))


def mutated(document: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    document = copy.deepcopy(document)
    for _ in range(rng.randrange(1, 3)):
        *outer, last = rng.choice([p for p in paths_of(document) if p])
        place: Any = document
        for key in outer:
            place = place[key]
        match rng.randrange(4):
            case 0 if isinstance(place, dict):
                del place[last]
            case 1 if isinstance(place, list):
                place.append(copy.deepcopy(place[last]))
            case 2:
                place[last] = copy.deepcopy(rng.choice(list(document.values())))
            case _:
                place[last] = rng.choice(STRANGE)
    return document


def exercise(tokenizer: Tokenizer) -> None:
    """Call every method; only rlx's own errors may be raised."""
    try:
        for text in ("the ab </s> unable é🙂", "", "<s>[CLS]"):
            for parse in (False, True):
                ids = tokenizer.encode(text, parse_special=parse)
                assert all(isinstance(i, int) for i in ids)
                tokenizer.decode([i for i in ids if i < tokenizer.vocab_size])
        for i in range(0, tokenizer.vocab_size, max(1, tokenizer.vocab_size // 50)):
            tokenizer.token_bytes(i)
    except RlxError:
        pass


def survive(make: Callable[[], Tokenizer]) -> bool:
    """Whether a tokenizer was built; fails on any error but FormatError, and on a long run time."""
    begin = time.process_time()
    try:
        exercise(make())
        return True
    except FormatError as error:
        assert str(error)
        return False
    finally:
        assert time.process_time() - begin < 5


@pytest.mark.parametrize("model", SMALL)
def test_mutated_metadata_never_crashes(model: str) -> None:
    rng = random.Random(model)
    plain = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in SMALL[model]().items()}
    survived = [survive(lambda: Tokenizer.from_gguf(mutated(plain, rng))) for _ in range(150)]
    assert 5 < sum(survived) < 145


@pytest.mark.parametrize("model", SMALL)
def test_a_mutated_tokenizer_json_never_crashes(model: str) -> None:
    rng = random.Random(model)
    document = as_json(SMALL[model]())
    survived = []
    for _ in range(150):
        data = json.dumps(mutated(document, rng)).encode()
        survived.append(survive(lambda data=data: Tokenizer.from_json(data)))  # type: ignore[misc]
    assert 5 < sum(survived) < 145


_TEXTS = ("", "a", " ", "▁", "ab", "</s>", "##")
_PATTERNS = ({"String": ""}, {"String": "a"}, {"Regex": ""}, {"Regex": "a*"}, {"Regex": "(?=a)"}, {"Regex": "(a|aa)+b"})
_SIZES = (0, 1, 2, 2**31, 2**64 - 1)
# Every kind of part in the library; a tuple is a choice.
PARTS: dict[str, list[dict[str, Any]]] = {
    "normalizer": [
        *({"type": name} for name in ("NFC", "NFKD", "Lowercase", "StripAccents", "Nmt", "ByteLevel")),
        {"type": "Strip", "strip_left": (True, False), "strip_right": (True, False)},
        {"type": "Replace", "pattern": _PATTERNS, "content": _TEXTS},
        {"type": "Prepend", "prepend": _TEXTS},
        {"type": "Precompiled", "precompiled_charsmap": ("", "AAAA", "BAAAAAAAAAAA", "CAAAAAEAAAACAAAAAGEA")},
    ],
    "pre_tokenizer": [
        *({"type": name} for name in ("BertPreTokenizer", "Whitespace", "WhitespaceSplit", "UnicodeScripts")),
        {"type": "Metaspace", "replacement": ("▁", "a"), "prepend_scheme": ("always", "never"), "split": (True, False)},
        {"type": "Split", "pattern": _PATTERNS, "behavior": ("Removed", "Isolated", "MergedWithNext"), "invert": True},
        {"type": "FixedLength", "length": _SIZES},
        {"type": "CharDelimiterSplit", "delimiter": "a"},
    ],
    "decoder": [
        *({"type": name} for name in ("ByteFallback", "Fuse", "BPEDecoder")),
        {"type": "WordPiece", "prefix": _TEXTS, "cleanup": (True, False)},
        {"type": "Replace", "pattern": _PATTERNS, "content": _TEXTS},
        {"type": "Strip", "content": (" ", "a"), "start": _SIZES, "stop": _SIZES},
    ],
    "post_processor": [
        {"type": "RobertaProcessing", "sep": ["a", 1], "cls": ["b", 2], "trim_offsets": True, "add_prefix_space": True},
        {"type": "BertProcessing", "sep": ["a", 1], "cls": ["b", 2**32 - 1]},
    ],
}  # fmt: skip


def test_strange_parts_never_crash_the_library() -> None:
    rng = random.Random(3)
    documents = [as_json(make()) for make in SMALL.values()]
    survived = []
    for _ in range(400):
        document = copy.deepcopy(rng.choice(documents))
        for name in rng.sample(sorted(PARTS), rng.randrange(1, 4)):
            part = rng.choice(PARTS[name])
            document[name] = {k: rng.choice(v) if isinstance(v, tuple) else v for k, v in part.items()}
        for added in document["added_tokens"][:2]:
            added[rng.choice(("lstrip", "rstrip", "normalized", "single_word"))] = True
            added["content"] = rng.choice((added["content"], *_TEXTS))
        survived.append(survive(lambda document=document: Tokenizer.from_json(encoded(document))))  # type: ignore[misc]
    assert 50 < sum(survived) < 350


@pytest.mark.parametrize("model", SMALL)
def test_damaged_bytes_of_tokenizer_json_never_crash(model: str) -> None:
    rng = random.Random(model)
    data = encoded(as_json(SMALL[model]()))
    for _ in range(100):
        damaged = bytearray(data)
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(damaged))
            match rng.randrange(3):
                case 0:
                    damaged[at] = rng.randrange(256)
                case 1:
                    del damaged[at : at + rng.randrange(1, 20)]
                case _:
                    damaged[at:at] = damaged[at - 20 : at]
        survive(lambda damaged=damaged: Tokenizer.from_json(bytes(damaged)))  # type: ignore[misc]


def test_a_mutated_tokenizer_bin_never_crashes(tmp_path: Path) -> None:
    names, scores = llama2c_vocabulary()
    body = b"".join(struct.pack("<fi", s, len(n.encode())) + n.encode() for n, s in zip(names, scores, strict=True))
    data = struct.pack("<i", 6) + body
    rng = random.Random(0)
    path = tmp_path / "t.bin"
    for _ in range(150):
        damaged = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        if rng.random() < 0.3:
            del damaged[rng.randrange(len(damaged)) :]
        path.write_bytes(damaged)
        survive(lambda: Tokenizer.from_tok512(path, len(names)))


# -- speed -----------------------------------------------------------------------------------------------------------
def test_a_vocabulary_of_150000_tokens_is_ready_within_a_second() -> None:
    metadata = metadata_of("qwen2")
    times = []
    for _ in range(3):
        begin = time.process_time()  # not wall-clock time, which depends on the load
        Tokenizer.from_gguf(metadata)
        times.append(time.process_time() - begin)
    assert min(times) < 1.0


def test_thousands_of_sentences_take_less_than_half_a_second() -> None:
    files = [asset("text", f"stsb-en-{part}.csv") for part in ("dev", "test")]
    rows = [row for file in files for row in csv.reader(file.read_text().splitlines())]
    sentences = [sentence for row in rows for sentence in row[:2]][:2758]
    tokenizer = vocab("bert-bge")
    times = []
    for _ in range(3):
        begin = time.process_time()
        tokenizer.encode_batch(sentences)
        times.append(time.process_time() - begin)
    assert len(sentences) == 2758 and min(times) < 0.5


# -- transformers ----------------------------------------------------------------------------------------------------
def hard_lines() -> list[str]:
    wiki = [line for line in (ASSETS / "text" / "wiki.test.raw").read_text().splitlines() if line.strip()][:300]
    return [*wiki, *HARD_TEXTS]


@pytest.mark.parity
def test_bert_agrees_with_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    names = json.loads(vocab("bert-bge").to_json())["model"]["vocab"]
    theirs = transformers.BertTokenizer(vocab=names)
    texts = [t for t in hard_lines() if "[CLS]" not in t]
    assert vocab("bert-bge").encode_batch(texts) == theirs(texts)["input_ids"]


@pytest.mark.parity
def test_gpt2_agrees_with_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    metadata = metadata_of("gpt-2")
    tokens = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    theirs = transformers.GPT2Tokenizer(vocab=tokens, merges=merges)
    texts = hard_lines()
    assert vocab("gpt-2").encode_batch(texts) == theirs(texts)["input_ids"]


@pytest.mark.parity
def test_the_models_own_tokenizer_json_agrees_with_the_rust_library() -> None:
    """The same tokenizer in the library alone, with special tokens, padding and truncation off."""
    document = json.dumps(as_json(metadata_of("llama-bpe")))
    theirs = RustTokenizer.from_str(document)
    texts = [t for t in hard_lines() if "<|" not in t]
    assert vocab("llama-bpe").encode_batch(texts) == [e.ids for e in theirs.encode_batch(texts)]


# -- white space beside special tokens, and text that looks like one -------------------------------------------------
PHI3 = ["<|endoftext|>", "<|assistant|>", "<|end|>", "<|user|>"]


def phi3_metadata(name: str = "Phi 3 mini (phi3)") -> dict[str, Any]:
    """A SentencePiece vocabulary with Phi-3's special tokens; `</s>` is marked as text, as in its files."""
    data = sentencepiece_metadata()
    data["tokenizer.ggml.tokens"] = [*data["tokenizer.ggml.tokens"], *PHI3]
    data["tokenizer.ggml.token_type"] = [2, 3, 4, *data["tokenizer.ggml.token_type"][3:], *[3] * len(PHI3)]
    data["tokenizer.ggml.scores"] = np.append(data["tokenizer.ggml.scores"], [-1000.0] * len(PHI3)).astype(np.float32)
    return data | {"tokenizer.ggml.add_space_prefix": False, "general.name": name}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("<|user|>\n<|end|>\n<|assistant|>\n", ["<|user|>", "<|end|>", "<|assistant|>"]),
        ("<|user|> \t\r\n <|end|>", ["<|user|>", "<|end|>"]),
        ("<|endoftext|>\n<|end|>", ["<|endoftext|>", "<0x0A>", "<|end|>"]),
        ("<s>\n</s>\n", ["<s>", "<0x0A>", "</s>"]),
    ],
)
def test_special_tokens_of_phi3_take_the_white_space_after_them(text: str, names: list[str]) -> None:
    """As in llama.cpp: all but `<unk>`, `<s>` and `<|endoftext|>`."""
    data = phi3_metadata()
    tokenizer = Tokenizer.from_gguf(data)
    ids = tokenizer.encode(text, add_special=False, parse_special=True)
    assert [data["tokenizer.ggml.tokens"][i] for i in ids] == names
    other = Tokenizer.from_gguf(phi3_metadata("Llama"))
    assert len(other.encode(text, add_special=False, parse_special=True)) > len(ids) or "endoftext" in text


def test_the_end_of_a_text_cannot_be_typed_where_it_begins_with_s() -> None:
    tokenizer = Tokenizer.from_gguf(phi3_metadata())
    assert 2 not in tokenizer.encode("a </s> b", add_special=False) and 2 in tokenizer.special_ids
    assert tokenizer.encode("</s>", add_special=False, parse_special=True) == [2]


def test_phi3_chats_have_the_tokens_of_llama_cpp() -> None:
    """llama.cpp's result for the same vocabulary."""
    metadata = dict(open_gguf(asset("vocab/ggml-vocab-llama-spm.gguf")).metadata)
    count = len(metadata["tokenizer.ggml.tokens"])
    names = ["<|endoftext|>", "<|assistant|>", *(f"<|placeholder{i}|>" for i in range(1, 5)), "<|system|>", "<|end|>"]
    names += ["<|placeholder5|>", "<|placeholder6|>", "<|user|>"]
    kinds = np.append(np.asarray(metadata["tokenizer.ggml.token_type"]), [3] * len(names))
    kinds[2] = 4
    scores = np.append(np.asarray(metadata["tokenizer.ggml.scores"]), [-1000.0] * len(names))
    metadata |= {
        "tokenizer.ggml.tokens": [*metadata["tokenizer.ggml.tokens"], *names], "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores, "general.name": "Phi3 mini", "tokenizer.ggml.add_space_prefix": False,
    }  # fmt: skip
    tokenizer = Tokenizer.from_gguf(metadata)
    assert count == 32000
    for text, parse, wanted in (
        ("<|user|>\nHello<|end|>\n<|assistant|>\n", True, [32010, 10994, 32007, 32001]),
        ("a </s> b", False, [29874, 1533, 29879, 29958, 289]),
        ("a</s>  b", True, [29874, 2, 29890]),
        ("<|user|>\n  x <s> y", True, [32010, 29916, 29871, 1, 343]),
        ("<|endoftext|>\nz", True, [32000, 13, 29920]),
        ("plain <|end|> text", False, [24595, 529, 29989, 355, 29989, 29958, 1426]),
    ):
        assert tokenizer.encode(text, add_special=False, parse_special=parse) == wanted


def test_a_special_token_typed_into_a_unigram_model_is_its_characters() -> None:
    """Segmented as by the same model without such pieces: no spaces between them."""
    data = unigram_metadata()
    tokenizer = Tokenizer.from_gguf(data)
    ids = tokenizer.encode("ab</s>a", add_special=False)
    assert [data["tokenizer.ggml.tokens"][i] for i in ids] == ["▁ab", "<", "/", "s", ">", "a"]
    assert tokenizer.decode(ids) == "ab</s>a"
    names, scores = data["tokenizer.ggml.tokens"], data["tokenizer.ggml.scores"]
    pieces = [(n if i > 2 else f"\0{i}", s) for i, (n, s) in enumerate(zip(names, scores, strict=True))]
    plain = RustTokenizer(models.Unigram(pieces, 2, byte_fallback=False))
    plain.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always", split=False)
    for text in ("ab</s>a", "</s></s>", "a </s> b", "<pad>ab"):
        assert tokenizer.encode(text, add_special=False) == plain.encode(text).ids


def test_a_unigram_tokenizer_json_has_no_spaces_inside_them_either() -> None:
    pieces = [["<unk>", 0.0], ["</s>", 0.0], ["▁", -2.0], ["a", -3.0], *([sign, -5.0] for sign in "</s>")]
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    document = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "pre_tokenizer": space, "decoder": space, "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces},
        "added_tokens": [
            {"id": i, "content": pieces[i][0], "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True} for i in (0, 1)
        ],
    }  # fmt: skip
    tokenizer = Tokenizer.from_json(json.dumps(document).encode())
    assert tokenizer.encode("a</s>a a") == [2, 3, 4, 5, 6, 7, 3, 2, 3]
    assert tokenizer.encode("a</s>a", parse_special=True).count(1) == 1
