"""Build Rust tokenizers from a vocabulary: byte-level BPE, SentencePiece BPE, unigram and WordPiece.

Each function takes the `Vocabulary` of a model file and assembles normalizer, pre-tokenizer, model and decoder as the
model's own tokenizer.json would. BPE models are our own (`bpe.py`), not the library's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RustTokenizer

from rlx.errors import FormatError
from rlx.fast_dataclass import dataclass
from rlx.fork_safe_locks import cached_property
from rlx.formats.bpe import Bpe, Merges, merges_of
from rlx.formats.pretokenize import PreTokenizer
from rlx.formats.tensor_file import quoted
from rlx.formats.tokenizers_errors import rust_call

# Token kinds, numbered as in `tokenizer.ggml.token_type`.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

MAX_TOKENS = 1 << 21  # ten times the largest vocabulary in use
MAX_TOKEN_CHARS = 1 << 14
MAX_VOCABULARY_CHARS = 1 << 26
MAX_SENTENCEPIECE_CHARS = 512  # every split of such a token in two is tried; SentencePiece itself stops at 16
MAX_REPLACEMENT_BYTES = 256  # in a charsmap; Unicode's longest, U+FDFA, has 33
IMPROBABLE = -1e6  # score of a unigram piece that loses to any other segmentation
SPACE = "\u2581"  # SentencePiece's visible space
_MAX_WORD_CHARS = 100  # BERT's: a longer word is unknown


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id, with the kind of each. Construction checks sizes and duplicates."""

    tokens: list[str]
    kinds: NDArray[Any]  # one of the constants above per token
    where: str  # file and key, for error messages
    lstrip: frozenset[int] = frozenset()  # added tokens that absorb the white space before them
    rstrip: frozenset[int] = frozenset()  # added tokens that absorb the white space after them

    def __post_init__(self) -> None:
        if not 0 < len(self.tokens) <= MAX_TOKENS:
            raise FormatError(f"{self.where}: expected 1 to {MAX_TOKENS} tokens, found {len(self.tokens)}")
        longest = max(map(len, self.tokens))
        if longest > MAX_TOKEN_CHARS:
            raise FormatError(f"{self.where}: expected tokens of at most {MAX_TOKEN_CHARS} characters, found {longest}")
        total = sum(map(len, self.tokens))
        if total > MAX_VOCABULARY_CHARS:
            raise FormatError(f"{self.where}: expected at most {MAX_VOCABULARY_CHARS} characters, found {total}")
        if len(self.ids) < len(self.tokens):
            raise _duplicate_error(self.tokens, self.where)
        try:
            "".join(self.tokens).encode()
        except UnicodeEncodeError as error:
            code_point = f"{ord(error.object[error.start]):#06x}"
            raise FormatError(f"{self.where}: half of a surrogate pair, {code_point}") from error

    @cached_property
    def ids(self) -> dict[str, int]:
        """Map from token to id."""
        return dict(zip(self.tokens, range(len(self.tokens)), strict=True))

    def named(self, *names: str) -> frozenset[int]:
        """The ids of those of the named tokens that exist."""
        return frozenset(self.ids[name] for name in names if name in self.ids)

    def of_kind(self, *kinds: int) -> list[int]:
        """The ids of all tokens of these kinds, in order."""
        ids: list[int] = np.flatnonzero(np.isin(self.kinds, kinds)).tolist()
        return ids


def _duplicate_error(tokens: Sequence[str], where: str) -> FormatError:
    first: dict[str, int] = {}
    place = next(i for i, token in enumerate(tokens) if first.setdefault(token, i) != i)
    return FormatError(f"{where}: token {quoted(tokens[place])} twice, at {first[tokens[place]]} and {place}")


# -- models ----------------------------------------------------------------------------------------------------------
def byte_level_bpe(vocabulary: Vocabulary, merges: Sequence[str], pre: PreTokenizer) -> tuple[RustTokenizer, Bpe]:
    """GPT-2's scheme: regex patterns split words, whose bytes (in a printable alphabet) are merged by rank."""
    rust = RustTokenizer(models.BPE(_added_ids(vocabulary), [], ignore_merges=pre.ignore_merges))
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    rust.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(False, use_regex=False)])
    rust.decoder = decoders.ByteLevel()
    return rust, _named_bpe(vocabulary, merges, rust)


