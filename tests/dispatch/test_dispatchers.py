"""Every dispatcher against one process: any tokens per rank, any routing; what it sends; what it asks the host."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.harness import counted
from lightning_moe_ep import GroupedExperts, Layout, build_meshes, remember_exchange, remember_routing
from lightning_moe_ep.dispatch import ExpertGroup, OverlappedDispatcher, dispatcher_class
from lightning_moe_ep.dispatch.auto import costs, distinct_remote_ranks
from lightning_moe_ep.experts import Computation, compute_experts
from tests import parity  # noqa: F401  (registers three_chunks, on the ranks too)
from tests.oracle import experts_one_by_one
from tests.pool import RankPool

DISPATCHERS = ["all_gather", "all_to_all", "three_chunks", "auto"]


def group_of(num_experts: int, **options: Any) -> ExpertGroup:
    world = dist.get_world_size()
    meshes = build_meshes(Layout.for_world(world, ep=world), "cpu")
    assert meshes.host_ep_group is not None
    return ExpertGroup(
        group=meshes.ep_mesh.get_group(), host_group=meshes.host_ep_group, num_experts=num_experts, **options
    )


def tokens_of(
    rank: int, num_tokens: int, sizes: tuple[int, int, int], seed: int, without_expert: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden, index and weights of a rank; routing prefers a few experts, so that some get nothing.

    A share of the choices, `without_expert`, chooses none.
    """
    hidden_size, num_experts, top_k = sizes
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator)
    preference = torch.randn(num_experts, generator=torch.Generator().manual_seed(seed)) * 3
    scores = torch.rand(num_tokens, num_experts, generator=generator) + preference
    weights, index = scores.softmax(dim=1).topk(top_k, dim=1)
    none = torch.where(index % 2 == 0, -1, num_experts)
    return hidden, torch.where(torch.rand(index.shape, generator=generator) < without_expert, none, index), weights


def layer_errors(
    name: str,
    tokens: list[int],
    sizes: tuple[int, int, int],
    intermediate: int,
    seed: int,
    computation: Computation,
    without_expert: float = 0.0,
) -> dict[str, float]:
    """On a rank: the largest difference from one process, as a share of the largest value, of output and gradients."""
    world, rank = dist.get_world_size(), dist.get_rank()
    hidden_size, num_experts, _ = sizes
    torch.manual_seed(seed)
    whole = GroupedExperts(hidden_size, intermediate, num_experts)
    group = group_of(num_experts)
    mine = GroupedExperts(hidden_size, intermediate, group.num_local)
    local = slice(group.first, group.first + group.num_local)
    mine.load_state_dict({key: value[local] for key, value in whole.state_dict().items()})

    inputs = [tokens_of(r, tokens[r], sizes, seed, without_expert) for r in range(world)]
    leaves = [(hidden.requires_grad_(), weights.requires_grad_()) for hidden, _, weights in inputs]
    outputs = [experts_one_by_one(whole, hidden, index, weights) for hidden, index, weights in inputs]
    sum((output * torch.arange(1.0, hidden_size + 1)).sum() for output in outputs).backward()

    hidden, index, weights = tokens_of(rank, tokens[rank], sizes, seed, without_expert)
    hidden.requires_grad_(), weights.requires_grad_()
    experts = partial(compute_experts, mine, computation=computation)
    output = dispatcher_class(name)(group)(hidden, index, weights, experts)
    (output * torch.arange(1.0, hidden_size + 1)).sum().backward()

    def error(ours: Tensor, theirs: Tensor | None) -> float:
        theirs = torch.zeros_like(ours) if theirs is None else theirs  # no token has an expert
        assert ours.shape == theirs.shape
        return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6)) if theirs.numel() else 0.0

    zero = torch.zeros_like(whole.gate_up_proj), torch.zeros_like(whole.down_proj)
    whole_grads = [p.grad if p.grad is not None else z for p, z in zip(whole.parameters(), zero, strict=True)]
    return {
        "output": error(output, outputs[rank]),
        "hidden": error(hidden.grad, leaves[rank][0].grad),
        "weights": error(weights.grad, leaves[rank][1].grad),
        **{
            key: float((p.grad - g[local]).abs().max() / g.abs().max().clamp(min=1e-6))
            for (key, p), g in zip(mine.named_parameters(), whole_grads, strict=True)
        },
    }


