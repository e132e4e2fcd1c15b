"""Tokenizers: one `Tokenizer` class for every file format, built on the Rust `tokenizers` library.

Reads a tokenizer.json, GGUF metadata or llama2.c's tokenizer.bin and builds a Rust tokenizer, which encodes. BPE models
use our own memory-mapped tables (`bpe.py`). Decoding is done here, byte by byte (`token_bytes.py`), so streaming and
`decode` give the same text. Files are untrusted: every defect, including a Rust panic, raises `FormatError`.
"""

from __future__ import annotations

import codecs
import json
import math
import operator
import secrets
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from rlx.errors import FormatError, RequestError
from rlx.fork_safe_locks import cached_property
from rlx.formats.bpe import Bpe
from rlx.formats.special_tokens import SpecialIds, SpecialTexts, is_marker, stop_ids
from rlx.formats.tensor_file import PathLike, open_bytes, quoted
from rlx.formats.token_bytes import TokenBytes, rule_of
from rlx.formats.tokenizers_errors import rust_call

MAX_GROWTH = 256  # upper bound on how much a normalizer may lengthen a text
MAX_ENDS = 64  # special tokens around a text
MIN_SHARED_CHARS = 400  # mean characters per text from which our BPE encodes a batch in parallel
CHARS_PER_ID = 16  # texts with fewer characters per allowed id are encoded without clipping
CLIP_CHARS = 4096  # characters per piece when `clip_text` counts ids


