"""One table of evaluations of the same models, trained with several seeds.

    python benchmarks/seeds.py outputs/tiny/flow_opd{,_1,_2}/table --pairs flow_opd-merge

Every folder holds the results.json of one seed. A model's number is the mean over seeds and
prompts; its standard error has both: how the means of the seeds differ, and how prompts differ that
all seeds share. Differences of two models are of equal seeds, prompts and noise. Prints Markdown.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowalign.eval.compare import Column, load_results
from flowalign.eval.stats import part_of
from flowalign.system.escape import table

Array = NDArray[np.float64]
Cell = tuple[float, float]  # mean, standard error


def crossed(values: Array, strata: Sequence[str]) -> Cell:
    """Mean and standard error of values [seeds, prompts]; strata: the tag of each prompt, whose
    means count alike.

    Seeds and prompts are crossed random effects: value = mean + seed + prompt + rest. The variance
    of the seeds' means has the seed and the rest; what all seeds share of a prompt is added, from
    the mean squares of a two-way layout without replication (0 where it would be negative). One
    seed has the prompts' error alone.
    """
    tags = sorted(set(strata))
    where = [np.array([tag == name for tag in strata]) for name in tags]
    means = np.stack([values[:, at].mean(1) for at in where]).mean(0)  # of each seed
    seeds, shared = len(values), 0.0
    for at in where:
        part = values[:, at]
        prompts = part.shape[1]
        rest = part - part.mean(0) - part.mean(1, keepdims=True) + part.mean()
        between = seeds * part.mean(0).var(ddof=1)
        if seeds > 1:
            between = max(0.0, between - (rest**2).sum() / ((seeds - 1) * (prompts - 1)))
        shared += between / seeds / prompts / len(tags) ** 2
    variance = shared + (means.var(ddof=1) / seeds if seeds > 1 else 0.0)
    return float(means.mean()), math.sqrt(variance)


def scores(
    documents: Sequence[Mapping[str, Any]], model: str, name: str
) -> tuple[Array, list[str]]:
    """A model's scores of a benchmark [seeds, prompts], and the tag of each prompt. Raises
    ValueError where a seed lacks one."""
    column = Column(name, documents[0]["benchmarks"][name].get("headline"))
    part = part_of(column)
    rows = [document["models"][model]["images"][name] for document in documents]
    keys = [[(row["index"], row.get("copy", 0), row["prompt"]) for row in some] for some in rows]
    if any(key != keys[0] for key in keys):
        raise ValueError(f"{model}, {name}: the seeds have other prompts")
    values = np.array([[row[part] for row in some] for some in rows], np.float64)
    if np.isnan(values).any():
        raise ValueError(f"{model}, {name}: {int(np.isnan(values).sum())} images have no score")
    tags = [str(row["metadata"].get("tag", "")) if column.headline else "" for row in rows[0]]
    return values, tags


def cells(documents: Sequence[Mapping[str, Any]], first: str, second: str = "") -> list[Cell]:
    """A model's number of every benchmark and the average of those that are no diversity; with a
    second, first minus second."""
    found, averaged = [], []
    for name, judge in documents[0]["benchmarks"].items():
        values, tags = scores(documents, first, name)
        if second:
            values = values - scores(documents, second, name)[0]
        found.append(crossed(values, tags))
        averaged += [found[-1]] if judge.get("reward") != "diversity" else []
    mean = sum(value for value, _ in averaged) / len(averaged)
    return [*found, (mean, math.hypot(*(error for _, error in averaged)) / len(averaged))]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+", help="of evaluations, one a seed")
    parser.add_argument("--models", nargs="+", help="rows; all that every folder has by default")
    parser.add_argument("--pairs", nargs="*", default=[], help="differences, as in student-base")
    args = parser.parse_args()
    documents = [load_results(folder / "results.json") for folder in args.folders]
    common = [m for m in documents[0]["models"] if all(m in d["models"] for d in documents)]
    heads = [*documents[0]["benchmarks"], "average"]
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
