"""`flowalign init`: a config for a stage, a model and rewards or teachers, explained by comments.

Values come from the shipped configs of the model's family (configs/FAMILY); where a family ships no
config for a stage, from those of Stable Diffusion 3.5. The meaning of a key is its docstring in
`flowalign.config`.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic_core import to_jsonable_python

from flowalign import rewards as reward_registry
from flowalign.backbone import ModelError, family_of, pipeline_name
from flowalign.backbone.adapters import adapter_folder
from flowalign.backbone.structure import find
from flowalign.config import STAGES, RecipeStage, Section, Stage, assignments, parse, read
from flowalign.config.model import LoraConfig
from flowalign.system.files import replacing
from flowalign.training.sources import validation_file

CONFIGS = Path(__file__).parent / "configs"
SD35 = CONFIGS / "sd35_medium"  # has configs for all stages
WIDTH = 100
ABOUT = {
    "grpo": "train a teacher on a reward",
    "nft": "train a teacher on a reward, from clean images (DiffusionNFT)",
    "awm": "train a teacher on a reward, from clean images (advantage weighted matching)",
    "opd": "train a student from teachers, by on-policy distillation",
    "sft": "train a student on images of its teachers",
    "merge": "merge adapters",
    "recipe": "merge teachers, train a student from the merge, compare all models",
    "eval": "score models on held-out prompts",
}
TEACHERS = ("grpo", "nft", "awm")  # the stages that learn from rewards
USED = {  # options that say what a config holds, by the stages that have it
    "reward": ("grpo", "nft", "awm", "opd", "sft", "recipe", "eval"),
    "teachers": ("opd", "sft", "recipe", "merge", "eval"),
    "prompts": ("grpo", "nft", "awm", "opd", "sft", "recipe", "eval"),
    "validation": ("grpo", "nft", "awm", "opd", "sft", "recipe"),
}


def parser() -> argparse.ArgumentParser:
    """The command line of `init`."""
    parser = argparse.ArgumentParser(
        "flowalign init",
        description="Write a config with the keys that matter and their meaning. In a terminal it "
        "asks for what is not given.",
    )
    stages = "; ".join(f"{name}: {text}" for name, text in ABOUT.items())
    parser.add_argument("--stage", choices=STAGES, help=stages)
    parser.add_argument("--model", help="tiny (default), a folder or a Hub id")
    parser.add_argument(
        "--reward",
        nargs="+",
        metavar="NAME",
        help="what scores the images, such as ocr, geneval or my_rewards:redness; one per task "
        "(grpo, nft, awm, opd, sft) or benchmark (eval)",
    )
    parser.add_argument(
        "--options", nargs="+", default=[], metavar="key=value", help="of a single --reward"
    )
    parser.add_argument(
        "--teachers",
        nargs="+",
        metavar="NAME=ADAPTER",
        help="adapter folders or Hub ids, by task (opd, sft, recipe), or what to merge or evaluate",
    )
    parser.add_argument("--prompts", nargs="+", metavar="FILE", help="one per reward or teacher")
    parser.add_argument(
        "--validation",
        nargs="+",
        metavar="FILE",
        help="held-out prompts, one per reward or teacher; without them evaluation is off",
    )
    parser.add_argument(
        "--all", action="store_true", help="write every key, those at their defaults, too"
    )
    parser.add_argument("--out", type=Path, help="file to write; default: STAGE.yaml")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    parser.add_argument("--yes", action="store_true", help="ask nothing, use the defaults")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 written, 2 refused."""
    args = parser().parse_args(argv)
    try:
        if sys.stdin.isatty() and not args.yes:
            ask(args)
        wanted = read_answers(args)
        notes = write_config(wanted, args.force, args.all)
    except (ValueError, OSError) as error:  # of the config, a reward, a file
        print(f"flowalign init: {error}", file=sys.stderr)
        return 2
    except EOFError:
        print("\nflowalign init: no answer; nothing was written.", file=sys.stderr)
        return 2
    print(wanted.out)
    for note in notes:
        print(f"note: {note}")
    print(f"next: flowalign doctor --config {wanted.out}")
    print(f"then: {STAGES[wanted.stage].command} --config {wanted.out}")
    return 0


# Questions ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answers:
    """What a config is written from. teachers: {name: adapter}. An empty collection = as in the
    shipped config. family: the folder of the shipped configs, None = the family is not known."""

    stage: str
    model: str
    family: Path | None
    rewards: list[str]
    options: dict[str, Any]
    teachers: dict[str, str]
    prompts: list[str]
    validation: list[str]
    out: Path

    def shipped(self, name: str) -> dict[str, Any]:
        """A shipped config of the family."""
        return read((self.family or SD35) / name)


