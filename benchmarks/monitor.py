"""What `ExpertLoadMonitor` costs: the time inside its own hooks, as a share of the steps that it watches.

    python -m benchmarks.monitor --ranks 2

Each rank trains the same layers, their experts spread over all ranks, and the monitor reports every `--every` steps,
to TensorBoard and a CSV file. Its functions are timed where they are called. All times are of rank 0's processor, all
its threads: what else the machine does is not in them, nor are waits for other ranks, which steps have more of. A step
is one without a report.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from time import process_time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn

from benchmarks.harness import on_ranks, report
from lightning_moe_ep import ExpertLoadMonitor, Layout, MoELayer, build_meshes, parallelize
from lightning_moe_ep.callbacks.load import LoadCounter
from lightning_moe_ep.callbacks.router_scores import RouterScores


class Model(nn.Module):
    def __init__(self, layers: int, hidden: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MoELayer(hidden, hidden, experts, top_k) for _ in range(layers))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden

    def log(self, *_: Any, **__: Any) -> None:
        """As a LightningModule has it."""


def measure(ranks: int, layers: int, hidden: int, experts: int, top_k: int, tokens: int, steps: int) -> dict[str, Any]:
    """On a rank: milliseconds of steps, and of the monitor's functions in them."""
    torch.manual_seed(0)
    model = Model(layers, hidden, experts, top_k)
    parallelize(model, build_meshes(Layout.for_world(ranks, ep=ranks), "cpu"), equal_tokens=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    folder = tempfile.TemporaryDirectory()
    loop = SimpleNamespace(_should_accumulate=lambda: False, epoch_loop=SimpleNamespace(_batches_that_stepped=0))
    trainer: Any = SimpleNamespace(
        world_size=ranks,
        global_rank=dist.get_rank(),
        is_global_zero=dist.get_rank() == 0,
        fit_loop=loop,
        fast_dev_run=False,
        log_every_n_steps=steps,
        log_dir=folder.name,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        callback_metrics={},
        callbacks=[],
        loggers=[CSVLogger(folder.name, "csv", ""), TensorBoardLogger(folder.name, "tensorboard", "")],
    )
    monitor = ExpertLoadMonitor(heatmap_every_n_steps=1000 * steps)
    monitor.on_fit_start(trainer, model)  # type: ignore[arg-type]
    spent: dict[str, float] = defaultdict(float)
    _timed(LoadCounter, "_count", spent)
    _timed(RouterScores, "_keep", spent)
    for layer in monitor._layers:  # which have the function as it was
        assert layer.scores is not None
        layer.scores.close()
    monitor.on_fit_start(trainer, model)  # type: ignore[arg-type]
    inputs = torch.randn(tokens, hidden)
    taken, hooks, reports = [], [], []
    for number in range(3 * steps):
        loop.epoch_loop._batches_that_stepped = number
        spent.clear()
        begin = process_time()
        monitor.on_train_batch_start()
        started = process_time()
        model(inputs).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ended = process_time()
        monitor.on_train_batch_end(trainer, model)  # type: ignore[arg-type]
        end = process_time()
        around = started - begin + end - ended
        if number % steps == steps - 1:
            reports.append(around * 1e3)
        elif number > steps:  # until the first report, how routers make their weights is looked at too
            taken.append((end - begin) * 1e3)
            hooks.append((around + sum(spent.values())) * 1e3)
    assert monitor.report is not None
    monitor._draw(trainer, monitor.report)  # imports matplotlib and reads its fonts
    begin = process_time()
    monitor._draw(trainer, monitor.report)
    drawn = (process_time() - begin) * 1e3
    for logger in trainer.loggers:
        logger.finalize("success")
    folder.cleanup()
    step, hook, said = (statistics.median(values) for values in (taken, hooks, reports))
    return {
        "ranks": ranks,
        "layers": layers,
        "experts": experts,
        "tokens": tokens,
        "step_ms": round(step, 2),
        "hooks_ms": round(hook, 4),
        "report_ms": round(said, 2),
        "heatmap_ms": round(drawn, 1),
        "share_of_hooks": round(hook / step, 5),
        "share_with_reports_every_50": round((hook + said / 50) / step, 5),
        "share_with_heatmaps_every_1000": round((hook + said / 50 + drawn / 1000) / step, 5),
    }


def _timed(owner: type, name: str, spent: dict[str, float]) -> None:
    original: Callable[..., Any] = getattr(owner, name)

    def timed(*args: Any) -> Any:
        begin = process_time()
        try:
            return original(*args)
        finally:
            spent[name] += process_time() - begin

    setattr(owner, name, timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048, help="a rank")
    parser.add_argument("--every", type=int, default=8, help="steps between two reports; there are three")
    a = parser.parse_args()
    report([on_ranks(measure, a.ranks, a.ranks, a.layers, a.hidden, a.experts, a.top_k, a.tokens, a.every)])


if __name__ == "__main__":
    main()
