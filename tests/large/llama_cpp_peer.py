"""What llama-cpp-python says: run by an interpreter that has it, with a request on stdin, the answer on stdout.

Request: {"model": path, "prompts": [text, ...], "tokens": n}. Answer: for each prompt its tokens, the n tokens that
follow it and the two largest logits of each step. Or {"model": path, "text": [token, ...], "file": path}: the logits
after each of the tokens go to the file, as NumPy writes arrays. Keys and values are cached in f32.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import llama_cpp
import numpy as np


def after(llm: llama_cpp.Llama, tokens: list[int]) -> np.ndarray:
    """Logits after some more tokens; they lie in memory that the next call uses again."""
    llm.eval(tokens)
    return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llm.ctx, -1), (llm.n_vocab(),))


def greedy(llm: llama_cpp.Llama, prompt: list[int], count: int) -> dict[str, Any]:
    llm.reset()
    fed, generated, tops = prompt, [], []
    for _ in range(count):
        logits = after(llm, fed)
        second, first = np.argsort(logits, kind="stable")[-2:].tolist()
        generated.append(first)
        tops.append([float(logits[first]), float(logits[second])])
        fed = [first]
    return {"prompt": prompt, "tokens": generated, "tops": tops}


def main() -> None:
    request = json.load(sys.stdin)
    # One thread: several wait for each other by spinning, which takes for ever where others use the cores too.
    llm = llama_cpp.Llama(
        request["model"], n_ctx=256, n_threads=1, type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32,
        verbose=False,
    )  # fmt: skip
    if "text" in request:
        np.save(request["file"], np.stack([after(llm, [token]).copy() for token in request["text"]]))
        return
    prompts = [llm.tokenize(text.encode(), add_bos=True, special=False) for text in request["prompts"]]
    answers = [greedy(llm, prompt, request["tokens"]) for prompt in prompts]
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
