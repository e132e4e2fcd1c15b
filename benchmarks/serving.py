"""Servers under load: time to the first token, gaps between tokens, goodput. `rlx serve`, and llama-server beside it.

    RLX_LLAMA_CPP=llama.cpp/build/bin python benchmarks/serving.py --json benchmarks/results/serving.json

Clients are threads with raw sockets in this process; prompts are random token ids, so that nothing is cached unless a
scenario is about that. TTFT is the time from sending to the first text, ITL the gaps between texts (pooled over
requests), TPOT the mean gap of a request, goodput the requests per second within `TTFT_S` and `TPOT_S`. One server runs
at a time, with the same number of threads. `in process` is `model.stream` and `model.embed` without HTTP. Each set of
figures says how much of the machine's processor time went to other programs meanwhile: above a few percent they mean
little.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from command import print_rows
from harness import Clock, command, cpu_seconds, describe_machine, timestamp, write_json

QWEN, SMALL, ENCODER = "qwen2.5-coder-1.5b", "smollm2-135m", "minilm-l6"
STREAMS = 8
CLIENTS = 64  # that embed
CONTEXT = 4608  # tokens of a row: the long prompt and an answer
TTFT_S, TPOT_S = 5.0, 0.13  # of a good answer: people read about eight tokens per second
TOKENS = range(1000, 30000)  # plain tokens of every vocabulary here
SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 200}
Figures = dict[str, float]


# -- clients -----------------------------------------------------------------------------------------------------------
@dataclass
class Answer:
    """What a client saw of one request."""

    sent: float
    status: int = 0
    times: list[float] = field(default_factory=list)  # of each text
    tokens: int = 0
    ended: float = 0.0

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]

    @property
    def rate(self) -> float:
        """Tokens per second after the first."""
        return (self.tokens - 1) / (self.times[-1] - self.times[0])

    @property
    def is_good(self) -> bool:
        return self.status == 200 and self.ttft <= TTFT_S and 1 / self.rate <= TPOT_S


class Client:
    """One request over a socket of its own. `close` leaves in the middle of the answer."""

    def __init__(self, port: int, path: str, body: dict[str, Any] | None) -> None:
        request = request_bytes(port, path, body, "Connection: close")
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.answer = Answer(time.perf_counter())
        self.socket.sendall(request)

    def read(self) -> bytes:
        """Read the answer to its end, noting when each event with text came."""
        received, seen, part = bytearray(), 0, b"-"
        while part:
            try:
                part = self.socket.recv(1 << 16)
            except OSError:  # closed by another thread
                break
            now = time.perf_counter()
            received += part
            if not self.answer.status and b"\r\n" in received:
                self.answer.status = int(received.split(b" ", 2)[1])
            count = received.count(b'"text":"') - received.count(b'"text":""')
            self.answer.times += [now] * (count - seen)
            seen = count
        self.answer.ended = time.perf_counter()
        self.socket.close()
        at = received.rfind(b'"completion_tokens":')
        self.answer.tokens = int(received[at + 20 : at + 30].split(b",")[0].strip(b" }")) if at >= 0 else seen
        return bytes(received)

    def close(self) -> None:
        with suppress(OSError):  # it has ended
            self.socket.shutdown(socket.SHUT_RDWR)


def request_bytes(port: int, path: str, body: dict[str, Any] | None, *headers: str) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    head = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", *headers]
    head += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
    return "\r\n".join([*head, "", ""]).encode() + data


def prompt(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(TOKENS, k=count)


class Server:
    """A running server."""

    def __init__(self, name: str, port: int, model: str, pid: int) -> None:
        self.name, self.port, self.model, self.pid = name, port, model, pid

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.pid)

    def run(self, scenario: Callable[[Server], Figures]) -> Figures:
        """The figures of a scenario, and the part of the processor time that other programs had."""
        clock = Clock([self])
        return scenario(self) | {"elsewhere_percent": clock.elsewhere_percent()}

    def start(self, tokens: Sequence[int], count: int, **more: Any) -> Client:
        """Send a request for exactly `count` tokens, unless `more` says when it ends."""
        body = {"model": self.model, "prompt": list(tokens), "max_tokens": count, "temperature": 0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self.name != "rlx":
            body |= {"ignore_eos": True, "cache_prompt": bool(more.pop("cached", False))}
        elif "response_format" not in more:
            body["logit_bias"] = dict.fromkeys(map(str, STOPS.get(self.model, ())), -100)
            more.pop("cached", None)
        return Client(self.port, "/v1/completions", body | more)

    def ask(self, tokens: Sequence[int], count: int, **more: Any) -> Answer:
        client = self.start(tokens, count, **more)
        client.read()
        return client.answer

    def metric(self, name: str) -> float:
        text = Client(self.port, "/metrics", None).read().decode()
        return next(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"rlx_{name}{{"))


WORDS = ("the", "a", "small", "old", "red", "house", "river", "bird", "child", "walks", "sings", "over", "and", "home")
STOPS = {QWEN: (151643, 151645), SMALL: (0, 2)}  # tokens that end a text


def together(tasks: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of functions that run at the same time."""
    results: list[Any] = [None] * len(tasks)

    def run(i: int) -> None:
        results[i] = tasks[i]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def quantile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


