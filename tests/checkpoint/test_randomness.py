"""Random numbers go on where they stopped."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
import torch

from lightning_moe_ep.checkpoint.randomness import random_state, restore_random_state


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.rand(()))]


@pytest.fixture(autouse=True)
def _leave_as_it_was() -> object:
    before = random_state()
    yield
    restore_random_state([before], 0, 1)


def test_they_go_on() -> None:
    draw()
    file = io.BytesIO()
    torch.save(random_state(), file)
    expected = draw()
    draw()
    file.seek(0)
    other = random_state()
    restore_random_state([other, torch.load(file, weights_only=True)], 1, 2)
    assert draw() == expected


def test_other_ranks_draw_numbers_of_their_own_the_same_each_time() -> None:
    state = random_state()
    drawn = []
    for rank in (0, 1, 0):
        restore_random_state([state], rank, 2)
        drawn.append(draw())
    assert drawn[0] == drawn[2]
    assert not set(drawn[0]) & set(drawn[1])


def test_ranks_that_come_to_share_their_data_draw_alike() -> None:
    states = [random_state()]
    draw()
    states.append(random_state())
    drawn = {}
    for name, saved, cp, world in (("alike", 1, 2, 2), ("as it was", 2, 2, 2), ("fewer saved", 1, 2, 4)):
        for rank in range(world):
            restore_random_state(states, rank, world, cp=cp, saved_cp=saved)
            drawn[name, rank] = draw()
    assert drawn["alike", 0] == drawn["alike", 1] == drawn["as it was", 0] != drawn["as it was", 1]
    assert drawn["fewer saved", 0] == drawn["fewer saved", 1] != drawn["fewer saved", 2] == drawn["fewer saved", 3]
