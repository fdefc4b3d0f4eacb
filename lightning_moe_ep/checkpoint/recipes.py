"""A tensor of a model as it is made of tensors in files, so that a part of it needs the reading of that part only.

A recipe has the shape of the whole. Asked for a region it passes on, to what it is made of, the regions that go into
it: experts stacked from files of one expert each open the files of some experts; a transpose reads what becomes the
wanted rows. Only what mixes a whole tensor reads a whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_moe_ep.checkpoint.safetensors_files import OpenFiles, Region, StoredTensor, whole


class Recipe(Protocol):
    """How to make a tensor, or a part of it."""

    @property
    def shape(self) -> torch.Size:
        """Of the whole tensor."""

    def read_into(self, out: Tensor, region: Region, files: OpenFiles) -> None:
        """Make the part of the tensor at `region` in `out`, which has the region's shape, any dtype and any device."""

    def sources(self, region: Region) -> Iterator[tuple[StoredTensor, Region]]:
        """What is read for that part."""


class Stored:
    """A tensor of a file."""

    def __init__(self, tensor: StoredTensor) -> None:
        self.tensor = tensor

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    def read_into(self, out: Tensor, region: Region, files: OpenFiles) -> None:
        self.tensor.read_into(out, region, files)

    def sources(self, region: Region) -> Iterator[tuple[StoredTensor, Region]]:
        yield self.tensor, region


class Stacked:
    """Equal tensors, stacked along a new first dimension."""

    def __init__(self, members: Sequence[Recipe]) -> None:
        self.members = members
        self.shape = torch.Size([len(members), *members[0].shape])
        if odd := [member.shape for member in members if member.shape != members[0].shape]:
            raise ValueError(f"tensors of shapes {list(members[0].shape)} and {list(odd[0])} cannot be stacked")

    def read_into(self, out: Tensor, region: Region, files: OpenFiles) -> None:
        for place, member in zip(out, self.members[region[0]], strict=True):
            member.read_into(place, region[1:], files)

    def sources(self, region: Region) -> Iterator[tuple[StoredTensor, Region]]:
        for member in self.members[region[0]]:
            yield from member.sources(region[1:])


class Concatenated:
    """Tensors one after the other along a dimension."""

    def __init__(self, members: Sequence[Recipe], dim: int) -> None:
        first = members[0].shape
        self.members, self.dim = members, dim % len(first)
        rest = [[size for d, size in enumerate(member.shape) if d != self.dim] for member in members]
        if any(other != rest[0] for other in rest):
            raise ValueError(f"tensors of shapes {[list(m.shape) for m in members]} cannot be concatenated along {dim}")
        total = sum(member.shape[self.dim] for member in members)
        self.shape = torch.Size([*first[: self.dim], total, *first[self.dim + 1 :]])

    def read_into(self, out: Tensor, region: Region, files: OpenFiles) -> None:
        for member, theirs, start in self._parts(region):
            size = theirs[self.dim].stop - theirs[self.dim].start
            member.read_into(out.narrow(self.dim, start, size), theirs, files)

    def sources(self, region: Region) -> Iterator[tuple[StoredTensor, Region]]:
        for member, theirs, _ in self._parts(region):
            yield from member.sources(theirs)

    def _parts(self, region: Region) -> Iterator[tuple[Recipe, Region, int]]:
        """Each member that has something of the region, what of it, and where in the region that starts."""
        wanted, before = region[self.dim], 0
        for member in self.members:
            size = member.shape[self.dim]
            start, stop = max(wanted.start - before, 0), min(wanted.stop - before, size)
            if start < stop:
                theirs = (*region[: self.dim], slice(start, stop), *region[self.dim + 1 :])
                yield member, theirs, before + start - wanted.start
            before += size


class Narrowed:
    """A range of a tensor along a dimension."""

    def __init__(self, member: Recipe, dim: int, start: int, size: int) -> None:
        self.member, self.dim, self.start = member, dim % len(member.shape), start
        self.shape = torch.Size([*member.shape[: self.dim], size, *member.shape[self.dim + 1 :]])

    def read_into(self, out: Tensor, region: Region, files: OpenFiles) -> None:
        self.member.read_into(out, self._theirs(region), files)

    def sources(self, region: Region) -> Iterator[tuple[StoredTensor, Region]]:
        return self.member.sources(self._theirs(region))

    def _theirs(self, region: Region) -> Region:
        part = region[self.dim]
        moved = slice(part.start + self.start, part.stop + self.start)
        return (*region[: self.dim], moved, *region[self.dim + 1 :])


class Transposed:
    """A tensor with two dimensions exchanged."""

    def __init__(self, member: Recipe, dim0: int, dim1: int) -> None:
        self.member, self.dims = member, (dim0 % len(member.shape), dim1 % len(member.shape))
        self.shape = torch.Size(self._exchanged(member.shape))

    def read_into(self, out: Tensor, region: Region, files: OpenFiles) -> None:
        self.member.read_into(out.transpose(*self.dims), tuple(self._exchanged(region)), files)

    def sources(self, region: Region) -> Iterator[tuple[StoredTensor, Region]]:
        return self.member.sources(tuple(self._exchanged(region)))

    def _exchanged(self, of_dims: Sequence[Any]) -> list[Any]:
        exchanged = list(of_dims)
        one, other = self.dims
        exchanged[one], exchanged[other] = of_dims[other], of_dims[one]
        return exchanged


class Computed:
    """What a function makes of whole tensors, or of as much of them as some of its dimensions need.

    Args:
        compute: from a region to that part of the tensor; reads what it needs.
        needs: from a region to what is read.
        shape: of the whole.
        mixed: the dimensions along which a part cannot be made without the rest; None: all.
    """

    def __init__(
        self,
        compute: Callable[[Region, OpenFiles], Tensor],
        needs: Callable[[Region], Iterator[tuple[StoredTensor, Region]]],
        shape: torch.Size,
        mixed: Sequence[int] | None = None,
    ) -> None:
        self._compute, self._needs, self.shape = compute, needs, shape
        self._mixed = range(len(shape)) if mixed is None else [dim % len(shape) for dim in mixed]

    def read_into(self, out: Tensor, region: Region, files: OpenFiles) -> None:
        if not out.numel():
            return
        around = self._around(region)
        made = self._compute(around, files)
        out.copy_(made[tuple(slice(p.start - a.start, p.stop - a.start) for p, a in zip(region, around, strict=True))])

    def sources(self, region: Region) -> Iterator[tuple[StoredTensor, Region]]:
        if any(part.start >= part.stop for part in region):
            return iter(())
        return self._needs(self._around(region))

    def _around(self, region: Region) -> Region:
        every = whole(self.shape)
        return tuple(every[dim] if dim in self._mixed else part for dim, part in enumerate(region))


def read(recipe: Recipe, region: Region, files: OpenFiles, *, dtype: torch.dtype) -> Tensor:
    """The part of a tensor at `region`, on the CPU."""
    out = torch.empty([part.stop - part.start for part in region], dtype=dtype)
    recipe.read_into(out, region, files)
    return out
