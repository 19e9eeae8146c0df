"""`flowalign init`: a config for a stage, a model and rewards or teachers, explained by comments.

Values come from the configs that ship (configs/tiny, configs/sd35_medium), the meaning of a key
from its docstring in `flowalign.config.schema`.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from flowalign.config import STAGES, ConfigError, Stage, assignments, load, read
from flowalign.config.schema import LoraConfig, Section, command
from flowalign.system.files import replacing

CONFIGS = Path(__file__).parent / "configs"
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
        wanted = answers(args)
        notes = write(wanted, args.force, args.all)
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
    print(f"then: {command(wanted.stage)} --config {wanted.out}")
    return 0


# Questions ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answers:
    """What a config is written from. teachers: {name: adapter}. An empty collection = as in the
    config that ships."""

    stage: str
    model: str
    rewards: list[str]
    options: dict[str, Any]
    teachers: dict[str, str]
    prompts: list[str]
    validation: list[str]
    out: Path

    @property
    def family(self) -> Path:
        """The folder of the configs whose values are used."""
        return CONFIGS / ("tiny" if self.model == "tiny" else "sd35_medium")


def ask(args: argparse.Namespace) -> None:
    """Ask for what the command line does not give; writes the answers into args."""
    if args.stage is None:
        for name, text in ABOUT.items():
            print(f"  {name:8}{text}")
    while args.stage not in STAGES:
        args.stage = _answer("stage", "grpo")
        if args.stage not in STAGES:
            print(f"  possible: {', '.join(STAGES)}")
    args.model = args.model or _answer("model (tiny, a folder or a Hub id)", "tiny")
    if args.reward is None and args.stage in TEACHERS:
        args.reward = _answer("reward", "ocr").split()
    if args.teachers is None and args.stage in USED["teachers"]:
        shipped = _answer("adapters, as NAME=FOLDER (empty: those of the shipped config)", "")
        args.teachers = shipped.split() or None
    if args.reward is None and args.stage == "recipe" and args.teachers:
        args.reward = _answer("rewards, one per teacher (empty: by its name)", "").split() or None
    if args.prompts is None and args.stage in USED["validation"]:
        files = _answer("files of prompts, one per task (empty: those of the shipped config)", "")
        args.prompts = files.split() or None
        if args.prompts and args.validation is None:
            held_out = _answer("files of held-out prompts (empty: no evaluation)", "")
            args.validation = held_out.split() or None
    args.out = args.out or Path(_answer("file to write", f"{args.stage}.yaml"))


def _answer(question: str, default: str) -> str:
    shown = f" [{default}]" if default else ""
    return input(f"{question}{shown}: ").strip() or default


def answers(args: argparse.Namespace) -> Answers:
    """The arguments, checked; ValueError for what no config could be written from."""
    from flowalign.backbone.adapters.files import adapter_folder

    if args.stage is None:
        raise ValueError(f"--stage: missing; want one of {', '.join(STAGES)}.")
    for option, stages in USED.items():
        if getattr(args, option) and args.stage not in stages:
            raise ValueError(
                f"--{option}: not for the stage {args.stage}; it is for {', '.join(stages)}."
            )
    if args.prompts and args.stage == "eval" and not args.reward:
        raise ValueError("--prompts: say what scores their images, too: --reward, one for each.")
    teachers: dict[str, str] = {}
    given: list[str] = args.teachers or []
    for number, text in enumerate(given, 1):
        name, equals, adapter = text.partition("=")
        if not equals:
            if args.stage not in ("merge", "eval"):
                raise ValueError(f"--teachers: got {text!r}; want NAME=ADAPTER, as in ocr={text}.")
            folder = adapter_folder(text)
            name, adapter = (folder.parent if folder.name == "adapter" else folder).name, text
        if name in teachers:
            name = f"{name}_{number}"
        teachers[name] = adapter
    options = assignments(args.options)
    if options and len(args.reward or ()) != 1:
        raise ValueError("--options: they belong to one reward; give one --reward with them.")
    return Answers(
        stage=args.stage,
        model=args.model or "tiny",
        rewards=args.reward or [],
        options=options,
        teachers=teachers,
        prompts=args.prompts or [],
        validation=args.validation or [],
        out=args.out or Path(f"{args.stage}.yaml"),
    )


# The config --------------------------------------------------------------------------------------


def build(wanted: Answers) -> dict[str, Any]:
    """The raw config of some answers; ValueError for numbers of files that do not fit."""
    makers = {
        **dict.fromkeys(TEACHERS, _teacher),
        "merge": _merge,
        "recipe": _recipe,
        "eval": _eval,
    }
    data = makers.get(wanted.stage, _student)(wanted)
    model = read(wanted.family / "eval.yaml")["model"] | data.get("model", {})
    return data | {
        "stage": wanted.stage,
        "output": f"outputs/{wanted.out.stem}",
        "model": model | {"id": wanted.model},
    }


def _teacher(wanted: Answers) -> dict[str, Any]:
    """Of the stages that learn from rewards: the shipped teacher of the first reward."""
    rewards = wanted.rewards or ["ocr"]
    files = [f for name in ("teacher_ocr*", "teacher_*") for f in sorted(wanted.family.glob(name))]
    found = {file: read(file) for file in files}
    own = [data for data in found.values() if data["stage"] == wanted.stage]
    shipped = {data["tasks"][0]["reward"]["name"]: data for data in reversed(own)}
    data = shipped.get(rewards[0]) or next(iter(own), None) or _forward(found[files[0]])
    return _with_tasks(data, wanted, list(map(_short, rewards)), rewards)


def _forward(data: dict[str, Any]) -> dict[str, Any]:
    """A GRPO teacher's config for a stage that learns from clean images."""
    noise = ("noise_level", "window", "shared_noise")
    rollout = {key: value for key, value in data["rollout"].items() if key not in noise}
    rest = {key: value for key, value in data.items() if key != "grpo"}
    return {**rest, "rollout": rollout | {"kind": "ode", "guidance": 1.0}}


