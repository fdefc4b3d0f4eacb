"""The sizes of a parallel layout and every check on them.

The world size and what the user asked for go in; a frozen `Layout` comes out, or an error that says which numbers
do not fit and which would. Nothing here needs a process group, so a layout can be computed and printed anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


def divisors_of(number: int) -> list[int]:
    """All positive divisors of `number`, in ascending order."""
    return [d for d in range(1, number + 1) if number % d == 0]


@dataclass(frozen=True)
class Layout:
    """How the ranks of a world are arranged: `replicate * efsdp * ep`, with `ep` innermost.

    Rank `r` sits at `(r // (efsdp * ep), r // ep % efsdp, r % ep)`, so an ep group is consecutive ranks, which keeps
    the exchange of tokens inside a node as long as `ep` is at most the number of devices of a node.
    """

    replicate: int
    """Copies of the whole (efsdp, ep) block, as in hybrid-sharded data parallelism."""

    efsdp: int
    """Ranks over which the experts of one ep rank are sharded once more by FSDP2."""

    ep: int
    """Ranks that share one full set of experts; each holds `E / ep` whole experts."""

    cp: int = 1
    """Consecutive ranks that hold slices of the same sequences. It is no factor of the world: these ranks shard weights
    and share experts as any others, so `cp` may divide `ep` or be divided by it, or neither."""

    @classmethod
    def for_world(cls, world: int, *, ep: int, replicate: int = 1, cp: int = 1) -> Layout:
        """The layout of `world` ranks for the given `ep`, `replicate` and `cp`; `efsdp` is what remains.

        Raises:
            ValueError: a size is below 1, or `ep * replicate`, or `cp`, does not divide the world.
        """
        for name, size in (("world size", world), ("ep", ep), ("replicate", replicate), ("cp", cp)):
            if size < 1:
                raise ValueError(f"{name} is {size}, but must be at least 1")
        if ep > world:
            raise ValueError(
                f"ep={ep} is larger than the world of {world} rank(s); use one of {divisors_of(world)}, or more devices"
            )
        if world % replicate:
            raise ValueError(
                f"replicate={replicate} does not divide the world of {world} ranks; use one of {divisors_of(world)}"
            )
        if world % (ep * replicate):
            raise ValueError(
                f"ep={ep} times replicate={replicate} does not divide the world of {world} ranks; with"
                f" replicate={replicate}, use an ep out of {divisors_of(world // replicate)}"
            )
        if world % cp:
            raise ValueError(
                f"cp={cp} does not divide the world of {world} rank(s): sequences are cut over cp consecutive ranks;"
                f" use one of {divisors_of(world)}"
            )
        return cls(replicate=replicate, efsdp=world // (ep * replicate), ep=ep, cp=cp)

    @property
    def fsdp(self) -> int:
        """Ranks over which the dense weights are sharded."""
        return self.efsdp * self.ep

    @property
    def world(self) -> int:
        return self.replicate * self.efsdp * self.ep

    @property
    def data_parallel(self) -> int:
        """How many groups of ranks have sequences of their own: `world / cp`."""
        return self.world // self.cp

    def check_experts(self, num_experts: Mapping[str, int]) -> None:
        """Check that every experts module can be cut into `ep` equal parts.

        Args:
            num_experts: the number of experts E by the name of the experts module.

        Raises:
            ValueError: `ep` does not divide some E.
        """
        for name, count in num_experts.items():
            if count % self.ep:
                fitting = [d for d in divisors_of(count) if (self.efsdp * self.ep) % d == 0]
                raise ValueError(
                    f"ep={self.ep} does not divide the {count} experts of {name}; on {self.world} rank(s) use one of"
                    f" {fitting}"
                )

    def __str__(self) -> str:
        cp = f", cp {self.cp}" if self.cp > 1 else ""
        return f"(replicate {self.replicate}, efsdp {self.efsdp}, ep {self.ep}{cp})"


def largest_ep(world: int, *, replicate: int, devices_per_node: int, num_experts: Mapping[str, int]) -> int:
    """What `ep="auto"` means: the largest ep within a node that divides `world / replicate` and every E."""
    Layout.for_world(world, ep=1, replicate=replicate)
    return max(
        ep
        for ep in divisors_of(world // replicate)
        if ep <= devices_per_node and all(count % ep == 0 for count in num_experts.values())
    )
