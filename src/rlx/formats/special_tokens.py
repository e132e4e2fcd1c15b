"""Roles of special tokens: which ids begin and end a text, and which stop generation.

Files name some of them (`tokenizer.ggml.eos_token_id`, `tokenizer_config.json`); the rest are recognised by name.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace

from rlx.fast_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Token id per role; None if the model has no such token."""

    bos: int | None = None  # begins a text
    eos: int | None = None  # ends a text
    eot: int | None = None  # ends a chat turn
    unk: int | None = None
    pad: int | None = None
    sep: int | None = None
    cls: int | None = None
    mask: int | None = None

    def items(self) -> Iterable[tuple[str, int | None]]:
        return ((f.name, getattr(self, f.name)) for f in fields(self))

    def fill_missing(self, ids: Mapping[str, int]) -> SpecialIds:
        """Fill missing roles by name; `ids` maps the names of special tokens to ids."""
        by_name = {
            role: next((ids[name] for name in NAMES[role] if name in ids), None)
            for role, known in self.items()
            if known is None
        }
        return replace(self, **by_name)


# Candidates per role, in the order they are tried.
NAMES: dict[str, tuple[str, ...]] = {
    "bos": ("<s>", "<|begin_of_text|>", "<bos>", "<|startoftext|>", "<｜begin▁of▁sentence｜>", "<BOS_TOKEN>"),
    "eos": (
        "</s>", "<|end_of_text|>", "<eos>", "<|endoftext|>", "<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>",
        "<|im_end|>",
    ),
    "eot": (
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|eot|>", "<EOT>", "_<EOT>", "[EOT]",
        "<end_of_utterance>", "<|END_OF_TURN_TOKEN|>",
    ),
    "unk": ("<unk>", "[UNK]", "<|unk|>"),
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>"),
    "sep": ("[SEP]",),
    "cls": ("[CLS]",),
    "mask": ("[MASK]", "<mask>"),
}  # fmt: skip

# Tokens that stop generation whatever the file says: llama.cpp's list, including the end-of-file and end-of-repository
# tokens of code models.
STOP_NAMES = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<reponame>",
    "<|file_sep|>",
})  # fmt: skip


def is_marker(name: str) -> bool:
    """Whether a name can only be a special token; `</s>` can be text, an HTML tag as in Gemma and Qwen."""
    return "|" in name or "｜" in name or "_of_" in name


def stop_ids(special: SpecialIds, ids: Mapping[str, int]) -> frozenset[int]:
    """The ids that stop generation: eos, eot, and special tokens (`ids`) listed in `STOP_NAMES`."""
    names = {name for name in STOP_NAMES if name in ids}
    if "<|end|>" in names and names & {"<|call|>", "<|calls|>"} and names & {"<|return|>", "<|flush|>"}:
        names.remove("<|end|>")  # harmony: it ends a message, not the turn
    if "<|tool_response>" in names:
        names.discard("</s>")  # Gemma 4: an HTML tag
    known = {i for i in (special.eos, special.eot) if i is not None}
    if "<|end|>" in ids and "<|end|>" not in names and special.eos != ids["<|end|>"]:
        known.discard(ids["<|end|>"])
    return frozenset(known | {ids[name] for name in names})


_LONGEST_PART = 64  # characters of a partial special token at either end of a text


class SpecialTexts:
    """The texts of special tokens, with queries for texts that could become part of one."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._forwards = sorted(texts)
        self._backwards = sorted(text[::-1] for text in self._forwards)
        self._all = "\0".join(self._forwards)
        self.first_chars = frozenset(text[0] for text in self._forwards)
        self.last_chars = frozenset(text[-1] for text in self._forwards)

    def partial_at_end(self, text: str) -> int:
        """Number of characters at the end of a text that begin a special token, which later text might complete."""
        return _overlap(self._forwards, text[-_LONGEST_PART:])

    def partial_at_start(self, text: str) -> int:
        """Number of characters at the start of a text that end a special token, which earlier text might begin."""
        return _overlap(self._backwards, text[:_LONGEST_PART][::-1])

    def has_substring(self, text: str) -> bool:
        """Whether the entire text is a substring of a special token."""
        return text in self._all


def _overlap(texts: list[str], end: str) -> int:
    """Length of the longest non-blank suffix of `end` that is a proper prefix of one of the sorted texts."""
    for start in range(len(end)):
        part = end[start:]
        at = bisect_right(texts, part)  # the first text that could extend it
        if part.strip() and at < len(texts) and texts[at].startswith(part):
            return len(part)
    return 0
