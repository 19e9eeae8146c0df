"""The model card of an adapter: what the Hub's head of YAML says, how to load it, scores, config.

The head is huggingface_hub's (ModelCardData): base and its licence, tags, and the held-out scores
as a model-index. The text says what was measured by which command.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowalign import metrics
from flowalign.adapters import hub
from flowalign.adapters.files import adapter_digest, adapter_folder
from flowalign.config import EvalStage, Job, MergeStage, TrainingStage, mixtures, parse, to_yaml
from flowalign.preflight import adapters

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

STABILITY = (
    "stable-diffusion-3.5-medium",
    "stable-diffusion-3.5-large",
    "stable-diffusion-3-medium",
)
# of code and weights, where their repositories say so; the terms of training data are others
LICENSES = {
    "deqa": "MIT",
    "geneval": "MIT; its detector Mask2Former has a licence of its own",
    "hpsv2": "Apache-2.0",
    "hpsv3": "Apache-2.0",
    "imagereward": "Apache-2.0",
    "ocr": "Apache-2.0 (RapidOCR, PaddleOCR)",
}
REPORT = "report.md"  # of a merge: what was done, in its first line, and the error of each layer
SECTION = re.compile(r"\n## Scores.*?(?=\n## |\Z)", re.DOTALL)
COMMAND = "flowalign train --config config.yaml"
SCORES, HELD_OUT = "## Scores", "## Scores on held-out prompts while training"

TEMPLATE = """
# {name}

A LoRA for `{base}`, made by flowalign {version} with `{stage}`{aim}.

## How to load it

{load}

{held_out}

{scores}

## What went into it

{origins}

## How it was made

    {command}

The whole config, as `config.yaml` beside this:

```yaml
{config}```
"""

LOAD = """```python
import flowalign
pipe = flowalign.load("{base}", lora="{source}")
```"""
DIFFUSERS = """

or, in plain diffusers,

```python
import torch
from diffusers import StableDiffusion3Pipeline
pipe = StableDiffusion3Pipeline.from_pretrained("{base}", torch_dtype=torch.bfloat16)
pipe.load_lora_weights("{source}")
pipe("a prompt", max_sequence_length={length})  # the T5 tokens of its training
```"""


def write_card(folder: Path, config: TrainingStage | MergeStage, argv: Sequence[str]) -> None:
    """folder/adapter/README.md: of a training run from its log, of a merge without scores.

    argv: the command line that made it, program first.
    """
    path = folder / "adapter" / "README.md"
    path.write_text(str(card(folder, config, command(argv))), encoding="utf-8")


def card(folder: Path, config: TrainingStage | MergeStage, made_by: str = COMMAND) -> ModelCard:
    """The card of a run in a folder."""
    rows = evaluations(folder) if isinstance(config, TrainingStage) else []
    results = _held_out(config, rows) if isinstance(config, TrainingStage) and rows else []
    return made(head(config, folder.name, results), _body(folder, config, rows, made_by))


def made(data: ModelCardData, body: str) -> ModelCard:
    """A card of a head and a text."""
    from huggingface_hub import ModelCard

    return ModelCard(f"---\n{data.to_yaml()}\n---\n{body}", ignore_metadata_errors=True)


def command(argv: Sequence[str]) -> str:
    """A command line that someone else can give. One of another program (a notebook's kernel, a
    test) says nothing: then it is the one that takes the run's own config."""
    program = Path(argv[0]).name
    names = {
        "flowalign": "flowalign",
        "cli.py": "flowalign",
        "train.py": "accelerate launch train.py",
    }
    if program not in names:
        return COMMAND
    return f"{names[program]} {shlex.join(argv[1:])}"


# The head ----------------------------------------------------------------------------------------


def head(config: Job, name: str, results: list[EvalResult]) -> ModelCardData:
    """The YAML that the Hub reads. A base that is no Hub model is not named in it: a link to one of
    that name would lead astray."""
    from huggingface_hub import ModelCardData

    base = config.model.id
    linked = {"base_model": base, "base_model_relation": "adapter"} if hub.is_id(base) else {}
    fields: dict[str, Any] = {**licence(base), **linked}
    return ModelCardData(
        **fields,
        library_name="diffusers",
        pipeline_tag="text-to-image",
        tags=["lora", "text-to-image", "stable-diffusion-3", "flow-matching", "flowalign"],
        model_name=name,
        eval_results=results or None,
    )