def _student(wanted: Answers) -> dict[str, Any]:
    """Of the stages opd and sft."""
    own = wanted.family / f"{wanted.stage}.yaml"
    data = read(own if own.is_file() else wanted.family / "student_flow_opd.yaml")
    if wanted.stage == "sft":
        data = {"sft": {"states": 3}} | data
        data = {key: value for key, value in data.items() if key not in ("student", "anchor")}
    if wanted.teachers:
        like = next(iter(data["teachers"].values()))
        data["teachers"] = {
            name: like | {"adapter": source} for name, source in wanted.teachers.items()
        }
    names = list(data["teachers"])
    return _with_tasks(data, wanted, names, _each("--reward", wanted.rewards, len(names)))


def _merge(wanted: Answers) -> dict[str, Any]:
    shipped = read(wanted.family / "student_flow_opd.yaml")["teachers"]
    adapters = list(wanted.teachers.values()) or [t["adapter"] for t in shipped.values()]
    return {"adapters": adapters, "method": "concat"}


def _recipe(wanted: Answers) -> dict[str, Any]:
    student = _student(replace(wanted, stage="opd"))  # its teachers, tasks and settings
    teachers = {name: teacher["adapter"] for name, teacher in student["teachers"].items()}
    shared = ("model", "output", "seed", "stage")
    student = {key: value for key, value in student.items() if key not in shared}
    table = {key: value for key, value in _eval(wanted).items() if key not in shared}
    unscored = [task["name"] for task in student["tasks"] if "reward" not in task]
    if unscored:
        raise ValueError(
            f"--reward: missing for {', '.join(unscored)}. Give one for each of the "
            f"{len(teachers)} teachers, in their order; it scores the images of the table."
        )
    if wanted.teachers or wanted.prompts or wanted.rewards:  # not of prompts that are trained on
        found = (_benchmark(wanted, task) for task in student["tasks"])
        table["benchmarks"] = [benchmark for benchmark in found if benchmark]
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
    """A task on its test prompts, else on its validation prompts; None without either."""
    own = {"name": task["name"], "reward": task["reward"]}
    tasks = read(wanted.family / "student_flow_opd.yaml")["tasks"]
    shipped = {part["validation"]: part["name"] for part in tasks}
    for benchmark in read(wanted.family / "eval.yaml")["benchmarks"]:
        if benchmark["name"] == shipped.get(task.get("validation")):
            return benchmark | own
    test = _test_file(Path(task["prompts"]))
    prompts = str(test) if test.is_file() else task.get("validation")
    return own | {"prompts": prompts} if prompts else None


def _test_file(path: Path) -> Path:
    """Where the test prompts of a training set are looked for: x_test beside x_train, or x."""
    return path.with_name(f"{path.stem.removesuffix('_train')}_test{path.suffix}")


