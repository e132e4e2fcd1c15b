"""Forks under load: threads use a decoder and an encoder in every way, while the main thread forks.

Run by hand, from the root of the repository: `python tests/engine/fork_load.py --forks 200`. Each child must give the
answers of its parent; one that hangs says where, and the run fails. `tests/engine/test_forks.py` has a short run.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import small_bert
import tiny_llama
from forked import in_child

from rlx.engine.load import load

TOKENS, OTHERS = [3, 14, 15, 9, 2], [[5, 6, 7], [1], [8, 9]]
Jobs = dict[str, Callable[[], Any]]


def jobs(decoder: Any, encoder: Any) -> Jobs:
    """Calls that give the same each time."""

    def stream() -> str:
        with decoder.stream(TOKENS, max_tokens=12) as pieces:
            return "".join(pieces)

    def left_stream() -> None:
        next(decoder.stream(TOKENS, max_tokens=40), None)

    return {
        "generate": lambda: decoder.generate(TOKENS, max_tokens=8).tokens,
        "batch": lambda: [c.tokens for c in decoder.generate(OTHERS, max_tokens=8)],
        "stream": stream,
        "left stream": left_stream,
        "run": lambda: decoder.run(TOKENS)["logits"].tobytes(),
        "capture": lambda: decoder.run(TOKENS, capture=["layers.0"])["layers.0"].tobytes(),
        "apply": lambda: decoder.apply({}, TOKENS).tobytes(),
        "memory": lambda: decoder.memory().total > 0,
        "embed": lambda: encoder.embed(["bal bam", "dal"]).tobytes(),
    }


def run(folder: Path, forks: int, threads: int, limit: float) -> list[str]:
    """What went wrong, for each fork that did."""
    tiny_llama.write(folder / "decoder")
    small_bert.write(folder / "encoder", files=small_bert.sentence_transformers("cls"))
    todo = jobs(*(load(folder / kind, threads=2) for kind in ("decoder", "encoder")))
    wanted = {name: job() for name, job in todo.items()}
    over, troubles = threading.Event(), list[str]()

    def work(offset: int) -> None:
        for name in itertools.islice(itertools.cycle(todo), offset, None):
            if over.is_set():
                return
            if todo[name]() != wanted[name]:
                troubles.append(f"thread: {name} differs")

    def child() -> bool:
        # Before the limit of the parent, which kills it.
        faulthandler.dump_traceback_later(limit * 0.9, exit=False)
        wrong = [name for name, job in todo.items() if job() != wanted[name]]
        print(*(f"child: {name} differs" for name in wrong), sep="\n", end="", flush=True)
        return not wrong

    busy = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(threads)]
    for thread in busy:
        thread.start()
    try:
        for number in range(forks):
            ended = in_child(child, limit)
            if ended != 0:
                troubles.append(f"fork {number}: {ended}")
            time.sleep(0.001 * (number % 7))  # at other places of the threads' work
    finally:
        over.set()
        for thread in busy:
            thread.join()
    return troubles


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forks", type=int, default=200)
    parser.add_argument("--threads", type=int, default=6)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which a child counts as hung")
    arguments = parser.parse_args()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        troubles = run(Path(folder), arguments.forks, arguments.threads, arguments.limit)
    print(*troubles, f"{arguments.forks} forks, {len(troubles)} troubles, {time.monotonic() - begin:.0f} s", sep="\n")
    return 1 if troubles else 0


if __name__ == "__main__":
    sys.exit(main())