class Tokenizer:
    """Encodes text to token ids and decodes ids to text. Thread-safe.

    Create one with `from_json`, `from_gguf` or `from_tok512`. `bos_id`, `eos_id`, `eot_id`, `unk_id`, `pad_id`,
    `sep_id`, `cls_id` and `mask_id` are None if the vocabulary has no such token. `prefix` and `suffix` are the ids
    that `add_special` adds around a text. `chat_template` is the template stored in the file, if any.
    """

    def __init__(
        self, rust: RustTokenizer, bpe: Bpe | None = None, *, source: str, special: SpecialIds, vocab_size: int,
        chat_template: str | None = None,
    ) -> None:  # fmt: skip
        self.source = source
        self.vocab_size = vocab_size
        self.chat_template = chat_template
        with rust_call(source):
            rust.no_padding()  # tokenizer.json may request padding; callers pad as they need
            rust.no_truncation()
            added = rust.get_added_tokens_decoder()
            decoder, normalizer, processor = (
                _to_json(part) for part in (rust.decoder, rust.normalizer, rust.post_processor)
            )
        if (growth := _growth(normalizer)) > MAX_GROWTH:
            raise FormatError(
                f"{source}: normalizer: expected texts at most {MAX_GROWTH} times as long, found {growth:g}"
            )
        _check_added(rust, added, source)
        self.prefix, self.suffix = _ends(processor, source)
        if max((*self.prefix, *self.suffix), default=0) >= vocab_size:
            raise FormatError(f"{source}: post_processor: expected ids below {vocab_size}")

        named = {t.content: i for i, t in added.items() if t.special or is_marker(t.content)}
        special = special.fill_missing(named)
        self.bos_id, self.eos_id, self.eot_id = special.bos, special.eos, special.eot
        self.unk_id, self.pad_id, self.mask_id = special.unk, special.pad, special.mask
        self.sep_id, self.cls_id = special.sep, special.cls
        self.stop_ids = stop_ids(special, named)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.special_texts = SpecialTexts(added[i].content for i in self.special_ids)
        self._control = self.special_ids - {self.unk_id}
        self._anchor = f"<{secrets.token_hex(16)}>"  # unguessable stand-in for a special token before a text
        name_of = rust.id_to_token if bpe is None else bpe.name
        self._pieces = TokenBytes(rule_of(decoder), name_of, {i: t.content for i, t in added.items()}, source)
        self._bpe, self._base_pre_tokenizer = bpe, rust.pre_tokenizer
        if bpe is not None:
            with rust_call(source):
                rust.pre_tokenizer = bpe.pre_tokenizer(rust.pre_tokenizer)
        self._parsing = rust
        self._plain = self._sibling(rust, added) if self.special_ids else rust

    # -- constructors --
    @classmethod
    def from_json(cls, source: PathLike | bytes, *, config: Mapping[str, Any] | None = None) -> Tokenizer:
        """Load a tokenizer.json from its path or its bytes.

        `config` is the parsed tokenizer_config.json, which names bos, eos and the other special tokens and may hold the
        chat template. Given a path, `config` defaults to the files in the same folder. Without a config, special tokens
        are recognised by name.
        """
        from rlx.formats.strict_json import MAX_BYTES
        from rlx.formats.tokenizer_json import read_json, sidecar_config, special_of_config, template_of_config
        from rlx.formats.tokenizer_models import MAX_TOKENS

        if isinstance(source, bytes):
            where, data = "tokenizer.json", source
        else:
            file = open_bytes(source)
            where, data = str(file.path), bytes(file.view[: MAX_BYTES + 1])
            config = sidecar_config(file.path) if config is None else config
        if len(data) > MAX_BYTES:
            raise FormatError(f"{where}: expected at most {MAX_BYTES} bytes, found more")
        rust, bpe = read_json(data, where)
        with rust_call(where):
            ids = rust.get_vocab(with_added_tokens=True)  # for BPE, only the added tokens
        vocab_size = max(max(ids.values(), default=-1) + 1, 0 if bpe is None else bpe.size)
        if not 0 < vocab_size <= MAX_TOKENS:
            raise FormatError(f"{where}: expected 1 to {MAX_TOKENS} token ids, found {vocab_size}")
        special = special_of_config(rust, bpe, config or {}, where)
        template = template_of_config(config or {}, where)
        return cls(rust, bpe, source=where, special=special, vocab_size=vocab_size, chat_template=template)

    @classmethod
    def from_characters(cls, text: str) -> Tokenizer:
        """Build a tokenizer with one token per character of a text, in the order of their code points."""
        if not text:
            raise FormatError("from_characters: the text is empty")
        isolate = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
        vocab = {character: i for i, character in enumerate(sorted(set(text)))}
        model = {"type": "WordLevel", "vocab": vocab, "unk_token": "unknown"}
        absent: dict[str, Any] = {"normalizer": None, "post_processor": None, "added_tokens": []}
        parts = {"version": "1.0", "pre_tokenizer": isolate, "decoder": {"type": "Fuse"}, "model": model, **absent}
        return cls.from_json(json.dumps(parts).encode())

    @classmethod
    def restore(
        cls, description: Mapping[str, Any], data: bytes, tables: Mapping[str, np.ndarray[Any, Any]], where: str
    ) -> Tokenizer:
        """Rebuild a tokenizer from the output of `describe` and `pack`; the data must be trusted."""
        with rust_call(where):
            rust = RustTokenizer.from_buffer(data)
            bpe = Bpe(tables, rust.model) if tables else None
        fields = {name: description[name] for name in ("source", "vocab_size", "chat_template", "special")}
        tokenizer = cls(rust, bpe, **fields)
        tokenizer.stop_ids = frozenset(description["stop_ids"])
        return tokenizer

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], *, source: PathLike = "GGUF") -> Tokenizer:
        """Build the tokenizer stored in GGUF metadata; `source` names the file in error messages."""
        from rlx.formats.gguf_vocab import read_vocab

        vocab = read_vocab(metadata, str(source))
        return cls(
            vocab.rust, vocab.bpe, source=str(source), special=vocab.special, vocab_size=vocab.size,
            chat_template=vocab.chat_template,
        )  # fmt: skip

    @classmethod
    def from_tok512(cls, path: PathLike, vocab_size: int) -> Tokenizer:
        """Load llama2.c's tokenizer.bin, which does not store its size: pass the model's `vocab_size`."""
        from rlx.formats.llama2c_vocab import read_tokenizer_bin
        from rlx.formats.tokenizer_models import (
            BYTE,
            CONTROL,
            NORMAL,
            UNKNOWN,
            Vocabulary,
            add_special_tokens,
            sentencepiece_bpe,
        )

        file = open_bytes(path)
        tokens, scores = read_tokenizer_bin(bytes(file.view), vocab_size, file.path)
        kinds = np.full(vocab_size, NORMAL)
        kinds[0], kinds[1:3], kinds[3:259] = UNKNOWN, CONTROL, BYTE
        vocabulary = Vocabulary(tokens, kinds, f"{file.path}: tokens")
        rust, bpe = sentencepiece_bpe(vocabulary, np.asarray(scores), add_prefix=True, space=" ")
        add_special_tokens(rust, vocabulary, prefix=(1,))
        special = SpecialIds(bos=1, eos=2, unk=0)
        return cls(rust, bpe, source=str(file.path), special=special, vocab_size=vocab_size)

    def describe(self) -> dict[str, Any]:
        """Return the fields that `restore` needs besides the output of `pack`."""
        roles = {role: getattr(self, f"{role}_id") for role, _ in SpecialIds().items()}
        fields = {name: getattr(self, name) for name in ("source", "vocab_size", "chat_template")}
        return {**fields, "special": SpecialIds(**roles), "stop_ids": sorted(self.stop_ids)}

    def pack(self) -> tuple[bytes, Mapping[str, np.ndarray[Any, Any]]]:
        """Return its tokenizer.json without BPE tokens and merges, and the tables that hold those."""
        with rust_call(self.source):
            if self._bpe is None:
                return bytes(self._parsing.to_str(), "utf-8"), {}
            rust = self._copy(self._parsing, self._parsing.get_added_tokens_decoder())
            rust.pre_tokenizer, rust.decoder = self._base_pre_tokenizer, self._parsing.decoder
            return bytes(rust.to_str(), "utf-8"), self._bpe.tables

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokenizer.restore, (self.describe(), *self.pack(), self.source)

    def to_json(self) -> bytes:
        """Return its complete tokenizer.json."""
        data, _ = self.pack()
        if self._bpe is None:
            return data
        document = json.loads(data)
        document["model"] |= self._bpe.to_json()
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()

    # -- text to ids --
    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False, limit: int | None = None
    ) -> list[int]:
        """Encode a text to token ids.

        `add_special` adds bos, eos, [CLS] or [SEP] around the text if the file says so. With `parse_special`, the text
        of a special token (`<|im_end|>`) becomes that token, as rendered chats need; otherwise it stays plain text, and
        no input can produce a special token. `limit` truncates the text to at most that many ids.
        """
        return self.encode_batch((text,), add_special=add_special, parse_special=parse_special, limit=limit)[0]

    def encode_batch(
        self, texts: Iterable[str], *, add_special: bool = True, parse_special: bool = False, limit: int | None = None
    ) -> list[list[int]]:
        """Encode each text as `encode` does, in parallel when that is faster."""
        batch = _check_texts(texts)
        if limit is not None:
            batch = [self.clip_text(text, limit, parse_special=parse_special) for text in batch]
        rust = self._parsing if parse_special else self._plain
        # the library's threads contend for the GIL to call our BPE, which outweighs the gain for short texts
        alone = self._bpe is not None and sum(map(len, batch)) < MIN_SHARED_CHARS * len(batch)
        with rust_call(self.source):
            rows = [
                encoding.ids
                for group in (([text] for text in batch) if alone else (batch,))
                for encoding in rust.encode_batch_fast(group, add_special_tokens=add_special)
            ]
        before, after = (len(self.prefix), len(self.suffix)) if add_special else (0, 0)
        if not parse_special and self._control:
            for i, ids in enumerate(rows):
                if not self._control.isdisjoint(ids[before : len(ids) - after]):
                    rows[i] = [*ids[:before], *self._without_control(batch[i]), *ids[len(ids) - after :]]
        return rows if limit is None else [_cut(ids, limit, before, after) for ids in rows]

    def clip_text(self, text: str, limit: int, *, parse_special: bool = False) -> str:
        """Clip a text that has far more than `limit` ids to a prefix that still has more than `limit`.

        Avoids encoding all of a huge text only to truncate it. Pieces are encoded one at a time, each distinct piece
        once, until they add up to twice `limit`. Tokens at the ends of a piece do not count, since in the full text
        they may merge with the neighbouring piece.
        """
        if len(text) <= max(CHARS_PER_ID * limit, CLIP_CHARS):
            return text
        counts: dict[str, int] = {}
        total = 0
        for start in range(0, len(text), CLIP_CHARS):
            piece = text[start : start + CLIP_CHARS]
            if piece not in counts:
                try:
                    ids = self.encode(piece, add_special=False, parse_special=parse_special)
                except RequestError:  # invalid text: encoding all of it reports the position
                    return text
                counts[piece] = max(len(ids) - 2, 0)
            total += counts[piece]
            if total > 2 * limit:
                return text[: start + CLIP_CHARS]
        return text

    def encode_parts(self, parts: Iterable[str | int]) -> list[int]:
        """Encode a mix of texts and token ids, in order; no text can produce a special token.

        Texts are encoded as `encode` treats text between special tokens: a tokenizer that adds a space before the first
        word of a text adds it before the first part only.
        """
        items = list(parts)
        texts = [
            part if i == 0 or not self.special_ids else self._anchor + part
            for i, part in enumerate(items) if isinstance(part, str)
        ]  # fmt: skip
        rows = iter(self.encode_batch(texts, add_special=False))
        out: list[int] = []
        for i, part in enumerate(items):
            if isinstance(part, str):
                out += next(rows)[0 if i == 0 or not self.special_ids else 1 :]
            else:
                out.append(self._check_id(part))
        return out

    def special_spans(self, text: str) -> list[tuple[int, int, int]]:
        """Locate special tokens in a text as (first, end, id), matched as encoding with `parse_special` does."""
        _check_texts((text,))
        if not any(first in text for first in self.special_texts.first_chars):
            return []
        with rust_call(self.source):
            encoding = self._parsing.encode(text, add_special_tokens=False)
        spans = zip(encoding.offsets, encoding.ids, strict=True)
        return [(first, end, i) for (first, end), i in spans if i in self.special_ids]

    # -- ids to text --
    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Decode ids to text; invalid UTF-8 becomes U+FFFD. `skip_special` omits special tokens."""
        stream = Stream(self, skip_special=skip_special)
        return b"".join(map(stream.take, ids)).decode("utf-8", "replace")

    def stream(
        self, *, skip_special: bool = False, continues: bool = False, keep: frozenset[int] = frozenset()
    ) -> Stream:
        """Start a streaming decoder; set `continues` if the ids follow text that was already emitted.

        `keep` are special tokens that `skip_special` does not omit.
        """
        return Stream(self, skip_special=skip_special, continues=continues, keep=keep)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token, including a leading space: b" the"."""
        return self._pieces[self._check_id(token)]

    def __repr__(self) -> str:
        return f"<Tokenizer {self.source!r}: {self.vocab_size} tokens>"

    # -- inside --
    def _check_id(self, token: int) -> int:
        try:
            index = operator.index(token)
        except TypeError as error:
            raise RequestError(f"a token id is an integer, not {quoted(token)}") from error
        if not 0 <= index < self.vocab_size:
            raise RequestError(f"token id {index} is outside the vocabulary of {self.vocab_size} tokens")
        return index

    def _copy(self, rust: RustTokenizer, added: Mapping[int, AddedToken]) -> RustTokenizer:
        """Create a second tokenizer that shares the model of the first."""
        other = RustTokenizer(rust.model)  # shared, not copied
        other.normalizer, other.pre_tokenizer = rust.normalizer, rust.pre_tokenizer
        other.post_processor = rust.post_processor
        other.add_tokens([added[i] for i in sorted(added)])
        if other.get_added_tokens_decoder().keys() != added.keys():
            other = RustTokenizer.from_str(rust.to_str())  # ids with gaps can only be loaded from a file
        return other

    def _sibling(self, rust: RustTokenizer, added: Mapping[int, AddedToken]) -> RustTokenizer:
        """Create a second tokenizer that treats special tokens as plain text."""
        with rust_call(self.source):
            other = self._copy(rust, added)
            other.encode_special_tokens = True
            other.add_tokens([AddedToken(self._anchor, normalized=False, special=False)])
        return other

    def _without_control(self, text: str) -> list[int]:
        """Encode a text that spells a special token, cutting inside each match until none is produced.

        Needed if the model itself matches such text, as unigram does with `<pad>` when it has no other piece for one of
        the characters. Text after a cut continues a word.
        """
        out: list[int] = []
        todo = [text]  # a stack
        rust = self._plain
        while todo:
            piece = todo.pop()
            with rust_call(self.source):
                encoding = rust.encode(piece, add_special_tokens=False)
            cuts = [
                start + 1
                for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
                if token in self._control and end - start > 1
            ]
            if cuts:
                bounds = [0, *sorted(cuts), len(piece)]
                todo += [piece[a:b] for a, b in pairwise(bounds)][::-1]
            else:
                out += [i for i in encoding.ids if i not in self._control]
                rust = self._inside_words
        return out

    @cached_property
    def _inside_words(self) -> RustTokenizer:
        """The plain-text tokenizer, without the space that it adds before a text."""
        space = (
            None if self._bpe is not None else _metaspace(_to_json(self._base_pre_tokenizer))
        )  # our BPE matches no such text
        if space is None:
            return self._plain
        with rust_call(self.source):
            other = self._copy(self._plain, self._plain.get_added_tokens_decoder())
            other.encode_special_tokens = True
            other.pre_tokenizer = pre_tokenizers.Metaspace(space["replacement"], "never", space.get("split", True))
        return other


