"""Decoding and prefill on a GPU: Qwen3 shapes with random bf16 weights, against the memory speed of the same run.

    python benchmarks/gpu.py --models 0.6b 1.7b 8b --json benchmarks/results/gpu.json

Writes each model as a Hugging Face folder (numbers repeat from layer to layer; all are read), loads it on the GPU, and
times decode steps after a filled KV cache: as the GPU runs them (graph replays between two events) and as a caller sees
them, who reads each token while the next step runs, as `generate` does. The floor is the bytes of weights and cache
over the best read speed of the run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import rlx
from rlx.backends.cuda.executable import CudaExecutable
from rlx.backends.cuda.gpu import Gpu, gpu
from rlx.engine.decoder import Decoder
from rlx.engine.sampler import BatchSampling

BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPES = {  # hidden, intermediate, heads, layers, tied; all have 8 key heads of 128 and 151,936 tokens
    "0.6b": (1024, 3072, 16, 28, True),
    "1.7b": (2048, 6144, 16, 28, True),
    "8b": (4096, 12288, 32, 36, False),
}
KV_HEADS, HEAD_DIM, VOCABULARY = 8, 128, 151_936
CONTEXT = 4352
READ_BYTES = 4 << 30


# -- models ----------------------------------------------------------------------------------------------------------
def config(name: str) -> dict[str, Any]:
    hidden, intermediate, heads, layers, tied = SHAPES[name]
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": hidden,
        "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "max_position_embeddings": 40960, "tie_word_embeddings": tied, "hidden_act": "silu",
        "torch_dtype": "bfloat16", "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip


def layer_shapes(c: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    dim, ffn = c["hidden_size"], c["intermediate_size"]
    query, kv = c["num_attention_heads"] * HEAD_DIM, KV_HEADS * HEAD_DIM
    return {
        "self_attn.q_proj": (query, dim), "self_attn.k_proj": (kv, dim), "self_attn.v_proj": (kv, dim),
        "self_attn.o_proj": (dim, query), "mlp.gate_proj": (ffn, dim), "mlp.up_proj": (ffn, dim),
        "mlp.down_proj": (dim, ffn), "input_layernorm": (dim,), "post_attention_layernorm": (dim,),
        "self_attn.q_norm": (HEAD_DIM,), "self_attn.k_norm": (HEAD_DIM,),
    }  # fmt: skip


def write_folder(folder: Path, c: Mapping[str, Any]) -> None:
    """One file per layer, and one with the tables. All layers have the numbers of the first."""
    from safetensors.numpy import save_file

    rng, files = np.random.default_rng(0), dict[str, str]()
    some = rng.standard_normal(1 << 22, np.float32)

    def numbers(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        if len(shape) == 1:
            return np.ones(shape, BF16)
        scaled = (some * shape[-1] ** -0.5).astype(BF16)
        return np.resize(scaled, shape)

    def write(file: str, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
        save_file(tensors, str(folder / file), metadata={"format": "pt"})
        files.update(dict.fromkeys(tensors, file))

    layer = {name: numbers(shape) for name, shape in layer_shapes(c).items()}
    for i in range(c["num_hidden_layers"]):
        write(f"layer-{i}.safetensors", {f"model.layers.{i}.{n}.weight": a for n, a in layer.items()})
    table = (c["vocab_size"], c["hidden_size"])
    tables = {"model.embed_tokens.weight": numbers(table), "model.norm.weight": numbers(table[1:])}
    write("tables.safetensors", tables | ({} if c["tie_word_embeddings"] else {"lm_head.weight": numbers(table)}))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / "config.json").write_text(json.dumps(c))


def weight_bytes(c: Mapping[str, Any]) -> int:
    """Bytes of weights that one decode step reads."""
    layer = sum(int(np.prod(shape)) for shape in layer_shapes(c).values())
    return 2 * (layer * c["num_hidden_layers"] + c["vocab_size"] * c["hidden_size"])


def kv_bytes(c: Mapping[str, Any], positions: int) -> int:
    return 2 * 2 * KV_HEADS * HEAD_DIM * positions * int(c["num_hidden_layers"])


def multiplications(c: Mapping[str, Any], tokens: int) -> float:
    """Multiply-adds of a prefill, with causal attention; logits of the last token only."""
    layer = sum(int(np.prod(shape)) for shape in layer_shapes(c).values() if len(shape) == 2)
    attention = c["num_attention_heads"] * HEAD_DIM * tokens * tokens  # half of two square products
    return float((layer * tokens + attention) * c["num_hidden_layers"] + c["vocab_size"] * c["hidden_size"])


# -- ceilings --------------------------------------------------------------------------------------------------------
READ = """
struct Words { const uint4* x; long long n; unsigned int* out; };
extern "C" __global__ void read_all(const Words w) {
  unsigned int s = 0;
  long long step = (long long)gridDim.x * blockDim.x;
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  for (; i + 3 * step < w.n; i += 4 * step) {
    uint4 a = w.x[i], b = w.x[i + step], c = w.x[i + 2 * step], d = w.x[i + 3 * step];
    s ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
  }
  for (; i < w.n; i += step) s ^= w.x[i].x;
  if (s == 0x12345678u) *w.out = s;
}
"""


def seconds_of(device: Gpu, work: Callable[[], None], repeats: int = 20) -> list[float]:
    """GPU seconds of each repetition."""
    work()
    events = [device.event()]
    for _ in range(repeats):
        work()
        events.append(device.event())
    device.synchronize()
    return [device.seconds(a, b) for a, b in itertools.pairwise(events)]


def read_speed(device: Gpu) -> float:
    """Bytes per second, the best of several grids."""
    device.load(device.build(READ, device.target.arch), {"read_all": 0})
    source, function = device.allocate(READ_BYTES), device.function("read_all")
    device.clear(source, READ_BYTES)
    words, best = np.array([source, READ_BYTES // 16, source], np.int64), 0.0
    for blocks in (4, 8, 16):
        grid = (device.target.processors * blocks, 1, 1)
        times = seconds_of(device, lambda grid=grid: device.launch(function, grid, 256, 0, words), 10)  # type: ignore[misc]
        best = max(best, READ_BYTES / min(times))
    device.free(source)
    try:
        import torch

        x = torch.empty(READ_BYTES // 4, device="cuda").normal_()
        for _ in range(8):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            x.sum()
            end.record()
            torch.cuda.synchronize()
            best = max(best, READ_BYTES / (start.elapsed_time(end) / 1e3))
        del x
        torch.cuda.empty_cache()
    except ImportError:
        pass
    return best


# -- decoding --------------------------------------------------------------------------------------------------------
def fill(decoder: Decoder, positions: int) -> float:
    """Prefills random tokens; returns the seconds of the last full chunk."""
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, VOCABULARY, positions).tolist() for _ in range(decoder.cache.batch)]
    start = time.perf_counter()
    decoder.prefill(rows, [0] * len(rows))
    return time.perf_counter() - start


def decode_times(decoder: Decoder, device: Gpu, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of decode steps: on the GPU (graph replays), and as a caller sees them."""
    tokens = [7] * decoder.cache.batch
    sampling = BatchSampling().draw([None] * len(tokens))
    step, wall = decoder.start_step(tokens, 0, sampling), []
    for _ in range(steps + 4):
        start = time.perf_counter()
        following = decoder.start_step(tokens, 0, sampling, step)
        step.picks()
        step = following
        wall.append(time.perf_counter() - start)
    step.picks()
    executable = decoder.compiled.executable
    assert isinstance(executable, CudaExecutable)
    return seconds_of(device, executable.latest.replay, steps), wall[4:]