def _notes(data: Mapping[str, Any]) -> Iterator[str]:
    """What the reader of a config should know: what is not evaluated, and what not fairly."""
    stages = data.get("stages", {})
    student = stages.get("student", data)
    off = student.get("evaluation", "on") is None
    if off:
        needs = "every task a reward and held-out prompts (--reward, --validation)"
        yield f"evaluation is off, so the last weights are kept; to choose the best, give {needs}."
    if data["stage"] != "recipe":
        return
    rows = {part["name"]: part for part in stages.get("table", {}).get("benchmarks", [])}
    for task in student["tasks"]:
        name, test = task["name"], _test_file(Path(task["prompts"]))
        if name not in rows:
            yield (
                f"the task {name} is not scored in the table: it has neither test nor validation "
                f"prompts. Write {test} and run init again, or give --validation."
            )
        elif rows[name]["prompts"] == task.get("validation"):
            chosen = "" if off else ", which also choose the adapter"
            yield (
                f"the table scores {name} on its validation prompts, {task['validation']}{chosen}. "
                f"For a fair table write {test} and run init again."
            )


def _eval(wanted: Answers) -> dict[str, Any]:
    data = read(wanted.family / "eval.yaml")
    data["models"] = {"base": None} | wanted.teachers
    if wanted.stage == "eval" and wanted.rewards:
        shipped = {part["reward"]["name"]: part for part in data["benchmarks"]}
        sets = _each("--prompts", wanted.prompts, len(wanted.rewards))
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
    prompts = _each("--prompts", wanted.prompts, len(names))
    held_out = _each("--validation", wanted.validation, len(names))
    each = zip(names, rewards, prompts, held_out, strict=True)
    tasks = [_task(wanted, *parts) for parts in each]
    off = (
        {}
        if all({"validation", "reward"} <= task.keys() for task in tasks)
        else {"evaluation": None}
    )
    return data | {"tasks": tasks} | off


def _task(wanted: Answers, name: str, reward: str, prompts: str, held_out: str) -> dict[str, Any]:
    """A task; what is "" comes from the shipped task of that name or reward, if there is one."""
    from flowalign.commands.prompts.cli import validation_file

    shipped = {t["name"]: t for t in read(wanted.family / "student_flow_opd.yaml")["tasks"]}
    by_reward = {task["reward"]["name"]: task for task in shipped.values()}
    known = by_reward.get(reward) or shipped.get(name)
    # any prompts will do for another reward; a student needs none
    task = known or {key: shipped["preference"][key] for key in ("prompts", "validation")}
    task = task | {"name": name}
    if reward:
        task["reward"] = _reward(reward, wanted)
    if prompts:
        beside = validation_file(Path(prompts))
        task |= {"prompts": prompts, "validation": str(beside) if beside.is_file() else None}
    if held_out:
        task["validation"] = held_out
    keys = ("name", "weight", "prompts", "validation", "reward")
    return {key: task[key] for key in keys if task.get(key) is not None}


def _each(flag: str, given: Sequence[str], count: int) -> Sequence[str]:
    """The values of a flag, one each; "" each where none are given."""
    if given and len(given) != count:
        raise ValueError(
            f"{flag}: got {len(given)} for {count} tasks or benchmarks; give one each."
        )
    return given or [""] * count


def _reward(name: str, wanted: Answers) -> dict[str, Any]:
    """A reward with the options that the shipped configs give it. Raises ValueError for one that
    does not exist or wants other options."""
    from flowalign import rewards

    tasks = read(wanted.family / "student_flow_opd.yaml")["tasks"]
    shipped = {task["reward"]["name"]: task["reward"].get("options", {}) for task in tasks}
    options = shipped.get(name, {}) | wanted.options
    rewards.check(name, options)
    return {"name": name} | ({"options": options} if options else {})


def _short(reward: str) -> str:
    """The name of a task for a reward: redness for my_rewards:redness."""
    return reward.rpartition(":")[2].rpartition(".")[2]


# The file ----------------------------------------------------------------------------------------


def write(wanted: Answers, force: bool, every: bool = False) -> list[str]:
    """Write the config, read it back as `train` does; returns what its reader should know. every:
    also write the keys at their defaults."""
    if wanted.out.exists() and not force:
        raise ValueError(f"--out: {wanted.out} is there already. Name another, or give --force.")
    data = build(wanted)
    if every:
        about = ["# Written by `flowalign init --all`: every key, under its meaning."]
    else:
        about = [
            "# Written by `flowalign init`: the keys that matter most, each under its meaning.",
            "# The others keep their defaults. To see them all: "
            f"flowalign init --stage {wanted.stage} --all",
        ]
    notes = list(_notes(data))
    about += [f"# {line}" for note in notes for line in textwrap.wrap(f"Note: {note}", WIDTH - 2)]
    head = [f"# {command(wanted.stage)} --config {wanted.out}", *about, ""]
    text = "\n".join([*head, *lines(STAGES[wanted.stage], data, set(), every)]) + "\n"
    try:
        with replacing(wanted.out) as part:
            part.write_text(text, encoding="utf-8")
            load(part, stage=Stage)
    except ConfigError as error:
        raise ConfigError(error.problems, str(wanted.out)) from None
    return notes


