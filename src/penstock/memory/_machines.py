"""Profiles of machines that are not there, from published figures times what is reached.

The rates of arithmetic and memory are those of NVIDIA's datasheets for the SXM modules (V100:
"Tesla V100 GPU Accelerator", A100: "A100 Tensor Core GPU", H100 and H200: likewise), dense, times
the fractions below, which large operators reach. float32 is without TF32, as PyTorch's default.
PCIe is what pinned copies of many mebibytes reach each way, of 15.75, 31.5 and 63 GB/s.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.memory._profile import ComputeProfile, LinkProfile, MachineProfile, TierProfile
from penstock.memory._tiers import Link, Tier

ARITHMETIC_FRACTION = 0.7
MEMORY_FRACTION = 0.85
_HOST_BYTES = 256 * 2**30  # assumed: such machines have at least this per GPU
_MEMCPY = 10e9
_LAUNCH_SECONDS = 4e-6


class _Published(NamedTuple):
    name: str
    memory_bytes: int
    teraflops: dict[str, float]
    memory_gigabytes_per_second: float
    pcie_bytes_per_second: float


_MACHINES = {
    "v100-16gb-pcie3": _Published(
        "Tesla V100 16 GB",
        16 * 2**30,
        {"float64": 7.8, "float32": 15.7, "float16": 125.0, "bfloat16": 15.7},
        900.0,
        12.5e9,
    ),
    "a100-80gb": _Published(
        "A100 80 GB",
        80 * 2**30,
        {"float64": 9.7, "float32": 19.5, "float16": 312.0, "bfloat16": 312.0},
        2039.0,
        25e9,
    ),
    "h100-80gb": _Published(
        "H100 80 GB",
        80 * 2**30,
        {"float64": 34.0, "float32": 67.0, "float16": 989.0, "bfloat16": 989.0},
        3350.0,
        50e9,
    ),
    "h200": _Published(
        "H200 141 GB",
        141 * 10**9,
        {"float64": 34.0, "float32": 67.0, "float16": 989.0, "bfloat16": 989.0},
        4800.0,
        50e9,
    ),
}


def machine(name: str) -> MachineProfile:
    """Return the profile of a GPU with its host memory, without a file tier, that need not be here.

    As nothing was measured, `num_runs` of its links is 0.

    Example:
        >>> machine("v100-16gb-pcie3").tiers[Tier.DEVICE].capacity_bytes == 16 * 2**30
        True

    Args:
        name: `"v100-16gb-pcie3"`, `"a100-80gb"`, `"h100-80gb"` or `"h200"`.

    Raises:
        ValueError: There is none of this name.
    """
    if name not in _MACHINES:
        raise ValueError(
            f"machine is {name!r}; built-in machines are {', '.join(map(repr, _MACHINES))}; for "
            "this machine use penstock.probe()"
        )
    published = _MACHINES[name]
    pcie = _rate(published.pcie_bytes_per_second)
    return MachineProfile(
        name=name,
        device="cuda",
        device_name=published.name,
        num_cores=8,
        tiers={
            Tier.DEVICE: TierProfile(published.memory_bytes),
            Tier.HOST: TierProfile(_HOST_BYTES),
        },
        links={Link.DEVICE_TO_HOST: pcie, Link.HOST_TO_DEVICE: pcie},
        memcpy=_rate(_MEMCPY),
        compute=_compute(published),
    )


def _compute(published: _Published) -> ComputeProfile:
    teraflops = published.teraflops.items()
    return ComputeProfile(
        flops_per_second={dtype: rate * 1e12 * ARITHMETIC_FRACTION for dtype, rate in teraflops},
        memory_bytes_per_second=published.memory_gigabytes_per_second * 1e9 * MEMORY_FRACTION,
        launch_seconds=_LAUNCH_SECONDS,
        source=f"datasheet, {ARITHMETIC_FRACTION:.0%} of arithmetic, {MEMORY_FRACTION:.0%} of "
        "memory",
    )


def _rate(bytes_per_second: float) -> LinkProfile:
    return LinkProfile(bytes_per_second, (bytes_per_second, bytes_per_second), 0)
