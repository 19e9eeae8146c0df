"""One table of evaluations of the same models, trained with several seeds.

    python benchmarks/seeds.py outputs/tiny/flow_opd{,_1,_2}/table --pairs flow_opd-merge

Every folder holds the results.json of one seed. A model's number is the mean over seeds and
prompts; its standard error has both: how the numbers of the seeds differ, and how prompts differ
that all seeds share. Differences of two models are of equal seeds, prompts and noise. The average
is taken in each seed first, because its tasks share the seed, and may share prompts. Prints
Markdown.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowalign.eval.compare import Column, key_of, load_results
from flowalign.eval.stats import average, difference, from_json, headline_rows, part_of
from flowalign.system.escape import table
from flowalign.types import EvalRow

Cell = tuple[float, float]  # mean, standard error


def crossed(rows: Sequence[EvalRow]) -> Cell:
    """Mean and standard error of a number that was measured once a seed, on the same prompts.

    Seeds and prompts are crossed random effects. A seed's number is m_s = mean + seed + sum over
    prompts of (prompt + rest_s), where a prompt stands for all its images and tasks. The variance
    of m_s over seeds has the seed and the rest. What all seeds share of the prompts is added: the
    sum of squares of a prompt's mean influence, less the rest that is left in that mean, which is
    the influence's variance over seeds / seeds (0 where it would be negative). One seed has the
    prompts' error alone.
    """
    means = np.array([row.mean for row in rows])
    influence = np.array([[row.influence[prompt] for prompt in rows[0].influence] for row in rows])
    variance, seeds = (influence.mean(0) ** 2).sum(), len(rows)
    if seeds > 1:
        rest = influence.var(0, ddof=1).sum() / seeds
        variance = max(0.0, variance - rest) + means.var(ddof=1) / seeds
    return float(means.mean()), math.sqrt(variance)


def images(documents: Sequence[Mapping[str, Any]], model: str, name: str) -> list[list[Any]]:
    """A model's rows of a benchmark, of every seed. Raises ValueError where a seed lacks one."""
    part = part_of(Column(name, documents[0]["benchmarks"][name].get("headline")))
    rows = [list(map(from_json, d["models"][model]["images"][name])) for d in documents]
    keys = [list(map(key_of, some)) for some in rows]
    if any(key != keys[0] for key in keys):
        raise ValueError(f"{model}, {name}: the seeds have other prompts")
    if lost := sum(not math.isfinite(row.get(part, math.nan)) for some in rows for row in some):
        raise ValueError(f"{model}, {name}: {lost} images have no score")
    return rows


def averages(documents: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """{column: the benchmarks that it averages}: all of them, but those of diversity; with a matrix
    the judges on their own prompts, and on those of other tasks."""
    judges = documents[0]["benchmarks"]
    others = [n for n in judges if any(n == f"{a}_{b}" for a in judges for b in judges)]
    own = [n for n in judges if n not in others and judges[n].get("reward") != "diversity"]
    return {"own": own, "others": others} if others else {"average": own}


def cells(documents: Sequence[Mapping[str, Any]], first: str, second: str = "") -> list[Cell]:
    """A model's number of every benchmark and its averages; with a second, first minus second."""
    found = {}
    for name, judge in documents[0]["benchmarks"].items():
        column, rows = Column(name, judge.get("headline")), images(documents, first, name)
        if second:
            pairs = zip(images(documents, second, name), rows, strict=True)
            found[name] = [difference(column, *pair) for pair in pairs]
        else:
            found[name] = [headline_rows(column, some)[0] for some in rows]
    for head, names in averages(documents).items():
        of_seeds = zip(*(found[name] for name in names), strict=True)
        found[head] = [average(rows) for rows in of_seeds]
    return list(map(crossed, found.values()))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+", help="of evaluations, one a seed")
    parser.add_argument("--models", nargs="+", help="rows; all that every folder has by default")
    parser.add_argument("--pairs", nargs="*", default=[], help="differences, as in student-base")
    args = parser.parse_args()
    documents = [load_results(folder / "results.json") for folder in args.folders]
    common = [m for m in documents[0]["models"] if all(m in d["models"] for d in documents)]
    heads = [*documents[0]["benchmarks"], *averages(documents)]
    rows = [
        [model, *(f"{mean:.3f} ± {error:.3f}" for mean, error in cells(documents, model))]
        for model in args.models or common
    ]
    print("\n".join(table([f"{len(documents)} seeds", *heads], rows)))
    pairs = [pair.split("-") for pair in args.pairs]
    rows = [
        [f"{a} − {b}", *(f"{mean:+.3f} ± {error:.3f}" for mean, error in cells(documents, a, b))]
        for a, b in pairs
    ]
    if rows:
        print("\n" + "\n".join(table(["difference", *heads], rows)))


if __name__ == "__main__":
    main()
