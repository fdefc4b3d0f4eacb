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

LONGEST = ("test_examples.py", "test_benchmarks.py", "test_readme.py", "test_planted.py", "test_planner.py")
"""Of `make more`. Begun last, one of these files would keep one process busy while the other has no more to do."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("more") is None or item.path.name not in LONGEST)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()
