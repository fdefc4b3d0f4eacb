"""`pytorch_lightning`, the same library under another name, whose classes are not those of `lightning.pytorch`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial

OTHER, OURS = "pytorch_lightning", "lightning.pytorch"


def name_the_import() -> None:
    """Have the Trainers of both say which import to change, when they are given a module of the other.

    They look at the module's own class only, which is the user's, and then say that it is no LightningModule. Called
    when this package is imported, and again when one of its modules is made, as the other may be imported in between.
    """
    # Private; read at lightning 2.6.6. A test fails when it moves.
    name = "_check_mixed_imports"
    for library in (OURS, OTHER):
        if library in sys.modules:
            compiling = importlib.import_module(f"{library}.utilities.compile")
            check = getattr(compiling, name)
            if not isinstance(check, partial):
                setattr(compiling, name, partial(_check, library, check))


def _check(library: str, check: Callable[[object], None], module: object) -> None:
    other = OTHER if library == OURS else OURS
    if any(base.__module__.startswith(f"{other}.") for base in type(module).__mro__):
        raise TypeError(
            f"{type(module).__qualname__} is a LightningModule of {other}, but the Trainer is that of {library}:"
            f" {_change()}"
        )
    check(module)


def called_by_the_other_lightning(name: str) -> str | None:
    """What to change, if a Trainer of `pytorch_lightning` is asking; its registry and classes are not Lightning's.

    Args:
        name: of the strategy.
    """
    frame = sys._getframe(2)
    if str(frame.f_globals.get("__name__", "")).split(".")[0] != OTHER:
        return None
    return f"{name} of {OURS}, in a Trainer of {OTHER}: {_change()}"


def _change() -> str:
    return f"change `import {OTHER} as pl` to `import {OURS} as pl`, in all files"