QUESTIONS = {  # by option: what is asked, and the answer to an empty line
    "stage": (f"stage ({', '.join(ABOUT)})", "grpo"),
    "model": ("model (tiny, a folder or a Hub id)", "tiny"),
    "teachers": ("adapters, as NAME=FOLDER (empty: those of the shipped config)", ""),
    "reward": ("rewards, one per task (empty: those of the shipped config)", ""),
    "prompts": ("files of prompts, one per task (empty: those of the shipped config)", ""),
    "validation": ("files of held-out prompts, one per task (empty: those beside them)", ""),
}


def ask(args: argparse.Namespace) -> None:
    """Ask for what the command line does not give; writes the answers into args."""
    for option, (question, default) in QUESTIONS.items():
        while getattr(args, option) is None and args.stage in USED.get(option, (args.stage,)):
            shown = f" [{default}]" if default else ""
            answer = input(f"{question}{shown}: ").strip() or default
            if option == "stage" and answer not in STAGES:
                continue
            setattr(args, option, answer.split() if option in USED else answer)
    args.out = args.out or Path(
        input(f"file to write [{args.stage}.yaml]: ") or f"{args.stage}.yaml"
    )


def read_answers(args: argparse.Namespace) -> Answers:
    """The arguments, checked; ValueError for what no config could be written from."""
    if args.stage is None:
        raise ValueError(f"--stage: missing; want one of {', '.join(STAGES)}.")
    for option, stages in USED.items():
        if getattr(args, option) and args.stage not in stages:
            raise ValueError(
                f"--{option}: not for the stage {args.stage}; it is for {', '.join(stages)}."
            )
    if args.prompts and args.stage == "eval" and not args.reward:
        raise ValueError("--prompts: say what scores their images, too: --reward, one for each.")
    options = assignments(args.options)
    if options and len(args.reward or ()) != 1:
        raise ValueError("--options: they belong to one reward; give one --reward with them.")
    model = args.model or "tiny"
    return Answers(
        stage=args.stage,
        model=model,
        family=family_folder(model),
        rewards=args.reward or [],
        options=options,
        teachers=_read_teachers(args.stage, args.teachers or []),
        prompts=args.prompts or [],
        validation=args.validation or [],
        out=args.out or Path(f"{args.stage}.yaml"),
    )


def _read_teachers(stage: str, texts: Sequence[str]) -> dict[str, str]:
    """{name: adapter} of NAME=ADAPTER; where only a table or a merge names them, of folders."""
    teachers: dict[str, str] = {}
    for number, text in enumerate(texts, 1):
        name, equals, adapter = text.partition("=")
        if not equals and stage not in ("merge", "eval"):
            raise ValueError(f"--teachers: got {text!r}; want NAME=ADAPTER, as in ocr={text}.")
        if not equals:
            folder = adapter_folder(text)
            name, adapter = (folder.parent if folder.name == "adapter" else folder).name, text
        teachers[f"{name}_{number}" if name in teachers else name] = adapter
    return teachers


def family_folder(model: str) -> Path | None:
    """The folder of the shipped configs for the family of a model; None if there is none, or the
    family cannot be found out."""
    if model == "tiny":
        return CONFIGS / "tiny"
    try:
        family = family_of(_pipeline_of(model))
    except ModelError:
        return None
    for file in sorted(CONFIGS.glob("*/eval.yaml")):
        shipped_model = read(file)["model"]["id"]
        if shipped_model == "tiny":
            continue
        shipped = family_of(_pipeline_of(shipped_model))
        if issubclass(family, shipped) or issubclass(shipped, family):
            return file.parent
    return None


def _pipeline_of(model: str) -> str:
    """The class of a model's pipeline, from this machine if possible, else from the Hub."""
    try:
        return find(model).pipeline
    except LookupError:
        return pipeline_name(model)


# The config --------------------------------------------------------------------------------------


def build_config(wanted: Answers) -> dict[str, Any]:
    """The raw config of some answers; ValueError for numbers of files that do not fit."""
    makers = {
        **dict.fromkeys(TEACHERS, _teacher),
        "merge": _merge,
        "recipe": _recipe,
        "eval": _eval,
    }
    data = makers.get(wanted.stage, _student)(wanted)
    model = wanted.shipped("eval.yaml")["model"] | data.get("model", {})
    return data | {
        "stage": wanted.stage,
        "output": f"outputs/{wanted.out.stem}",
        "model": model | {"id": wanted.model},
    }


