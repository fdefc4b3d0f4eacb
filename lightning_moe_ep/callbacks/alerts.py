"""What the load of experts should not do for long: reports go in, one after the other, alerts that begin come out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lightning_moe_ep.callbacks.load_report import LayerLoad, LoadReport

Kind = Literal["dead_experts", "rank_load"]

SHOWN = 8
"""Experts that an alert names."""


@dataclass(frozen=True)
class ExpertAlert:
    """Something that the experts' load should not do."""

    kind: Kind
    step: int
    layer: str

    experts: tuple[int, ...]
    """Those that are dead, or those of the rank."""

    rank: int | None
    """Whose load it is; None for dead experts."""

    value: float
    """Steps without a token, or the rank's pairs as a multiple of its ep group's mean."""

    bound: float

    def __str__(self) -> str:
        if self.kind == "dead_experts":
            more = len(self.experts) - SHOWN
            shown = ", ".join(map(str, self.experts[:SHOWN])) + (f" and {more} more" if more > 0 else "")
            return (
                f"{len(self.experts)} expert(s) of {self.layer} got no token for {self.value:.0f} steps, up to step"
                f" {self.step}: {shown}"
            )
        return (
            f"rank {self.rank} computed {self.value:.2f} times the mean of its ep group in {self.layer}, up to step"
            f" {self.step} (the bound is {self.bound:g}); it holds experts {self.experts[0]} to {self.experts[-1]}"
        )


class Alerts:
    """Remembers what is wrong, so that it is said when it begins and not again before it has been over."""

    def __init__(self, *, dead_steps: int, rank_load_bound: float) -> None:
        self.dead_steps = dead_steps
        self.rank_load_bound = rank_load_bound
        self.forget()

    def forget(self) -> None:
        """Know of no report, as in the beginning."""
        self._dead_for: dict[str, list[int]] = {}
        """Of each layer, for how many steps each expert has been dead."""
        self._wrong: set[tuple[str, str, int]] = set()
        """Kind, layer, and the expert or the rank, of what is wrong now."""

    def begun(self, report: LoadReport) -> list[ExpertAlert]:
        """What a report has that the one before had not."""
        return [alert for layer in report.layers for alert in (*self._dead(report, layer), *self._ranks(report, layer))]

    def _dead(self, report: LoadReport, layer: LayerLoad) -> list[ExpertAlert]:
        before = self._dead_for.get(layer.name, [])
        if len(before) != len(layer.pairs):
            before = [0] * len(layer.pairs)
        dead_for = [0 if n else steps + report.steps for n, steps in zip(layer.pairs, before, strict=True)]
        self._dead_for[layer.name] = dead_for
        dead = {expert for expert, steps in enumerate(dead_for) if steps >= self.dead_steps}
        new = self._newly("dead_experts", layer.name, dead)
        steps = float(min((dead_for[expert] for expert in new), default=0))
        alert = ExpertAlert("dead_experts", report.step, layer.name, tuple(new), None, steps, self.dead_steps)
        return [alert] if new else []

    def _ranks(self, report: LoadReport, layer: LayerLoad) -> list[ExpertAlert]:
        if layer.ep == 1 or layer.loads_in_group is None:
            return []
        loads, local = layer.loads_in_group, len(layer.pairs) // layer.ep
        above = {rank for rank, load in enumerate(loads) if load > self.rank_load_bound}
        alerts = []
        for rank in self._newly("rank_load", layer.name, above):
            first = rank % layer.ep * local
            experts, load = tuple(range(first, first + local)), float(loads[rank])
            alerts.append(ExpertAlert("rank_load", report.step, layer.name, experts, rank, load, self.rank_load_bound))
        return alerts

    def _newly(self, kind: Kind, layer: str, members: set[int]) -> list[int]:
        """Those of `members` of which it was not known."""
        before = {member for k, name, member in self._wrong if (k, name) == (kind, layer)}
        self._wrong -= {(kind, layer, member) for member in before - members}
        self._wrong |= {(kind, layer, member) for member in members}
        return sorted(members - before)

    def state_dict(self) -> dict[str, Any]:
        return {"dead_for": self._dead_for, "wrong": sorted(self._wrong)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._dead_for = dict(state["dead_for"])
        # A rank's load is another thing at another layout, and looked at anew.
        self._wrong = {(kind, layer, member) for kind, layer, member in state["wrong"] if kind == "dead_experts"}
