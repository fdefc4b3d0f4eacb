"""Memory and time of a training step at growing length: each sequence on one rank, or cut over 2 or 4.

    python -m benchmarks.context_parallel --ranks 2 --lengths 512 1024 2048 4096 8192

A small Qwen3-MoE whose experts are spread over all ranks; forward, backward, AdamW. A group of cp ranks has one
sequence at a time. Memory is the most that a rank has in one such micro-batch and the optimizer's step, beside the
weights, gradients and optimizer state that it keeps. Times are of steps with the same tokens: a sequence for each rank,
which at cp=1 are one micro-batch, at cp more of them, one after the other. Steps of both are interleaved. On CUDA (with
`--device cuda`) memory is the allocator's, on a CPU that of torch's memory tracker.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from benchmarks.harness import interleaved, medians, on_ranks, ratio, report
from lightning_moe_ep import Layout, build_meshes, materialize, parallelize
from lightning_moe_ep.context_parallel import shard_sequences
from lightning_moe_ep.experts import expert_parameters
from lightning_moe_ep.gradients import scale_gradients

VOCABULARY = 512
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


def config(length: int) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        max_position_embeddings=length,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        bos_token_id=None,
        eos_token_id=None,
    )


class Variant:
    """A model at a cp, and its step."""

    def __init__(self, length: int, cp: int, device: torch.device) -> None:
        world = dist.get_world_size()
        self.length, self.cp, self.device = length, cp, device
        self.meshes = build_meshes(Layout.for_world(world, ep=world, cp=cp), device.type)
        with torch.device("meta"):
            self.model: nn.Module = AutoModelForCausalLM.from_config(config(length))
        parallelize(self.model, self.meshes, equal_tokens=True)
        materialize(self.model, seed=0, device=device)
        self.model.train()
        self.experts = expert_parameters(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def loss(self) -> Tensor:
        """Of one sequence, the same on the ranks of a group."""
        group = dist.get_rank() // self.cp
        ids = torch.randint(VOCABULARY, (1, self.length), generator=torch.Generator().manual_seed(group))
        ids = ids.to(self.device)
        batch = shard_sequences({"input_ids": ids, "labels": ids}, rank=self.meshes.cp_rank, size=self.cp)
        targets = batch.pop("shift_labels")
        logits = self.model(**batch, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100)

    def step(self, micro_batches: int) -> None:
        for _ in range(micro_batches):
            (self.loss() / micro_batches).backward()
        scale_gradients(self.experts, 1 / self.meshes.layout.ep)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def memory(self) -> int:
        """Bytes at the peak of a step with one micro-batch, beside what there was before it, and gradients."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            self.step(1)
            return torch.cuda.max_memory_allocated(self.device) - before
        tracker = MemTracker()
        tracker.track_external(self.model, self.optimizer)
        with tracker:
            before = sum(s["Total"] for s in tracker.get_tracker_snapshot("current").values())
            self.step(1)
        return sum(s["Total"] for s in tracker.get_tracker_snapshot("peak").values()) - before


def measure(cps: list[int], length: int, rounds: int, device_type: str) -> dict[str, Any]:
    """On a rank: what each cp takes at this length."""
    device = torch.device(device_type, dist.get_rank()) if device_type == "cuda" else torch.device(device_type)
    variants = {cp: Variant(length, cp, device) for cp in cps}
    memory = {}
    for cp, variant in variants.items():
        variant.step(1)  # the optimizer's state exists from here on
        most = torch.tensor(variant.memory(), device=device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        memory[f"cp{cp}"] = round(int(most) / 2**20, 2)
    steps: dict[str, Callable[[], None]] = {
        f"cp{cp}": lambda variant=variant: variant.step(variant.cp)  # type: ignore[misc]
        for cp, variant in variants.items()
    }
    times = interleaved(steps, runs=rounds, warmup=1)
    others = [name for name in memory if name != "cp1"]
    return {
        "length": length,
        "tokens_a_step": length * dist.get_world_size(),
        "memory_mib": memory,
        "memory_ratios": {f"{name}/cp1": round(memory[name] / memory["cp1"], 3) for name in others},
        "median_ms": medians(times),
        "time_ratios": {f"{name}/cp1": ratio(times, name, "cp1") for name in others},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cp", type=int, nargs="+", default=[2], help="beside 1")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=5, help="steps of each, interleaved")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    a = parser.parse_args()
    cases = []
    for length in a.lengths:
        cases.append(on_ranks(measure, a.ranks, [1, *a.cp], length, a.rounds, a.device, backend=BACKENDS[a.device]))
        print(cases[-1], flush=True)
    report(cases)


if __name__ == "__main__":
    main()