def licence(base: str) -> dict[str, str]:
    """The fields of the base's licence, which holds for what derives from it; none if unknown."""
    if base == "tiny":
        return {"license": "apache-2.0"}
    owner, _, name = base.partition("/")
    if owner != "stabilityai" or name.removesuffix("-diffusers") not in STABILITY:
        return {}
    return {
        "license": "other",
        "license_name": "stabilityai-ai-community",
        "license_link": f"https://huggingface.co/{base}/blob/main/LICENSE.md",
    }


def result(benchmark: str, prompts: str, metric: str, value: float) -> EvalResult:
    """One number of the model-index."""
    from huggingface_hub import EvalResult

    return EvalResult(
        task_type="text-to-image",
        dataset_type=prompts if prompts.startswith("tiny/") else Path(prompts).name,
        dataset_name=benchmark,
        metric_type=metric,
        metric_name=metric,
        metric_value=round(value, 6),
    )


# The text ----------------------------------------------------------------------------------------


def _body(folder: Path, config: Job, rows: Sequence[Mapping[str, Any]], made_by: str) -> str:
    from flowalign import __version__

    aim = ""
    if isinstance(config, TrainingStage):
        named = [
            f"{t.name} (reward `{t.reward.name}`)" if t.reward else t.name for t in config.tasks
        ]
        aim = f" on {', '.join(named)}"
    return TEMPLATE.format(
        name=folder.name,
        version=__version__,
        base=config.model.id,
        stage=config.stage,
        aim=aim,
        load=load_text(config.model.id, str(folder / "adapter"), config.model.max_sequence_length),
        held_out=HELD_OUT if isinstance(config, TrainingStage) else SCORES,
        scores=score_table(rows)
        if isinstance(config, TrainingStage)
        else "(none: a merge takes none)",
        origins=origins(config) + _merged_as(folder),
        command=made_by,
        config=to_yaml(config),
    )


def _merged_as(folder: Path) -> str:
    """What a merge did, by its report; "" where there is none."""
    report = folder / REPORT
    return f"\n- merged as: {report.read_text().splitlines()[0]}" if report.is_file() else ""


def load_text(base: str, source: str, length: int) -> str:
    """How the adapter is loaded from a folder or Hub id. length: T5 tokens of a prompt."""
    text = LOAD + (DIFFUSERS if base != "tiny" else "")
    return text.format(base=base, source=source, length=length)


def origins(config: Job) -> str:
    """The base, adapters and rewards that a run took, with what is known of their licences."""
    terms = licence(config.model.id)
    known = terms.get("license_link") or terms.get("license") or "see there"
    lines = [f"- base `{config.model.id}`; its licence holds for this adapter, too: {known}"]
    lines += [f"- {place}: `{source}`" for place, source in adapters(config).items()]
    if isinstance(config, TrainingStage):
        for place, scale in mixtures(config).items():
            lines.append(
                f"- guidance of {place}: {scale:g}, where the student is trained at "
                f"{config.guidance:g}: a mixture of two scales"
            )
        for task in config.tasks:
            if task.reward:
                name = task.reward.name
                note = f"; licence: {LICENSES[name]}" if name in LICENSES else ""
                lines.append(f"- reward of {task.name}: `{name}`{note}")
    return "\n".join(lines)


# Scores of the run -------------------------------------------------------------------------------


