"""What is left of a model, and that it computes the same each time."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_moe_ep.experts import NoExpertsError
from lightning_moe_ep.tools.verify.cutting import cut, quiet
from tests.models import HIDDEN, Block, OwnModel

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
}


def family(kind: str, **options: object) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SMALL, **options}))


DEEPSEEK = {
    "num_hidden_layers": 6,
    "first_k_dense_replace": 2,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
}


@pytest.mark.parametrize(
    ("kind", "options", "layers", "kept"),
    [
        ("qwen3_moe", {"num_hidden_layers": 5, "num_experts": 8}, None, [0]),
        ("qwen3_moe", {"num_hidden_layers": 5, "num_experts": 8}, 3, [0, 1, 2]),
        ("qwen3_moe", {"num_hidden_layers": 5, "num_experts": 8, "decoder_sparse_step": 3}, None, [0, 2]),
        ("deepseek_v3", DEEPSEEK, None, [0, 2]),
        ("deepseek_v3", DEEPSEEK, 3, [0, 1, 2]),
        # Sliding and full attention take turns.
        ("gpt_oss", {"num_hidden_layers": 4, "num_local_experts": 4, "head_dim": 16}, None, [0, 1]),
    ],
)
def test_one_block_of_each_kind_is_kept(
    kind: str, options: dict[str, object], layers: int | None, kept: list[int]
) -> None:
    model = family(kind, **options)
    before = [type(block.mlp).__name__ for block in model.model.layers]
    total = len(before)
    told = cut(model, layers)
    assert told == [f"model.layers: {len(kept)} of {total} blocks ({', '.join(map(str, kept))}) are kept"]
    assert [type(block.mlp).__name__ for block in model.model.layers] == [before[number] for number in kept]
    model = model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().zero_()
    assert model(input_ids=torch.zeros(1, 4, dtype=torch.long), use_cache=False).logits.shape == (1, 4, 96)


def test_a_users_own_model() -> None:
    model = OwnModel()
    model.blocks.extend([OwnModel().blocks[0], Block(num_experts=4, top_k=2, intermediate_size=48)])
    for number, block in enumerate(model.blocks):
        block.depth = 10 * number  # its own number makes no kind
    assert cut(model, None) == ["blocks: 2 of 4 blocks (0, 3) are kept"]
    assert cut(model, None) == []
    with pytest.raises(NoExpertsError):
        cut(nn.Linear(2, 2), None)


def test_a_dictionary_of_blocks_is_kept() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleDict({name: OwnModel().blocks[0] for name in "ab"})
    assert cut(model, None) == ["blocks: all 2 blocks are kept, as they may be called by name"]


def test_noise_is_taken_out() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout1d(0.1), family("mixtral", router_jitter_noise=0.1))
    told = quiet(model)
    assert told == [
        "set to 0: Dropout.p, Dropout1d.p, MixtralConfig.router_jitter_noise, MixtralSparseMoeBlock.jitter_noise"
    ]
    x = torch.ones(2, 3, HIDDEN)
    assert torch.equal(model[:2](x), x)
    assert quiet(model) == []
