"""`lightning-moe-ep verify`, and the function that calls it from Python.

Each rank runs the command, as it would run `fit`; rank 0 goes on alone when the ranks are done, and tells.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_moe_ep.tools.verify.compare import compare
from lightning_moe_ep.tools.verify.measure import measure
from lightning_moe_ep.tools.verify.reading import read
from lightning_moe_ep.tools.verify.report import VerifyReport

RIGHT, WRONG, NOT_VERIFIED = 0, 1, 2
"""How the command ends."""

DESCRIPTION = "Compare one step of a run with the same step in one process, in fp32, and say what is wrong."


def command(arguments: Sequence[str]) -> int:
    """Run `verify` on this rank; returns the exit status."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="lightning-moe-ep verify",
        description=DESCRIPTION,
        epilog="All other arguments are those of fit: --config RUN.yaml, --trainer.devices 4, ... Exit status: 0, the"
        " run is right; 1, something is wrong; 2, it could not be told.",
        allow_abbrev=False,
    )
    parser.add_argument("--layers", type=int, help="Blocks to keep of each sequence; one of each kind if not given.")
    parser.add_argument("--experts", type=int, help="Experts of each layer (CausalLMModule).")
    parser.add_argument("--width", type=int, help="The hidden size; inner sizes shrink with it (CausalLMModule).")
    parser.add_argument("--json", action="store_true", help="Print JSON, for programs.")
    own, of_fit = parser.parse_known_args(list(arguments))
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning.pytorch")  # of a short fit, and one without validation
    try:
        # What else is printed, by a user's module too, is no part of the answer.
        with redirect_stdout(sys.stderr):
            given = read(of_fit, layers=own.layers, experts=own.experts, width=own.width)
            measured = measure(given)
            if dist.is_initialized():
                dist.barrier()
                dist.destroy_process_group()
            if measured is None:
                return RIGHT
            report = compare(given, measured, started=started)
    except (ValueError, NotImplementedError, OSError) as error:
        if rank_zero_only.rank != 0:
            raise
        print(f"error: {error}", file=sys.stderr)
        return NOT_VERIFIED
    except Exception:
        sys.excepthook(*sys.exc_info())
        return NOT_VERIFIED
    print(json.dumps(report.as_dict(), indent=2) if own.json else report.text(), flush=True)
    return RIGHT if report.right else WRONG


def verify(
    config: str | Path,
    *options: str,
    layers: int | None = None,
    experts: int | None = None,
    width: int | None = None,
) -> VerifyReport:
    """Compare one step of a run with the same step in one process, in fp32.

    It takes the run's own model, data and layout, cuts the model to one block of each kind, and trains a step on the
    run's own ranks, which it starts: in processes of their own, so that it can be called from anywhere. Then it saves,
    resumes at another ep, and trains one step more. Losses, gradients, the norm, the clipped step and what was loaded
    have to be those of one process that has the batches of all ranks.

    Args:
        config: the YAML file that `lightning-moe-ep fit` would be given.
        options: further arguments of `fit`, such as "--trainer.devices=4".
        layers: how many blocks to keep of each sequence; None: one of each kind.
        experts: how many experts a layer is to have (only with `CausalLMModule`).
        width: the hidden size that the model is to have (only with `CausalLMModule`).

    Returns:
        What is wrong, and how near everything came.

    Raises:
        RuntimeError: called by a rank; or the run could not be compared, for the reason that the error ends with.
    """
    if {"LOCAL_RANK", "RANK"} & os.environ.keys():
        raise RuntimeError(
            "verify() starts ranks of its own, but was called by a rank of another run; under torchrun use the command:"
            " torchrun ... -m lightning_moe_ep verify --config RUN.yaml"
        )
    sizes = {"layers": layers, "experts": experts, "width": width}
    of_sizes = [f"--{name}={value}" for name, value in sizes.items() if value is not None]
    command = [sys.executable, "-m", "lightning_moe_ep", "verify", "--json", f"--config={config}", *options, *of_sizes]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode not in (RIGHT, WRONG) or not ended.stdout:
        told = ended.stderr.strip()
        raise RuntimeError(f"{config} could not be verified: {told[told.rfind('error: ') :] or ended.returncode}")
    return VerifyReport.from_json(ended.stdout)
