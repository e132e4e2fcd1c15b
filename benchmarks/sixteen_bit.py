"""A Llama of 1.1 B parameters with 16-bit weights and f32 arithmetic: rlx against torch in eager mode.

The model has TinyLlama's shape and random weights, in a Hugging Face folder of bf16 or f16. Writes tokens after a
prompt of 32 and reads prompts; prints median/best, how many times as fast rlx is, the share of the memory bandwidth of
the same run that reading the weights once per token takes, and resident memory next to the size of the files.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from command import finished, options, print_rows
from harness import Library, Result, compare, print_heading
from llm import dram_shares, rates, share
from worker import Case

OURS, PEER = "rlx", "torch"
NARROW = 2.0  # torch multiplies bf16 with f32 sums, two pairs where an FMA multiplies one, if the processor can
TYPES: dict[str, Any] = {"bf16": (ml_dtypes.bfloat16, "bfloat16"), "f16": (np.float16, "float16")}
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632,
    "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def layer_shapes(c: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    dim, ffn = c["hidden_size"], c["intermediate_size"]
    kv = dim // c["num_attention_heads"] * c["num_key_value_heads"]
    return {
        "self_attn.q_proj": (dim, dim), "self_attn.k_proj": (kv, dim), "self_attn.v_proj": (kv, dim),
        "self_attn.o_proj": (dim, dim), "mlp.gate_proj": (ffn, dim), "mlp.up_proj": (ffn, dim),
        "mlp.down_proj": (dim, ffn), "input_layernorm": (dim,), "post_attention_layernorm": (dim,),
    }  # fmt: skip


def write_folder(
    folder: Path, stored: str, c: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]] | None = None
) -> None:
    """One shard per layer, and one with the tables. All layers have the numbers of the first.

    `shapes` of the weights of a layer are those of a Llama unless given.
    """
    from safetensors.numpy import save_file

    rng, kind, places = np.random.default_rng(0), TYPES[stored][0], dict[str, str]()

    def numbers(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        if len(shape) == 1:
            return np.ones(shape, kind)
        return (rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5).astype(kind)

    def shard(file: str, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
        save_file(tensors, str(folder / file), metadata={"format": "pt"})
        places.update(dict.fromkeys(tensors, file))

    layer = {name: numbers(shape) for name, shape in (shapes or layer_shapes(c)).items()}
    for i in range(c["num_hidden_layers"]):
        shard(f"layer-{i}.safetensors", {f"model.layers.{i}.{n}.weight": a for n, a in layer.items()})
    table = (c["vocab_size"], c["hidden_size"])
    tables = {"model.embed_tokens.weight": numbers(table), "model.norm.weight": numbers(table[1:])}
    shard("tables.safetensors", tables if c["tie_word_embeddings"] else tables | {"lm_head.weight": numbers(table)})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / "config.json").write_text(json.dumps({**c, "torch_dtype": TYPES[stored][1]}))


def cases(folder: Path, c: Mapping[str, Any]) -> list[Case]:
    """One token or one prompt each. Bytes are those of the weights, flops those of the matrix products."""
    layer = sum(np.prod(shape) for shape in layer_shapes(c).values() if len(shape) == 2) * c["num_hidden_layers"]
    head = c["vocab_size"] * c["hidden_size"]
    size = 2.0 * (layer + head)

    def case(kind: str, count: int, flops: float) -> Case:
        return Case(f"{kind} {count}", {kind: count}, flops, size, str(folder), NARROW)

    return [case("write", 32, 2.0 * (layer + head)), case("read", 128, 2.0 * (128 * layer + head))]


def print_table(stored: str, folder: Path, result: Result) -> None:
    print(f"\n## {stored}, {result.threads} thread(s)\n")
    print_heading(result)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    print(f"files: {size / 1e9:.2f} GB; weights read per token: {result.cases[0].case.bytes / 1e9:.2f} GB")
    for name, timing in result.cases[0].timings.items():
        if name in (OURS, PEER):
            print(f"  {name}: {timing.note}")
    rows = []
    for case in result.cases:
        both = case.ok(OURS) and case.ok(PEER)
        ratio = "{:.2f}/{:.2f}".format(*case.ratio(OURS, PEER)) if both else "-"
        limits = share(result, case, OURS), share(result, case, PEER)
        rows.append([case.case.name, rates(case, OURS), rates(case, PEER), ratio, *limits])
    print()
    print_rows(["", "rlx", "torch", "times as fast", "rlx of limit", "torch of limit"], rows)
    for problem in result.problems():
        print(f"NOT VALID: {problem}")


def to_json(stored: str, result: Result) -> dict[str, Any]:
    content = result.to_json()
    for case in content["cases"]:
        case["subject"] = f"llama 1.1B {stored}"
    ratios = {c.case.name: c.ratio(OURS, PEER) for c in result.cases if c.ok(OURS) and c.ok(PEER)}
    shares = {c.case.name: dram_shares(result, c, OURS) for c in result.cases if c.ok(OURS) and "write" in c.case.dims}
    return {"stored": stored} | content | {"times_as_fast": ratios, "dram_shares": shares}


def main() -> int:
    parser = options(__doc__, threads=[1, 2], rounds=5, peers="torch and transformers")
    parser.add_argument("--stored", nargs="+", default=["bf16"], choices=TYPES)
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"], help="fewer for a quick look")
    parser.add_argument("--folder", type=Path, help="where models are written and kept; a temporary one unless given")
    args = parser.parse_args()
    config = CONFIG | {"num_hidden_layers": args.layers}
    libraries = (
        Library(OURS, "sixteen_bit_engines:rlx", ("rlx",)),
        Library(PEER, "sixteen_bit_engines:torch", ("torch", "transformers"), args.python),
    )

    def runs(top: Path) -> Iterator[tuple[Result, dict[str, Any]]]:
        for stored in args.stored:
            folder = top / f"llama-{args.layers}-{stored}"
            if not folder.exists():
                folder.mkdir(parents=True)
                write_folder(folder, stored, config)
            for threads in args.threads:
                result = compare(libraries, cases(folder, config), threads=threads, rounds=args.rounds)
                print_table(stored, folder, result)
                yield result, to_json(stored, result)

    with tempfile.TemporaryDirectory() as temporary:
        return finished(runs(args.folder or Path(temporary)), args.json)


if __name__ == "__main__":
    sys.exit(main())
