"""Runs on the calling thread alone, beside runs that all threads share."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

from layers import TINY_BERT, bert_graph, bert_inputs, compiled, same_bits, weights

from rlx.backends.cpu import driver


def test_runs_alone_have_the_same_bits_and_leave_the_workers_to_others() -> None:
    """Between shared runs of the same sizes, whose memory they take over, and with pieces of a large batch."""
    f = compiled(bert_graph(TINY_BERT), weights(TINY_BERT), threads=2)
    inputs = [bert_inputs(TINY_BERT, batch, 33, seed) for seed, batch in enumerate((2, 3, 5, 3000))]
    wanted = [f.run(i) for i in inputs]
    pool, slots = f.executable.pool, list[int]()  # type: ignore[attr-defined]
    execute = pool.execute

    def counted(request: int) -> int:
        slots.append(ctypes.c_int64.from_address(request + driver.SLOTS).value)
        return int(execute(request))

    pool.execute = counted
    assert all(same_bits(f.run_alone(i), w) for i, w in zip(inputs, wanted, strict=True))
    assert len(slots) > len(inputs) and set(slots) == {1}
    slots.clear()
    shared = [bert_inputs(TINY_BERT, 7, 33, 0)]
    assert all(same_bits(f.run(i), w) for i, w in zip(inputs, wanted, strict=True)) and f.run(shared[0])
    assert set(slots) == {2}
    pool.execute = execute
    with ThreadPoolExecutor(8) as threads:
        either = lambda n: same_bits((f.run if n % 2 else f.run_alone)(inputs[n % 3]), wanted[n % 3])
        assert all(threads.map(either, range(500)))
