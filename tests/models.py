"""Small models for tests: one of our own, with `MoELayer`, and transformers' families from tiny configurations."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_moe_ep import MoELayer, TopKRouter
from tests.list_models import BLOCKS, ListModel

HIDDEN = 64
VOCABULARY = 96

ADAM_EPS = 1e-4
"""Adam divides by the gradient's size: with a tiny eps, an element whose true gradient is 0 and whose computed one is
round-off takes a whole step in a random direction, in one process as in many. This is above the round-off."""

NOTHING = "$."
"""A pattern that no name has."""

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 32, "num_experts": 8, "head_dim": 16, "norm_topk_prob": True},
    "mixtral": {"intermediate_size": 32, "num_local_experts": 8, "router_jitter_noise": 0.0},
    "olmoe": {"intermediate_size": 32, "num_experts": 8},
}


class Block(nn.Module):
    """A residual block with experts and a shared expert."""

    def __init__(self, **moe: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.moe = MoELayer(HIDDEN, shared_intermediate_size=32, **moe)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.moe(self.norm(hidden))


class OwnModel(nn.Module):
    """Two MoE blocks and a head, from `[T, H]` to `[T, H]`."""

    def __init__(self, *, num_experts: int = 8, top_k: int = 2, intermediate_size: int = 48, **moe: Any) -> None:
        super().__init__()
        make = lambda: Block(num_experts=num_experts, top_k=top_k, intermediate_size=intermediate_size, **moe)  # noqa: E731
        self.blocks = nn.ModuleList([make(), make()])
        self.head = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class SameExpertRouter(TopKRouter):
    """Sends every token to expert 0 (and the next K - 1), with weights that still depend on the logits."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden, self.weight)
        index = torch.arange(self.top_k, device=hidden.device).expand(hidden.shape[0], self.top_k)
        return logits, logits.softmax(dim=-1).gather(1, index).to(hidden.dtype), index


def build(kind: str, *, lora: dict[str, Any] | None = None, **options: Any) -> nn.Module:
    """A model by name: `own`, `own_same_expert`, one of `BLOCKS` or `FAMILIES`; with `lora`, wrapped by plain PEFT."""
    if lora is not None:
        from peft import LoraConfig, get_peft_model

        return get_peft_model(build(kind, **options), LoraConfig(**lora))
    if kind == "own":
        return OwnModel(**options)
    if kind == "own_same_expert":
        model = OwnModel(**options)
        for block in model.blocks:
            block.moe.router.__class__ = SameExpertRouter
        return model
    if kind in BLOCKS:
        return ListModel(kind, **options)
    config = AutoConfig.for_model(
        kind,
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 64,
            "initializer_range": 0.1,
            **FAMILIES[kind],
            **options,
        },
    )
    return AutoModelForCausalLM.from_config(config)


def freeze(model: nn.Module, pattern: str) -> None:
    """Keep the parameters in whose names the pattern is found from being trained."""
    for name, parameter in model.named_parameters():
        if re.search(pattern, name):
            parameter.requires_grad_(False)


def make_batch(kind: str, tokens: int, seed: int) -> dict[str, Tensor]:
    """A batch of `tokens` tokens (a multiple of 8 for the families); 0 is an empty batch."""
    generator = torch.Generator().manual_seed(seed)
    if kind.startswith("own"):
        return {name: torch.randn(tokens, HIDDEN, generator=generator) for name in ("x", "y")}
    return {"input_ids": torch.randint(0, VOCABULARY, (tokens // 8, 8), generator=generator)}


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean loss of the batch; an empty batch gives a zero that is connected to the graph."""
    if "x" in batch:
        return (model(batch["x"]) - batch["y"]).pow(2).sum() / max(1, batch["x"].numel()) * 10
    ids = batch["input_ids"]
    logits = model(input_ids=ids, use_cache=False).logits
    total = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum")
    return total / max(1, ids[:, 1:].numel())