def _teacher(wanted: Answers) -> dict[str, Any]:
    """Of the stages that learn from rewards: the shipped teacher of the first reward."""
    names = wanted.rewards or ["ocr"]
    folder = wanted.family or SD35
    configs = _teacher_configs(folder, wanted.stage)
    if not configs:
        folder, configs = SD35, _teacher_configs(SD35, wanted.stage)
    by_reward = {data["tasks"][0]["reward"]["name"]: data for data in reversed(configs)}
    data = by_reward.get(names[0]) or by_reward.get("ocr") or configs[0]
    if folder != (wanted.family or SD35):  # the method of SD35, the model and guidance of its own
        if wanted.stage == "grpo":
            guidance = wanted.shipped("eval.yaml")["sampling"]["guidance"]
        else:
            guidance = wanted.shipped("student_flow_opd.yaml")["rollout"]["guidance"]
        data |= {"model": {}, "rollout": data["rollout"] | {"guidance": guidance}}
    return _with_tasks(data, wanted, list(map(_short, names)), names)


def _teacher_configs(folder: Path, stage: str) -> list[dict[str, Any]]:
    configs = map(read, sorted(folder.glob("teacher_*.yaml")))
    return [data for data in configs if data["stage"] == stage]


def _student(wanted: Answers) -> dict[str, Any]:
    """Of the stages opd and sft."""
    own = (wanted.family or SD35) / f"{wanted.stage}.yaml"
    data: dict[str, Any] = wanted.shipped(own.name if own.is_file() else "student_flow_opd.yaml")
    if wanted.stage == "sft":
        data = {"sft": {"states": 3}, **data}
        data = {key: value for key, value in data.items() if key not in ("student", "anchor")}
    if wanted.teachers:
        shipped = next(iter(data["teachers"].values()))
        data["teachers"] = {
            name: {**shipped, "adapter": source} for name, source in wanted.teachers.items()
        }
    names = list(data["teachers"])
    return _with_tasks(data, wanted, names, _one_each("--reward", wanted.rewards, len(names)))


def _merge(wanted: Answers) -> dict[str, Any]:
    shipped = wanted.shipped("student_flow_opd.yaml")["teachers"]
    adapters = list(wanted.teachers.values()) or [t["adapter"] for t in shipped.values()]
    return {"adapters": adapters, "method": "concat"}


def _recipe(wanted: Answers) -> dict[str, Any]:
    student = _student(replace(wanted, stage="opd"))  # its teachers, tasks and settings
    shared = ("model", "output", "seed", "stage")
    student = {key: value for key, value in student.items() if key not in shared}
    table = {key: value for key, value in _eval(wanted).items() if key not in shared}
    teachers = {name: teacher["adapter"] for name, teacher in student["teachers"].items()}
    unscored = [task["name"] for task in student["tasks"] if "reward" not in task]
    if unscored:
        raise ValueError(
            f"--reward: missing for {', '.join(unscored)}. Give one for each of the "
            f"{len(teachers)} teachers, in their order; it scores the images of the table."
        )
    benchmarks = [_benchmark(wanted, task) for task in student["tasks"]]
    table["benchmarks"] = [benchmark for benchmark in benchmarks if benchmark]
    models = {"base": None} | teachers
    stages: dict[str, Any] = {}
    if len(teachers) > 1:
        stages["merge"] = {"stage": "merge", "adapters": list(teachers.values())}
        student |= {"lora": {"init": "stage:merge"}}
        models["merge"] = "stage:merge"
    stages["student"] = {"stage": "opd", **student}
    if table["benchmarks"]:
        models["student"] = "stage:student"
        stages["table"] = {"stage": "eval", **table, "models": models}
    return {"seed": 0, "stages": stages}


def _benchmark(wanted: Answers, task: Mapping[str, Any]) -> dict[str, Any] | None:
    """A shipped task on its test prompts, another on its validation prompts; None without them."""
    row = {"name": task["name"], "reward": task["reward"]}
    tasks = wanted.shipped("student_flow_opd.yaml")["tasks"]
    names = {part["validation"]: part["name"] for part in tasks}
    for benchmark in wanted.shipped("eval.yaml")["benchmarks"]:
        if benchmark["name"] == names.get(task.get("validation")):
            return benchmark | row
    return row | {"prompts": task["validation"]} if "validation" in task else None


