"""Reading a Hugging Face folder into a sharded Qwen3-MoE: seconds, bytes from the disk, peak of the ranks' memory.

    python -m benchmarks.load [--rounds 5] [--mib 1024] [--worlds 2 4]

Against transformers' own sharded loading of the same folder at the same layout (ep 2, the rest fully sharded). Rounds
are interleaved, in new order each time. Before each the files are dropped from the page cache, so that all is read from
the disk; another set of rounds leaves them there. The last line is a JSON object: `median_ms`; `disk_mib`, what all
ranks together read from the disk; `memory_mib`, by how much the anonymous memory of the rank that takes most rises at
its peak in a new process, the weights that it ends with included.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.distributed import DistributedConfig
from transformers.utils import logging as transformers_logging

from benchmarks.harness import interleaved, medians, on_ranks, ratio, report
from lightning_moe_ep import Layout, build_meshes, build_pretrained, parallelize

VARIANTS = OURS, AHEAD, THEIRS = "lightning_moe_ep", "lightning_moe_ep[read_ahead]", "transformers"


def make_folder(folder: Path, mib: int) -> None:
    """Save a model of about `mib` MiB in bf16, with a tensor for each expert, in files of an eighth of it."""
    hidden, experts, intermediate = 512, 32, 256
    per_layer = 2 * experts * 3 * hidden * intermediate / 2**20
    config = Qwen3MoeConfig(
        vocab_size=4096,
        hidden_size=hidden,
        num_hidden_layers=max(1, round(mib / per_layer)),
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=experts,
        num_experts_per_tok=4,
        moe_intermediate_size=intermediate,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(
        folder, max_shard_size=f"{max(1, mib // 8)}MB"
    )


def measure(folder: Path, rounds: int = 1, cold: bool = False, alone: str | None = None) -> Any:
    """On a rank: what the variants take; or the peak of memory of one of them `alone`, in a process that is new."""
    quiet()
    world = dist.get_world_size()
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(world), LOCAL_RANK=str(dist.get_rank()))
    meshes = build_meshes(Layout.for_world(world, ep=2), "cpu")

    def ours(read_ahead: bool) -> nn.Module:
        model = build_pretrained(folder, dtype=torch.bfloat16)
        parallelize(model, meshes, pretrained=folder, read_ahead=read_ahead)
        return model

    def theirs() -> nn.Module:
        split = DistributedConfig(fsdp_size=world, ep_size=2)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, distributed_config=split)

    loaders: dict[str, Callable[[], nn.Module]] = {
        OURS: partial(ours, False),
        AHEAD: partial(ours, True),
        THEIRS: theirs,
    }
    if alone is not None:
        with peak_of_memory() as peak:
            loaders[alone]()
        return over_ranks(peak, max)
    disk: dict[str, list[int]] = {name: [] for name in loaders}

    def run(name: str) -> None:
        before = disk_reads()
        loaders[name]()
        disk[name].append(disk_reads() - before)
        gc.collect()

    def forget() -> None:
        if cold and dist.get_rank() == 0:
            for file in folder.glob("*.safetensors"):
                with file.open("rb") as opened:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    times = interleaved({name: partial(run, name) for name in loaders}, runs=rounds, warmup=1, before=forget)
    return {
        "median_ms": medians(times),
        "disk_mib": {name: over_ranks(values[1:], sum) for name, values in disk.items()},
        "ratios": {f"{name}/transformers": ratio(times, name, THEIRS) for name in (OURS, AHEAD)},
    }


def quiet() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers_logging.disable_progress_bar()


def over_ranks(values: list[int], combine: Callable[[list[int]], int]) -> float:
    """The median round of what the ranks had together, in MiB."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, values)
    rounds = sorted(combine(list(of_round)) for of_round in zip(*ranks, strict=True))
    return round(rounds[len(rounds) // 2] / 2**20, 1)


def disk_reads() -> int:
    """Bytes that this process has had read from the disk."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


@contextmanager
def peak_of_memory() -> Iterator[list[int]]:
    """By how many bytes the anonymous memory of this process rises inside, looked at every 2 ms."""
    start, peak, ended = anonymous_memory(), [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            peak[0] = max(peak[0], anonymous_memory() - start)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def anonymous_memory() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        make_folder(Path(folder), options.mib)
        size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        for world in options.worlds:
            for cold in (True, False):
                start = time.perf_counter()
                case = on_ranks(measure, world, Path(folder), options.rounds, cold)
                cases.append({"world": world, "cold": cold, "folder_mib": round(size / 2**20, 1), **case})
                if not cold:
                    peaks = {name: on_ranks(measure, world, Path(folder), 1, False, name) for name in VARIANTS}
                    cases[-1]["memory_mib"] = peaks
                print(cases[-1], f"{time.perf_counter() - start:.0f} s", flush=True)
    report(cases)


if __name__ == "__main__":
    main()
