"""Merge LoRA adapters of one base into one adapter, by adding their weight updates.

The update of a layer is dW = scale * B A, with scale = alpha / r (alpha / sqrt(r) under rsLoRA).
Only complete updates are added: the sum of the A times the sum of the B also holds B_1 A_2, an
update that no adapter had.
"""

from __future__ import annotations

import argparse
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from peft.utils.merge_utils import dare_linear, ties
from torch import Tensor

from flowalign.backbone.adapters import (
    Lora,
    describe_adapter,
    read_lora,
    weightless_lora,
    write_lora,
)
from flowalign.backbone.shapes import public
from flowalign.backbone.structure import read_family
from flowalign.config import ADAPTER, ModelConfig
from flowalign.report import summary
from flowalign.report.progress import quiet
from flowalign.system.exit import refusing
from flowalign.system.files import expanded
from flowalign.system.folder import RunFolder
from flowalign.system.table import Table

METHODS = ("concat", "svd", "ties", "dare")


@dataclass(frozen=True)
class Factors:
    """The update of one layer, up @ down: down [r,in], up [out,r], float64; the scale is in up."""

    down: Tensor
    up: Tensor


@dataclass(frozen=True)
class MergeReport:
    method: str
    weights: list[float]
    ranks: dict[str, int]  # by layer
    errors: dict[str, float]  # by layer: |written - merged| / |merged|, Frobenius norms

    @property
    def worst(self) -> float:
        return max(self.errors.values())

    @property
    def summary(self) -> str:
        """The report in one line: the adapters with their weights, and the resulting rank and
        scale."""
        weights = ", ".join(f"{weight:.3g}" for weight in self.weights)
        return (
            f"{self.method} of {len(self.weights)} updates (weights {weights}); "
            f"rank {' to '.join(map(str, sorted({*self.ranks.values()})))}, scale 1 (the alpha / r "
            f"of each adapter is in B), largest relative error {self.worst:.2e}"
        )

    def __str__(self) -> str:
        rows = [[k, str(self.ranks[k]), f"{error:.2e}"] for k, error in self.errors.items()]
        layers = Table(["layer", "rank", "relative error"], rows)
        return f"{self.summary}\n\n{layers.markdown()}"


def merge(
    adapters: Sequence[str | Path],
    out: str | Path,
    *,
    weights: Sequence[float] | None = None,
    method: str = "concat",
    rank: int | None = None,
    density: float = 0.5,
    seed: int = 0,
    model: str | None = None,
) -> MergeReport:
    """Write to `out` an adapter whose update merges the weighted updates w_i dW_i of the others. A
    layer that one of them lacks has the update 0 there.

    adapters: folders or Hub ids, whatever `flowalign.backbone.adapters.read_lora` takes.
    weights: one each, 1 by default: the plain sum. 1/n each is the average, as in all recipes.
    method: "concat": exact, the ranks add up. "svd": the best approximation of the sum of rank
        `rank` (default: the largest rank given; at most the sum of the ranks). "ties" (2306.01708):
        keep the `density` largest entries of each update, elect a sign, and average what agrees
        with it. "dare" (2311.03099): keep a random share `density` of the entries, rescaled, and
        add; drawn from `seed`. Both by peft's functions on the dense updates, then brought to
        `rank` as "svd" does.
    model: folder or Hub id of the base, for adapters of other programs' names, or without a base's.
    Returns the report. Raises ValueError for adapters that do not fit together (another base,
    layers of other sizes, DoRA), a wrong number of weights, an unknown method or a rank for
    concat; HubError for one that cannot be had; FileExistsError if `out` holds an adapter or
    a run.
    """
    weights = [1.0] * len(adapters) if weights is None else list(weights)
    _check_options(len(adapters), weights, method, rank, density)
    out = Path(expanded(out))
    held = {out / ADAPTER: "an adapter", RunFolder(out).config: "a run"}
    for what in (what for file, what in held.items() if file.exists()):
        raise FileExistsError(f"{out} already holds {what}. Remove it, or write elsewhere.")
    family = partial(read_family, ModelConfig(id=model)) if model else None
    loras = [read_lora(source, newest=True, family=family) for source in adapters]
    updates = [_updates(source, lora) for source, lora in zip(adapters, loras, strict=True)]
    base = _common_base(adapters, loras, updates) or model
    layers = sorted(set().union(*updates), key=_natural)
    state, ranks, errors = {}, {}, {}
    with torch.random.fork_rng(devices=[]):  # peft draws from the global generator
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed GPUs as well
        for layer in layers:
            indices = [i for i, update in enumerate(updates) if layer in update]
            parts = [updates[i][layer] for i in indices]
            shares = [weights[i] for i in indices]
            merged, errors[layer] = merge_layer(parts, shares, method, rank, density)
            ranks[layer] = merged.down.shape[0]
            state[f"{layer}.lora_A.weight"] = merged.down.float().contiguous()
            state[f"{layer}.lora_B.weight"] = merged.up.float().contiguous()
    lengths = {lora.text_length for lora in loras}
    write_lora(
        out,
        state,
        describe_adapter(ranks, ranks, False, base),  # alpha = rank: scales are in B
        text_length=lengths.pop() if len(lengths) == 1 else None,
    )
    return MergeReport(method, weights, ranks, errors)