def gap_figures(gaps: Sequence[float]) -> Figures:
    return {"itl_p50_ms": 1e3 * statistics.median(gaps), "itl_p99_ms": 1e3 * quantile(gaps, 0.99)}


# -- scenarios: what a server does, as figures -------------------------------------------------------------------------
def one_stream(server: Server, rounds: int = 3, seed: int = 0) -> Figures:
    """Prompts of 128 tokens, answers of 96, one after the other."""
    answers = [server.ask(prompt(128, seed + i), 96) for i in range(rounds)]
    figures = {"ttft_ms": 1e3 * statistics.median(a.ttft for a in answers)}
    return (
        figures
        | {"tok_s": statistics.median(a.rate for a in answers)}
        | gap_figures([gap for a in answers for gap in a.gaps])
    )


def eight_streams(server: Server) -> Figures:
    """As many streams at once; tokens per second while all of them decode."""
    answers = together([lambda i=i: server.ask(prompt(128, 100 + i), 96) for i in range(STREAMS)])  # type: ignore[misc]
    begin, end = max(a.times[0] for a in answers), min(a.times[-1] for a in answers)
    inside = sum(begin < t <= end for a in answers for t in a.times)
    gaps = [b - a for answer in answers for a, b in zip(answer.times, answer.times[1:], strict=False) if a >= begin]
    total = sum(a.tokens for a in answers) / (max(a.ended for a in answers) - min(a.sent for a in answers))
    return {"tok_s": inside / (end - begin), "total_tok_s": total} | gap_figures(gaps)


def prefill(server: Server) -> Figures:
    """A prompt of 512 tokens."""
    return {"tok_s": 512 / statistics.median(server.ask(prompt(512, 200 + seed), 1).ttft for seed in range(3))}


def long_prompt(server: Server) -> Figures:
    """Four streams decode, and a prompt of 4,000 tokens arrives: gaps of the four until its first token."""
    clients = [server.start(prompt(64, 300 + i), CONTEXT - 128) for i in range(4)]
    readers = [threading.Thread(target=client.read) for client in clients]
    for reader in readers:
        reader.start()
    while min(len(client.answer.times) for client in clients) < 24:
        time.sleep(0.01)
    long = server.ask(prompt(4000, 350), 4)
    time.sleep(0.5)
    for client, reader in zip(clients, readers, strict=True):
        client.close()
        reader.join()
    before, during = list[float](), list[float]()
    for client in clients:
        for a, b in zip(client.answer.times[8:], client.answer.times[9:], strict=False):
            (before if b < long.sent else during if a < long.times[0] else []).append(b - a)
    step = statistics.median(before)
    return {
        "step_ms": 1e3 * step, "largest_gap_ms": 1e3 * max(during), "largest_gap_steps": max(during) / step,
        "long_ttft_s": long.ttft, "p99_over_p50": quantile(during, 0.99) / statistics.median(during),
    } | gap_figures(during)  # fmt: skip