def raw_bpe(vocabulary: Vocabulary, merges: Sequence[str], pre: PreTokenizer) -> tuple[RustTokenizer, Bpe]:
    """Gemma 4's scheme: GPT-2's ranked merges over SentencePiece text, with spaces as U+2581."""
    rust = _with_fallback(vocabulary)
    rust.normalizer = normalizers.Replace(" ", SPACE)
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    rust.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    rust.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return rust, _named_bpe(vocabulary, merges, rust)


def sentencepiece_bpe(
    vocabulary: Vocabulary, scores: NDArray[Any], *, add_prefix: bool, space: str = SPACE
) -> tuple[RustTokenizer, Bpe]:
    """SentencePiece BPE: the pair whose merged token scores best merges first; unknown characters become bytes.

    BPE merges have distinct ranks where SentencePiece has scores, with two consequences: tokens of equal score merge by
    id, not by position in the text; and of two overlapping merges into the same token, the one with the longer left
    part goes first, which is the leftmost one except in the longest runs of one character.
    """
    rust = _with_fallback(vocabulary)
    before: list[Any] = [normalizers.Prepend(space)] if add_prefix else []
    after: list[Any] = [decoders.ByteFallback(), decoders.Fuse()]
    if space != " ":
        before.append(normalizers.Replace(" ", space))
        after.insert(0, decoders.Replace(space, " "))
    if add_prefix:
        after.append(decoders.Strip(" ", 1, 0))
    rust.normalizer = normalizers.Sequence(before)
    rust.decoder = decoders.Sequence(after)
    return rust, Bpe.build(vocabulary.ids, _merges_of_scores(vocabulary, scores), rust.model)


def unigram(
    vocabulary: Vocabulary, scores: NDArray[Any], *, unknown: int | None, charsmap: bytes | None, add_prefix: bool,
    merge_spaces: bool,
) -> RustTokenizer:  # fmt: skip
    """SentencePiece unigram: the segmentation with the highest sum of token log probabilities.

    Control tokens are pieces of the model too, but text never becomes one.
    """
    improbable = np.where(np.isin(vocabulary.kinds, (CONTROL, UNKNOWN)), IMPROBABLE, scores)
    pairs = list(zip(vocabulary.tokens, improbable.tolist(), strict=True))
    with rust_call(f"{vocabulary.where} and scores"):
        model = models.Unigram(pairs, unknown, byte_fallback=bool(vocabulary.of_kind(BYTE)))
    rust = RustTokenizer(model)
    before: list[Any] = []
    if charsmap:
        check_charsmap(charsmap, f"{vocabulary.where} and precompiled_charsmap")
        with rust_call(f"{vocabulary.where} and precompiled_charsmap"):
            before.append(normalizers.Precompiled(charsmap))
    if merge_spaces:
        before += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    rust.normalizer = normalizers.Sequence(before)
    scheme = "always" if add_prefix else "never"
    rust.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False)
    rust.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(SPACE, prepend_scheme=scheme)])
    return rust


def word_piece(
    vocabulary: Vocabulary, *, unknown: int, lowercase: bool = True, strip_accents: bool | None = None
) -> RustTokenizer:
    """BERT's scheme: greedy longest match, the first token of a word plain and the rest prefixed with `##`."""
    kinds = vocabulary.kinds.tolist()
    tokens = [_word_piece_name(token, kind) for token, kind in zip(vocabulary.tokens, kinds, strict=True)]
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ids) < len(tokens):
        raise _duplicate_error(tokens, vocabulary.where)
    with rust_call(vocabulary.where):
        model = models.WordPiece(ids, unk_token=tokens[unknown], max_input_chars_per_word=_MAX_WORD_CHARS)
    rust = RustTokenizer(model)
    rust.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.decoder = decoders.WordPiece()
    return rust


def add_special_tokens(
    rust: RustTokenizer, vocabulary: Vocabulary, prefix: Sequence[int] = (), suffix: Sequence[int] = ()
) -> RustTokenizer:
    """Register special and user-defined tokens, and the ids to add before and after every text."""

    def added(kinds: Iterable[int], special: bool) -> list[AddedToken]:
        return [
            AddedToken(
                vocabulary.tokens[i], normalized=False, special=special, lstrip=i in vocabulary.lstrip,
                rstrip=i in vocabulary.rstrip,
            )
            for i in vocabulary.of_kind(*kinds)
        ]  # fmt: skip

    with rust_call(vocabulary.where):
        rust.add_special_tokens(added((CONTROL, UNKNOWN), special=True))
        rust.add_tokens(added((USER_DEFINED,), special=False))
        names = {i: str(i) for i in (*prefix, *suffix)}
        rust.post_processor = processors.TemplateProcessing(
            single=[*(names[i] for i in prefix), "$A", *(names[i] for i in suffix)],
            special_tokens=[
                {"id": name, "ids": [i], "tokens": [vocabulary.tokens[i]]} for i, name in names.items()
            ],
        )  # fmt: skip
    return rust


