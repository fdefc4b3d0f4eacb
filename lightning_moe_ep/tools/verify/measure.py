"""What a run does in two optimizer steps, on real ranks: one, and one more after a resume at another ep.

Every rank calls `measure`; rank 0 comes back with all that was seen, whole and in the plain model's names.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist

from lightning_moe_ep.layout import Layout, divisors_of
from lightning_moe_ep.tools.verify.given import STEPS, Given, Made, prepare
from lightning_moe_ep.tools.verify.probe import Probe
from lightning_moe_ep.tools.verify.seen import Measured


def measure(given: Given) -> Measured | None:
    """Train two steps, the second after a resume at another ep if there is one; every rank must call this.

    Returns:
        What was seen, on rank 0; None on the others.

    Raises:
        ValueError: the run cannot be compared; says why.
    """
    first = given.make()
    if not first.module.automatic_optimization:
        raise ValueError(
            f"{type(first.module).__name__} optimizes by itself (automatic_optimization=False): there is no one loss"
            " and step to compare; verify a module with the same model and automatic optimization"
        )
    probe = Probe(given, first.strategy)
    trainer = _trainer(first, probe)
    folder = _Folder(trainer)
    probe.make_place = folder.make
    try:
        _fit(trainer, first, probe)
        phases, changes = [probe.phase], probe.changes
        second = given.make()
        second.strategy.ep = other_ep(probe.phase.layout, probe.phase.num_experts)
        probe = Probe(given, second.strategy)
        _fit(_trainer(second, probe), second, probe, ckpt_path=folder.path, weights_only=given.weights_only)
        phases.append(probe.phase)
    finally:
        folder.remove()
    told = [*given.changes, *first.changes, *changes]
    return Measured(phases, first.strategy.root_device, told) if dist.get_rank() == 0 else None


def other_ep(layout: Layout, num_experts: Mapping[str, int]) -> int:
    """Another ep that fits the same ranks, the largest that there is; the same where there is none."""
    fitting = [ep for ep in divisors_of(layout.fsdp) if all(count % ep == 0 for count in num_experts.values())]
    return max((ep for ep in fitting if ep != layout.ep), default=layout.ep)


class _Folder:
    """Where the checkpoint is for a moment; ranks of several nodes have to share the place."""

    def __init__(self, trainer: L.Trainer) -> None:
        self._parent = None if trainer.num_nodes == 1 else trainer.default_root_dir
        self.path = ""

    def make(self) -> str:
        """On every rank, which gets the same path."""
        made = [tempfile.mkdtemp(prefix="verify-", dir=self._parent) if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(made, src=0)
        self.path = str(Path(made[0]) / "first.ckpt")
        return self.path

    def remove(self) -> None:
        # No barrier, which a failed rank would not come to: a step was made since all had read it.
        if self.path and dist.is_initialized() and dist.get_rank() == 0:
            rmtree(Path(self.path).parent, ignore_errors=True)


def _trainer(made: Made, probe: Probe) -> L.Trainer:
    options = {**made.options, "callbacks": [*made.options["callbacks"], probe]}
    trainer = L.Trainer(**options, strategy=made.strategy)
    prepare(made, probe.edit)
    return trainer


def _fit(trainer: L.Trainer, made: Made, probe: Probe, **resume: Any) -> None:
    with exact_matrix_products():
        trainer.fit(made.module, datamodule=made.datamodule, **resume)
    if not probe.done:
        raise ValueError(
            f"the training ended before its optimizer had made {STEPS} steps; give it more batches, or more epochs"
        )


@contextmanager
def exact_matrix_products() -> Iterator[None]:
    """No TF32 inside."""
    precision, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = cudnn
