"""Every family on a GPU: in f32 the results of `transformers`, in bf16 near those of the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from golden_encoders import LENGTHS, PROCESSORS, batch, write_folder
from reference_encoders import difference
from test_golden import NAMES, Golden
from test_golden_encoders import TEXTS, golden

import rlx
from rlx.cli.verify import divergence_of
from rlx.engine.language_model import LanguageModel
from rlx.models.load import open_checkpoint

pytestmark = pytest.mark.gpu
TOLERANCE = 5e-4  # of logits in f32
DIVERGENCE = 0.02  # mean KL in nats between bf16 on the GPU and on the CPU; the models are random, with few dimensions


def decoder(folder: Path, **settings: str) -> LanguageModel:
    model = rlx.load(folder, **settings)
    assert isinstance(model, LanguageModel)
    return model


@pytest.mark.parametrize("name", NAMES)
def test_a_decoder_gives_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    case = Golden(name)
    with decoder(case.folder(tmp_path), device="cuda", precision="f32") as model:
        for row, wanted in zip(case.rows, case.logits, strict=True):
            assert difference(model.logits(row), wanted) < TOLERANCE
        together = model.generate(case.rows, max_tokens=6, logprobs=1)
        for row, completion in zip(case.rows, together, strict=True):
            model.caches.clear()
            alone = model.generate(row, max_tokens=6, logprobs=1)
            assert (alone.tokens, alone.logprobs) == (completion.tokens, completion.logprobs)  # the same bits


@pytest.mark.parametrize("name", NAMES)
def test_a_decoder_in_bf16_is_near_the_cpu(tmp_path: Path, name: str) -> None:
    case, (wide, narrow) = Golden(name), (tmp_path / "f32", tmp_path / "bf16")
    wide.mkdir()
    with decoder(case.folder(wide)) as model:
        model.save(narrow, dtype="bf16")
    with decoder(narrow) as on_cpu, decoder(narrow, device="cuda") as on_gpu:
        assert on_gpu.cache_dtype == "bf16"
        for row in case.rows:
            divergence, _ = divergence_of(on_cpu.logits(row), on_gpu.logits(row))
            assert divergence < DIVERGENCE


@pytest.mark.parametrize("name", [*TEXTS, *PROCESSORS])
def test_an_encoder_gives_the_results_of_transformers(tmp_path: Path, name: str) -> None:
    case = golden(name)
    write_folder(tmp_path, case)
    checkpoint = open_checkpoint(tmp_path)
    built = checkpoint.family.flow(checkpoint.config).build(checkpoint.weights)
    inputs = {**batch(), "pixels": np.array([case.get("pixels", 0)], np.float32)}
    if name in PROCESSORS:
        inputs |= checkpoint.config.inputs(inputs["pixels"])
    compiled = rlx.compile(built, "cuda")
    results = np.asarray(compiled.run({n: inputs[n] for n in compiled.input_types})[0])
    wanted = [case["pooled"]] if name in PROCESSORS else case["states"]
    lengths = [None] if name in PROCESSORS else LENGTHS
    for row, length, expected in zip(results, lengths, wanted, strict=False):
        assert difference(row[:length], np.array(expected)) < TOLERANCE
