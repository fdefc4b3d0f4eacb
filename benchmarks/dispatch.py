"""One experts layer, forward and backward: every dispatcher against a pair-wise all-to-all and against no exchange.

    python -m benchmarks.dispatch [--rounds 30] [--case ep2-T1024-H512]

The last line is a JSON object. `pairwise` sends a row for each (token, expert) pair, as is usual; `same_work` runs the
same kernels on the same number of rows per expert without any exchange; `best` is the fastest dispatcher of the case.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from benchmarks.harness import counted, interleaved, medians, on_ranks, ratio, report
from lightning_moe_ep import GroupedExperts, Layout, build_meshes
from lightning_moe_ep.dispatch import ExpertGroup, Experts, dispatcher_class
from lightning_moe_ep.dispatch.all_to_all import plan_chunks
from lightning_moe_ep.dispatch.local import run_experts
from lightning_moe_ep.experts import compute_experts
from lightning_moe_ep.rows import RowGroups

INTERMEDIATE, NUM_EXPERTS, TOP_K = 256, 64, 8
CASES = {
    "ep2-T1024-H512": (2, 1024, 512),
    "ep4-T1024-H512": (4, 1024, 512),
    "ep2-T2048-H1024": (2, 2048, 1024),
}
DISPATCHERS = ("all_gather", "all_to_all", "overlapped", "auto")


def pairwise(hidden: Tensor, index: Tensor, weights: Tensor, experts: Experts, group: ExpertGroup) -> Tensor:
    """One row a (token, expert) pair, weighted by the sender: what transformers and torchtitan do, written plainly.

    Torch's differentiable all-to-all carries the rows, as it does there.
    """
    ep, num_local, top_k = group.size, group.num_local, index.shape[1]
    order = torch.argsort(index.flatten(), stable=True)
    send = torch.zeros(group.num_experts, dtype=torch.int64).scatter_add_(0, index.flatten(), torch.ones_like(order))
    receive = torch.empty_like(send)
    dist.all_to_all_single(receive, send, group=group.group)
    both = torch.stack([send, receive]).view(2, ep, num_local)
    (to_ranks, from_ranks), of_experts = both.sum(dim=2).tolist(), both[1]
    rows = all_to_all_single_autograd(hidden[order // top_k], from_ranks, to_ranks, group.group)
    expert_of_row = torch.arange(num_local).repeat(ep).repeat_interleave(receive, output_size=sum(from_ranks))
    by_expert = torch.argsort(expert_of_row, stable=True)
    counts = of_experts.sum(dim=0)
    groups = RowGroups.of(counts, counts.tolist())
    outputs = experts(rows[by_expert], groups)[torch.argsort(by_expert)]
    home = all_to_all_single_autograd(outputs, to_ranks, from_ranks, group.group)
    weighted = home * weights.flatten()[order].unsqueeze(1)
    return torch.zeros_like(hidden).index_add(0, order // top_k, weighted)


def same_work(
    hidden: Tensor, index: Tensor, weights: Tensor, experts: Experts, group: ExpertGroup
) -> Callable[[], Any]:
    """The experts' part of `all_to_all` alone, on as many rows per expert, prepared outside of the timing."""
    (chunk,) = plan_chunks(index, group, 1)
    num_pairs, num_rows = sum(chunk.groups.counts), chunk.num_tokens + sum(chunk.rows.receive)
    source = torch.randn(num_rows, hidden.shape[1], requires_grad=True)
    rows = torch.randint(num_rows, (num_pairs,))
    weight = torch.rand(num_pairs, requires_grad=True)
    gradient = torch.randn(num_rows, hidden.shape[1])

    def run() -> None:
        out = run_experts(experts, source, chunk.groups, row_of_pair=rows, weight_of_pair=weight)
        out.backward(gradient)

    return run


def measure(ep: int, num_tokens: int, hidden_size: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(dist.get_rank())
    meshes = build_meshes(Layout.for_world(ep, ep=ep), "cpu")
    assert meshes.host_ep_group is not None
    group = ExpertGroup(group=meshes.ep_mesh.get_group(), host_group=meshes.host_ep_group, num_experts=NUM_EXPERTS)
    module = GroupedExperts(hidden_size, INTERMEDIATE, NUM_EXPERTS // ep)
    experts = partial(compute_experts, module, computation="auto")
    hidden = torch.randn(num_tokens, hidden_size, requires_grad=True)
    weights, index = torch.rand(num_tokens, NUM_EXPERTS).softmax(dim=1).topk(TOP_K, dim=1)
    weights.requires_grad_()
    gradient = torch.randn(num_tokens, hidden_size)

    def layer(forward: Callable[..., Tensor]) -> Callable[[], None]:
        def run() -> None:
            for tensor in (hidden, weights, *module.parameters()):
                tensor.grad = None
            forward(hidden, index, weights, experts).backward(gradient)

        return run

    variants = {name: layer(dispatcher_class(name)(group)) for name in DISPATCHERS}
    variants["pairwise"] = layer(partial(pairwise, group=group))
    variants["same_work"] = same_work(hidden, index, weights, experts, group)
    for run in variants.values():  # whatever is decided or allocated once
        run()
    counts = {}
    for name, run in variants.items():
        with counted() as count:
            run()
        counts[name] = count
    times = interleaved(variants, runs=rounds)
    middle = medians(times)
    best = min(DISPATCHERS[:-1], key=middle.__getitem__)
    return {
        "median_ms": middle,
        "bytes_sent": {name: count.bytes_sent for name, count in counts.items()},
        "host_syncs": {name: count.host_syncs for name, count in counts.items()},
        "best": best,
        "ratios": {
            "auto/pairwise": ratio(times, "auto", "pairwise"),
            "auto/same_work": ratio(times, "auto", "same_work"),
            "auto/best": ratio(times, "auto", best),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="runs of each variant, interleaved")
    parser.add_argument("--case", choices=CASES, action="append", help="only these cases")
    arguments = parser.parse_args()
    cases = []
    for name in arguments.case or CASES:
        cases.append({"name": name, **on_ranks(measure, CASES[name][0], *CASES[name], arguments.rounds)})
        print(cases[-1])
    report(cases)


if __name__ == "__main__":
    main()