def lines(
    section: type[Section], data: Mapping[str, Any], told: set[Any], every: bool = False
) -> Iterator[str]:
    """The keys of a section as YAML, each under its meaning, in the schema's order. told: keys
    whose meaning stands above already. every: also those that data lacks, at their defaults."""
    for key, field in section.model_fields.items():
        if key not in data and (field.is_required() or not every):
            continue
        inner = _section_in(field.annotation)
        if (section, key) not in told:
            told.add((section, key))
            of_section = (inner.__doc__ or "").partition("\n\n")[0] if inner else ""
            meaning = " ".join((field.description or of_section).split())
            yield from (f"# {line}" for line in textwrap.wrap(meaning, WIDTH - 10))
        if key in data:
            yield from _entry(key, field, data[key], told, every)
            continue
        default = to_jsonable_python(field.get_default(call_default_factory=True))
        entry = _entry(key, field, default, told, every)
        yield from _commented(entry) if _not_its_own(section, key, data) else entry


def _not_its_own(section: type[Section], key: str, data: Mapping[str, Any]) -> bool:
    """Whether a key that data lacks comes from elsewhere, so that its default must not be set: what
    an adapter to start from brings, and the seed of a recipe."""
    if section is LoraConfig:
        return data.get("init") is not None
    return key == "seed" and issubclass(section, Stage) and "output" not in data


def _entry(key: str, field: FieldInfo, value: Any, told: set[Any], every: bool) -> Iterator[str]:
    """A key and its value. With every, what an empty section may hold follows as a comment."""
    inner, kind = _section_in(field.annotation), _kind(field.annotation)
    plain = isinstance(value, list) and not any(isinstance(item, Mapping) for item in value)
    if key == "stages" and not isinstance(value, list):  # of a recipe
        kinds = {name: STAGES[part["stage"]] for name, part in value.items()}
        rows = _named(value, kinds, told, every)
    elif inner is None or not value or plain:
        yield f"{key}: {_inline(value)}"
        if every and inner and not any(section is inner for section, _ in told):
            yield from _commented(_example(key, inner, get_origin(kind) is list, told))
        return
    elif isinstance(value, list):
        rows = (row for item in value for row in _item(lines(inner, item, told, every)))
    elif inner in _forms(field.annotation):
        rows = lines(inner, value, told, every)
    else:
        rows = _named(value, {name: inner for name in value}, told, every)
    yield f"{key}:"
    yield from _indented(rows)


def _example(key: str, inner: type[Section], listed: bool, told: set[Any]) -> Iterator[str]:
    """A section that the config has not, with examples of what it needs."""
    fields = inner.model_fields.items()
    needed = {name: f.examples[0] for name, f in fields if f.is_required() and f.examples}
    rows = lines(inner, needed, told, every=True)
    yield f"{key}:"
    yield from _indented(_item(rows) if listed else rows)


def _named(
    parts: Mapping[str, Any], sections: Mapping[str, type[Section]], told: set[Any], every: bool
) -> Iterator[str]:
    for name, part in parts.items():
        yield f"{name}:"
        yield from _indented(lines(sections[name], part, told, every))


def _item(rows: Iterator[str]) -> Iterator[str]:
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


def _indented(rows: Iterator[str]) -> Iterator[str]:
    return (f"  {row}" for row in rows)


def _commented(rows: Iterator[str]) -> Iterator[str]:
    return (f"# {row}" for row in rows)


def _inline(value: Any) -> str:
    text = yaml.safe_dump([value], default_flow_style=True, sort_keys=False, width=10**6)
    return text.strip()[1:-1]


def _kind(annotation: Any) -> Any:
    """X of `X | None` and of Annotated[X, ...]."""
    while get_origin(annotation) in (Annotated, Union, UnionType):
        annotation = get_args(annotation)[0]
    return annotation


def _forms(annotation: Any) -> list[Any]:
    """X, Y of `X | Y` and of Annotated[X | Y, ...]."""
    if get_origin(annotation) is Annotated:
        return _forms(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [form for part in get_args(annotation) for form in _forms(part)]
    return [annotation]


def _section_in(annotation: Any) -> type[Section] | None:
    """The section that a key holds: one, a list of them, several by name, or one of its forms."""
    for form in _forms(annotation):
        for part in (form, *get_args(form)):
            if isinstance(part, type) and issubclass(part, Section):
                return part
    return None
