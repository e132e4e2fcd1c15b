"""Build a Rust tokenizer and special token ids from the `tokenizer.*` metadata of a GGUF file.

Defaults and the meaning of keys follow llama.cpp (`llama_vocab::impl::load`), except that a bos or eos id outside the
vocabulary is an error here, not a warning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as RustTokenizer

from rlx.errors import FormatError, nearest
from rlx.fast_dataclass import dataclass
from rlx.formats import tokenizer_models
from rlx.formats.bpe import Bpe
from rlx.formats.pretokenize import PRE_TOKENIZERS, PreTokenizer
from rlx.formats.special_tokens import STOP_NAMES, SpecialIds, is_marker
from rlx.formats.tensor_file import quoted
from rlx.formats.tokenizer_models import (
    CONTROL,
    MAX_TOKENS,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
    add_special_tokens,
)

MAX_MERGES = 1 << 23
MAX_CHARSMAP_BYTES = 1 << 24
_NO_ID = (-1, 0xFFFFFFFF)  # how converters write "none"
_PREFIX = "tokenizer.ggml."
_MODELS = ("gpt2", "gemma4", "llama", "t5", "bert")


@dataclass(frozen=True, slots=True)
class GgufVocab:
    """The result of `read_vocab`."""

    rust: RustTokenizer
    bpe: Bpe | None  # its model, if it is BPE
    size: int
    special: SpecialIds
    chat_template: str | None


def read_vocab(metadata: Mapping[str, Any], source: str) -> GgufVocab:
    """Build the tokenizer that the metadata describes; `source` names the file in error messages."""
    keys = _Keys(metadata, source)
    model = keys.text("model")
    if model not in _MODELS:
        hint = nearest(model or "", _MODELS)
        raise FormatError(f"{keys.where('model')}: no such tokenizer: {quoted(model)}", hint=hint)
    vocabulary = _vocabulary(keys)
    special = _special_ids(keys, vocabulary)
    vocabulary = _with_attributes(vocabulary, special, metadata, keys)
    bpe = None
    if model in ("gpt2", "gemma4"):
        rust, bpe = _bpe(keys, vocabulary, special, model)
    elif model == "llama":
        rust, bpe = _sentencepiece(keys, vocabulary, special)
    elif model == "t5":
        rust = _unigram(keys, vocabulary, special)
    else:
        rust = _word_piece(keys, vocabulary, special)
    return GgufVocab(rust, bpe, len(vocabulary.tokens), special, _chat_template(metadata, source))


# -- keys ------------------------------------------------------------------------------------------------------------
class _Keys:
    """Typed access to the `tokenizer.ggml.*` keys."""

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self._metadata = metadata
        self._source = source

    def where(self, key: str) -> str:
        return f"{self._source}: metadata {_PREFIX}{key}"

    def wrong(self, key: str, expected: str, actual: object) -> FormatError:
        text = quoted(actual) if isinstance(actual, (str, int, float, type(None))) else type(actual).__name__
        return FormatError(f"{self.where(key)}: expected {expected}, found {text}")

    def _get(self, key: str) -> Any:
        return self._metadata.get(_PREFIX + key)

    def text(self, key: str, default: str | None = None) -> str | None:
        value = self._get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(key, "a string", value)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key)
        if value is None:
            return default
        if not isinstance(value, (bool, int, np.bool_)) or value not in (0, 1):
            raise self.wrong(key, "true or false", value)
        return bool(value)

    def token(self, key: str, vocabulary: Vocabulary, *, strict: bool = False) -> int | None:
        value = self._get(key)
        if value is None or (isinstance(value, (int, np.integer)) and int(value) in _NO_ID):
            return None
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
            raise self.wrong(key, "a token id", value)
        if 0 <= value < len(vocabulary.tokens):
            return int(value)
        if strict:
            raise self.wrong(key, f"a token id below {len(vocabulary.tokens)}", int(value))
        return None  # some converters write a pad id one past the end; nothing depends on it

    def strings(self, key: str, max_count: int) -> list[str] | None:
        value = self._get(key)
        if value is None:
            return None
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            raise self.wrong(key, "strings", value)
        if len(value) > max_count:
            raise self.wrong(key, f"at most {max_count} strings", len(value))
        strings = list(value)
        if not all(isinstance(s, str) for s in strings):
            raise self.wrong(key, "strings", next(s for s in strings if not isinstance(s, str)))
        return strings

    def numbers(self, key: str, kinds: str, *, max_count: int = MAX_TOKENS) -> NDArray[Any] | None:
        """Read a numeric array whose NumPy kind is in `kinds`."""
        value = self._get(key)
        if value is None:
            return None
        if not isinstance(value, (Sequence, np.ndarray)) or isinstance(value, (str, bytes)):
            raise self.wrong(key, "numbers", value)
        if np.size(value) > max_count if isinstance(value, np.ndarray) else len(value) > max_count:
            raise self.wrong(key, f"at most {max_count} numbers", len(value))
        try:
            numbers = np.asarray(value)
        except (ValueError, OverflowError, TypeError) as error:  # ragged, or beyond 64 bits
            raise self.wrong(key, "numbers", value) from error
        if numbers.ndim != 1 or numbers.dtype.kind not in kinds:
            raise self.wrong(key, "numbers", f"{numbers.dtype} of shape {numbers.shape}")
        return numbers

    def number_each(self, key: str, kinds: str, vocabulary: Sequence[str]) -> NDArray[Any] | None:
        """Read an array with one number per token."""
        numbers = self.numbers(key, kinds)
        if numbers is not None and len(numbers) != len(vocabulary):
            raise self.wrong(key, f"{len(vocabulary)} numbers, one per token", len(numbers))
        return numbers


def _vocabulary(keys: _Keys) -> Vocabulary:
    tokens = keys.strings("tokens", MAX_TOKENS)
    if not tokens:
        raise keys.wrong("tokens", "the vocabulary", None if tokens is None else "nothing")
    for i in (i for i, token in enumerate(tokens) if not token):
        tokens[i] = f"[EMPTY_{i}]"  # llama.cpp's name for an unused id
    kinds = keys.number_each("token_type", "iu", tokens)
    kinds = np.full(len(tokens), NORMAL) if kinds is None else kinds.astype(np.int64)
    vocabulary = Vocabulary(tokens, kinds, keys.where("tokens"))
    for name in STOP_NAMES & vocabulary.ids.keys():
        i = vocabulary.ids[name]
        if is_marker(name) and kinds[i] in (NORMAL, USER_DEFINED):  # some converters mark them as text
            kinds[i] = CONTROL
    return vocabulary


def _with_attributes(
    vocabulary: Vocabulary, special: SpecialIds, metadata: Mapping[str, Any], keys: _Keys
) -> Vocabulary:
    """Add attributes that GGUF does not store: which tokens absorb adjacent white space, by name as in llama.cpp."""
    end = vocabulary.ids.get("</s>")
    if end is not None and special.bos is not None and vocabulary.tokens[special.bos] == "<s>":
        vocabulary.kinds[end] = CONTROL  # ends a text, though some files mark it as plain text
    name = metadata.get("general.name")
    name, pre = (name.lower() if isinstance(name, str) else ""), keys.text("pre", "") or ""
    if "phi-3" in name or "phi3" in name:
        added_ids = vocabulary.of_kind(CONTROL, UNKNOWN, USER_DEFINED)
        return replace(vocabulary, rstrip=frozenset(added_ids) - vocabulary.named("<unk>", "<s>", "<|endoftext|>"))
    if any(kind in pre for kind in ("jina-v2-de", "jina-v2-es", "jina-v2-code")):
        return replace(vocabulary, lstrip=vocabulary.named("<mask>"))
    if "modern-bert" in name:
        return replace(vocabulary, lstrip=vocabulary.named("[MASK]"))
    return vocabulary


def _special_ids(keys: _Keys, vocabulary: Vocabulary) -> SpecialIds:
    sep = keys.token("seperator_token_id", vocabulary)  # as GGUF spells it
    special = SpecialIds(
        bos=keys.token("bos_token_id", vocabulary, strict=True),
        eos=keys.token("eos_token_id", vocabulary, strict=True),
        eot=keys.token("eot_token_id", vocabulary),
        unk=keys.token("unknown_token_id", vocabulary),
        pad=keys.token("padding_token_id", vocabulary),
        sep=keys.token("separator_token_id", vocabulary) if sep is None else sep,
        cls=keys.token("cls_token_id", vocabulary),
        mask=keys.token("mask_token_id", vocabulary),
    )
    return special.fill_missing({vocabulary.tokens[i]: i for i in vocabulary.of_kind(CONTROL, UNKNOWN)})


def _chat_template(metadata: Mapping[str, Any], source: str) -> str | None:
    key = "tokenizer.chat_template"
    template = metadata.get(key)
    if template is None:
        return None
    if not isinstance(template, str):
        raise FormatError(f"{source}: metadata {key}: expected a string, found {type(template).__name__}")
    return template


# -- models ----------------------------------------------------------------------------------------------------------
def _bpe(keys: _Keys, vocabulary: Vocabulary, special: SpecialIds, model: str) -> tuple[RustTokenizer, Bpe]:
    pre = _pre_tokenizer(keys, model)
    merges = keys.strings("merges", MAX_MERGES)
    if merges is None:
        raise keys.wrong("merges", "the merges of the vocabulary", None)
    build = tokenizer_models.raw_bpe if pre.raw else tokenizer_models.byte_level_bpe
    rust, bpe = build(vocabulary, merges, pre)
    return _with_ends(rust, keys, vocabulary, special, add_bos=pre.add_bos, add_eos=False), bpe


def _pre_tokenizer(keys: _Keys, model: str) -> PreTokenizer:
    name = "gemma4" if model == "gemma4" else keys.text("pre", "default") or "default"
    pre_tokenizer = PRE_TOKENIZERS.get(name)
    if pre_tokenizer is None:
        hint = nearest(name[:80], PRE_TOKENIZERS)
        raise FormatError(f"{keys.where('pre')}: no such pre-tokenizer: {quoted(name)}", hint=hint)
    return pre_tokenizer


def _sentencepiece(keys: _Keys, vocabulary: Vocabulary, special: SpecialIds) -> tuple[RustTokenizer, Bpe]:
    scores = _scores(keys, vocabulary)
    rust, bpe = tokenizer_models.sentencepiece_bpe(vocabulary, scores, add_prefix=keys.flag("add_space_prefix", True))
    return _with_ends(rust, keys, vocabulary, special, add_bos=True, add_eos=False), bpe


def _unigram(keys: _Keys, vocabulary: Vocabulary, special: SpecialIds) -> RustTokenizer:
    charsmap = keys.numbers("precompiled_charsmap", "iu", max_count=MAX_CHARSMAP_BYTES)
    rust = tokenizer_models.unigram(
        vocabulary,
        _scores(keys, vocabulary),
        unknown=special.unk,
        charsmap=None if charsmap is None else charsmap.astype(np.uint8).tobytes(),
        add_prefix=keys.flag("add_space_prefix", False),
        merge_spaces=keys.flag("remove_extra_whitespaces", False),
    )
    return _with_ends(rust, keys, vocabulary, special, add_bos=False, add_eos=True)


def _word_piece(keys: _Keys, vocabulary: Vocabulary, special: SpecialIds) -> RustTokenizer:
    if special.unk is None:
        raise keys.wrong("unknown_token_id", "the id of [UNK]", None)
    lowercase = keys.flag("normalizer.lowercase", True)
    rust = tokenizer_models.word_piece(
        vocabulary, unknown=special.unk, lowercase=lowercase,
        strip_accents=keys.flag("normalizer.strip_accents", lowercase),
    )  # fmt: skip
    first = special.bos if special.cls is None else special.cls
    if first is None or special.sep is None:
        key = "cls_token_id" if first is None else "seperator_token_id"
        raise keys.wrong(key, "a token id", None)
    return add_special_tokens(rust, vocabulary, (first,), (special.sep,))


def _scores(keys: _Keys, vocabulary: Vocabulary) -> NDArray[Any]:
    scores = keys.number_each("scores", "fiu", vocabulary.tokens)
    if scores is None:
        raise keys.wrong("scores", "a score for each token", None)
    if not np.isfinite(scores).all():
        raise keys.wrong("scores", "finite numbers", float(scores[~np.isfinite(scores)][0]))
    return scores


def _with_ends(
    rust: RustTokenizer, keys: _Keys, vocabulary: Vocabulary, special: SpecialIds, *, add_bos: bool, add_eos: bool
) -> RustTokenizer:
    """Add special ids before and after every text, by the file's flags or the model's defaults."""
    ends: list[tuple[int, ...]] = []
    for key, default, role, token in (
        ("add_bos_token", add_bos, "bos_token_id", special.bos),
        ("add_eos_token", add_eos, "eos_token_id", special.eos),
    ):
        add = keys.flag(key, default)
        if add and token is None:
            raise FormatError(f"{keys.where(key)}: expected {_PREFIX}{role} as well, found none")
        ends.append((token,) if add and token is not None else ())
    return add_special_tokens(rust, vocabulary, *ends)
