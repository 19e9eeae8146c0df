"""Two evaluations side by side: paired differences, if they measured the same thing.

    flowalign eval compare a/results.json b/results.json [--models base student]

What must agree: the schema's version, per benchmark the reward with its engine and options, the
prompts and the number of images of each, and the sampler (steps, guidance, seed, size). The base
model and its dtype may differ, as may versions of libraries: those are said.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowalign.eval import stats
from flowalign.eval.table import line
from flowalign.types import EvalRow

VERSION = 1  # of results.json; raised whenever an older reader would misread a newer file
SAMPLER = ("steps", "guidance", "seed", "height", "width", "max_sequence_length")


class Incomparable(ValueError):
    """Results that cannot be compared: what was seen, what is possible, what to do."""


@dataclass(frozen=True)
class Mark:
    """A benchmark as a results file knows it."""

    name: str
    headline: str | None


def load(path: str | Path) -> dict[str, Any]:
    """A results.json; Incomparable where it is none, or of another version."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Incomparable(f"{path}: not a readable results.json ({error}).") from error
    version = found.get("version") if isinstance(found, dict) else None
    if version != VERSION:
        raise Incomparable(
            f"{path}: results of version {version!r}, and this flowalign reads {VERSION}. Run the "
            "evaluation again with this version, or compare with the one that wrote it."
        )
    return found


def model_of(document: Mapping[str, Any], name: str | None, path: str) -> str:
    """The model that is meant: the named one, or the only one."""
    models = list(document["models"])
    if name is None and len(models) == 1:
        return models[0]
    if name is None or name not in models:
        seen = "several models" if name is None else f"no model {name!r}"
        raise Incomparable(f"{path} has {seen}: {models}. Name one for each file with --models.")
    return name


def differences(
    first: Mapping[str, Any], second: Mapping[str, Any], names: tuple[str, str]
) -> list[str]:
    """Why two models' results do not compare; [] if they do."""
    models = first["models"][names[0]], second["models"][names[1]]
    found = [
        f"{key}: {models[0]['settings'].get(key)!r} and {models[1]['settings'].get(key)!r}"
        for key in SAMPLER
        if models[0]["settings"].get(key) != models[1]["settings"].get(key)
    ]
    shared = set(first["benchmarks"]) & set(second["benchmarks"])
    if not shared:
        listed = [sorted(document["benchmarks"]) for document in (first, second)]
        found.append(f"no benchmark in common: {listed[0]} and {listed[1]}")
    for mark in sorted(shared):
        a, b = first["benchmarks"][mark], second["benchmarks"][mark]
        for key in sorted({*a, *b}):
            if a.get(key) != b.get(key):
                found.append(f"{mark}: {key} is {a.get(key)!r} and {b.get(key)!r}")
        rows = [[_place(row) for row in model["images"][mark]] for model in models]
        if rows[0] != rows[1]:
            found.append(f"{mark}: other prompts ({len(rows[0])} and {len(rows[1])} images)")
    return found


def compare(
    first: Mapping[str, Any], second: Mapping[str, Any], names: tuple[str, str]
) -> dict[str, tuple[EvalRow, float]]:
    """{benchmark: (second minus first, paired, and its two-sided p)} of the benchmarks in common.

    Raises Incomparable where `differences` finds some.
    """
    problems = differences(first, second, names)
    if problems:
        listed = "\n  - ".join(["these results do not compare:", *problems])
        raise Incomparable(f"{listed}\nEvaluate both with one config.")
    found = {}
    for name, mine in first["benchmarks"].items():
        if name in second["benchmarks"]:
            mark = Mark(name, mine.get("headline"))
            a = _rows(first["models"][names[0]]["images"][name])
            b = _rows(second["models"][names[1]]["images"][name])
            found[name] = stats.difference(mark, a, b), stats.chance(mark, a, b)
    return found


def markdown(found: Mapping[str, tuple[EvalRow, float]], names: tuple[str, str]) -> str:
    """A table: benchmark, difference ± standard error, interval, p, pairs."""
    lines = [f"{names[1]} − {names[0]}, paired: same prompts and noise.", ""]
    lines += [line("benchmark", "metric", "difference", "95 %", "p", "n"), "|" + "---|" * 6]
    for name, (row, p) in found.items():
        gap = f"{row.mean:+.4f} ± {row.stderr:.4f}"
        ends = f"{row.low:+.4f} to {row.high:+.4f}"
        lines.append(line(name, row.metric, gap, ends, f"{p:.4f}", str(row.n)))
    return "\n".join(lines) + "\n"


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["index"], row.get("copy", 0), row["prompt"], json.dumps(row["metadata"])


def _rows(images: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows as `suite.Judged` has them."""
    return [stats.from_json(row) for row in images]


def main(argv: Sequence[str]) -> int:
    """The command line; 2 = these results do not compare."""
    parser = argparse.ArgumentParser(
        "flowalign eval compare", description="Paired differences of two results.json."
    )
    parser.add_argument("first")
    parser.add_argument("second")
    parser.add_argument("--models", nargs=2, metavar=("FIRST", "SECOND"), default=(None, None))
    args = parser.parse_args(argv)
    try:
        documents = load(args.first), load(args.second)
        names = (
            model_of(documents[0], args.models[0], args.first),
            model_of(documents[1], args.models[1], args.second),
        )
        found = compare(*documents, names)
    except Incomparable as error:
        print(f"flowalign eval compare: {error}", file=sys.stderr)
        return 2
    print(markdown(found, names), end="")
    around = [d["models"][name]["environment"] for d, name in zip(documents, names, strict=True)]
    for name in sorted({*around[0], *around[1]}):
        a, b = (each.get(name) for each in around)
        if a != b:
            print(f"note: {name} is {a} and {b}", file=sys.stderr)
    return 0