def check_charsmap(charsmap: bytes, where: str) -> None:
    """Reject a SentencePiece charsmap with inconsistent sizes: the library would allocate what they claim and abort.

    Layout: the size of a trie, the trie, and zero-terminated replacements.
    """
    trie = int.from_bytes(charsmap[:4], "little")
    if len(charsmap) < 8 or trie % 4 or not 0 < trie <= len(charsmap) - 4:
        raise FormatError(f"{where}: expected a trie inside {len(charsmap)} bytes, found one of {trie}")
    longest = max(map(len, charsmap[4 + trie :].split(b"\0")))
    if longest > MAX_REPLACEMENT_BYTES:
        raise FormatError(f"{where}: expected replacements of at most {MAX_REPLACEMENT_BYTES} bytes, found {longest}")


# -- parts -----------------------------------------------------------------------------------------------------------
def _sides(merges: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split merges into their left and right tokens."""
    flat = " ".join(merges).split(" ")  # five times as fast as one split per merge
    if len(flat) == 2 * len(merges):
        return flat[::2], flat[1::2]
    # a space as first character belongs to the token
    parts = [(merge[:1] + left, right) for merge in merges for left, _, right in (merge[1:].partition(" "),)]
    return [left for left, _ in parts], [right for _, right in parts]


def _named_bpe(vocabulary: Vocabulary, merges: Sequence[str], rust: RustTokenizer) -> Bpe:
    named = merges_of(*_sides(merges), vocabulary.ids, f"{vocabulary.where} and merges")
    return Bpe.build(vocabulary.ids, named, rust.model)


def _with_fallback(vocabulary: Vocabulary) -> RustTokenizer:
    """Create a tokenizer with byte fallback for unknown characters."""
    unknown = _token_of_kind(vocabulary, UNKNOWN)
    return RustTokenizer(models.BPE(_added_ids(vocabulary), [], unk_token=unknown, fuse_unk=True, byte_fallback=True))


def _added_ids(vocabulary: Vocabulary) -> dict[str, int]:
    """Ids of the special and user-defined tokens, which the library must know."""
    return {vocabulary.tokens[i]: i for i in vocabulary.of_kind(CONTROL, UNKNOWN, USER_DEFINED)}


def _merges_of_scores(vocabulary: Vocabulary, scores: NDArray[Any]) -> Merges:
    """List every split of a token into two others, best score first. Text never merges into control or byte tokens."""
    tokens = vocabulary.tokens
    usable = vocabulary.of_kind(NORMAL, UNUSED)
    id_of = {tokens[i]: i for i in usable}.get
    best_first = np.asarray(usable, np.int64)[np.argsort(-np.asarray(scores, np.float64)[usable], kind="stable")]
    merges: list[int] = []
    for i in best_first.tolist():
        token = tokens[i]
        if len(token) > MAX_SENTENCEPIECE_CHARS:
            raise FormatError(
                f"{vocabulary.where}: expected at most {MAX_SENTENCEPIECE_CHARS} characters, found {len(token)} in {i}"
            )
        for cut in range(len(token) - 1, 0, -1):
            left = id_of(token[:cut])
            if left is not None:
                right = id_of(token[cut:])
                if right is not None:
                    merges += left, right, i
    return Merges(*np.array(merges, np.uint32).reshape(-1, 3).T)


def _token_of_kind(vocabulary: Vocabulary, kind: int) -> str | None:
    ids = vocabulary.of_kind(kind)
    return vocabulary.tokens[ids[0]] if ids else None


def _word_piece_name(token: str, kind: int) -> str:
    """Convert GGUF's `▁word` and `piece` to BERT's `word` and `##piece`; special tokens and `[unused7]` are kept."""
    if kind != NORMAL or (token.startswith("[") and token.endswith("]")):
        return token
    return token[1:] if token.startswith(SPACE) else "##" + token
