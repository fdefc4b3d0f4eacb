"""A tiny model, batch and loss for every Mixture-of-Experts family of transformers.

One set of rules shrinks any config by the names of its fields; `EXCEPTIONS` has what the rules cannot know. Every kind
of layer that the family has by default is there once, in as few layers as that takes.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig

from tests.families.find import model_class

VOCABULARY = 96
SEQUENCE = 8

SIZES: dict[str, int] = {
    "hidden_size": 64,
    "d_model": 64,
    "vocab_size": VOCABULARY,
    "unpadded_vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "head_dim": 16,
    "swa_head_dim": 16,
    "kv_channels": 16,
    "d_kv": 16,
    # latent attention
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    # sparse attention
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 4,
    "sliding_window": 4,
    "sliding_window_size": 4,
    # linear attention
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Fields that are set where the default is not None."""

EXPERTS: dict[str, int] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k"),
        2,
    ),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 32),
}
"""Fields that are set whatever the default is."""

EXCEPTIONS: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v4": {
        "o_groups": 2,
        "o_lora_rank": 16,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "index_topk": 2,
    },
    "diffusion_gemma_text": {"global_head_dim": 32},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 16,
    },
    "dots3_note_vision_encoder": {
        "num_hidden_layers": 3,
        "mlp_layer_types": None,
        "pyramid_num_routed": [-1, 4, 8],  # the number of experts grows from layer to layer
        "adapter_in_dim": 64,
        "adapter_out_dim": 64,
    },
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [32, 16],  # of the experts for text and of those for images
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
    },
    "flint": {"mlp_only_layers": [0]},
    "gemma4_text": {
        "enable_moe_block": True,
        "global_head_dim": 32,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 32,
    },
    "glm4v_moe_text": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1, 1, 2],
        }
    },
    "glm5_next_text": {"qk_rope_head_dim": 0, "qk_nope_head_dim": 16, "index_kpool": 2},
    "granitemoe_swa": {"shared_intermediate_size": 48},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
        "mamba_chunk_size": 8,
    },
    "granitemoeshared": {"shared_intermediate_size": 48},
    "hunyuan_v1_moe": {"head_dim": 16},
    "hy_v4_vl_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    },
    "inkling2_loop_text": {  # all layers but the first run twice
        "num_hidden_layers": 3,
        "layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid"],
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "loop_num_passes": 2,
        "loop_gate_rank": 8,
        "route_scale": 1.0,
    },
    "inkling2_text": {"route_scale": 1.0},
    "inkling_text": {"n_shared_experts": 2},  # stacked `[2, ...]`, but not routed
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    "laguna": {"layer_types": ["full_attention", "sliding_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"moe_layers": [1], "attention_chunk_size": 4},
    "longcat_flash": {"head_dim": 8, "zero_expert_num": 4},
    "mellum": {"layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["dense", "sparse"]},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
        "rotary_dim": 8,
        "index_block_size": 2,
        "index_topk_blocks": 2,
    },
    "muse_spark_text": {"moe_hidden_size": 32},
    "nemotron_h": {
        "n_groups": 2,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "chunk_size": 8,
    },
    "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "phimoe": {"router_jitter_noise": 0.3},  # at 0 a router has no gradient; see tiny_model
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 48},
    "qwen4_exp_text": {
        "hc_count": 2,
        "hc_lowrank": 8,
        "ple_layer_ids": [1],
        "heads_per_ngram": 4,
        "ngram_vocab_size_base": 64,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 1,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "eos_token_id": 2,
    },
    "step3p5": {
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "sliding_window": 4,
        "share_expert_dim": 48,
    },
    "switch_transformers": {
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 32},
}
"""What a family needs beyond the rules."""


CANNOT_RUN: dict[str, str] = {
    "nllb-moe": (
        "its experts take the router's one-hot mask for indices and encode it again (transformers 5.24), so that expert"
        " 1 computes every token's first choice, expert 0 all other weights, and experts 2 and up never run"
    ),
}
"""Families that are broken in one process already, by reason; `test_what_cannot_run` shows that they still are."""

NO_GRADIENT = re.compile(
    r"\.indexer\."  # an indexer picks positions by top-k
    r"|(expert_bias|e_score_correction_bias)$"  # moved by a rule that balances the load, not by a gradient
    r"|^codec_embedding\."  # qwen3_omni_moe_talker_text embeds outside of its base model
)
"""The parameters that the loss does not reach in one process."""


def tiny_config(family: str) -> PreTrainedConfig:
    """The shrunken config of a family."""
    cls = CONFIG_MAPPING[family]
    default = cls()
    values: dict[str, Any] = {"use_cache": False} if "use_cache" in cls.__dataclass_fields__ else {}
    for field in cls.__dataclass_fields__:
        value = _default(default, field)
        if field in EXPERTS:
            values[field] = EXPERTS[field]
        elif value is None or isinstance(value, (str, dict)):
            continue
        elif field in SIZES:
            values[field] = SIZES[field]
        elif re.search("dropout|pdrop|layerdrop|jitter", field):
            values[field] = 0.0
        elif (
            re.search("intermediate_size|ffn_dim|ffn_hidden_size|d_ff$", field)
            and value
            and not isinstance(value, list)
        ):
            values[field] = 48
        elif re.search("n(um)?_shared_experts", field) or field in ("first_k_dense_replace", "num_dense_layers"):
            values[field] = min(value, 1)
    heads, groups = (_default(default, name) for name in ("num_attention_heads", "num_key_value_heads"))
    if "num_key_value_heads" in cls.__dataclass_fields__ and groups is not None:
        values["num_key_value_heads"] = 4 if heads == groups else min(groups, 2)
    if groups := _default(default, "n_group"):
        values.update(n_group=min(groups, 2), topk_group=1)
    values.update(_layers(default))
    config = cls(**{**values, **EXCEPTIONS.get(family, {})})
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return config


