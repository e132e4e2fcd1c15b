"""Whole layers on the CPU: a BERT encoder and a Llama decoder against NumPy float64 and against torch, on every target.

Also that their bits depend neither on the number of threads nor on how a prompt is cut into runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from layers import (
    BERT_EPS,
    LLAMA_EPS,
    MINILM,
    SMOLLM,
    Array,
    Bert,
    Llama,
    Weights,
    bert_graph,
    bert_inputs,
    bert_numpy,
    compiled,
    llama_graph,
    llama_inputs,
    llama_numpy,
    relative,
    same_bits,
    weights,
)
from targets import supported

import rlx

TOLERANCE = 1e-5
TARGETS = [t.name for t in supported()]
BERTS = [Bert(hidden=60, heads=3, ffn=77), Bert(hidden=35, heads=7, ffn=129, layers=2), MINILM]
LLAMAS = [
    Llama(hidden=50, heads=3, kv_heads=1, head_dim=20, ffn=77, layers=2, context=160),
    Llama(hidden=33, heads=5, kv_heads=5, head_dim=20, ffn=45, context=160),
    Llama(hidden=24, heads=9, kv_heads=3, head_dim=6, ffn=40, context=160),
    SMOLLM,
]
BATCH_SEQ = [(1, 1), (2, 7), (3, 17), (1, 0), (0, 4), (1, 63), (1, 64), (2, 65)]


def sizes_id(value: object) -> str | None:
    if isinstance(value, Bert):
        return f"bert{value.hidden}x{value.heads}"
    return f"llama{value.hidden}x{value.heads}/{value.kv_heads}" if isinstance(value, Llama) else None


def assert_close(have: Sequence[Array], want: Sequence[Array], where: object) -> None:
    assert len(have) == len(want)
    for i, (a, b) in enumerate(zip(have, want, strict=True)):
        assert relative(a, b) <= TOLERANCE, f"output {i} at {where}: {relative(a, b):.2g} apart"


def on_threads(graph: rlx.Graph, params: Weights, target: str) -> Callable[[dict[str, Array]], list[Array]]:
    """A function that runs the graph on one and on two threads, checks that the bits agree, and gives the outputs."""
    one, two = (compiled(graph, params, target=target, threads=n) for n in (1, 2))

    def run(inputs: dict[str, Array]) -> list[Array]:
        outputs = one.run(inputs)
        assert same_bits(outputs, two.run(inputs))
        return outputs

    return run


# -- against NumPy ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("sizes", BERTS, ids=sizes_id)
def test_a_bert_encoder_is_what_numpy_computes(sizes: Bert, target: str) -> None:
    params = weights(sizes)
    run = on_threads(bert_graph(sizes), params, target)
    for batch, seq in BATCH_SEQ:
        inputs = bert_inputs(sizes, batch, seq)
        assert_close(run(inputs), bert_numpy(sizes, params, **inputs), (batch, seq))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("sizes", LLAMAS, ids=sizes_id)
def test_a_llama_decoder_is_what_numpy_computes(sizes: Llama, target: str) -> None:
    params = weights(sizes)
    run = on_threads(llama_graph(sizes), params, target)
    for batch, seq in BATCH_SEQ:
        inputs = llama_inputs(sizes, batch, min(seq, sizes.context))
        assert_close(run(inputs), llama_numpy(sizes, params, **inputs), (batch, seq))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("sizes", LLAMAS, ids=sizes_id)
def test_a_llama_decoder_with_a_past_is_what_numpy_computes(sizes: Llama, target: str) -> None:
    params = weights(sizes)
    run = on_threads(llama_graph(sizes, past=True), params, target)
    for batch, seq, past in [(1, 1, 0), (2, 1, 1), (3, 1, 64), (2, 7, 5), (1, 0, 3), (0, 1, 3), (1, 5, 129)]:
        inputs = llama_inputs(sizes, batch, seq, past)
        assert_close(run(inputs), llama_numpy(sizes, params, **inputs), (batch, seq, past))


def test_a_row_that_sees_no_token_gets_zeros_from_attention() -> None:
    sizes = BERTS[0]
    params = weights(sizes)
    inputs = bert_inputs(sizes, 2, 5) | {"mask": np.array([[0] * 5, [1] * 5], np.float32)}
    assert_close(compiled(bert_graph(sizes), params).run(inputs), bert_numpy(sizes, params, **inputs), "no token")


def test_hidden_tokens_do_not_change_the_others_by_a_bit() -> None:
    sizes = BERTS[0]
    f = compiled(bert_graph(sizes), weights(sizes))
    inputs = bert_inputs(sizes, 1, 9)
    inputs["mask"] = np.array([[1] * 6 + [0] * 3], np.float32)
    noisy = {**inputs, "x": inputs["x"].copy()}
    noisy["x"][:, 6:] = np.nan
    assert same_bits([f.run(inputs)[0][:, :6]], [f.run(noisy)[0][:, :6]])


# -- how a prompt is cut ------------------------------------------------------------------------------------------
def run_steps(f: rlx.CompiledGraph, sizes: Llama, inputs: dict[str, Array], ends: Sequence[int]) -> list[Array]:
    """Give the tokens in pieces that stop at `ends`; gives the states of all tokens, and the last keys and values."""
    batch = inputs["x"].shape[0]
    names = [f"{n}{i}" for i in range(sizes.layers) for n in "kv"]
    past = {n: np.zeros((batch, 0, sizes.kv_heads, sizes.head_dim), np.float32) for n in names}
    pieces, start = [], 0
    for end in ends:
        piece = {n: np.ascontiguousarray(a[:, start:end]) for n, a in inputs.items()}
        states, *cached = f.run(piece | past)
        past = dict(zip(names, cached, strict=True))
        pieces.append(states)
        start = end
    return [np.concatenate(pieces, axis=1), *past.values()]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("sizes", LLAMAS[:3], ids=sizes_id)
def test_one_token_at_a_time_gives_the_bits_of_the_whole_prompt(sizes: Llama, target: str) -> None:
    params, tokens = weights(sizes), 133
    full = compiled(llama_graph(sizes), params, target=target)
    by_one = compiled(llama_graph(sizes, past=True, seq=1), params, target=target)
    in_pieces = compiled(llama_graph(sizes, past=True), params, target=target)
    inputs = llama_inputs(sizes, 2, tokens)
    states, *cached = run_steps(by_one, sizes, inputs, range(1, tokens + 1))
    assert_close([states], full.run(inputs), "one by one")
    assert same_bits([states], full.run(inputs))
    for ends in ([tokens], [1, 2, 64, 65, 100, tokens], [63, 63, tokens]):
        assert same_bits([states, *cached], run_steps(in_pieces, sizes, inputs, ends)), ends


def test_batch_neighbours_do_not_change_a_row_by_a_bit() -> None:
    sizes = LLAMAS[0]
    f = compiled(llama_graph(sizes, past=True), weights(sizes))
    inputs = llama_inputs(sizes, 5, 9, 70)
    together = f.run(inputs)
    for row in range(5):
        alone = f.run({n: a[row : row + 1] for n, a in inputs.items()})
        assert same_bits(alone, [t[row : row + 1] for t in together])


# -- against torch ------------------------------------------------------------------------------------------------
def bert_torch(torch: Any, sizes: Bert, params: Weights, x: Array, mask: Array) -> list[Array]:
    F, p = torch.nn.functional, {n: torch.from_numpy(w) for n, w in params.items()}
    h = torch.from_numpy(x)

    def linear(value: Any, name: str) -> Any:
        return F.linear(value, p[name].T, p[f"{name}.bias"])

    def norm(value: Any, name: str) -> Any:
        return F.layer_norm(value, (sizes.hidden,), p[name], p[f"{name}.bias"], BERT_EPS)

    keep = torch.from_numpy(mask > 0.5)[:, None, None, :]
    for i in range(sizes.layers):
        q, k, v = (linear(h, f"{i}.{n}").unflatten(-1, (sizes.heads, -1)).transpose(1, 2) for n in "qkv")
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=keep).transpose(1, 2).flatten(2)
        h = norm(linear(seen, f"{i}.o") + h, f"{i}.norm1")
        h = norm(linear(F.gelu(linear(h, f"{i}.up")), f"{i}.down") + h, f"{i}.norm2")
    return [h.numpy()]


def llama_torch(torch: Any, sizes: Llama, params: Weights, x: Array, positions: Array, **past: Array) -> list[Array]:
    F, p = torch.nn.functional, {n: torch.from_numpy(w) for n, w in params.items()}
    h = torch.from_numpy(x)
    c, s = (p[n][torch.from_numpy(positions).long()][:, :, None] for n in ("cos", "sin"))
    cached: list[Array] = []

    def turn(t: Any) -> Any:
        a, b = t.chunk(2, -1)
        return torch.cat([a * c - b * s, b * c + a * s], -1)

    for i in range(sizes.layers):
        t = F.rms_norm(h, (sizes.hidden,), p[f"{i}.norm1"], LLAMA_EPS)
        q, k, v = ((t @ p[f"{i}.{n}"]).unflatten(-1, (-1, sizes.head_dim)) for n in "qkv")
        q, k = turn(q), turn(k)
        if past:
            k, v = (torch.cat([torch.from_numpy(past[f"{n}{i}"]), new], 1) for n, new in (("k", k), ("v", v)))
            cached += [k.numpy(), v.numpy()]
        rows = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
        seen = F.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), attn_mask=torch.arange(k.shape[1]) <= rows, enable_gqa=True
        )
        h = h + seen.transpose(1, 2).flatten(2) @ p[f"{i}.o"]
        t = F.rms_norm(h, (sizes.hidden,), p[f"{i}.norm2"], LLAMA_EPS)
        h = h + (F.silu(t @ p[f"{i}.gate"]) * (t @ p[f"{i}.up"])) @ p[f"{i}.down"]
    return [h.numpy(), *cached]


@pytest.mark.parity
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("sizes", BERTS, ids=sizes_id)
def test_a_bert_encoder_is_what_torch_computes(sizes: Bert, target: str) -> None:
    torch = pytest.importorskip("torch")
    params = weights(sizes)
    f = compiled(bert_graph(sizes), params, target=target)
    for batch, seq in [(1, 1), (2, 7), (3, 65), (2, 128)]:
        inputs = bert_inputs(sizes, batch, seq)
        assert_close(f.run(inputs), bert_torch(torch, sizes, params, **inputs), (batch, seq))


@pytest.mark.parity
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("sizes", LLAMAS, ids=sizes_id)
def test_a_llama_decoder_is_what_torch_computes(sizes: Llama, target: str) -> None:
    torch = pytest.importorskip("torch")
    params = weights(sizes)
    f = compiled(llama_graph(sizes), params, target=target)
    for batch, seq in [(1, 1), (2, 7), (3, 64)]:
        inputs = llama_inputs(sizes, batch, seq)
        assert_close(f.run(inputs), llama_torch(torch, sizes, params, **inputs), (batch, seq))
    f = compiled(llama_graph(sizes, past=True, seq=1), params, target=target)
    for batch, past in [(1, 1), (2, 70)]:
        inputs = llama_inputs(sizes, batch, 1, past)
        assert_close(f.run(inputs), llama_torch(torch, sizes, params, **inputs), (batch, past))
