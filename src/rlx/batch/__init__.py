"""Batch jobs: files of texts in, a folder of results out, the same bytes from any number of workers.

    results = rlx.batch.embed(["texts.jsonl"], "out", workers=4)
    results.vectors()                                          # [rows, dim]

A job that was killed goes on where it was when it is started again. `runner="ray"` runs it on a Ray cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.batch.folder import check_job
from rlx.batch.job import Job, OnProgress
from rlx.batch.job import Progress as Progress
from rlx.batch.results import Results as Results
from rlx.batch.runner import TIMEOUT_S, Runner, check_timeout
from rlx.batch.sizing import check_counts, choose_workers, devices_of
from rlx.batch.tasks import Task
from rlx.errors import RequestError

if TYPE_CHECKING:
    from rlx.batch.planning import Plan

Inputs = str | Path | Sequence[str | Path]
RUNNERS = ("local", "ray")


def embed(
    inputs: Inputs, out: str | Path, model: str | Path = "minilm-l6", *, field: str | None = None,
    prompt: str | None = None, truncate: bool = True, format: str = "npy", load: Mapping[str, Any] | None = None,
    **options: Any,
) -> Results:  # fmt: skip
    """The vectors of all texts, in a NumPy file per shard (`format="jsonl"`: lines of JSON).

    Records have a text, or a `field` "text". `load` are settings of `rlx.load`. The options are those of `run`.
    """
    from rlx.batch.embed_task import Embed  # a worker imports the class of its task only

    return run(Embed(str(model), dict(load or {}), field, prompt, truncate, format), inputs, out, **options)


def generate(
    inputs: Inputs, out: str | Path, model: str | Path, *, field: str | None = None, chat: bool = False,
    system: str | None = None, max_tokens: int | str | None = "auto", stop: str | Sequence[str] = (),
    load: Mapping[str, Any] | None = None, sampling: Mapping[str, Any] | None = None, **options: Any,
) -> Results:  # fmt: skip
    """The continuations of all prompts, or the answers to conversations, as lines of JSON.

    Records have a text, a `field` "prompt", or "messages"; or they are lines of OpenAI's batch API, and have results
    in its form. With `chat`, texts are messages of a user. `sampling` are keywords of `LanguageModel.generate`. The
    default of `max_tokens` is 256, and that of OpenAI's API for lines in its form. For these lines `stop`, `system`,
    `max_tokens` and `sampling` are defaults.
    """
    from rlx.batch.generate_task import Generate

    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    task = Generate(str(model), dict(load or {}), field, chat, system, max_tokens, stops, dict(sampling or {}))
    return run(task, inputs, out, **options)


def score(
    inputs: Inputs, out: str | Path, model: str | Path, *, field: str | None = None, per_token: bool = False,
    load: Mapping[str, Any] | None = None, **options: Any,
) -> Results:  # fmt: skip
    """The log-probabilities of all texts, after a "prompt" where records have one, as lines of JSON."""
    from rlx.batch.score_task import Score

    return run(Score(str(model), dict(load or {}), field, per_token), inputs, out, **options)


def run(
    task: Task, inputs: Inputs, out: str | Path, *, workers: int | str = "auto", threads: int | None = None,
    runner: str | Runner = "local", input_format: str | None = None, shard_records: int | None = None,
    index: str | Path | None = None, index_dtype: str = "f32", worker_timeout: float = TIMEOUT_S,
    on_progress: OnProgress | None = None,
) -> Results:  # fmt: skip
    """Run a task over input files; returns its results once all of them are written.

    `workers` are processes with `threads` threads each ("auto": what suits the model and the machine). `runner` is
    "local", "ray" (a cluster that `ray.init` has connected) or one of your own. `input_format` overrides what suffixes
    say: text, jsonl, csv, tsv or parquet. `shard_records` is the size of a shard, which rows do not depend on. `index`
    is a folder for an `rlx.Index` of the vectors of `embed`, of the type `index_dtype`: f32, f16 or int8; without a
    prompt, texts then get the model's prompt for documents. An index that is there already must be the one of this job.
    A worker that finishes no batch of work for `worker_timeout` seconds is replaced, and another gets its shard.
    """
    job = check(
        task, inputs, out, workers=workers, threads=threads, runner=runner, input_format=input_format,
        shard_records=shard_records, index=index, index_dtype=index_dtype, worker_timeout=worker_timeout,
    )  # fmt: skip
    job, chosen, fingerprint = prepare(job, workers, threads, runner, indexed=index is not None)
    results = job.run(out, chosen, fingerprint, on_progress, worker_timeout)
    if index is not None:
        from rlx.batch.indexing import build_index

        build_index(job, results, Path(index), index_dtype)
    return results


def check(
    task: Task, inputs: Inputs, out: str | Path, *, workers: int | str = "auto", threads: int | None = None,
    runner: str | Runner = "local", input_format: str | None = None, shard_records: int | None = None,
    index: str | Path | None = None, index_dtype: str = "f32", worker_timeout: float = TIMEOUT_S,
) -> Job:  # fmt: skip
    """Check what `run` would refuse, as far as that is known without the model and the cluster; returns the job."""
    check_counts(workers, threads)
    check_timeout(worker_timeout)
    if isinstance(runner, str) and runner not in RUNNERS:
        raise RequestError(f"batch: no runner is called {runner!r}", hint=f"known: {', '.join(RUNNERS)}")
    job = Job.of(task, _listed(inputs), input_format=input_format, shard_records=shard_records)
    description = job.describe("")
    unknown = ["model"] if index is None else ["model", "settings"]  # prompts of an index depend on the model
    check_job(Path(out), {name: value for name, value in description.items() if name not in unknown})
    if index is not None:
        from rlx.batch.indexing import check_index

        check_index(job, Path(index), index_dtype)
    return job


def plan(
    task: Task, inputs: Inputs, *, workers: int | str = "auto", threads: int | None = None,
    input_format: str | None = None, shard_records: int | None = None, seconds: float = 30.0,
) -> Plan:  # fmt: skip
    """Measure a job on this machine for some seconds; the plan says how long it takes with how many workers."""
    from rlx.batch.local import Local
    from rlx.batch.planning import make_plan

    job = Job.of(task, _listed(inputs), input_format=input_format, shard_records=shard_records)
    job, chosen, fingerprint = prepare(job, workers, threads, "local")
    devices = devices_of(task.load.get("device"))
    return make_plan(job, lambda count: Local(count, chosen.threads, devices), chosen.workers, fingerprint, seconds)


def prepare(
    job: Job, workers: int | str, threads: int | None, runner: str | Runner, *, indexed: bool = False
) -> tuple[Job, Runner, str]:
    """The job with the settings that its model decides, its runner, and the fingerprint of the model.

    Loads the model once, which checks the settings, and leaves a snapshot whose weights all processes map.
    """
    task = job.task
    device = task.load.get("device")
    opened = task.open()
    try:
        if indexed:
            task = task.for_index(opened.model)
        count, per_worker = choose_workers(opened.model, workers, threads, device)
        fingerprint = opened.fingerprint
    finally:
        opened.close()
    return replace(job, task=task), _runner(runner, workers, count, per_worker, device), fingerprint


def _runner(runner: str | Runner, asked: int | str, workers: int, threads: int, device: str | None) -> Runner:
    if not isinstance(runner, str):
        return runner
    if runner == "local":
        from rlx.batch.local import Local

        return Local(workers, threads, devices_of(device))
    from rlx.batch.on_ray import OnRay

    gpus = 1 if devices_of(device) else 0
    count = OnRay.capacity(threads, gpus) if asked == "auto" else workers
    return OnRay(count, threads, gpus=gpus)


def _listed(inputs: Inputs) -> Sequence[str | Path]:
    return [inputs] if isinstance(inputs, (str, Path)) else list(inputs)
