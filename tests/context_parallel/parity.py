"""Tiny models and whole batches, trained in slices on the pool's ranks and at once in one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_moe_ep import MoEEPStrategy
from lightning_moe_ep.context_parallel import shard_sequences
from tests.context_parallel import flash
from tests.families.tiny import fill
from tests.oracle import norm_of
from tests.parity import Probe, trainer, worst
from tests.pool import RankPool

VOCABULARY = 96
WINDOW = 5
FLASH = "flash_attention_2"
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 32, "num_experts": 4, "head_dim": 16, "norm_topk_prob": True},
    "mixtral": {"intermediate_size": 32, "num_local_experts": 4, "sliding_window": WINDOW},
    "gpt_oss": {
        "intermediate_size": 32,
        "num_local_experts": 4,
        "head_dim": 16,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "deepseek_v3": {
        "moe_intermediate_size": 32,
        "intermediate_size": 32,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "num_key_value_heads": 4,
    },
}
"""GQA, windows, sinks (which only its eager attention has), and MLA."""

Batch = dict[str, Tensor]


def build(kind: str, *, attention: str = "sdpa", lora: bool = False, **options: Any) -> nn.Module:
    """The same weights at each call."""
    config = AutoConfig.for_model(
        kind,
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 64,
            **MODELS[kind],
            **options,
        },
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        given = "eager" if kind == "gpt_oss" else "sdpa" if attention == FLASH else attention
        model = AutoModelForCausalLM.from_config(config, attn_implementation=given)
    if attention == FLASH:
        flash.install()
        model.config._attn_implementation = FLASH
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"]))
    fill(model)
    return model


def batch_of(kind: str, seed: int) -> Batch:
    """A whole batch: `even`, `padded`, `left`, `packed`, `odd`, `one` or `short`."""
    generator = torch.Generator().manual_seed(seed)
    rows, length = {"odd": (2, 13), "one": (1, 11), "short": (2, 12)}.get(kind, (2, 16))
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    if kind == "packed":
        positions = torch.stack([torch.cat([torch.arange(n) for n in each]) for each in ((3, 9, 4), (12, 1, 3))])
        return {"input_ids": ids, "labels": ids, "position_ids": positions}
    if kind in ("padded", "left", "short"):  # in short, the later slices are nothing but padding
        lengths = torch.tensor([[4], [3]] if kind == "short" else [[length - 2], [7]])
        places = torch.arange(length)
        mask = ((places >= length - lengths) if kind == "left" else (places < lengths)).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return {"input_ids": ids, "labels": ids}


def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
    """Of a batch whose labels are shifted already."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids") if name in batch}
    logits = model(**inputs, use_cache=False).logits.float()  # with a cache, transformers looks for no packing
    return F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten(), reduction="sum")


@dataclass(frozen=True)
class CPCase:
    """One run: a step for each kind of batch."""

    model: str
    world: int = 2
    cp: int = 2
    ep: int = 1
    replicate: int = 1
    batches: tuple[str, ...] = ("padded", "packed", "odd", "one", "short")
    options: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)

    def steps(self) -> list[list[Batch]]:
        """`[step][cp group]`, whole."""
        groups = self.world // self.cp
        return [
            [batch_of(kind, 100 * step + group) for group in range(groups)] for step, kind in enumerate(self.batches)
        ]


class CPModule(L.LightningModule):
    """A module of a user's own."""

    def __init__(self, case: CPCase) -> None:
        super().__init__()
        self.case = case

    def configure_model(self) -> None:
        self.model = build(self.case.model, **self.case.options)

    def train_dataloader(self) -> Any:
        group = dist.get_rank() // self.case.cp
        batches = [(step[group], count_of(step)) for step in self.case.steps()]
        return DataLoader(batches, batch_size=None)

    def training_step(self, batch: tuple[Batch, int], batch_idx: int) -> Tensor:
        whole, count = batch
        return loss_sum(self.model, self.trainer.strategy.shard_sequences(whole)) * self.case.world / count

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def count_of(step: list[Batch]) -> int:
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in step)


def train(case: CPCase) -> tuple[list[dict[str, Tensor]], list[float]]:
    """On a rank: gradients and norms of each step."""
    probe = Probe()
    strategy = MoEEPStrategy(ep=case.ep, cp=case.cp, replicate=case.replicate, **case.strategy)
    trainer(strategy, max_epochs=1, callbacks=[probe]).fit(CPModule(case))
    return probe.gradients, probe.norms


def reference(case: CPCase) -> list[dict[str, Tensor]]:
    """The gradients of each step in one process, on whole sequences."""
    options = {**case.options, "attention": "sdpa"}
    model = build(case.model, **options).train()
    gradients = []
    for step in case.steps():
        model.zero_grad()
        for batch in step:
            whole = shard_sequences(batch, rank=0, size=1)
            whole = {name: value for name, value in whole.items() if value is not None}
            for sequences in unpacked(whole):
                (loss_sum(model, sequences) / count_of(step)).backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    return gradients


def unpacked(batch: Batch) -> list[Batch]:
    """Packed sequences each as a batch of its own; not every family's masks keep them apart (gpt_oss's do not)."""
    ids, positions = batch["input_ids"], batch["position_ids"]
    if bool((positions.diff() == 1).all()):
        return [batch]
    places = [(row, int(start)) for row, each in enumerate(positions) for start in (each == 0).nonzero()]
    ends = [following if row == of else ids.shape[1] for (row, _), (of, following) in pairwise([*places, (-1, 0)])]
    return [
        {name: value[row : row + 1, start:end] for name, value in batch.items()}
        for (row, start), end in zip(places, ends, strict=True)
    ]


def check(ranks: RankPool, case: CPCase, timeout: float = 60) -> None:
    """Gradients to 1e-5 of each parameter's largest, norms to 1e-6."""
    results = ranks.run(train, case, world=case.world, timeout=timeout)
    gradients, norms = results[0]
    right = reference(case)
    assert len(gradients) == len(right) == len(case.batches)
    for kind, ours, theirs in zip(case.batches, gradients, right, strict=True):
        error, name = worst(ours, theirs)
        assert error < 1e-5, f"{kind}: the gradient of {name} is off by {error:.1e}"
    for _, others in results:
        assert others == norms, "ranks disagree on the norm"
    for norm, theirs in zip(norms, right, strict=True):
        assert abs(norm - norm_of(theirs, 2.0)) <= 1e-6 * norm
