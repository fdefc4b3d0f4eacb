"""The states of a rank's random number generators, as plain types, and back."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

State = dict[str, Any]


def random_state() -> State:
    """Of Python's, NumPy's and torch's generators, that of the current CUDA device included."""
    numpy: State = dict(np.random.get_state(legacy=False))
    inner = numpy["state"]
    state: State = {
        "python": random.getstate(),
        "numpy": {**numpy, "state": {**inner, "key": inner["key"].tolist()}},
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(states: Sequence[State], rank: int, world: int, *, cp: int = 1, saved_cp: int = 1) -> None:
    """Go on where this rank stopped.

    Another number of ranks cannot do that. Each then starts from numbers of its own, the same each time. Ranks that
    come to be in a cp group start alike, as what they draw for their data has to be.

    Args:
        states: of all ranks that saved.
        rank: this rank.
        world: the ranks that there are now.
        cp: of the layout that there is now.
        saved_cp: of the layout that saved.
    """
    if len(states) != world:
        own = f"{rank // cp} of {world // cp}"
        digest = hashlib.sha256(states[0]["torch"].numpy().tobytes() + own.encode()).digest()
        seed = int.from_bytes(digest[:4], "little")
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        return
    state = states[rank if cp == saved_cp else rank // cp * cp]
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    numpy = state["numpy"]
    key = np.array(numpy["state"]["key"], dtype=np.uint32)
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": key}})
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