class Stream:
    """Streaming decoder: never emits half a character, and its pieces join to the output of `decode`."""

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special: bool = False, continues: bool = False,
        keep: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids - keep if skip_special else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = tokenizer._pieces.rule.strip and not continues

    def push(self, token: int) -> str:
        """Return the text that this token completes; empty while a character spans several tokens."""
        return self._utf8.decode(self.take(token))

    def skips(self, token: int) -> bool:
        """Whether a token is left out of the text."""
        return token in self._skip

    def flush(self) -> str:
        """Finish the stream: returns U+FFFD for an incomplete character, else nothing."""
        return self._utf8.decode(b"", final=True)

    def take(self, token: int) -> bytes:
        """Return the bytes of the next token, without the space that encoding adds before the first word."""
        piece = self._tokenizer.token_bytes(token)
        if token in self._skip:
            return b""
        if not self._at_start or not piece:
            return piece
        if token in self._tokenizer.special_ids and self._tokenizer._pieces.rule.word_prefix is None:
            return piece  # <s>: the text begins after it
        self._at_start = False
        return piece.removeprefix(b" ")


# -- texts -----------------------------------------------------------------------------------------------------------
def _check_texts(texts: Iterable[str]) -> list[str]:
    if isinstance(texts, (str, bytes)):
        raise RequestError("expected texts, found one; encode takes a single text")
    batch = list(texts)
    for i, text in enumerate(batch):
        if not isinstance(text, str):
            raise RequestError(f"text {i}: expected str, found {type(text).__name__}")
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                surrogate = f"{ord(text[error.start]):#06x} at {error.start}"
                hint = "the text was decoded with errors='surrogateescape' or cut inside a UTF-16 pair"
                raise RequestError(f"text {i}: half of a surrogate pair, {surrogate}", hint=hint) from error
    return batch


