"""The model card of an adapter: base and licence, how to load it, scores, config.

The text is card.md.j2, the YAML above it huggingface_hub's ModelCardData with the held-out scores.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from flowalign import __version__, rewards
from flowalign.backbone.adapters import adapter_folder, is_hub_id, read_lora
from flowalign.config import EvalStage, Stage, TrainingStage, parse, to_yaml
from flowalign.system.escape import block, code, escaped, shown, table
from flowalign.training import metrics
from flowalign.training.preflight import span
from flowalign.training.report import results

# The models under Stability's community licence.
STABILITY = [f"stable-diffusion-{size}" for size in ("3.5-medium", "3.5-large", "3-medium")]
PROGRAMS = {
    "flowalign": "flowalign",
    "cli.py": "flowalign",  # python -m flowalign.commands.cli
    "train.py": "accelerate launch train.py",
}
CONFIG = "config.yaml"  # of the run: next to the card on the Hub, one folder up before
REPORT = "report.md"  # of a merge: what was done, in its first line, and the error of each layer
SCORES = "## Scores"
SECTION = re.compile(rf"\n{SCORES}.*?(?=\n## |\Z)", re.DOTALL)


class NoScores(ValueError):
    """Results that hold no scores of this adapter: what was seen, what to do."""


def write_card(folder: Path, config: Stage, argv: Sequence[str]) -> None:
    """Write folder/adapter/README.md for the run in a folder. argv: its command, program first."""
    card(folder, config, command(argv)).save(folder / "adapter" / "README.md")


def command(argv: Sequence[str]) -> str | None:
    """The command line of the run; None if another program made it, such as a notebook's kernel."""
    program = PROGRAMS.get(Path(argv[0]).name)
    return f"{program} {shlex.join(argv[1:])}" if program else None


def card(folder: Path, config: Stage, made_by: str | None = None) -> ModelCard:
    """The card of the run in a folder: its adapter, and the scores of its log. A merge has no
    scores. made_by: the run's command."""
    base, tasks, scored = config.model.id, [], []
    adapter, starts = read_lora(folder / "adapter"), config.inputs.get("lora.init")
    title, scores = SCORES, "(none: a merge takes none)"
    if isinstance(config, TrainingStage):
        tasks = [task.name for task in config.tasks]
        rows, chosen = results.evaluations(folder), results.kept(folder)
        sets = {task.name: task.validation or task.prompts for task in config.tasks}
        sets |= {benchmark.name: benchmark.prompts for benchmark in config.watched}
        for key, value in chosen.row.items() if chosen else ():
            benchmark, _, metric = key.removeprefix(metrics.EVAL).rpartition("/")
            if key.startswith(metrics.EVAL) and benchmark in sets:
                scored.append(_result(benchmark, sets[benchmark], metric, value))
        title = f"{SCORES} on held-out prompts while training"
        scores = score_table(rows, chosen and chosen.row, "`lora.init`" if starts else "base")
        if chosen and config.evaluation:
            model, sampling = config.model, config.evaluation_sampling
            scores += (
                f" {sampling.steps} Euler steps, guidance {sampling.guidance:g}, seed "
                f"{sampling.seed}, {model.listed_sizes}, {model.dtype}, at most "
                f"{config.evaluation.prompts} prompts a task."
            )
    fields: dict[str, Any] = licence(base)
    if is_hub_id(base):  # the Hub would link a folder's name to somebody else's model
        fields |= {"base_model": base, "base_model_relation": "adapter"}
    data = ModelCardData(
        **fields,
        library_name="diffusers",
        pipeline_tag="text-to-image",
        tags=["lora", "text-to-image", "flow-matching", "flowalign"],
        model_name=folder.name,
        eval_results=scored or None,
    )
    return ModelCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("card.md.j2")),
        name=escaped(folder.name),
        version=__version__,
        base=base,
        base_code=code(base),
        base_text=json.dumps(base, ensure_ascii=False),
        stage=config.stage,
        tasks=", ".join(map(escaped, tasks)),
        source_text=json.dumps(str(folder / "adapter"), ensure_ascii=False),
        lora=adapter,
        rank=span(adapter.ranks),
        scale=span(adapter.scales),
        scores_title=title,
        scores=scores,
        origins=origins(folder, config),
        # a line break in it would end its block
        command=made_by if not made_by or made_by.isprintable() else shown(made_by, 2000),
        overruled=starts,
        file=f"../{CONFIG}",
        config=block(to_yaml(config), "yaml"),
    )


def licence(base: str) -> dict[str, str]:
    """The fields of the base's licence, which holds for adapters, too; {} if it is not known."""
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


