"""Runs a server: the engine in its thread, uvicorn on this one, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import uvicorn

from rlx import host_memory
from rlx.errors import RequestError
from rlx.server.app import application
from rlx.server.connections import Connection
from rlx.server.engine_thread import EngineThread, Loader
from rlx.server.settings import MAX_HEAD, ServerSettings
from rlx.server.state import State

LOG = logging.getLogger("rlx.server")
KEEP_ALIVE_S = 75  # clients pool connections
POLL_S = 0.05
TRIM_S = 30.0  # between two returns of free memory to the system
SWITCH_S = 0.0005  # for which a thread may keep the GIL: the event loop needs it after each of its system calls
WORKERS = 16  # threads for templates, tokens and grammars
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Server(uvicorn.Server):
    """uvicorn, which waits for running requests before it closes connections.

    A server that `owns_process` sets what the whole process shares.
    """

    def __init__(
        self, state: State, started: Callable[[str], None] | None = None, *, owns_process: bool = False
    ) -> None:
        settings = state.settings
        config = uvicorn.Config(
            application(state), host=settings.host, port=settings.port, log_config=None, access_log=False,
            lifespan="off", ws="none", http=Connection, loop="asyncio", h11_max_incomplete_event_size=MAX_HEAD,
            timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=5, server_header=False, proxy_headers=False,
        )  # fmt: skip
        super().__init__(config)
        self.state, self._started, self._owns_process = state, started, owns_process
        self.address = ""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(WORKERS, thread_name_prefix="rlx-worker"))
        self.state.engine.start(loop)
        await super().startup(sockets)
        if self.servers:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self.address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            if self._started is not None:
                self._started(self.address)
        self._care = asyncio.ensure_future(self._care_for_process())

    async def _care_for_process(self) -> None:
        """Wait for the models, and end the server if they cannot be loaded; then keep the process small."""
        while not self.state.engine.loaded.is_set():
            await asyncio.sleep(POLL_S)
        if self.state.engine.failure is not None:
            self.should_exit = True
        elif self._owns_process:
            gc.collect()
            gc.freeze()  # a collection that visits the models' objects stops all threads for tens of milliseconds
            while True:  # arenas of many threads grow for hours, though most of them is free
                await asyncio.to_thread(host_memory.trim)
                await asyncio.sleep(TRIM_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more requests, let running ones end for a while, then stop the engine, which ends the rest."""
        self.state.stopping = True
        end = time.monotonic() + self.state.settings.grace
        while self.state.active and time.monotonic() < end and not self.force_exit:
            await asyncio.sleep(POLL_S)
        if self.state.active:
            LOG.warning("%d requests are ended: the server stops", self.state.active)
        await asyncio.to_thread(self.state.engine.stop)
        await asyncio.sleep(0)  # what the engine posted last
        self._care.cancel()
        await super().shutdown(sockets)


def new_state(loaders: Mapping[str, Loader], settings: ServerSettings, **options: Any) -> State:
    """The state of a server of models by name; each loader gives a model, and is called on the engine thread."""
    if not loaders:
        raise RequestError("serve: there is no model")
    for alias, name in settings.aliases.items():
        if name not in loaders or alias in loaders:
            raise RequestError(f"serve: alias {alias}={name}: expected a new name for one of {', '.join(loaders)}")
    return State(EngineThread(loaders, **options), settings)


def serve(
    loaders: Mapping[str, Loader],
    settings: ServerSettings,
    started: Callable[[str], None] | None = None,
    **options: Any,
) -> None:
    """Serve models until SIGINT or SIGTERM. Raises what went wrong with loading them."""
    state = new_state(loaders, settings, **options)
    server = Server(state, started, owns_process=True)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    # uvicorn stops at these signals, and then sends them again to whoever handled them before.
    handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    try:
        server.run()
    except SystemExit as error:  # of uvicorn, if the address is taken
        raise RequestError(
            f"serve: {settings.host}:{settings.port} cannot be bound", hint="--port 0 takes any"
        ) from error
    finally:
        sys.setswitchinterval(interval)
        gc.unfreeze()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if state.engine.failure is not None:
        raise state.engine.failure


@contextlib.contextmanager
def running(loaders: Mapping[str, Loader], settings: ServerSettings | None = None, **options: Any) -> Iterator[Server]:
    """A server in a thread, for programs and tests; `server.address` is where it listens."""
    state = new_state(loaders, settings or ServerSettings(port=0), **options)
    listening = threading.Event()
    server = Server(state, lambda _: listening.set())
    thread = threading.Thread(target=server.run, name="rlx-server", daemon=True)
    thread.start()
    try:
        while thread.is_alive() and not (listening.wait(POLL_S) and state.engine.loaded.wait(POLL_S)):
            pass
        if state.engine.failure is not None:
            raise state.engine.failure
        yield server
    finally:
        server.should_exit = True
        thread.join()
