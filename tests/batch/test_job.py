"""Jobs: resuming, refusing, workers that die, and the same bytes from any number of workers."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import small_bert

import rlx
from batch.conftest import Inline, contents, write_texts
from batch.deadly import Deadly, Hanging
from rlx.batch import Progress, Results
from rlx.batch.embed_task import Embed
from rlx.batch.generate_task import Generate
from rlx.batch.inputs import Shard, find_sources
from rlx.batch.job import Job
from rlx.batch.local import Local
from rlx.batch.runner import TIMEOUT_S, TRIES, Ready, run_shards
from rlx.batch.score_task import Score
from rlx.errors import BatchError, FormatError, RequestError


def run(decoder: Path, folder: Path, runner: Any = None, *, name: str = "out", **options: Any) -> Results:
    """A job of 40 texts in shards of 4."""
    path = folder / "a.txt"
    if not path.exists():
        write_texts(path, 40)
    chosen = {"runner": runner or Inline(), "shard_records": 4, **options}
    return rlx.batch.score(path, folder / name, decoder, **chosen)


class Stop(Exception):
    """Ends a driver in the middle."""


def stopped_after(shards: int) -> Any:
    """A progress function that ends the driver."""
    seen = []

    def on_progress(progress: Progress) -> None:
        seen.append(progress)
        if len(seen) == shards:
            raise Stop

    return on_progress


# -- the same bytes --------------------------------------------------------------------------------------------------
def test_processes_give_the_bytes_of_this_process(decoder: Path, tmp_path: Path) -> None:
    expected = run(decoder, tmp_path, name="inline")
    run(decoder, tmp_path, "local", name="local", workers=2, threads=1)
    assert contents(tmp_path / "local") == contents(tmp_path / "inline")
    assert expected.counts["shards"] == 10


def test_shards_of_another_size_have_the_same_rows(decoder: Path, tmp_path: Path) -> None:
    rows = [list(run(decoder, tmp_path, name=f"out{n}", shard_records=n)) for n in (1, 4, 7, 100)]
    assert all(other == rows[0] for other in rows)


# -- resuming --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shards", [1, 5, 10])
def test_a_job_goes_on_where_it_was(decoder: Path, tmp_path: Path, shards: int) -> None:
    run(decoder, tmp_path, name="expected")
    with pytest.raises(Stop):
        run(decoder, tmp_path, Inline(3), on_progress=stopped_after(shards))
    with pytest.raises(BatchError, match="the job is not finished"):
        Results(tmp_path / "out")
    ran = list[Shard]()
    seen = list[Progress]()
    run(decoder, tmp_path, Inline(2, lambda shard: ran.append(shard) or False), on_progress=seen.append)  # type: ignore[func-returns-value]
    assert len(ran) == 10 - shards and all(progress.resumed <= shards for progress in seen)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")
    if seen:
        assert seen[-1].done == pytest.approx(1.0) and seen[-1].records == 40 - 4 * shards


def test_a_finished_job_runs_nothing(decoder: Path, tmp_path: Path) -> None:
    first = run(decoder, tmp_path)
    again = run(decoder, tmp_path, Inline(dies=lambda shard: pytest.fail("it is finished")))
    assert again.counts == first.counts and len(again) == 40


def test_what_was_written_when_the_driver_died_is_done_again(decoder: Path, tmp_path: Path) -> None:
    run(decoder, tmp_path, name="expected")
    with pytest.raises(Stop):
        run(decoder, tmp_path, on_progress=stopped_after(4))
    out = tmp_path / "out"
    (out / "part-000004.jsonl").write_text("a file that no journal names")
    (out / ".part-000005.jsonl.tmp").write_text("half of a fi")
    with open(out / "journal.jsonl", "ab") as journal:
        journal.write(b'{"number": 5, "inp')
    run(decoder, tmp_path)
    assert contents(out) == contents(tmp_path / "expected")


def test_a_journal_that_is_broken_elsewhere_is_refused(decoder: Path, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        run(decoder, tmp_path, on_progress=stopped_after(4))
    journal = tmp_path / "out" / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(lines[0] + b"{}\n" + lines[2])
    with pytest.raises(FormatError, match=f"broken at byte {len(lines[0])}"):
        run(decoder, tmp_path)


def test_a_result_that_was_changed_is_noticed(decoder: Path, tmp_path: Path) -> None:
    results = run(decoder, tmp_path)
    file = results.files[3]
    file.write_bytes(file.read_bytes().replace(b"1", b"2", 1))
    with pytest.raises(FormatError, match=r"part-000003\.jsonl: its digest is"):
        results.verify()


def test_changed_errors_are_noticed(decoder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('"good"\nbad\n')
    results = rlx.batch.score(tmp_path / "a.jsonl", tmp_path / "out", decoder, runner=Inline())
    results.verify()
    errors = tmp_path / "out" / "errors.jsonl"
    text = errors.read_text()
    for change in (lambda: errors.write_text(text.replace("2", "3")), errors.unlink):
        change()
        with pytest.raises(FormatError, match=r"errors\.jsonl: its digest is"):
            results.verify()
    peaceful = run(decoder, tmp_path, name="peaceful")
    peaceful.verify()
    (tmp_path / "peaceful" / "errors.jsonl").write_text(text)
    with pytest.raises(FormatError, match=r"errors\.jsonl: its digest is .*, the manifest has None"):
        peaceful.verify()


def test_blank_lines_are_no_records(decoder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\n"good"\n\n  \nbad\n"too"\n\n')
    (tmp_path / "b.csv").write_text("text\n\none\n\n")
    seen = list[Progress]()
    inputs = [tmp_path / "a.jsonl", tmp_path / "b.csv"]
    results = rlx.batch.score(inputs, tmp_path / "out", decoder, runner=Inline(), on_progress=seen.append)
    counts = results.counts
    assert (counts["records"], counts["rows"], counts["errors"]) == (4, 3, 1) and seen[-1].records == 4
    assert [shard["records"] for shard in results.manifest["shards"]] == [3, 1]


def test_a_job_without_lines_has_no_vectors(encoder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    results = rlx.batch.embed(tmp_path / "a.txt", tmp_path / "out", encoder, runner=Inline())
    assert results.vectors().shape == (0, 0) and list(results) == [] and len(results) == 0
    results.verify()
    (tmp_path / "b.jsonl").write_text("bad\n")
    refused = rlx.batch.embed(tmp_path / "b.jsonl", tmp_path / "refused", encoder, runner=Inline())
    with rlx.load(encoder) as model:
        assert refused.vectors().shape == (0, model.dim)


def test_a_missing_result_is_noticed(decoder: Path, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        run(decoder, tmp_path, on_progress=stopped_after(4))
    (tmp_path / "out" / "part-000001.jsonl").unlink()
    with pytest.raises(FormatError, match="missing or changed"):
        run(decoder, tmp_path)


# -- refusing --------------------------------------------------------------------------------------------------------
def test_other_settings_are_refused_with_both_values(decoder: Path, encoder: Path, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        run(decoder, tmp_path, on_progress=stopped_after(2))
    with pytest.raises(BatchError, match=r"another settings\.per_token: False, now True"):
        run(decoder, tmp_path, per_token=True)
    with pytest.raises(BatchError, match=r"another shards_of\.records: 4, now 5"):
        run(decoder, tmp_path, shard_records=5)
    with pytest.raises(BatchError, match="another verb: 'score', now 'embed'"):
        rlx.batch.embed(tmp_path / "a.txt", tmp_path / "out", encoder, runner=Inline(), shard_records=4)
    other = tmp_path / "other"
    other.mkdir()
    for file in decoder.iterdir():
        text = file.read_bytes()
        (other / file.name).write_bytes(
            text.replace(b'"<|im_end|>"', b'"<|endoftext|>"') if "tokenizer_config" in file.name else text
        )
    with pytest.raises(BatchError, match="another model: "):
        run(other, tmp_path)
    with open(tmp_path / "a.txt", "a") as file:
        file.write("more\n")
    with pytest.raises(BatchError, match=r"another inputs\.0\.bytes"):
        run(decoder, tmp_path)


def test_an_input_that_has_changed_is_refused(decoder: Path, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        run(decoder, tmp_path, on_progress=stopped_after(5))
    path = tmp_path / "a.txt"
    text = path.read_text()
    path.write_text(("x" if text[0] != "x" else "y") + text[1:])
    with pytest.raises(BatchError, match=r"shard 0 \(.*a\.txt, 4 records from line 1\) has changed"):
        run(decoder, tmp_path)


def test_a_finished_job_refuses_an_input_that_has_changed(
    decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(decoder, tmp_path)
    path = tmp_path / "a.txt"
    text = path.read_text()
    path.write_text(text[:-2] + ("x" if text[-2] != "x" else "y") + text[-1])
    with pytest.raises(BatchError, match=r"shard 9 \(.*a\.txt, 4 records from line 37\) has changed since it was"):
        run(decoder, tmp_path)
    path.write_text(text.replace("\n", " ", 1))
    with pytest.raises(BatchError, match=r"shard 0 .* has changed since it was finished"):
        run(decoder, tmp_path)
    path.write_text(text)
    run(decoder, tmp_path)  # the same content, written again
    monkeypatch.setattr(
        "rlx.batch.inputs._text_records", lambda _: pytest.fail("its times tell that it has not changed")
    )
    run(decoder, tmp_path)


def test_a_folder_with_other_files_is_left_alone(decoder: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("precious")
    with pytest.raises(RequestError, match=r"has other files, such as 'thesis\.tex'"):
        run(decoder, tmp_path)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("precious")
    (tmp_path / "a.txt").write_text("hello\n")
    for out in (tmp_path / "out", tmp_path / "out" / "vectors"):
        with pytest.raises(RequestError, match=r"out is not a folder") as caught:
            rlx.batch.score(tmp_path / "a.txt", out, "a model that is not loaded")
        assert "-o FOLDER" in (caught.value.hint or "")
    assert (tmp_path / "out").read_text() == "precious"


def test_two_drivers_do_not_share_a_folder(decoder: Path, tmp_path: Path) -> None:
    def on_progress(progress: Progress) -> None:
        with pytest.raises(BatchError, match="another job writes to"):
            run(decoder, tmp_path)
        raise Stop

    with pytest.raises(Stop):
        run(decoder, tmp_path, on_progress=on_progress)
    run(decoder, tmp_path)


# -- workers that die ------------------------------------------------------------------------------------------------
def test_the_shard_of_a_dead_worker_runs_again(decoder: Path, tmp_path: Path) -> None:
    run(decoder, tmp_path, name="expected")
    deaths = dict[int, int]()

    def dies(shard: Shard) -> bool:
        deaths[shard.number] = deaths.get(shard.number, 0) + 1
        return shard.number in (0, 3, 9) and deaths[shard.number] < TRIES

    run(decoder, tmp_path, Inline(3, dies))
    assert deaths[3] == TRIES
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def test_a_poisoned_shard_is_named_and_all_others_are_finished(decoder: Path, tmp_path: Path) -> None:
    run(decoder, tmp_path, name="expected")
    with pytest.raises(BatchError, match="1 shard killed every worker") as caught:
        run(decoder, tmp_path, Inline(2, lambda shard: shard.number == 3))
    assert "a.txt, 4 records from line 13): it was told to" in "\n".join(caught.value.notes)
    ran = list[int]()
    run(decoder, tmp_path, Inline(1, lambda shard: ran.append(shard.number) or False))  # type: ignore[func-returns-value]
    assert ran == [3], "the same command tries it again"
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def test_processes_that_kill_themselves_are_given_up(decoder: Path, tmp_path: Path) -> None:
    write_texts(tmp_path / "a.txt", 8)
    options: dict[str, Any] = {"workers": 1, "threads": 1, "shard_records": 4}
    with pytest.raises(BatchError, match="1 shard killed") as caught:
        rlx.batch.run(Deadly(str(decoder), {}, shard=1), tmp_path / "a.txt", tmp_path / "out", **options)
    assert "ended with -9" in "\n".join(caught.value.notes)
    with pytest.raises(BatchError, match=r"workers end before they are ready: process \d+ ended with -9"):
        rlx.batch.run(Deadly(str(decoder), {}), tmp_path / "a.txt", tmp_path / "other", **options)


def test_a_worker_that_hangs_is_replaced(decoder: Path, tmp_path: Path) -> None:
    run(decoder, tmp_path, name="expected")
    (tmp_path / "hung").mkdir()
    task = Hanging(str(decoder), {}, folder=str(tmp_path / "hung"))
    options: dict[str, Any] = {"threads": 1, "shard_records": 4, "worker_timeout": 5}
    rlx.batch.run(task, tmp_path / "a.txt", tmp_path / "out", workers=2, **options)
    pid = int((tmp_path / "hung" / "0").read_text())
    assert not Path(f"/proc/{pid}").exists(), "it was killed"
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def test_a_shard_that_always_hangs_is_given_up(decoder: Path, tmp_path: Path) -> None:
    write_texts(tmp_path / "a.txt", 8)
    (tmp_path / "hung").mkdir()
    task = Hanging(str(decoder), {}, folder=str(tmp_path / "hung"), times=TRIES)
    options: dict[str, Any] = {"workers": 1, "threads": 1, "shard_records": 4}
    with pytest.raises(BatchError, match="1 shard killed every worker") as caught:
        rlx.batch.run(task, tmp_path / "a.txt", tmp_path / "out", worker_timeout=3, **options)
    assert "it gave no sign of life for 3 seconds" in "\n".join(caught.value.notes)
    for seconds in (1, -1, float("nan"), "10", True):
        with pytest.raises(RequestError, match=f"worker_timeout is {seconds!r}, expected a number of seconds from 2"):
            rlx.batch.run(task, tmp_path / "a.txt", tmp_path / "other", worker_timeout=seconds, **options)


def test_a_slow_shard_is_no_hanging_worker(decoder: Path, encoder: Path, tmp_path: Path) -> None:
    (shard,) = Job.of(Score(str(decoder), {}), [_texts(tmp_path, 40)]).shards()
    for verb, model in (("embed", encoder), ("score", decoder), ("generate", decoder)):
        beats = 0

        def beat() -> None:
            nonlocal beats
            beats += 1

        task = {"embed": Embed, "score": Score, "generate": Generate}[verb](str(model), {})
        with closing(task.open(1)) as opened:
            opened.run(shard, beat)
        assert beats > 1, f"{verb} gives signs of life within a shard"


def _texts(folder: Path, count: int) -> Path:
    write_texts(folder / "texts.txt", count)
    return folder / "texts.txt"


def test_a_stopped_process_never_blocks_the_driver(decoder: Path, tmp_path: Path) -> None:
    runner = Local(1)
    worker = runner.start(Score(str(decoder), {}))
    received = runner.wait([worker], None)
    assert received is not None and isinstance(received[1], Ready)
    os.kill(worker.process.pid, signal.SIGSTOP)
    (source,) = find_sources([_texts(tmp_path, 4)])
    worker.submit(Shard(0, source, 1, 1, b"x" * (8 << 20)))  # more than a pipe holds
    assert runner.wait([worker], 0.1) is None
    worker.close()
    assert runner.wait([], 0.1) is None, "events of closed workers are dropped"


class Queued:
    """A runner whose worker gives no sign of life; it is also the worker."""

    workers = threads = 1

    def __init__(self, is_started: bool) -> None:
        self.is_started, self.seconds = is_started, 0.0

    def start(self, task: Any) -> Any:
        return self

    def wait(self, workers: Any, seconds: float | None) -> None:
        self.seconds = math.inf if seconds is None else seconds
        raise Stop

    def close(self) -> None:
        pass

    submit = start


def test_a_worker_that_waits_for_room_in_a_cluster_has_no_time_limit(tmp_path: Path) -> None:
    task = Score("model", {})
    for is_started, shortest, longest in ((False, math.inf, math.inf), (True, TIMEOUT_S - 60, TIMEOUT_S)):
        runner = Queued(is_started)
        with pytest.raises(Stop):
            list(run_shards(runner, task, Job.of(task, [_texts(tmp_path, 4)]).shards(), "", timeout=TIMEOUT_S / 100))
        assert shortest <= runner.seconds <= longest, "loading has more time than the timeout"


def test_an_error_of_the_task_ends_the_job_with_its_message(
    decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlx.batch import local

    write_texts(tmp_path / "a.txt", 8)
    task = Score(str(decoder), {})
    job = rlx.batch.Job.of(task, [tmp_path / "a.txt"])
    runner = local.Local(1)
    with closing(task.open()) as opened:
        fingerprint = opened.fingerprint
    missing = rlx.batch.Job.of(Score(str(tmp_path / "nope"), {}), [tmp_path / "a.txt"])
    with pytest.raises(BatchError, match="batch: a worker: NotFoundError: "):
        missing.run(tmp_path / "out", runner, fingerprint)
    with pytest.raises(BatchError, match="a worker would give other bits") as caught:
        job.run(tmp_path / "bits", local.Local(1), fingerprint.replace("numpy", "another numpy"))
    assert any(note.strip().startswith("worker: ") for note in caught.value.notes)


# -- an index -------------------------------------------------------------------------------------------------------
def test_vectors_become_an_index(encoder: Path, tmp_path: Path) -> None:
    listed = write_texts(tmp_path / "a.txt", 30)
    options: dict[str, Any] = {"runner": Inline(), "shard_records": 8, "index": tmp_path / "library"}
    (tmp_path / ".library.tmp").mkdir()  # of a driver that was killed
    results = rlx.batch.embed(tmp_path / "a.txt", tmp_path / "out", encoder, **options)
    with rlx.Index.open(tmp_path / "library") as index:
        assert len(index) == 30 and index.model == str(encoder)
        query = results.vectors()[11]
        assert index.search(query, k=1)[0].id in [
            f"{tmp_path / 'a.txt'}:{i + 1}" for i in range(30) if listed[i] == listed[11]
        ]
        assert index.texts([11]) == [listed[11]]
    rlx.batch.embed(tmp_path / "a.txt", tmp_path / "out", encoder, **options)
    with pytest.raises(BatchError, match="its dtype is f32, that of the job int8"):
        rlx.batch.embed(tmp_path / "a.txt", tmp_path / "out", encoder, index_dtype="int8", **options)
    with pytest.raises(RequestError, match="made of vectors in NumPy files"):
        rlx.batch.embed(tmp_path / "a.txt", tmp_path / "out", encoder, format="jsonl", **options)


def test_an_index_names_its_model_from_any_folder(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_texts(tmp_path / "a.txt", 5)
    (tmp_path / "bert").symlink_to(encoder)
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # the second finds the index of the first
        rlx.batch.embed("a.txt", "out", "bert", runner=Inline(), index="library")
    rlx.Index.create("by-hand", model="./bert", dim=3).close()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with rlx.Index.open(tmp_path / "library") as index:
        assert index.model == str(encoder.resolve()) and len(index.search("bal bam")) == 5
    with rlx.Index.open(tmp_path / "by-hand") as index:
        assert index.model == str(encoder.resolve())


def test_an_index_has_the_models_prompt_for_documents(tmp_path: Path) -> None:
    prompts = {"config_sentence_transformers.json": {"prompts": {"query": "kol ", "passage": "kom "}}}
    small_bert.write(tmp_path / "bert", files=prompts)
    listed = write_texts(tmp_path / "a.txt", 5)

    def embed(name: str, **options: Any) -> Results:
        return rlx.batch.embed(tmp_path / "a.txt", tmp_path / name, tmp_path / "bert", runner=Inline(), **options)

    results = embed("out", index=tmp_path / "library")
    with rlx.load(tmp_path / "bert") as model:
        assert results.vectors().tobytes() == model.embed(listed, prompt="passage").tobytes()
        with rlx.Index.create(tmp_path / "by-hand", model=model) as index:
            index.append(texts=listed)
        assert embed("plain").vectors().tobytes() == model.embed(listed).tobytes()
    with rlx.Index.open(tmp_path / "library") as index, rlx.Index.open(tmp_path / "by-hand") as by_hand:
        assert index.vectors.tobytes() == by_hand.vectors.tobytes()
    assert results.manifest["job"]["settings"]["prompt"] == "passage"
    chosen = embed("query", index=tmp_path / "queries", prompt="query")
    assert chosen.manifest["job"]["settings"]["prompt"] == "query"
    with pytest.raises(BatchError, match=r"another settings\.prompt: None, now 'passage'"):
        embed("plain", index=tmp_path / "other")


def test_an_index_of_another_job_is_refused_whatever_its_size(encoder: Path, tmp_path: Path) -> None:
    library, path = tmp_path / "library", tmp_path / "a.txt"
    write_texts(path, 10)
    options: dict[str, Any] = {"runner": Inline(), "shard_records": 4, "index": library}
    rlx.batch.embed(path, tmp_path / "out", encoder, **options)
    before = [file.read_bytes() for file in sorted(library.iterdir())]
    text = path.read_text()
    path.write_text(("x" if text[0] != "x" else "y") + text[1:])  # as many rows and bytes as before
    with pytest.raises(BatchError, match="has changed since it was finished"):
        rlx.batch.embed(path, tmp_path / "out", encoder, **options)
    with pytest.raises(BatchError, match=r"library is of another job: row 0 is") as caught:
        rlx.batch.embed(path, tmp_path / "other", encoder, **options)
    assert caught.value.hint == "another name for the index, or delete it"
    path.write_text(text)
    assert [file.read_bytes() for file in sorted(library.iterdir())] == before
    with rlx.Index.open(library) as old, rlx.Index.create(tmp_path / "turned", dim=old.dim, model=old.model) as index:
        index.append(-old.vectors, old.ids(range(10)), old.texts(range(10)))
    with pytest.raises(BatchError, match="the vectors of rows 0 to 3 are not those of the job"):
        rlx.batch.embed(path, tmp_path / "out", encoder, **options | {"index": tmp_path / "turned"})
    with rlx.Index.open(library, write=True) as index:
        index.delete([f"{path}:3"])
    with pytest.raises(BatchError, match="it has 9 rows, the job 10"):
        rlx.batch.embed(path, tmp_path / "out", encoder, **options)


# -- the whole command -----------------------------------------------------------------------------------------------
def test_a_script_without_a_main_guard_may_run_jobs(decoder: Path, tmp_path: Path) -> None:
    write_texts(tmp_path / "a.txt", 8)
    script = tmp_path / "script.py"
    script.write_text(
        "import rlx\n"
        f"results = rlx.batch.score('a.txt', 'out', {str(decoder)!r}, workers=1)\n"
        "print(len(results), [row['line'] for row in results])\n"
    )
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "8 [1, 2, 3, 4, 5, 6, 7, 8]\n"


def test_the_manifest_says_what_the_job_was(decoder: Path, tmp_path: Path) -> None:
    results = run(decoder, tmp_path)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest == results.manifest
    job = manifest["job"]
    assert job["verb"] == "score" and job["settings"]["per_token"] is False
    assert job["inputs"] == [
        {"name": str(tmp_path / "a.txt"), "format": "text", "bytes": (tmp_path / "a.txt").stat().st_size}
    ]
    assert job["model"].startswith(f"rlx {rlx.__version__}, ")
    assert [shard["file"] for shard in manifest["shards"]] == [f"part-{i:06d}.jsonl" for i in range(10)]
    assert sum(shard["rows"] for shard in manifest["shards"]) == manifest["counts"]["rows"] == 40
