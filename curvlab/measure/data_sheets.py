"""What devices can do by their data sheets: for floors of what runs on one that is not here.

A floor is what no run can be faster than, not what one will take: no kernel reaches these peaks. Every number
has its source. Launches and reads are not in data sheets; the smallest of what is reported is taken, so that
they stay below what is measured.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DATA_SHEETS", "LAUNCH_SOURCE", "DataSheet", "data_sheet"]

LAUNCH, READ = 4e-6, 10e-6
LAUNCH_SOURCE = (
    "4 µs a launch: the least of the 4 to 6 µs of https://susun-blog.com/blog/pegainfer-3-cuda-graph (CUDA, "
    "without torch's own cost); 10 µs a read: the least of the 10 to 50 µs that waiting and copying a number "
    "take, an assumption until one is measured"
)


@dataclass(frozen=True)
class DataSheet:
    """Peaks of a device: operations per second in float32 and TF32, bytes per second, bytes of memory.

    `launch` and `read` are seconds that the host takes for one.
    """

    name: str
    flops: float
    tf32: float | None
    bandwidth: float
    memory: int
    source: str
    launch: float = LAUNCH
    read: float = READ


DATA_SHEETS = {
    "h100": DataSheet(
        "NVIDIA H100 SXM, 80 GB",
        67e12,
        494.7e12,
        3.35e12,
        80 * 10**9,
        "NVIDIA H100 Tensor Core GPU data sheet (TF32 without sparsity: half of the 989 printed there)",
    ),
    "a100": DataSheet(
        "NVIDIA A100 SXM, 80 GB",
        19.5e12,
        156e12,
        2.039e12,
        80 * 10**9,
        "NVIDIA A100 Tensor Core GPU data sheet, nvidia-1758950",
    ),
    "4090": DataSheet(
        "NVIDIA GeForce RTX 4090, 24 GB",
        82.6e12,
        82.6e12,
        1.008e12,
        24 * 10**9,
        "NVIDIA Ada GPU architecture white paper, table of the RTX 4090 (TF32 without sparsity)",
    ),
    "mps": DataSheet(
        "Apple M1, 8-core GPU, 8 GB shared",
        2.6e12,
        None,
        68.25e9,
        8 * 10**9,
        "Apple, announcement of M1, November 2020 (2.6 TFLOP/s); LPDDR4X-4266 of 128 bits (68.25 GB/s). "
        "Other chips of the family are faster",
    ),
}
"""By the name that `curvlab plan --device` takes."""


def data_sheet(device: str) -> DataSheet | None:
    """The sheet of a device by name; None where there is none.

    >>> data_sheet("h100").memory, data_sheet("cpu")
    (80000000000, None)
    """
    return DATA_SHEETS.get(device.lower())