def origins(folder: Path, config: Stage) -> str:
    """The base, adapters and rewards of a run as a Markdown list, with their licences if known."""
    terms = licence(config.model.id)
    licensed = terms.get("license_link") or terms.get("license") or "see there"
    lines = [f"base {code(config.model.id)}; its licence holds for this adapter, too: {licensed}"]
    bases = config.bases.items()
    lines += [f"{escaped(key)}: base {code(base.id)}; see its licence" for key, base in bases]
    lines += [f"{escaped(key)}: {code(source)}" for key, source in config.inputs.items()]
    if isinstance(config, TrainingStage):
        lines += [
            f"guidance of {escaped(key)}: {scale:g}, where the student is trained at "
            f"{config.guidance:g}: a mixture of two scales"
            for key, scale in config.mixtures.items()
        ]
        lines += [
            f"{escaped(key)}: extrapolated from the {teacher.reference} by {teacher.extrapolate:g}"
            for key, teacher in config.extrapolated.items()
        ]
        use = "reward" if config.learns_from_rewards else "scored, but not trained, by the reward"
        scored = config.tasks if config.learns_from_rewards or config.evaluation else []
        lines += [
            f"{escaped(task.name)}: {use} {judge(task.reward.name, task.reward.options)}"
            for task in scored
            if task.reward
        ]
    if (report := folder / REPORT).is_file():
        first = report.read_text(encoding="utf-8").partition("\n")[0]
        lines.append(f"merged as: {escaped(first)}")
    return "\n".join(f"- {line}" for line in lines)


def judge(name: str, options: Mapping[str, Any]) -> str:
    """A reward with these options as Markdown, and the licences of what they use, if known."""
    components = [*options.get("rewards", ()), options.get("reward"), options.get("gate")]
    if specs := [spec for spec in components if isinstance(spec, Mapping)]:
        return (
            f"{code(name)} of {', '.join(judge(s['name'], s.get('options') or {}) for s in specs)}"
        )
    reward = rewards.declared(name, imports=False)
    chosen = reward.chosen(**options)
    notes = [reward.licence] if reward.licence else []
    if isinstance(chosen, str):
        terms = reward.choices.get(chosen)
        notes.append(f"{reward.choice[0]} {code(chosen)}" + (f": {terms}" if terms else ""))
    return code(name) + (f" ({'; '.join(notes)})" if notes else "")


# Scores of the run -------------------------------------------------------------------------------


def _result(benchmark: str, prompts: str, metric: str, value: float) -> EvalResult:
    return EvalResult(
        task_type="text-to-image",
        # the name of a file, not its path on this machine
        dataset_type=prompts if prompts.startswith("tiny/") else Path(prompts).name,
        dataset_name=benchmark,
        metric_type=metric,
        metric_name=metric,
        metric_value=round(value, 6),
    )


def score_table(
    rows: Sequence[Mapping[str, Any]], own: Mapping[str, Any] | None, start: str
) -> str:
    """First evaluation of a run, the one that chose its adapter, and the last, as Markdown. start:
    what it started from."""
    if own is None:
        return "(none were taken of this adapter)" if rows else "(none were taken)"
    first, last = rows[0], rows[-1]
    title = start if first["update"] == 0 else "first"  # the start's may not have counted
    names, digits = [name for name in first if name.startswith(metrics.EVAL)], 3
    if names == [metrics.HEADLINE]:  # without rewards it is minus the mean of these distances
        names, digits = [name for name in first if name.startswith(metrics.FIXED_PATH)], 4
    lines = []
    for name in names:
        cells = [f"{row.get(name, float('nan')):.{digits}f}" for row in (first, own, last)]
        lines.append([escaped(name.removeprefix(metrics.EVAL)), *cells])
    note = (
        f"Taken at updates {first['update']}, {own['update']} and {last['update']}; this adapter "
        "was chosen by its headline on these very prompts."
    )
    return "\n".join([*table(["metric", title, "this adapter", "last"], lines), "", note])


# Scores of a later evaluation --------------------------------------------------------------------


def add_results(card: ModelCard, document: Mapping[str, Any], path: Path, adapter: Path) -> str:
    """Replace the scores of a card by the scores of an evaluation; returns its config as YAML.

    document, path: a results.json as read, and where it lies. Raises NoScores if none of its models
    is `adapter`, by the digest that the evaluation's images tell, else by its folder. The table.md
    of the evaluation must lie beside them.
    """
    name = _name_of(document, path, adapter)
    config = parse(document.get("config"), stage=EvalStage)
    prompts = {benchmark.name: benchmark.prompts for benchmark in config.benchmarks}
    card.data["eval_results"] = [
        _result(row["benchmark"], prompts[row["benchmark"]], row["metric"], row["mean"])
        for row in document["models"][name]["rows"]
        if row["mean"] is not None
    ]
    card.data["model_name"] = card.data.get("model_name") or adapter.parent.name
    scores = (path.parent / "table.md").read_text(encoding="utf-8")
    measured = f"This adapter is {code(name)}. Measured by `flowalign eval --config eval.yaml`."
    section = f"\n{SCORES}\n\n{measured}\n\n{scores}"
    text, count = SECTION.subn(lambda _: section, card.text, count=1)
    card.text = text if count else text + section
    return to_yaml(config)


def _name_of(document: Mapping[str, Any], path: Path, adapter: Path) -> str:
    digest, others = read_lora(adapter).digest, []
    for name, model in document["models"].items():
        source = model.get("adapter")
        if source is None:
            continue
        # of the adapter that sampled the images, as their folders say (eval/store.py)
        files = (path.parent / "images" / name).glob("*/settings.json")
        digests = {json.loads(f.read_text(encoding="utf-8")).get("adapter") for f in files}
        same_place = not digests and adapter_folder(source).resolve() == adapter.resolve()
        if digests == {digest} or same_place:
            return name
        others.append(f"{name} ({source})")
    raise NoScores(
        f"{path} has no scores of the adapter in {adapter}: it has {', '.join(others) or 'none'}. "
        "If that was trained on since, evaluate it again."
    )