@given(data=st.data())
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_routing(ranks: RankPool, data: st.DataObject) -> None:
    ep = data.draw(st.sampled_from([2, 3, 4]), "ep")
    num_experts = ep * data.draw(st.integers(1, 4), "experts a rank")
    top_k = data.draw(st.integers(1, min(num_experts, 8)), "K")
    tokens = data.draw(st.lists(st.integers(0, 12), min_size=ep, max_size=ep), "tokens")
    sizes = (data.draw(st.sampled_from([4, 6]), "H"), num_experts, top_k)
    name = data.draw(st.sampled_from(DISPATCHERS), "dispatcher")
    computation = data.draw(st.sampled_from(["auto", "loop"]), "computation")
    seed = data.draw(st.integers(0, 10), "seed")
    without_expert = data.draw(st.sampled_from([0.0, 0.3, 1.0]), "without an expert")
    for errors in ranks.run(layer_errors, name, tokens, sizes, 8, seed, computation, without_expert, world=ep):
        assert max(errors.values()) < 1e-5, errors


def counts_of_layer(name: str, dtype: torch.dtype, widens: int = 1) -> dict[str, Any]:
    """On a rank: what one layer with T=64, H=512, E=64, K=8 sends and asks, and what it had to send."""
    sizes = (512, 64, 8)
    group = group_of(64)
    module = GroupedExperts(512, 16, group.num_local).to(dtype)
    torch.manual_seed(dist.get_rank())
    hidden = torch.randn(64, 512, dtype=dtype, requires_grad=True)
    _, index, weights = tokens_of(dist.get_rank(), 64, sizes, 3)
    weights = weights.to(dtype).requires_grad_()
    owners = index // group.num_local
    remote = [set(row) - {group.group.rank()} for row in owners.tolist()]

    def experts(*args: Any) -> Tensor:
        return compute_experts(module, *args, computation="grouped_mm").repeat(1, widens)

    dispatcher = dispatcher_class(name)(group)
    with counted() as forward:
        output = dispatcher(hidden, index, weights, experts)
    with counted() as backward:
        output.sum().backward()
    return {
        "rows_needed": sum(len(ranks) for ranks in remote),
        "pairs": int((owners != group.group.rank()).sum()),
        "row_bytes": 512 * dtype.itemsize,
        "statistics": group.statistics,
        "forward": forward,
        "backward": backward,
        "computed": int(group.statistics.pairs_of_expert.sum()),
    }


