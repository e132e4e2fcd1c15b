"""Lifetimes of temporary buffers on a GPU, where an attention launch may also run the loops before it (`heads.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile

from rlx.lir import memory
from rlx.lir.kernels import AttentionKernel
from rlx.lir.loops import LoopKernel
from rlx.lir.memory import Lifetime
from rlx.lir.program import Launch, Program


def lifetimes(program: Program) -> list[Lifetime]:
    """As on any device, except that what the loops before an attention launch touch lives until it has begun."""
    lives = {life.name: life for life in memory.lifetimes(program)}
    for i, launch in enumerate(program.launches):
        if isinstance(launch.kernel, AttentionKernel):
            begins = [lives[view.buffer].first for view in launch.views(written=True) if view.buffer in lives]
            for view in (view for before in _loops_before(program, i) for view in before.views()):
                if view.buffer in lives:
                    last = max([lives[view.buffer].last, *begins])
                    lives[view.buffer] = replace(lives[view.buffer], last=last)
    return list(lives.values())


def _loops_before(program: Program, i: int) -> Iterator[Launch]:
    return takewhile(lambda launch: isinstance(launch.kernel, LoopKernel), program.launches[i - 1 :: -1] if i else ())
