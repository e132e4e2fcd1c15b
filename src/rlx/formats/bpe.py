"""Byte-pair encoding over memory-mapped tables, with the same results as the Rust library's BPE.

The library rebuilds hash maps of every token and merge at process start; for 262,144 tokens that takes longer than
everything else up to the first token of a small model. Here the tables are NumPy arrays, built once and stored in a
file; later processes map it and read only the pages that their texts need. The library still does the rest (added
tokens, normalizers, pre-tokenizers, offsets, post-processors): a `Bpe` acts as its last pre-tokenizer and returns the
tokens of each word, so the library's own model stays empty.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise
from operator import add
from typing import Any, TypeVar

import numpy as np
from tokenizers import PreTokenizedString, Regex, Token, models, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

from rlx.arrays import Array
from rlx.errors import FormatError
from rlx.fast_dataclass import dataclass
from rlx.formats.tensor_file import quoted

K = TypeVar("K")
V = TypeVar("V")
SPACES = ("\u2581", " ")  # of SentencePiece and of llama2.c
BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))
TOKEN = 0xFFFFFFFF  # the lower half of entries of `letters` and `merge`
MAX_CACHED = 1 << 15  # entries in each of the caches of words, characters and pairs
MAX_CACHED_CHARS = 64  # length of a cached word; longer ones rarely repeat
MAX_JOINERS = 32  # distinct characters before a space inside tokens; with more, tokens are not words


@dataclass(frozen=True, slots=True)
class Merges:
    """Merges `left + right -> joined`, best first; if a pair occurs twice, the later one counts."""

    left: Array
    right: Array
    joined: Array


class Bpe:
    """A BPE model, immutable except for its caches, so threads can share it.

    `tables` holds:
    - `text`: the concatenated names of all tokens, and `ends`: where each one ends;
    - `order`: the ids sorted by name;
    - `letters`: sorted entries for one-character names, code point in the upper half and id in the lower;
    - merges sorted by left and right token: `first` (where those of a left token begin), `right`, and `merge` (rank in
      the upper half, resulting token in the lower);
    - `cut`: the characters that `_cut` returns.

    `options` is a library model without merges that holds the remaining settings of tokenizer.json.
    """

    def __init__(self, tables: Mapping[str, Array], options: models.BPE) -> None:
        self.tables = tables
        self.size = len(tables["ends"]) - 1  # ids; some may have no token
        self._text, self._ends, self._order, self._letters, self._first, self._right, self._merges = (
            tables[name].data for name in ("text", "ends", "order", "letters", "first", "right", "merge")
        )
        self._unk: str | None = options.unk_token
        self._prefix = options.continuing_subword_prefix or ""  # added to every character of a word but the first
        self._suffix = options.end_of_word_suffix or ""
        self._fuse, self._bytes, self._ignore_merges = options.fuse_unk, options.byte_fallback, options.ignore_merges
        self._words: dict[str, list[Token]] = {}
        self._symbols: dict[str, int | None] = {}
        self._pairs: dict[int, int] = {}

    @classmethod
    def build(cls, ids: Mapping[str, int], merges: Merges, options: models.BPE) -> Bpe:
        """Build the tables from validated tokens and merges."""
        size = max(ids.values(), default=-1) + 1
        names = [""] * size
        for name, i in ids.items():
            names[i] = name
        ends = np.zeros(size + 1, np.uint32)
        np.cumsum([len(name.encode()) for name in names], out=ends[1:])
        keys = merges.left.astype(np.int64) << 32 | merges.right
        by_pair = np.argsort(keys, kind="stable")
        by_pair = by_pair[np.append(np.diff(keys[by_pair]) != 0, np.ones(min(len(keys), 1), bool))]
        first = np.zeros(size + 1, np.uint32)
        np.cumsum(np.bincount(merges.left[by_pair], minlength=size), out=first[1:])
        joined_ids = np.flatnonzero(np.bincount(merges.joined, minlength=size)).tolist()
        cut = _cut(ids, merges, [names[i] for i in joined_ids], options)
        tables = {
            "text": np.frombuffer("".join(names).encode(), np.uint8),
            "ends": ends,
            "order": np.array(sorted(ids.values(), key=names.__getitem__), np.uint32),
            "letters": np.array(sorted(ord(name) << 32 | i for name, i in ids.items() if len(name) == 1), np.int64),
            "first": first,
            "right": merges.right[by_pair].astype(np.uint32),
            "merge": by_pair.astype(np.int64) << 32 | merges.joined[by_pair],
            "cut": np.array([ord(c) for c in cut], np.uint32),
        }
        return cls(tables, options)

    # -- tokens --
    def name(self, token: int) -> str | None:
        """The name of a token; None for an unused id."""
        if not 0 <= token < self.size:
            return None
        name = self._name(token)
        return name if name or self.id("") == token else None

    def id(self, name: str) -> int | None:
        """The id of the token with this name."""
        if len(name) == 1:  # the common case
            letters = self._letters
            at = bisect_left(letters, ord(name) << 32)
            return letters[at] & TOKEN if at < len(letters) and letters[at] >> 32 == ord(name) else None
        order = self._order
        at = bisect_left(order, name, key=self._name)
        return order[at] if at < len(order) and self._name(order[at]) == name else None

    def _name(self, token: int) -> str:
        return str(self._text[self._ends[token] : self._ends[token + 1]], "utf-8")

    # -- words to tokens --
    def pre_tokenizer(self, base: PreTokenizer | None) -> PreTokenizer:
        """Extend `base` with this model: it splits text as `base` does and tokenises every word.

        If a word may be an entire text, as with SentencePiece, it is also split before spaces, since words repeat and
        are cached.
        """
        parts: list[Any] = [] if base is None else [base]
        if cut := [f"\\x{{{character:x}}}" for character in self.tables["cut"]]:
            parts.append(pre_tokenizers.Split(Regex(f"(?<=[^{''.join(cut)}])(?={cut[0]})"), "isolated"))
        return pre_tokenizers.Sequence([*parts, PreTokenizer.custom(self)])

    def pre_tokenize(self, text: PreTokenizedString) -> None:
        """The hook that the library calls on a Python pre-tokenizer."""
        text.tokenize(self.tokens)

    def tokens(self, word: str) -> list[Token]:
        """The tokens of a word, with their byte offsets."""
        try:
            return self._words[word]
        except KeyError:
            tokens = self._tokens(word)
            return tokens if len(word) > MAX_CACHED_CHARS else _cache(self._words, word, tokens)

    def _tokens(self, word: str) -> list[Token]:
        if self._ignore_merges and (word_id := self.id(word)) is not None:
            return [Token(word_id, word, (0, len(word.encode())))]
        tokens, lengths = self._split(word)
        self._merge(tokens, lengths)
        ends = accumulate(lengths)
        return [
            Token(token, self._name(token), (end - n, end))
            for token, n, end in zip(tokens, lengths, ends, strict=True) if n
        ]  # fmt: skip

    def _split(self, word: str) -> tuple[list[int], list[int]]:
        """Split a word into one token per character; also returns their lengths in bytes."""
        known = self._symbols
        tokens: list[int] = []
        lengths: list[int] = []
        unknown = 0  # bytes of preceding characters without a token
        for i, character in enumerate(word):
            length = 1 if character < "\x80" else len(character.encode())
            if self._prefix and i:
                character = self._prefix + character
            if self._suffix and i == len(word) - 1:
                character += self._suffix
            token = known.get(character)
            if token is None:
                token = self._symbol(character)
            if token is None and self._bytes:
                byte_ids = [self._symbol(BYTE_TOKENS[byte]) for byte in character.encode()]
                if None not in byte_ids:
                    tokens += [byte for byte in byte_ids if byte is not None]
                    lengths += [1] * len(byte_ids)
                    continue
            if unknown and (token is not None or not self._fuse):
                tokens.append(self._unknown())
                lengths.append(unknown)
                unknown = 0
            if token is not None:
                tokens.append(token)
                lengths.append(length)
            elif self._unk is not None:
                unknown += length
        if unknown:
            tokens.append(self._unknown())
            lengths.append(unknown)
        return tokens, lengths

    def _symbol(self, name: str) -> int | None:
        try:
            return self._symbols[name]
        except KeyError:
            return _cache(self._symbols, name, self.id(name))

    def _unknown(self) -> int:
        token = self._symbol(self._unk or "")
        if token is None:
            raise FormatError(f"unk_token: the vocabulary has no {quoted(self._unk)}")
        return token

    def _merge_of(self, left: int, right: int) -> int:
        """The entry of a pair in `merge`; -1 if the pair does not merge."""
        key = left << 32 | right
        merge = self._pairs.get(key)
        if merge is None:
            end = self._first[left + 1]
            at = bisect_left(self._right, right, self._first[left], end)
            merge = self._merges[at] if at < end and self._right[at] == right else -1
            _cache(self._pairs, key, merge)
        return merge

    def _merge(self, tokens: list[int], lengths: list[int]) -> None:
        """Merge the lowest-ranked, leftmost pair until no pair merges, in place. Consumed tokens get length 0.

        A heap holds the candidate merges; an entry is stale if `merges[i]` no longer yields its token.
        """
        count, merge_of = len(tokens), self._merge_of
        after = list(range(1, count + 1))  # index of the next live token
        before = list(range(-1, count - 1))
        merges = [*(merge_of(left, right) for left, right in pairwise(tokens)), -1]  # each token with its successor
        heap = [(merge, i) for i, merge in enumerate(merges) if merge >= 0]
        heapify(heap)
        while heap:
            merge, i = heappop(heap)
            joined = merge & TOKEN
            if merges[i] & TOKEN != joined:  # stale; -1 matches no token
                continue
            right = after[i]
            tokens[i] = joined
            lengths[i] += lengths[right]
            lengths[right], merges[right] = 0, -1
            after[i] = following = after[right]
            merges[i] = -1
            if following < count:
                before[following] = i
                merges[i] = merge = merge_of(joined, tokens[following])
                if merge >= 0:
                    heappush(heap, (merge, i))
            previous = before[i]
            if previous >= 0:
                merges[previous] = merge = merge_of(tokens[previous], joined)
                if merge >= 0:
                    heappush(heap, (merge, previous))

    # -- tokenizer.json --
    def to_json(self) -> dict[str, Any]:
        """Return `vocab` and `merges` in tokenizer.json form."""
        names = [self._name(i) for i in range(self.size)]
        left = np.repeat(np.arange(self.size), np.diff(self.tables["first"]).astype(np.int64))
        best_first = np.argsort(self.tables["merge"])
        pairs = zip(left[best_first].tolist(), self.tables["right"][best_first].tolist(), strict=True)
        vocab = {names[i]: i for i in sorted(self._order.tolist())}
        return {"vocab": vocab, "merges": [[names[a], names[b]] for a, b in pairs]}


def _cache(known: dict[K, V], key: K, value: V) -> V:
    if len(known) >= MAX_CACHED:
        known.clear()
    known[key] = value
    return value


def _cut(ids: Mapping[str, int], merges: Merges, joined: Sequence[str], options: models.BPE) -> str:
    """Find the space before which text can be split, and the characters after which it cannot; empty if unsafe.

    A merge crosses a split only if its token contains one of those characters followed by the space. The space must
    have a token, so that unknown characters on either side are not fused. Byte and unknown tokens, whose names differ
    from the text, must not take part in merges, and no character may be dropped: the library's offsets ignore dropped
    characters up to the end of a word.
    """
    if options.continuing_subword_prefix or options.end_of_word_suffix or options.ignore_merges:
        return ""
    if options.unk_token is None and not (options.byte_fallback and all(name in ids for name in BYTE_TOKENS)):
        return ""
    others = [i for name in (options.unk_token, *BYTE_TOKENS) if (i := ids.get(name or "")) is not None]
    if np.isin(merges.left, others).any() or np.isin(merges.right, others).any():
        return ""
    for space in (space for space in SPACES if space in ids):
        before = re.compile(f"[^{space}](?={space})")
        joiners = {char for name in joined if space in name for char in before.findall(name)}
        if len(joiners) <= MAX_JOINERS:
            return space + "".join(sorted(joiners))
    return ""


def check_tables(tables: Mapping[str, Array], vocab_size: int, where: str) -> None:
    """Reject inconsistent tables. Reads every page, so loading a trusted snapshot skips this."""
    expected: dict[str, type[np.generic]] = {name: np.uint32 for name in ("ends", "order", "first", "right", "cut")}
    expected |= {"text": np.uint8, "letters": np.int64, "merge": np.int64}
    if {name: (a.dtype, a.ndim) for name, a in tables.items()} != {n: (np.dtype(t), 1) for n, t in expected.items()}:
        raise FormatError(f"{where}: expected the tables {', '.join(expected)}, found {quoted(sorted(tables))}")
    ends, first, merges, size = tables["ends"], tables["first"], tables["merge"], len(tables["ends"]) - 1
    ids = {"order": tables["order"], "letters": tables["letters"] & TOKEN, "right": tables["right"]}
    ids["merge"] = merges & TOKEN
    wrong = [name for name, values in ids.items() if (values >= size).any()]
    wrong += [name for name, values in (("letters", tables["letters"]), ("merge", merges)) if (values < 0).any()]
    wrong += [] if 0 <= size <= vocab_size and _rises(ends, tables["text"]) else ["ends"]
    wrong += [] if len(first) == size + 1 and _rises(first, merges) else ["first"]
    wrong += [] if len(tables["right"]) == len(merges) else ["right"]
    if not wrong:
        begins = tables["text"][ends[:-1][np.diff(ends) > 0]]
        try:
            str(tables["text"].data, "utf-8")
        except UnicodeDecodeError:
            wrong.append("text")
        wrong += ["ends"] if (begins & 0xC0 == 0x80).any() else []  # splits a UTF-8 character
    if wrong:
        raise FormatError(f"{where}: table {wrong[0]!r} does not fit {vocab_size} tokens or the other tables")


def _rises(ends: Array, parts: Array) -> bool:
    """Whether `ends` are non-decreasing offsets that cover `parts` from start to end."""
    return bool(len(ends) and ends[0] == 0 and ends[-1] == len(parts) and (ends[:-1] <= ends[1:]).all())


def merges_of(
    left: Sequence[str], right: Sequence[str], ids: Mapping[str, int], where: str, *, prefix: str = ""
) -> Merges:
    """Convert merges given by token name, best first, to ids; `prefix` is the `continuing_subword_prefix`."""
    joined = map(add, left, (name[len(prefix) :] for name in right) if prefix else right)
    try:
        return Merges(*(np.fromiter(map(ids.__getitem__, names), np.uint32) for names in (left, right, joined)))
    except KeyError as error:
        raise FormatError(f"{where}: token {quoted(error.args[0])} of a merge is out of vocabulary") from error
