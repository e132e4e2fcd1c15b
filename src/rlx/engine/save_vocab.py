"""Writes byte-level BPE tokenizers as the `tokenizer.*` keys of a GGUF file."""

from __future__ import annotations

import json
from typing import Any

from rlx.errors import CapabilityError
from rlx.formats.pretokenize import PRE_TOKENIZERS
from rlx.formats.tokenizer import Tokenizer
from rlx.formats.tokenizer_models import CONTROL, NORMAL, USER_DEFINED

GPT2 = PRE_TOKENIZERS["gpt-2"].patterns[0]
# Texts that pre-tokenizers split differently: contractions, digits, spaces, other scripts, punctuation.
SAMPLES = (
    "It's 12345 o'clock; we'LL see!  Two spaces,\n\n new  lines\r\n\tand tabs   \n",
    "Größe naïve Ελλάδα Привет 東京は日本の首都です。 안녕 🙂🙂 1,234.56",
    "def f(x):\n    return x**2  # !!! ...\n\n\n\n__init__ <|x|> HTTPServer iPhone",
)


def write_vocab(writer: Any, tokenizer: Tokenizer) -> None:
    """Write the keys. Raises CapabilityError for a tokenizer that they cannot express."""
    description = json.loads(tokenizer.to_json())
    model = description["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback") or description.get("normalizer"):
        kind = "SentencePiece" if model.get("byte_fallback") else model.get("type")
        raise CapabilityError(f"save: a tokenizer of kind {kind} is not written as GGUF", hint="known: byte-level BPE")
    tokens = {i: token for token, i in model["vocab"].items()}
    kinds = dict.fromkeys(tokens, NORMAL)
    for added in description.get("added_tokens", ()):
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    size = max(tokens) + 1
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [tokens.get(i, f"[PAD{i}]") for i in range(size)],
        "tokenizer.ggml.token_type": [int(kinds.get(i, USER_DEFINED)) for i in range(size)],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": tokenizer.bos_id is not None and tokenizer.bos_id in tokenizer.prefix,
    }
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "unknown": tokenizer.unk_id, "padding": tokenizer.pad_id}
    metadata |= {f"tokenizer.ggml.{role}_token_id": i for role, i in ids.items() if i is not None}
    if tokenizer.chat_template is not None:
        metadata["tokenizer.chat_template"] = tokenizer.chat_template
    metadata["tokenizer.ggml.pre"] = _pre_tokenizer_name(tokenizer, metadata, description)
    for name, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        else:
            (writer.add_string if isinstance(value, str) else writer.add_uint32)(name, value)


def _pre_tokenizer_name(tokenizer: Tokenizer, metadata: dict[str, Any], description: Any) -> str:
    """llama.cpp's name of the pre-tokenizer: the one with the same patterns and the same ids of sample texts."""
    patterns = tuple(_patterns(description.get("pre_tokenizer")))
    wanted = [tokenizer.encode(text) for text in SAMPLES]
    tried: list[Any] = []
    for name, row in PRE_TOKENIZERS.items():
        if row in tried or row.raw or row.patterns != patterns:
            continue
        tried.append(row)
        other = Tokenizer.from_gguf({**metadata, "tokenizer.ggml.pre": name})
        if [other.encode(text) for text in SAMPLES] == wanted:
            return name
    raise CapabilityError("save: GGUF has no name for the pre-tokenizer of this model")


def _patterns(part: Any) -> list[str]:
    """The patterns of a pre-tokenizer, in order."""
    match part:
        case {"type": "Sequence", "pretokenizers": parts}:
            return [pattern for one in parts for pattern in _patterns(one)]
        case {"type": "Split", "pattern": {"Regex": pattern}}:
            return [pattern]
        case {"type": "Digits", "individual_digits": True}:
            return [r"\p{N}"]
        case {"type": "ByteLevel", "use_regex": True}:
            return [GPT2]
        case _:
            return []
