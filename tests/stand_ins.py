"""Small random models with tokenizers, in place of the models that pages of the documentation load by name."""

from __future__ import annotations

import json
from pathlib import Path

import small_bert
import tiny_llama

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_alphabet() -> list[str]:
    """The characters that stand for bytes in byte-level BPE (GPT-2): printable ones for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def write_chat(folder: Path) -> Path:
    """A Llama of two layers with a token per byte and a chat template."""
    vocab = SPECIAL + byte_alphabet()
    tiny_llama.write(
        folder, vocab_size=len(vocab), max_position_embeddings=1024, bos_token_id=0, eos_token_id=2, hidden_size=64
    )
    split = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0", "normalizer": None, "post_processor": None, "pre_tokenizer": split, "decoder": split,
        "added_tokens": [
            {"id": i, "content": word, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False}
            for i, word in enumerate(SPECIAL)
        ],
        "model": {"type": "BPE", "vocab": {word: i for i, word in enumerate(vocab)}, "merges": []},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>", "chat_template": TEMPLATE})
    )
    return folder


def write_encoder(folder: Path) -> Path:
    """A BERT of two layers."""
    small_bert.write(folder)
    return folder
