"""The GPUs that a run can be planned for, and the rates that it sustains on each.

The table is from the makers' data sheets: dense peaks (no sparsity), bfloat16 with float32
accumulation, and float32 without tensor cores, which is torch's default for products. What a run
sustains of them was measured on an H100 (docs/gpu.md), and is carried over to the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowalign.config import ModelConfig

# Shares of an H100's peak that Stable Diffusion 3.5 Medium sustains at 512 pixels in bfloat16, by
# kind of phase: eager, compiled (docs/gpu.md); and its width
SHARES = {
    "sampling": (0.20, 0.38), "labels": (0.23, 0.44),
    "learning": (0.18, 0.24), "alarm": (0.20, 0.38),
}  # fmt: skip
MEASURED_WIDTH = 1536
PRODUCTS = 0.65  # of the peak, in matrix products and attention alone; the rest moves memory
# Times as many seconds in passes without and with gradients, as weights are unpacked in each; with
# batches of 2 and 4 (docs/gpu.md)
QUANTIZED = {None: (1.0, 1.0), "nf4": (1.5, 1.25), "fp8": (1.15, 1.15)}


@dataclass(frozen=True)
class Gpu:
    """memory in GiB; peaks in TFLOP/s; bandwidth of the memory in TB/s."""

    title: str
    memory: float
    bfloat16: float
    float32: float
    bandwidth: float

    def rate(self, model: ModelConfig, width: int, kind: str, *, compiled: bool) -> float:
        """FLOP/s that a run of a transformer of a width sustains in a kind of phase.

        1 / rate = 1 / (PRODUCTS peak) + bytes per FLOP / bandwidth. The bytes are what the H100's
        measured share leaves: norms, modulations and casts, which compiling fuses. They grow with
        the width, and the operations of products with its square. A faster memory than the H100's
        does not count: an H200 gained nothing by it.
        """
        h100 = GPUS["h100"]
        share = SHARES[kind][compiled]
        moved = (1 / share - 1 / PRODUCTS) / h100.bfloat16 * h100.bandwidth * MEASURED_WIDTH / width
        peak = self.bfloat16
        if model.dtype == "float32":
            peak = self.float32
            moved = 2 * moved
        bandwidth = min(self.bandwidth, h100.bandwidth)
        longer = QUANTIZED[model.quantization][kind == "learning"]
        return 1e12 / longer / (1 / (PRODUCTS * peak) + moved / bandwidth)


GPUS = {
    "3060": Gpu("GeForce RTX 3060", 12, 25.5, 12.7, 0.36),
    "3090": Gpu("GeForce RTX 3090", 24, 71, 35.6, 0.94),
    "4090": Gpu("GeForce RTX 4090", 24, 165, 82.6, 1.01),
    "5090": Gpu("GeForce RTX 5090", 32, 209.5, 104.8, 1.79),
    "a5000": Gpu("RTX A5000", 24, 111, 27.8, 0.77),
    "a6000": Gpu("RTX A6000", 48, 155, 38.7, 0.77),
    "a10": Gpu("A10", 24, 125, 31.2, 0.6),
    "l4": Gpu("L4", 24, 121, 30.3, 0.3),
    "a100-40gb": Gpu("A100 40GB", 40, 312, 19.5, 1.56),
    "a100": Gpu("A100 80GB", 80, 312, 19.5, 2.04),
    "l40s": Gpu("L40S", 48, 362, 91.6, 0.86),
    "h100": Gpu("H100 SXM", 80, 989, 67, 3.35),
    "h200": Gpu("H200", 141, 989, 67, 4.8),
    "b200": Gpu("B200", 180, 2250, 75, 8.0),
}
