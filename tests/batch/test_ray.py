"""Ray: jobs, Ray Data and Ray Serve on a real cluster of several node processes, which asks for a token."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from limits import LONGEST_S

import rlx
from batch.conftest import Inline, contents, texts, write_texts
from batch.deadly import Hanging
from batch.driver import VERBS, run_verb
from batch.killing import kill, run_with_kills
from rlx.errors import RequestError

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]
TEXTS = 120


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two nodes on this machine, with token authentication and without a dashboard."""
    variables = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))
    os.environ.update(variables | {"PYTHONPATH": paths})
    pytest.importorskip("ray")  # reads the variables
    from ray.cluster_utils import Cluster

    cluster = _started(
        lambda: Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    )
    _started(lambda: cluster.add_node(num_cpus=2))
    try:
        yield cluster
    finally:
        cluster.shutdown()
        for name in variables:
            os.environ.pop(name)


@pytest.fixture(scope="module")
def ray(cluster: Any) -> Iterator[Any]:
    module = rlx.ray.connect(cluster.address)
    try:
        cluster.wait_for_nodes()
        yield module
    finally:
        module.shutdown()


def _started(start: Callable[[], Any]) -> Any:
    """What `start` returns, which a busy machine may not manage within the 30 seconds that Ray has for it."""
    end = time.monotonic() + LONGEST_S
    while True:
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error) or time.monotonic() > end:
                raise


# -- clusters ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def no_init(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would try a dead address for minutes."""
    monkeypatch.setattr(ray, "init", lambda **options: pytest.fail(f"Ray is asked to connect to {options['address']}"))


