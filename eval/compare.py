"""Paired differences of two evaluations that measured the same thing.

    flowalign eval compare a/results.json b/results.json [--models base student]

These must be equal: the version of the file, the sampler (steps, guidance, seed, size), and for
each benchmark the reward with its engine and options, the prompts and the images per prompt. If a
smaller `limit` left one with the first prompts of the other, only the shared prompts are compared.
The base model, its dtype and the library versions may differ. An unknown seed matches any.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from flowalign.eval import stats
from flowalign.eval.scores import from_row
from flowalign.system import manifest
from flowalign.system.escape import escaped, shown
from flowalign.system.exit import refusing
from flowalign.system.folder import RunFolder
from flowalign.system.table import Table
from flowalign.types import EvalRow, ImageScore

VERSION = 1  # of results.json; increased if an older reader would misread a newer file
SAMPLER = ("height", "width", "steps", "guidance", "max_sequence_length", "seed")


class Incomparable(ValueError):
    """Results that cannot be compared: what was seen, what is possible, what to do."""


class Column(NamedTuple):
    """A benchmark as results.json describes it."""

    name: str
    headline: str | None


def load_results(path: str | Path) -> dict[str, Any]:
    """The document of a results.json, or of the one in a folder. Raises Incomparable if it is
    unreadable, damaged by its manifest, or of another version. Rows are not checked."""
    path = Path(path)
    path = RunFolder(path).results if path.is_dir() else path
    try:
        with suppress(manifest.Foreign):
            manifest.check_manifest(path.parent, [path.name])
        document = json.loads(path.read_text(encoding="utf-8"))
        version = document.get("version")
    except manifest.Damaged as error:
        text = "Run the evaluation again: what it has stored is not made again."
        raise Incomparable(f"{path}: {error}. {text}") from None
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        raise Incomparable(f"{path}: not a readable results.json ({error}).") from error
    if version != VERSION:
        raise Incomparable(
            f"{path}: results of version {version!r}, and this flowalign reads {VERSION}. Run the "
            "evaluation again with this version, or compare with the one that wrote it."
        )
    return document


def model_of(document: Mapping[str, Any], name: str | None, path: str) -> str:
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
    problems = []
    for key, *values in _unequal(*(model["settings"] for model in models)):
        if key not in SAMPLER or (key == "seed" and None in values):
            continue
        problems.append("{}: {!r} and {!r}".format(key, *values))
        if None in values:
            name = names[values.index(None)]
            hint = f"models.{name}.{key}={next(v for v in values if v is not None)}"
            problems[-1] += f". If another program's images were sampled so: {hint}"
    shared = sorted(set(first["benchmarks"]) & set(second["benchmarks"]))
    if not shared:
        listed = [sorted(document["benchmarks"]) for document in (first, second)]
        problems.append(f"no benchmark in common: {listed[0]} and {listed[1]}")
    for name in shared:
        for key, x, y in _unequal(first["benchmarks"][name], second["benchmarks"][name]):
            if key == "average":  # only for display
                continue
            problems.append(f"{name}: {key} is {x!r} and {y!r}")
        a, b = ([score.image for score in scores_of(model, name)] for model in models)
        count = min(len(a), len(b))  # a smaller `limit` takes the first prompts
        if a[:count] != b[:count] or not count:
            problems.append(
                f"{name}: other prompts ({len(a)} and {len(b)} images); they compare if one has "
                "the first prompts of the other, as a smaller `limit` leaves them"
            )
    return problems


def _unequal(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, its value in a, in b) where these differ; what is missing is None."""
    pairs = [(key, a.get(key), b.get(key)) for key in sorted({*a, *b})]
    return [(key, x, y) for key, x, y in pairs if x != y]


def scores_of(model: Mapping[str, Any], benchmark: str) -> list[ImageScore]:
    """The scores of a model's images, in results.json."""
    return [from_row(row) for row in model["images"][benchmark]]


def compare(
    first: Mapping[str, Any], second: Mapping[str, Any], names: tuple[str, str]
) -> dict[str, EvalRow]:
    """{benchmark: second minus first} for the shared benchmarks. Raises Incomparable with the
    `differences`."""
    if problems := differences(first, second, names):
        listed = "\n  - ".join(["these results do not compare:", *problems])
        raise Incomparable(f"{listed}\nEvaluate both with one config.")
    models = (first["models"][names[0]], second["models"][names[1]])
    result = {}
    for name, about in first["benchmarks"].items():
        if name in second["benchmarks"]:
            a, b = (scores_of(model, name) for model in models)
            count = min(len(a), len(b))  # the shared ones, which come first
            column = Column(name, about.get("headline"))
            result[name] = stats.difference(column, a[:count], b[:count])
    return result


def markdown(
    differences: Mapping[str, EvalRow], names: tuple[str, str], shared: str = "prompts and noise"
) -> str:
    """A table: benchmark, difference ± standard error, interval, pairs. shared: what both have in
    common."""
    first, second = map(escaped, names)
    rows = []
    for name, row in differences.items():
        gap = stats.number_text(row, 4, signed=True)
        interval = stats.between(row, 4, signed=True) if math.isfinite(row.stderr) else ""
        rows.append([name, row.metric, gap, interval or "–", str(row.n)])
    table = Table(["benchmark", "metric", "difference", "95 %", "n"], rows, names=2)
    title = f"{second} − {first}, paired: same {shared}."
    below = [f"\n{escaped(note)}" for note in stats.notes([differences])]
    return "\n".join([title, "", table.markdown(), *below]) + "\n"


@refusing("eval compare")
def main(argv: Sequence[str]) -> int:
    """The command line; exit status 2 = these results do not compare."""
    parser = argparse.ArgumentParser(
        "flowalign eval compare", description="Paired differences of two results.json."
    )
    parser.add_argument("first")
    parser.add_argument("second")
    parser.add_argument("--models", nargs=2, metavar="MODEL", default=[None, None])
    args = parser.parse_args(argv)
    paths = args.first, args.second
    documents = load_results(args.first), load_results(args.second)
    try:
        first, second = map(model_of, documents, args.models, paths)
        result = compare(*documents, (first, second))
    except (LookupError, TypeError, AttributeError) as error:
        text = f"one of {', '.join(paths)} is no results.json of flowalign ({error!r})"
        raise Incomparable(text) from error
    models = documents[0]["models"][first], documents[1]["models"][second]
    unknown = [k for k in SAMPLER if any(m["settings"].get(k) is None for m in models)]
    shared = "prompts" if "seed" in unknown else "prompts and noise"
    print(markdown(result, (first, second), shared), end="")
    if unknown := [key for key in unknown if key in SAMPLER[2:5]]:
        print(f"note: not known, and so not compared: {', '.join(unknown)}")
    for name in result:
        a, b = (len(model["images"][name]) for model in models)
        if a != b:
            shared = f"{min(a, b)} of {a} and {b} images are shared"
            print(f"note: {shown(name)}: {shared}; only they count")
    return 0
