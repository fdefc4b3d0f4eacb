"""Ernie 4.5 VL: two experts modules in a layer, one for text tokens and one for vision tokens.

The plain block calls the one for vision only where the rank has vision tokens. Here both are always called, with all
tokens, of which those of the other kind choose no expert; so ranks agree, and the host need not know which is which.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_moe_ep.experts.adapter import Dispatch, is_a, register_experts
from lightning_moe_ep.experts.stacked import StackedExperts


@register_experts
class Ernie4_5VLMoeExperts(StackedExperts):  # noqa: N801
    """An experts module inside of `Ernie4_5_VLMoeMoeBlock` (read at transformers 5.24)."""

    block: nn.Module

    def __init__(self, module: nn.Module, block: nn.Module) -> None:
        super().__init__(module)
        self.block = block

    @classmethod
    @override
    def match(cls, module: nn.Module, around: Sequence[nn.Module]) -> Self | None:
        blocks = [outer for outer in around if is_a(outer, "Ernie4_5_VLMoeMoeBlock")]
        return cls(module, blocks[0]) if blocks and is_a(module, "Ernie4_5_VLMoeMoeExperts") else None

    @override
    def prepare(self) -> None:
        self.block.forward = partial(_call_both, self.block)

    @override
    def install(self, dispatch: Dispatch, *, alone: bool) -> None:
        super().install(dispatch, alone=False)  # its own forward knows no token without experts


def _call_both(
    block: nn.Module, hidden_states: Tensor, moe_mm_token_type_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    tokens = hidden_states.flatten(0, -2)
    is_vision = (
        torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        if moe_mm_token_type_ids is None
        else moe_mm_token_type_ids.flatten().bool()
    )
    text_output, text_logits = _of_kind(block.text_moe, tokens, ~is_vision)
    vision_output, vision_logits = _of_kind(block.vision_moe, tokens, is_vision)
    output = (text_output + vision_output).view(hidden_states.shape)
    if block.shared_experts is not None:
        output = output + block.shared_experts(hidden_states)
    return output, torch.where(is_vision[:, None], vision_logits, text_logits)


def _of_kind(mixture: nn.Module, tokens: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """A mixture's output for the tokens that are `chosen [T]`, zero for the others, and all its logits."""
    logits, weights, index = mixture.gate(tokens)
    return mixture.experts(tokens, index.masked_fill(~chosen[:, None], mixture.num_experts), weights), logits
