"""What `train.py` asks of a library: steps of AdamW on a Llama. Runs in its own process.

Every library starts from the same weights and sees the same batches. Weights have Hugging Face's names and layouts,
linear ones [out, in]. A factory first makes the steps whose losses are compared, then the one that is timed is the
next. Its note has the seconds of the first step, compilation included, and the peak memory of the process so far.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from worker import Case, Prepared

Array = np.ndarray[Any, Any]
Weights = dict[str, Array]
Step = Callable[[Array, Array], Any]  # tokens and the ones after them -> the loss before the step
LR, BETAS, EPS, DECAY, NORM_EPS = 1e-3, (0.9, 0.999), 1e-8, 0.01, 1e-5
BATCHES = 4  # that are taken in turn


def weights(dims: dict[str, int]) -> Weights:
    """Normal numbers of deviation 0.02, norms of ones."""
    dim, ffn, vocab, rng = dims["dim"], dims["ffn"], dims["vocab"], np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (vocab, dim), "lm_head.weight": (vocab, dim)}
    norms = ["model.norm.weight"]
    for i in range(dims["layers"]):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.self_attn.{n}_proj.weight": (dim, dim) for n in "qkvo"}
        shapes |= {f"{at}.mlp.{n}_proj.weight": (ffn, dim) for n in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (dim, ffn)
        norms += [f"{at}.{n}_layernorm.weight" for n in ("input", "post_attention")]
    matrices = {name: rng.normal(0, 0.02, shape).astype(np.float32) for name, shape in shapes.items()}
    return matrices | {name: np.ones(dim, np.float32) for name in norms}


def batches(dims: dict[str, int]) -> list[tuple[Array, Array]]:
    rows = np.random.default_rng(1).integers(0, dims["vocab"], (BATCHES, dims["batch"], dims["seq"] + 1))
    return [(np.ascontiguousarray(r[:, :-1]), np.ascontiguousarray(r[:, 1:])) for r in rows.astype(np.int32)]


def rope_tables(dims: dict[str, int]) -> tuple[Array, Array]:
    """[seq, head / 2], for halves of a head."""
    head = dims["dim"] // dims["heads"]
    angles = np.outer(np.arange(dims["seq"]), 10000.0 ** (-np.arange(0, head, 2) / head))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def prepare(make: Callable[[dict[str, int], int], Step], case: Case, threads: int) -> Prepared:
    begun = time.perf_counter()
    step, data = make(case.dims, threads), batches(case.dims)
    losses = [float(step(*data[0]))]
    first = time.perf_counter() - begun
    losses += [float(step(*data[i % BATCHES])) for i in range(1, case.dims["losses"])]
    note = f"first step {first:.1f} s, peak memory {peak_megabytes():.0f} MB"
    return Prepared(lambda: float(step(*data[0])), lambda: np.array(losses), note=note)


def peak_megabytes() -> float:
    with open("/proc/self/status") as lines:
        line = next(line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


# ---------------------------------------------------------------------------------------------------------------------
# The libraries.


def rlx_step(dims: dict[str, int], threads: int) -> Step:
    import rlx
    from rlx.flow import ModelFlow
    from rlx.flow.stages import LlamaDecoder

    heads, head, start = dims["heads"], dims["dim"] // dims["heads"], weights(dims)

    def loss(emit: Any, logits: Any) -> Any:
        return emit.mean(emit.cross_entropy(logits, emit.input("labels", ("batch", "seq"), "i32")))

    def layer(i: int) -> Any:
        return LlamaDecoder(f"model.layers.{i}", heads, heads, head, NORM_EPS, layer_idx=i)

    flow = (
        ModelFlow("llama").input("tokens", ("batch", "seq"), "i32").rope_tables(*rope_tables(dims), "halves")
        .token_embed(shape=(dims["vocab"], dims["dim"])).repeat_layers(dims["layers"], layer).final_norm(NORM_EPS)
        .lm_head(dims["vocab"], dims["dim"], tied=False).custom(loss)
    )  # fmt: skip
    built = flow.build(start)
    step = rlx.train.step(built.module, rlx.train.adamw(LR, BETAS, EPS, DECAY), list(start), threads=threads)
    step.set_params(built.params)
    return lambda tokens, labels: step.run({"tokens": tokens, "labels": labels})


def torch_step(dims: dict[str, int], threads: int, *, compiled: bool) -> Step:
    """Written with torch's own fused functions; AdamW is the fused one too."""
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(threads)
    p = {name: torch.nn.Parameter(torch.from_numpy(array)) for name, array in weights(dims).items()}
    cos, sin = (torch.from_numpy(t)[:, None] for t in rope_tables(dims))  # [seq, 1, head / 2]
    shape = (dims["batch"], dims["seq"], dims["heads"], dims["dim"] // dims["heads"])

    def norm(x: Any, name: str) -> Any:
        return F.rms_norm(x, (dims["dim"],), p[f"{name}.weight"], NORM_EPS)

    def rotated(x: Any) -> Any:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def loss(tokens: Any, labels: Any) -> Any:
        x = F.embedding(tokens, p["model.embed_tokens.weight"])
        for i in range(dims["layers"]):
            at = f"model.layers.{i}"
            h = norm(x, f"{at}.input_layernorm")
            q, k, v = (F.linear(h, p[f"{at}.self_attn.{n}_proj.weight"]).view(shape) for n in "qkv")
            q, k, v = (t.transpose(1, 2) for t in (rotated(q), rotated(k), v))
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
            x = x + F.linear(seen, p[f"{at}.self_attn.o_proj.weight"])
            h = norm(x, f"{at}.post_attention_layernorm")
            gate, up = (F.linear(h, p[f"{at}.mlp.{n}_proj.weight"]) for n in ("gate", "up"))
            x = x + F.linear(F.silu(gate) * up, p[f"{at}.mlp.down_proj.weight"])
        logits = F.linear(norm(x, "model.norm"), p["lm_head.weight"])
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    forward: Any = torch.compile(loss, dynamic=False) if compiled else loss
    optimiser = torch.optim.AdamW(p.values(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True)

    def step(tokens: Array, labels: Array) -> Any:
        loss_value = forward(torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy(labels.astype(np.int64)))
        optimiser.zero_grad(set_to_none=True)
        loss_value.backward()
        optimiser.step()
        return loss_value.item()

    return step


def jax_step(dims: dict[str, int], threads: int) -> Step:
    """The formulas under `jax.jit`, weights and moments donated. Its pool has a thread for each core it may use."""
    if "jax" in sys.modules:
        raise RuntimeError("jax is imported already: its pool has its threads")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    import jax
    import jax.numpy as jnp

    cos, sin = (jnp.asarray(t)[:, None] for t in rope_tables(dims))
    shape = (dims["batch"], dims["seq"], dims["heads"], dims["dim"] // dims["heads"])
    seen_keys = jnp.tril(jnp.ones((dims["seq"], dims["seq"]), bool))

    def norm(x: Any, gamma: Any) -> Any:
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + NORM_EPS) * gamma

    def rotated(x: Any) -> Any:
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def loss(p: Any, tokens: Any, labels: Any) -> Any:
        x = p["model.embed_tokens.weight"][tokens]
        for i in range(dims["layers"]):
            at = f"model.layers.{i}"
            h = norm(x, p[f"{at}.input_layernorm.weight"])
            q, k, v = ((h @ p[f"{at}.self_attn.{n}_proj.weight"].T).reshape(shape) for n in "qkv")
            scores = jnp.einsum("bqhd,bkhd->bhqk", rotated(q), rotated(k)) / np.float32(np.sqrt(shape[-1]))
            shares = jax.nn.softmax(jnp.where(seen_keys, scores, -jnp.inf), -1)
            seen = jnp.einsum("bhqk,bkhd->bqhd", shares, v).reshape(x.shape)
            x = x + seen @ p[f"{at}.self_attn.o_proj.weight"].T
            h = norm(x, p[f"{at}.post_attention_layernorm.weight"])
            gate, up = (h @ p[f"{at}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
            x = x + (jax.nn.silu(gate) * up) @ p[f"{at}.mlp.down_proj.weight"].T
        logits = norm(x, p["model.norm.weight"]) @ p["lm_head.weight"].T
        picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - picked).mean()

    def update(p: Any, m: Any, v: Any, g: Any, t: Any) -> tuple[Any, Any, Any]:
        m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g * g
        m_hat, v_hat = m / (1 - BETAS[0] ** t), v / (1 - BETAS[1] ** t)
        return p * (1 - LR * DECAY) - LR * m_hat / (jnp.sqrt(v_hat) + EPS), m, v

    @functools.partial(jax.jit, donate_argnums=0)
    def run(state: Any, t: Any, tokens: Any, labels: Any) -> Any:
        p, m, v = state
        loss_value, g = jax.value_and_grad(loss)(p, tokens, labels)
        updated = {n: update(p[n], m[n], v[n], g[n], t) for n in p}
        return tuple({n: updated[n][i] for n in p} for i in range(3)), loss_value

    start = {name: jnp.asarray(array) for name, array in weights(dims).items()}
    state: Any = (start, *({n: jnp.zeros_like(a) for n, a in start.items()} for _ in range(2)))
    count = 0

    def step(tokens: Array, labels: Array) -> Any:
        nonlocal state, count
        count += 1
        state, loss_value = run(state, np.float32(count), tokens, labels)
        return float(loss_value)

    return step


def engine(make: Callable[..., Step], **options: Any) -> Callable[[Case, int], Prepared]:
    return functools.partial(prepare, functools.partial(make, **options))


rlx = engine(rlx_step)
torch_eager = engine(torch_step, compiled=False)
torch_compile = engine(torch_step, compiled=True)
jax = engine(jax_step)


if __name__ == "__main__":  # the losses of torch, for the driver: `train_engines.py THREADS DIMS`
    settings = json.loads(sys.argv[2])
    print(json.dumps(torch_eager(Case("losses", settings, 1.0, 1.0), int(sys.argv[1])).output().tolist()))  # type: ignore[misc]
