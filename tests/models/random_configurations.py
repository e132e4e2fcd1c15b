"""Random configurations of all families, drawn from a seed: what `transformers` accepts, with fields few models use.

A case is the name of the classes in `transformers`, their settings, and what is done to the folder afterwards. Models
are as small as they can be; sizes are odd on purpose.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
# All of transformers' activations that have no weights; those that have (prelu, xielu) are refused by name.
ACTIVATIONS = [
    "gelu", "gelu_10", "gelu_fast", "gelu_new", "gelu_python", "gelu_pytorch_tanh", "gelu_python_tanh",
    "gelu_accurate", "hardswish", "laplace", "leaky_relu", "linear", "mish", "quick_gelu", "relu", "relu2", "relu6",
    "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh",
]  # fmt: skip
# Settings whose defaults suit small models.
OMITTED = (
    "rms_norm_eps", "layer_norm", "hidden_act", "activation_function", "rope_parameters", "tie_word_embeddings",
    "attention_bias", "mlp_bias", "sliding_window", "use_sliding_window", "layer_types", "max_window_layers",
    "query_pre_attn_scalar", "final_logit", "attn_logit", "norm_", "qkv_bias", "type_vocab_size", "use_bias",
    "use_conv_bias", "use_swiglu", "conv_kernel", "time_step", "scale_attn", "decoder_sparse_step", "mlp_only_layers",
    "is_decoder", "local_attention", "global_attn", "mlp_ratio", "linear_conv_kernel_dim",
)  # fmt: skip
Settings = dict[str, Any]


@dataclass
class Case:
    """A model to build: classes `<name>Config` and `<name><head>`."""

    name: str
    settings: Settings
    kind: str = "decoder"  # decoder, encoder or vision
    length: int = 20  # of the text
    omitted: tuple[str, ...] = ()  # settings that have the default of transformers and are not in config.json
    older: bool = False  # config.json has rope_theta and rope_scaling, as transformers wrote them before version 5
    dtype: str = "float32"  # of the weights in the folder
    embeds: bool = False  # a decoder that makes vectors of texts: modules.json lies beside it
    other_head: bool = False  # a head that differs from the token table, though they are called tied
    refusable: tuple[str, ...] = field(default=())  # names of fields, of which one may be refused


class Draw(random.Random):
    """Random choices by the names that settings have."""

    def some(self, chance: float = 0.5) -> bool:
        return self.random() < chance

    def activation(self, usual: str) -> str:
        return usual if self.some(0.5) else self.choice(ACTIVATIONS)

    def heads(self) -> tuple[int, int]:
        """Query heads, and key heads of which they are a multiple."""
        heads = self.choice([1, 2, 3, 4, 6])
        return heads, self.choice([k for k in range(1, heads + 1) if heads % k == 0])

    def eps(self) -> float:
        return self.choice([1e-6, 1e-5, 1e-4, 0.01])

    def rope(self, rotary: int, longest: int, kinds: str = "default linear dynamic llama3 yarn longrope") -> Settings:
        """Parameters of RoPE for so many elements of a head."""
        kind = self.choice(["default", *kinds.split()])
        result: Settings = {"rope_type": kind, "rope_theta": self.choice([10000.0, 100.0, 5e5, 77.5])}
        factor = round(self.uniform(1.1, 6.0), 2)
        original = self.randint(4, longest)
        match kind:
            case "linear":
                result["factor"] = factor
            case "dynamic":
                result |= {"factor": factor} if rotary > 2 else {"rope_type": "linear", "factor": factor}
            case "llama3":
                low = round(self.uniform(0.5, 2.0), 2)
                result |= {"factor": factor, "low_freq_factor": low, "high_freq_factor": low + self.choice([0.5, 3.0])}
                result["original_max_position_embeddings"] = original
            case "yarn":
                result |= {"factor": factor, "original_max_position_embeddings": original}
                result |= {"beta_fast": 20.0, "beta_slow": 2.0} if self.some(0.3) else {}
                result |= {"attention_factor": 0.8} if self.some(0.2) else {}
                result |= {"mscale": 0.7, "mscale_all_dim": 1.2} if self.some(0.2) else {}
                result |= {"truncate": False} if self.some(0.2) else {}
            case "longrope":
                half = rotary // 2
                result["short_factor"] = [round(self.uniform(1.0, 2.0), 2) for _ in range(half)]
                result["long_factor"] = [round(self.uniform(1.0, 9.0), 2) for _ in range(half)]
                result["original_max_position_embeddings"] = original
                result |= {"factor": factor} if self.some(0.3) else {}
                result |= {"attention_factor": 1.3} if self.some(0.2) else {}
        return result

    def layer_types(self, layers: int, *kinds: str) -> list[str]:
        return [self.choice(kinds) for _ in range(layers)]


# -- decoders --------------------------------------------------------------------------------------------------------
def sizes(d: Draw, *, own_head: bool = True) -> Settings:
    """What all decoders with attention have."""
    heads, kv = d.heads()
    head = d.choice([2, 4, 6, 8, 12])
    result: Settings = {
        "vocab_size": d.randint(9, 40), "hidden_size": heads * head, "intermediate_size": d.randint(5, 40),
        "num_hidden_layers": d.randint(1, 3), "num_attention_heads": heads, "num_key_value_heads": kv,
        "max_position_embeddings": d.randint(20, 48), "rms_norm_eps": d.eps(), "tie_word_embeddings": d.some(),
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": d.activation("silu"),
    }  # fmt: skip
    if own_head:
        result["head_dim"] = d.choice([2, 4, 6, 10, 16])
    return result


def _head(s: Settings) -> int:
    return int(s.get("head_dim") or s["hidden_size"] // s["num_attention_heads"])


def with_rope(d: Draw, s: Settings) -> Settings:
    return s | {"rope_parameters": d.rope(_head(s), s["max_position_embeddings"])}


def llama(d: Draw) -> Case:
    s = with_rope(d, sizes(d, own_head=d.some()))
    return Case("Llama", s | {"attention_bias": d.some(), "mlp_bias": d.some()})


def mistral(d: Draw) -> Case:
    s = with_rope(d, sizes(d, own_head=d.some()))
    return Case("Mistral", s | {"sliding_window": d.choice([None, d.randint(1, 30)])})


def mixtral(d: Draw) -> Case:
    experts = d.randint(2, 5)
    s = with_rope(d, sizes(d)) | {"num_local_experts": experts, "num_experts_per_tok": d.randint(1, experts)}
    return Case("Mixtral", s | {"sliding_window": d.choice([None, d.randint(1, 30)])})


def _windows(d: Draw, s: Settings) -> Settings:
    result: Settings = {"use_sliding_window": d.some(), "sliding_window": d.randint(1, 20)}
    result["max_window_layers"] = d.randint(0, s["num_hidden_layers"])
    if result["use_sliding_window"] and d.some():
        result["layer_types"] = d.layer_types(s["num_hidden_layers"], FULL, SLIDING)
    return result


def qwen2(d: Draw) -> Case:
    s = with_rope(d, sizes(d, own_head=False))
    return Case("Qwen2", s | _windows(d, s))


def qwen3(d: Draw) -> Case:
    s = with_rope(d, sizes(d))
    return Case("Qwen3", s | _windows(d, s) | {"attention_bias": d.some()})


def _experts(d: Draw, s: Settings) -> Settings:
    experts = d.randint(2, 5)
    result = {
        "num_experts": experts, "num_experts_per_tok": d.randint(1, experts), "moe_intermediate_size": d.randint(4, 24),
        "norm_topk_prob": d.some(), "decoder_sparse_step": d.choice([1, 1, 2]),
    }  # fmt: skip
    return result | ({"mlp_only_layers": [d.randrange(s["num_hidden_layers"])]} if d.some(0.3) else {})


def qwen3_moe(d: Draw) -> Case:
    s = with_rope(d, sizes(d))
    window = {"use_sliding_window": d.some(), "sliding_window": d.randint(1, 20)}
    return Case("Qwen3Moe", s | _experts(d, s) | window | {"attention_bias": d.some()})


def phi3(d: Draw) -> Case:
    s = sizes(d, own_head=False)
    head, partial = _head(s), 1.0
    if head > 4 and d.some():
        partial = d.choice([p for p in (0.5, 0.75, 0.25, 1.0) if head * p % 2 == 0 and head * p >= 2])
    rope = d.rope(int(head * partial), s["max_position_embeddings"], "longrope") | {"partial_rotary_factor": partial}
    original = rope.pop("original_max_position_embeddings", d.randint(4, s["max_position_embeddings"]))
    s |= {"rope_parameters": rope, "original_max_position_embeddings": original}
    return Case("Phi3", s | {"sliding_window": d.choice([None, d.randint(1, 30)])})


def gemma(d: Draw) -> Case:
    s = with_rope(d, sizes(d)) | {"hidden_act": d.activation("gelu_pytorch_tanh"), "attention_bias": d.some(0.3)}
    return Case("Gemma", s)


def _gemma2(d: Draw) -> Settings:
    s = sizes(d)
    s |= {
        "hidden_activation": d.activation("gelu_pytorch_tanh"), "attention_bias": d.some(0.3),
        "query_pre_attn_scalar": d.choice([1, 4, 7, 64]), "sliding_window": d.randint(1, 20),
        "final_logit_softcapping": d.choice([None, 2.0, 30.0]), "attn_logit_softcapping": d.choice([None, 2.0, 50.0]),
    }  # fmt: skip
    s.pop("hidden_act")
    return s | ({"layer_types": d.layer_types(s["num_hidden_layers"], FULL, SLIDING)} if d.some() else {})


def gemma2(d: Draw) -> Case:
    return Case("Gemma2", with_rope(d, _gemma2(d)))


def gemma3(d: Draw) -> Case:
    s = _gemma2(d)
    if d.some(0.8):
        head, longest = _head(s), s["max_position_embeddings"]
        s["rope_parameters"] = {FULL: d.rope(head, longest), SLIDING: d.rope(head, longest, "linear llama3")}
    return Case("Gemma3Text", s)


def gpt2(d: Draw) -> Case:
    heads = d.randint(1, 5)
    s = {
        "vocab_size": d.randint(9, 40), "n_positions": d.randint(20, 48), "n_embd": heads * d.randint(1, 11),
        "n_layer": d.randint(1, 3), "n_head": heads, "n_inner": d.choice([None, d.randint(3, 40)]),
        "activation_function": d.activation("gelu_new"), "layer_norm_epsilon": d.eps(),
        "scale_attn_weights": d.some(0.8), "scale_attn_by_inverse_layer_idx": d.some(0.3),
        "reorder_and_upcast_attn": d.some(0.2), "tie_word_embeddings": d.some(), "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return Case("GPT2", s)


def mamba(d: Draw) -> Case:
    s = {
        "vocab_size": d.randint(9, 40), "hidden_size": d.randint(5, 24), "state_size": d.randint(1, 12),
        "num_hidden_layers": d.randint(1, 3), "layer_norm_epsilon": d.eps(), "expand": d.choice([1, 2, 3]),
        "conv_kernel": d.randint(2, 5), "use_bias": d.some(), "use_conv_bias": d.some(),
        "hidden_act": d.activation("silu"), "time_step_rank": d.choice(["auto", d.randint(1, 6)]),
        "tie_word_embeddings": d.some(), "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    return Case("Mamba", s)


def mamba2(d: Draw) -> Case:
    groups = d.randint(1, 3)
    heads, size, expand = groups * d.randint(1, 3), d.choice([2, 4, 6]), d.choice([1, 2])
    s = {
        "vocab_size": d.randint(9, 40), "hidden_size": heads * size // expand, "num_heads": heads, "head_dim": size,
        "state_size": d.randint(2, 12), "num_hidden_layers": d.randint(1, 2), "layer_norm_epsilon": d.eps(),
        "expand": expand, "conv_kernel": d.randint(2, 5), "n_groups": groups, "use_bias": d.some(),
        "use_conv_bias": d.some(), "hidden_act": d.activation("silu"), "chunk_size": d.choice([4, 16]),
        "time_step_limit": d.choice([(0.0, float("inf")), (0.1, 0.9), (0.0, 2.0)]), "tie_word_embeddings": d.some(),
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    return Case("Mamba2", s)


def _delta(d: Draw) -> Settings:
    s = sizes(d) | {"head_dim": d.choice([8, 16, 24]), "attention_bias": d.some()}
    keys = d.randint(1, 3)
    layers = s["num_hidden_layers"] = d.randint(1, 4)
    s |= {
        "linear_num_key_heads": keys, "linear_num_value_heads": keys * d.randint(1, 3),
        "linear_key_head_dim": d.choice([2, 4, 6]), "linear_value_head_dim": d.choice([2, 4, 6]),
        "linear_conv_kernel_dim": d.randint(2, 5), "layer_types": d.layer_types(layers, FULL, LINEAR),
    }  # fmt: skip
    partial = d.choice([0.25, 0.5, 1.0])
    rotary = int(s["head_dim"] * partial)
    if rotary < 2 or rotary % 2:
        partial, rotary = 1.0, s["head_dim"]
    rope = d.rope(rotary, s["max_position_embeddings"])
    return s | {"rope_parameters": rope | {"partial_rotary_factor": partial}}


def qwen3_next(d: Draw) -> Case:
    s = _delta(d)
    return Case("Qwen3Next", s | _experts(d, s) | {"shared_expert_intermediate_size": d.randint(3, 12)})


def qwen3_5(d: Draw) -> Case:
    s = _delta(d)
    s["rope_parameters"] = {**s["rope_parameters"], "mrope_section": [1, 1, 1]}
    return Case("Qwen3_5Text", s)


def qwen3_5_moe(d: Draw) -> Case:
    s = qwen3_5(d).settings
    experts = {n: v for n, v in _experts(d, s).items() if n.startswith(("num", "moe"))}
    return Case("Qwen3_5MoeText", s | experts | {"shared_expert_intermediate_size": d.randint(3, 12)})


# -- encoders --------------------------------------------------------------------------------------------------------
def _encoder(d: Draw) -> Settings:
    heads = d.randint(1, 4)
    return {
        "vocab_size": d.randint(9, 40), "hidden_size": heads * d.choice([2, 4, 6, 8]), "num_attention_heads": heads,
        "num_hidden_layers": d.randint(1, 3), "intermediate_size": d.randint(3, 30), "layer_norm_eps": d.eps(),
        "max_position_embeddings": d.randint(24, 48), "hidden_act": d.activation("gelu"), "pad_token_id": 0,
    }  # fmt: skip


def bert(d: Draw) -> Case:
    s = _encoder(d) | {"type_vocab_size": d.randint(1, 3), "is_decoder": d.some(0.3)}
    return Case("Bert", s, "encoder")


def roberta(d: Draw) -> Case:
    s = _encoder(d) | {"type_vocab_size": d.randint(1, 2), "pad_token_id": d.randint(0, 3), "is_decoder": d.some(0.2)}
    return Case(d.choice(["Roberta", "XLMRoberta", "Camembert"]), s, "encoder")


def modernbert(d: Draw) -> Case:
    s = _encoder(d)
    s["norm_eps"], s["hidden_activation"] = s.pop("layer_norm_eps"), s.pop("hidden_act")
    s |= {
        "local_attention": d.randint(2, 20), "norm_bias": d.some(), "attention_bias": d.some(), "mlp_bias": d.some(),
        "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
    }  # fmt: skip
    if d.some():
        s["layer_types"] = d.layer_types(s["num_hidden_layers"], FULL, SLIDING)
    else:
        s["global_attn_every_n_layers"] = d.randint(1, 3)
    longest = s["max_position_embeddings"]
    head = s["hidden_size"] // s["num_attention_heads"]
    s["rope_parameters"] = {FULL: d.rope(head, longest), SLIDING: d.rope(head, longest, "linear llama3")}
    return Case("ModernBert", s, "encoder")


def nomic_bert(d: Draw) -> Case:
    s = _encoder(d) | {"hidden_act": d.activation("silu"), "type_vocab_size": d.randint(1, 3)}
    head = s["head_dim"] = d.choice([2, 4, 6, 10])
    s["rope_parameters"] = d.rope(head, s["max_position_embeddings"])
    return Case("NomicBert", s, "encoder")


def embedding_gemma(d: Draw) -> Case:
    case = gemma3(d)
    case.kind = "encoder"
    case.settings |= {"use_bidirectional_attention": True}
    return case


# -- vision models ---------------------------------------------------------------------------------------------------
def _images(d: Draw) -> Settings:
    heads, patch = d.randint(1, 4), d.choice([2, 4, 5])
    return {
        "hidden_size": heads * d.choice([2, 4, 6]), "num_hidden_layers": d.randint(1, 3), "num_attention_heads": heads,
        "image_size": patch * d.randint(1, 4) + d.choice([0, 0, 1]), "patch_size": patch, "layer_norm_eps": d.eps(),
        "hidden_act": d.activation("gelu"),
    }  # fmt: skip


def vit(d: Draw) -> Case:
    return Case("ViT", _images(d) | {"intermediate_size": d.randint(3, 30), "qkv_bias": d.some()}, "vision")


def dinov2(d: Draw) -> Case:
    s = _images(d) | {"mlp_ratio": d.choice([1, 2, 4]), "use_swiglu_ffn": d.some(), "qkv_bias": d.some()}
    if d.some():
        return Case("Dinov2", s, "vision")
    return Case("Dinov2WithRegisters", s | {"num_register_tokens": d.randint(1, 5)}, "vision")


def siglip(d: Draw) -> Case:
    return Case("SiglipVision", _images(d) | {"intermediate_size": d.randint(3, 30)}, "vision")


DECODERS: list[Callable[[Draw], Case]] = [
    llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, phi3, gemma, gemma2, gemma3, gpt2, mamba, mamba2, qwen3_next,
    qwen3_5, qwen3_5_moe,
]  # fmt: skip
OTHERS: list[Callable[[Draw], Case]] = [bert, roberta, modernbert, nomic_bert, embedding_gemma, vit, dinov2, siglip]


def random_case(seed: int) -> Case:
    """The case of a seed."""
    d = Draw(seed)
    families = [*DECODERS, *OTHERS]
    case = families[seed % len(families)](d)
    s = case.settings
    case.length = d.randint(1, 44)
    if d.some(0.4):
        case.omitted = tuple(name for name in s if name.startswith(OMITTED) and d.some(0.4))
        if "use_sliding_window" in case.omitted:
            case.omitted = (*case.omitted, "layer_types")  # which may ask for windows
        case.settings = s = {name: value for name, value in s.items() if name not in case.omitted}
    case.older = "rope_type" in s.get("rope_parameters", {}) and d.some(0.3)
    case.dtype = d.choice(["float32"] * 4 + ["bfloat16", "float16"])
    if case.name == "Qwen3" and d.some(0.3):
        case.embeds, case.kind = True, "encoder"
    case.other_head = case.kind == "decoder" and bool(s.get("tie_word_embeddings")) and d.some(0.3)
    if d.some(0.02):
        name = next((n for n in ("hidden_act", "hidden_activation", "activation_function") if n in s), None)
        if name is not None:
            s[name] = "prelu"
            case.refusable = (*case.refusable, "hidden_act")
    return case