def _default(config: PreTrainedConfig, field: str) -> Any:
    return vars(config).get(config.attribute_map.get(field, field))


def _layers(default: PreTrainedConfig) -> dict[str, Any]:
    """The fewest layers, at least two, that show each kind of attention and of MLP that the default config has."""
    kinds = {
        field: list(getattr(default, field))
        for field in ("layer_types", "mlp_layer_types", "indexer_types")
        if isinstance(getattr(default, field, None), list) and field in default.__dataclass_fields__
    }
    if not kinds:
        return {name: 2 for name in _LAYER_COUNTS if name in default.__dataclass_fields__}
    each_layer = list(zip(*kinds.values(), strict=True))
    missing = {(column, kind) for layer in each_layer for column, kind in enumerate(layer)}
    chosen: list[int] = []
    while missing:
        best = max(range(len(each_layer)), key=lambda i: (len(missing & set(enumerate(each_layer[i]))), -i))
        chosen.append(best)
        missing -= set(enumerate(each_layer[best]))
    chosen = sorted([*chosen, chosen[-1]][: max(2, len(chosen))])
    return {
        "num_hidden_layers": len(chosen),
        **{field: [layers[i] for i in chosen] for field, layers in kinds.items()},
    }


_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "encoder_layers", "decoder_layers")


def tiny_model(family: str) -> nn.Module:
    """The base model of a family in fp32, in training mode without randomness; the same weights at each call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(family)(tiny_config(family)).train()
    # Five layers deep, inkling2_loop would magnify round-off beyond what gradients are compared to.
    fill(model, std=0.07 if family == "inkling2_loop_text" else 0.15)
    for name, module in model.named_modules():
        if type(module).__name__ == "PhimoeTopKRouter":
            module.eval()  # in training it samples
        if name.endswith("router_mlp.out_proj"):
            # zaya: behind the MLP of its router the same few experts would score highest for all tokens.
            module.weight.data.sub_(module.weight.data.mean(dim=1, keepdim=True)).mul_(8)
    return model


def fill(model: nn.Module, *, std: float = 0.15) -> None:
    """Give every parameter seeded values whose gradients are not tiny: matrices are normal, the rest moves a little."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(std * noise)
            elif name.endswith("scale"):
                parameter.copy_(1 + 0.1 * noise)
            else:
                parameter.add_(0.1 * noise)
        for name, buffer in model.named_buffers():
            if re.search("bias(es)?$", name):  # what routers add to their scores
                buffer.add_(0.02 * torch.randn(buffer.shape, generator=generator))
            elif name.endswith("tid2eid"):  # the experts of each token id
                experts = torch.rand(len(buffer), EXPERTS["num_experts"], generator=generator).argsort(dim=1)
                buffer.copy_(experts[:, : buffer.shape[1]])


def tiny_batch(family: str, seed: int, tokens: int = 128) -> dict[str, Tensor]:
    """The inputs of a forward with `tokens` tokens (or patches), a multiple of 8."""
    generator = torch.Generator().manual_seed(seed)
    rows = tokens // SEQUENCE
    ids = torch.randint(3, VOCABULARY, (rows, SEQUENCE), generator=generator)
    if family == "dots3_note_vision_encoder":
        pixels = torch.randn(tokens, 3 * 14 * 14, generator=generator)
        return {"pixel_values": pixels, "grid_thw": torch.tensor([[1, 2, 4]]).repeat(rows, 1)}
    if family == "qwen3_omni_moe_talker_text":
        return {"inputs_embeds": torch.randn(rows, SEQUENCE, SIZES["hidden_size"], generator=generator)}
    if family == "ernie4_5_vl_moe_text":
        return {"input_ids": ids, "moe_mm_token_type_ids": (torch.arange(SEQUENCE) % 2).expand(rows, SEQUENCE)}
    if family in ("nllb-moe", "switch_transformers"):
        return {"input_ids": ids, "decoder_input_ids": ids.flip(1)}
    return {"input_ids": ids}


def loss_of(family: str, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A scalar that depends on every output of the model."""
    return weigh(tensors_of(model(**batch)))


def weigh(outputs: list[Tensor]) -> Tensor:
    """The mean over tokens of a fixed random combination of what the model says of each."""
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros(())
    for output in outputs:
        weights = torch.randn(output.shape[-1], generator=generator)
        total = total + (output * weights).sum(dim=-1).mean()
    return total


def tensors_of(outputs: Any) -> list[Tensor]:
    if isinstance(outputs, Tensor):
        return [outputs] if outputs.requires_grad else []
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    if isinstance(outputs, (list, tuple)):
        return [tensor for output in outputs for tensor in tensors_of(output)]
    return []
