"""The arithmetic of a report, and what is alerted of a series of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from lightning_moe_ep.callbacks import LayerLoad, LoadReport, heatmap
from lightning_moe_ep.callbacks.alerts import Alerts, ExpertAlert
from lightning_moe_ep.callbacks.load_report import short_names


def layer(pairs: list[float], of_rank: list[float] | None = None, **options: Any) -> LayerLoad:
    given = None if of_rank is None else np.array(of_rank, dtype=float)
    return LayerLoad(**{"name": "a", "pairs": np.array(pairs, dtype=float), "pairs_of_rank": given, "ep": 2, **options})


def report(*layers: LayerLoad, steps: int = 10, step: int = 10, dense: float = 0.0) -> LoadReport:
    return LoadReport(step, steps, list(layers), dense)


def test_of_a_layer() -> None:
    load = layer([6, 2, 0, 0], [8, 0], tokens=4.0)
    assert load.imbalance == 3.0
    assert load.entropy == pytest.approx((0.75 * math.log(4 / 3) + 0.25 * math.log(4)) / math.log(4))
    assert load.dead == (2, 3)
    assert load.rank_imbalance == 2.0
    assert layer([3, 3, 3]).entropy == pytest.approx(1.0)
    assert layer([5]).entropy == layer([5]).imbalance == 1.0
    assert layer([1, 0]).entropy == 0.0
    assert layer([1, 1]).scalars() == {"imbalance": 1.0, "entropy": pytest.approx(1.0), "dead": 0.0}


def test_what_imbalance_costs() -> None:
    one = layer([6, 2], [6, 2], tokens=4.0, parameters_of_expert=10.0)
    two = layer([4, 4], [4, 4], tokens=4.0, parameters_of_expert=10.0)
    # On the slowest ranks 60 + 40 in the experts, and 2 tokens a rank in dense matrices of 50; 20 of it is waiting.
    assert report(one, two, dense=50.0).imbalance_costs == [20 / 200, 0.0]
    assert report(one, layer([1, 1], None, tokens=1.0)).imbalance_costs is None
    assert report(one, layer([1, 1], [1, 1])).imbalance_costs is None
    scalars = report(one, two, dense=50.0).scalars(of_experts=True)
    assert scalars["experts/imbalance_cost"] == 0.1
    assert scalars["experts_pairs/a/1"] == 4.0
    assert report().scalars(of_experts=True) == {}


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"], ["layers.0", "layers.1"]),
        (["m.layers.1.text.experts", "m.layers.1.vision.experts"], ["1.text", "1.vision"]),
        (["m.0.experts", "m.1.up.experts"], ["m.0", "m.1.up"]),
        (["m.layers.0.experts"], ["m.layers.0.experts"]),
        (["a", "b"], ["a", "b"]),
        (["a.b", "a.b.c"], ["a.b", "a.b.c"]),
    ],
)
def test_names(names: list[str], short: list[str]) -> None:
    assert short_names(names) == short
    assert len(set(short)) == len(names)


def kinds(alerts: list[ExpertAlert]) -> list[tuple[str, tuple[int, ...]]]:
    return [(alert.kind, alert.experts) for alert in alerts]


def test_dead_experts_are_told_of_once_until_they_are_back() -> None:
    alerts = Alerts(dead_steps=20, rank_load_bound=2.0)
    dead, alive = layer([4, 0, 4]), layer([4, 4, 0])
    assert kinds(alerts.begun(report(dead))) == []
    assert kinds(alerts.begun(report(dead))) == [("dead_experts", (1,))]
    assert kinds(alerts.begun(report(dead))) == []
    assert kinds(alerts.begun(report())) == []  # a window without tokens says nothing
    assert kinds(alerts.begun(report(alive))) == []
    state = alerts.state_dict()
    resumed = Alerts(dead_steps=20, rank_load_bound=2.0)
    resumed.load_state_dict(state)
    assert kinds(resumed.begun(report(alive))) == [("dead_experts", (2,))]
    assert kinds(resumed.begun(report(dead))) == []
    assert kinds(resumed.begun(report(dead))) == [("dead_experts", (1,))]
    assert kinds(resumed.begun(report(layer([1, 0])))) == []  # another model


def test_a_rank_s_load_is_that_in_its_own_group() -> None:
    alerts = Alerts(dead_steps=99, rank_load_bound=1.5)
    # Twice the tokens in the second group is no matter of experts; three quarters of them on one of its ranks is.
    uneven = layer([4, 4, 4, 4], [4, 4, 12, 4], name="a")
    assert [(a.rank, a.experts, a.value) for a in alerts.begun(report(uneven))] == []
    uneven = layer([4, 4, 4, 4], [4, 4, 3, 13], name="a")
    assert [(a.rank, a.experts, a.value) for a in alerts.begun(report(uneven))] == [(3, (2, 3), 1.625)]
    assert alerts.begun(report(uneven)) == []
    assert alerts.begun(report(layer([4, 4, 4, 4], [4, 4, 0, 0]))) == []  # over; a group without tokens has no mean
    assert len(alerts.begun(report(uneven))) == 1
    assert alerts.begun(report(layer([9, 1], [9, 1], ep=1, name="b"))) == []  # its tokens, not its experts


def test_pictures_of_ragged_and_many_layers() -> None:
    known = np.array([0.5, 0.5])
    some = [layer([3, 1], probabilities=known, name="one"), layer([4, 0, 2], name="two")]
    canvas = heatmap.of_report(report(*some))
    left, right, bar = canvas.figure.axes
    assert (left.get_ylabel(), left.get_xlabel(), right.get_xlabel()) == ("layer", "expert", "expert")
    assert (left.get_title(), right.get_title()) == ("(token, expert) pairs", "router probability")
    assert [text.get_text() for text in left.get_yticklabels()] == ["one", "two"]
    assert bar.get_ylabel() == "times the mean of the layer"
    assert canvas.figure.get_suptitle() == "Load of the experts, steps 1 to 10"
    image = left.images[0].get_array()
    assert image.filled(-1).tolist() == [[1.5, 0.5, -1.0], [2.0, 0.25, 1.0]]
    assert left.collections[0].get_offsets().tolist() == [[1.0, 1.0]], "the dead expert is crossed"
    assert left.images[0].get_cmap().name == "cividis"
    many = heatmap.of_report(report(*(layer([1.0] * 256, name=str(number)) for number in range(61))))
    assert many.buffer_rgba().shape[0] <= 1400 and many.buffer_rgba().shape[1] <= 1100
    assert len(many.figure.axes[0].get_yticklabels()) <= heatmap.LABELS