def arrivals(server: Server, count: int = 32, per_second: float = 0.7) -> Figures:
    """Requests arrive at random (Poisson), prompts and answers of log-normal lengths, about 130 and 40 tokens."""
    draw = random.Random(1)
    at, tasks = 0.0, []
    begin = time.perf_counter()
    for i in range(count):
        at += draw.expovariate(per_second)
        sizes = [max(4, min(int(draw.lognormvariate(mean, 0.7)), most)) for mean, most in ((4.6, 1024), (3.4, 256))]

        def task(i: int = i, at: float = at, sizes: Sequence[int] = tuple(sizes)) -> Answer:
            time.sleep(max(begin + at - time.perf_counter(), 0))
            return server.ask(prompt(sizes[0], 400 + i), sizes[1])

        tasks.append(task)
    answers = together(tasks)
    seconds = max(a.ended for a in answers) - begin
    ttfts = [a.ttft for a in answers]
    return {
        "ttft_p50_ms": 1e3 * statistics.median(ttfts), "ttft_p99_ms": 1e3 * quantile(ttfts, 0.99),
        "good": sum(a.is_good for a in answers) / count, "goodput_per_s": sum(a.is_good for a in answers) / seconds,
    } | gap_figures([gap for a in answers for gap in a.gaps])  # fmt: skip


def shared_prefix(server: Server) -> Figures:
    """Two prompts of 1,024 tokens that differ in the last 24."""
    first, second = (server.ask(prompt(1000, 500) + prompt(24, 501 + i), 2, cached=True).ttft for i in range(2))
    return {"first_ttft_ms": 1e3 * first, "second_ttft_ms": 1e3 * second, "second_over_first": second / first}


def schema(server: Server, rounds: int = 3) -> Figures:
    """The gaps of an answer by a JSON schema, over those of a free one; the two take turns."""
    form = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": SCHEMA}}
    free, bound = list[float](), list[float]()
    for seed in range(rounds):
        free += server.ask(prompt(32, 600 + seed), 96).gaps
        bound += server.ask(prompt(32, 650 + seed), 96, response_format=form).gaps
    return {"itl_ms": 1e3 * statistics.median(bound), "over_free": statistics.median(bound) / statistics.median(free)}


def cancel(server: Server, rounds: int = 5) -> Figures:
    """All rows are busy; a client leaves: milliseconds until its row is free."""
    seconds = []
    clients = [server.start(prompt(32, 700 + i), 2000) for i in range(STREAMS)]
    readers = [threading.Thread(target=client.read, daemon=True) for client in clients]
    for reader in readers:
        reader.start()
    while min(len(client.answer.times) for client in clients) < 4:
        time.sleep(0.01)
    for client in clients[:rounds]:
        running = server.metric("requests_running")
        begin = time.perf_counter()
        client.close()
        while server.metric("requests_running") >= running:
            time.sleep(0.002)
        seconds.append(time.perf_counter() - begin)
    for client in clients[rounds:]:
        client.close()
    return {"worst_ms": 1e3 * max(seconds)}


def overload(server: Server, seconds: float = 15.0, clients: int = 80) -> Figures:
    """Ten times as many clients as rows, in a closed loop: how soon they are refused, and what is still served.

    They come within a second, and who is refused asks again as OpenAI's client does, after half a second, less up to a
    quarter of it at random.
    """
    until = time.perf_counter() + seconds

    def loop(i: int) -> list[Answer]:
        answers, draw = list[Answer](), random.Random(i)
        time.sleep(draw.random())
        while time.perf_counter() < until:
            answers.append(server.ask(prompt(32, 800 + i), 48))
            if answers[-1].status == 429:
                time.sleep(0.5 * (1 - 0.25 * draw.random()))
        return answers

    capacity = eight_short(server)
    begin = time.perf_counter()
    until = begin + seconds
    answers = [a for batch in together([lambda i=i: loop(i) for i in range(clients)]) for a in batch]  # type: ignore[misc]
    ended = max(a.ended for a in answers)
    refused = [a.ended - a.sent for a in answers if a.status == 429]
    served = sum(a.tokens for a in answers if a.status == 200) / (ended - begin)
    return {
        "refused": len(refused), "refused_p50_ms": 1e3 * statistics.median(refused),
        "refused_p99_ms": 1e3 * quantile(refused, 0.99), "tok_s": served, "of_capacity": served / capacity,
    }  # fmt: skip


