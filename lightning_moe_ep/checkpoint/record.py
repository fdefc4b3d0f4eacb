"""What a checkpoint says of the run that saved it: the layout, the experts, the transformers models in it.

Plain types only, so that any program can read it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer

from lightning_moe_ep.checkpoint.pieces import describe_optimizers, describe_pieces
from lightning_moe_ep.experts import plain_class
from lightning_moe_ep.experts.spread import spread_of
from lightning_moe_ep.layout import Layout
from lightning_moe_ep.transformers_models import outermost_models

KEY = "moe_ep"
"""Under which the record is in a checkpoint."""

NEVER_STEPPED = "never_stepped"
"""Under which it has, by the number of the optimizer, the parameters of which that has no state yet."""


def describe(module: nn.Module, layout: Layout, optimizers: Iterable[Optimizer] = ()) -> dict[str, Any]:
    """The record of a parallel model.

    Args:
        module: the LightningModule.
        layout: at which it runs.
        optimizers: the run's.

    Returns:
        `version` of this package; `layout`; `experts`, the number of experts E by the path of their module; `models`,
        by the path of each outermost transformers model its `class` and `config`; `pieces` and `optimizers`, which
        `lightning_moe_ep.checkpoint.pieces` describes.
    """
    return {
        "version": sys.modules[__name__.partition(".")[0]].__version__,
        "layout": {"replicate": layout.replicate, "efsdp": layout.efsdp, "ep": layout.ep, "cp": layout.cp},
        "experts": {
            path: spread.num_experts for path, part in module.named_modules() if (spread := spread_of(part)) is not None
        },
        "models": {
            path: {
                "class": plain_class(model).__name__,
                "config": json.loads(model.config.to_json_string(use_diff=False)),
            }
            for path, model in outermost_models(module)
        },
        "pieces": _pieces_of(module),
        "optimizers": describe_optimizers(module, optimizers),
    }


def _pieces_of(module: nn.Module) -> dict[str, Any]:
    """Found once: with thousands of experts in lists it takes seconds, and a parallel model keeps its parameters."""
    if module not in _PIECES:
        _PIECES[module] = describe_pieces(module)
    return _PIECES[module]


_PIECES: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()
