"""`lightning-moe-ep plan`: from what is typed to a plan, and how it is shown."""

from __future__ import annotations

import json
import math
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_moe_ep.planning.machine import GPUS, Machine, machine_of
from lightning_moe_ep.tools.plan.apart import ApartError
from lightning_moe_ep.tools.plan.config import Run, read_run
from lightning_moe_ep.tools.plan.planner import plan
from lightning_moe_ep.tools.plan.report import check_picture

DESCRIPTION = "Say which layouts of a world a run fits into, what each needs, and which is best."

_EPILOG = (
    "All other arguments are those of fit: --config RUN.yaml, --trainer.precision bf16-true, and so on. Nothing is"
    " started, and no device is needed. The exit status is 0 if the run fits as it is configured (with ep: auto,"
    " in some layout), 1 if it does not, 2 after an error."
)


def run_plan(args: Sequence[str]) -> int:
    """From the arguments to the exit status."""
    parser = _parser()
    given, of_fit = parser.parse_known_args(list(args))
    try:
        if given.picture is not None:
            check_picture(given.picture)
        run = read_run(of_fit)
        sequences, length = _batch(run, given.tokens, given.length)
        result = plan(
            run.build,
            world=given.world,
            devices_per_node=given.gpus_per_node,
            sequences=sequences,
            length=length,
            precision=run.precision,
            micro_batches=run.micro_batches,
            strategy=run.strategy,
            cp=given.cp,
            device_type=run.device_type,
            machine=_machine(given, run.precision),
        )
        if given.picture is not None:
            result.picture(given.picture)
    except (ValueError, OSError, NotImplementedError, ApartError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result.as_dict(), indent=2) if given.json else result.text(everything=given.all))
    asked = result.yours or result.best
    return 0 if result.impossible is None and asked is not None and asked.too_large is None else 1


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="lightning-moe-ep plan", description=DESCRIPTION, epilog=_EPILOG, allow_abbrev=False)
    add = parser.add_argument
    add("--world", type=int, required=True, metavar="RANKS", help="How many ranks the run will have.")
    add("--gpus-per-node", type=int, default=8, metavar="RANKS", help="How many of them a node has (8).")
    add(
        "--tokens", type=int, help="Of a micro-batch on one rank, if the data does not say it (at cp > 1: on cp ranks)."
    )
    add("--length", type=int, help="Of a sequence, in tokens, if the data does not say it (--tokens: one sequence).")
    add(
        "--cp", type=int, nargs="+", metavar="RANKS", help="Only these sizes of cp (1, the run's, larger ones at need)."
    )
    add("--gpu", choices=sorted(GPUS), help="Takes memory, arithmetic and bandwidths from the vendor's figures.")
    add("--memory-gib", type=float, metavar="GIB", help="Memory of a device.")
    add("--tflops", type=float, help="Operations that a device reaches in training, in 10^12 a second.")
    add(
        "--intra-gbps",
        type=float,
        metavar="GB/S",
        help="What a device sends inside of its node, in 10^9 bytes a second.",
    )
    add("--inter-gbps", type=float, metavar="GB/S", help="What a device sends to other nodes, in 10^9 bytes a second.")
    add("--latency-us", type=float, metavar="US", help="What a collective takes beside its bytes, in 10^-6 s (20).")
    add("--json", action="store_true", help="Print JSON, for programs.")
    add("--all", action="store_true", help="Show all layouts, and not only the best.")
    add("--picture", metavar="FILE", help="Draw the memory of each layout into a PNG.")
    return parser


def _batch(run: Run, tokens: int | None, length: int | None) -> tuple[int, int]:
    """Sequences of a micro-batch on one rank, and their length.

    Raises:
        ValueError: neither the data nor the arguments say it.
    """
    if tokens is None and length is None and run.sequences is not None and run.length is not None:
        return run.sequences, run.length
    length = length or (run.length if tokens is None or (run.length and tokens % run.length == 0) else tokens)
    if tokens is None and run.sequences is not None and length is not None:
        return run.sequences, length
    if tokens is None or length is None:
        raise ValueError(
            "the configuration does not say how many tokens a rank has in a micro-batch, as TextDataModule's block_size"
            " and batch_size do; give --tokens, and --length for more than one sequence"
        )
    if tokens % length:
        raise ValueError(f"--tokens {tokens} are no whole number of sequences of --length {length}")
    return tokens // length, length


def _machine(given: Any, precision: str) -> Machine:
    """The named GPU's figures, with those that are typed in their place."""
    options: dict[str, tuple[str, float]] = {
        "memory": ("memory_gib", 2**30),
        "flops": ("tflops", 1e12),
        "intra": ("intra_gbps", 1e9),
        "inter": ("inter_gbps", 1e9),
        "latency": ("latency_us", 1e-6),
    }
    figures: dict[str, Any] = {}
    for figure, (option, unit) in options.items():
        value = getattr(given, option)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{option.replace('_', '-')} is {value}, but must be positive and finite")
        if value is not None:
            figures[figure] = int(value * unit) if figure == "memory" else value * unit
    return replace(machine_of(given.gpu, precision), **figures)
