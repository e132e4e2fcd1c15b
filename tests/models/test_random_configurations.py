"""A fuzzer of configurations: random small models of `transformers`, read by rlx, must give the same numbers.

500 cases with fixed seeds by default; `pytest -m parity tests/models/test_random_configurations.py --first 100000
--cases 2000` tries others. A case is equal, or refused by a typed error that names the field; anything else fails.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_configurations import Case, random_case
from small_llama import Driver

from rlx.errors import CapabilityError, FormatError
from rlx.models.load import open_checkpoint

pytestmark = pytest.mark.parity
Array = np.ndarray[Any, Any]
CASES = 500
GROUP = 25  # cases of a test, so that workers share them
COMPILED = 5  # one of so many cases is computed by machine code too; the others by NumPy, which needs no compiler
TOLERANCE = 2e-4
UNSTABLE = 20  # times what transformers itself differs by between float32 and float64


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" in metafunc.fixturenames:
        option = metafunc.config.option
        asked = any(word.startswith("--cases") for word in metafunc.config.invocation_params.args)
        count = option.cases if asked else CASES
        seeds = range(option.first, option.first + count, GROUP)
        last = option.first + count
        metafunc.parametrize("seeds", [range(at, min(at + GROUP, last)) for at in seeds], ids=lambda r: f"{r.start}-")


def test_random_configurations_equal_transformers(seeds: range, record_property: Any) -> None:
    outcomes = Counter[str]()
    differences = []
    for seed in seeds:
        case = random_case(seed)
        with tempfile.TemporaryDirectory() as folder:
            outcome = compare(case, Path(folder), compiled=seed % COMPILED == 0)
        outcomes[outcome.partition(":")[0]] += 1
        if outcome.startswith("different"):
            differences.append(f"{seed} {case.name}: {outcome}")
    print(f"seeds {seeds.start} to {seeds.stop - 1}: {dict(outcomes)}")
    for name, count in outcomes.items():
        record_property(name, count)
    assert not differences, "\n".join(differences)


def compare(case: Case, folder: Path, *, compiled: bool) -> str:
    """equal, refused: why, or different: by how much."""
    model = built(case, folder)
    try:
        checkpoint = open_checkpoint(folder)
        flow = checkpoint.family.flow
        if case.kind == "decoder":
            flow(checkpoint.config, checkpoint.config.context, checkpoint.rope_factors).build(checkpoint.weights)
        else:
            flow(checkpoint.config).build(checkpoint.weights)
    except (CapabilityError, FormatError) as error:
        if any(name in str(error) for name in case.refusable):
            return f"refused: {error}"
        return f"different: refused without need: {error}"
    wanted, inputs = computed(model, case)
    for device in ("reference", "cpu") if compiled else ("reference",):
        for actual in answers(checkpoint, case, inputs, device):
            apart = difference(actual, wanted)
            if apart > TOLERANCE and apart > UNSTABLE * difference(wanted, computed(model.double(), case)[0]):
                return f"different: {apart:.2g} on {device}"
    return "equal"


# -- transformers ----------------------------------------------------------------------------------------------------
def built(case: Case, folder: Path) -> Any:
    """A model with random weights, and the folder that it is saved in."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    config = getattr(transformers, f"{case.name}Config")(**case.settings)
    config._experts_implementation = "eager"  # the other one takes only sizes that are multiples of 16 bytes
    model = class_of(case, transformers)(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            randomise(name, value)
    model.to(getattr(torch, case.dtype)).save_pretrained(folder)
    if case.dtype != "float32":  # `.to` has rounded the frequencies of RoPE too
        model = type(model).from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()
    path = folder / "config.json"
    said = {n: v for n, v in json.loads(path.read_text()).items() if n not in case.omitted}
    if case.older:
        rope = said.pop("rope_parameters")
        said |= {n: rope.pop(n) for n in ("rope_theta", "partial_rotary_factor") if n in rope}
        said["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    path.write_text(json.dumps(said))
    if case.embeds:
        (folder / "modules.json").write_text("[]")
    if case.other_head:
        give_head(folder, model)
        model = type(model).from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()
    return model


def class_of(case: Case, transformers: Any) -> Any:
    plain = case.name.removesuffix("Text")
    if case.kind != "decoder" and not case.embeds:
        return getattr(transformers, f"{case.name}Model")
    return getattr(transformers, f"{plain}ForCausalLM", None) or getattr(transformers, f"{plain}LMHeadModel")


def randomise(name: str, value: Any) -> None:
    """Numbers that every part of the model shows in the result: neither zeros, nor ones, nor very small."""
    if name.endswith(("A_log", "dt_bias", "dt_proj.bias")):
        return
    if value.ndim == 1 and (name.endswith("bias") or "bias" in name.rpartition(".")[2]):
        value.normal_(0, 0.3)
    elif value.ndim == 1:
        value.normal_(1, 0.3)
    else:
        value.normal_(0, 0.5 if "embed" in name else value.shape[-1] ** -0.5)


def give_head(folder: Path, model: Any) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    head = model.get_output_embeddings().weight.detach().clone().normal_()
    save_file({**load_file(path), "lm_head.weight": head}, path, {"format": "pt"})


def computed(model: Any, case: Case) -> tuple[Array, dict[str, Array]]:
    """Logits or hidden states, and what they are of."""
    import torch

    rng = np.random.default_rng(3)
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        if case.kind == "vision":
            size = case.settings["image_size"]
            pixels = rng.standard_normal((2, 3, size, size)).astype(np.float32)
            result = model(torch.from_numpy(pixels).to(dtype)).last_hidden_state
            return result.numpy(), {"pixels": pixels}
        longest = case.settings.get("max_position_embeddings", case.settings.get("n_positions", 48))
        pad = case.settings.get("pad_token_id", 0) if case.kind == "encoder" else 0
        length = max(min(case.length, longest - (pad + 2 if case.kind == "encoder" else 0)), 1)
        tokens = rng.integers(4, case.settings["vocab_size"], length).astype(np.int32)
        if case.kind == "decoder":
            fresh(model)
            result = model(torch.from_numpy(tokens[None]).long(), use_cache=False).logits[0]
            return result.numpy(), {"tokens": tokens}
        encoder = model.model if case.embeds else model
        rows = []
        for text in texts(tokens):
            fresh(model)
            rows.append(encoder(torch.from_numpy(text[None]).long()).last_hidden_state[0].numpy())
        return np.concatenate(rows), {"tokens": tokens}


def texts(tokens: Array) -> list[Array]:
    """What an encoder is given: all tokens, and the first half of them, which is padded in a batch of both."""
    return [tokens, tokens[: (tokens.size + 1) // 2]]


def fresh(model: Any) -> None:
    """Dynamic frequencies stay as the longest text has left them."""
    for module in model.modules():
        if hasattr(module, "original_inv_freq"):
            module.register_buffer("inv_freq", module.original_inv_freq, persistent=False)
            module.max_seq_len_cached = module.original_max_seq_len


# -- rlx -------------------------------------------------------------------------------------------------------------
def answers(checkpoint: Any, case: Case, arrays: dict[str, Array], device: str) -> list[Array]:
    """The same in each way of computing it."""
    if case.kind == "decoder":
        tokens = arrays["tokens"].tolist()
        driver = Driver.of(checkpoint, context=min(checkpoint.config.context, 192), device=device)
        chunks = [len(tokens)] if device == "reference" else [len(tokens), 5]  # which writes no states in place
        return [driver.by_chunks(tokens, chunk) for chunk in chunks]
    compiled = checkpoint.family.flow(checkpoint.config).build(checkpoint.weights).compile(device)
    if case.kind == "vision":
        return [compiled.run(checkpoint.config.inputs(arrays["pixels"]))[1]]
    rows = texts(arrays["tokens"])
    mask = np.array([np.arange(rows[0].size) < row.size for row in rows])
    tokens = np.where(mask, rows[0], case.settings.get("pad_token_id", 0)).astype(np.int32)
    positions = np.broadcast_to(np.arange(rows[0].size, dtype=np.int32), tokens.shape)
    inputs = {
        "tokens": tokens, "token_types": np.zeros_like(tokens), "attention_mask": mask.astype(np.float32),
        "positions": positions,
    }  # fmt: skip
    return [compiled.run({n: inputs[n] for n in compiled.input_types})[0][mask]]


def difference(actual: Array, wanted: Array) -> float:
    assert actual.shape == wanted.shape
    return float(np.abs(actual - wanted).max() / max(np.abs(wanted).max(), 1e-30))