@pytest.mark.parametrize(("dtype", "metadata"), [(torch.float32, 0.015), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("ep", [2, 4])
def test_all_to_all_sends_exactly_the_rows_needed(
    ranks: RankPool, ep: int, dtype: torch.dtype, metadata: float
) -> None:
    results = ranks.run(counts_of_layer, "all_to_all", dtype, world=ep)
    received = sum(result["statistics"].rows_received for result in results)
    assert received == sum(result["rows_needed"] for result in results)
    for result in results:
        statistics = result["statistics"]
        assert statistics.rows_sent == result["rows_needed"]
        rows = result["row_bytes"] * (statistics.rows_sent + statistics.rows_received)
        assert statistics.bytes_sent == rows
        counts = 8 * (ep - 1) * (64 // ep + 1)  # one int64 an expert and rank, for any number of tokens
        extra = result["forward"].bytes_sent - rows - counts
        assert extra == result["pairs"] * (dtype.itemsize + 2)
        assert extra <= metadata * result["row_bytes"] * statistics.rows_sent
    assert sum(result["computed"] for result in results) == ep * 64 * 8


@pytest.mark.parametrize("dispatcher", ["all_gather", "all_to_all"])
def test_bytes_of_sums_that_are_wider_than_the_rows(ranks: RankPool, dispatcher: str) -> None:
    for result in ranks.run(counts_of_layer, dispatcher, torch.float32, 2, world=2):
        statistics = result["statistics"]
        assert statistics.bytes_sent == result["row_bytes"] * (statistics.rows_sent + 2 * statistics.rows_received)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_one_host_sync_in_forward_and_none_in_backward(ranks: RankPool, dispatcher: str) -> None:
    for result in ranks.run(counts_of_layer, dispatcher, torch.float32, world=2):
        assert result["forward"].host_syncs == 1
        assert result["backward"].host_syncs == 0


def nan_beside(name: str) -> bool:
    """On a rank: whether its output and its tokens' gradients are finite although rank 0's tokens are NaN."""
    group = group_of(4)
    module = GroupedExperts(8, 8, group.num_local)
    hidden = torch.full((3, 8), float("nan") if dist.get_rank() == 0 else 1.0).requires_grad_()
    index = torch.tensor([[0, 3], [1, 2], [2, 0]])
    output = dispatcher_class(name)(group)(
        hidden, index, torch.ones(3, 2), partial(compute_experts, module, computation="auto")
    )
    output.sum().backward()
    assert hidden.grad is not None
    return bool(output.isfinite().all() and hidden.grad.isfinite().all())


@pytest.mark.parametrize("dispatcher", ["all_gather", "all_to_all", "three_chunks"])
def test_nan_does_not_spread_to_other_ranks(ranks: RankPool, dispatcher: str) -> None:
    assert ranks.run(nan_beside, dispatcher, world=2) == [False, True]


def second_derivative(name: str) -> str:
    """On a rank: what becomes of a gradient's gradient."""
    group = group_of(4)
    module = GroupedExperts(8, 8, group.num_local)
    hidden = torch.randn(3, 8, requires_grad=True)
    output = dispatcher_class(name)(group)(
        hidden, torch.tensor([[0, 3]] * 3), torch.ones(3, 2), partial(compute_experts, module, computation="loop")
    )
    try:
        (grad,) = torch.autograd.grad(output.pow(2).sum(), hidden, create_graph=True)
        grad.pow(2).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "a number"


@pytest.mark.parametrize("dispatcher", ["all_gather", "all_to_all"])
def test_a_second_derivative_is_refused(ranks: RankPool, dispatcher: str) -> None:
    for message in ranks.run(second_derivative, dispatcher, world=2):
        assert "once_differentiable" in message


def recompute(name: str) -> tuple[int, int]:
    """On a rank: forwards and pairs counted when activation checkpointing recomputes the layer."""
    group = group_of(4)
    module = GroupedExperts(8, 8, group.num_local)
    hidden = torch.randn(5, 8, requires_grad=True)
    dispatcher = dispatcher_class(name)(group)
    index, weights = torch.tensor([[0, 3]] * 5), torch.ones(5, 2)
    output = torch.utils.checkpoint.checkpoint(
        lambda h: dispatcher(h, index, weights, partial(compute_experts, module, computation="auto")),
        hidden,
        use_reentrant=False,
    )
    output.sum().backward()
    return group.statistics.forwards, int(group.statistics.pairs_of_expert.sum())


@pytest.mark.parametrize("dispatcher", ["all_gather", "all_to_all"])
def test_recomputation_is_not_counted_twice(ranks: RankPool, dispatcher: str) -> None:
    results = ranks.run(recompute, dispatcher, world=2)
    assert [forwards for forwards, _ in results] == [1, 1]
    assert sum(pairs for _, pairs in results) == 2 * 5 * 2


def recompute_remembered(name: str) -> dict[str, Any]:
    """On a rank: what backward asks and exchanges with less and less recomputed; whether the gradients are the same."""
    group = group_of(4)
    torch.manual_seed(0)
    module = GroupedExperts(8, 8, group.num_local)
    num_tokens = 5 + dist.get_rank()
    index = torch.tensor([[0, 3], [1, 2]] * 4)[:num_tokens]
    dispatcher = dispatcher_class(name)(group)

    def layer(hidden: Tensor, weights: Tensor) -> Tensor:
        return dispatcher(hidden, index, weights, partial(compute_experts, module, computation="auto"))

    results = []
    for options in ({}, {"context_fn": remember_routing}, {"context_fn": remember_exchange}, None):
        torch.manual_seed(1)
        hidden, weights = torch.randn(num_tokens, 8, requires_grad=True), torch.rand(num_tokens, 2, requires_grad=True)
        if options is None:
            output = layer(hidden, weights)
        else:
            output = torch.utils.checkpoint.checkpoint(layer, hidden, weights, use_reentrant=False, **options)
        with counted() as counts:
            output.square().sum().backward()
        results.append((counts, [hidden.grad, weights.grad, *(p.grad for p in module.parameters())]))
        module.zero_grad()
    *_, (_, right) = results
    return {
        "equal": all(torch.equal(a, b) for _, ours in results for a, b in zip(ours, right, strict=True)),
        "syncs": [counts.host_syncs for counts, _ in results],
        "messages": [counts.messages for counts, _ in results],
    }


@pytest.mark.parametrize("dispatcher", ["all_gather", "all_to_all", "three_chunks"])
def test_what_is_remembered_is_not_asked_for_again(ranks: RankPool, dispatcher: str) -> None:
    for result in ranks.run(recompute_remembered, dispatcher, world=2):
        assert result["equal"]
        assert result["syncs"] == [1, 0, 0, 0]
        all_again, rows_again, nothing_again, kept = result["messages"]
        assert all_again > rows_again > nothing_again == kept


def chunks_of(tokens: list[int]) -> int:
    """On a rank: into how many chunks `overlapped` cuts."""
    return OverlappedDispatcher(group_of(4)).num_chunks(tokens[dist.get_rank()])


@pytest.mark.parametrize(
    ("tokens", "chunks"), [([1023, 0], 1), ([1024, 0], 2), ([0, 1024], 2), ([5000, 5000], 2), ([0, 0], 1)]
)
def test_overlapped_cuts_by_the_longest_rank(ranks: RankPool, tokens: list[int], chunks: int) -> None:
    assert ranks.run(chunks_of, tokens, world=2) == [chunks, chunks]


def test_distinct_ranks_are_those_of_design() -> None:
    assert distinct_remote_ranks(ep=4, num_experts=64, top_k=8) == pytest.approx(2.744, abs=0.001)
    assert distinct_remote_ranks(ep=2, num_experts=64, top_k=8) == pytest.approx(0.998, abs=0.001)
    assert distinct_remote_ranks(ep=2, num_experts=2, top_k=1) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("backend", "ep", "top_k", "chosen"),
    [("gloo", 2, 8, "all_to_all"), ("nccl", 2, 8, "all_gather"), ("nccl", 8, 2, "all_to_all")],
)
def test_cost_model(backend: str, ep: int, top_k: int, chosen: str) -> None:
    f32 = torch.float32
    gather, exchange = costs(
        ep=ep,
        num_experts=64,
        top_k=top_k,
        hidden_size=512,
        dtype=f32,
        gather_sum_dtype=f32,
        exchange_sum_dtype=f32,
        backend=backend,
    )
    assert ("all_to_all" if exchange < 0.95 * gather else "all_gather") == chosen


def test_unknown_and_unsupported_names() -> None:
    with pytest.raises(ValueError, match=r"no dispatcher is named 'nope'; use one of \['all_gather', 'all_to_all'"):
        dispatcher_class("nope")
    with pytest.raises(NotImplementedError, match="'deep_ep' is not supported"):
        dispatcher_class("deep_ep")
