"""`ep="auto"` takes the plan's ep where enough is known, the same on all ranks, and the old rule elsewhere."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_moe_ep import MoEEPStrategy
from lightning_moe_ep.planning.auto import Choice, choose_ep, without_values
from lightning_moe_ep.planning.machine import GPUS, Machine, machine_of, this_machine
from lightning_moe_ep.strategy import choosing
from tests.parity import Case, CaseModule, trainer
from tests.pool import RankPool

OPTIONS = {
    **MoEEPStrategy().parallelize_options,
    "reduce_every_micro_batch": False,
}


class Large(L.LightningModule):
    """A model too large to be built for real here."""

    def __init__(self, layers: int = 12, experts: int = 64) -> None:
        super().__init__()
        config = AutoConfig.for_model(
            "qwen3_moe", hidden_size=2048, num_hidden_layers=layers, num_experts=experts, moe_intermediate_size=768
        )
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(config)


def chosen(module: L.LightningModule, machine: Machine, **options: Any) -> Choice | None:
    facts: dict[str, Any] = {"world": 64, "replicate": 1, "devices_per_node": 8, "tokens": 4096, "micro_batches": 1}
    given = {key: options.pop(key) for key in [*options] if key in facts}
    return choose_ep(
        module, precision="bf16-true", machine=machine, options={**OPTIONS, **options}, **{**facts, **given}
    )


def test_the_shortest_step_of_those_that_fit() -> None:
    module, h100 = Large(), machine_of("h100", "bf16-true")
    choice = chosen(module, h100)
    assert choice is not None and choice.ep > 1 and "by the plan" in choice.why
    few = chosen(module, h100, tokens=65536)  # many tokens: weights travel hidden behind them
    assert few is not None and few.ep < choice.ep
    slow = chosen(module, replace(h100, inter=h100.inter and h100.inter / 100))
    assert slow is not None and slow.ep >= 8  # not between nodes what can be inside
    without_figures = chosen(module, Machine(memory=h100.memory))
    assert without_figures is not None and "GB weighed" in without_figures.why
    nothing_fits = chosen(module, replace(h100, memory=2**30))
    assert nothing_fits is not None and "nothing fits" in nothing_fits.why
    alone = chosen(module, h100, world=1)
    assert alone is not None and alone.ep == 1


def test_without_facts_there_is_no_answer() -> None:
    module, h100 = Large(layers=1), machine_of("h100", "bf16-true")
    assert chosen(module, Machine()) is None
    assert chosen(module, h100, tokens=None) is None
    assert chosen(module, h100, dispatcher="three_chunks") is None
    assert this_machine(torch.device("cpu"), "32-true") == Machine()


def test_the_module_is_left_as_it_is() -> None:
    module = CaseModule(Case())
    module.configure_model()
    before = dict(module.state_dict())
    copied = without_values(module)
    assert all(p.is_meta for p in copied.parameters()) and not any(p.is_meta for p in module.parameters())
    assert all(value is before[name] or torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert type(copied.model.blocks[0].moe.experts) is type(module.model.blocks[0].moe.experts)


@pytest.mark.parametrize(
    ("given", "name"), [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA H100 PCIe", "")]
)
def test_a_gpu_is_known_by_its_name(given: str, name: str) -> None:
    properties = type("Properties", (), {"name": given, "total_memory": 7})
    with patch.object(torch.cuda, "get_device_properties", lambda _: properties):
        machine = this_machine(torch.device("cuda"), "bf16-mixed")
    assert (machine.name, machine.memory, machine.flops is None) == (name, 7, not name)


def test_unknown_gpus_are_refused() -> None:
    assert machine_of("h100", "32-true").flops < machine_of("H100", "bf16-true").flops  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"no figures of a GPU 'tpu'; use one of \['a100'") as told:
        machine_of("tpu", "32-true")
    assert all(gpu in str(told.value) for gpu in GPUS)


class Blocks(L.LightningDataModule):
    block_size, batch_size = 8, 2

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case

    def train_dataloader(self) -> Any:
        return CaseModule(self.case).train_dataloader()


def auto_on_ranks(memory: tuple[int, int], breaks: bool) -> tuple[int, int, list[str]]:
    """On a rank, whose device is said to have so much memory: the ep, the least memory told, and what was logged."""
    told: list[int] = []
    lines: list[str] = []

    def choose(module: Any, *, machine: Machine, tokens: int, **_: Any) -> Choice:
        told.append(machine.memory or 0)
        assert tokens == 16
        if breaks:
            raise RuntimeError("cannot be copied")
        return Choice(1, "by a stand-in")

    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    case = Case(ep=2, world=2)
    strategy = MoEEPStrategy()
    machine = Machine(memory=memory[dist.get_rank()])
    with (
        patch.object(choosing, "this_machine", lambda *_: machine),
        patch.object(choosing, "choose_ep", choose),
    ):
        trainer(strategy, max_epochs=1).fit(CaseModule(case), datamodule=Blocks(case))
    logger.removeHandler(handler)
    return strategy.layout.ep, told[0] if told else 0, lines


def test_one_rank_chooses_for_all(ranks: RankPool) -> None:
    first, second = ranks.run(auto_on_ranks, (7, 5), False, world=2)
    assert first[:2] == (1, 5) and second[:2] == (1, 0)
    first, second = ranks.run(auto_on_ranks, (7, 5), True, world=2)
    assert first[0] == second[0] == 2
    assert any("ep='auto' is not planned: RuntimeError: cannot be copied" in line for line in first[2])
    assert any(
        "ep='auto': 2 rank(s) share one set of experts, out of 2, the largest within a node" in line
        for line in first[2]
    )
