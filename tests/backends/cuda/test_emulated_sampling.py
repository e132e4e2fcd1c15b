"""Sampling over a vocabulary of many blocks, on an emulated GPU: the tokens of the reference, draw by draw."""

from __future__ import annotations

import numpy as np
import pytest
from emulator import Changes, emulated_gpu, missing

import rlx

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
VOCAB = 5000  # 20 blocks, the last one not full
SETTINGS = [  # temperature, top_k, top_p, min_p
    (0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 40, 1.0, 0.0), (0.9, 0, 0.8, 0.0), (1.3, 300, 0.95, 0.0),
    (1.0, 0, 1.0, 0.02), (100.0, 0, 0.9, 0.0), (500.0, 4500, 0.5, 0.0),
]  # fmt: skip


@pytest.mark.parametrize("changes", [Changes(), Changes(lanes=64)], ids=["1024 threads", "64 threads"])
def test_tokens_are_those_of_the_reference(changes: Changes) -> None:
    rows = len(SETTINGS)
    g = rlx.Graph("sample")
    operands = [g.input("logits", (rows, VOCAB)), g.input("uniform", (rows,), "f64")]
    operands += [g.input(n, (rows,), d) for n, d in (("t", "f32"), ("k", "i32"), ("p", "f64"), ("m", "f32"))]
    g.set_outputs(list(g.apply("sample_tokens", *operands)))
    rng = np.random.default_rng(4)
    temperature, top_k, top_p, min_p = (np.array(column) for column in zip(*SETTINGS, strict=True))
    inputs = {
        "logits": (3 * rng.standard_normal((rows, VOCAB))).astype(np.float32), "uniform": rng.random(rows),
        "t": temperature.astype(np.float32), "k": top_k.astype(np.int32), "p": top_p, "m": min_p.astype(np.float32),
    }  # fmt: skip
    wanted = rlx.compile(g, "reference").run(inputs)
    with emulated_gpu(changes):
        results = rlx.compile(g, "cuda").run(inputs)
        tokens, scores = (np.asarray(result) for result in results)
    np.testing.assert_array_equal(tokens, np.asarray(wanted[0]))
    np.testing.assert_allclose(scores, np.asarray(wanted[1]), rtol=1e-5, atol=1e-5)
