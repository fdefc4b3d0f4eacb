"""What a machine has and can do: memory of a device, arithmetic, the networks inside of and between nodes.

Figures are the user's own, which are taken as they are, or the vendor's of a named GPU, of which a share is reached.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

REACHED_FLOPS = 0.4
"""The share of a vendor's figure for dense matrix products that the training of a transformer is assumed to reach."""

REACHED_BANDWIDTH = 0.8
"""The share of a link's bandwidth that collectives of large messages are assumed to reach."""

KEPT_FREE = 0.08
"""The share of a device's memory that is left for what is not predicted: the context of CUDA, buffers of NCCL, gaps
between blocks of the allocator."""

LATENCY = 20e-6
"""Seconds that a collective is assumed to take beside its bytes."""


@dataclass(frozen=True)
class Machine:
    """What is known of the machine; None: it is not."""

    memory: int | None = None
    """Bytes of a device that a process can have."""

    flops: float | None = None
    """Floating-point operations a second that a device reaches."""

    intra: float | None = None
    """Bytes a second that a device sends to others of its node."""

    inter: float | None = None
    """Bytes a second that a device sends to other nodes."""

    latency: float = LATENCY
    """Seconds of a collective beside its bytes."""

    name: str = ""

    @property
    def usable(self) -> int | None:
        """Bytes of a device that a plan may fill."""
        return None if self.memory is None else int(self.memory * (1 - KEPT_FREE))


@dataclass(frozen=True)
class Gpu:
    """A vendor's figures."""

    gib: float
    """GiB that a process is told there are, rounded down, which is less than the vendor's GB; of B200 the vendor's."""

    tflops_bf16: float
    """Dense, without sparsity."""

    tflops_fp32: float
    """Without TF32, as torch multiplies by default."""

    intra_gbps: float
    """Gigabytes a second in one direction, NVLink."""

    inter_gbps: float
    """Gigabytes a second in one direction, of the network card that the vendor's own node has for each device."""


GPUS = {
    # NVIDIA A100 datasheet (June 2021) and DGX A100: NVLink 600 GB/s both ways, 8 x 200 Gb/s.
    "a100-40": Gpu(gib=39.3, tflops_bf16=312, tflops_fp32=19.5, intra_gbps=300, inter_gbps=25),
    "a100": Gpu(gib=79.1, tflops_bf16=312, tflops_fp32=19.5, intra_gbps=300, inter_gbps=25),
    # NVIDIA H100 datasheet, SXM (989 dense, 1,979 with sparsity) and DGX H100: NVLink 900 GB/s both ways, 8 x 400 Gb/s.
    "h100": Gpu(gib=79.1, tflops_bf16=989, tflops_fp32=67, intra_gbps=450, inter_gbps=50),
    # NVIDIA H200 datasheet, SXM, and DGX H200.
    "h200": Gpu(gib=139.7, tflops_bf16=989, tflops_fp32=67, intra_gbps=450, inter_gbps=50),
    # NVIDIA HGX B200 (2,250 dense, 4,500 with sparsity) and DGX B200 (1,440 GB in 8): NVLink 1.8 TB/s, 8 x 400 Gb/s.
    "b200": Gpu(gib=167.6, tflops_bf16=2250, tflops_fp32=80, intra_gbps=900, inter_gbps=50),
}


def machine_of(gpu: str | None, precision: str) -> Machine:
    """What a named GPU reaches; nothing for None.

    Args:
        gpu: one of `GPUS`.
        precision: Lightning's name of it; only 32-true multiplies in fp32.

    Raises:
        ValueError: there are no figures of this GPU.
    """
    if gpu is None:
        return Machine()
    if gpu.lower() not in GPUS:
        raise ValueError(
            f"there are no figures of a GPU {gpu!r}; use one of {sorted(GPUS)}, or give --memory-gib, --tflops,"
            " --intra-gbps and --inter-gbps"
        )
    figures = GPUS[gpu.lower()]
    tflops = figures.tflops_fp32 if precision == "32-true" else figures.tflops_bf16
    return Machine(
        memory=int(figures.gib * 2**30),
        flops=tflops * 1e12 * REACHED_FLOPS,
        intra=figures.intra_gbps * 1e9 * REACHED_BANDWIDTH,
        inter=figures.inter_gbps * 1e9 * REACHED_BANDWIDTH,
        name=gpu.lower(),
    )


def this_machine(device: torch.device, precision: str) -> Machine:
    """What is known of the device that this process has: nothing but of a CUDA device."""
    if device.type != "cuda":
        return Machine()
    properties = torch.cuda.get_device_properties(device)
    words = properties.name.lower().replace("-", " ").split()
    # Cards without NVLink between all of a node, of the same names.
    name = None if {"pcie", "nvl"} & {*words} else next((gpu for gpu in GPUS if gpu in words), None)
    return replace(machine_of(name, precision), memory=properties.total_memory)
