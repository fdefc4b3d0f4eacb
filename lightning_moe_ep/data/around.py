"""What stands around a loader of batches and is one itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class LoaderAround:
    """Base of those: what they do not define, and what is set on them, is the wrapped loader's.

    So all that a trainer reads or sets (`sampler`, `dataset`, `worker_init_fn`, ...) is as if nothing stood around it.
    """

    def __init__(self, loader: Iterable[Any], **own: Any) -> None:
        # Through __dict__, because __setattr__ below writes to the wrapped loader.
        self.__dict__.update(_loader=loader, **own)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        # While it is unpickled, the instance has no `_loader` yet, and asking for it would come back here.
        if "_loader" not in self.__dict__ or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.__dict__["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning ends a fit with `loader._iterator = None` and seeds workers with `loader.worker_init_fn`;
        # kept here, they would hide the wrapped loader's own and never reach it.
        setattr(self._loader, name, value)


def innermost(loader: object) -> object:
    """The loader that is left when all that stands around it is taken away."""
    while isinstance(loader, LoaderAround):
        loader = loader.__dict__["_loader"]
    return loader
