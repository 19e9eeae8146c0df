"""Merge LoRA adapters of one base into one adapter, by adding their weight updates.

The update of a layer is dW = scale * B A, with scale = alpha / r (alpha / sqrt(r) under rsLoRA).
Only whole updates are added: the sum of the A times the sum of the B also holds B_1 A_2, an update
that no adapter had.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft.utils.merge_utils import dare_linear, ties
from torch import Tensor

from flowalign.backbone.adapters import Lora, describe, read_lora, write_lora
from flowalign.config import ADAPTER
from flowalign.system.escape import escaped

METHODS = ("concat", "svd", "ties", "dare")
BLOCK = re.compile(r"transformer_blocks\.(\d+)\.")


@dataclass(frozen=True)
class Factors:
    """The update of one layer, up @ down: down [r,in], up [out,r], float64; the scale is in up."""

    down: Tensor
    up: Tensor

    @property
    def dense(self) -> Tensor:
        """dW [out,in]."""
        return self.up @ self.down


@dataclass(frozen=True)
class MergeReport:
    """What was merged, and how well."""

    method: str
    adapters: list[str]
    weights: list[float]
    ranks: dict[str, int]  # by layer
    errors: dict[str, float]  # by layer: |written - merged| / |merged|, Frobenius norms
    lines: tuple[float, float] | None = None  # (shallow, deep)

    @property
    def worst(self) -> float:
        """The largest relative error of a layer."""
        return max(self.errors.values())

    @property
    def summary(self) -> str:
        """One line: what was added with which weights, the rank and the scale that came out."""
        ranks = sorted(set(self.ranks.values()))
        rank = f"{ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"{ranks[0]}"
        depth = ", scaled by depth from {:g} to {:g}".format(*self.lines) if self.lines else ""
        return (
            f"{rule(self.method, self.weights)}{depth}; method {self.method}, rank {rank}, scale 1 "
            f"(the alpha / r of each adapter is in B), largest relative error {self.worst:.2e}"
        )

    def __str__(self) -> str:
        rows = [
            f"| {escaped(layer)} | {self.ranks[layer]} | {error:.2e} |"
            for layer, error in self.errors.items()
        ]
        head = ["| layer | rank | relative error |", "|---|---|---|"]
        return "\n".join([self.summary, "", *head, *rows])


def rule(method: str, weights: Sequence[float]) -> str:
    """What a merge with these weights is: a sum, an average, or another combination."""
    count = len(weights)
    same = all(math.isclose(w, weights[0], rel_tol=1e-2) for w in weights)
    each = f"{weights[0]:.3g} each" if same else ", ".join(f"{w:.3g}" for w in weights)
    name = "weighted sum"
    if method in ("ties", "dare"):
        name = method
    elif same and math.isclose(weights[0], 1.0):
        name = "sum"
    elif same and math.isclose(sum(weights), 1.0, rel_tol=1e-2):
        name = "average"
    return f"{name} of {count} updates (weights {each})"


def merge(
    adapters: Sequence[str | Path],
    out: str | Path,
    *,
    weights: Sequence[float] | None = None,
    method: str = "concat",
    rank: int | None = None,
    density: float = 0.5,
    seed: int = 0,
    lines: tuple[float, float] | None = None,
) -> MergeReport:
    """Write to `out` an adapter whose update merges the weighted updates w_i dW_i of the others.

    adapters: folders or Hub ids, whatever `flowalign.backbone.adapters.read_lora` takes.
    weights: one each, 1 by default: the plain sum. 1/n each is the average, as in the only
        published script. (docs/log.md compares both on the tiny world.)
    method: "concat": exact, the ranks add up. "svd": the best approximation of the sum of rank
        `rank` (default: the largest rank given; at most the sum of the ranks). "ties" (2306.01708):
        keep the `density` largest entries of each update, elect a sign, and average what agrees
        with it. "dare" (2311.03099): keep a random share `density` of the entries, rescaled, and
        add; drawn from `seed`. Both by peft's functions on the dense updates, then brought to
        `rank` as "svd" does.
    lines: (shallow, deep) scales of LiNeS (2410.17146): the update of transformer block l of L is
        multiplied by shallow + (deep - shallow) * l / (L - 1).
    Returns the report. Raises ValueError for adapters that do not fit together (another base,
    other layers or sizes, DoRA), a wrong number of weights, an unknown method or a rank for
    concat; HubError for one that cannot be had; FileExistsError if `out` already holds an adapter.
    """
    weights = [1.0] * len(adapters) if weights is None else list(weights)
    _check(adapters, Path(out), weights, method, rank, density)
    loras = [read_lora(source, newest=True) for source in adapters]
    bases = [lora.metadata["base_model_name_or_path"] for lora in loras]
    updates = [_updates(source, lora) for source, lora in zip(adapters, loras, strict=True)]
    _check_same(adapters, bases, updates)
    last = max((int(b[1]) for layer in updates[0] if (b := BLOCK.search(layer))), default=0)
    state, ranks, errors = {}, {}, {}
    with torch.random.fork_rng(devices=[]):  # peft draws from the global generator
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed GPUs as well
        for layer in updates[0]:
            parts = [update[layer] for update in updates]
            scale = _depth_scale(layer, last, lines)
            scaled = [w * scale for w in weights]
            merged, errors[layer] = merge_layer(parts, scaled, method, rank, density)
            ranks[layer] = merged.down.shape[0]
            state[f"{layer}.lora_A.weight"] = merged.down.float().contiguous()
            state[f"{layer}.lora_B.weight"] = merged.up.float().contiguous()
    lengths = {lora.text_length for lora in loras}
    write_lora(
        out,
        state,
        describe(ranks, ranks, False, bases[0]),  # alpha = rank: scales are in B
        text_length=lengths.pop() if len(lengths) == 1 else None,
    )
    return MergeReport(method, [str(a) for a in adapters], weights, ranks, errors, lines)


# One layer ---------------------------------------------------------------------------------------


def merge_layer(
    parts: Sequence[Factors],
    weights: Sequence[float],
    method: str,
    rank: int | None,
    density: float,
) -> tuple[Factors, float]:
    """The merged update, and its relative error against what it stands for."""
    down = torch.cat([part.down for part in parts])
    up = torch.cat([w * part.up for w, part in zip(weights, parts, strict=True)], dim=1)
    rank = rank or max(part.down.shape[0] for part in parts)
    if method == "concat":
        return Factors(down, up), 0.0
    if method == "svd":
        return _low_rank(up, down, rank)
    combine = ties if method == "ties" else dare_linear
    dense = [part.dense for part in parts]  # only these methods drop entries of the whole matrix
    whole = combine(dense, torch.tensor(weights, dtype=down.dtype), density)
    left, sizes, right = torch.linalg.svd(whole, full_matrices=False)
    return _cut(left, sizes, right, rank)


def _low_rank(up: Tensor, down: Tensor, rank: int) -> tuple[Factors, float]:
    """The nearest update of that rank to up @ down, up [out,R], down [R,in]. Its rank is R at most,
    so its singular values are those of a small matrix: up = Q_u R_u and down^T = Q_d R_d give
    up @ down = Q_u (R_u R_d^T) Q_d^T."""
    q_up, r_up = torch.linalg.qr(up)
    q_down, r_down = torch.linalg.qr(down.T)
    left, sizes, right = torch.linalg.svd(r_up @ r_down.T, full_matrices=False)
    return _cut(q_up @ left, sizes, right @ q_down.T, rank)


def _cut(left: Tensor, sizes: Tensor, right: Tensor, rank: int) -> tuple[Factors, float]:
    """The nearest update of that rank (Eckart-Young), and its relative error."""
    root = sizes[:rank].sqrt()  # both factors get the same norm
    factors = Factors(down=root[:, None] * right[:rank], up=left[:, :rank] * root)
    norm = float(sizes.norm())
    return factors, float(sizes[rank:].norm()) / norm if norm > 0 else 0.0


def _depth_scale(layer: str, last: int, lines: tuple[float, float] | None) -> float:
    if lines is None:
        return 1.0
    block = BLOCK.search(layer)
    if block is None:
        raise ValueError(
            f"lines scales by depth, and {layer!r} is in no transformer block. Merge without lines."
        )
    shallow, deep = lines
    return shallow + (deep - shallow) * int(block[1]) / max(last, 1)


# Folders -----------------------------------------------------------------------------------------


def _updates(folder: str | Path, lora: Lora) -> dict[str, Factors]:
    """The updates of an adapter by layer, block 10 after block 9."""
    layers = {}
    for name, scale in lora.scales.items():
        down = lora.weights[f"{name}.lora_A.weight"].double()
        up = lora.weights[f"{name}.lora_B.weight"].double()
        if down.ndim != 2:
            raise ValueError(f"{folder} adapts {name}, a convolution. Merge adapters of others.")
        layers[name] = Factors(down, up * scale)

    def natural(name: str) -> list[str | int]:
        return [int(part) if part.isdecimal() else part for part in name.split(".")]

    return {name: layers[name] for name in sorted(layers, key=natural)}


# Refusals ----------------------------------------------------------------------------------------


def _check(
    adapters: Sequence[str | Path],
    out: Path,
    weights: Sequence[float],
    method: str,
    rank: int | None,
    density: float,
) -> None:
    if method not in METHODS:
        raise ValueError(f"no merge method {method!r}; use one of {', '.join(METHODS)}.")
    if not adapters:
        raise ValueError("there is nothing to merge: give one adapter folder or more.")
    if len(weights) != len(adapters):
        raise ValueError(f"{len(weights)} weights for {len(adapters)} adapters; give one each.")
    if rank is not None and (method == "concat" or rank < 1):
        raise ValueError(
            f"rank {rank} with method {method!r}: concat has the sum of the ranks, the others take "
            "1 or more. Leave rank out, or use svd."
        )
    if not 0 < density <= 1:
        raise ValueError(f"density is {density}; give the share of entries to keep, in (0, 1].")
    if (out / ADAPTER).exists():
        raise FileExistsError(f"{out} already holds an adapter. Remove it, or write elsewhere.")


def _check_same(
    adapters: Sequence[str | Path], bases: list[str | None], updates: list[dict[str, Factors]]
) -> None:
    """Refuse adapters that differ from the first one in base, layers or sizes."""
    folder, base, first = adapters[0], bases[0], updates[0]
    for path, own_base, own in zip(adapters[1:], bases[1:], updates[1:], strict=True):
        if base and own_base and base != own_base:  # not every file names its base
            raise ValueError(
                f"{folder} was trained on {base}, {path} on {own_base}. "
                "Updates of different bases do not add up; merge adapters of one base."
            )
        if different := sorted(first.keys() ^ own.keys()):
            raise ValueError(
                f"{folder} and {path} adapt different layers ({len(different)} are in one of them "
                f"only, such as {different[0]}). Merge adapters of the same targets."
            )
        for layer in first:
            sizes = [(f.up.shape[0], f.down.shape[1]) for f in (first[layer], own[layer])]
            if sizes[0] != sizes[1]:
                raise ValueError(
                    f"{layer} is {sizes[0]} in {folder} and {sizes[1]} in {path}, so their bases "
                    "differ. Merge adapters of one base."
                )
