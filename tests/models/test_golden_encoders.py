"""Encoders and vision models against what `transformers` gave once: these run everywhere."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_encoders import FOLDER, LENGTHS, PROCESSORS, batch, picture, write_folder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference_encoders import TOLERANCE, difference

import rlx
from rlx.errors import RlxError
from rlx.models.load import open_checkpoint
from rlx.profile import Fusion

TEXTS = ("bert", "roberta", "nomic_bert", "modernbert", "embeddinggemma")  # docs/adding-a-model.md has MPNet


def golden(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return result


@pytest.mark.parametrize("name", TEXTS)
def test_texts_of_unequal_length_have_the_states_of_transformers(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path, golden(name))
    checkpoint = open_checkpoint(tmp_path)
    built = checkpoint.family.flow(checkpoint.config).build(checkpoint.weights)
    inputs = batch()
    f = built.compile()
    (actual,) = f.run({name: inputs[name] for name in f.input_types})
    for row, length, wanted in zip(actual, LENGTHS, golden(name)["states"], strict=True):
        assert difference(row[:length], np.array(wanted)) < TOLERANCE


@pytest.mark.parametrize("policy", ["direct", "fusable"])
@pytest.mark.parametrize("name", [*TEXTS, *PROCESSORS])
def test_both_ways_of_lowering_give_the_same(tmp_path: Path, name: str, policy: str) -> None:
    write_folder(tmp_path, golden(name))
    checkpoint = open_checkpoint(tmp_path)
    profile = rlx.CompileProfile(fusion=Fusion(policy=rlx.FusionPolicy(policy)))
    built = checkpoint.family.flow(checkpoint.config).profile(profile).build(checkpoint.weights)
    inputs = {**batch(), "pixels": np.array([golden(name).get("pixels", 0)], np.float32)}
    if name in PROCESSORS:
        inputs |= checkpoint.config.inputs(inputs["pixels"])
    f = built.compile()
    actual = f.run({name: inputs[name] for name in f.input_types})[0][0]
    wanted = golden(name)["pooled"] if name in PROCESSORS else golden(name)["states"][0]
    assert difference(actual, np.array(wanted)) < TOLERANCE


@pytest.mark.parametrize("name", PROCESSORS)
def test_images_have_the_vectors_of_transformers(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path, golden(name))
    model = rlx.load(tmp_path)
    assert isinstance(model, rlx.VisionModel)
    wanted = golden(name)
    assert difference(model.prepare(picture()), np.array(wanted["pixels"])) < 1e-5
    assert difference(model.encode_image(picture()), np.array(wanted["pooled"])) < TOLERANCE
    assert difference(model.encode_image(picture(), tokens=True), np.array(wanted["states"])) < TOLERANCE


# -- hostile files ---------------------------------------------------------------------------------------------------
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = {name: sorted(golden(name)["config"]) for name in (*TEXTS, *PROCESSORS)}
OTHERS = ("n_embd", "activation_function", "rotary_scaling_factor", "vision_config", "global_attn_every_n_layers",
          "rope_parameters", "layer_types", "model_type", "local_rope_theta", "num_channels")  # fmt: skip


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), name=st.sampled_from([*TEXTS, *PROCESSORS]))
def test_any_configuration_gives_a_model_or_a_typed_error(tmp_path: Path, data: st.DataObject, name: str) -> None:
    folder = tmp_path / name
    known = golden(name)
    if not folder.exists():
        write_folder(folder, known)
    changes = data.draw(st.dictionaries(st.sampled_from([*KEYS[name], *OTHERS]), JSON, min_size=1, max_size=3))
    (folder / "config.json").write_text(json.dumps({**known["config"], **changes}))
    begin = time.process_time()
    with contextlib.suppress(RlxError):
        checkpoint = open_checkpoint(folder)
        if checkpoint.family.kind != "decoder":
            checkpoint.family.flow(checkpoint.config).build(checkpoint.weights)
    assert time.process_time() - begin < 3