def measured(model: Any, name: str, positions: int, batch: int, speed: float, steps: int) -> dict[str, Any]:
    c, device = config(name), gpu(0)
    decoder = Decoder.start(model.compiled, model.caches.spec, batch, CONTEXT)
    prefill = fill(decoder, positions)
    on_gpu, wall = decode_times(decoder, device, steps)
    floor = (weight_bytes(c) + batch * kv_bytes(c, positions)) / speed
    best, usual = statistics.median(on_gpu), statistics.median(wall)
    launches = len(model.compiled.executable.program.launches)
    result = {
        "model": name, "kv": positions, "batch": batch, "gpu_ms": best * 1e3, "wall_ms": usual * 1e3,
        "floor_ms": floor * 1e3, "share_of_floor": floor / best, "share_of_floor_wall": floor / usual,
        "tokens_per_second": batch / usual, "prefill_seconds": prefill, "launches": launches,
    }  # fmt: skip
    print(
        f"{name:>5} kv {positions:5} batch {batch:3}: GPU {best * 1e3:7.3f} ms ({floor / best:4.0%} of the floor "
        f"{floor * 1e3:.3f}), caller {usual * 1e3:7.3f} ms, {launches} launches, prefill {prefill:.3f} s",
        flush=True,
    )
    return result


def prefill_speed(model: Any, name: str, tokens: int) -> dict[str, Any]:
    """TFLOP/s of one prompt, as a caller sees it: the pages of an earlier prompt are used again."""
    rng = np.random.default_rng(2)
    prompt = rng.integers(0, VOCABULARY, tokens).tolist()
    times = []
    decoder = Decoder.start(model.compiled, model.caches.spec, 1, CONTEXT)
    decoder.cache.reserve(tokens + 1)
    for _ in range(6):
        start = time.perf_counter()
        decoder.prefill([prompt], [0])
        times.append(time.perf_counter() - start)
    best = statistics.median(times[2:])
    rate = 2 * multiplications(config(name), tokens) / best / 1e12
    print(f"{name:>5} prefill {tokens:5}: {best * 1e3:8.2f} ms, {rate:6.1f} TFLOP/s", flush=True)
    return {"model": name, "prefill": tokens, "ms": best * 1e3, "tflops": rate}


def runs(args: argparse.Namespace, top: Path) -> Iterator[dict[str, Any]]:
    device = gpu(0)
    speed = read_speed(device)
    print(f"{device.name}, {device.target.name}: reads {speed / 1e9:,.0f} GB/s", flush=True)
    yield {"device": device.name, "read_gb_per_second": speed / 1e9}
    for name in args.models:
        folder = top / name
        if not folder.exists():
            folder.mkdir(parents=True)
            write_folder(folder, config(name))
        start = time.perf_counter()
        model = rlx.load(folder, device="cuda", context=CONTEXT)
        loaded = time.perf_counter() - start
        print(f"{name}: loaded in {loaded:.1f} s", flush=True)
        yield {"model": name, "load_seconds": loaded}
        for case in args.cases:
            positions, batch = map(int, case.split("x"))
            yield measured(model, name, positions, batch, speed, args.steps)
        for tokens in args.prefill:
            yield prefill_speed(model, name, tokens)
        model.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["0.6b"])
    parser.add_argument("--cases", nargs="+", default=["512x1", "4096x1"], metavar="KVxBATCH")
    parser.add_argument("--prefill", nargs="*", type=int, default=[512])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", type=Path, help="where models are written and kept; a temporary one unless given")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        written = []
        for result in runs(args, args.folder or Path(temporary)):
            written.append(result)
            if args.json is not None:
                args.json.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), "runs": written}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
