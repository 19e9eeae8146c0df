"""GenEval's decision: does a list of detections fulfil a prompt's metadata?

Reproduces djghosh13/geneval@af4902f, `evaluation/evaluate_images.py` and `summary_scores.py`
(arXiv 2310.11513), and the graded reward of yifan123/reward-server@92ac29f that Flow-GRPO and
Flow-OPD train on. Pure numpy, no model: detections and colours come from the caller.

detections {class: [[x1, y1, x2, y2, score], ...]}: raw, in pixels, y down, any order.
colors {class: [colour of each raw box]}, or a callable (class, raw index) -> colour, which is
called only for boxes that a colour clause judges. All comparisons are made in float32: the
official detector yields float32, and float32(0.3) must fail `> 0.3`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

# fmt: off
COLORS = (
    "red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white",
)
# The 80 things that GenEval asks for: COCO's, in the order of a COCO detector's labels, from
# djghosh13/geneval (MIT), `evaluation/object_names.txt`. A detector's labels are mapped to them by
# index, as there: COCO's names differ for some ("mouse", "remote"), and the names of models more.
NAMES: tuple[str, ...] = (
    "person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat",
    "traffic light", "fire hydrant", "stop sign", "parking meter", "bench", "bird", "cat", "dog",
    "horse", "sheep", "cow", "elephant", "bear", "zebra", "giraffe", "backpack", "umbrella",
    "handbag", "tie", "suitcase", "frisbee", "skis", "snowboard", "sports ball", "kite",
    "baseball bat", "baseball glove", "skateboard", "surfboard", "tennis racket", "bottle",
    "wine glass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple", "sandwich", "orange",
    "broccoli", "carrot", "hot dog", "pizza", "donut", "cake", "chair", "couch", "potted plant",
    "bed", "dining table", "toilet", "tv", "laptop", "computer mouse", "tv remote",
    "computer keyboard", "cell phone", "microwave", "oven", "toaster", "sink", "refrigerator",
    "book", "clock", "vase", "scissors", "teddy bear", "hair drier", "toothbrush",
)
# fmt: on

Boxes = Mapping[str, Sequence[Sequence[float]]]
Colors = Mapping[str, Sequence[str]] | Callable[[str, int], str]


@dataclass(frozen=True)
class Verdict:
    """correct, and why not: one line for each clause that failed ("" when correct)."""

    correct: bool
    reason: str


@dataclass
class _Outcome:
    """The outcome of one include clause: `colored` and `relation` are None where not judged."""

    clause: Mapping[str, Any]
    wanted: int  # boxes; the clause's `count`
    count: int  # boxes that count
    boxes: list[np.ndarray]  # the best of them, at most `wanted`
    colored: int | None = None  # boxes of the wanted colour
    relation: bool | None = None
    no_target: bool = False  # the clause that the position refers to failed
    reason: str = ""  # why it failed


def judge(
    metadata: Mapping[str, Any],
    detections: Boxes,
    colors: Colors,
    *,
    threshold: float = 0.3,
    counting_threshold: float = 0.9,
    max_objects: int = 16,
    max_overlap: float = 1.0,
    position_threshold: float = 0.1,
) -> Verdict:
    """The official decision on one image.

    Every include clause must hold (count, then colour, then position) and no exclude clause may
    fire. Only the `count` most confident boxes of a class are judged for colour and position. A
    reason that names two relations lists them alphabetically (the official order depends on
    PYTHONHASHSEED). Raises ValueError where a position refers to its own clause or to a later one.
    """
    selected = select(metadata, detections, threshold, counting_threshold, max_objects, max_overlap)
    outcomes = _outcomes(metadata, selected, detections, colors, position_threshold)
    reasons = [outcome.reason for outcome in outcomes if outcome.reason]
    for clause in _fired(metadata, selected):
        name, count = clause["class"], clause["count"]
        reasons.append(f"expected {name}<{count}, found {len(selected[name])}")
    return Verdict(correct=not reasons, reason="\n".join(reasons))


def partial_credit(
    metadata: Mapping[str, Any],
    detections: Boxes,
    colors: Colors,
    *,
    variant: str = "bounded",
    position_threshold: float = 0.1,
    **rules: Any,
) -> float:
    """A graded score of one image: the mean of its terms. Counts must be equal.

    rules: the other thresholds of `judge`.
    "bounded", in [0, 1]; the terms depend on the metadata alone, n = the wanted count:
      each include clause: max(0, 1 - |n - found| / n);
      its colour, if it asks for one: boxes of that colour / n, 0 where the count is wrong;
      its position, if it asks for one: 1 if every pair shows the relation, else 0 (also where
      count, colour or the reference clause failed);
      each exclude clause of a class that no include clause names: 1, or 0 if it fires.
      It is 1.0 exactly if everything holds; then the verdict of `judge` is correct, too.
    "published": the reward server's `scores`, with its quirks: 1 - |n - found| / n has no floor;
      a failed relation adds 0 and then a spurious 1 (a lone position failure scores 0.75); a
      wrong count adds one 0 for colour and position together; exclude is ignored; 0 if no include.
    Raises as `judge`; ValueError for another variant.
    """
    if variant not in ("bounded", "published"):
        raise ValueError(f"variant {variant!r} is unknown; use 'bounded' or 'published'.")
    selected = select(metadata, detections, **rules)
    outcomes = _outcomes(metadata, selected, detections, colors, position_threshold, equal=True)
    if variant == "published":
        terms = [term for outcome in outcomes for term in _published_terms(outcome)]
        return sum(terms) / len(terms) if terms else 0.0
    terms = [term for outcome in outcomes for term in _bounded_terms(outcome)]
    included = {outcome.clause["class"] for outcome in outcomes}
    fired = _fired(metadata, selected)
    others = [c for c in metadata.get("exclude", []) if c["class"] not in included]
    terms += [0.0 if clause in fired else 1.0 for clause in others]
    return sum(terms) / len(terms) if terms else 1.0


def select(
    metadata: Mapping[str, Any],
    detections: Boxes,
    threshold: float = 0.3,
    counting_threshold: float = 0.9,
    max_objects: int = 16,
    max_overlap: float = 1.0,
) -> dict[str, list[int]]:
    """{class: raw indices of the boxes that count, best first}; classes without any are absent.

    Per class: by descending score (equal scores: the later raw index first), strictly above the
    threshold (`counting_threshold` where metadata's tag is "counting"), cut to `max_objects`,
    and only then greedy suppression of boxes whose IoU (+1-pixel convention) with a better one
    is not below `max_overlap`. max_overlap 1 turns suppression off.
    """
    limit = np.float32(counting_threshold if metadata.get("tag") == "counting" else threshold)
    selected = {}
    for name, raw in detections.items():
        boxes = _boxes(raw)
        order = np.argsort(boxes[:, 4], kind="stable")[::-1]  # reversed: ties by later index
        queue = order[boxes[order, 4] > limit][:max_objects].tolist()
        kept = []
        while queue:
            best = queue.pop(0)
            kept.append(best)
            if max_overlap != 1:
                cut = np.float32(max_overlap)
                queue = [i for i in queue if _iou(boxes[best], boxes[i]) < cut]
        if kept:
            selected[name] = kept
    return selected


def summarize(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The scores of many images, as fractions. rows: {tag, prompt, correct}, one an image.

    overall: unweighted mean of the tags' image accuracies, the number that papers report;
    tasks {tag: accuracy of its images}; images: share of correct images; prompts: share of
    prompts with at least one; counts {tag: number of images}.
    Raises ValueError where there are no rows.
    """
    by_tag = defaultdict[str, list[bool]](list)
    by_prompt = defaultdict[tuple[str, str], bool](bool)
    for row in rows:
        correct = bool(row["correct"])
        by_tag[row["tag"]].append(correct)
        by_prompt[row["tag"], row["prompt"]] |= correct
    if not by_tag:
        raise ValueError("no images to summarize: rows is empty.")
    tasks = {tag: sum(hits) / len(hits) for tag, hits in by_tag.items()}
    counts = {tag: len(hits) for tag, hits in by_tag.items()}
    return {
        "overall": sum(tasks.values()) / len(tasks),  # tags weigh alike, whatever their size
        "tasks": tasks,
        "images": sum(sum(hits) for hits in by_tag.values()) / sum(counts.values()),
        "prompts": sum(by_prompt.values()) / len(by_prompt),
        "counts": counts,
    }


def _boxes(raw: Sequence[Sequence[float]]) -> np.ndarray:
    return np.asarray(raw, dtype=np.float32).reshape(-1, 5)  # [N,5], also where there are none


def _area(upper_left: np.ndarray, lower_right: np.ndarray) -> np.float32:
    return np.maximum(lower_right - upper_left + 1, 0).prod()


def _iou(a: np.ndarray, b: np.ndarray) -> np.float32:
    inner = _area(np.maximum(a[:2], b[:2]), np.minimum(a[2:4], b[2:4]))
    union = _area(a[:2], a[2:4]) + _area(b[:2], b[2:4]) - inner
    return inner / union if union else np.float32(0)  # boxes without area do not overlap


def relations(a: np.ndarray, b: np.ndarray, dead_zone: float) -> set[str]:
    """The position of box a relative to box b: none, one or two of the four relations.

    The centre offset is shrunk per axis by dead_zone * (size of a + size of b), floor 0, and
    divided by the norm of the unshrunk offset, as the official code does.
    """
    corners = np.stack([a, b])[:, :4].reshape(2, 2, 2)
    center_a, center_b = corners.mean(axis=1)
    size_a, size_b = np.abs(corners[:, 1] - corners[:, 0])
    offset = center_a - center_b
    shrunk = np.maximum(np.abs(offset) - np.float32(dead_zone) * (size_a + size_b), 0)
    if np.all(shrunk < 1e-3):  # pixels
        return set()
    dx, dy = shrunk * np.sign(offset) / np.linalg.norm(offset)
    holds = {"left of": dx < -0.5, "right of": dx > 0.5, "above": dy < -0.5, "below": dy > 0.5}
    return {relation for relation, true in holds.items() if true}


def _fired(metadata: Mapping[str, Any], selected: Mapping[str, list[int]]) -> list[Any]:
    clauses = metadata.get("exclude", [])  # each allows fewer than `count`
    return [c for c in clauses if len(selected.get(c["class"], [])) >= c["count"]]


def _outcomes(
    metadata: Mapping[str, Any],
    selected: Mapping[str, list[int]],
    detections: Boxes,
    colors: Colors,
    dead_zone: float,
    equal: bool = False,
) -> list[_Outcome]:
    """The outcome of every include clause, in order; a later one may refer to an earlier one.
    equal: more objects than are wanted are wrong, too."""
    outcomes: list[_Outcome] = []
    for clause in metadata.get("include", []):
        name, wanted = clause["class"], clause["count"]
        chosen = selected.get(name, [])
        best = chosen[:wanted]
        boxes = [_boxes(detections[name])[i] for i in best]
        outcome = _Outcome(clause, wanted, len(chosen), boxes)
        if outcome.count < wanted or equal and outcome.count > wanted:
            sign = "==" if equal else ">="
            outcome.reason = f"expected {name}{sign}{wanted}, found {outcome.count}"
        if "color" in clause and not outcome.reason:
            if isinstance(colors, Mapping):
                _judge_color(outcome, [colors[name][i] for i in best])
            else:
                _judge_color(outcome, [colors(name, i) for i in best])
        if "position" in clause and not outcome.reason:
            _judge_position(outcome, outcomes, dead_zone)
        outcomes.append(outcome)
    return outcomes


def _judge_color(outcome: _Outcome, seen: list[str]) -> None:
    """Judge the colour of a clause whose count holds. seen: the colours of its judged boxes."""
    name, color = outcome.clause["class"], outcome.clause["color"]
    outcome.colored = hits = seen.count(color)
    if hits < outcome.wanted:
        order = [c for c in COLORS if c in seen] + sorted(set(seen) - set(COLORS))  # official
        listed = ", ".join(f"{seen.count(c)} {c}" for c in order)
        wanted = f"{color} {name}>={outcome.wanted}"
        outcome.reason = f"expected {wanted}, found {hits} {color}; and {listed}"


def _judge_position(outcome: _Outcome, earlier: Sequence[_Outcome], dead_zone: float) -> None:
    """Judge the position of a clause whose count and colour hold: every pair must show it."""
    name, (relation, index) = outcome.clause["class"], outcome.clause["position"]
    if not -len(earlier) <= index < len(earlier):  # a list's rule, so -1 is the clause before
        raise ValueError(f"the position of {name!r} must refer to an earlier include clause.")
    target = earlier[index]
    outcome.relation = not target.reason
    outcome.no_target = bool(target.reason)
    if outcome.no_target:
        outcome.reason = f"no target for {name} to be {relation}"
        return
    for box, reference in product(outcome.boxes, target.boxes):
        seen = relations(box, reference, dead_zone)
        if relation not in seen:
            listed = " and ".join(sorted(seen))
            outcome.relation = False
            outcome.reason = f"expected {name} {relation} target, found {listed} target"
            return


def _bounded_terms(outcome: _Outcome) -> list[float]:
    """The terms of one include clause in partial_credit's "bounded"; how many is fixed by it."""
    terms = [max(0.0, 1 - abs(outcome.wanted - outcome.count) / outcome.wanted)]
    if "color" in outcome.clause:
        terms.append((outcome.colored or 0) / outcome.wanted)
    if "position" in outcome.clause:
        terms.append(1.0 if outcome.relation else 0.0)
    return terms


def _published_terms(outcome: _Outcome) -> list[float]:
    """The terms of one include clause in the reward server's `scores`, quirks included."""
    terms = [1 - abs(outcome.wanted - outcome.count) / outcome.wanted]
    if outcome.count != outcome.wanted:
        return terms + ([0.0] if {"color", "position"} & set(outcome.clause) else [])
    if outcome.colored is not None:
        terms.append(1 - abs(outcome.wanted - outcome.colored) / outcome.wanted)
    if outcome.no_target:
        terms.append(0.0)
    elif outcome.relation is not None:
        terms += [1.0] if outcome.relation else [0.0, 1.0]
    return terms
