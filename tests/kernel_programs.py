"""Ten programs that together use every kind of kernel: small models and graphs, built the same way each time.

Nothing is run. `plan` makes their LIR for a target, which need not be this machine's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import golden_encoders
import numpy as np
import small_llama
import tiny_mamba

import rlx
from rlx.dtypes import BY_NAME
from rlx.flow.built import BuiltModel
from rlx.flow.weights import MapWeights
from rlx.ir.graph import Graph
from rlx.lir.module import LirModule, plan_lir
from rlx.models.load import open_checkpoint
from rlx.profile import CompileProfile, Precision
from rlx.target import Target
from rlx.train import adamw
from rlx.train.step import step_graph

FIXTURES = Path(__file__).parent / "fixtures"
PACKED = {"down_proj": "q6_k", "v_proj": "q8_0", "lm_head": "q5_k", "embed_tokens": "q4_0"}  # the rest is q4_k
FLOAT, INT8 = CompileProfile(), CompileProfile(precision=Precision(compute="int8"))
INT8_ACTIVATIONS = CompileProfile(precision=Precision(activations="int8"))


def _decoder(folder: Path, weights: Mapping[str, Any] | None = None) -> Graph:
    """The graph of the decoder in a folder, with other weights if given."""
    checkpoint = open_checkpoint(folder)
    flow = checkpoint.family.flow(checkpoint.config, checkpoint.config.context, checkpoint.rope_factors)
    built: BuiltModel = flow.build(checkpoint.weights if weights is None else MapWeights(weights))
    return built.module


def _golden(folder: Path, name: str, stored: Any = np.float16) -> Graph:
    with np.load(FIXTURES / "models" / f"{name}.npz") as file:
        arrays = dict(file)
    settings = json.loads(str(arrays.pop("config")))
    weights = {n: a.astype(stored) for n, a in arrays.items() if not n.startswith(("tokens.", "logits."))}
    return _decoder(small_llama.write_folder(folder, weights, settings))


def _encoder(folder: Path) -> Graph:
    golden_encoders.write_folder(folder, json.loads((FIXTURES / "encoders" / "bert.json").read_text()))
    checkpoint = open_checkpoint(folder)
    built: BuiltModel = checkpoint.family.flow(checkpoint.config).build(checkpoint.weights)
    return built.module


def _llama(folder: Path) -> Graph:
    settings = small_llama.SETTINGS
    return _decoder(small_llama.write_folder(folder, small_llama.random_weights(settings), settings))


def _packed_llama(folder: Path) -> Graph:
    """Matrices of several packed types, as files mix them."""
    settings = small_llama.SETTINGS | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    weights = small_llama.random_weights(settings)
    packed: dict[str, Any] = {}
    for name, array in weights.items():
        storage = BY_NAME[next((kind for part, kind in PACKED.items() if part in name), "q4_k")]
        blocks = (*array.shape[:-1], array.shape[-1] // storage.block)
        packed[name] = array if array.ndim == 1 else np.zeros(blocks, storage.numpy)
    return _decoder(small_llama.write_folder(folder, weights, settings), packed)


def _mamba(folder: Path) -> Graph:
    tiny_mamba.write(folder)
    return _decoder(folder)


def _training_step(folder: Path) -> Graph:
    g = rlx.Graph("classifier")
    x, labels = g.input("x", ("n", 24)), g.input("labels", ("n",), "i32")
    w, gamma, v = g.param("w", (24, 40)), g.param("gamma", (40,)), g.param("v", (40, 10))
    hidden = g.one("rms_norm", (x @ w).gelu(), gamma, eps=1e-5)
    g.set_outputs([g.one("cross_entropy", hidden @ v, labels).mean()])
    return step_graph(g, adamw(1e-3), clip=1.0).graph


def _delta_net(folder: Path) -> Graph:
    """The gated delta net and its gradients, whose states are 32 by 32."""
    g = rlx.Graph("delta_net")
    q, k, v = (g.input(name, (2, "seq", 3, 32)) for name in ("q", "k", "v"))
    gate, beta = (g.input(name, (2, "seq", 3)) for name in ("gate", "beta"))
    out = g.one("gated_delta_net", q, k, v, gate, beta, state_size=32)
    g.set_outputs([out.sum()])
    return rlx.transforms.value_and_grad(g, ["q", "k", "v", "gate", "beta"])


def _attention_gradient(folder: Path) -> Graph:
    g = rlx.Graph("attention_gradient")
    q = g.input("q", ("batch", "seq", 6, 16))
    k, v = (g.input(name, ("batch", "seq", 2, 16)) for name in ("k", "v"))
    g.set_outputs([g.one("attention", q, k, v, mask_kind="causal").sum()])
    return rlx.transforms.value_and_grad(g, ["q", "k", "v"])


def _gemma(folder: Path) -> Graph:
    return _golden(folder, "gemma3")


def _mixture(folder: Path) -> Graph:
    return _golden(folder, "qwen3_moe")


def _wide_mixture(folder: Path) -> Graph:
    return _golden(folder, "qwen3_moe", np.float32)


PROGRAMS: dict[str, tuple[Callable[[Path], Graph], CompileProfile]] = {
    "encoder_f32": (_encoder, FLOAT), "encoder_int8": (_encoder, INT8),
    "llama_packed": (_packed_llama, INT8_ACTIVATIONS), "llama_f32": (_llama, FLOAT),
    "gemma3": (_gemma, FLOAT), "mamba": (_mamba, FLOAT),
    "training_step": (_training_step, FLOAT), "delta_net": (_delta_net, FLOAT),
    "attention_gradient": (_attention_gradient, FLOAT), "moe": (_mixture, FLOAT),
    "moe_f32": (_wide_mixture, FLOAT),
}  # fmt: skip


def plan(name: str, folder: Path, target: Target) -> LirModule:
    """The main and the bind program of one of the ten, whose files go to an empty folder."""
    build, profile = PROGRAMS[name]
    return plan_lir(build(folder), target, profile)
