"""What routers say of all experts, for a loss of the user's own: kept of each forward, as part of its graph.

parallelize(model, meshes, keep_router_logits=True)
output = model(input_ids)
z_loss = sum(logits.logsumexp(-1).pow(2).mean() for logits in router_logits(model).values())
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_moe_ep.experts.members import with_tie
from lightning_moe_ep.experts.routers import find_routers, logits_of, routers_with_experts
from lightning_moe_ep.rows import is_recomputation
from lightning_moe_ep.trees import map_tensors

_ATTRIBUTE = "_kept_router_logits"


class _Kept:
    """The logits that one router gave in the last forward."""

    def __init__(self, name: str, num_experts: int, group: dist.ProcessGroup | None) -> None:
        self._name, self._num_experts, self._group = name, num_experts, group
        self._is_checked = False
        self.calls: list[Tensor] = []
        """`[T, E]` of each call."""
        self.tie: Tensor | None = None
        """A zero that depends on the root's output."""

    def keep(self, router: nn.Module, args: Any, output: Any) -> None:
        if is_recomputation():
            return
        logits = logits_of(output, self._num_experts)
        if logits is None:
            raise NotImplementedError(
                f"keep_router_logits=True, but {self._name} ({type(router).__name__}) gives no logits"
                f" [T, {self._num_experts}]; leave it out, or have the router return them"
            )
        logits = logits.flatten(0, -2)
        if not self._is_checked:
            self._check(router, logits.detach())
        self.calls.append(logits)

    def _check(self, router: nn.Module, logits: Tensor) -> None:
        """Once; the host waits for it. A rank without tokens is told by the others."""
        is_share = len(logits) > 0 and bool(((logits.sum(dim=-1) - 1).abs() < 1e-2).all() and (logits >= 0).all())
        told = torch.tensor([len(logits) > 0, is_share], dtype=torch.int32)
        if self._group is not None and self._group.size() > 1:
            dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self._group)
        has_tokens, are_shares = told.tolist()
        if are_shares:
            raise NotImplementedError(
                f"keep_router_logits=True, but {self._name} ({type(router).__name__}) gives probabilities, not logits;"
                " leave it out, and take them with a forward hook on the router"
            )
        self._is_checked = bool(has_tokens)


def keep_router_logits(model: nn.Module, roots: Sequence[nn.Module], group: dist.ProcessGroup | None) -> None:
    """Have the routers keep their logits, until they are read or the root around is called again.

    Args:
        model: parallel.
        roots: what is called from outside.
        group: all ranks, for values of the host.

    Raises:
        ValueError: a router is not found; names the experts.
    """
    names = {module: name for name, module in model.named_modules()}
    for router, found in routers_with_experts(model).items():
        kept = _Kept(names[router], found.num_experts, group)
        vars(router)[_ATTRIBUTE] = kept
        router.register_forward_hook(torch.compiler.disable(kept.keep))
    for root in roots:
        own = [vars(module)[_ATTRIBUTE] for module in root.modules() if _ATTRIBUTE in vars(module)]
        root.register_forward_pre_hook(partial(_forget, own))
        root.register_forward_hook(partial(_tie, own))


def _forget(kept: Sequence[_Kept], *_: Any) -> None:
    for each in kept:
        each.calls.clear()
        each.tie = None


def _tie(kept: Sequence[_Kept], root: nn.Module, args: Any, output: Any) -> Any:
    """Have a backward from the logits alone begin with the root's output, as FSDP2 does by what it is told there."""
    tie: Tensor | None = None

    def of_first(tensor: Tensor) -> Tensor:
        nonlocal tie
        if tie is None and tensor.requires_grad:
            tensor, tie = with_tie(tensor)
        return tensor

    output = map_tensors(of_first, output)
    for each in kept:
        each.tie = tie
    return output


def router_logits(model: nn.Module) -> dict[str, Tensor]:
    """What the routers gave in the last forward of a model that keeps it (`keep_router_logits=True`).

    They are let go of with this. Their graph is the forward's; call backward once, for their loss and the model's.

    Args:
        model: parallel, or a LightningModule that holds it.

    Returns:
        By the name of the experts module, `[T, E]` for this rank's tokens, in the dtype of the router; E is more where
        a router may choose no expert at all. Of a layer that was called several times, one call after the other.

    Raises:
        ValueError: the model does not keep them.
        RuntimeError: there has been no forward since they were read.
    """
    found: dict[str, Tensor] = {}
    kept: dict[int, _Kept] = {}
    for name, router in find_routers(model).items():
        of_router: _Kept | None = vars(router).get(_ATTRIBUTE)
        if of_router is None:
            raise ValueError(
                "the model keeps no router logits; give MoEEPStrategy, or parallelize, keep_router_logits=True"
            )
        if not of_router.calls:
            raise RuntimeError(
                f"there are no router logits of {name}: they were read already, or there was no forward since"
            )
        kept[id(of_router)] = of_router
        logits = of_router.calls[0] if len(of_router.calls) == 1 else torch.cat(of_router.calls)
        found[name] = logits if of_router.tie is None else logits + of_router.tie.to(logits.dtype)
    _forget(list(kept.values()))
    return found
