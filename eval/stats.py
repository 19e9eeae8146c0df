"""Statistics of image scores: means with standard errors, paired differences, averages. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from flowalign.types import EvalRow, ImageScore

AVERAGE, FIDELITY = "average", "fidelity"  # columns of a table besides the benchmarks
# GenEval's, in the order of its paper; others follow
TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")

DRAWS = 2000  # of a bootstrap
CONFIDENCE = 0.95  # of the intervals

Array = NDArray[np.float64]
Labels = NDArray[np.int64]
Images = Sequence[ImageScore]

NO_ERROR = "No ± and no interval for {}: too few prompts have a score, in all or of one tag."


class Named(Protocol):
    """A benchmark: its name, and the part of the scores that is its number (None = the value)."""

    @property
    def name(self) -> str: ...

    @property
    def headline(self) -> str | None: ...


def part_of(benchmark: Named) -> str:
    """The name of the benchmark's number in an image's score (`ImageScore.number`)."""
    return benchmark.headline or "value"


def rows_of(benchmark: Named, images: Images) -> list[EvalRow]:
    """Mean, standard error, interval and count of the value and of every part, over valid images.

    Errors and intervals are over prompts, because the images of one prompt resemble each other.
    If the reward has a headline and every prompt a tag (GenEval), `headline_rows` follow.
    """
    parts = set()
    for score in images:
        parts.update(part for part in score.parts if score.weight.get(part, 1))
    if benchmark.headline:
        parts.add(benchmark.headline)
    named = {"reward": "value"} | {part: part for part in sorted(parts)}
    rows = [part_row(benchmark.name, metric, images, part) for metric, part in named.items()]
    if _tagged(benchmark, images):
        rows += headline_rows(benchmark, images)
    return rows


def headline_rows(benchmark: Named, images: Images) -> list[EvalRow]:
    """The benchmark's number, then one row per tag if there are tags.

    With tags the number is "overall", GenEval's unweighted mean of the tags' means, with its error
    as in `average`. A tag without a valid image is left out of it.
    """
    part = part_of(benchmark)
    if not _tagged(benchmark, images):
        return [part_row(benchmark.name, benchmark.headline or "reward", images, part)]
    by_tag: dict[str, list[ImageScore]] = {}
    for score in images:
        by_tag.setdefault(_tag(score), []).append(score)
    rows = []
    for tag in dict.fromkeys([*TAGS, *sorted(by_tag)]):
        if tag in by_tag:
            rows.append(part_row(benchmark.name, tag, by_tag[tag], part))
    scored = [row for row in rows if row.n]  # a tag without valid images is unknown, not wrong
    low, high = bootstrap_interval(*_prompt_scores(images, part, tags=True)[1])
    overall = average(scored or rows, benchmark.name, "overall")
    return [replace(overall, low=low, high=high, total=len(images)), *rows]


def headline_row(benchmark: Named, rows: Sequence[EvalRow], part: str | None = None) -> EvalRow:
    """The benchmark's number, or the number of a part, from its `rows_of`; rows of other benchmarks
    are ignored."""
    metrics = {row.metric: row for row in rows if row.benchmark == benchmark.name}
    if part:
        return metrics.get(part) or EvalRow(benchmark.name, part, math.nan, math.nan, 0)
    return metrics.get("overall") or metrics[benchmark.headline or "reward"]


def difference(benchmark: Named, first: Images, second: Images, part: str | None = None) -> EvalRow:
    """The number of the second model (or of its `part`) minus the first's, paired: same prompts,
    same noise.

    n counts the images that are valid in both. The standard error is over the differences, so it is
    smaller than the errors of the two models suggest.
    """
    key = part or part_of(benchmark)
    gains = [
        b.replaced(key, b.number(key) - a.number(key)) for a, b in zip(first, second, strict=True)
    ]
    if part:
        return part_row(benchmark.name, part, gains, part)
    return headline_rows(benchmark, gains)[0]


def average(rows: Sequence[EvalRow], benchmark: str = AVERAGE, metric: str = "mean") -> EvalRow:
    """The unweighted mean of one row per benchmark: headlines, or their differences.

    The error is over prompts. A prompt's influences on all rows are added first, because benchmarks
    may share images. The mean is NaN if a row is NaN: a mean over fewer rows cannot be compared
    with other models'.
    """
    influence: dict[str, float] = {}
    for row in rows:  # one without influence is independent of the others
        for prompt, moved in (row.influence or {row.benchmark: row.stderr}).items():
            influence[prompt] = influence.get(prompt, 0.0) + moved / len(rows)
    mean = sum(row.mean for row in rows) / len(rows)
    error = math.hypot(*influence.values())
    n = sum(r.n for r in rows)
    total = sum(r.n if r.total is None else r.total for r in rows)
    margin = student_t(len(influence) - 1) * error
    return EvalRow(
        benchmark, metric, mean, error, n, mean - margin, mean + margin, total, influence
    )


@cache
def student_t(freedom: int) -> float:
    """How many standard errors the 95 % interval reaches to either side, by Student's t: 12.7 for
    one degree of freedom, 4.30 for two, 1.96 for very many. NaN without any."""
    if freedom < 1:
        return math.nan
    angles = np.linspace(0, math.pi / 2, 100_001)  # t = sqrt(freedom) tan(angle)
    density = np.cos(angles) ** (freedom - 1)
    share = np.cumsum(density[1:] + density[:-1])
    angle = float(np.interp(CONFIDENCE, share / share[-1], angles[1:]))
    return math.sqrt(freedom) * math.tan(angle)


def lost(benchmark: Named, images: Images, share: float) -> str:
    """Why these images give no result: over `share`, or all of a tag, have no score; "" = ok."""
    part = part_of(benchmark)
    valid = [score for score in images if math.isfinite(score.number(part))]
    invalid = [score for score in images if not math.isfinite(score.number(part))]
    tags: set[str] = set()  # without any score
    if _tagged(benchmark, images):
        tags = set(map(_tag, images)) - set(map(_tag, valid))
    too_many = invalid and (not valid or len(invalid) > share * len(images))
    if not tags and not too_many:
        return ""
    # a dict keeps the order in which the reasons came up
    reasons = dict.fromkeys(score.reason or "no reason is known" for score in invalid)
    which = f", including all of {', '.join(map(repr, sorted(tags)))}" if tags else ""
    return (
        f"{benchmark.name}: {len(invalid)} of {len(images)} images have no score{which} "
        f"(max_invalid_share = {share:g}): {'; '.join(list(reasons)[:3])}"
    )


def _tagged(benchmark: Named, images: Images) -> bool:
    has_tags = bool(images) and all("tag" in score.image.metadata for score in images)
    return benchmark.headline is not None and has_tags


def _tag(score: ImageScore) -> str:
    return score.image.metadata["tag"]


def _prompt_scores(images: Images, part: str, tags: bool) -> tuple[list[str], PromptScores]:
    """The distinct prompts in order of appearance, and their scores. tags: whether each tag is a
    stratum with its own prompts; otherwise there is one stratum.

    A prompt is identified by its text, because a set may list it several times (tiny-world sets
    do).
    """
    keys = [(str(_tag(score)) if tags else "", score.image.prompt) for score in images]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    prompt = np.array([numbers[key] for key in keys], np.int64)
    count = len(numbers)
    values = np.array([score.number(part) for score in images], np.float64)
    weights = np.where(np.isfinite(values), [score.weight.get(part, 1) for score in images], 0)
    strata = np.unique([tag for tag, _ in numbers], return_inverse=True)[1]
    sums = np.bincount(prompt, np.nan_to_num(values) * weights, count).astype(np.float64)
    counts = np.bincount(prompt, weights, count).astype(np.float64)
    return [text for _, text in numbers], PromptScores(sums, counts, strata)


def part_row(benchmark: str, metric: str, images: Images, part: str) -> EvalRow:
    """Mean, error, interval and count of a part of the scores of some of a benchmark's images."""
    texts, (sums, counts, one) = _prompt_scores(images, part, tags=False)
    n = float(counts.sum())
    prompts = int((counts > 0).sum())
    valid = sum(math.isfinite(score.number(part)) for score in images)
    if not n:
        return EvalRow(benchmark, metric, math.nan, math.nan, 0, total=len(images))
    mean = float(sums.sum()) / n
    # the cluster-robust error of a ratio; with one image per prompt the usual standard error.
    # P / (P - 1): unbiased for equally many images per prompt
    scale = math.sqrt(prompts / (prompts - 1)) / n if prompts > 1 else math.nan
    moved = ((sums - mean * counts) * scale).tolist()
    influence = dict(zip(texts, moved, strict=True))
    error = math.hypot(*moved)
    low, high = bootstrap_interval(sums, counts, one)
    return EvalRow(benchmark, metric, mean, error, valid, low, high, len(images), influence)


