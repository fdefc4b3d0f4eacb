"""What is routed is seen the same in every kind of experts module, and at every layout."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_moe_ep import GroupedExperts, Layout, build_meshes, parallelize, spread_experts
from lightning_moe_ep.callbacks.load import LoadCounter
from lightning_moe_ep.experts import find_experts, watch_routing
from tests.families.tiny import loss_of as loss_of_family
from tests.families.tiny import tiny_batch, tiny_model
from tests.list_models import BLOCKS
from tests.matrix import mostly_more
from tests.models import build, loss_of, make_batch
from tests.pool import RankPool

FAMILIES = ["qwen3_moe", "dbrx", "llama4_text", "jetmoe", "longcat_flash", "ernie4_5_vl_moe_text"]
LISTS = list(BLOCKS)


def _forward(kind: str, model: nn.Module) -> None:
    seed = dist.get_rank()
    if kind in FAMILIES:
        loss_of_family(kind, model, tiny_batch(kind, seed))
    else:
        loss_of(model, make_batch("own", 16, seed))


def _seen(kind: str) -> list[tuple[list[list[int]], list[list[int]]]]:
    """On a rank, at ep 2 and 1: pairs by expert, of all ranks; and those that the dispatchers counted."""
    results = []
    for ep in (2, 1):
        torch.manual_seed(0)
        model = tiny_model(kind) if kind in FAMILIES else build(kind)
        parallelize(model, build_meshes(Layout.for_world(2, ep=ep), "cpu"), dispatcher="all_gather")
        found = find_experts(model)
        counter = LoadCounter(found, torch.device("cpu"))
        _forward(kind, model)  # does not count
        for _, spread in spread_experts(model):
            spread.statistics.reset()
        counter.counting = True
        _forward(kind, model)
        loads = counter.loads()
        dist.all_reduce(loads)
        computed = []
        for _, spread in spread_experts(model):
            of_experts = torch.zeros(spread.num_experts, dtype=torch.int64)
            if (pairs := spread.statistics.pairs_of_expert) is not None:
                of_experts[spread.first : spread.first + spread.num_local] = pairs
            dist.all_reduce(of_experts)
            computed.append(of_experts.tolist())
        results.append(([load.tolist() for load in counter.of_layers(loads)], computed))
        counter.close()
        assert not any(spread.watchers for _, spread in spread_experts(model))
    return results


@pytest.mark.parametrize("kind", mostly_more(["own", *FAMILIES, *LISTS], "llama4_text", "jetmoe", LISTS[0]))
def test_every_kind(ranks: RankPool, kind: str) -> None:
    for (spread, computed), (alone, _) in ranks.run(_seen, kind, world=2):
        assert spread == computed == alone
        assert any(sum(of_layer) > 0 for of_layer in spread)


def test_a_plain_model_by_position_and_by_name() -> None:
    experts = GroupedExperts(4, 6, 3)
    (found,) = find_experts(nn.ModuleDict({"experts": experts}))
    seen: list[tuple[Tensor, Tensor]] = []
    handle = watch_routing(found, lambda top_k_index, top_k_weights: seen.append((top_k_index, top_k_weights)))
    hidden, index, weights = torch.randn(2, 4), torch.tensor([[0], [2]]), torch.rand(2, 1)
    experts(hidden, index, weights)
    experts(hidden, index, top_k_weights=weights)
    experts(hidden, top_k_weights=weights, top_k_index=index)
    experts(hidden=hidden, top_k_index=index, top_k_weights=weights)
    handle.remove()
    experts(hidden, index, weights)
    assert len(seen) == 4
    assert all(one is index and other is weights for one, other in seen)


def test_a_plain_model_in_which_it_cannot_be_seen() -> None:
    model = build(LISTS[0])
    with pytest.raises(
        ValueError,
        match=r"routed to the experts of blocks.0.moe.experts \(ModuleList\) cannot be seen in a plain model, where"
        r" they are not called with .*; use MoEEPStrategy, with ep=1 on one device",
    ):
        watch_routing(find_experts(model)[0], lambda top_k_index, top_k_weights: None)
