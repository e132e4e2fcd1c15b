"""The driver's code: emits the functions of `driver.SYMBOLS` as LLVM IR.

`system` has system calls, atomic words and waiting, `barriers` how threads share a launch, `workers` what they do
between runs, `calls` the caller's side of a run, `walk` one thread's walk over the records, `signals` how Ctrl-C ends
an endless loop.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu.builder import Module, Value
from rlx.backends.cpu.driver_code.barriers import Barriers
from rlx.backends.cpu.driver_code.calls import Calls
from rlx.backends.cpu.driver_code.signals import Signals
from rlx.backends.cpu.driver_code.system import MACHINES, Machine, System
from rlx.backends.cpu.driver_code.workers import Workers
from rlx.backends.cpu.fast_call_code import repeat
from rlx.backends.cpu.targets import CpuTarget

TAKE = ("function", "arguments", "units", "launch", "record", "scratch")  # arguments that `take` and `barrier` share


def driver_ir(target: CpuTarget) -> str:
    """The driver's LLVM IR."""
    module = Module()
    _define(module, MACHINES[target.arch])
    return module.text()


def _define(module: Module, machine: Machine) -> None:
    system = System(machine)
    barriers, workers = Barriers(system), Workers(system)
    calls = Calls(system, workers)
    job, tid, threads, run = ("ptr", "job"), ("i64", "tid"), ("i64", "threads"), ("i64", "run")
    part = [("ptr" if name in ("function", "arguments", "scratch") else "i64", name) for name in TAKE]
    done = [("i64", "wanted"), ("i64", "more")]

    def internal(name: str, arguments: list[tuple[str, str]], emit: Callable[..., Value | None], **k: str) -> None:
        module.define(name, arguments, emit, internal=True, noinline=True, **k)

    internal("confine", [job, tid], workers.confine)
    internal("free", [job, tid], workers.free)
    internal("leave", [job, tid], workers.leave)
    internal("wake_sleepers", [job, tid], barriers.wake_sleepers)
    internal("finish", [job, tid, *done], barriers.finish)
    internal("take", [job, ("i64", "slot"), *part], barriers.take, result="i64")
    internal("take_others", [job, tid, *part], barriers.take_others, result="i64")
    internal("barrier", [job, tid, run, ("i1", "final"), *done, *part], barriers.barrier, result="i64")
    internal("wait_done", [job, tid, run, ("i64", "wanted"), ("ptr", "scratch")], barriers.wait_done, result="i64")
    internal("decide", [job, tid, ("i64", "test"), ("i1", "holds")], barriers.decide, result="i64")
    internal("handle_signals", [("ptr", "table"), ("ptr", "scratch")], Signals(system).handle)
    module.define("execute", [job, tid, threads, run], calls.execute)
    module.define("call", [job, ("ptr", "request")], calls.call, result="i64")
    module.define("repeat", [("ptr", "self"), ("ptr", "inputs")], repeat, result="ptr")
    module.define("worker", [job, tid], workers.worker)
    module.define("stop", [job], workers.stop, result="i64")
    module.define("spin", [("i64", "count")], workers.spin)
    module.define("clock", [], system.now, result="i64")
