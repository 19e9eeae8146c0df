"""The GPUs that a run can be planned for: the one table of their memory and rates.

Memory and peaks are from the makers' data sheets: dense (no sparsity), bfloat16 with float32
accumulation, and float32 without tensor cores, which is torch's default for products. No stage of
flowalign has been measured on any of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Of the peak that a run sustains. Llama 3's training reports 38 to 43 % on H100 (arXiv 2407.21783,
# table 4). A small transformer in eager mode may reach less: measure with `benchmarks/gpu.py`.
EFFICIENCY = 0.4


@dataclass(frozen=True)
class Gpu:
    """memory in GiB; peaks in TFLOP/s."""

    title: str
    memory: float
    bfloat16: float
    float32: float

    def rate(self, dtype: str) -> float:
        """FLOP/s that a run sustains in a dtype of the config."""
        peak = self.float32 if dtype == "float32" else self.bfloat16
        return peak * 1e12 * EFFICIENCY


GPUS = {
    "4090": Gpu("GeForce RTX 4090", 24, 165, 82.6),
    "a100-40gb": Gpu("A100 40GB", 40, 312, 19.5),
    "a100": Gpu("A100 80GB", 80, 312, 19.5),
    "l40s": Gpu("L40S", 48, 362, 91.6),
    "h100": Gpu("H100 SXM", 80, 989, 67),
    "h200": Gpu("H200", 141, 989, 67),
    "b200": Gpu("B200", 180, 2250, 75),
}
DEFAULT = "h100"  # where torch sees no GPU and none is named


def present() -> Gpu | None:
    """The table's GPU that torch sees first; None if it sees none, or one that is not there."""
    if not torch.cuda.is_available():
        return None
    title, memory = torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory
    if "A100" in title:
        return GPUS["a100" if memory > 50 * 2**30 else "a100-40gb"]
    return next((gpu for name, gpu in GPUS.items() if name.upper() in title), None)
