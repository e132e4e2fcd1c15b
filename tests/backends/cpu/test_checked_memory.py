"""`RLX_CHECK=1`: every array lies between inaccessible pages and begins as NaN. No kernel strays; one that did dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_llama
from layers import Bert, Llama, bert_graph, bert_inputs, compiled, llama_graph, llama_inputs, same_bits, weights
from limits import LONGEST_S
from targets import supported

import rlx
from rlx.backends.cpu.memory import PAGE, Guarded, alloc_aligned, guarded_scratch, guarded_stride
from rlx.dtypes import BY_NAME
from rlx.engine.language_model import LanguageModel
from rlx.engine.load import load
from rlx.ir.registry import packed
from rlx.profile import CompileProfile, Precision
from rlx.train import adamw, step

Array = np.ndarray[Any, Any]

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


@pytest.mark.parametrize("storage", ["q4_k", "q6_k", "q8_0"])
def test_products_of_packed_weights_stay_inside_their_arrays(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    n, k = 75, 3 * BY_NAME[storage].block
    g = rlx.Graph("gated")
    x = g.input("x", ("rows", k))
    gate, up = (x @ g.param(name, (n, k), storage).dequantise().mT for name in ("gate", "up"))
    g.set_outputs([gate.silu() * up])
    rng = np.random.default_rng(0)
    arrays = {name: packed(storage, n, k).array(rng) for name in ("gate", "up")}
    profile = CompileProfile(precision=Precision(activations="int8"))
    runs = []
    for check in ("0", "1"):
        monkeypatch.setenv("RLX_CHECK", check)
        runs.append(rlx.compile(g, threads=2, profile=profile))
        runs[-1].set_params(arrays)
    for rows in (1, 3, 37):
        inputs = {"x": rng.standard_normal((rows, k)).astype(np.float32)}
        assert same_bits(*(f.run(inputs) for f in runs)), rows


def test_a_language_model_stays_inside_its_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_llama.write(tmp_path)
    prompt, outputs = list(range(1, 40)), []
    for check in ("0", "1"):
        monkeypatch.setenv("RLX_CHECK", check)
        with load(tmp_path, threads=2) as model:
            assert isinstance(model, LanguageModel)
            done = model.generate(prompt, max_tokens=8, temperature=0.0)
            outputs.append((done.tokens, model.logits([*prompt, *done.tokens]).tobytes()))
    assert outputs[0] == outputs[1]


def test_training_stays_inside_its_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    g = rlx.Graph("regression")
    x, w, v = g.input("x", ("n", 5)), g.param("w", (5, 41)), g.param("v", (41, 3))
    g.set_outputs([((x @ w).tanh() @ v).softmax().log().mean()])
    rng = np.random.default_rng(0)
    start = {n: rng.standard_normal(s).astype(np.float32) for n, s in {"w": (5, 41), "v": (41, 3)}.items()}
    batch, trained = {"x": rng.standard_normal((17, 5)).astype(np.float32)}, []
    for check in ("0", "1"):
        monkeypatch.setenv("RLX_CHECK", check)
        training_step = step(g, adamw(0.01), clip=1.0)
        training_step.set_params(start)
        for _ in range(3):
            training_step.run(batch)
        trained.append({name: array.tobytes() for name, array in training_step.params.items()})
    assert trained[0] == trained[1] and trained[0]["w"] != start["w"].tobytes()


# -- programs that stray ----------------------------------------------------------------------------------------------
TAMPERED = """
import sys
import numpy as np
import rlx
from rlx.backends.cpu.executable import CpuExecutable
from rlx.errors import KernelError

kind, which, by = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
make_size_plan = CpuExecutable._make_size_plan

def tampered(self, key):
    if self.layout.name == "chain" and kind == "scratch":
        object.__setattr__(self.layout, "scratch", self.layout.scratch + by)
    size_plan = make_size_plan(self, key)
    if self.layout.name == "chain" and kind == "units":
        size_plan.units[which] += by
    elif self.layout.name == "chain" and kind != "scratch":
        size_plan.words[self.layout.pointers[kind].positions[which]] += by
    return size_plan

CpuExecutable._make_size_plan = tampered
g = rlx.Graph("chain")
x, w, v = g.input("x", ("rows", 40)), g.param("w", (40, 64)), g.input("v", (64, 30))
g.set_outputs([(x @ w).tanh() @ v])
f = rlx.compile(g, threads=2)
f.set_param("w", np.ones((40, 64), np.float32))
try:
    (y,) = f.run({"x": np.ones((200, 40), np.float32), "v": np.ones((64, 30), np.float32)})
    print(np.isnan(y).any(axis=1).sum())
except KernelError as error:
    print(error)
"""


def tampered(kind: str, which: int, by: int, *, check: bool = True) -> tuple[int, str]:
    """The exit status of a chain of two products of which something has been changed, and what it printed.

    The second pointer of a kind is the second launch's.
    """
    package = Path(rlx.__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-c", TAMPERED, kind, str(which), str(by)], capture_output=True, text=True, timeout=LONGEST_S,
        check=False, env={**os.environ, "RLX_CHECK": "1" if check else "0", "PYTHONPATH": str(package)},
    )  # fmt: skip
    return done.returncode, done.stdout.strip()


@pytest.mark.parametrize(
    ("kind", "which", "by"),
    [
        pytest.param("buffer", 0, 4, id="written past its end"),
        pytest.param("buffer", 1, 4, id="read past its end"),
        pytest.param("buffer", 1, -PAGE, id="read before its beginning"),
        pytest.param("weight", 0, 4, id="a weight read past its end"),
        pytest.param("scratch", 0, -64, id="scratch used past its end"),
    ],
)
def test_a_kernel_that_strays_dies(kind: str, which: int, by: int) -> None:
    assert tampered(kind, which, by)[0] == -signal.SIGSEGV


def test_an_unchanged_program_runs_and_without_checks_nobody_sees_a_kernel_stray() -> None:
    assert tampered("buffer", 0, 0) == (0, "0")
    assert tampered("buffer", 0, 4, check=False)[0] == 0


def test_a_kernel_that_writes_a_little_before_an_array_is_found() -> None:
    status, printed = tampered("buffer", 0, -4)
    assert status == 0 and "a kernel has written before the beginning of" in printed


def test_what_was_never_written_is_not_a_number() -> None:
    status, printed = tampered("units", 0, -1)
    assert status == 0 and 0 < int(printed) < 200


# -- memory -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("scratch", "private"), [(64, 0), (4096, 8), (65600, 5000)])
def test_guarded_scratch_ends_at_a_page(scratch: int, private: int) -> None:
    stride = guarded_stride(scratch, private)
    memory = guarded_scratch(scratch, private, 2)
    for thread in (0, stride):
        assert (memory.ctypes.data + thread + scratch) % PAGE == 0
        for first, size in ((thread, scratch), (thread + scratch + PAGE, private)):
            assert (memory[first : first + size] == 0xFF).all()


@pytest.mark.parametrize("nbytes", [0, 1, 63, 4096, 5000])
def test_guarded_memory_is_not_a_number(nbytes: int) -> None:
    guard = Guarded(nbytes)
    assert guard.bytes.nbytes == nbytes and (guard.bytes == 0xFF).all()
    assert (guard.address + nbytes) % 4096 == 0


def test_aligned_memory_is_aligned() -> None:
    for nbytes in (1, 64, 1000):
        assert alloc_aligned(nbytes).ctypes.data % 64 == 0 and alloc_aligned(nbytes).nbytes == nbytes
    assert alloc_aligned(8).dtype == np.uint8