def foreseen_merge(loras: Sequence[Lora], method: str, rank: int | None) -> Lora:
    """The result of `merge`, on the meta device. The exact sum has the sum of all ranks, and svd
    never more."""
    counters = [Counter(lora.ranks) for lora in loras]
    ranks = total = reduce(operator.add, counters)
    if method != "concat":
        largest = reduce(operator.or_, counters)
        ranks = Counter({layer: rank or most for layer, most in largest.items()})
    if method == "svd":
        ranks &= total
    shapes = {}
    for lora in loras:
        for layer in lora.ranks:
            down, up = (lora.weights[f"{layer}.lora_{half}.weight"] for half in "AB")
            shapes[layer] = (up.shape[0], ranks[layer], down.shape[1])
    return weightless_lora(shapes)


# One layer ---------------------------------------------------------------------------------------


def merge_layer(
    parts: Sequence[Factors],
    weights: Sequence[float],
    method: str,
    rank: int | None,
    density: float,
) -> tuple[Factors, float]:
    """The merged update, and its relative error against what it stands for."""
    down = torch.cat([part.down for part in parts])  # [R,in]
    up = torch.cat([w * part.up for w, part in zip(weights, parts, strict=True)], dim=1)  # [out,R]
    rank = rank or max(part.down.shape[0] for part in parts)
    if method == "concat":
        return Factors(down, up), 0.0
    if method == "svd":
        # up @ down has rank R at most: with up = Q_u R_u and down^T = Q_d R_d it is
        # Q_u (R_u R_d^T) Q_d^T, whose singular values are those of a small matrix
        q_up, r_up = torch.linalg.qr(up)
        q_down, r_down = torch.linalg.qr(down.T)
        left, sizes, right = torch.linalg.svd(r_up @ r_down.T, full_matrices=False)
        return _cut(q_up @ left, sizes, right @ q_down.T, rank)
    combine = ties if method == "ties" else dare_linear
    dense = [p.up @ p.down for p in parts]  # only these methods drop entries of the matrix
    merged = combine(dense, torch.tensor(weights, dtype=down.dtype), density)
    left, sizes, right = torch.linalg.svd(merged, full_matrices=False)
    return _cut(left, sizes, right, rank)


def _cut(left: Tensor, sizes: Tensor, right: Tensor, rank: int) -> tuple[Factors, float]:
    """The nearest update of that rank (Eckart-Young), and its relative error."""
    root = sizes[:rank].sqrt()  # both factors get the same norm
    factors = Factors(down=root[:, None] * right[:rank], up=left[:, :rank] * root)
    norm = float(sizes.norm())
    return factors, float(sizes[rank:].norm()) / norm if norm > 0 else 0.0


def _natural(layer: str) -> list[tuple[bool, int, str]]:
    """A sort key that puts block 10 after block 9."""
    return [(p.isdecimal(), int(p) if p.isdecimal() else 0, p) for p in layer.split(".")]


def _updates(folder: str | Path, lora: Lora) -> dict[str, Factors]:
    layers = {}
    for name in lora.scales:
        down = lora.weights[f"{name}.lora_A.weight"].double()
        up = lora.weights[f"{name}.lora_B.weight"].double()
        if down.ndim != 2:
            raise ValueError(f"{folder} adapts {name}, a convolution. Merge adapters of others.")
        layers[name] = Factors(down, up * lora.scales[name])
    return layers


def _check_options(
    count: int, weights: Sequence[float], method: str, rank: int | None, density: float
) -> None:
    if method not in METHODS or not count or len(weights) != count:
        raise ValueError(
            f"method {method!r}, {count} adapters, {len(weights)} weights; want a method of "
            f"{', '.join(METHODS)}, one adapter or more, and one weight each."
        )
    if not 0 < density <= 1 or rank is not None and (method == "concat" or rank < 1):
        raise ValueError(
            f"method {method!r}, rank {rank}, density {density}; want a density in (0, 1], and a "
            "rank of 1 or more only where the ranks are not added (concat)."
        )


def _common_base(
    adapters: Sequence[str | Path], loras: Sequence[Lora], updates: Sequence[dict[str, Factors]]
) -> str | None:
    """The first base that the adapters name; None where none does. Refuses adapters of different
    public models, or with layers of other sizes."""
    named: dict[str, tuple[Any, str | Path]] = {}  # base, and each layer's [out,in]; and whose
    bases = [lora.metadata["base_model_name_or_path"] for lora in loras]  # not every file has one
    for path, base, update in zip(adapters, bases, updates, strict=True):
        facts = {name: [f.up.shape[0], f.down.shape[1]] for name, f in update.items()}
        if base in public():  # any other name may stand for the same base
            facts = {"the base": base, **facts}
        for what, value in facts.items():
            first, whose = named.setdefault(what, (value, path))
            if value != first:
                raise ValueError(
                    f"{what} is {first} in {whose}, and {value} in {path}. Merge adapters of the "
                    "same base."
                )
    return next(filter(None, bases), None)


@refusing("merge")
def main(args: argparse.Namespace) -> int:
    """`flowalign merge`; exit status 0 = merged, 2 = refused."""
    quiet()
    report = merge(**vars(args))
    print(report if report.worst > 1e-6 else report.summary)  # layers, where one has an error
    print(summary.merge_summary(args.out))
    return 0
