"""Finding the biases by which routers choose experts.

Some routers add a bias to the scores that they choose by, but not to the weights of what they chose, so that the load
can be evened out without a loss (`e_score_correction_bias` of DeepSeek-V3 and others, `expert_bias` of LFM2). It has no
gradient; `ExpertBiasCallback` moves it. A model goes in, a `ChoiceBias` for each of its experts modules comes out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_moe_ep.experts.find import ExpertsModule, NoExpertsError, find_experts


@dataclass(frozen=True)
class ChoiceBias:
    """A bias for the choice among the experts of one module."""

    name: str
    """Its path in the model."""

    owner: nn.Module
    key: str
    """The buffer or parameter `key` of `owner`."""

    experts: ExpertsModule

    @property
    def tensor(self) -> Tensor:
        """`[E]` or `[1, E]`; a buffer, or a parameter without gradient."""
        tensor: Tensor = getattr(self.owner, self.key)
        return tensor

    @property
    def is_saved(self) -> bool:
        """Whether it is part of the state dict."""
        return self.key not in self.owner._non_persistent_buffers_set

    @torch.no_grad()
    def keep_fp32(self, device: torch.device) -> None:
        """Hold it in fp32, in which small updates are not lost, and on `device` unless it is on the meta device."""
        tensor = self.tensor
        held = tensor.to(
            torch.device("meta") if tensor.is_meta else device, torch.promote_types(tensor.dtype, torch.float32)
        )
        if isinstance(tensor, nn.Parameter):
            tensor.data = held
        else:
            setattr(self.owner, self.key, held)


def choice_biases(model: nn.Module) -> list[ChoiceBias]:
    """The biases of all experts modules of `model`; none for a model without experts."""
    try:
        experts = find_experts(model)
    except NoExpertsError:
        return []
    return [bias for found in experts for bias in biases_around(model, found, experts)]


def biases_around(
    model: nn.Module, found: ExpertsModule, experts: Sequence[ExpertsModule], *, key: str | None = None
) -> list[ChoiceBias]:
    """What may be the bias for the choice among the experts of `found`; more than one cannot be told apart.

    It is looked for in the smallest module around them that has any, as long as that holds no other experts. It is a
    floating buffer, or a parameter with `requires_grad=False`, of shape `[E]` or `[1, E]`, and called something with
    "bias"; but not just `bias`, which is how a linear layer calls what it adds to the scores and the weights alike.

    Args:
        model: holds all of these.
        found: the experts module.
        experts: all experts modules of `model`.
        key: what it is called instead.
    """
    path = found.name.split(".")
    for length in range(len(path) - 1, -1, -1):
        prefix = "".join(f"{part}." for part in path[:length])
        if any(other.name.startswith(prefix) for other in experts if other.module is not found.module):
            return []
        around = model.get_submodule(prefix.rstrip("."))
        if matching := list(_matching(around, prefix, found, key)):
            return matching
    return []


def _matching(around: nn.Module, prefix: str, found: ExpertsModule, key: str | None) -> Iterator[ChoiceBias]:
    inside = set(found.module.modules())
    for name, module in around.named_modules(prefix=prefix.rstrip(".")):
        if module in inside:
            continue
        for called, tensor in (*module.named_buffers(recurse=False), *module.named_parameters(recurse=False)):
            fits = tensor.is_floating_point() and tuple(tensor.shape) in ((found.num_experts,), (1, found.num_experts))
            named = called == key if key else "bias" in called and called != "bias"
            if fits and named and not tensor.requires_grad:
                yield ChoiceBias(name=f"{name}.{called}" if name else called, owner=module, key=called, experts=found)