def evaluations(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's log that hold an evaluation; [] where there is no log."""
    log = folder / "metrics.jsonl"
    lines = log.read_text().splitlines() if log.is_file() else []
    return [row for row in map(json.loads, lines) if metrics.HEADLINE in row]


def _best(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return max(rows, key=lambda row: row[metrics.HEADLINE])


def _held_out(config: TrainingStage, rows: Sequence[Mapping[str, Any]]) -> list[EvalResult]:
    """The best evaluation, which is the adapter's, as a model-index."""
    prompts = {task.name: task.validation or task.prompts for task in config.tasks}
    watched = config.evaluation.watch if config.evaluation else []
    prompts |= {mark.name: mark.prompts for mark in watched}
    found = []
    for key, value in _best(rows).items():
        benchmark, _, metric = key.removeprefix(metrics.EVAL).rpartition("/")
        if key.startswith(metrics.EVAL) and benchmark in prompts:
            found.append(result(benchmark, prompts[benchmark], metric, value))
    return found


def score_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """First, best and last evaluation of a run as Markdown."""
    if not rows:
        return "(none were taken: `evaluation` was off)"
    best = _best(rows)
    names = [name for name in rows[0] if name.startswith(metrics.EVAL)]
    first = "base" if rows[0]["update"] == 0 else "first"  # the base's may not have counted
    table = [f"| metric | {first} | this adapter (best) | last |", "|---|---|---|---|"]
    for name in names:
        cells = [f"{row.get(name, float('nan')):.3f}" for row in (rows[0], best, rows[-1])]
        table.append(f"| {name.removeprefix(metrics.EVAL)} | " + " | ".join(cells) + " |")
    note = (
        f"Taken at updates {rows[0]['update']}, {best['update']} and {rows[-1]['update']}; the "
        "best one was chosen by its headline on these very prompts."
    )
    return "\n".join([*table, "", note])


# Scores of a later evaluation --------------------------------------------------------------------


class NoScores(ValueError):
    """Results that are not of this adapter: what was seen, what to do."""


def add_results(given: ModelCard, document: Mapping[str, Any], path: Path, adapter: Path) -> str:
    """Put the scores of an evaluation (results.json as read, and where it lies) into a card, in the
    place of those it had; returns the evaluation's config as YAML.

    The model of the results is the one whose adapter is `adapter`: by the digest of its weights
    where the evaluation's images tell one, else by its folder. Raises NoScores.
    """
    name = model_of(document, path, adapter)
    rows, config = document["models"][name]["rows"], parse(document["config"], stage=EvalStage)
    assert isinstance(config, EvalStage)
    prompts = {mark.name: mark.prompts for mark in config.benchmarks}
    given.data["eval_results"] = [
        result(row["benchmark"], prompts[row["benchmark"]], row["metric"], row["mean"])
        for row in rows
        if row["mean"] is not None
    ]
    given.data["model_name"] = given.data.get("model_name") or adapter.parent.name
    section = f"\n{SCORES}\n\n{_results_table(document, name, config)}\n"
    text, count = SECTION.subn(lambda _: section, given.text, count=1)
    given.text = text if count else text + section
    return to_yaml(config)


def model_of(document: Mapping[str, Any], path: Path, adapter: Path) -> str:
    """The name that the results have for an adapter."""
    mine, others = adapter_digest(adapter), []
    for name, model in document["models"].items():
        source = model["adapter"]
        if source is None:
            continue
        told = _digests(path.parent / "images" / name)
        same_place = adapter_folder(source).resolve() == adapter.resolve() if not told else False
        if told == {mine} or same_place:
            return name
        others.append(f"{name} ({source})")
    raise NoScores(
        f"{path} has no scores of the adapter in {adapter}: it has {', '.join(others) or 'none'}. "
        "If that was trained on since, evaluate it again."
    )


def _digests(images: Path) -> set[str]:
    """Of the adapter that sampled the images of a model, as its folders say (eval/store.py)."""
    files = images.glob("*/settings.json")
    return {str(json.loads(file.read_text(encoding="utf-8")).get("adapter")) for file in files}


def _results_table(document: Mapping[str, Any], name: str, config: EvalStage) -> str:
    models = document["models"]
    first = next(iter(models))
    theirs = {(r["benchmark"], r["metric"]): r for r in models[first]["rows"]}
    both = first != name
    lines = [
        f"| benchmark | metric |{f' {first} |' if both else ''} this adapter | prompts |",
        f"|---|---|{'---|' if both else ''}---|---|",
    ]
    for row in models[name]["rows"]:
        other = f" {_cell(theirs.get((row['benchmark'], row['metric'])))} |" if both else ""
        lines.append(f"| {row['benchmark']} | {row['metric']} |{other} {_cell(row)} | {row['n']} |")
    s, around = config.sampling, models[name].get("environment") or {}
    versions = ", ".join(f"{what} {version}" for what, version in around.items())
    note = (
        f"Mean ± standard error; {s.steps} Euler steps, guidance {s.guidance:g}, seed {s.seed}, "
        f"{config.model.height}x{config.model.width}, {config.model.dtype}. Measured by "
        f"`flowalign eval --config eval.yaml` with {versions}."
    )
    return "\n".join([*lines, "", note])


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None or row["mean"] is None:
        return "–"
    return f"{row['mean']:.3f}" + ("" if row["stderr"] is None else f" ± {row['stderr']:.3f}")