def test_a_dead_address_is_refused_before_ray_tries_it(no_init: None, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = f"127.0.0.1:{_free_port()}"
    for address in (dead, f"ray://{dead}"):
        with pytest.raises(RequestError, match=f"no Ray cluster answers at {address}: Connection refused") as caught:
            rlx.ray.connect(address)
        assert "--ray local" in (caught.value.hint or "")
    with pytest.raises(RequestError, match=r"no Ray cluster answers at no-such-host\.invalid:6379: "):
        rlx.ray.connect("no-such-host.invalid:6379")
    for address in ("head", "head:", ":6379", "head:x", "head:99999"):
        with pytest.raises(RequestError, match=f"'{address}' is no address of a Ray cluster"):
            rlx.ray.connect(address)
    monkeypatch.setenv("RAY_ADDRESS", dead)
    with pytest.raises(RequestError, match=f"no Ray cluster answers at {dead}"):
        rlx.ray.connect("auto")


def test_the_cluster_refuses_those_without_the_token(
    no_init: None, cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(pytest.fail.Exception, match="Ray is asked to connect"):
        rlx.ray.connect(cluster.address)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "f" * 64)
    with pytest.raises(RequestError, match=f"the Ray cluster at {cluster.address} refuses the token"):
        rlx.ray.connect(cluster.address)
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    (tmp_path / "token").write_text("0123456789abcdef" * 4)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    with pytest.raises(pytest.fail.Exception, match="Ray is asked to connect"):
        rlx.ray.connect(cluster.address)
    monkeypatch.delenv("RAY_AUTH_MODE")
    with pytest.raises(RequestError, match=f"the Ray cluster at {cluster.address} asks for a token") as caught:
        rlx.ray.connect(cluster.address)
    assert "RAY_AUTH_MODE=token" in (caught.value.hint or "")


def test_an_address_of_something_else_is_refused(no_init: None, cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlx.ray.cluster.ANSWER_S", 1.0)
    host = cluster.address.partition(":")[0]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent_port = silent.getsockname()[1]
        worker_port = cluster.head_node.node_manager_port
        for address in (f"127.0.0.1:{silent_port}", f"ray://127.0.0.1:{silent_port}", f"{host}:{worker_port}"):
            with pytest.raises(RequestError, match=f"what answers at {address} is no Ray cluster"):
                rlx.ray.connect(address)


IMPORTED_FIRST = """
import ray, rlx
rlx.ray.connect("local", num_cpus=1)
from ray._raylet import AuthenticationMode, get_authentication_mode
print(ray.get(ray.remote(lambda: 6 * 7).remote()), get_authentication_mode() == AuthenticationMode.TOKEN)
"""


def test_a_new_cluster_asks_for_a_token_also_if_ray_was_imported_before(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED_FIRST], env=environment | {"HOME": str(tmp_path)}, capture_output=True,
        text=True, timeout=LONGEST_S,
    )  # fmt: skip
    assert done.stdout.split() == ["42", "True"], done.stderr


def test_a_ray_that_cannot_read_the_mode_again_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    raylet = pytest.importorskip("ray._raylet")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.delattr(raylet, "get_authentication_mode")
    with pytest.raises(RequestError, match="ray was imported before RAY_AUTH_MODE was set to 'token'") as caught:
        rlx.ray.connect("local")
    assert "before `import ray`" in (caught.value.hint or "")


def test_a_machine_without_a_cluster_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")

    def refuse(**options: Any) -> None:
        raise ConnectionError("Could not find any running Ray instance. Please specify the one to connect to.")

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(RequestError, match="no Ray cluster answers at this machine") as caught:
        rlx.ray.connect("auto")
    assert "--ray local" in (caught.value.hint or "")


def test_the_example_embeds_a_file_on_a_cluster_with_a_token(encoder: Path, tmp_path: Path) -> None:
    write_texts(tmp_path / "a.txt", TEXTS)
    expected = rlx.batch.embed(tmp_path / "a.txt", tmp_path / "expected", encoder, runner=Inline())
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    example = Path(__file__).parents[2] / "examples" / "ray_embed.py"
    command = [example, tmp_path / "a.txt", "-o", tmp_path / "out", "--model", encoder, "--workers", "2"]
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=environment | {"RAY_AUTH_TOKEN": "0123456789abcdef" * 4},
        capture_output=True, text=True, timeout=LONGEST_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    dim = expected.vectors().shape[1]
    assert done.stdout.splitlines()[-1] == f"{TEXTS} vectors of {dim} numbers in {tmp_path / 'out'}"
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


# -- jobs ------------------------------------------------------------------------------------------------------------
def test_jobs_on_ray_have_the_bytes_of_local_ones(ray: Any, cluster: Any, encoder: Path, tmp_path: Path) -> None:
    write_texts(tmp_path / "a.txt", TEXTS)
    run_verb("embed", encoder, tmp_path / "a.txt", tmp_path / "local", runner=Inline())
    node = _started(lambda: cluster.add_node(num_cpus=12))
    cluster.wait_for_nodes()
    for workers in (1, 2, 4, 16):
        out = tmp_path / f"ray{workers}"
        run_verb("embed", encoder, tmp_path / "a.txt", out, runner="ray", workers=workers, threads=1)
        assert contents(out) == contents(tmp_path / "local"), f"{workers} workers"
    cluster.remove_node(node)


def actors(_: int = 0, name: str = "Actor") -> Sequence[int]:
    """Processes of Ray that run workers of a job, or actors of another name."""
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if command.startswith(f"ray::{name}".encode()):
                pids.append(int(folder.name))
    return pids


@pytest.mark.parametrize("verb", VERBS)
def test_a_job_on_ray_survives_kills(ray: Any, decoder: Path, encoder: Path, tmp_path: Path, verb: str) -> None:
    write_texts(tmp_path / "a.txt", TEXTS)
    model = encoder if verb == "embed" else decoder
    run_verb(verb, model, tmp_path / "a.txt", tmp_path / "expected", runner=Inline())
    address = ray.get_runtime_context().gcs_address
    arguments = [verb, str(model), str(tmp_path / "a.txt"), str(tmp_path / "out"), "2", address]
    rng = random.Random(VERBS.index(verb))
    run_with_kills(arguments, tmp_path / "out", TEXTS // 4, rng, victims=actors, most=2)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def test_an_actor_that_hangs_is_replaced(ray: Any, decoder: Path, tmp_path: Path) -> None:
    write_texts(tmp_path / "a.txt", TEXTS)
    run_verb("score", decoder, tmp_path / "a.txt", tmp_path / "expected", runner=Inline())
    (tmp_path / "hung").mkdir()
    task = Hanging(str(decoder), {}, folder=str(tmp_path / "hung"))
    options: dict[str, Any] = {"runner": "ray", "threads": 1, "shard_records": 4, "worker_timeout": 5}
    rlx.batch.run(task, tmp_path / "a.txt", tmp_path / "out", workers=4, **options)  # as many as the cluster holds
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")
    pid = int((tmp_path / "hung" / "0").read_text())
    end = time.monotonic() + LONGEST_S
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists(), "it was killed"


# -- Ray Data --------------------------------------------------------------------------------------------------------
def test_datasets_get_vectors_and_texts(ray: Any, encoder: Path, decoder: Path) -> None:
    listed = texts(40)
    pool = ray.data.ActorPoolStrategy(size=2)
    embedded = ray.data.from_items([{"text": text, "id": i} for i, text in enumerate(listed)]).map_batches(
        rlx.ray.Embedder, fn_constructor_args=[str(encoder)], num_cpus=1, batch_size=16, compute=pool
    )
    rows = sorted(embedded.take_all(), key=lambda row: row["id"])
    with rlx.load(encoder) as model:
        assert np.array([row["vector"] for row in rows], np.float32).tobytes() == model.embed(listed).tobytes()
    generated = ray.data.from_items([{"prompt": text} for text in listed[:6]]).map_batches(
        rlx.ray.Generator, fn_constructor_args=[str(decoder)], fn_constructor_kwargs={"max_tokens": 6}, num_cpus=1,
        batch_size=4, compute=ray.data.ActorPoolStrategy(size=1),
    )  # fmt: skip
    with rlx.load(decoder) as model:
        expected = {text: model.generate(text, max_tokens=6).text for text in listed[:6]}
    assert {row["prompt"]: row["completion"] for row in generated.take_all()} == expected


def test_an_actor_has_the_threads_that_ray_gave_it(ray: Any, encoder: Path) -> None:
    class Asked:
        def __init__(self) -> None:
            self.model = rlx.ray.Embedder(str(encoder)).model

        def threads(self) -> int:
            return int(self.model.threads)

    threads = [ray.get(ray.remote(Asked).options(num_cpus=n).remote().threads.remote()) for n in (0, 1, 2)]
    assert threads == [1, 1, 2]
    assert rlx.ray.assigned() == {}, "a driver has all cores"


def test_parquet_files_are_read_and_give_the_same_rows(encoder: Path, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    listed = write_texts(tmp_path / "a.txt", 50)
    table = pyarrow.table({"text": [*listed, None], "id": [*range(50), 50], "more": [0.5] * 51})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=16)
    results = rlx.batch.embed(tmp_path / "a.parquet", tmp_path / "out", encoder, runner=Inline(), shard_records=9)
    text = rlx.batch.embed(tmp_path / "a.txt", tmp_path / "text", encoder, runner=Inline())
    assert results.vectors().tobytes() == text.vectors().tobytes()
    assert [(error["line"], error["error"]) for error in results.errors()] == [
        (51, "text: expected a text, found None")
    ]
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-100])
    with pytest.raises(rlx.errors.FormatError, match=r"b\.parquet: not a Parquet file"):
        rlx.batch.embed(tmp_path / "b.parquet", tmp_path / "bad", encoder, runner=Inline())


