"""A driver of a job, which tests kill: `driver.py VERB MODEL INPUT OUT WORKERS [RAY ADDRESS]`."""

from __future__ import annotations

import sys

import rlx.batch

if __name__ == "__main__":
    verb, model, source, out, workers, *address = sys.argv[1:]
    if address:
        rlx.ray.connect(address[0])
    run = rlx.batch.embed if verb == "embed" else rlx.batch.score
    runner = "ray" if address else "local"
    run(source, out, model, workers=int(workers), threads=1, shard_records=4, runner=runner)  # type: ignore[operator]
