"""`flowalign init`: the shipped config of a stage, changed as the answers say, and explained.

It is the shipped config of the model's family (configs/FAMILY); where that has none for a stage,
the one of Stable Diffusion 3.5. The meaning of a key is its docstring in `flowalign.config`.
"""

from __future__ import annotations

import argparse
import functools
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from pydantic_core import to_jsonable_python

from flowalign import rewards as reward_registry
from flowalign.backbone import ModelError, family_of, pipeline_name
from flowalign.backbone.structure import find
from flowalign.config import (
    STAGES,
    RecipeStage,
    RewardStage,
    Section,
    Stage,
    assignments,
    parse,
    read,
)
from flowalign.config.model import LoraConfig
from flowalign.config.safe_yaml import dump_yaml
from flowalign.system.files import replacing
from flowalign.training.sources import validation_file

CONFIGS = Path(__file__).parent / "configs"
SD35 = CONFIGS / "sd35_medium"  # has configs for all stages
STUDENT = "student_flow_opd.yaml"  # every family has it, and an eval.yaml
WIDTH = 90  # of a comment
TEACHERS = tuple(name for name, kind in STAGES.items() if issubclass(kind, RewardStage))
SAMPLING = (*TEACHERS, "opd", "sft", "recipe", "eval")
USED = {  # options that say what a config holds, by the stages that have it
    "reward": SAMPLING,
    "teachers": ("opd", "sft", "recipe", "merge", "eval"),
    "prompts": SAMPLING,
    "validation": SAMPLING[:-1],
}
SHARED = ("model", "output", "seed")  # keys that a recipe gives to its stages


def parser() -> argparse.ArgumentParser:
    """The command line of `init`."""
    parser = argparse.ArgumentParser(
        "flowalign init",
        description="Write a config with the keys that matter and their meaning. In a terminal it "
        "asks for what is not given.",
    )
    stages = " ".join(f"{name}: {kind.__doc__}" for name, kind in STAGES.items())
    add, many = parser.add_argument, functools.partial(parser.add_argument, nargs="+")
    add("--stage", choices=STAGES, help=stages)
    add("--model", help="tiny (default), a folder or a Hub id")
    help = "what scores the images, such as ocr, geneval or my_rewards:redness; one per task "
    many("--reward", metavar="NAME", help=f"{help}(grpo, nft, awm, opd, sft) or benchmark (eval)")
    many("--options", default=[], metavar="key=value", help="of a single --reward")
    help = "adapter folders or Hub ids, by task (opd, sft, recipe), or what to merge or evaluate"
    many("--teachers", metavar="NAME=ADAPTER", help=help)
    many("--prompts", metavar="FILE", help="one per reward or teacher")
    help = "held-out prompts, one per reward or teacher; without them evaluation is off"
    many("--validation", metavar="FILE", help=help)
    add("--all", action="store_true", help="also write the keys at their defaults")
    add("--out", type=Path, help="file to write; default: STAGE.yaml")
    add("--force", action="store_true", help="replace a file that is there")
    add("--yes", action="store_true", help="ask nothing, use the defaults")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 written, 2 refused."""
    args = parser().parse_args(argv)
    try:
        if sys.stdin.isatty() and not args.yes:
            ask(args)
        answers = read_answers(args)
        notes = write_config(answers, args.force, args.all)
    except (ValueError, OSError) as error:  # of the config, a reward, a file
        print(f"flowalign init: {error}", file=sys.stderr)
        return 2
    except EOFError:
        print("\nflowalign init: no answer; nothing was written.", file=sys.stderr)
        return 2
    print(answers.out)
    for note in notes:
        print(f"note: {note}")
    print(f"next: flowalign doctor --config {answers.out}")
    print(f"then: {STAGES[answers.stage].command} --config {answers.out}")
    return 0


# Questions ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answers:
    """What a config is written from. teachers: {name: adapter}. An empty collection = as in the
    shipped config. folder: of the shipped configs. known: whether it is the family's."""

    stage: str
    model: str
    folder: Path
    known: bool
    rewards: Sequence[str]
    options: Mapping[str, Any]
    teachers: Mapping[str, str]
    prompts: Sequence[str]
    validation: Sequence[str]
    out: Path

    def shipped(self, name: str) -> dict[str, Any]:
        """A shipped config of the family."""
        return read(self.folder / name)

    @property
    def shipped_tasks(self) -> dict[str, dict[str, Any]]:
        """The tasks of the family's student, and those of SD35 that it has not, each by its name
        and by the name of its reward."""
        tasks = [] if self.model == "tiny" else read(SD35 / STUDENT)["tasks"]
        tasks += self.shipped(STUDENT)["tasks"]
        return {name: task for task in tasks for name in (task["name"], task["reward"]["name"])}


