"""A driver of a job, which tests kill: `driver.py VERB MODEL INPUT OUT WORKERS [RAY ADDRESS]`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import rlx.batch

VERBS = ("embed", "generate", "score")


def run_verb(verb: str, model: str | Path, source: str | Path, out: str | Path, **options: Any) -> rlx.batch.Results:
    """A job in shards of 4 lines; texts are sampled, so that they depend on seeds."""
    if verb == "generate":
        options |= {"max_tokens": 3, "sampling": {"temperature": 1.0}}
    call: Any = getattr(rlx.batch, verb)
    results: rlx.batch.Results = call(source, out, model, shard_records=4, **options)
    return results


if __name__ == "__main__":
    verb, model, source, out, workers, *address = sys.argv[1:]
    if address:
        rlx.ray.connect(address[0])
    run_verb(verb, model, source, out, workers=int(workers), threads=1, runner="ray" if address else "local")
