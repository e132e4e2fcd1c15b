"""Forked children of tests: run a function in one, and say how it ended."""

from __future__ import annotations

import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable

from limits import LONGEST_S


def in_child(work: Callable[[], bool], seconds: float = LONGEST_S) -> int | str:
    """The exit code of a forked child: 0 where `work()` is true, 1 where it is not, 2 after an exception."""
    with warnings.catch_warnings():
        # from Python 3.12 on: that fork is dangerous with several threads is why it is tested
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        code = 2
        try:
            code = 0 if work() else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hangs"
