"""A whole training step of a small Qwen3-MoE: forward, backward, clip by norm, AdamW.

    python -m benchmarks.step [--rounds 15] [--case ep2]

Against transformers' own expert parallelism at the same layout and against FSDP2 alone, with the same attention, data
and optimizer, and the same clipping code; each of our dispatchers, and the default one once more inside of Lightning's
loop. Rounds are interleaved. The last line is a JSON object; `memory_mib` is the peak of live tensors in one step.
"""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

from benchmarks.harness import counted, interleaved, medians, on_ranks, ratio, report
from lightning_moe_ep import Layout, MoEEPStrategy, build_meshes, materialize, parallelize
from lightning_moe_ep.experts import expert_parameters
from lightning_moe_ep.gradients import clip_by_norm, gradient_norm, scale_gradients

SEQUENCES, LENGTH, VOCABULARY = 4, 256, 512
CASES = {
    # world, ep, forced balance
    "ep2": (2, 2, False),
    "ep2-forced-balance": (2, 2, True),
    "ep4": (4, 4, False),
    "ep2-efsdp2": (4, 2, False),
}
DISPATCHERS = ("auto", "all_gather", "all_to_all", "overlapped")


def config() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=128,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        experts_implementation="grouped_mm",
        bos_token_id=None,
        eos_token_id=None,
    )


def ours(ep: int, dispatcher: str) -> nn.Module:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config())
    parallelize(model, build_meshes(Layout.for_world(dist.get_world_size(), ep=ep), "cpu"), dispatcher=dispatcher)
    materialize(model, seed=0, device=torch.device("cpu"))
    return model.train()


def transformers_ep(ep: int) -> nn.Module:
    distributed = DistributedConfig(fsdp_size=dist.get_world_size(), ep_size=ep)
    return Qwen3MoeForCausalLM.from_pretrained(
        None, config=config(), state_dict={}, distributed_config=distributed, dtype=torch.float32
    ).train()


def fsdp2() -> nn.Module:
    model = AutoModelForCausalLM.from_config(config())
    mesh = build_meshes(Layout.for_world(dist.get_world_size(), ep=1), "cpu").dense
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model.train()


def force_balance(model: nn.Module) -> None:
    """Route tokens to experts in turn, whatever the router says; its weights still count."""

    def forward(self: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = hidden.reshape(-1, hidden.shape[-1])
        logits = F.linear(hidden, self.weight)
        index = torch.arange(hidden.shape[0] * self.top_k).view(-1, self.top_k) % self.num_experts
        return logits, logits.softmax(dim=-1).gather(1, index), index

    for module in model.modules():
        if "TopKRouter" in type(module).__name__:
            module.forward = MethodType(forward, module)


def batch() -> Tensor:
    return torch.randint(VOCABULARY, (SEQUENCES, LENGTH))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def step_of(model: nn.Module, ep: int) -> Callable[[], None]:
    """A step in a plain loop; `ep` is by what our experts' gradients are still to be divided."""
    parameters = list(model.parameters())
    experts = expert_parameters(model) if ep > 1 else []
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)

    def run() -> None:
        loss_of(model, batch()).backward()
        scale_gradients(experts, 1 / ep)
        norm = gradient_norm({"all": parameters}, norm_type=2.0, group=dist.group.WORLD, device=torch.device("cpu"))
        clip_by_norm(parameters, total=norm.total, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

    return run


class StepModule(L.LightningModule):
    def __init__(self, balanced: bool) -> None:
        super().__init__()
        self.balanced = balanced

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(config())
        if self.balanced:
            force_balance(self.model)
        self.model.train()

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        loss = loss_of(self.model, ids)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class StepByStep:
    """A loader that hands Lightning one batch per call of `run`, by running everything else between two batches."""

    def __init__(self, rounds: Callable[[], Iterator[None]], length: int) -> None:
        self.rounds, self.length = rounds, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Tensor]:
        for _ in self.rounds():
            yield batch()


def measure(world: int, ep: int, balanced: bool, rounds: int, warmup: int = 3) -> dict[str, Any]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(world), LOCAL_RANK=str(dist.get_rank()))
    os.environ.update(LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT="0", GROUP_RANK="0")
    torch.manual_seed(dist.get_rank())
    models = {f"lightning_moe_ep[{name}]": ours(ep, name) for name in DISPATCHERS}
    models |= {"transformers": transformers_ep(ep), "fsdp2": fsdp2()}
    for model in models.values() if balanced else ():
        force_balance(model)
    variants = {name: step_of(m, ep if name.startswith("lightning") else 1) for name, m in models.items()}
    memory, counts = {}, {}
    for name, run in variants.items():
        run()  # the optimizer's state exists from here on
        tracker = MemTracker()
        tracker.track_external(models[name])
        with tracker:
            run()
        memory[name] = round(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"] / 2**20, 1)
        with counted() as count:
            run()
        counts[name] = count
    times, loop_times = _with_lightning(variants, ep, balanced, rounds, warmup)
    times["loop"] = loop_times
    default = "lightning_moe_ep[auto]"
    return {
        "median_ms": medians(times),
        "memory_mib": memory,
        "bytes_sent": {name: count.bytes_sent for name, count in counts.items()},
        "host_syncs": {name: count.host_syncs for name, count in counts.items()},
        "ratios": {
            "lightning_moe_ep/transformers": ratio(times, default, "transformers"),
            "loop/transformers": ratio(times, "loop", "transformers"),
            "lightning_moe_ep/fsdp2": ratio(times, default, "fsdp2"),
            "auto/best": min(ratio(times, default, f"lightning_moe_ep[{name}]") for name in DISPATCHERS[1:3]),
        },
    }


def _with_lightning(
    variants: dict[str, Callable[[], None]], ep: int, balanced: bool, rounds: int, warmup: int
) -> tuple[dict[str, list[float]], list[float]]:
    """Interleave the variants with the steps of a Trainer: one round of them before each of its batches."""
    import time

    times: dict[str, list[float]] = {name: [] for name in variants}
    loop_times: list[float] = []

    def all_rounds() -> Iterator[None]:
        for number in range(warmup + rounds + 1):  # nothing comes back for the last one
            for name, values in interleaved(variants, runs=1, warmup=0, shift=number).items():
                times[name] += values
            dist.barrier()
            start = time.perf_counter()
            yield  # Lightning takes the batch, trains on it, and comes back for the next
            dist.barrier()
            loop_times.append((time.perf_counter() - start) * 1e3)

    trainer = L.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=MoEEPStrategy(ep=ep),
        plugins=[TorchElasticEnvironment()],
        gradient_clip_val=1.0,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,
    )
    trainer.fit(StepModule(balanced), StepByStep(all_rounds, warmup + rounds + 1))
    return {name: values[warmup:-1] for name, values in times.items()}, loop_times[warmup:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="steps of each variant, interleaved")
    parser.add_argument("--case", choices=CASES, action="append", help="only these cases")
    arguments = parser.parse_args()
    cases = []
    for name in arguments.case or CASES:
        world, ep, balanced = CASES[name]
        cases.append({"name": name, **on_ranks(measure, world, world, ep, balanced, arguments.rounds)})
        print(cases[-1])
    report(cases)


if __name__ == "__main__":
    main()
