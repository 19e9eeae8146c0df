"""The commands for notebooks: `flowalign.score`, `flowalign.evaluate`, `flowalign.train`.

They run the configs that the commands run; a mapping, a file and a typed config are the same thing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from flowalign import rewards as registry
from flowalign.commands import SD35, run
from flowalign.commands.init import family_folder
from flowalign.config import EvalStage, Stage, load, parse, read
from flowalign.config.loading import run_config
from flowalign.eval.compare import load_results
from flowalign.eval.evaluation import evaluate as run_evaluation
from flowalign.report.pictures import score_text, sheet
from flowalign.report.progress import OnMetrics, figures
from flowalign.report.summary import kept_adapter
from flowalign.system.files import expanded, read_lines, replacing
from flowalign.system.folder import RunFolder
from flowalign.system.images import image_files, in_order, read_image, stacked
from flowalign.system.packages import require
from flowalign.system.table import Table
from flowalign.training import metrics
from flowalign.training.data import load_prompts
from flowalign.training.run import lock
from flowalign.types import Scores

Prompts = str | Path | Sequence[str | Mapping[str, Any]]
"""A prompt set as in a config, or a list: texts, or mappings with `prompt` and metadata."""


LINES = 5  # of what `print` shows


@dataclass(frozen=True, repr=False)
class Scored:
    """Images with their scores. `scores` has the value, parts and reasons of each."""

    images: Tensor  # [B,3,H,W] in [0,1]
    prompts: list[str]
    scores: Scores

    @property
    def columns(self) -> dict[str, list[Any]]:
        """The prompts, and the value and every part of the scores: B each."""
        parts = {"value": self.scores.value, **self.scores.parts}
        return {"prompt": self.prompts} | {name: part.tolist() for name, part in parts.items()}

    def plot(self) -> Image.Image:
        """The images with their scores and prompts: a grid."""
        rows = zip(self.scores.value.tolist(), self.prompts, strict=True)
        return sheet(self.images, [f"{score_text(value)}: {prompt}" for value, prompt in rows])

    def to_pandas(self) -> Any:
        """`columns` as a DataFrame. Raises MissingPackage without pandas."""
        return require("pandas", "to_pandas needs").DataFrame(self.columns)

    def __repr__(self) -> str:
        scores = self.scores
        lines = [f"{int(scores.valid.sum())} of {len(self.prompts)} images have a score"]
        lines += [f"failed: {reason}" for reason in list(scores.failures.values())[:1]]
        for name, part in {"value": scores.value, **scores.parts}.items():
            if len(known := part[part.isfinite()]):
                spread = f"{known.min():.4g} to {known.max():.4g}"
                lines.append(f"{name}: mean {known.mean():.4g} ({spread})")
        return "\n".join(lines[:LINES])

    def _repr_html_(self) -> str:
        prompts, *numbers = self.columns.values()
        texts = ([f"{number:.4g}" for number in column] for column in numbers)
        return Table([*self.columns], [*zip(prompts, *texts, strict=True)]).html()


@dataclass(frozen=True, repr=False)
class Run:
    """The folder of a run or an evaluation."""

    folder: Path

    @property
    def adapter(self) -> Path:
        """The adapter, as `flowalign.load(model, lora=...)` takes it."""
        return RunFolder(self.folder).adapter

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of the log, one an update."""
        return read_lines(RunFolder(self.folder).log)

    @cached_property
    def results(self) -> dict[str, Any]:
        """results.json of an evaluation: every number of every model, and every image's scores."""
        return json.loads(RunFolder(self.folder).results.read_text(encoding="utf-8"))

    def plot(self) -> Image.Image:
        """The curves of a run, or the images of all models of an evaluation."""
        folder = RunFolder(self.folder)
        return read_image(folder.grid if folder.grid.is_file() else folder.curves)

    def to_pandas(self) -> Any:
        """As a DataFrame: every metric of every model of an evaluation, a row each, or the log of a
        run. Raises MissingPackage without pandas."""
        rows = self.metrics
        if RunFolder(self.folder).results.is_file():
            models = self.results["models"].items()
            rows = [{"model": name, **row} for name, about in models for row in about["rows"]]
        return require("pandas", "to_pandas needs").DataFrame(rows)

    def __repr__(self) -> str:
        lines = [f"kept: {chosen}" for chosen in [kept_adapter(self.folder)] if chosen]
        if RunFolder(self.folder).results.is_file():
            heads, *rows, _ = self.results["tables"][0]["rows"]  # the last has the counts
            pairs = ((name, zip(heads[1:], row, strict=True)) for name, *row in rows)
            lines = [f"{name}: {', '.join(map(' '.join, both))}" for name, both in pairs]
        elif log := [row for row in self.metrics if metrics.LOSS in row]:
            numbers = ", ".join(map(" ".join, figures(log[-1])))
            lines.insert(0, f"update {log[-1][metrics.UPDATE]}: {numbers}")
        cut = [f"and {len(lines) - LINES + 2} more"] if len(lines) >= LINES else []
        return "\n".join([str(self.folder), *lines[: LINES - 1 - len(cut)], *cut])

    def _repr_html_(self) -> str:
        tables = self.results.get("tables", []) if RunFolder(self.folder).results.is_file() else []
        rows = [table["rows"] for table in tables]
        return "".join(Table(own[0], own[1:]).html() for own in rows) or str(self.folder)


