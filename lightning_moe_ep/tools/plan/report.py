"""A plan, for people as a table and a picture, for programs as a dictionary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_moe_ep.layout import Layout
from lightning_moe_ep.planning.machine import Machine
from lightning_moe_ep.tools.plan.layouts import Row

SHOWN = 20
"""Rows of a table, unless all are asked for."""

_GIB, _GB = 2**30, 1e9

_COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#999999", "#E69F00", "#D55E00")
"""Of the parts of memory: Okabe and Ito's, which are told apart without seeing red and green."""


@dataclass(frozen=True)
class Plan:
    """What a run needs at every layout."""

    rows: tuple[Row, ...]
    """The best first, then what does not fit."""

    best: Row | None
    """The recommended one; None: nothing fits."""

    reason: str
    yours: Row | None
    """That of the strategy's own options; None: they leave the layout open, or are none of `rows`."""

    impossible: str | None
    """Why the strategy's own layout cannot be on these ranks, if it cannot."""

    world: int
    devices_per_node: int
    tokens: int
    """Of a micro-batch on one rank, or on the cp ranks that hold slices of its sequences."""

    micro_batches: int
    precision: str
    parameters: int
    optimizers: tuple[str, ...]
    machine: Machine
    confirmed: bool
    """Whether the recommended layout was built, and has the bytes that were worked out."""

    notes: tuple[str, ...]
    """What was assumed of this run."""

    @property
    def _cps(self) -> set[int]:
        return {row.candidate.layout.cp for row in self.rows}

    @property
    def fitting(self) -> int:
        """How many fit."""
        return sum(row.too_large is None for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """All of it, in plain values: bytes and seconds."""
        return {
            "world": self.world,
            "devices_per_node": self.devices_per_node,
            "tokens": self.tokens,
            "micro_batches": self.micro_batches,
            "precision": self.precision,
            "parameters": self.parameters,
            "optimizers": list(self.optimizers),
            "machine": asdict(self.machine),
            "confirmed": self.confirmed,
            "notes": list(self.notes),
            "reason": self.reason,
            "recommended": None if self.best is None else self.rows.index(self.best),
            "yours": None if self.yours is None else self.rows.index(self.yours),
            "impossible": self.impossible,
            "layouts": [_as_dict(row) for row in self.rows],
        }

    def text(self, *, everything: bool = False) -> str:
        """A table of the best layouts, or of all of them, and the recommendation."""
        head = (
            f"{self.parameters:,} parameters on {self.world} ranks, {self.devices_per_node} a node,"
            f" {self.precision}, {', '.join(self.optimizers)}; {self.tokens:,} tokens a"
            f" {'group of cp ranks' if self._cps != {1} else 'rank'} and micro-batch,"
            f" {self.micro_batches} a step"
        )
        lines = [head, *self._of_machine(), ""]
        shown = list(self.rows if everything else self.rows[:SHOWN])
        if self.yours is not None and self.yours not in shown:
            shown.append(self.yours)
        lines += _table([self._cells(row) for row in shown], self._columns())
        if hidden := len(self.rows) - len(shown):
            lines.append(f"and {hidden} more")
        lines.append("")
        if self.machine.memory is not None:
            lines.append(f"{self.fitting} of {len(self.rows)} layouts fit.")
        lines += self._recommendation()
        if self.impossible is not None:
            lines.append(f"Yours is not possible: {self.impossible}.")
        lines += [f"Note: {note}." for note in self.notes]
        return "\n".join(lines)

    def picture(self, file: str | Path) -> None:
        """Draw the memory of the best way of each layout, by its parts, into a PNG.

        Raises:
            FileNotFoundError: there is no such folder.
            ModuleNotFoundError: there is no matplotlib; says how to get it.
        """
        check_picture(file)
        from matplotlib.figure import Figure

        chosen: dict[Layout, Row] = {}
        for row in self.rows:
            chosen.setdefault(row.candidate.layout, row)
        rows = sorted(chosen.values(), key=lambda row: row.needs.peak)[:SHOWN]
        figure = Figure(figsize=(9, 1.6 + 0.32 * len(rows)), layout="constrained")
        axes = figure.subplots()
        labels = [_name(row) for row in rows]
        left = [0.0] * len(rows)
        for colour, part in zip(_COLOURS, rows[0].needs.at_peak, strict=True):
            sizes = [row.needs.at_peak[part] / _GIB for row in rows]
            axes.barh(labels, sizes, left=left, color=colour, label=part)
            left = [start + size for start, size in zip(left, sizes, strict=True)]
        if self.machine.memory is not None:
            axes.axvline(self.machine.memory / _GIB, color="black", linestyle="--", label="device")
        axes.invert_yaxis()
        axes.set_xlabel("GiB on the rank that needs most")
        axes.set_title(f"Memory by layout, {self.world} ranks, {self.parameters / 1e9:,.1f} billion parameters")
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(file, dpi=120, format="png")

    def _of_machine(self) -> Iterable[str]:
        machine = self.machine
        if machine.memory is None:
            yield "The memory of a device is not known, so every layout is taken to fit; give --gpu or --memory-gib"
        else:
            yield f"A device of {machine.memory / _GIB:,.1f} GiB{f' ({machine.name})' if machine.name else ''}"

    def _columns(self) -> list[str]:
        columns = ["ep", "efsdp", "replicate", *(["cp"] if self._cps != {1} else [])]
        columns += ["dispatcher", "reshard", "recompute"]
        columns += ["params", "grads", "optim", "gathered", "activ", "peak GiB"]
        columns += ["GB in node", "GB between"]
        columns += ["s a step"] if any(row.time is not None for row in self.rows) else []
        columns += ["tokens a step"] if len(self._cps) > 1 else []
        columns += ["load GiB"] if any(row.host_load is not None for row in self.rows) else []
        return [*columns, ""]

    def _cells(self, row: Row) -> list[str]:
        candidate, needs = row.candidate, row.needs
        sizes = (
            needs.parameters,
            needs.gradients,
            needs.optimizer,
            needs.at_peak["gathered weights"],
            needs.at_peak["activations"],
            needs.peak,
        )
        cells = [str(size) for size in (candidate.layout.ep, candidate.layout.efsdp, candidate.layout.replicate)]
        cells += [str(candidate.layout.cp)] if self._cps != {1} else []
        cells += [candidate.dispatcher, "yes" if candidate.reshard else "no", candidate.activation_checkpointing]
        cells += [_short(size / _GIB) for size in sizes]
        cells += [_short(row.wire.intra / _GB), _short(row.wire.inter / _GB)]
        if any(other.time is not None for other in self.rows):
            cells.append(f"{row.time.fastest:.3g} to {row.time.slowest:.3g}" if row.time is not None else "")
        if len(self._cps) > 1:
            cells.append(f"{self.tokens * self.micro_batches * candidate.layout.data_parallel:,}")
        if any(other.host_load is not None for other in self.rows):
            cells.append(_short((row.host_load or 0) / _GIB))
        marks = ["recommended"] * (row is self.best) + ["yours"] * (row is self.yours)
        marks += [f"too large: {row.too_large}"] if row.too_large else []
        return [*cells, ", ".join(marks)]

    def _recommendation(self) -> Iterable[str]:
        if self.best is None:
            yield (
                "Nothing fits: use more ranks, fewer tokens a rank, a larger cp, a smaller optimizer state (bf16-true),"
                " or cpu_offload=True"
            )
            return
        built = "; built at this world's size, it has these bytes" if self.confirmed else ""
        yield f"Recommended: MoEEPStrategy({self.best.candidate})"
        yield f"because {self.reason}{built}."
        if self.yours is not None and self.yours.too_large:
            yield f"Yours does not fit: {self.yours.too_large}."


def check_picture(file: str | Path) -> None:
    """Check that a picture can be drawn into a file, before there is anything to draw.

    Raises:
        FileNotFoundError: there is no such folder.
        ModuleNotFoundError: there is no matplotlib; says how to get it.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a picture needs matplotlib: pip install lightning-moe-ep[docs]", name=error.name
        ) from None
    if not Path(file).resolve().parent.is_dir():
        raise FileNotFoundError(f"there is no folder {Path(file).parent} for the picture {Path(file).name}")


def _short(number: float) -> str:
    """Two digits after the point, more for what is small."""
    return f"{number:,.2f}" if number >= 0.1 or not number else f"{number:.2g}"


def _name(row: Row) -> str:
    layout = row.candidate.layout
    cp = f", cp {layout.cp}" if layout.cp > 1 else ""
    return f"ep {layout.ep}, efsdp {layout.efsdp}, replicate {layout.replicate}{cp}"


def _as_dict(row: Row) -> dict[str, Any]:
    candidate = row.candidate
    return {
        **asdict(candidate.layout),
        "dispatcher": candidate.dispatcher,
        "reshard_after_forward": candidate.reshard,
        "activation_checkpointing": candidate.activation_checkpointing,
        "memory": asdict(row.needs),
        "wire": {
            "intra": row.wire.intra,
            "inter": row.wire.inter,
            "messages": [asdict(message) for message in row.wire.messages_by_kind()],
        },
        "seconds": None if row.time is None else asdict(row.time),
        "host_load": row.host_load,
        "too_large": row.too_large,
    }


def _table(rows: Sequence[Sequence[str]], columns: Sequence[str]) -> list[str]:
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    texts = {"dispatcher", "reshard", "recompute", ""}
    return [
        "  ".join(
            cell.ljust(width) if name in texts else cell.rjust(width)
            for cell, width, name in zip(cells, widths, columns, strict=True)
        ).rstrip()
        for cells in (columns, *rows)
    ]