QUESTIONS = {  # by option: what is asked, and the answer to an empty line
    "stage": (f"stage ({', '.join(STAGES)})", "grpo"),
    "model": ("model (tiny, a folder or a Hub id)", "tiny"),
    "teachers": ("adapters, as NAME=FOLDER (empty: as in the shipped config)", ""),
    "reward": ("rewards, one per task (empty: as in the shipped config)", ""),
    "prompts": ("files of prompts, one per task (empty: as in the shipped config)", ""),
    "validation": ("files of held-out prompts, one per task (empty: NAME_val next to them)", ""),
}


def ask(args: argparse.Namespace) -> None:
    """Ask for what the command line does not give; writes the answers into args."""
    for option, (question, default) in QUESTIONS.items():
        while getattr(args, option) is None and args.stage in USED.get(option, (args.stage,)):
            shown = f" [{default}]" if default else ""
            answer = input(f"{question}{shown}: ").strip() or default
            if option != "stage" or answer in STAGES:
                setattr(args, option, answer.split() if option in USED else answer)
    file = f"{args.stage}.yaml"
    args.out = args.out or Path(input(f"file to write [{file}]: ") or file)


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
    if args.options and len(args.reward or ()) != 1:
        raise ValueError("--options: they belong to one reward; give one --reward with them.")
    model = args.model or "tiny"
    folder = family_folder(model)
    return Answers(
        stage=args.stage,
        model=model,
        folder=folder or SD35,
        known=folder is not None,
        rewards=args.reward or (["ocr"] if args.stage in TEACHERS else []),
        options=assignments(args.options),
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
            name, adapter = Path(text.removesuffix("/adapter")).name, text
        teachers[f"{name}_{number}" if name in teachers else name] = adapter
    return teachers


def family_folder(model: str) -> Path | None:
    """The folder of the shipped configs for the family of a model; None if there is none, or the
    family is not one of flowalign's."""
    if model == "tiny":
        return CONFIGS / "tiny"
    try:
        try:
            pipeline = find(model).pipeline
        except LookupError:  # not on this machine: ask the Hub
            pipeline = pipeline_name(model)
        family = family_of(pipeline)
    except ModelError:
        return None
    for file in sorted(CONFIGS.glob("*/eval.yaml")):
        shipped = family_of(find(read(file)["model"]["id"]).pipeline)
        if issubclass(family, shipped) or issubclass(shipped, family):
            return file.parent
    return None


# The config --------------------------------------------------------------------------------------


def build_config(answers: Answers) -> dict[str, Any]:
    """The raw config of some answers; ValueError for numbers of files that do not fit."""
    makers = {"merge": _merge, "recipe": _recipe, "eval": _evaluation}
    data = makers.get(answers.stage, _training)(answers)
    model = answers.shipped("eval.yaml")["model"] | data.get("model", {}) | {"id": answers.model}
    output = f"outputs/{answers.out.stem}"
    return data | {"stage": answers.stage, "output": output, "model": model}


def _training(answers: Answers) -> dict[str, Any]:
    """A teacher with a task for each reward, or a student with one for each of its teachers."""
    data = _shipped_teacher(answers) if answers.stage in TEACHERS else _shipped_student(answers)
    names = list(map(_short, answers.rewards))
    if "teachers" in data:
        like = next(iter(data["teachers"].values()))
        changed = {name: like | {"adapter": path} for name, path in answers.teachers.items()}
        data["teachers"] = changed or data["teachers"]
        names = list(data["teachers"])
    rewards = _one_each("--reward", answers.rewards, len(names))
    prompts = _one_each("--prompts", answers.prompts, len(names))
    held_out = _one_each("--validation", answers.validation, len(names))
    rows = zip(names, rewards, prompts, held_out, strict=True)
    data["tasks"] = [_task(answers, *row) for row in rows]
    if not all({"validation", "reward"} <= task.keys() for task in data["tasks"]):
        data["evaluation"] = None
    return data


def _shipped_teacher(answers: Answers) -> dict[str, Any]:
    """The teacher of the first reward; where the family has none of this stage, the one of SD35
    with the family's guidance."""
    for folder in (answers.folder, SD35):
        configs = [read(file) for file in sorted(folder.glob("teacher_*.yaml"))]
        configs = [data for data in configs if data["stage"] == answers.stage]
        by_reward = {data["tasks"][0]["reward"]["name"]: data for data in configs}
        if not configs:
            continue
        data = by_reward.get(answers.rewards[0]) or by_reward.get("ocr") or configs[0]
        if folder != answers.folder:
            guidance = answers.shipped(STUDENT)["rollout"]["guidance"]
            if answers.stage == "grpo":
                guidance = answers.shipped("eval.yaml")["sampling"]["guidance"]
            data |= {"model": {}, "rollout": data["rollout"] | {"guidance": guidance}}
        return data
    raise ValueError(f"no shipped config has stage: {answers.stage}. Add one to {SD35}")


def _shipped_student(answers: Answers) -> dict[str, Any]:
    has_sft = answers.stage == "sft" and (answers.folder / "sft.yaml").is_file()
    data = answers.shipped("sft.yaml" if has_sft else STUDENT)
    of_opd = ("student", "anchor") if answers.stage == "sft" else ()
    return {key: value for key, value in data.items() if key not in of_opd}


def _merge(answers: Answers) -> dict[str, Any]:
    shipped = [teacher["adapter"] for teacher in answers.shipped(STUDENT)["teachers"].values()]
    return {"adapters": list(answers.teachers.values()) or shipped, "method": "concat"}


def _recipe(answers: Answers) -> dict[str, Any]:
    student = {**_training(replace(answers, stage="opd")), "stage": "opd"}
    teachers = {name: teacher["adapter"] for name, teacher in student["teachers"].items()}
    models, stages = {"base": None, **teachers}, {}
    if unscored := [task["name"] for task in student["tasks"] if "reward" not in task]:
        raise ValueError(
            f"--reward: missing for {', '.join(unscored)}. Give one for each of the "
            f"{len(teachers)} teachers, in their order; it scores the images of the table."
        )
    if len(teachers) > 1:
        stages["merge"] = {"stage": "merge", "adapters": list(teachers.values())}
        student["lora"] = {"init": "stage:merge"}
        models["merge"] = "stage:merge"
    stages["student"] = student
    given = answers.prompts or answers.validation  # no test prompts are shipped for these
    scored = [task for task in student["tasks"] if "validation" in task]
    if scored:
        stages["table"] = answers.shipped("eval.yaml") | {
            "models": models | {"student": "stage:student"},
            "benchmarks": [
                _benchmark(
                    answers, task["name"], task["reward"], task["validation"] if given else ""
                )
                for task in scored
            ],
        }
    shared = ("model", "output", "seed")  # which a recipe gives to its stages
    stages = {
        name: {key: value for key, value in stage.items() if key not in shared}
        for name, stage in stages.items()
    }
    return {"seed": 0, "stages": stages}


def _evaluation(answers: Answers) -> dict[str, Any]:
    data = answers.shipped("eval.yaml")
    data["models"] = {"base": None, **answers.teachers}
    prompts = _one_each("--prompts", answers.prompts, len(answers.rewards))
    rows = [
        _benchmark(answers, _short(name), _reward(name, answers), file)
        for name, file in zip(answers.rewards, prompts, strict=True)
    ]
    return data | ({"benchmarks": rows} if rows else {})


def _benchmark(
    answers: Answers, name: str, reward: Mapping[str, Any], prompts: str
) -> dict[str, Any]:
    """A benchmark; without prompts on the shipped ones for its reward, or for any reward."""
    shipped = answers.shipped("eval.yaml")["benchmarks"]
    like = next((b for b in shipped if b["reward"]["name"] == reward["name"]), shipped[-1])
    return like | {"name": name, "reward": reward, "prompts": prompts or like["prompts"]}


def _task(answers: Answers, name: str, reward: str, prompts: str, held_out: str) -> dict[str, Any]:
    """A task; what is "" comes from the shipped task of that reward or name, if there is one."""
    shipped = answers.shipped_tasks
    general = {key: shipped["preference"][key] for key in ("prompts", "validation")}
    task = {**shipped.get(reward or name, general), "name": name}
    if reward:
        task["reward"] = _reward(reward, answers)
    if prompts:
        validation = validation_file(Path(prompts))
        task |= {"prompts": prompts, "validation": str(validation) if validation.is_file() else ""}
    if held_out:
        task["validation"] = held_out
    return {key: value for key, value in task.items() if value}


def _one_each(flag: str, given: Sequence[str], count: int) -> Sequence[str]:
    """The values of a flag, one for each task; "" each where none are given."""
    if given and len(given) != count:
        raise ValueError(
            f"{flag}: got {len(given)} for {count} tasks or benchmarks; give one each."
        )
    return given or [""] * count


def _reward(name: str, answers: Answers) -> dict[str, Any]:
    """A reward with the options that the shipped configs give it. Raises ValueError for one that
    does not exist or wants other options."""
    shipped = answers.shipped_tasks.get(name, {}).get("reward", {}).get("options", {})
    options = {**shipped, **answers.options}
    reward_registry.check(name, options)
    return {"name": name, **({"options": options} if options else {})}


def _short(reward: str) -> str:
    """The name of a task for a reward: redness for my_rewards:redness."""
    return reward.rpartition(":")[2].rpartition(".")[2]


def _notes(answers: Answers, data: Mapping[str, Any]) -> Iterator[str]:
    """What the reader of a config should know: what is not evaluated, and what not fairly."""
    if not answers.known:
        yield (
            f"the family of {answers.model} is not known here, so the values are those of Stable "
            "Diffusion 3.5. Check model, guidance and steps."
        )
    stages = data.get("stages", {})
    if stages.get("student", data).get("evaluation", "on") is None:
        needs = "every task a reward and held-out prompts (--reward, --validation)"
        yield f"evaluation is off, so the last weights are kept; to choose the best, give {needs}."
    for task in stages["student"]["tasks"] if stages else ():
        if "validation" not in task:
            name = task["name"]
            yield f"the table does not score {name}: it has no held-out prompts (--validation)."
        elif answers.prompts or answers.validation:
            yield (
                f"the table scores {task['name']} on its validation prompts, {task['validation']}, "
                "which also choose the adapter. For a fair table name test prompts in stages.table."
            )


# The file ----------------------------------------------------------------------------------------


def write_config(answers: Answers, force: bool, every: bool = False) -> list[str]:
    """Write the config, checked; returns what its reader should know. every: also write the keys at
    their defaults."""
    if answers.out.exists() and not force:
        raise ValueError(f"--out: {answers.out} is there already. Name another, or give --force.")
    data = build_config(answers)
    config = parse(data, source=str(answers.out), stage=Stage)
    notes = list(_notes(answers, data))
    keys = "every key" if every else "the keys that matter most (--all: every key)"
    about = [f"Written by `flowalign init`: {keys}, each under its meaning."]
    about += [f"Note: {note}" for note in notes]
    head = [f"# {config.command} --config {answers.out}", *map(_comment, about), ""]
    with replacing(answers.out) as part:
        text = "\n".join([*head, _Writer(every).text(config)])
        part.write_text(f"{text}\n", encoding="utf-8")
    return notes


class _Writer:
    """Sections as YAML, in the schema's order. The meaning of a key stands above its first use.
    every: with the keys at their defaults, too."""

    def __init__(self, every: bool) -> None:
        self.every = every
        self.explained: set[tuple[type[Section], str]] = set()

    def text(self, section: Section, without: Sequence[str] = ()) -> str:
        """The keys of a section, but those without."""
        parts = []
        for key, field in type(section).model_fields.items():
            given = key in section.model_fields_set
            if key in without or key not in section.__dict__ or not (given or self.every):
                continue
            kind = _section_type(field.annotation)
            if (type(section), key) not in self.explained:
                self.explained.add((type(section), key))
                about = (kind.__doc__ or "").partition("\n\n")[0] if kind else ""
                parts.append(_comment(field.description or about))
            value = getattr(section, key)
            if isinstance(section, RecipeStage) and key == "stages":
                shared = {"model": section.model, "output": section.output}
                value = {n: STAGES[part["stage"]](**part, **shared) for n, part in value.items()}
            entry = self._entry(key, value, kind)
            if not given and isinstance(section, LoraConfig) and section.init:
                entry = textwrap.indent(entry, "# ")  # the adapter to start from decides it
            parts.append(entry)
        return "\n".join(parts)

    def _entry(self, key: str, value: Any, kind: type[Section] | None = None) -> str:
        """A key and its value; with `every`, an example of the section that it may hold."""
        parts = value.values() if isinstance(value, dict) else value
        if isinstance(value, Section):
            text = self.text(value, SHARED if isinstance(value, Stage) else ())
        elif not isinstance(value, list | dict) or not any(isinstance(p, Section) for p in parts):
            inline = {"default_flow_style": True, "sort_keys": False, "width": 1000}
            text = f"{key}: {dump_yaml([to_jsonable_python(value)], **inline).strip()[1:-1]}"
            if self.every and kind and all(section is not kind for section, _ in self.explained):
                fields = kind.model_fields.items()
                needed = {name: field.examples[0] for name, field in fields if field.is_required()
                          and field.examples}  # fmt: skip
                example = kind.model_construct(**needed)
                example = self._entry(key, [example] if isinstance(value, list) else example)
                text += "\n" + textwrap.indent(example, "# ")
            return text
        elif isinstance(value, list):
            text = "\n".join(f"- {textwrap.indent(self.text(p), '  ')[2:]}" for p in parts)
        else:
            text = "\n".join(self._entry(name, part) for name, part in value.items())
        return f"{key}:\n{textwrap.indent(text, '  ')}"


def _comment(text: str) -> str:
    lines = textwrap.wrap(" ".join(text.split()), WIDTH)
    return "\n".join(f"# {line}" for line in lines)


def _section_type(annotation: Any) -> type[Section] | None:
    """The section that a key holds: one, a list of them, several by name, or one of its forms."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    parts = map(_section_type, get_args(annotation))
    return next((part for part in parts if part), None)
