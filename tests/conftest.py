from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch

from tests.pool import RankPool

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
torch.set_num_threads(1)
# Started in the background, this process ignores Ctrl-C, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()
