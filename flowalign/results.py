"""What a command says at its end: where its results lie, and what can be done next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from flowalign.config import RecipeStage, Stage

PLACES = {  # below the folder of a run, in the order in which they are of use
    "report": "report.html",
    "grid": "grid.png",
    "table": "table.md",
    "numbers": "results.json",
    "page": "watch.html",
    "adapter": "adapter",
    "checkpoint": "checkpoints",
    "metrics": "metrics.jsonl",
    "curves": "metrics.png",
    "samples": "samples",
    "before, after": "before_after.png",
    "merge": "report.md",
    "images": "images",
    "config": "config.yaml",
}
PARTS = ("report", "grid", "adapter")  # what is named of a stage of a recipe
PAGES = ("report", "page")


def summary(config: Stage) -> str:
    """Where the results of a stage lie, one line each, and what comes next. Only what is there."""
    folder = Path(config.output)
    places = _found(folder)
    if isinstance(config, RecipeStage):
        for name in config.stages:
            stage = _found(folder / name)
            places |= {f"{name}: {kind}": stage[kind] for kind in PARTS if kind in stage}
    return _text(places, list(_next(places)))


def merged(adapter: str | Path) -> str:
    """The same for the adapter that `flowalign merge` wrote."""
    return _text({"adapter": Path(adapter)}, [_sample(Path(adapter))])


def _found(folder: Path) -> dict[str, Path]:
    """What there is below the folder of a run: {what: path}."""
    places = {what: folder / name for what, name in PLACES.items()}
    if newest := sorted((folder / "checkpoints").glob("update_*"))[-1:]:
        places["checkpoint"] = newest[0]
    return {what: path for what, path in places.items() if path.exists()}


def _next(places: Mapping[str, Path]) -> Iterator[str]:
    pages = [path for what, path in places.items() if what.endswith(PAGES)]
    for path in pages[:1]:
        yield f"open {path} in a browser"
    if adapter := places.get("adapter"):
        yield _sample(adapter)
        yield f"flowalign push {shlex.quote(str(adapter.parent))} --repo YOU/NAME --dry-run"


def _sample(adapter: Path) -> str:
    return f"flowalign sample 'a red sign that says \"CAT\"' --lora {shlex.quote(str(adapter))}"


def _text(places: Mapping[str, Path], steps: Sequence[str]) -> str:
    width = max(map(len, places), default=0)
    lines = [f"  {what:{width}}  {path}" for what, path in places.items()]
    return "\n".join(["", "Results:", *lines, "Next:", *(f"  {step}" for step in steps)])