def eight_short(server: Server) -> float:
    """Tokens per second of as many clients as rows, with the requests of `overload`."""
    begin = time.perf_counter()
    answers = together([lambda i=i: [server.ask(prompt(32, 900 + 8 * i + j), 48) for j in range(3)]  # type: ignore[misc]
                        for i in range(STREAMS)])  # fmt: skip
    return sum(a.tokens for batch in answers for a in batch) / (time.perf_counter() - begin)


def embeddings(server: Server) -> float:
    """Texts per second of `CLIENTS` that send one text at a time over connections that they keep."""
    texts = paragraphs()

    def ask(part: Sequence[str]) -> None:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for text in part:
                body = {"model": server.model, "input": text, "encoding_format": "base64"}
                connection.sendall(request_bytes(server.port, "/v1/embeddings", body))
                received = b""
                while b"\r\n\r\n" not in received:
                    received += connection.recv(1 << 16)
                head, _, data = received.partition(b"\r\n\r\n")
                size = int(re.search(rb"content-length: (\d+)", head.lower())[1])  # type: ignore[index]
                while len(data) < size:
                    data += connection.recv(1 << 16)
                assert head.startswith(b"HTTP/1.1 200"), head

    begin = time.perf_counter()
    together([lambda i=i: ask(texts[i::CLIENTS]) for i in range(CLIENTS)])  # type: ignore[misc]
    return len(texts) / (time.perf_counter() - begin)


def paragraphs() -> list[str]:
    """Texts of 40 to 160 words, as programs that search documents send them."""
    draw = random.Random(7)
    return [" ".join(draw.choices(WORDS, k=draw.randrange(40, 160))) for _ in range(CLIENTS * 16)]


# -- without HTTP ------------------------------------------------------------------------------------------------------
def in_process(model: str, threads: int) -> None:
    """For each line of the input, the speed without HTTP: of one stream, or of one call that embeds many texts."""
    import rlx

    loaded = rlx.load(model, threads=threads)
    texts, bias = paragraphs(), dict.fromkeys(STOPS.get(model, ()), -100.0)
    for line in sys.stdin:
        begin = time.perf_counter()
        if isinstance(loaded, rlx.EmbeddingModel):
            loaded.embed(texts)
            figures = {"texts_s": len(texts) / (time.perf_counter() - begin)}
        else:
            with loaded.stream(prompt(128, int(line)), max_tokens=96, logit_bias=bias) as stream:
                times = [time.perf_counter() for _ in stream]
            rate = (len(stream.tokens) - 1) / (times[-1] - times[0])
            figures = {"tok_s": rate, "ttft_ms": 1e3 * (times[0] - begin)}
        print(json.dumps(figures), flush=True)