# -- Ray Serve and the HTTP processor --------------------------------------------------------------------------------
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def url(ray: Any, decoder: Path) -> Iterator[str]:
    """Where a deployment of one to two replicas answers conversations; it notices dead replicas and load quickly."""
    pytest.importorskip("llguidance")
    from ray import serve

    port = _free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port, "location": "HeadOnly"})
    delays = {"upscale_delay_s": 0.5, "downscale_delay_s": 1, "metrics_interval_s": 0.5, "look_back_period_s": 2}
    application = rlx.ray.deployment(
        str(decoder), name="tiny", num_cpus=1, max_replicas=2, target_ongoing_requests=1,
        options={"health_check_period_s": 1, "autoscaling_config": delays, "graceful_shutdown_timeout_s": 1},
    )  # fmt: skip
    try:
        serve.run(application)
        yield f"http://127.0.0.1:{port}/v1/chat/completions"
    finally:
        serve.shutdown()


def _deployment() -> Any:
    from ray import serve

    return serve.status().applications["default"].deployments["rlx"]


def _running() -> int:
    """Replicas that answer."""
    return int(_deployment().replica_states.get("RUNNING", 0))


def _wait_until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + LONGEST_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.2)


def test_a_deployment_answers_and_streams_as_rlx_serve_does(ray: Any, url: str, decoder: Path) -> None:
    assert _deployment().status.value in ("HEALTHY", "UPSCALING", "DOWNSCALING")
    answer = _answer(url)
    pieces = _streamed(url, BODY)
    with rlx.load(decoder) as model:
        expected = model.chat("hi", max_tokens=6).text
    assert answer == expected == "".join(pieces)
    # A server that is behind sends several tokens at once, so longer and longer answers are asked for.
    longer = (_streamed(url, BODY | {"max_tokens": n}) for n in (20, 40, 80, 120))
    assert any(len([piece for piece in streamed if piece]) > 1 for streamed in longer), "it streams"
    _process_over_http(ray, url, decoder)