def _eval(wanted: Answers) -> dict[str, Any]:
    data = wanted.shipped("eval.yaml")
    data["models"] = {"base": None} | wanted.teachers
    if wanted.stage == "eval" and wanted.rewards:
        shipped = {part["reward"]["name"]: part for part in data["benchmarks"]}
        sets = _one_each("--prompts", wanted.prompts, len(wanted.rewards))
        general = data["benchmarks"][-1]["prompts"]
        data["benchmarks"] = [
            shipped.get(name, {"name": _short(name), "prompts": general})
            | {"reward": _reward(name, wanted)}
            | ({"prompts": file} if file else {})
            for name, file in zip(wanted.rewards, sets, strict=True)
        ]
    return data


def _with_tasks(
    data: dict[str, Any], wanted: Answers, names: Sequence[str], rewards: Sequence[str]
) -> dict[str, Any]:
    """The config with these tasks and their rewards ("" = that of the shipped task, if any)."""
    prompts = _one_each("--prompts", wanted.prompts, len(names))
    held_out = _one_each("--validation", wanted.validation, len(names))
    rows = zip(names, rewards, prompts, held_out, strict=True)
    data |= {"tasks": [_task(wanted, *row) for row in rows]}
    if not all({"validation", "reward"} <= task.keys() for task in data["tasks"]):
        data |= {"evaluation": None}
    return data


def _task(wanted: Answers, name: str, reward: str, prompts: str, held_out: str) -> dict[str, Any]:
    """A task; what is "" comes from the shipped task of that name or reward, if there is one."""
    shipped = _shipped_tasks(wanted)
    by_reward = {task["reward"]["name"]: task for task in shipped.values()}
    general = {key: shipped["preference"][key] for key in ("prompts", "validation")}
    like = by_reward.get(reward) or shipped.get(name) or general
    task: dict[str, Any] = {**like, "name": name}
    if reward:
        task["reward"] = _reward(reward, wanted)
    if prompts:
        validation = validation_file(Path(prompts))
        task |= {"prompts": prompts, "validation": str(validation) if validation.is_file() else ""}
    if held_out:
        task["validation"] = held_out
    keys = ("name", "weight", "prompts", "validation", "reward")
    return {key: task[key] for key in keys if task.get(key)}


def _shipped_tasks(wanted: Answers) -> dict[str, dict[str, Any]]:
    """The tasks of the family's student, and those of SD35 that it has not."""
    tasks = [*read(SD35 / "student_flow_opd.yaml")["tasks"]] if wanted.model != "tiny" else []
    tasks += wanted.shipped("student_flow_opd.yaml")["tasks"]
    return {task["name"]: task for task in tasks}


def _one_each(flag: str, given: Sequence[str], count: int) -> Sequence[str]:
    """The values of a flag, one for each task; "" each where none are given."""
    if given and len(given) != count:
        raise ValueError(
            f"{flag}: got {len(given)} for {count} tasks or benchmarks; give one each."
        )
    return given or [""] * count


def _reward(name: str, wanted: Answers) -> dict[str, Any]:
    """A reward with the options that the shipped configs give it. Raises ValueError for one that
    does not exist or wants other options."""
    rewards = (task["reward"] for task in _shipped_tasks(wanted).values())
    shipped = {reward["name"]: reward.get("options", {}) for reward in rewards}
    options = shipped.get(name, {}) | wanted.options
    reward_registry.check(name, options)
    return {"name": name} | ({"options": options} if options else {})


def _short(reward: str) -> str:
    """The name of a task for a reward: redness for my_rewards:redness."""
    return reward.rpartition(":")[2].rpartition(".")[2]


def _notes(wanted: Answers, data: Mapping[str, Any]) -> Iterator[str]:
    """What the reader of a config should know: what is not evaluated, and what not fairly."""
    if wanted.family is None:
        yield (
            f"the family of {wanted.model} is not known here, so the values are those of Stable "
            "Diffusion 3.5. Check model, guidance and steps."
        )
    student = data.get("stages", {}).get("student", data)
    if student.get("evaluation", "on") is None:
        needs = "every task a reward and held-out prompts (--reward, --validation)"
        yield f"evaluation is off, so the last weights are kept; to choose the best, give {needs}."
    if wanted.stage != "recipe":
        return
    table = data["stages"].get("table", {}).get("benchmarks", [])
    prompts = {row["name"]: row["prompts"] for row in table}
    for task in student["tasks"]:
        name = task["name"]
        if name not in prompts:
            yield f"the table does not score {name}: it has no held-out prompts (--validation)."
        elif prompts[name] == task.get("validation"):
            yield (
                f"the table scores {name} on its validation prompts, {prompts[name]}, which also "
                "choose the adapter. For a fair table name test prompts in stages.table."
            )


