"""What it costs to send an image of 512 pixels a side to a reward that lives elsewhere.

    python benchmarks/wire_cost.py

Bytes and milliseconds of CPU an image: encoding, decoding, and the whole way to a server on this
machine and back (both processes), whose reward does nothing: what that takes beyond the two is
sending and HTTP. CPU time, as other work on the machine would spoil a clock's. Prints a Markdown
table.
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

from flowalign.rewards.service import wire
from flowalign.rewards.service.client import Remote
from flowalign.rewards.service.wire import Limits
from flowalign.types import Scores


def nothing(images, prompts, metadata) -> Scores:
    """A reward that costs nothing."""
    return Scores.of([0.0] * len(images))


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
    rows = ["a photo"] * count, [{}] * count
    images = torch.rand(count, 3, args.size, args.size, generator=torch.Generator().manual_seed(0))
    try:
        body = wire.encode_request(images, *rows)
        remote = Remote(url, batch_size=count)
        remote(images, *rows)  # what the first call alone costs is left out
        calls: list[tuple[Callable[[], object], int | None]] = [
            (lambda: wire.encode_request(images, *rows), None),
            (lambda: wire.decode_request(body, Limits()), None),
            (lambda: remote(images, *rows), process.pid),
        ]
        cells = [f"{len(body) / count / 1000:.0f}"]
        for call, server in calls:
            cost = milliseconds(lambda c=call: [c() for _ in range(args.repeats)], total, server)
            cells.append(f"{cost:.1f}")
        print("| kB | encode ms | decode ms | there and back ms |\n|---|---|---|---|")
        print("|", " | ".join(cells), "|", flush=True)
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    try:
        main()
    except subprocess.SubprocessError as error:
        sys.exit(str(error))
