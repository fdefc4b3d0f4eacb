"""The benchmarks run and report what they say they do. Their times are not judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import context_parallel, dispatch, load, monitor, scale, sentinel, step
from benchmarks.harness import on_ranks
from tests.pool import RankPool


@pytest.mark.more
def test_dispatch() -> None:
    case = on_ranks(dispatch.measure, 2, 2, 64, 32, 2)
    assert case.keys() == {"median_ms", "bytes_sent", "host_syncs", "best", "ratios"}
    assert case["median_ms"].keys() == case["bytes_sent"].keys() == case["host_syncs"].keys()
    assert case["ratios"].keys() == {"auto/pairwise", "auto/same_work", "auto/best"}
    assert all(case["host_syncs"][name] == 1 for name in dispatch.DISPATCHERS)
    assert case["bytes_sent"]["same_work"] == 0
    assert 3 < case["bytes_sent"]["pairwise"] / case["bytes_sent"]["all_to_all"] < 4.1  # 4 pairs a row, less routing


@pytest.mark.more
def test_step() -> None:
    case = on_ranks(step.measure, 2, 2, 2, True, 1, 0)
    ours = {f"lightning_moe_ep[{name}]" for name in step.DISPATCHERS}
    assert case["median_ms"].keys() == {*ours, "transformers", "fsdp2", "loop"}
    assert case["memory_mib"].keys() == case["bytes_sent"].keys() == {*ours, "transformers", "fsdp2"}
    assert case["memory_mib"]["lightning_moe_ep[auto]"] < case["memory_mib"]["transformers"]
    assert case["bytes_sent"]["lightning_moe_ep[auto]"] < case["bytes_sent"]["transformers"]


@pytest.mark.more
def test_context_parallel(ranks: RankPool) -> None:
    case, _ = ranks.run(context_parallel.measure, [1, 2], 512, 1, "cpu", world=2)
    assert case["memory_mib"].keys() == case["median_ms"].keys() == {"cp1", "cp2"}
    assert case["memory_ratios"].keys() == case["time_ratios"].keys() == {"cp2/cp1"}
    assert 0.5 < case["memory_ratios"]["cp2/cp1"] < 0.7  # with the gathered weights, which are the same
    assert case["tokens_a_step"] == 1024


@pytest.mark.more
def test_load(tmp_path: Path) -> None:
    load.make_folder(tmp_path, 64)
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors")) / 2**20
    assert 55 < size < 105
    case = on_ranks(load.measure, 2, tmp_path, 1, True)
    assert case["median_ms"].keys() == case["disk_mib"].keys() == {*load.VARIANTS}
    assert case["disk_mib"][load.OURS] < 1.1 * size
    peaks = {name: on_ranks(load.measure, 2, tmp_path, 1, False, name) for name in (load.OURS, load.THEIRS)}
    assert size / 2 < peaks[load.OURS] < peaks[load.THEIRS]


@pytest.mark.more
def test_monitor() -> None:
    case = on_ranks(monitor.measure, 2, 2, 2, 32, 8, 2, 64, 2)
    assert 0 < case["hooks_ms"] < case["step_ms"]
    assert 0 < case["share_of_hooks"] < case["share_with_reports_every_50"] < case["share_with_heatmaps_every_1000"]


def test_sentinel() -> None:
    import torch.distributed as dist

    try:
        case = sentinel.measure(1, 1, 32, 4, 256, 4, 2)
    finally:
        dist.destroy_process_group()
    assert case["checks"] == 2  # after the first step, and the third
    assert 0 < case["share_of_hooks"] < 1 and case["hooks_ms_a_check"] > 0


def test_scale(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: the fake process group is taken down again."""
    import torch.distributed as dist

    monkeypatch.setattr("sys.argv", ["scale", "--worlds", "8", "16", "--ep", "8", "--tokens", "64"])
    try:
        scale.main()
    finally:
        dist.destroy_process_group()
    cases = json.loads(capsys.readouterr().out.splitlines()[-1])["cases"]
    assert len(cases) == 2 * len(scale.MODELS)
    for one_node, two_nodes in zip(cases[::2], cases[1::2], strict=True):
        assert one_node["dispatch_gb"] == two_nodes["dispatch_gb"]  # at a fixed ep it does not grow with the world
        assert one_node["weights_gb"]["inter_node"] == 0 < two_nodes["weights_gb"]["inter_node"]
        sent = {name: of["intra_node"] for name, of in one_node["dispatch_gb"].items()}
        assert sent["all_to_all"] < sent["all_gather"]