def _cut(ids: list[int], limit: int, before: int, after: int) -> list[int]:
    if limit < before + after:
        raise RequestError(f"limit: expected room for {before + after} special tokens, found {limit}")
    return ids if len(ids) <= limit else [*ids[: limit - after], *ids[len(ids) - after :]]


# -- parts of a Rust tokenizer ---------------------------------------------------------------------------------------
def _to_json(part: Any) -> Any:
    """Convert a part to its tokenizer.json form via its pickle state; serialising the whole file takes a second."""
    return None if part is None else json.loads(part.__getstate__())


def _metaspace(part: Any) -> Mapping[str, Any] | None:
    """Find the Metaspace pre-tokenizer among the parts, if any."""
    match part:
        case {"type": "Sequence", "pretokenizers": list(parts)}:
            return next(filter(None, map(_metaspace, parts)), None)
        case {"type": "Metaspace", "replacement": str()}:
            return dict(part)
    return None


def _growth(normalizer: Any) -> float:
    """Bound how much a normalizer may lengthen a text: a tiny file could otherwise double it a hundred times."""
    match normalizer:
        case {"type": "Sequence", "normalizers": list(parts)}:
            return math.prod(map(_growth, parts))
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return max(1.0, len(new) / len(old))
        case {"type": "Replace", "content": str(new)}:
            return 1.0 + len(new)  # a pattern may match the empty string between any two characters
        case {"type": "Prepend", "prepend": str(text)} | {"type": "Append", "append": str(text)}:
            return 1.0 + len(text) // 64
    return 1.0


