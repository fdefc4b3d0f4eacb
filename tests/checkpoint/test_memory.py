"""Export and conversion hold no more of the model than they are told to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

MIB = 2**20
SIZE = {
    "vocab_size": 16384,
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "moe_intermediate_size": 512,
    "num_experts": 16,
}
"""An expert has 3 MiB, all of a layer 48 MiB, the embedding 32 MiB."""

MEASURE = """
import sys, threading, time
from lightning_moe_ep import convert_to_file, convert_to_folder, export_to_hugging_face

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.0005)

run = {"export": export_to_hugging_face, "file": convert_to_file, "folder": convert_to_folder}
export_to_hugging_face(sys.argv[1], sys.argv[2] + "-first", max_memory="1MiB")  # what is imported late
for what, source, target, memory in zip(*[iter(sys.argv[3:])] * 4):
    peak, done = 0, False
    before = anonymous()
    watching = threading.Thread(target=watch)
    watching.start()
    run[what](source, target, max_memory=memory)
    done = True
    watching.join()
    print((peak - before) / 2**20)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux how much memory there is")
@pytest.mark.more
def test_memory_is_bounded(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **SIZE))
    record = {"class": type(model).__name__, "config": json.loads(model.config.to_json_string(use_diff=False))}
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    torch.save({"state_dict": state, "moe_ep": {"models": {"model": record}}}, tmp_path / "c.ckpt")
    size = (tmp_path / "c.ckpt").stat().st_size / MIB
    assert size > 160
    del model, state
    asked = [
        ("export", "c.ckpt", "of a file", "16MiB"),
        ("folder", "c.ckpt", "c.folder", "16MiB"),
        ("export", "c.folder", "of a folder", "16MiB"),
        ("file", "c.folder", "again.ckpt", "16MiB"),
        ("export", "c.folder", "whole", "4GiB"),  # the control: what is not bounded
    ]
    arguments = [
        str(argument)
        for what, source, target, memory in asked
        for argument in (what, tmp_path / source, tmp_path / target, memory)
    ]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "c.ckpt"), str(tmp_path / "out"), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        # Else glibc keeps up to 64 MiB of what was freed.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *bounded, whole = map(float, done.stdout.split())
    assert max(bounded) < 16 + 4, done.stdout  # a little for all else
    assert whole > 60, done.stdout
