"""What a user may bring that belongs to another Lightning."""

from __future__ import annotations

import sys

OTHER = "pytorch_lightning"


def called_by_the_other_lightning(name: str) -> str | None:
    """What to change, if a Trainer of `pytorch_lightning` is asking; its registry and classes are not Lightning's.

    Args:
        name: of the strategy.
    """
    frame = sys._getframe(2)
    if str(frame.f_globals.get("__name__", "")).split(".")[0] != OTHER:
        return None
    return (
        f"{name} of lightning.pytorch, in a Trainer of {OTHER}; change the import of that Trainer, and of all else,"
        f" from `import {OTHER} as pl` to `import lightning.pytorch as pl`"
    )