def _check_added(rust: RustTokenizer, added: Mapping[int, AddedToken], source: str) -> None:
    """Reject added tokens that normalise to nothing: the library would match them forever."""
    normalizer = rust.normalizer
    for i, token in added.items():
        text = token.content
        if token.normalized and normalizer is not None:
            with rust_call(f"{source}: added token {i}"):
                text = normalizer.normalize_str(text)
        if not text:
            raise FormatError(f"{source}: added token {i}: nothing is left of {quoted(token.content)}")


def _ends(processor: Any, source: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Extract the ids that a post-processor adds before and after a text."""
    match processor:
        case None | {"type": "ByteLevel"}:
            return (), ()
        case {"type": "Sequence", "processors": list(parts)}:
            before: tuple[int, ...] = ()
            after: tuple[int, ...] = ()
            for part in parts:
                first, last = _ends(part, source)
                before, after = first + before, after + last
            ends = before, after
        case {"type": "BertProcessing" | "RobertaProcessing", "sep": [_, int(sep)], "cls": [_, int(cls)]}:
            ends = (cls,), (sep,)
        case {"type": "TemplateProcessing", "single": list(single), "special_tokens": dict(tokens)}:
            sides: list[tuple[int, ...]] = [()]
            for item in single:
                match item:
                    case {"SpecialToken": {"id": str(name)}} if name in tokens:
                        sides[-1] += tuple(tokens[name]["ids"])
                    case {"Sequence": {"id": "A"}} if len(sides) == 1:
                        sides.append(())
                    case _:
                        raise FormatError(f"{source}: post_processor: {quoted(item)} in the template of one text")
            if len(sides) != 2:
                raise FormatError(f"{source}: post_processor: a template without the text")
            ends = sides[0], sides[1]
        case _:
            raise FormatError(f"{source}: post_processor {quoted(processor)} is not supported")
    if len(ends[0]) + len(ends[1]) > MAX_ENDS:
        raise FormatError(f"{source}: post_processor: expected at most {MAX_ENDS} special tokens around a text")
    return ends
