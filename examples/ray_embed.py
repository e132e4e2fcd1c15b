"""Embed the lines of files on a Ray cluster: a new one on this machine, or one that is there.

    python examples/ray_embed.py LICENSE -o vectors
    python examples/ray_embed.py texts/*.txt -o vectors --address HEAD:6379 --workers 64

Whoever reaches a cluster can run code on it: the one that is started here asks for a token, and its dashboard, if
there is one, listens on this machine only. Started again after a crash, the job goes on where it was.
"""

import argparse
from pathlib import Path

import rlx


def connect(address, workers, dashboard):
    """Connect to a cluster. A new one has a CPU per worker."""
    if address != "local":
        return rlx.ray.connect(address)  # RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or ~/.ray/auth_token
    return rlx.ray.connect(num_cpus=workers, include_dashboard=dashboard, dashboard_host="127.0.0.1")


def show(progress):
    print(f"{progress.done:4.0%}  {progress.rate:,.0f} lines per second, {progress.workers} workers")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="text, JSONL, CSV or Parquet files")
    parser.add_argument("-o", "--out", required=True, type=Path, help="folder of the results")
    parser.add_argument("--model", default="minilm-l6", help="an embedding model (default: %(default)s)")
    parser.add_argument("--address", default="local", help="of a cluster (default: a new one on this machine)")
    parser.add_argument("--workers", type=int, default=2, help="actors with one thread each (default: %(default)s)")
    parser.add_argument("--dashboard", action="store_true", help="of a new cluster, on 127.0.0.1:8265")
    args = parser.parse_args(argv)

    ray = connect(args.address, args.workers, args.dashboard)
    try:
        results = rlx.batch.embed(
            args.files, args.out, args.model, runner="ray", workers=args.workers, threads=1, on_progress=show
        )
    finally:
        ray.shutdown()
    vectors = results.vectors()
    print(f"{len(vectors)} vectors of {vectors.shape[1]} numbers in {args.out}")
    for error in results.errors():
        print(f"{error['file']}:{error['line']}: {error['error']}")
    return results


if __name__ == "__main__":
    main()
