"""What it costs to send an image of 512 pixels a side to a reward that lives elsewhere.

    python benchmarks/wire_cost.py

Bytes and milliseconds of CPU an image, raw and as PNG: encoding, decoding, and the whole way to a
server on this machine and back (both processes), whose reward does nothing: what that takes beyond
the two is sending and HTTP. Two kinds of images bound what a model draws: a smooth one (blurred
blobs, PNG's best case short of flat colour) and the same with grain (noise of 4 levels, as photos
have). CPU time, as other work on the machine would spoil a clock's. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from flowalign.rewards import wire
from flowalign.rewards.remote import Remote
from flowalign.rewards.wire import Limits
from flowalign.types import Scores


def nothing(images, prompts, metadata) -> Scores:
    """A reward that costs nothing."""
    return Scores.of([0.0] * len(images))


def pictures(count: int, size: int) -> dict[str, Tensor]:
    """[B,3,size,size] in [0,1] of either kind."""
    random = torch.Generator().manual_seed(0)
    smooth = interpolate(torch.rand(count, 3, 8, 8, generator=random), size=size, mode="bicubic")
    grain = smooth + 4 / 255 * torch.randn(smooth.shape, generator=random)
    return {"smooth": smooth.clamp(0, 1), "grain": grain.clamp(0, 1)}


def milliseconds(call: Callable[[], object], images: int, server: int | None = None) -> float:
    """CPU milliseconds an image of `images` in several calls, by this process and a server's."""
    began = time.process_time() + cpu_seconds(server)
    call()
    return (time.process_time() + cpu_seconds(server) - began) * 1000 / images


def cpu_seconds(process: int | None) -> float:
    """CPU seconds that a process has taken so far, in its kernel's steps of 10 ms."""
    if process is None:
        return 0.0
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=4, help="a request")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=25)
    args = parser.parse_args()
    here, count = Path(__file__).parent, args.images
    sys.path.insert(0, str(here.parent / "tests"))
    import served

    total = count * args.repeats
    process, url = served.process(
        "wire_cost:nothing", environment={"PYTHONPATH": f"{here.parent}:{here}"}
    )
    print("| images | encoding | kB | encode ms | decode ms | there and back ms |")
    print("|---|---|---|---|---|---|")
    try:
        for kind, images in pictures(count, args.size).items():
            for encoding in wire.ENCODINGS:
                rows = ["a photo"] * count, [{}] * count
                body = wire.encode_request(images, *rows, encoding)
                remote = Remote(url, encoding=encoding, batch_size=count)
                remote(images, *rows)  # the connection is made
                calls = {
                    lambda i=images, r=rows, e=encoding: wire.encode_request(i, *r, e): None,
                    lambda b=body: wire.decode_request(b, Limits()): None,
                    lambda i=images, r=rows, s=remote: s(i, *r): process.pid,
                }
                times = [
                    milliseconds(lambda c=call: [c() for _ in range(args.repeats)], total, server)
                    for call, server in calls.items()
                ]
                cells = [f"{time:.1f}" for time in times]
                print(f"| {kind} | {encoding} | {len(body) / count / 1000:.0f} |", end=" ")
                print(" | ".join(cells), "|", flush=True)
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    try:
        main()
    except subprocess.SubprocessError as error:
        sys.exit(str(error))