# The file ----------------------------------------------------------------------------------------


def write_config(wanted: Answers, force: bool, every: bool = False) -> list[str]:
    """Write the config, checked; returns what its reader should know. every: also write the keys at
    their defaults."""
    if wanted.out.exists() and not force:
        raise ValueError(f"--out: {wanted.out} is there already. Name another, or give --force.")
    data = build_config(wanted)
    config = parse(data, source=str(wanted.out), stage=Stage)
    if every:
        about = ["# Written by `flowalign init --all`: every key, under its meaning."]
    else:
        about = [
            "# Written by `flowalign init`: the keys that matter most, each under its meaning.",
            "# The others keep their defaults. To see them all: "
            f"flowalign init --stage {wanted.stage} --all",
        ]
    notes = list(_notes(wanted, data))
    about += [f"# {line}" for note in notes for line in textwrap.wrap(f"Note: {note}", WIDTH - 2)]
    head = [f"# {STAGES[wanted.stage].command} --config {wanted.out}", *about, ""]
    with replacing(wanted.out) as part:
        rows = [*head, *_Writer(every).rows(config)]
        part.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return notes


class _Writer:
    """Sections as lines of YAML, in the schema's order. The meaning of a key stands above its first
    use. every: with the keys at their defaults, too."""

    def __init__(self, every: bool) -> None:
        self.every = every
        self.explained: set[tuple[type[Section], str]] = set()

    def rows(self, section: Section, inside: bool = False) -> Iterator[str]:
        """The keys of a section; of a stage in a recipe, those that the recipe does not give it."""
        for key, field in type(section).model_fields.items():
            given = key in section.model_fields_set
            if not (given or self.every) or key not in section.__dict__:
                continue
            if inside and isinstance(section, Stage) and key in ("model", "output", "seed"):
                continue
            kind = _section_type(field.annotation)
            if (type(section), key) not in self.explained:
                self.explained.add((type(section), key))
                about = (kind.__doc__ or "").partition("\n\n")[0] if kind else ""
                meaning = " ".join((field.description or about).split())
                yield from (f"# {line}" for line in textwrap.wrap(meaning, WIDTH - 10))
            value = getattr(section, key)
            if isinstance(section, RecipeStage) and key == "stages":
                shared = {"model": section.model, "output": section.output}
                value = {n: STAGES[part["stage"]](**part, **shared) for n, part in value.items()}
            rows = self._entry(key, value, kind)
            if not given and isinstance(section, LoraConfig) and section.init:
                rows = _commented(rows)  # the adapter to start from brings its own
            yield from rows

    def _entry(self, key: str, value: Any, kind: type[Section] | None) -> Iterator[str]:
        """A key and its value; with `every`, an example of the section that it may hold."""
        if isinstance(value, Section):
            rows = self.rows(value, inside=True)
        elif isinstance(value, list) and value and isinstance(value[0], Section):
            rows = (row for item in value for row in _list_item(self.rows(item)))
        elif isinstance(value, dict) and any(isinstance(v, Section) for v in value.values()):
            rows = (row for name, part in value.items() for row in self._entry(name, part, None))
        else:
            text = yaml.safe_dump(
                [to_jsonable_python(value)], default_flow_style=True, sort_keys=False, width=10**6
            )
            yield f"{key}: {text.strip()[1:-1]}"
            if self.every and kind and all(section is not kind for section, _ in self.explained):
                required = [(name, f) for name, f in kind.model_fields.items() if f.is_required()]
                needed = {name: field.examples[0] for name, field in required if field.examples}
                example = kind.model_construct(**needed)
                example = [example] if isinstance(value, list) else example
                yield from _commented(self._entry(key, example, None))
            return
        yield f"{key}:"
        yield from (f"  {row}" for row in rows)


def _list_item(rows: Iterator[str]) -> Iterator[str]:
    """The lines of a mapping as an item of a list: a dash before its first key."""
    begun = False
    for row in rows:
        if begun:
            yield f"  {row}"
        elif row.startswith("#"):
            yield row
        else:
            begun = True
            yield f"- {row}"


def _commented(rows: Iterator[str]) -> Iterator[str]:
    return (f"# {row}" for row in rows)


def _section_type(annotation: Any) -> type[Section] | None:
    """The section that a key holds: one, a list of them, several by name, or one of its forms."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    parts = map(_section_type, get_args(annotation))
    return next((part for part in parts if part), None)
