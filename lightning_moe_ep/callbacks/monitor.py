"""Watching whether the experts of a training are used: numbers, pictures and alerts.

What routers choose and dispatchers exchange is counted on the device in training forwards; every so many steps one sum
over the world makes a `LoadReport` of it, the same on every rank, which is logged, drawn and looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from typing_extensions import override

from lightning_moe_ep.callbacks import heatmap
from lightning_moe_ep.callbacks.alerts import Alerts, ExpertAlert
from lightning_moe_ep.callbacks.load import LoadCounter
from lightning_moe_ep.callbacks.load_report import Floats, LayerLoad, LoadReport, short_names
from lightning_moe_ep.callbacks.router_scores import SCORES, RouterScores
from lightning_moe_ep.experts import ExpertsModule, find_experts, find_routers, spread_of
from lightning_moe_ep.rows import RoutingStatistics


@dataclass
class _Layer:
    """An experts module and what is counted of it on this rank, beside its load."""

    found: ExpertsModule
    name: str
    parameters_of_expert: float
    ep: int
    scores: RouterScores | None
    exchange: RoutingStatistics = field(default_factory=RoutingStatistics)
    tokens: int = 0


class ExpertLoadMonitor(L.Callback):
    """Logs how the experts are used, draws it, and says when something is wrong. With any strategy, or none.

    Counted are the training forwards of all ranks and micro-batches, padding included; not validation, and not what
    activation checkpointing repeats. Every `every_n_steps` optimizer steps there is one all-reduce, of a few numbers
    for each expert and each rank, and the host waits for it; in other steps it never does.

    Every logger of the Trainer gets the scalars (docs/monitor.md has their formulas), and `callback_metrics` has them;
    the largest load and the number of dead experts are in the progress bar. The heatmap goes to loggers that take
    images (TensorBoard, Weights & Biases, whatever has a `log_image` as theirs) and into `expert_load/` as PNG files,
    in the folder of the first logger. It needs matplotlib.

    An expert that has got no token for `dead_steps` steps, and a rank that computes more than `rank_load_bound` times
    the mean of its ep group, are an `ExpertAlert`: the first of each kind is a warning, and for each the hook
    `on_expert_alert(trainer, pl_module, alert)` is called, on all ranks alike, of this callback, of all others that
    have it and of the LightningModule. An alert comes again only when it has been over in between.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        heatmap_every_n_steps: int | None = None,
        dirpath: str | None = None,
        log_experts: bool = False,
        dead_steps: int = 200,
        rank_load_bound: float = 1.5,
    ) -> None:
        """
        Args:
            every_n_steps: optimizer steps between two reports. None: the Trainer's `log_every_n_steps`.
            heatmap_every_n_steps: those between two heatmaps, which show the last report; one more comes at the end of
                a fit. None: twenty times `every_n_steps`; 0: no heatmaps.
            dirpath: the folder of the PNG files.
            log_experts: log the pairs of each expert, too: a scalar for each expert of each layer.
            dead_steps: steps without a token after which an expert is an alert; seen at the next report.
            rank_load_bound: a rank's pairs, as a multiple of the mean of its ep group, above which it is an alert.

        Raises:
            ValueError: a number is out of range.
        """
        for name, value in (("every_n_steps", every_n_steps), ("dead_steps", dead_steps)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if heatmap_every_n_steps is not None and heatmap_every_n_steps < 0:
            raise ValueError(f"heatmap_every_n_steps={heatmap_every_n_steps} must be at least 1, or 0 for no heatmaps")
        if not rank_load_bound >= 1:
            raise ValueError(
                f"rank_load_bound={rank_load_bound} must be at least 1, which every rank has if all is even"
            )
        self.every_n_steps = every_n_steps
        self.heatmap_every_n_steps = heatmap_every_n_steps
        self.dirpath = dirpath
        self.log_experts = log_experts
        self.report: LoadReport | None = None
        """The last one; the same on every rank."""
        self._counter: LoadCounter | None = None
        self._layers: list[_Layer] = []
        self._steps = 0
        """Optimizer steps since the last report."""
        self._drawn_step = 0
        self._alerts = Alerts(dead_steps=dead_steps, rank_load_bound=rank_load_bound)
        self._warned: set[str] = set()

    def on_expert_alert(self, trainer: L.Trainer, pl_module: L.LightningModule, alert: ExpertAlert) -> None:
        """Called on every rank when an alert begins; does nothing. Other callbacks, and the module, may have one."""

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Forget what was wrong in a fit before, of another model maybe; a checkpoint's state comes after this."""
        if stage == "fit":
            self._alerts.forget()

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the experts, their routers, and the folder of the pictures.

        Raises:
            NoExpertsError: the model has no experts module.
            ValueError: the Trainer's `log_every_n_steps=0` is never and no other number is given, or what is routed
                cannot be seen in a plain model; on every rank.
        """
        self._close()
        self._every = trainer.log_every_n_steps if self.every_n_steps is None else self.every_n_steps
        if not self._every:
            raise ValueError(
                "ExpertLoadMonitor reports as often as the Trainer logs, which log_every_n_steps=0 makes never; give"
                " ExpertLoadMonitor(every_n_steps=...)"
            )
        given = self.heatmap_every_n_steps
        self._heatmap_every = 20 * self._every if given is None else given
        self._folder = None
        if self._heatmap_every and not trainer.fast_dev_run:
            folder = trainer.log_dir  # a broadcast: every rank asks
            self._folder = self.dirpath or f"{folder or trainer.default_root_dir}/expert_load"
        if self._heatmap_every and find_spec("matplotlib") is None:
            self._heatmap_every = 0
            rank_zero_warn(
                "ExpertLoadMonitor draws no heatmaps, as matplotlib is not installed: pip install"
                " lightning-moe-ep[docs]; the numbers are logged all the same"
            )
        experts = find_experts(pl_module)
        device = trainer.strategy.root_device
        self._counter = LoadCounter(experts, device, also=self._see)
        self._layers = _layers(pl_module, experts, device)
        of_experts = {id(p) for layer in self._layers for p in _parameters(layer.found)}
        lookups = {id(m.weight) for m in pl_module.modules() if isinstance(m, nn.Embedding)}
        lookups -= {id(m.weight) for m in pl_module.modules() if isinstance(m, nn.Linear)}
        self._dense_parameters = float(
            sum(p.numel() for p in pl_module.parameters() if p.ndim > 1 and id(p) not in of_experts | lookups)
        )
        self.report = None
        self._steps = self._drawn_step = 0

    def _see(self, layer: int, top_k_index: Tensor, top_k_weights: Tensor) -> None:
        self._layers[layer].tokens += len(top_k_index)
        if (scores := self._layers[layer].scores) is not None:
            scores.count(top_k_index, top_k_weights)

    # Not by `module.training`: a model may be trained in eval mode.

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self._count(True)

    @override
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._count(False)
        if trainer.fit_loop._should_accumulate():
            return
        self._steps += 1
        step = _steps_before(trainer) + 1
        if step % self._every == 0 or trainer.fast_dev_run:
            self._report(trainer, pl_module, step)

    def _count(self, counting: bool) -> None:
        assert self._counter is not None
        self._counter.counting = counting
        for layer in self._layers:
            if layer.scores is not None:
                layer.scores.counting = counting
            if (spread := spread_of(layer.found.module)) is not None:
                spread.statistics.readers = [r for r in spread.statistics.readers if r is not layer.exchange]
                if counting:
                    spread.statistics.readers.append(layer.exchange)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.report is not None and self.report.step > self._drawn_step:
            self._draw(trainer, self.report)

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._close()

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._counter is not None:
            self._count(False)
            self._counter.close()
        for layer in self._layers:
            if layer.scores is not None:
                layer.scores.close()
        self._counter, self._layers = None, []

    # From counts to a report.

    def _report(self, trainer: L.Trainer, pl_module: L.LightningModule, step: int) -> None:
        sums = self._summed(trainer)
        layers = [
            load for layer in self._layers if (load := self._load_of(layer, sums, trainer.world_size)).pairs.any()
        ]
        self.report = LoadReport(step, self._steps, layers, self._dense_parameters)
        self._reset()
        scalars = self.report.scalars(of_experts=self.log_experts)
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in scalars.items()})
        for name in ("experts/imbalance", "experts/dead"):
            if name in scalars:
                pl_module.log(name, scalars[name], prog_bar=True, logger=False)
        for logger in trainer.loggers if scalars else ():
            logger.log_metrics(scalars, step=step - 1)  # Lightning's own count: the first step is 0
        every = self._heatmap_every
        if every and (trainer.fast_dev_run or step // every > (step - self.report.steps) // every):
            self._draw(trainer, self.report)
        self._tell_alerts(trainer, pl_module, self.report)

    @torch.no_grad()
    def _summed(self, trainer: L.Trainer) -> _Reader:
        """What was counted of all layers, over all ranks: one all-reduce and one wait."""
        assert self._counter is not None
        world, loads = trainer.world_size, self._counter.loads()
        home = loads.device if world > 1 else torch.device("cpu")  # not every device has float64
        of_rank = torch.zeros(len(self._layers), world, dtype=torch.float64, device=home)
        computed = [
            layer.exchange.pairs_of_expert.sum() if layer.exchange.pairs_of_expert is not None else loads.new_zeros(())
            for layer in self._layers
        ]
        alone = [load.sum() for load in self._counter.of_layers(loads)]
        computed = [mine if layer.ep == 1 else c for layer, mine, c in zip(self._layers, alone, computed, strict=True)]
        of_rank[:, trainer.global_rank] = torch.stack(computed).to(home).double()
        scores = [
            torch.cat([layer.scores.sums, layer.scores.misfits.unsqueeze(1)], dim=1).flatten()
            for layer in self._layers
            if layer.scores is not None
        ]
        on_host = [
            [
                float(layer.tokens),
                float(layer.exchange.forwards),
                float(layer.exchange.rows_sent),
                float(layer.exchange.bytes_sent),
                float(layer.scores.tokens if layer.scores is not None else 0),
            ]
            for layer in self._layers
        ]
        sums = torch.cat(
            [
                loads.to(home).double(),
                of_rank.flatten(),
                torch.cat(scores).to(home).double() if scores else of_rank.new_empty(0),
                torch.tensor(on_host, dtype=torch.float64).flatten().to(home),
            ]
        )
        if world > 1:
            dist.all_reduce(sums)
        return _Reader(sums.cpu().numpy(), self._layers, world)

    def _load_of(self, layer: _Layer, sums: _Reader, world: int) -> LayerLoad:
        pairs, of_rank, scores, (tokens, forwards, rows, sent, scored) = sums.read(layer)
        probabilities = None
        if layer.scores is not None and scores is not None:
            layer.scores.decide(scores[:, -1], int(scored))
            probabilities = layer.scores.probabilities(scores[:, :-1], scores[:, -1], int(scored))
        exchanged = layer.ep > 1 and forwards > 0
        return LayerLoad(
            name=layer.name,
            pairs=pairs,
            pairs_of_rank=of_rank if (exchanged or layer.ep == 1) and of_rank.any() else None,
            ep=layer.ep,
            probabilities=probabilities,
            rows_sent=float(rows) / self._steps if exchanged else None,
            bytes_sent=float(sent) / self._steps if exchanged else None,
            tokens=float(tokens) if layer.found.adapter.called_with_routing else None,
            parameters_of_expert=layer.parameters_of_expert,
        )

    def _reset(self) -> None:
        assert self._counter is not None
        self._counter.reset()
        self._steps = 0
        for layer in self._layers:
            layer.tokens = 0
            layer.exchange.reset()
            if layer.scores is not None:
                layer.scores.reset()

    # Pictures and alerts.

    def _draw(self, trainer: L.Trainer, report: LoadReport) -> None:
        self._drawn_step = report.step
        if not self._heatmap_every or not report.layers or not trainer.is_global_zero:
            return
        image = heatmap.pixels(heatmap.of_report(report))
        for logger in trainer.loggers:
            heatmap.log_image(logger, "experts/load", image, step=report.step - 1)
        if self._folder is None:
            return
        try:
            files = get_filesystem(self._folder)
            files.makedirs(self._folder, exist_ok=True)
            with files.open(f"{self._folder}/step={report.step:08d}.png", "wb") as file:
                heatmap.write_png(image, file)
        except OSError as error:  # no reason to end a training
            rank_zero_warn(f"ExpertLoadMonitor could not write the heatmap of step {report.step}: {error}")

    def _tell_alerts(self, trainer: L.Trainer, pl_module: L.LightningModule, report: LoadReport) -> None:
        for alert in self._alerts.begun(report):
            if alert.kind not in self._warned:
                self._warned.add(alert.kind)
                rank_zero_warn(f"{alert}. (This is said once; ExpertLoadMonitor calls on_expert_alert for each)")
            for owner in (*trainer.callbacks, pl_module):
                if callable(hook := getattr(owner, "on_expert_alert", None)):
                    hook(trainer, pl_module, alert)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**self._alerts.state_dict(), "warned": sorted(self._warned)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._alerts.load_state_dict(state_dict)
        self._warned = set(state_dict["warned"])


class _Reader:
    """Gives each layer, in order, its part of the sums."""

    def __init__(self, sums: Floats, layers: list[_Layer], world: int) -> None:
        sizes = [layer.found.num_experts for layer in layers]
        widths = [0 if layer.scores is None else len(SCORES) * (n + 1) for layer, n in zip(layers, sizes, strict=True)]
        parts = np.split(sums, np.cumsum([sum(sizes), len(layers) * world, sum(widths)]))
        pairs = np.split(parts[0], np.cumsum(sizes)[:-1])
        scores = np.split(parts[2], np.cumsum(widths)[:-1])
        self._parts = {
            id(layer): (pairs[i], parts[1].reshape(-1, world)[i], scores[i], parts[3].reshape(len(layers), -1)[i])
            for i, layer in enumerate(layers)
        }

    def read(self, layer: _Layer) -> tuple[Floats, Floats, Floats | None, Floats]:
        pairs, of_rank, scores, on_host = self._parts[id(layer)]
        return pairs, of_rank, scores.reshape(len(SCORES), -1) if len(scores) else None, on_host


def _layers(model: nn.Module, experts: list[ExpertsModule], device: torch.device) -> list[_Layer]:
    try:
        routers = find_routers(model)
    except ValueError:  # a layer has none
        routers = {}
    layers = []
    for found, name in zip(experts, short_names([found.name for found in experts]), strict=True):
        spread, router = spread_of(found.module), routers.get(found.name)
        layers.append(
            _Layer(
                found=found,
                name=name,
                parameters_of_expert=sum(p.numel() for p in _parameters(found)) / found.num_experts,
                ep=spread.ep if spread is not None else 1,
                scores=RouterScores(router, found.num_experts, device) if router is not None else None,
            )
        )
    return layers


def _parameters(found: ExpertsModule) -> list[nn.Parameter]:
    return [found.module.get_parameter(name) for name in found.adapter.parameters]


def _steps_before(trainer: L.Trainer) -> int:
    """The number under which Lightning logs the step that is running (read at lightning 2.6)."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped
