"""A picture of the experts' load: a row for each layer, a column for each expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import numpy.typing as npt
from lightning.pytorch.loggers import Logger

from lightning_moe_ep.callbacks.load_report import Floats, LoadReport

if TYPE_CHECKING:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

Pixels = npt.NDArray[np.uint8]

WIDEST = 4.0
"""The colours go from a quarter to four times the mean, by ratios, so that 1 is in the middle."""

LABELS = 24
"""Layers that have their names written beside their rows; of more, every n-th."""


def draw(names: Sequence[str], panels: dict[str, Sequence[Floats | None]], *, title: str) -> FigureCanvasAgg:
    """Draw multiples of a layer's mean, each panel beside the last.

    Args:
        names: of the layers, in the order of the model; the first is the top row.
        panels: by what they show: `[E]` for each layer, as multiples of the layer's mean; E may differ between
            layers. None: it is not known of this layer.
        title: over all panels.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    most = max(len(row) for rows in panels.values() for row in rows if row is not None)
    width = min(3.0 + 0.16 * most, 9.0)
    height = min(1.9 + 0.26 * len(names), 14.0)
    figure = Figure(figsize=(len(panels) * width + 1.0, height), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    image = None
    for axis, (label, rows) in zip(axes, panels.items(), strict=True):
        grid = np.full((len(names), most), np.nan)
        for number, row in enumerate(rows):
            if row is not None:
                grid[number, : len(row)] = row
        image = axis.imshow(
            np.clip(grid, 1 / WIDEST, WIDEST),
            cmap="cividis",
            norm=LogNorm(1 / WIDEST, WIDEST),
            aspect="auto",
            interpolation="nearest",
        )
        layer, expert = np.nonzero(grid == 0)
        axis.scatter(expert, layer, marker="x", s=14, linewidths=1, color="white")
        axis.set_title(label, fontsize=10)
        axis.set_xlabel("expert")
        axis.xaxis.get_major_locator().set_params(integer=True)
    shown = range(0, len(names), -(-len(names) // LABELS))
    axes[0].set_yticks(shown, [names[number] for number in shown], fontsize=8)
    axes[0].set_ylabel("layer")
    assert image is not None
    bar = figure.colorbar(image, ax=list(axes), extend="both", ticks=[0.25, 0.5, 1, 2, 4])
    bar.ax.set_yticklabels(["1/4", "1/2", "1", "2", "4"])
    bar.ax.minorticks_off()
    bar.set_label("times the mean of the layer")
    figure.suptitle(title, fontsize=11)
    canvas.draw()
    return canvas


def of_report(report: LoadReport) -> FigureCanvasAgg:
    """Draw the load of each expert and, where it is known, what the router gives it."""
    panels: dict[str, Sequence[Floats | None]] = {
        "(token, expert) pairs": [layer.pairs / layer.pairs.mean() for layer in report.layers]
    }
    if any(layer.probabilities is not None for layer in report.layers):
        panels["router probability"] = [
            None if layer.probabilities is None else layer.probabilities * len(layer.pairs) for layer in report.layers
        ]
    title = f"Load of the experts, steps {report.step - report.steps + 1} to {report.step}"
    return draw([layer.name for layer in report.layers], panels, title=title)


def pixels(canvas: FigureCanvasAgg) -> Pixels:
    """`[height, width, 3]`, of what was drawn."""
    return np.asarray(canvas.buffer_rgba())[:, :, :3].copy()


def write_png(image: Pixels, file: BinaryIO) -> None:
    from matplotlib.image import imsave  # canvas.print_png would draw it all again

    imsave(file, image, format="png")


def log_image(logger: Logger, name: str, image: Pixels, *, step: int) -> None:
    """Give a picture to a logger that takes images; one that does not is left alone."""
    if callable(getattr(logger, "log_image", None)):  # of WandbLogger
        logger.log_image(key=name, images=[image], step=step)
    elif callable(getattr(logger.experiment, "add_image", None)):  # of TensorBoard's writer
        logger.experiment.add_image(name, image, step, dataformats="HWC")
