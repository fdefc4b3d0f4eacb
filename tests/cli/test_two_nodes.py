"""A torchrun job of two agents, as on two nodes, on this machine."""

from __future__ import annotations

import re
import shlex
import socket
from pathlib import Path

import pytest

from tests.cli.processes import QUICKSTART, run_python
from tests.contract import contract

OPTIONS = shlex.split(
    "--trainer.num_nodes 2 --trainer.devices 1 --trainer.strategy.ep 2 --trainer.max_steps 2"
    " --trainer.val_check_interval 2 --trainer.limit_val_batches 1 --data.max_bytes 100000"
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contract("Launch", "`torchrun` on several nodes")
@pytest.mark.more
def test_a_fit_over_two_nodes(tmp_path: Path) -> None:
    port = str(free_port())
    agents = [
        [
            *("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(node)),
            *("--master-addr", "127.0.0.1", "--master-port", port),
            *("-m", "lightning_moe_ep", "fit", "--config", str(QUICKSTART), *OPTIONS),
        ]
        for node in (0, 1)
    ]
    first, second = run_python(*agents, cwd=tmp_path, timeout=100)
    assert "MEMBER: 1/2" in first and "MEMBER: 2/2" in second
    assert re.search(r"^val_loss=\d+\.\d{3}$", first, flags=re.MULTILINE)
    assert "val_loss=" not in second
    checkpoint = tmp_path / "runs" / "quickstart" / "checkpoints" / "last.ckpt"
    assert sorted(path.name for path in checkpoint.glob("*.distcp")) == ["__0_0.distcp", "__1_0.distcp"]
