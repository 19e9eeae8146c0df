"""Write flowalign/commands/judges.json, what `flowalign eval list` says of the shipped benchmarks'
judges: {name and options: [text, {file: GB} or null]}.

    python scripts/judges.py
"""

from __future__ import annotations

import json
from typing import Any

from flowalign.commands import CONFIGS, card
from flowalign.commands.evaluate import judge_keys
from flowalign.config import read
from flowalign.rewards import RewardSpec

FILE = CONFIGS.with_name("judges.json")


def judges() -> dict[str, Any]:
    """What the file should hold."""
    found: dict[str, Any] = {}
    for path in sorted([*CONFIGS.glob("*/eval.yaml"), *CONFIGS.glob("*/_benchmarks.yaml")]):
        for key in (key for benchmark in read(path)["benchmarks"] for key in judge_keys(benchmark)):
            name, _, options = key.partition(" ")
            options = json.loads(options)
            files = RewardSpec(name, options).downloads
            found[key] = [card.reward_line(name, options), files and dict(files)]
    return dict(sorted(found.items()))


if __name__ == "__main__":
    FILE.write_text(json.dumps(judges(), indent=1) + "\n")
