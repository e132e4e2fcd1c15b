"""Batch jobs: how they scale over processes, what Ray costs, memory, and a long run.

    python benchmarks/batch.py scale --json benchmarks/results/batch-16.json     # random weights of MiniLM's shape
    python benchmarks/batch.py ray --json benchmarks/results/batch-ray.json      # needs the extra ray
    python benchmarks/batch.py long TEXT... --lines 1000000 --folder DIR --json benchmarks/results/batch.json

`scale` runs n processes with one thread each, and one process with n threads, in shuffled order, beside a probe: the
FMA throughput of 1 to n processes. It also says where the weights are in memory (PSS). Then it asks `rlx batch --plan`
for a forecast, runs whole jobs of --lines lines with 1, 2, 4, 8 and 16 workers, compares their times with it, and their
files with those of one worker, byte by byte. More workers than cores are planned as a full machine that starts them in
turns. It needs no network. `ray` compares Ray's actors with local processes for batches of about a second. `long` cuts
lines out of texts (files or folders) with a fixed seed, embeds them with MiniLM, and records the driver's memory and a
digest of all results; killed, it goes on where it was, and with --kill-every it kills its own workers now and then.
"""

from __future__ import annotations

import argparse
import contextlib
import filecmp
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from harness import command, describe_machine, timestamp, write_json

import rlx
from rlx.batch.embed_task import Embed
from rlx.batch.inputs import Shard
from rlx.batch.job import Job, Progress
from rlx.batch.local import Local, LocalWorker
from rlx.batch.planning import Plan
from rlx.batch.runner import GivenUp, Runner, run_shards
from rlx.errors import BatchError

JOB_WORKERS = (1, 2, 4, 8, 16)
PROCESSES = (1, 2, 4, 8, 16, 32, 64, 128)
WORDS, DIM, FFN, LAYERS, HEADS, POSITIONS = 30522, 384, 1536, 6, 12, 512  # all-MiniLM-L6-v2
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


