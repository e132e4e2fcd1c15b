"""Whole layers under `RLX_CHECK=1`: every array ends at an inaccessible page and begins as NaN. No kernel strays."""

from __future__ import annotations

import numpy as np
import pytest
from layers import Bert, Llama, bert_graph, bert_inputs, compiled, llama_graph, llama_inputs, same_bits, weights

from rlx.backends.cpu.memory import Guarded, aligned
from rlx.target import supported

TARGETS = [t.name for t in supported()]
ENCODER = Bert(hidden=35, heads=7, ffn=45)
DECODER = Llama(hidden=33, heads=5, kv_heads=1, head_dim=18, ffn=29)


@pytest.mark.parametrize("target", TARGETS)
def test_an_encoder_stays_inside_its_arrays(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = compiled(bert_graph(ENCODER), weights(ENCODER), target=target, threads=2)
    monkeypatch.setenv("RLX_CHECK", "1")
    checked = compiled(bert_graph(ENCODER), weights(ENCODER), target=target, threads=2)
    for batch, seq in [(1, 1), (2, 7), (3, 17), (1, 65), (0, 3), (2, 0)]:
        inputs = bert_inputs(ENCODER, batch, seq)
        assert same_bits(checked.run(inputs), plain.run(inputs)), (batch, seq)


@pytest.mark.parametrize("target", TARGETS)
def test_a_decoder_stays_inside_its_arrays(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = compiled(llama_graph(DECODER, past=True), weights(DECODER), target=target, threads=2)
    monkeypatch.setenv("RLX_CHECK", "1")
    checked = compiled(llama_graph(DECODER, past=True), weights(DECODER), target=target, threads=2)
    for batch, seq, past in [(1, 1, 0), (2, 1, 63), (2, 5, 64), (1, 33, 7), (3, 1, 66), (1, 0, 5), (0, 1, 1)]:
        inputs = llama_inputs(DECODER, batch, seq, past)
        assert same_bits(checked.run(inputs), plain.run(inputs)), (batch, seq, past)


@pytest.mark.parametrize("nbytes", [0, 1, 63, 4096, 5000])
def test_guarded_memory_is_not_a_number(nbytes: int) -> None:
    guard = Guarded(nbytes)
    assert guard.bytes.nbytes == nbytes and (guard.bytes == 0xFF).all()
    assert (guard.address + nbytes) % 4096 == 0


def test_aligned_memory_is_aligned() -> None:
    for nbytes in (1, 64, 1000):
        assert aligned(nbytes).ctypes.data % 64 == 0 and aligned(nbytes).nbytes == nbytes
    assert aligned(8).dtype == np.uint8
