"""A command on a terminal of its own: wait for what it shows, type, and read what it said."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

from limits import LONGEST_S

PATH = os.pathsep.join([str(Path(__file__).parents[2] / "src"), str(Path(__file__).parent)])
# Ctrl-C is a signal only to those whose terminal it is. (pty.fork would do it, but not beside other threads.)
OWN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class PtySession:
    """Python with some arguments, as a person would use it."""

    def __init__(self, *words: str, term: str = "xterm") -> None:
        self.shown = b""
        self._read = 0
        own = os.environ | {"PYTHONPATH": PATH, "TERM": term, "NO_COLOR": "1", "COLUMNS": "120"}
        command = [sys.executable, "-c", OWN_TERMINAL, *words]
        self._terminal, theirs = pty.openpty()
        self._process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=own, start_new_session=True
        )
        os.close(theirs)

    def wait_for(self, text: str) -> str:
        """Read until the text comes; gives all that came since the last wait."""
        wanted, end = text.encode(), time.monotonic() + LONGEST_S
        while wanted not in self.shown[self._read :]:
            if time.monotonic() > end or not self._more():
                raise AssertionError(f"{text!r} never came, but {self.shown[self._read :].decode()!r}")
        stop = self.shown.index(wanted, self._read) + len(wanted)
        part, self._read = self.shown[self._read : stop], stop
        return part.decode()

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def interrupt(self, shows: str) -> None:
        """Press Ctrl-C until the text comes: readline shows its prompt a moment before it looks out for signals."""
        end = time.monotonic() + LONGEST_S
        while shows.encode() not in self.shown[self._read :] and time.monotonic() < end:
            self.type("\x03")
            self._more(1.0)
        self.wait_for(shows)

    def end(self) -> int:
        """Read to the end; gives the exit code."""
        while self._more():
            pass
        return self._process.wait(LONGEST_S)

    def __enter__(self) -> PtySession:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # does nothing where it has ended
        self._process.wait()
        os.close(self._terminal)

    def _more(self, seconds: float = LONGEST_S) -> bool:
        if not select.select([self._terminal], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self._terminal, 1 << 16)
        except OSError:  # the other side is gone
            return False
        self.shown += data
        return bool(data)
