"""What each dispatcher sends at scale, by simulation: no network, no weights, the product's own code.

    python -m benchmarks.scale [--worlds 8 64 512 4096] [--tokens 4096]

For a world of any size, one process stands for one rank: a fake process group lets the dispatchers run, and what they
hand to the collectives is counted. Random routing without preference decides which rows travel; all ranks are taken to
send as much as this one. Ranks are laid out with ep innermost, so what an ep group exchanges crosses nodes only when ep
is larger than a node. Gigabytes and messages are per rank and step (forward and backward of all layers); gathering and
reducing sharded weights, which FSDP2 does for all dispatchers alike, is listed as `weights`.
The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.harness import Counts, counted, report
from lightning_moe_ep.dispatch import ExpertGroup, dispatcher_class
from lightning_moe_ep.layout import Layout
from lightning_moe_ep.rows import RowGroups

DISPATCHERS = ("all_gather", "all_to_all")
NODE = 8


@dataclass(frozen=True)
class Shape:
    """A model, by the sizes that matter here; bf16."""

    layers: int
    hidden: int
    experts: int
    top_k: int
    intermediate: int
    dense_parameters: float


# From the models' published configurations; dense parameters are what is not in routed experts.
MODELS = {
    "Qwen3-30B-A3B": Shape(48, 2048, 128, 8, 768, 1.5e9),
    "Qwen3-235B-A22B": Shape(94, 4096, 128, 8, 1536, 8.0e9),
    "DeepSeek-V3": Shape(58, 7168, 256, 8, 2048, 17.0e9),
}


@contextmanager
def mirrored() -> Iterator[None]:
    """Every other rank does what this one does: what is sent to a rank is what comes from it."""

    def all_to_all(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> _Done:
        output.copy_(input)
        return _Done()

    def all_gather(output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        output_tensor.view(-1, *input_tensor.shape).copy_(input_tensor)

    def reduce_scatter(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> None:
        output.copy_(input[: len(output)])

    fakes = {
        "all_to_all_single": all_to_all,
        "all_gather_single": all_gather,
        "reduce_scatter_single": reduce_scatter,
    }
    originals = {name: getattr(dist, name) for name in fakes}
    for name, fake in fakes.items():
        fake.__signature__ = inspect.signature(originals[name])  # type: ignore[attr-defined]
        setattr(dist, name, fake)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


class _Done:
    def wait(self) -> None:
        pass


def layer_counts(name: str, shape: Shape, ep: int, tokens: int) -> Counts:
    """What a rank sends in forward and backward of one experts layer."""
    group = dist.new_group(list(range(ep)))
    expert_group = ExpertGroup(group=group, host_group=group, num_experts=shape.experts, equal_tokens=True)
    generator = torch.Generator().manual_seed(0)
    index = torch.rand(tokens, shape.experts, generator=generator).topk(shape.top_k, dim=1).indices
    hidden = torch.zeros(tokens, shape.hidden, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.zeros(tokens, shape.top_k, dtype=torch.bfloat16, requires_grad=True)

    def experts(rows: Tensor, groups: RowGroups, weights: Tensor) -> Tensor:
        return rows * weights.unsqueeze(1)

    with mirrored(), counted() as counts:
        dispatcher_class(name)(expert_group)(hidden, index, weights, experts).sum().backward()
    return counts


def weight_traffic(shape: Shape, layout: Layout) -> tuple[float, float]:
    """Bytes inside and between nodes that FSDP2 sends for the weights: bf16 gathered twice, gradients reduced in fp32.

    By a ring: of consecutive ranks one in a node sends across; where a group's ranks are a node or more apart, all do.
    """
    inside, between = 0.0, 0.0
    experts = shape.layers * 3 * shape.hidden * shape.intermediate * shape.experts / layout.ep
    for parameters, size, stride in ((shape.dense_parameters, layout.fsdp, 1), (experts, layout.efsdp, layout.ep)):
        sent = parameters * (2 * 2 + 4) * (size - 1) / size
        crossing = 0.0 if size * stride <= NODE else min(1.0, stride / NODE)
        inside, between = inside + sent * (1 - crossing), between + sent * crossing
    return inside, between


def measure(model: str, world: int, ep: int, tokens: int) -> dict[str, Any]:
    shape = MODELS[model]
    layout = Layout.for_world(world, ep=ep)
    weights_inside, weights_between = weight_traffic(shape, layout)
    case: dict[str, Any] = {
        "name": f"{model} world {world} ep {ep}",
        "weights_gb": {"intra_node": _gb(weights_inside), "inter_node": _gb(weights_between)},
        "dispatch_gb": {},
        "messages": {},
    }
    for name in DISPATCHERS:
        counts = layer_counts(name, shape, ep, tokens)
        other_nodes = max(0, ep - NODE) / max(1, ep - 1)
        total = counts.bytes_sent * shape.layers
        case["dispatch_gb"][name] = {
            "intra_node": _gb(total * (1 - other_nodes)),
            "inter_node": _gb(total * other_nodes),
        }
        case["messages"][name] = counts.messages * shape.layers
    return case


def _gb(number: float) -> float:
    return round(number / 1e9, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--ep", type=int, nargs="+", default=[8, 16], help="those that a world admits")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens a rank and step")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=max(arguments.worlds))
    cases = []
    for model in MODELS:
        for ep in arguments.ep:
            for world in arguments.worlds:
                if world % ep == 0:
                    cases.append(measure(model, world, ep, arguments.tokens))
                    print(cases[-1], flush=True)
    report(cases)


if __name__ == "__main__":
    main()