def between(row: EvalRow | None, decimals: int, signed: bool = False) -> str:
    """The 95 % interval of a number, "" if there is none."""
    if row is None or not math.isfinite(row.low + row.high):
        return ""
    form = f"{'+' if signed else ''}.{decimals}f"
    return f"[{row.low:{form}}, {row.high:{form}}]"


def number_text(row: EvalRow | None, decimals: int, signed: bool = False) -> str:
    """A number with its error, if it has one (`NO_ERROR`); "–" = there is no number."""
    if row is None or math.isnan(row.mean):
        return "–"
    error = "" if math.isnan(row.stderr) else f" ± {row.stderr:.{decimals}f}"
    return f"{row.mean:{'+' if signed else ''}.{decimals}f}{error}"


def notes(rows: Iterable[Mapping[str, EvalRow]]) -> list[str]:
    """NO_ERROR for the columns without an error; [] if there are none. rows: the table's rows,
    {column: number}."""
    columns: dict[str, None] = {}  # keeps their order
    for row in rows:
        without = [c for c, n in row.items() if math.isfinite(n.mean) and math.isnan(n.stderr)]
        columns |= dict.fromkeys(without)
    return [NO_ERROR.format(", ".join(columns))] if columns else []


# Bootstrap intervals over prompts ---------------------------------------------------------------