def test_load_adds_a_replica_and_idleness_removes_it(url: str) -> None:
    stop = threading.Event()
    failures = list[Exception]()

    def ask() -> None:
        while not stop.is_set():
            try:
                _post(url, BODY | {"max_tokens": 200})
            except Exception as error:
                failures.append(error)
                return

    _wait_until(lambda: _running() == 1, "there is one replica without load")
    clients = [threading.Thread(target=ask) for _ in range(6)]
    for client in clients:
        client.start()
    try:
        _wait_until(lambda: _running() == 2, "more than one request per replica brings a second one up")
    finally:
        stop.set()
        for client in clients:
            client.join()
    _wait_until(lambda: _running() == 1, "without requests it goes down again")
    assert not failures


def test_a_replica_that_dies_is_replaced(url: str) -> None:
    expected = _answer(url)
    _wait_until(lambda: _running() == 1, "there is one replica without load")
    replicas = actors(name="ServeReplica:default:rlx")
    assert replicas and all(kill(pid) for pid in replicas)

    def answers() -> bool:
        with contextlib.suppress(OSError):  # errors of HTTP among them
            return _answer(url) == expected
        return False

    _wait_until(answers, "requests are answered again")
    assert not set(actors(name="ServeReplica:default:rlx")) & set(replicas), "by another process"
    _wait_until(lambda: _deployment().status.value == "HEALTHY", "the deployment is healthy again")


def _answer(url: str) -> str:
    return str(json.loads(_post(url, BODY))["choices"][0]["message"]["content"])


def _streamed(url: str, body: dict[str, Any]) -> list[str]:
    """The texts of the events of a stream."""
    lines = _post(url, body | {"stream": True}).decode().splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return [event["choices"][0]["delta"].get("content") or "" for event in events]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _post(url: str, body: Any) -> bytes:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=LONGEST_S) as answer:
        return bytes(answer.read())


def _process_over_http(ray: Any, url: str, decoder: Path) -> None:
    """Ray's own processor of HTTP requests, against a server of the API."""
    from ray.data.llm import HttpRequestProcessorConfig, build_processor

    processor = build_processor(
        HttpRequestProcessorConfig(url=url, concurrency=1, batch_size=4),
        preprocess=lambda row: {
            "payload": {"messages": [{"role": "user", "content": row["text"]}], "max_tokens": 5, "temperature": 0},
            "text": row["text"],
        },
        postprocess=lambda row: {
            "text": row["text"], "answer": row["http_response"]["choices"][0]["message"]["content"]
        },
    )  # fmt: skip
    questions = ["one", "two", "three"]
    rows = processor(ray.data.from_items([{"text": text} for text in questions])).take_all()
    with rlx.load(decoder) as model:
        expected = {text: model.chat(text, max_tokens=5).text for text in questions}
    assert {row["text"]: row["answer"] for row in rows} == expected
