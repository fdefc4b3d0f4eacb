"""Starts commands as a user does, with a time limit, and shows what they printed when they fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
QUICKSTART = REPOSITORY / "configs" / "quickstart.yaml"


def run_python(*argument_lists: Sequence[str], cwd: Path, timeout: float = 120) -> list[str]:
    """Run `python ARGUMENTS` once for each list, all at the same time; returns what each printed.

    Raises:
        AssertionError: one failed, or did not end in time; then all are killed. Shows what all printed.
    """
    # The children import the package that the tests import, wherever they run.
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(number)) for number in range(len(argument_lists))]
        processes = []
        for arguments, file in zip(argument_lists, files, strict=True):
            with file.open("w") as output:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, *arguments],
                        cwd=cwd,
                        env=environment,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # so that the ranks that it starts can be killed with it
                    )
                )
        ends: list[int | None] = []
        try:
            for process in processes:
                ends.append(process.wait(timeout))
        except subprocess.TimeoutExpired:
            ends.append(None)
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        printed = [file.read_text() for file in files]
    shown = "\n".join(f"--- {' '.join(a)}\n{text}" for a, text in zip(argument_lists, printed, strict=True))
    assert None not in ends, f"did not end within {timeout} s\n{shown}"
    assert set(ends) == {0}, f"exit status {ends}\n{shown}"
    return printed