# Prompts are drawn, not images, because the images of one prompt resemble each other. Strata are
# GenEval's tags (all 0 where there are none): prompts are drawn within their stratum, and the
# number is the unweighted mean over strata of (sum of scores / count of scores).


class PromptScores(NamedTuple):
    """Sum and count of the valid scores of each of P prompts, and its stratum: [P] each."""

    sums: Array
    counts: Array
    strata: Labels


def prompts_mean(sums: Array, counts: Array, strata: Labels) -> Array:
    """The number [...] of sums and counts [..., P]; a stratum without any count is left out."""
    totals = np.stack([sums[..., strata == s].sum(-1) for s in np.unique(strata)], -1)
    sizes = np.stack([counts[..., strata == s].sum(-1) for s in np.unique(strata)], -1)
    scored = sizes > 0
    means = np.where(scored, totals / np.maximum(sizes, 1), 0)
    return np.where(scored.any(-1), means.sum(-1) / np.maximum(scored.sum(-1), 1), np.nan)


def bootstrap_interval(
    sums: Array, counts: Array, strata: Labels, seed: int = 0
) -> tuple[float, float]:
    """The percentile bootstrap interval of `prompts_mean`; NaN for one prompt of a stratum or none.

    tests/test_bootstrap.py measures its coverage for shares. It is too short for a few prompts.
    """
    sizes = np.bincount(strata[counts > 0])
    if not sizes.any() or (sizes == 1).any():  # one prompt would give no width
        return float("nan"), float("nan")
    rng = np.random.default_rng(seed)
    times = np.zeros((DRAWS, len(strata)))  # how often each draw takes each prompt
    for stratum in np.unique(strata):
        members = np.flatnonzero(strata == stratum)
        size = len(members)
        drawn = rng.integers(size, size=(DRAWS, size))
        drawn += np.arange(DRAWS)[:, None] * size  # one range of bins per draw
        counted = np.bincount(drawn.ravel(), minlength=DRAWS * size)
        times[:, members] = counted.reshape(DRAWS, size)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.nanquantile(prompts_mean(times * sums, times * counts, strata), [tail, 1 - tail])
    return float(low), float(high)
