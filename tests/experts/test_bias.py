"""The biases by which routers choose: found in transformers' families and nowhere else, and that of our own router."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_moe_ep import GroupedExperts, MoELayer, TopKRouter
from lightning_moe_ep.experts import biases_around, choice_biases, find_experts
from lightning_moe_ep.precision import FSDP2Precision
from tests.models import FAMILIES, HIDDEN, VOCABULARY, build

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "num_hidden_layers": 2,
    "num_experts_per_tok": 2,
}
BIASED: dict[str, tuple[dict[str, Any], str]] = {
    "deepseek_v3": (
        {
            "n_routed_experts": 8,
            "first_k_dense_replace": 0,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "num_key_value_heads": 4,
        },
        "mlp.gate.e_score_correction_bias",
    ),
    "glm4_moe": (
        {"n_routed_experts": 8, "first_k_dense_replace": 0, "head_dim": 16},
        "mlp.gate.e_score_correction_bias",
    ),
    "ernie4_5_moe": (
        {"moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 0},
        "mlp.gate.moe_statics.e_score_correction_bias",
    ),
    "lfm2_moe": (
        {"num_experts": 8, "num_dense_layers": 0, "layer_types": ["full_attention", "full_attention"]},
        "feed_forward.expert_bias",
    ),
    "minimax_m2": ({"num_local_experts": 8, "head_dim": 16, "rotary_dim": 16}, "mlp.e_score_correction_bias"),
    "afmoe": ({"num_experts": 8, "num_dense_layers": 0, "head_dim": 16}, "mlp.expert_bias"),
}
"""Configurations with 2 layers of 8 experts, and where in a layer the bias is: a buffer of the router or of the block,
or a parameter without gradient (ERNIE: of shape `[1, 8]`)."""


def build_biased(family: str) -> nn.Module:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SIZES, **BIASED[family][0]}))


@pytest.mark.parametrize("family", BIASED)
def test_is_found(family: str) -> None:
    with torch.device("meta"):
        model = build_biased(family)
    where = BIASED[family][1]
    found = choice_biases(model)
    assert [bias.name for bias in found] == [f"model.layers.{layer}.{where}" for layer in (0, 1)]
    assert [bias.experts.module for bias in found] == [experts.module for experts in find_experts(model)]
    for bias in found:
        assert bias.tensor is model.get_submodule(bias.name.rpartition(".")[0]).__getattr__(bias.key)
        assert bias.is_saved


@pytest.mark.parametrize("kind", ["own", *FAMILIES])
def test_nothing_else_is_taken_for_one(kind: str) -> None:
    model = build(kind)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert choice_biases(model) == []
    assert choice_biases(nn.Linear(8, 8)) == []


class Around(nn.Module):
    """Experts with other things around them."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        self.experts = GroupedExperts(16, 16, 8)
        self.router = nn.Linear(16, 8).requires_grad_(False)  # has a `bias` that is for the weights too
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.router.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)


def _named(model: nn.Module, key: str | None = None) -> list[list[str]]:
    experts = find_experts(model)
    return [[bias.name for bias in biases_around(model, found, experts, key=key)] for found in experts]


@pytest.mark.parametrize(
    ("tensors", "found"),
    [
        ({}, []),
        ({"balancing_biases": torch.zeros(8)}, ["balancing_biases"]),
        ({"choice_bias": nn.Parameter(torch.zeros(1, 8), requires_grad=False)}, ["router.choice_bias"]),
        ({"choice_bias": nn.Parameter(torch.zeros(8))}, []),
        ({"choice_bias": torch.zeros(9)}, []),
        ({"choice_bias": torch.zeros(8, 1)}, []),
        ({"choice_bias": torch.zeros(8, dtype=torch.int64)}, []),
        ({"tokens_per_expert": torch.zeros(8)}, []),
        ({"choice_bias": torch.zeros(8), "old_bias": torch.zeros(8)}, ["choice_bias", "old_bias"]),
    ],
    ids=["none", "buffer", "parameter", "trained", "wrong size", "wrong shape", "integers", "other name", "two"],
)
def test_by_what_it_is(tensors: dict[str, Tensor], found: list[str]) -> None:
    assert _named(Around(**tensors)) == [found]


def test_by_name() -> None:
    assert _named(Around(correction=torch.zeros(8), choice_bias=torch.zeros(8)), key="correction") == [["correction"]]
    assert _named(Around(choice_bias=torch.zeros(8)), key="correction") == [[]]


def test_further_away_but_not_beyond_other_experts() -> None:
    apart = nn.ModuleDict({"mlp": Around(), "gate": TopKRouter(16, 8, 2, choice_bias=True)})
    assert _named(apart) == [["gate.choice_bias"]]
    beside = nn.ModuleDict({"one": apart, "two": Around()})
    assert _named(beside) == [["one.gate.choice_bias"], []]
    shared = nn.ModuleDict({"gate": TopKRouter(16, 8, 2, choice_bias=True), "one": Around(), "two": Around()})
    assert _named(shared) == [[], []]


def test_bf16_does_not_round_it() -> None:
    model = build_biased("ernie4_5_moe")
    before = [bias.tensor.fill_(0.1).clone() for bias in choice_biases(model)]
    FSDP2Precision("bf16-true").convert_module(model)
    assert model.lm_head.weight.dtype == torch.bfloat16
    for bias, right in zip(choice_biases(model), before, strict=True):
        assert bias.tensor.dtype == torch.float32
        assert torch.equal(bias.tensor, right)


# Our own router.


def test_chooses_by_the_bias_and_weighs_without_it() -> None:
    hidden = torch.randn(32, 16)
    router = TopKRouter(16, 8, 2, choice_bias=True, normalize=False)
    plain = TopKRouter(16, 8, 2, normalize=False)
    plain.load_state_dict({"weight": router.weight.detach()})
    assert router.choice_bias is not None
    assert router.choice_bias.dtype == torch.float32
    for ours, theirs in zip(router(hidden), plain(hidden), strict=True):
        assert torch.equal(ours, theirs)
    router.choice_bias[3], router.choice_bias[5] = 3.0, 2.0
    logits, weights, index = router(hidden)
    assert index.tolist() == [[3, 5]] * 32
    assert torch.equal(weights, logits.softmax(dim=-1)[:, [3, 5]])
    (ours,) = torch.autograd.grad(weights.square().sum(), router.weight)
    (right,) = torch.autograd.grad((hidden @ router.weight.T).softmax(dim=-1)[:, [3, 5]].square().sum(), router.weight)
    torch.testing.assert_close(ours, right)


def test_is_saved_only_where_it_is_wanted() -> None:
    assert "router.choice_bias" in MoELayer(16, 16, 8, 2, choice_bias=True).state_dict()
    assert set(MoELayer(16, 16, 8, 2).state_dict()) == {
        "router.weight",
        "experts.gate_up_proj",
        "experts.down_proj",
    }
