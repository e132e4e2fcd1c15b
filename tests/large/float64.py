"""The outside oracle of real GGUF models: transformers in float64 on weights that the `gguf` package has dequantised.

Only one layer's weights are in memory at a time (a model of 1.5e9 weights would need 12 GB): each layer of the
transformers model gets its weights just before it runs and loses them just after. Nothing here calls rlx.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

Array = np.ndarray[Any, Any]
NAMES = {  # Hugging Face's name of a layer's module -> GGUF's
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
GEMMA = NAMES | {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}  # fmt: skip
KINDS = ("weight", "bias")
CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
}


class Rotations(torch.nn.Module):
    """Cosines and sines of RoPE in float64: those of transformers are f32, too coarse for thousands of positions."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kinds = config.rope_parameters if "rope_theta" not in config.rope_parameters else {None: config.rope_parameters}
        places = torch.arange(0, size, 2, dtype=torch.float64) / size
        self._steps = {kind: 1.0 / settings["rope_theta"] ** places for kind, settings in kinds.items()}

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        angles = (position_ids[..., None] * self._steps[layer_type]).repeat(1, 1, 2)
        return angles.cos(), angles.sin()


class Float64Model:
    """A GGUF file as transformers would run it in float64."""

    def __init__(self, path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of NumPy, about how gguf reads scalars
            reader = gguf.GGUFReader(path)
            self._fields = {name: field.contents() for name, field in reader.fields.items()}
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._kind = self._fields["general.architecture"]
        make_config, make_model = CLASSES[self._kind]
        config = make_config(
            vocab_size=len(self._fields["tokenizer.ggml.tokens"]),
            hidden_size=self._field("embedding_length"),
            intermediate_size=self._field("feed_forward_length"),
            num_hidden_layers=self._field("block_count"),
            num_attention_heads=self._field("attention.head_count"),
            num_key_value_heads=self._field("attention.head_count_kv"),
            max_position_embeddings=self._field("context_length"),
            rms_norm_eps=self._field("attention.layer_norm_rms_epsilon"),
            tie_word_embeddings=False,  # both names are given weights below
            **self._more(),
        )
        self._heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        with torch.device("meta"):
            self.model = make_model._from_config(config, dtype=torch.float64, attn_implementation="sdpa").eval()
        self.model.model.rotary_emb = Rotations(config)  # its frequencies are no weights
        if self._kind == "gemma3":  # no weight either
            self.model.model.embed_tokens.embed_scale = torch.tensor(config.hidden_size**0.5, dtype=torch.float64)
        names = GEMMA if self._kind == "gemma3" else NAMES
        head = "output.weight" if "output.weight" in self._tensors else "token_embd.weight"
        self._hold_while_running(self.model.model.embed_tokens, {"weight": "token_embd.weight"})
        self._hold_while_running(self.model.model.norm, {"weight": "output_norm.weight"})
        self._hold_while_running(self.model.lm_head, {"weight": head})
        for i, layer in enumerate(self.model.model.layers):
            tensor_names = {
                f"{ours}.{kind}": f"blk.{i}.{theirs}.{kind}" for ours, theirs in names.items() for kind in KINDS
            }
            self._hold_while_running(
                layer, {ours: name for ours, name in tensor_names.items() if name in self._tensors}
            )

    def logits(self, tokens: Sequence[int], last: int = 0) -> Array:
        """[seq, vocab] f64: the logits after each token, or after the `last` ones only."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([list(tokens)]), use_cache=False, logits_to_keep=last).logits[0]
        rows: Array = logits.numpy()
        return rows

    def _more(self) -> dict[str, Any]:
        """Settings that the kinds do not share."""
        rope = {"rope_type": "default", "rope_theta": self._field("rope.freq_base")}
        if self._kind != "gemma3":
            return {"rope_parameters": rope}
        local = {"rope_type": "default", "rope_theta": 10000.0}
        return {
            "head_dim": self._field("attention.key_length"),
            "query_pre_attn_scalar": self._field("attention.key_length"),
            "sliding_window": self._field("attention.sliding_window"),
            "rope_parameters": {"full_attention": rope, "sliding_attention": local},
        }

    def _field(self, name: str) -> Any:
        return self._fields[f"{self._kind}.{name}"]

    def _hold_while_running(self, module: torch.nn.Module, names: dict[str, str]) -> None:
        """Give a module its weights (name in it -> name in the file) for the time of its call."""
        empty = dict(module.state_dict())
        assert set(empty) == set(names), f"{set(empty) ^ set(names)} has no counterpart in the file"

        def give(*_: object) -> None:
            module.load_state_dict({ours: self._weight(name) for ours, name in names.items()}, assign=True)

        def take(*_: object) -> None:
            module.load_state_dict(empty, assign=True)

        module.register_forward_pre_hook(give)
        module.register_forward_hook(take)

    def _weight(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
        kind = name.split(".")[-2]
        if self._kind == "llama" and kind in self._heads:  # the converter to GGUF has put halves into pairs order
            heads = values.reshape(self._heads[kind], -1, 2, *values.shape[1:])
            values = heads.swapaxes(1, 2).reshape(values.shape)
        if self._kind == "gemma3" and "norm" in name:  # and has added the 1 that transformers adds
            values = values - 1
        return torch.from_numpy(np.ascontiguousarray(values))
