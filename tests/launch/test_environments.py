"""Ranks that somebody else starts."""

from __future__ import annotations

import random
import socket
from pathlib import Path

from tests.contract import contract
from tests.launch.ranks import begin, ended, slurm


def free_port(first: int, last: int) -> int:
    for port in random.sample(range(first, last), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")


@contract("Launch", "SLURM")
def test_slurm(tmp_path: Path) -> None:
    """As Lightning's SLURMEnvironment reads what srun sets; the port comes of the job's number."""
    port = free_port(15000, 25000)
    printed, codes = ended(begin(slurm, tmp_path, port), tmp_path, within=60)
    assert codes == [0, 0], printed
    for rank, text in enumerate(printed):
        assert text.splitlines()[-1] == f"SLURMEnvironment {rank} 2 2 {port}"