# -- a model and texts without network -------------------------------------------------------------------------------
def write_model(folder: Path) -> Path:
    """Random weights of MiniLM's shape, with a vocabulary of made-up words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from tokenizers.pre_tokenizers import BertPreTokenizer
    from tokenizers.processors import TemplateProcessing

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *(f"w{i}" for i in range(WORDS - len(SPECIAL)))])}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "model_type": "bert", "vocab_size": WORDS, "hidden_size": DIM, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "intermediate_size": FFN, "max_position_embeddings": POSITIONS,
        "type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    pooling = {"word_embedding_dimension": DIM, "pooling_mode": "mean"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate([("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")])
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    _write_safetensors(folder / "model.safetensors", _weights())
    return folder


def _weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def normal(*shape: int, mean: float = 0.0) -> np.ndarray:
        return (mean + rng.standard_normal(shape, dtype=np.float32) * shape[-1] ** -0.5).astype(np.float32)

    weights: dict[str, np.ndarray] = {}
    for name, rows in (("word", WORDS), ("position", POSITIONS), ("token_type", 2)):
        weights[f"embeddings.{name}_embeddings.weight"] = normal(rows, DIM)
    norms = ["embeddings.LayerNorm"]
    for i in range(LAYERS):
        layer = f"encoder.layer.{i}"
        shapes = {f"attention.self.{name}": (DIM, DIM) for name in ("query", "key", "value")}
        shapes |= {"attention.output.dense": (DIM, DIM), "intermediate.dense": (FFN, DIM), "output.dense": (DIM, FFN)}
        for name, shape in shapes.items():
            weights[f"{layer}.{name}.weight"], weights[f"{layer}.{name}.bias"] = normal(*shape), normal(shape[0])
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    for name in norms:
        weights[f"{name}.weight"], weights[f"{name}.bias"] = normal(DIM, mean=1.0), normal(DIM)
    return weights


def _write_safetensors(path: Path, weights: dict[str, np.ndarray]) -> None:
    header, offset = dict[str, Any](), 0
    for name, array in weights.items():
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in weights.values():
            file.write(array.tobytes())


def write_texts(path: Path, lines: int) -> Path:
    """Lines of 4 to 40 words, as sentences have."""
    rng = random.Random(0)
    with open(path, "w") as file:
        for _ in range(lines):
            file.write(" ".join(f"w{rng.randrange(WORDS - len(SPECIAL))}" for _ in range(rng.randint(4, 40))) + "\n")
    return path


# -- measuring -------------------------------------------------------------------------------------------------------
def steady_rate(job: Job, runner: Runner, fingerprint: str, seconds: float) -> dict[str, Any]:
    """Lines per second while all workers are busy, over shards that never end."""
    loaded = list[float]()
    finished = list[tuple[float, int, int, float]]()  # time, lines, tokens, seconds of the worker, once all are warm
    memory = dict[str, Any]()

    def shards() -> Iterator[Shard]:
        while True:
            yield from job.shards()

    began = time.perf_counter()
    run = run_shards(runner, job.task, shards(), fingerprint, lambda _: loaded.append(time.perf_counter()))
    for outcome in run:
        assert not isinstance(outcome, GivenUp)
        shard, result = outcome
        now = time.perf_counter()
        if len(loaded) < runner.workers:
            continue
        if not memory and isinstance(runner, Watched):
            memory = pss_of([worker.process.pid for worker in runner.started])
        if now - loaded[-1] < 1.0:  # the first calls of the last worker are slower
            continue
        finished.append((now, shard.records, result.tokens, result.seconds))
        if now - finished[0][0] > seconds:
            break
    run.close()
    begin, *counted = finished  # from one end of a shard to another, so that no part of a shard counts as a whole one
    span = counted[-1][0] - begin[0]
    return {
        "lines_per_second": sum(e[1] for e in counted) / span, "tokens_per_second": sum(e[2] for e in counted) / span,
        "shards": len(counted), "shard_seconds": statistics.mean(e[3] for e in counted),
        "start_seconds": loaded[-1] - began, **memory,
    }  # fmt: skip


class Watched(Local):
    """Local processes that are known."""

    def __init__(self, workers: int, threads: int) -> None:
        super().__init__(workers, threads)
        self.started: list[LocalWorker] = []

    def start(self, task: Any) -> LocalWorker:
        self.started.append(super().start(task))
        return self.started[-1]


def pss_of(pids: list[int]) -> dict[str, Any]:
    """Megabytes of all processes: RSS counts shared pages in each, PSS once in all. `mapped` are pages of files."""
    totals = dict.fromkeys(("Rss", "Pss", "Pss_File"), 0)
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in totals:
                totals[name] += int(rest.split()[0])
    megabytes = {name: round(kilobytes / 1024) for name, kilobytes in totals.items()}
    return {"rss_mb": megabytes["Rss"], "pss_mb": megabytes["Pss"], "mapped_pss_mb": megabytes["Pss_File"]}


def fma_rate(processes: int, seconds: float) -> float:
    """GFLOPS of so many processes with one thread each."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "import time, ceilings; probe = ceilings.fma_probe(1); print('ready', flush=True); sys.stdin.readline()\n"
        f"calls, begin = 0, time.perf_counter()\nwhile time.perf_counter() - begin < {seconds}:\n"
        "    probe.call(); calls += 1\nprint(calls * probe.work / (time.perf_counter() - begin) / 1e9)"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return sum(float(process.communicate()[0]) for process in started)


