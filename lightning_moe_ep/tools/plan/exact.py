"""What a rank really gets: the model is parallelized, on the meta device, at the size of the world that is planned.

By `parallelize` itself over a fake process group, so that what arithmetic says of a layout can be checked, on one CPU,
for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as L
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_moe_ep.layout import Layout
from lightning_moe_ep.mesh import build_meshes
from lightning_moe_ep.parallelize import parallelize
from lightning_moe_ep.precision import FSDP2Precision
from lightning_moe_ep.tools.plan.apart import run_apart
from lightning_moe_ep.tools.plan.memory import Resident
from lightning_moe_ep.tools.plan.states import observe_local_states
from lightning_moe_ep.units import top_level_modules


def resident_exactly(
    build: Callable[[], nn.Module],
    layout: Layout,
    *,
    rank: int = 0,
    precision: str = "32-true",
    options: Mapping[str, Any] | None = None,
    configure: Callable[[nn.Module], Any] | None = None,
) -> Resident:
    """What a rank keeps of a model that `parallelize` has been over, in a process of its own.

    Args:
        build: makes the plain model, or a LightningModule with its model, on the meta device; of a module, or a
            `functools.partial` of such, as it is sent to the other process.
        layout: how it is spread.
        rank: which; none has more than rank 0.
        precision: the Trainer's.
        options: further arguments of `parallelize`.
        configure: makes the optimizers, if the module is not to be asked; see `observe_states`.

    Raises:
        ApartError: the model cannot be parallelized so; with the error that a run would show.
    """
    return run_apart(layout.world, rank, parallelized, build, layout, precision, dict(options or {}), configure)


def parallelized(
    build: Callable[[], nn.Module],
    layout: Layout,
    precision: str,
    options: Mapping[str, Any],
    configure: Callable[[nn.Module], Any] | None,
) -> Resident:
    """The same, in a process that has no other use, for the rank that it is of a fake process group."""
    model = build()
    roots = top_level_modules(model) if isinstance(model, L.LightningModule) else None
    plugin = FSDP2Precision(precision)
    plugin.fp32_modules = options.get("fp32_modules", ())
    plugin.convert_module(model)
    parallelize(model, build_meshes(layout, "cpu"), mp_policy=plugin.policy, roots=roots, **options)
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return Resident(
        parameters=_bytes(parameters),
        gradients=_bytes(trained),
        optimizer=observe_local_states(model, configure),
        buffers=_bytes(list(model.buffers())),
    )


def _bytes(tensors: Sequence[Tensor]) -> int:
    """Of this rank's parts."""
    parts = [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(part.numel() * part.element_size() for part in parts)