def over_http(server: Server, threads: int, rounds: int = 9) -> tuple[Figures, Figures]:
    """The speeds in a process and over HTTP, in turns; `of_process` is the median of the ratios of turns."""
    command = [sys.executable, __file__, "--in-process", server.model, "--threads", str(threads)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        clock = Clock([server, Server("in process", 0, server.model, process.pid)])
        turns = list[tuple[Figures, Figures]]()
        for seed in range(1000, 1001 + rounds):
            print(seed, file=process.stdin, flush=True)
            inside: Figures = json.loads(process.stdout.readline())
            outside = {"texts_s": embeddings(server)} if server.model == ENCODER else one_stream(server, 1, seed)
            turns.append((inside, outside))
        elsewhere = clock.elsewhere_percent()
        process.stdin.close()
    turns = turns[1:]  # the first one warms up
    speed = "texts_s" if server.model == ENCODER else "tok_s"
    one, other = ({name: statistics.median(turn[i][name] for turn in turns) for name in turns[0][i]} for i in (0, 1))
    ratio = statistics.median(b[speed] / a[speed] for a, b in turns)
    return one, other | {"of_process": ratio, "elsewhere_percent": elsewhere}


# -- servers -----------------------------------------------------------------------------------------------------------
@contextmanager
def running(name: str, command: Sequence[str], port: int, model: str) -> Iterator[Server]:
    """A server in a process of its own, once it answers."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{name} did not start: {' '.join(command)}")
            try:
                client = Client(port, "/health", None)
                client.read()
                if client.answer.status == 200:
                    break
            except OSError:
                pass
            time.sleep(0.1)
        yield Server(name, port, model, process.pid)
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def rlx_server(model: str, threads: int, *more: str) -> Any:
    port = free_port()
    rlx = str(Path(sys.executable).parent / "rlx")
    return running("rlx", [rlx, "serve", model, "--port", str(port), "--threads", str(threads), *more], port, model)


def llama_server(folder: Path, model: str, threads: int) -> Any:
    from rlx.hub.pull import resolve

    port, path = free_port(), str(resolve(model).path)
    command = [str(folder / "llama-server"), "-m", path, "--port", str(port), "-t", str(threads), "-tb", str(threads)]
    command += ["-np", str(STREAMS), "-c", str(STREAMS * CONTEXT), "-b", "512", "-ub", "512", "--no-webui"]
    return running("llama-server", command, port, model)


BOTH = {"prefill": prefill, "one stream": one_stream, "8 streams": eight_streams, "long prompt": long_prompt,
        "arrivals": arrivals, "shared prefix": shared_prefix}  # fmt: skip
OURS = {"schema": schema, "cancel": cancel}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=[QWEN, SMALL, ENCODER])
    parser.add_argument("--scenarios", nargs="+", metavar="NAME", help=f"{', '.join([*BOTH, *OURS])}, overload, http")
    parser.add_argument("--servers", nargs="+", default=["rlx", "llama-server"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, metavar="PATH", help="results are added to those of other models there")
    parser.add_argument("--in-process", metavar="MODEL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.in_process:
        in_process(args.in_process, args.threads)
        return 0
    about = describe_machine() | {"date": timestamp(), "command": command()}
    results: dict[str, Any] = {"machine": about, "threads": args.threads, "models": {}}
    if args.json is not None and args.json.exists():
        results["models"] = json.loads(args.json.read_text())["models"]
    for model in args.models:
        for server, scenario, figures in measure(model, args):
            print(f"{model}, {server}, {scenario}: {shown(figures)}", file=sys.stderr, flush=True)
            results["models"].setdefault(model, {}).setdefault(scenario, {})[server] = figures
            if args.json is not None:
                write_json(args.json, results)
    for model, scenarios in results["models"].items():
        print(f"\n**{model}**, {args.threads} threads\n")
        print_rows(("scenario", "server", "figures"), [
            (scenario, server, shown(figures)) for scenario, servers in scenarios.items()
            for server, figures in servers.items()
        ])  # fmt: skip
    return 0


def shown(figures: Figures) -> str:
    return ", ".join(f"{name} {value:,.{3 if value < 10 else 1}f}" for name, value in figures.items())


def measure(model: str, args: argparse.Namespace) -> Iterator[tuple[str, str, Figures]]:
    """(server, scenario, figures) of a model."""

    def wanted(name: str) -> bool:
        return args.scenarios is None or name in args.scenarios

    if model == ENCODER:
        with rlx_server(model, args.threads) as server:
            yield from zip(("in process", "rlx"), ("http", "http"), over_http(server, args.threads), strict=True)
        return
    rows = ("--rows", str(STREAMS), "--context", str(CONTEXT))
    if "rlx" in args.servers:
        with rlx_server(model, args.threads, *rows) as server:
            one_stream(server, 1, seed=50)  # warm
            if wanted("http"):
                yield from zip(("in process", "rlx"), ("http", "http"), over_http(server, args.threads), strict=True)
            for name, scenario in (BOTH | OURS).items():
                if wanted(name):
                    yield "rlx", name, server.run(scenario)
        if wanted("overload"):
            with rlx_server(model, args.threads, *rows, "--max-queued", str(STREAMS)) as server:
                yield "rlx", "overload", server.run(overload)
    folder = os.environ.get("RLX_LLAMA_CPP")
    if folder and "llama-server" in args.servers:
        with llama_server(Path(folder), model, args.threads) as server:
            one_stream(server, 1, seed=50)  # warm
            for name, scenario in BOTH.items():
                if wanted(name):
                    yield "llama-server", name, server.run(scenario)


if __name__ == "__main__":
    sys.exit(main())