# -- scale -----------------------------------------------------------------------------------------------------------
def scale(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    task = Embed(str(write_model(folder / "model")), {})
    write_texts(folder / "texts.txt", args.lines)
    time.sleep(0.2)  # a model that was written just now gets no snapshot
    job = Job.of(task, [folder / "texts.txt"], shard_records=args.shard_lines)
    job, chosen, fingerprint = rlx.batch.prepare(job, "auto", None, "local")
    cores = args.cores or chosen.workers * chosen.threads
    counts = sorted({1, cores, *(n for n in args.processes if n < cores)})
    cases = [(n, 1) for n in counts] + [(1, cores)] * (cores > 1)
    rates: dict[tuple[int, int], list[dict[str, Any]]] = {case: [] for case in cases}
    probes: dict[int, list[float]] = {n: [] for n in counts}
    for turn in range(args.rounds):
        order: list[Any] = [*cases, *counts]
        random.Random(turn).shuffle(order)
        for case in order:
            if isinstance(case, int):
                probes[case].append(fma_rate(case, min(args.seconds, 3.0)))
            else:
                # shards of more threads are larger, so that all take as long
                job = Job.of(task, [folder / "texts.txt"], shard_records=args.shard_lines * case[1])
                rates[case].append(steady_rate(job, Watched(*case), fingerprint, args.seconds))
            what = f"FMA of {case} processes" if isinstance(case, int) else f"{case[0]} x {case[1]} threads"
            print(f"round {turn + 1} of {args.rounds}: {what}", file=sys.stderr)
    median = {case: statistics.median(r["lines_per_second"] for r in runs) for case, runs in rates.items()}
    fma = {n: statistics.median(values) for n, values in probes.items()}
    rows = []
    for workers, threads in cases:
        last = rates[workers, threads][-1]
        row: dict[str, Any] = {
            "workers": workers, "threads": threads, "lines_per_second": round(median[workers, threads], 1),
            "scaling": round(median[workers, threads] / median[1, 1], 3),
            **{name: last[name] for name in ("start_seconds", "rss_mb", "pss_mb", "mapped_pss_mb") if name in last},
        }  # fmt: skip
        if threads == 1:
            row |= {"fma_gflops": round(fma[workers], 1), "fma_scaling": round(fma[workers] / fma[1], 3)}
            row |= {"of_fma_scaling": round(row["scaling"] / row["fma_scaling"], 3)}
        rows.append(row)
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    against_threads = round(median[cores, 1] / median[1, cores], 3) if cores > 1 else None
    print(f"{cores} processes x 1 thread against 1 process x {cores} threads: {against_threads}")
    return {
        "cores": cores, "rows": rows, "processes_against_threads": against_threads,
        "planned": against_plan(args, task, folder, cores), "rounds": _plain(rates, probes),
    }  # fmt: skip


def against_plan(args: argparse.Namespace, task: Embed, folder: Path, cores: int) -> dict[str, Any]:
    """The forecast of `rlx batch --plan` beside whole jobs, whose files must be those of one worker."""
    texts, options = folder / "texts.txt", {"threads": 1, "shard_records": args.shard_lines}
    print(f"plan: {args.plan_seconds:g} seconds", file=sys.stderr)
    plan = rlx.batch.plan(task, texts, workers=cores, seconds=args.plan_seconds, **options)
    seconds: dict[int, list[float]] = {workers: [] for workers in args.job_workers}
    for turn in range(args.job_rounds or args.rounds):
        for workers in args.job_workers:
            out = folder / f"out-{turn}-{workers}"
            begin = time.perf_counter()
            rlx.batch.run(task, texts, out, workers=workers, **options)
            seconds[workers].append(time.perf_counter() - begin)
            if not same_files(folder / f"out-0-{args.job_workers[0]}", out):
                raise SystemExit(f"{workers} workers have other bytes than {args.job_workers[0]}")
            what = f"a job with {workers} workers: {seconds[workers][-1]:.1f} s"
            print(f"job round {turn + 1}: {what}, same bytes", file=sys.stderr)
            if out != folder / f"out-0-{args.job_workers[0]}":
                shutil.rmtree(out)
    rows = [plan_row(plan, workers, seconds[workers], cores) for workers in args.job_workers]
    print("| workers | planned | measured | measured / planned | lines/s |\n| --- | --- | --- | --- | --- |")
    for row in rows:
        times = f"{row['planned_seconds']} s | {row['measured_seconds']} s | {row['measured_over_planned']:.2f}"
        print(f"| {row['workers']} | {times} | {row['lines_per_second']:,.0f} |")
    return {
        "lines": plan.records,
        "tokens": plan.tokens,
        "is_exact": plan.is_exact,
        "byte_identical": True,
        "rows": rows,
    }


def plan_row(plan: Plan, workers: int, seconds: list[float], cores: int) -> dict[str, Any]:
    """Planned and measured time; the workers of this machine beyond its cores add nothing but their start."""
    estimate, measured = plan.estimate(min(workers, cores)), statistics.median(seconds)
    planned = estimate.seconds + plan.start_seconds * max(0.0, workers / cores - 1)
    return {
        "workers": workers, "planned_seconds": round(planned, 1), "measured_seconds": round(measured, 1),
        "measured_over_planned": round(measured / planned, 3), "limit": estimate.limit,
        "lines_per_second": round(plan.records / measured, 1),
    }  # fmt: skip


def same_files(one: Path, other: Path) -> bool:
    """Whether two output folders have the same files, byte by byte; hidden ones are no results."""
    names = [sorted(path.name for path in folder.iterdir() if path.name[0] != ".") for folder in (one, other)]
    return names[0] == names[1] and filecmp.cmpfiles(one, other, names[0], shallow=False)[0] == names[0]


def _plain(rates: dict[tuple[int, int], list[dict[str, Any]]], probes: dict[int, list[float]]) -> dict[str, Any]:
    named = {f"{workers}x{threads}": runs for (workers, threads), runs in rates.items()}
    return {"jobs": named, "fma_gflops": {str(n): values for n, values in probes.items()}}


# -- Ray -------------------------------------------------------------------------------------------------------------
def on_ray(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Ray's actors against local processes, in turns, with shards of about a second."""
    from rlx.batch.on_ray import OnRay

    task = Embed(str(write_model(folder / "model")), {})
    write_texts(folder / "texts.txt", args.lines)
    time.sleep(0.2)
    job = Job.of(task, [folder / "texts.txt"], shard_records=args.shard_lines)
    job, chosen, fingerprint = rlx.batch.prepare(job, "auto", None, "local")
    workers = args.cores or chosen.workers * chosen.threads
    begin = time.perf_counter()
    rlx.ray.connect("local", num_cpus=workers)
    connected = time.perf_counter() - begin
    runs: dict[str, list[dict[str, Any]]] = {"local": [], "ray": []}
    for turn in range(args.rounds):
        for name in ("local", "ray") if turn % 2 else ("ray", "local"):
            runner: Runner = Local(workers) if name == "local" else OnRay(workers)
            runs[name].append(steady_rate(job, runner, fingerprint, args.seconds))
            print(f"round {turn + 1}: {name} {runs[name][-1]['lines_per_second']:.1f} lines/s", file=sys.stderr)
    rates = {name: statistics.median(r["lines_per_second"] for r in listed) for name, listed in runs.items()}
    turns = zip(runs["local"], runs["ray"], strict=True)
    pairs = [local["lines_per_second"] / ray["lines_per_second"] - 1 for local, ray in turns]
    overhead = statistics.median(pairs)
    print(f"local {rates['local']:.1f}, ray {rates['ray']:.1f} lines/s: overhead {overhead:.1%}")
    print(f"ray starts in {connected:.1f} s")
    return {
        "workers": workers, "lines_per_second": rates, "overhead": round(overhead, 4), "pairs": pairs,
        "ray_start_seconds": connected, "rounds": runs,
    }  # fmt: skip


# -- a long run ------------------------------------------------------------------------------------------------------
def long_run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Embed lines cut from texts, and watch the driver's memory."""
    folder = args.folder or folder
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / f"lines-{args.lines}.txt"
    if not source.exists():
        cut_lines(args.texts, args.lines, args.words, source)
    memory = list[tuple[float, int]]()
    done = threading.Event()

    kills, rng = 0, random.Random()

    def watch() -> None:
        nonlocal kills
        begin = next_kill = time.monotonic()
        while not done.wait(2.0):
            memory.append((time.monotonic() - begin, rss_mb()))
            if args.kill_every and time.monotonic() > next_kill:
                next_kill = time.monotonic() + args.kill_every * rng.uniform(0.5, 1.5)
                kills += kill_a_worker(rng)

    last, printed = list[Progress](), 0.0

    def on_progress(progress: Progress) -> None:
        nonlocal printed
        last[:] = [progress]
        if progress.seconds - printed > 30:
            printed = progress.seconds
            left = f"{progress.seconds_left or 0:.0f} s left, {rss_mb()} MB"
            print(f"{progress.done:.1%} {progress.rate:.1f} lines/s, {left}", file=sys.stderr)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    begin = time.monotonic()
    while True:
        try:
            results = rlx.batch.embed(source, folder / "out", args.model, workers=args.workers, on_progress=on_progress)
            break
        except BatchError as error:
            if not kills or not str(error).endswith("all others are finished"):
                raise
            print(f"{error}: once more", file=sys.stderr)  # it was unlucky: its workers were killed three times
    seconds = time.monotonic() - begin
    done.set()
    results.verify()
    quarters = [memory[len(memory) * i // 4][1] for i in range(1, 4)] if len(memory) >= 4 else []
    print(
        f"{results.counts} in {seconds:.0f} s; driver {quarters} MB, most {max((m for _, m in memory), default=0)} MB"
    )
    return {
        "lines": args.lines, "words": args.words, "model": args.model, "counts": results.counts, "seconds": seconds,
        "digest": digest(results), "killed_workers": kills,
        "resumed_shards": last[0].resumed if last else results.counts["shards"],  # all: it was finished before
        "lines_per_second": last[0].rate if last else None,
        "driver_mb_at_quarters": quarters, "driver_mb_most": max((m for _, m in memory), default=0),
        "driver_mb": [m for _, m in memory[:: max(1, len(memory) // 60)]],
    }  # fmt: skip


def digest(results: rlx.batch.Results) -> str:
    """Of the digests of all files: equal for runs with the same results, whatever was killed meanwhile."""
    lines = "".join(f"{shard['file']} {shard['digest']}\n" for shard in results.manifest["shards"])
    return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()


def kill_a_worker(rng: random.Random) -> int:
    """Kill one of the processes that this one has started; returns how many were killed."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    if not children:
        return 0
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(rng.choice(children)), signal.SIGKILL)
        return 1
    return 0


def cut_lines(texts: list[Path], lines: int, lengths: list[int], target: Path) -> None:
    """Lines of some consecutive words, from random places with a fixed seed."""
    files = [file for path in texts for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    words = [word for path in files for word in path.read_text(errors="replace").split()]
    shortest, longest = lengths
    if len(words) <= longest:
        raise SystemExit(
            f"long: the texts have {len(words)} words, lines up to {longest}: name files or folders of texts"
        )
    rng = random.Random(0)
    with open(target.with_suffix(".tmp"), "w") as file:
        for _ in range(lines):
            begin = rng.randrange(len(words) - longest)
            file.write(" ".join(words[begin : begin + rng.randint(shortest, longest)]) + "\n")
    os.replace(target.with_suffix(".tmp"), target)


def rss_mb() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) // 1024
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", choices=("scale", "ray", "long"))
    parser.add_argument("texts", nargs="*", type=Path, help="of long: files or folders that lines are cut from")
    parser.add_argument("--rounds", type=int, default=3, help="of scale and ray (3)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of scale and ray: that a case is measured (8)")
    parser.add_argument("--cores", type=int, help="of scale and ray: processes at most (all usable cores)")
    parser.add_argument("--shard-lines", type=int, help="(128 for scale: a third of a second; 512 for ray)")
    parser.add_argument("--lines", type=int, help="of the input (20,000; long: 50,000)")
    parser.add_argument(
        "--processes", type=int, nargs="+", default=PROCESSES, metavar="N",
        help="of scale: how many are measured with a thread each, besides one per core (1 2 4 8 16 32 64 128)",
    )  # fmt: skip
    parser.add_argument(
        "--job-workers", type=int, nargs="+", default=JOB_WORKERS, metavar="N",
        help="of scale: whole jobs with so many workers are compared with the plan (1 2 4 8 16)",
    )  # fmt: skip
    parser.add_argument("--job-rounds", type=int, help="of scale: rounds of whole jobs (as many as --rounds)")
    parser.add_argument("--plan-seconds", type=float, default=30.0, help="of scale: that the plan measures (30)")
    parser.add_argument("--words", type=int, nargs=2, default=[3, 12], metavar="N", help="of long: per line (3 12)")
    parser.add_argument("--kill-every", type=float, metavar="S", help="of long: kill a worker about every S seconds")
    parser.add_argument("--model", default="minilm-l6", help="of long")
    parser.add_argument("--workers", default="auto", help="of long")
    parser.add_argument("--folder", type=Path, help="of long: keeps lines and results, so that it can be resumed")
    parser.add_argument("--json", type=Path, metavar="PATH")
    args = parser.parse_args()
    args.workers = int(args.workers) if args.workers.isdigit() else args.workers
    args.lines = args.lines or (50_000 if args.work == "long" else 20_000)
    args.shard_lines = args.shard_lines or {"scale": 128, "ray": 512}.get(args.work)
    about = {"machine": describe_machine(), "date": timestamp(), "command": command()}
    with tempfile.TemporaryDirectory(prefix="rlx-batch-") as folder:
        result = {"scale": scale, "ray": on_ray, "long": long_run}[args.work](args, Path(folder))
    if args.json:
        write_json(args.json, {**about, **result})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
