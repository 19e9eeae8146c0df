"""The commands for notebooks: `flowalign.score`, `flowalign.evaluate`, `flowalign.train`.

They run the configs that the commands run; a mapping, a file and a typed config are the same thing.
"""

from __future__ import annotations

import json
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
from flowalign.eval.evaluation import evaluate as run_evaluation
from flowalign.report.pictures import score_text, sheet
from flowalign.report.progress import OnMetrics
from flowalign.report.summary import kept_adapter
from flowalign.system.files import expanded, read_lines, replacing
from flowalign.system.folder import RunFolder
from flowalign.system.images import image_files, in_order, read_image, stacked
from flowalign.system.table import Table
from flowalign.training.data import load_prompts
from flowalign.types import Scores

Prompts = str | Path | Sequence[str | Mapping[str, Any]]
"""A prompt set as in a config, or a list: texts, or mappings with `prompt` and metadata."""


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

    def _table(self) -> Table:
        prompts, *numbers = self.columns.values()
        texts = ([f"{number:.4g}" for number in column] for column in numbers)
        return Table([*self.columns], [*zip(prompts, *texts, strict=True)])

    def __repr__(self) -> str:
        return self._table().markdown()

    def _repr_html_(self) -> str:
        return self._table().html()


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

    def _tables(self) -> list[Table]:
        if not RunFolder(self.folder).results.is_file():
            return []
        listed = [table["rows"] for table in self.results["tables"]]
        return [Table(rows[0], rows[1:]) for rows in listed]

    def __repr__(self) -> str:
        lines = [str(self.folder)]
        if chosen := kept_adapter(self.folder):
            lines.append(f"kept: {chosen}")
        return "\n".join([*lines, *(table.markdown() for table in self._tables())])

    def _repr_html_(self) -> str:
        return "".join(table.html() for table in self._tables()) or str(self.folder)


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
    **keys: Any,
) -> Run:
    """Score models on prompts, as `flowalign eval`: a table with errors and paired differences.

    models: {name: adapter, None for the base, or {"images": FOLDER}}; all are compared with the
    first. rewards: names, or {name: options}. model: the base. keys: of the config
    (`flowalign.config.EvalStage`), over those of the family's shipped evaluation, such as
    sampling={"steps": 10}.
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
    return train(data)


def train(
    config: Stage | Mapping[str, Any] | str | Path, *, resume: bool = False,
    on_update: OnMetrics | None = None,
) -> Run:  # fmt: skip
    """Run a config: a typed one (`flowalign.config.NftStage(...)`), a mapping, or a YAML file.

    Prompt sets may be lists. Raises ConfigError for what `flowalign train` refuses, TrainingError
    or EvaluationError where a run has to stop. resume: go on from the last checkpoint. on_update:
    `on_update(metrics)` is called by the main process with each row of metrics.jsonl as it is
    written, a dict with `update`: after every update and every held-out evaluation of training. An
    exception in it ends the run.
    """
    home = Path()
    if isinstance(config, str | Path):
        config = expanded(config)
        home = Path(config).parent
        registry.add_config_folder(config)
        config = load(config, stage=Stage)
    elif not isinstance(config, Stage):
        config = parse(_with_files(config), stage=Stage)
    stage: Any = config
    if stage.command == EvalStage.command:
        return Run(run_evaluation(stage))
    run.run_job(stage, home, resume, on_update=on_update)
    return Run(Path(stage.output))


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
