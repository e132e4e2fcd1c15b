"""What `sixteen_bit.py` asks of a library: write tokens, read a prompt. Runs in the library's own process."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from worker import Case, Prepared

PROMPT = list(range(1000, 1032))


class Engine(Protocol):
    def read(self, tokens: list[int]) -> int:
        """The token after a prompt of which nothing is known."""

    def write(self, tokens: list[int], count: int) -> float:
        """Seconds for `count` tokens after the first one that follows a prompt, each the likeliest."""


class Torch:
    """Eager mode, arithmetic in the type of the weights, as `transformers` runs it by default."""

    def __init__(self, path: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()

    def read(self, tokens: list[int]) -> int:
        return self._next(tokens, None)[0]

    def write(self, tokens: list[int], count: int) -> float:
        token, cache = self._next(tokens, None)
        begin = time.perf_counter()
        for _ in range(count):
            token, cache = self._next([token], cache)
        return time.perf_counter() - begin

    def _next(self, tokens: list[int], cache: Any) -> tuple[int, Any]:
        with self.torch.inference_mode():
            done = self.model(self.torch.tensor([tokens]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        return int(done.logits[0, -1].argmax()), done.past_key_values


_loaded: dict[str, Engine] = {}  # the one that cases share


def rlx(case: Case, threads: int) -> Prepared:
    from llm_engines import Rlx

    return prepare(Rlx, case, threads)


def torch(case: Case, threads: int) -> Prepared:
    return prepare(Torch, case, threads)


def prepare(kind: Any, case: Case, threads: int) -> Prepared:
    from worker import Prepared

    if case.subject not in _loaded:
        _loaded[case.subject] = kind(case.subject, threads)
    engine = _loaded[case.subject]
    ((what, count),) = case.dims.items()

    def read() -> float:
        tokens = random.choices(range(1000, 20_000), k=count)  # other ones each time: a known prompt need not be read
        begin = time.perf_counter()
        engine.read(tokens)
        return time.perf_counter() - begin

    def write() -> float:
        return engine.write(PROMPT, count) / count

    seconds = {"read": read, "write": write}[what]
    seconds()
    return Prepared(seconds, seconds=seconds, note=resident())


def resident() -> str:
    """Memory of this process after its first tokens."""
    with open("/proc/self/status") as status:
        sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in status)
                 if name in ("VmRSS", "VmHWM")}  # fmt: skip
    return f"{sizes['VmRSS'] / 1e9:.2f} GB resident, {sizes['VmHWM'] / 1e9:.2f} GB at most"
