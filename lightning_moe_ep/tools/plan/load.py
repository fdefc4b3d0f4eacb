"""Memory of the host that reading a pretrained model takes, beside what the model itself takes on its device.

From the headers of its files and the code that reads them: some threads, each with one piece at a time, which is as
large as what a rank needs of one tensor of a file.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from lightning_moe_ep.checkpoint.places import Place
from lightning_moe_ep.checkpoint.pretrained import READERS, waiting_places
from lightning_moe_ep.checkpoint.safetensors_files import Region, whole
from lightning_moe_ep.layout import Layout
from lightning_moe_ep.planning.shapes import ModelShapes, part_of


class Loading:
    """What of which files a layout's ranks read.

    Args:
        model: as `shapes_of` has left it, on the meta device.
        shapes: of it.

    Raises:
        ValueError: the files do not fit the model.
    """

    def __init__(self, model: nn.Module, shapes: ModelShapes) -> None:
        self._shapes = shapes
        self._places = waiting_places(model)
        by_name = {parameter.name: parameter for parameter in shapes.parameters}
        self._parameters = {id(p): by_name[name] for name, p in model.named_parameters()}

    def __bool__(self) -> bool:
        return bool(self._places)

    def host_bytes(self, layout: Layout, *, cpu_offload: bool = False) -> int:
        """At most so many bytes of the host rank 0 has for pieces at a time; no rank has more.

        Args:
            layout: how the model is spread.
            cpu_offload: whether the weights stay in memory of the host, which is not counted here.
        """
        pieces = (
            piece
            for place in self._places
            for piece in self._pieces(place, self._region(place, layout, cpu_offload=cpu_offload), on_host=cpu_offload)
        )
        return sum(heapq.nlargest(READERS, pieces))

    def _region(self, place: Place, layout: Layout, *, cpu_offload: bool) -> Region:
        """What rank 0 needs of a tensor."""
        parameter = self._parameters.get(id(place.tensor))
        if parameter is None:
            return whole(place.tensor.shape)
        part = part_of(parameter, self._shapes, layout, cpu_offload=cpu_offload)
        sizes = list(part.gathered)
        if sizes:
            sizes[part.dim] = -(-sizes[part.dim] // part.ranks)
        return whole(sizes)

    def _pieces(self, place: Place, region: Region, *, on_host: bool) -> Iterator[int]:
        sources = list(place.recipe.sources(region))
        wanted, dtype = _numel(region), place.tensor.dtype
        if not sources:  # from a Trainer's checkpoint: rows, whole
            yield wanted * dtype.itemsize
        elif sum(_numel(part) for _, part in sources) > wanted or any(t.dtype.itemsize < 2 for t, _ in sources):
            # Computed from all of them at once (dequantised), in fp32.
            yield sum(_numel(part) * t.dtype.itemsize for t, part in sources) + wanted * torch.float32.itemsize
        else:
            for stored, part in sources:
                # Straight into the weight, unless it is elsewhere or of another dtype, to which the host converts.
                converted = dtype.itemsize if stored.dtype != dtype and not on_host else 0
                staged = stored.dtype.itemsize if stored.dtype != dtype or not on_host else 0
                yield _numel(part) * (staged + converted)


def _numel(region: Sequence[slice]) -> int:
    return math.prod(part.stop - part.start for part in region)
