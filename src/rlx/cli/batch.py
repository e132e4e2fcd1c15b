"""`rlx batch embed|generate|score IN... -o OUT`: a job over files, which can be killed and resumed at any time."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx import hub
from rlx.cli import console
from rlx.cli.console import UsageError
from rlx.cli.loading import DEVICE_HELP
from rlx.runtime.kv_spec import CACHE_HELP, CACHES

if TYPE_CHECKING:
    from rlx.batch import Progress, Results
    from rlx.batch.tasks import Task

VERBS = ("embed", "generate", "score")
NOTE_S = 10.0  # between lines of progress where stderr is no terminal
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
OPTIONS = {  # of one verb only
    "embed": ("format", "index", "index_dtype", "prompt", "no_truncate"),
    "generate": ("chat", "system", "max_tokens", "stop", *SAMPLING),
    "score": ("per_token",),
}


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("batch", help="embed, generate or score the lines of files, with many workers")
    command.add_argument("verb", choices=VERBS, help="vectors; texts after prompts; log-probabilities of texts")
    command.add_argument("inputs", nargs="+", metavar="IN", help="text, JSONL, CSV, Parquet, .gz of them, or folders")
    command.add_argument("-o", "--out", type=Path, metavar="OUT", help="folder of the results")
    command.add_argument("-m", "--model", metavar="MODEL", help="catalogue name, file, folder or org/name[:quant]")
    running = command.add_argument_group("running")
    running.add_argument("--workers", default="auto", metavar="N", help="processes (auto: by model and machine)")
    running.add_argument("--threads", type=int, metavar="N", help="threads per process")
    running.add_argument(
        "--ray", nargs="?", const="auto", metavar="ADDRESS",
        help="run on a Ray cluster: the one of this machine (auto), an address, or local: a new one here",
    )  # fmt: skip
    running.add_argument(
        "--worker-timeout", type=float, metavar="SECONDS",
        help="replace a worker that finishes no batch of work for so long (600)",
    )  # fmt: skip
    running.add_argument("--plan", action="store_true", help="measure, and tell the time for 1 to 1,000 workers")
    running.add_argument("--plan-seconds", type=float, default=30.0, metavar="S", help="how long to measure (30)")
    reading = command.add_argument_group("reading and writing")
    reading.add_argument("--input-format", choices=("text", "jsonl", "csv", "tsv", "parquet"), help="not by suffix")
    reading.add_argument("--field", metavar="NAME", help="member or column with the text (text; generate: prompt)")
    reading.add_argument("--shard-lines", type=int, metavar="N", help="records per shard")
    reading.add_argument("--format", choices=("npy", "jsonl"), help="embed: NumPy files, or lines of JSON (npy)")
    reading.add_argument("--index", type=Path, metavar="INDEX", help="embed: also an index for rlx search")
    reading.add_argument("--index-dtype", choices=("f32", "f16", "int8"), help="of its vectors (f32)")
    model = command.add_argument_group("model")
    model.add_argument("--device", default="cpu", help=DEVICE_HELP)
    model.add_argument("--precision", choices=("auto", "f32", "int8"), default="auto")
    model.add_argument("--context", type=int, metavar="N", help="maximum tokens, prompt and answer together")
    model.add_argument("--cache", choices=CACHES, default="auto", help=CACHE_HELP)
    embedding = command.add_argument_group("embed")
    embedding.add_argument("--prompt", metavar="NAME", help="prepend this prompt of the model to each text")
    embedding.add_argument("--no-truncate", action="store_true", help="texts that are too long are errors")
    generating = command.add_argument_group("generate")
    generating.add_argument("--chat", action="store_true", help="lines are messages of a user")
    generating.add_argument("--system", metavar="TEXT", help="system message, with --chat")
    generating.add_argument("--max-tokens", type=int, metavar="N", help="tokens per answer (256)")
    generating.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text")
    for name in SAMPLING:
        kind = int if name in ("top_k", "seed") else float
        generating.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help="as in rlx run")
    scoring = command.add_argument_group("score")
    scoring.add_argument("--per-token", action="store_true", help="also ids and log-probabilities of tokens")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from rlx import batch

    _check_options(arguments)
    task = _task(arguments)
    options: dict[str, Any] = {
        "workers": _workers(arguments.workers), "threads": arguments.threads, "input_format": arguments.input_format,
        "shard_records": arguments.shard_lines,
    }  # fmt: skip
    if arguments.plan:
        if arguments.ray is not None:
            raise UsageError("batch: --plan measures this machine, not a Ray cluster", hint="--plan without --ray")
        if not 0 < arguments.plan_seconds < float("inf"):
            raise UsageError(f"batch: --plan-seconds is {arguments.plan_seconds}, expected a number above 0")
        hub.resolve(task.model)  # downloads it, and shows its own progress
        show_plan(batch.plan(task, arguments.inputs, seconds=arguments.plan_seconds, **options))
        return 0
    if arguments.out is None:
        raise UsageError("batch: where do the results go?", hint="-o FOLDER")
    options |= {
        "runner": "local" if arguments.ray is None else "ray", "index": arguments.index,
        "index_dtype": arguments.index_dtype or "f32",
    }  # fmt: skip
    if arguments.worker_timeout is not None:
        options["worker_timeout"] = arguments.worker_timeout
    batch.check(task, arguments.inputs, arguments.out, **options)  # before what takes long
    _load_and_connect(task.model, arguments.ray)
    with _shown() as on_progress:
        results = batch.run(task, arguments.inputs, arguments.out, on_progress=on_progress, **options)
    _report(results)
    if arguments.index is not None:
        console.note(f"index: {arguments.index}; rlx search {arguments.index} 'a query'")
    return 0


def _load_and_connect(model: str, address: str | None) -> None:
    """Download the model, which shows its own progress, and connect to a Ray cluster if there is an address."""
    if address is None:
        hub.resolve(model)
        return
    from rlx import ray

    ray.check_address(address)
    hub.resolve(model)
    ray.connect(address)


def _check_options(arguments: argparse.Namespace) -> None:
    """Refuse options of other verbs, which would change nothing."""
    for verb, names in OPTIONS.items():
        for name in names:
            value = getattr(arguments, name)
            is_given = value is not None and value is not False and value != []  # 0 is a temperature
            if verb != arguments.verb and is_given:
                raise UsageError(f"batch {arguments.verb}: --{name.replace('_', '-')} is an option of batch {verb}")
    if arguments.index_dtype is not None and arguments.index is None:
        raise UsageError("batch embed: --index-dtype is for an index", hint="--index FOLDER")


def _task(arguments: argparse.Namespace) -> Task:
    from rlx.batch.embed_task import Embed
    from rlx.batch.generate_task import AUTO, Generate
    from rlx.batch.score_task import Score

    verb, field = arguments.verb, arguments.field
    options = {"device": arguments.device, "precision": arguments.precision, "cache": arguments.cache}
    load = {name: value for name, value in options.items() if value not in ("cpu", "auto")}
    if arguments.context is not None:
        load["context"] = arguments.context
    sampling = {name: getattr(arguments, name) for name in SAMPLING if getattr(arguments, name) is not None}
    model = arguments.model or ("minilm-l6" if verb == "embed" else hub.DEFAULT)
    match verb:
        case "embed":
            return Embed(model, load, field, arguments.prompt, not arguments.no_truncate, arguments.format or "npy")
        case "generate":
            most = AUTO if arguments.max_tokens is None else arguments.max_tokens
            chat = arguments.chat, arguments.system, most, tuple(arguments.stop), sampling
            return Generate(model, load, field, *chat)
    return Score(model, load, field, arguments.per_token)


def _workers(text: str) -> int | str:
    if text == "auto":
        return text
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= 100_000):
        raise UsageError(f"batch: --workers is {text!r}, expected a number from 1, or auto")
    return int(text)


# -- progress --------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def _shown() -> Iterator[Callable[[Progress], None]]:
    """A bar on a terminal, else a line now and then."""
    if not console.is_rich(sys.stderr):
        last = time.monotonic()

        def tell(progress: Progress) -> None:
            nonlocal last
            if time.monotonic() - last >= NOTE_S:
                last = time.monotonic()
                console.note(f"batch: {progress.done:.1%}, {_rates(progress)}")

        yield tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("batch"), BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task("loading the model", total=1.0)
        yield lambda progress: bars.update(bar, completed=progress.done, description=_rates(progress))


def _rates(progress: Progress) -> str:
    tokens = progress.tokens / progress.seconds if progress.seconds else 0.0
    parts = [f"{progress.records:,} lines", f"{progress.rate:,.0f} lines/s", f"{tokens:,.0f} tokens/s"]
    if progress.errors:
        parts.append(f"{progress.errors:,} errors")
    if progress.seconds_left is not None:
        parts.append(f"{show_time(progress.seconds_left)} left")
    return console.join([*parts, f"{progress.workers} workers"])


def _report(results: Results) -> None:
    counts = results.counts
    console.note(
        f"{counts['rows']:,} results of {counts['records']:,} lines, {counts['tokens']:,} tokens, in {results.folder}"
    )
    if counts["errors"]:
        console.note(f"{counts['errors']:,} lines have errors: {results.folder / 'errors.jsonl'}")


def show_plan(plan: Any) -> None:
    """The table of a plan."""
    from rlx.batch.planning import WORKERS

    about = "" if plan.is_exact else "about "
    console.note(f"{about}{plan.records:,} lines, {about}{plan.tokens:,} tokens, {plan.shards:,} shards")
    console.note(
        f"measured here: {plan.one.rate:,.1f} lines/s with 1 worker, {plan.all.rate:,.1f} with {plan.all.workers}; "
        f"workers load in {plan.start_seconds:.1f} s"
    )
    rows = []
    for e in map(plan.estimate, WORKERS):
        rates = f"{e.records_per_second:,.0f}", f"{e.tokens_per_second:,.0f}"
        rows.append((e.workers, e.machines, *rates, show_time(e.seconds), e.limit))
    header = ("workers", "machines", "lines/s", "tokens/s", "time", "limited by")
    console.table(header, rows, numbers=header[:-1])


def show_time(seconds: float) -> str:
    """A duration for people.

    >>> show_time(42), show_time(200), show_time(90000)
    ('42 s', '3:20', '25:00:00')
    """
    whole_seconds = round(seconds)
    if whole_seconds < 60:
        return f"{whole_seconds} s"
    minutes, rest = divmod(whole_seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
