"""One forward pass and one training step of Stable Diffusion 3.5 Medium's transformer, with random
weights: `python benchmarks/gpu_pass.py`. Prints milliseconds, eager and compiled, by batch size.

Eight images of 512 pixels with classifier-free guidance make a forward pass of 16 rows. A step is a
forward and a backward pass without guidance, through a LoRA of rank 32 with float32 weights. Needs
a GPU of 48 GB and three minutes; `--device cpu --width 0.05 --layers 2 --size 64` tries it without.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import medium
import torch
from gpu import products
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from flowalign.backbone import Backbone
from flowalign.config import ModelConfig

ROWS = 8  # images of a forward pass
REPEATS = 8


def seconds(call: Callable[[], object], device: str) -> float:
    """Of a call, after two that warm up."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    for _ in range(2):
        call()
    wait()
    began = time.perf_counter()
    for _ in range(REPEATS):
        call()
    wait()
    return (time.perf_counter() - began) / REPEATS


def counted(call: Callable[[], object]) -> int:
    """Floating-point operations of a call."""
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def student(device: str, width: float, layers: int | None, size: int) -> Backbone:
    """The transformer in bfloat16 with a LoRA that is active and learns."""
    pipe = medium.pipeline(medium.shapes(width, layers), device=device)
    for name in ("transformer", "text_encoder", "text_encoder_2", "text_encoder_3"):
        nn.Module.to(getattr(pipe, name), torch.bfloat16)
    settings = {"dtype": "bfloat16", "height": size, "width": size, "max_sequence_length": 128}
    backbone = Backbone(pipe, ModelConfig.model_validate({"id": "any", **settings}), device)
    backbone.add_adapter("student", rank=32, alpha=64)
    for parameter in backbone.adapter_parameters("student"):
        nn.init.normal_(parameter.requires_grad_(True), std=0.01)
    backbone.activate("student")
    return backbone


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--width", type=float, default=1.0, help="share of the attention heads")
    parser.add_argument("--layers", type=int, help="of the transformer, instead of 24")
    parser.add_argument("--size", type=int, default=512, help="pixels")
    args = parser.parse_args()
    if args.device == "cuda":
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; matrix products "
              f"{products('cuda') / 1e12:.0f} TFLOP/s\n")  # fmt: skip
    backbone = student(args.device, args.width, args.layers, args.size)
    x = torch.randn(16, *backbone.latent_shape, device=args.device)

    @torch.no_grad()
    def forward() -> None:
        backbone.velocity(x[:ROWS], 0.5, texts[ROWS], guidance=4.5)

    def step(size: int) -> None:
        backbone.velocity(x[:size], 0.5, texts[size], guidance=1.0).square().mean().backward()

    def show(name: str, call: Callable[[], object], images: int, flops: int) -> None:
        took = seconds(call, args.device)
        cells = (name, f"{took * 1e3:.1f}", f"{images / took:.1f}", f"{flops / took / 1e12:.0f}")
        print(f"| {' | '.join(cells)} |", flush=True)

    texts = {n: backbone.encode([f"prompt {i}" for i in range(n)]) for n in (2, 4, ROWS, 16)}
    print("| pass | ms | images/s | TFLOP/s |\n|---|---|---|---|")
    forward_flops, step_flops = counted(forward), counted(lambda: step(ROWS)) // ROWS
    show("forward, 8 images with CFG", forward, ROWS, forward_flops)
    for size in texts:
        show(f"step, {size} images", lambda size=size: step(size), size, step_flops * size)
    backbone.compile()
    show("compiled forward, 8 images with CFG", forward, ROWS, forward_flops)
    show("compiled step, 8 images", lambda: step(ROWS), ROWS, step_flops * ROWS)


if __name__ == "__main__":
    main()