def score(images: Any, prompts: Prompts, reward: Any, **options: Any) -> Scored:
    """Score images as a run does: an image on which the reward fails is NaN, with a reason.

    images: a list of PIL images or tensors [3,H,W] in [0,1], a batch [B,3,H,W], or a folder, whose
    files are taken in the order of their numbers. prompts: one per image, in that order. reward: a
    name with its options, or a callable (images, prompts, metadata) -> Scores.
    """
    if isinstance(images, str | Path):
        images = list(map(read_image, in_order(image_files(expanded(Path(images))))))
    rows, pixels = _rows(prompts), stacked(images)
    if isinstance(reward, str):
        reward = registry.RewardSpec(reward, options).build()
    texts = [row["prompt"] for row in rows]
    return Scored(pixels, texts, registry.score(reward, pixels, texts, rows))


def evaluate(
    models: Mapping[str, str | Path | Mapping[str, Any] | None],
    prompts: Prompts,
    rewards: Sequence[str] | Mapping[str, Mapping[str, Any]],
    *,
    model: str = "tiny",
    output: str | Path = "outputs/evaluation",
    overwrite: bool = False,
    **keys: Any,
) -> Run:
    """Score models on prompts, as `flowalign eval`: a table with errors and paired differences.

    models: {name: adapter, None for the base, or {"images": FOLDER}}; all are compared with the
    first. rewards: names, or {name: options}. model: the base. overwrite: as for `train`. keys: of
    the config (`flowalign.config.EvalStage`), over those of the family's shipped evaluation, such
    as sampling={"steps": 10}.
    """
    shipped = read((family_folder(model) or SD35) / "eval.yaml")
    named = rewards if isinstance(rewards, Mapping) else dict.fromkeys(rewards, {})
    benchmarks = [
        {
            "name": name.rpartition(":")[2],
            "prompts": prompts,
            "reward": {"name": name, "options": o},
        }
        for name, o in named.items()
    ]
    adapters = {name: str(s) if isinstance(s, Path) else s for name, s in models.items()}
    data = {"stage": "eval", "sampling": shipped["sampling"], "benchmarks": benchmarks, **keys}
    data |= {"model": shipped["model"] | {"id": model}, "models": adapters, "output": str(output)}
    return train(data, overwrite=overwrite)


def train(
    config: Stage | Mapping[str, Any] | str | Path, *, resume: bool = False,
    overwrite: bool = False, on_update: OnMetrics | None = None,
) -> Run:  # fmt: skip
    """Run a config: a typed one (`flowalign.config.NftStage(...)`), a mapping, or a YAML file.

    Prompt sets may be lists. Raises ConfigError for what `flowalign train` refuses, TrainingError
    or EvaluationError where a run has to stop. resume: go on from the last checkpoint. overwrite:
    first remove the run or the evaluation that `output` holds, for a cell of a notebook that is run
    again. on_update: `on_update(metrics)` is called by the main process with each row of
    metrics.jsonl as it is written, a dict with `update`: after every update and every held-out
    evaluation of training. An exception in it ends the run.
    """
    if resume and overwrite:
        raise ValueError("resume goes on from what overwrite removes. Give one of them.")
    home = Path()
    raw = config
    if isinstance(config, str | Path):
        config = expanded(config)
        home = Path(config).parent
        registry.add_config_folder(config)
        config = load(config, stage=Stage)
    elif not isinstance(config, Stage):
        config = parse(_with_files(config), stage=Stage)
    stage: Any = config
    if overwrite:  # only now: a config that is refused removes nothing
        remove_run(Path(stage.output))
        if isinstance(raw, Mapping):
            _with_files(raw)
    if stage.command == EvalStage.command:
        return Run(run_evaluation(stage))
    run.run_job(stage, home, resume, on_update=on_update)
    return Run(Path(stage.output))


def remove_run(folder: Path) -> None:
    """Remove the folder of a run, a recipe or an evaluation, if it holds one and none runs there.
    Raises ValueError for a folder that is another's."""
    run = RunFolder(folder)
    ran = run.config.is_file()
    if not (ran or run.results.is_file()):
        return
    lock.check_free(folder)
    keys = run_config(folder) if ran else load_results(folder)["config"]
    whole = folder.resolve()
    if Path(keys["output"]).resolve() != whole or Path.cwd().is_relative_to(whole):
        raise ValueError(f"overwrite: {folder} is not the output of a run. Remove it yourself.")
    shutil.rmtree(folder)


def _rows(prompts: Prompts) -> list[dict[str, Any]]:
    if isinstance(prompts, str | Path):
        batch = load_prompts(prompts, "")
        both = zip(batch.prompts, batch.metadata, strict=True)
        return [{**metadata, "prompt": prompt} for prompt, metadata in both]
    return [{"prompt": row} if isinstance(row, str) else dict(row) for row in prompts]


def _with_files(config: Mapping[str, Any]) -> dict[str, Any]:
    """Write the config's lists of prompts to files below its output; returns the config with their
    paths."""
    data = dict(config)
    for key in {"tasks", "benchmarks"} & data.keys():
        data[key] = [dict(part) for part in data[key]]
        for part in data[key]:
            for kind in {"prompts", "validation"} & part.keys():
                if isinstance(part[kind], str | Path | None):
                    continue
                file = Path(expanded(data["output"])) / "prompts" / f"{part['name']}_{kind}.jsonl"
                with replacing(file) as written:
                    written.write_text("".join(f"{json.dumps(r)}\n" for r in _rows(part[kind])))
                part[kind] = str(file)
    return data
