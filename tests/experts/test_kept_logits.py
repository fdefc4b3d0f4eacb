"""Router logits for a loss of the user's own: whole, of the last forward alone, and part of its graph."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_moe_ep import Layout, build_meshes, parallelize, router_logits
from lightning_moe_ep.experts import find_routers
from tests.families.tiny import loss_of as loss_of_family
from tests.families.tiny import tiny_batch, tiny_model
from tests.models import build, loss_of, make_batch
from tests.parity import plain, worst
from tests.pool import RankPool

KIND = "qwen3_moe"


def z_loss(logits: dict[str, Tensor]) -> Tensor:
    return torch.stack([each.logsumexp(dim=-1).pow(2).mean() for each in logits.values()]).sum()


def model_of(kind: str = KIND) -> nn.Module:
    torch.manual_seed(0)
    return build(kind)


def _gradients(ep: int, options: dict[str, Any], alone: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = model_of()
    meshes = build_meshes(Layout.for_world(2, ep=ep), "cpu")
    if "compile_blocks" in options:  # what is compiled without hooks must not stand for what has them
        other = model_of()
        parallelize(other, meshes, **options)
        loss_of(other, make_batch(KIND, 16, seed=5)).backward()
    parallelize(model, meshes, keep_router_logits=True, **options)
    batch = make_batch(KIND, 16, seed=dist.get_rank())
    loss_of(model, make_batch(KIND, 8, seed=5))  # is forgotten
    loss = loss_of(model, batch)
    logits = router_logits(model)
    assert [each.shape for each in logits.values()] == [(16, 8)] * 2
    with pytest.raises(RuntimeError, match=r"no router logits of model\.layers\.0\.mlp\.experts: they were read"):
        router_logits(model)
    (z_loss(logits) if alone else loss + z_loss(logits)).backward()
    with pytest.raises(RuntimeError, match="they were read already"):  # what was recomputed is not kept
        router_logits(model)
    return (
        {name: each.detach() for name, each in logits.items()},
        plain(model, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}),
    )


def _oracle(alone: bool) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """One process that has the batches of both ranks."""
    model = model_of()
    seen: dict[str, Tensor] = {}
    for name, router in find_routers(model).items():
        router.register_forward_hook(lambda _, args, output, name=name: seen.update({name: output[0]}))
    of_ranks = []
    for rank in range(2):
        loss = loss_of(model, make_batch(KIND, 16, seed=rank))
        of_ranks.append({name: each.detach() for name, each in seen.items()})
        ((z_loss(seen) if alone else loss + z_loss(seen)) / 2).backward()
    return of_ranks, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("ep", "options", "alone"),
    [
        (2, {"activation_checkpointing": "full", "dispatcher": "all_to_all"}, False),
        (2, {"activation_checkpointing": "full"}, True),
        (1, {}, False),
        (2, {}, True),
        pytest.param(2, {"activation_checkpointing": "selective"}, False, marks=pytest.mark.more),
        pytest.param(2, {"compile_blocks": True}, False, marks=pytest.mark.more),
    ],
)
def test_a_loss_of_them_has_the_gradients_of_one_process(
    ranks: RankPool, ep: int, options: dict[str, Any], alone: bool
) -> None:
    right_logits, right = _oracle(alone)
    results = ranks.run(_gradients, ep, options, alone, world=2)
    for (logits, gradients), theirs in zip(results, right_logits, strict=True):
        for name in theirs:
            torch.testing.assert_close(logits[name], theirs[name], rtol=1e-5, atol=1e-5)
        ours = {name: each / (ep if ".experts." in name else 1) for name, each in gradients.items()}
        none = ours.keys() - right.keys()  # which the other loss would have had gradients for
        assert all(not ours[name].any() for name in none) and (alone or not none)
        error, name = worst({name: ours[name] for name in right}, right)
        assert error < 1e-5, f"{name} is off by {error:.1e}"


FORWARDS = ("deepseek_v3", "glm4_moe", "gpt_oss", "llama4_text", "dbrx", "jetmoe", "longcat_flash", "phimoe")


def _of_family(family: str) -> dict[str, list[int]]:
    torch.manual_seed(0)
    model = tiny_model(family)
    parallelize(model, build_meshes(Layout.for_world(2, ep=2), "cpu"), keep_router_logits=True)
    loss = loss_of_family(family, model, tiny_batch(family, 0, tokens=32))
    logits = router_logits(model)
    (loss + z_loss(logits)).backward()
    return {name: list(each.shape) for name, each in logits.items()}


@pytest.mark.sweep
@pytest.mark.parametrize("family", FORWARDS)
def test_families(ranks: RankPool, family: str) -> None:
    model = tiny_model(family)
    width = 12 if family == "longcat_flash" else 8
    assert ranks.run(_of_family, family, world=2) == [{name: [32, width] for name in find_routers(model)}] * 2


def _refused(family: str) -> str:
    with pytest.raises(NotImplementedError) as error:
        _of_family(family)
    return str(error.value)


class Silent(nn.Module):
    """Gives a choice, and no logits."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router, self.num_experts = router, 8

    def forward(self, hidden: Tensor) -> tuple[None, Tensor, Tensor]:
        _, weights, index = self.router(hidden)
        return None, weights, index


def _without() -> str:
    model = model_of("own")
    for block in model.blocks:
        block.moe.router = Silent(block.moe.router)
    meshes = build_meshes(Layout.for_world(2, ep=2), "cpu")
    with pytest.raises(ValueError, match="keeps no router logits; give MoEEPStrategy"):
        router_logits(model)
    parallelize(model, meshes, keep_router_logits=True)
    with pytest.raises(NotImplementedError) as error:
        # Of which rank 1 has no tokens.
        model(torch.randn(0 if dist.get_rank() else 4, 64))
    return str(error.value)


def test_routers_without_logits_are_refused_on_every_rank(ranks: RankPool) -> None:
    silent = "keep_router_logits=True, but blocks.0.moe.router (Silent) gives no logits [T, 8]; leave it out, or have"
    assert all(told.startswith(silent) for told in ranks.run(_without, world=2))
    shares = "keep_router_logits=True, but layers.0.router (Gemma4TextRouter) gives probabilities, not logits; leave"
    assert all(told.startswith(shares) for told in ranks.run(_refused, "gemma4_text", world=2))


def test_the_option_is_the_strategys_too() -> None:
    from lightning_moe_ep import MoEEPStrategy

    options = MoEEPStrategy(keep_router_logits=True, router_dtype="float32").parallelize_options
    assert options["keep_router_logits"] is True
    assert options.keys() <= inspect.signature(parallelize).parameters.keys()
