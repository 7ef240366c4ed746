"""What devices can do by their data sheets: for floors of what runs on one that is not here.

A floor is what no run can be faster than, not what one will take: no kernel reaches these peaks. Every number
has a page that gives it; where that is not the maker's own, which could not be read, the source says so.
Launches and reads are not in data sheets; the smallest of what is reported is taken, so that they stay below
what is measured.
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
        "NVIDIA H100 Tensor Core GPU data sheet, as repeated by "
        "https://archive-lib.hpctech.co.jp/gpuproduct/nvidia-h100.html (67 TFLOP/s, 3350 GB/s, 80 GB; TF32 "
        "989 with sparsity, half without) and https://glennklockwood.com/garden/processors/h100",
    ),
    "a100": DataSheet(
        "NVIDIA A100 SXM, 80 GB",
        19.5e12,
        156e12,
        2.039e12,
        80 * 10**9,
        "NVIDIA A100 Tensor Core GPU data sheet, nvidia-1758950, as "
        "https://glennklockwood.com/garden/processors/A100 repeats it",
    ),
    "4090": DataSheet(
        "NVIDIA GeForce RTX 4090, 24 GB",
        82.6e12,
        82.6e12,
        1.008e12,
        24 * 10**9,
        "https://waredb.com/processor/nvidia-geforce-rtx-4090 (82.58 TFLOP/s, in TF32 too without "
        "sparsity, 1008 GB/s, 24 GB); NVIDIA's own white paper could not be read",
    ),
    "mps": DataSheet(
        "Apple M1, 8-core GPU, 8 GB shared",
        2.6e12,
        None,
        68.25e9,
        8 * 10**9,
        "Apple's announcement of M1 as "
        "https://www.macrumors.com/2020/11/10/apple-announces-m1-chip-for-the-mac/ repeats it (2.6 TFLOP/s); "
        "LPDDR4X-4266 of 128 bits makes 68.25 GB/s. Other chips of the family are faster",
    ),
}
"""By the name that `curvlab plan --device` takes."""


def data_sheet(device: str) -> DataSheet | None:
    """The sheet of a device by name; None where there is none.

    >>> data_sheet("h100").memory, data_sheet("cpu")
    (80000000000, None)
    """
    return DATA_SHEETS.get(device.lower())
