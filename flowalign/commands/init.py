"""`flowalign init` writes a shipped config with other tasks and teachers, and explains its keys.

It is the config of the model's family (configs/FAMILY) for a stage; where that has none, the one of
Stable Diffusion 3.5. The meaning of a key is its docstring in `flowalign.config`.
"""

from __future__ import annotations

import argparse
import inspect
import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from flowalign import rewards as reward_registry
from flowalign.backbone import ModelError, family_of
from flowalign.backbone.adapters import is_hub_id
from flowalign.backbone.loading import pipeline_name
from flowalign.backbone.structure import find, known
from flowalign.checks import Launch, once
from flowalign.checks.adapters import readable
from flowalign.checks.numbers import FEW_STEPS
from flowalign.checks.prompts import judged_prompts
from flowalign.commands import CONFIGS, SD35, recipe
from flowalign.commands.arguments import NONE
from flowalign.commands.doctor import advise
from flowalign.commands.doctor.advise import Device
from flowalign.commands.prompts.fetch import missing_sets
from flowalign.config import (
    LABELS,
    STAGES,
    ConfigError,
    RewardStage,
    Section,
    Stage,
    label_of,
    parse,
    read,
    stage_class,
)
from flowalign.config.loading import card_of
from flowalign.config.model import ModelConfig
from flowalign.config.safe_yaml import inline_yaml
from flowalign.config.section import about
from flowalign.config.stages import most_like
from flowalign.system.exit import refusing
from flowalign.system.files import expanded, replacing
from flowalign.training.data import path_of
from flowalign.training.inputs import Inputs
from flowalign.types import Problem

COMMENT_WIDTH = 90
TEACHER_STAGES = tuple(name for name, kind in STAGES.items() if issubclass(kind, RewardStage))
SAMPLING = (*TEACHER_STAGES, "opd", "sft", "recipe", "eval")
USED = {  # options that say what a config holds, by the stages that have it
    "reward": SAMPLING,
    "teachers": ("opd", "sft", "recipe", "merge", "eval"),
    "prompts": (*SAMPLING, "dpo"),
}
QUALITY = ("pickscore", "hpsv2", "imagereward", "aesthetic")  # their teacher is MAR's anchor
# The student of teachers that have absorbed the base's guidance, and its anchor of good pictures.
# Labels at CFG 1.5 to 3 were no better (docs/log/2026-11.md#guidance: .881 to .864, 1: .862; on
# world 3 GenEval .615 for .656). The weight: 256 validation prompts a task chose .3 of .04 to 3,
# with .025 more of other judges than .04, the paper's (docs/log/earlier-teachers.md#three-seeds).
LABELS_AT = 1.0
ANCHOR_WEIGHT = 0.3
WATCHED = 24  # prompts of each task whose judges a run does not learn from
URLS = ("http://", "https://")  # of a server, which the reward `remote` asks
SHARED = ("model", "output", "seed")  # keys that a recipe gives to its stages


@refusing("init")
def main(arguments: argparse.Namespace) -> int:
    """Exit status: 0 written, 1 written with LoRAs that do not fit the model, 2 refused."""
    args = vars(arguments)
    every, force, overrides = args.pop("all"), args.pop("force"), args.pop("overrides")
    gpu, hours = args.pop("gpu"), args.pop("hours")
    out = args["out"] = expanded(args["out"] or Path(f"{args['stage']}.yaml"))
    if out.exists() and not force:
        raise ValueError(f"--out: {out} is there already. Name another, or give --force.")
    draft = Draft(**args)
    data = draft.data()
    config = parse(data, overrides, source=str(out), stage=Stage)
    notes = [f"note: {note}" for note in draft.notes(data)]
    if gpu:
        changes, told = fitted(config, out.parent, gpu, hours)
        config = parse(data, [*overrides, *changes], source=str(out), stage=Stage)
        notes.append(f"note: {told}")
    if not config.merges:
        size = f"{config.model.width} x {config.model.height} pixels"
        notes.append(f"note: images of {size} (model.width, model.height).")
    stages, _ = recipe.read_stages(config, out.parent)
    missing = missing_sets(stages.values())
    inputs = Inputs(config.model)
    problems: list[Problem] = []
    for judged in chain.from_iterable(stage.judged for stage in stages.values()):
        problems += judged_prompts(judged, judged.rewards.values(), inputs, without=missing)
    if problems:
        raise ConfigError(once(problems), str(out))
    head = [f"# {config.command} --config {out}", *map(_comment, notes), ""]
    with replacing(out) as part:
        text = "\n".join([*head, _Writer(every).text(config)])
        part.write_text(f"{text}\n", encoding="utf-8")
    for name, commands in missing.items():
        notes.append(f"there is no {name}" + (f": {' or '.join(commands)}" if commands else ""))
    print("\n".join([str(out), *notes]))
    if unfit := once(chain.from_iterable(map(_unfit, stages.values()))):
        print("\n".join(f"problem: {text}" for text in unfit))
        print(f"{out} was written all the same; --force writes it again")
        return 1
    fits = "" if draft.model == "tiny" else f" --gpu {gpu or '4090'}"
    if any(reward_registry.RewardSpec(name).own_code for name in draft.rewards):
        fits += " --trust"  # without it, the doctor does not run the user's code
    print(f"next: flowalign doctor --config {out}{fits}\nthen: {config.command} --config {out}")
    return 0


def fitted(config: Stage, home: Path, gpu: str, limit: float | None) -> tuple[list[str], str]:
    """The changes with which a config is predicted to fit a GPU, and at most so many hours; and
    what is predicted then. Raises ValueError if it does not fit."""
    stages, _ = recipe.read_stages(config, home)
    inputs = Inputs(config.model)
    listed = [one.timed() for one in advise.forecasts(stages, Device(1, gpu), inputs)]
    if unknown := next((one.unknown for one in listed if not one.estimate), ""):
        return [], f"not predicted for {gpu}: {unknown}"
    changes = advise.memory_changes(listed)
    fitting = [one.fitting for one in listed if one.estimate]
    if large := [one.name for one in fitting if one.too_large]:
        raise ValueError(f"--gpu: {', '.join(large)} does not fit {gpu}, whatever is changed.")
    if limit:
        for name, texts in advise.cuts(fitting, limit).items():
            changes[name] += texts
    arguments = advise.as_arguments(config, changes)
    made = f"changed for it: {shlex.join(arguments)}" if arguments else "nothing was changed for it"
    return arguments, f"predicted to fit {gpu}; {made}. The doctor says the hours."


def _unfit(stage: Stage) -> Iterable[Problem]:
    """Problems of adapters on this machine that cannot be used."""
    elsewhere = [  # on the Hub, or of a run that is still to come; not files that are missing
        source for source in stage.inputs.values()
        if not (Path(source).exists() or source.endswith(".safetensors") and not is_hub_id(source))
    ]  # fmt: skip
    launch = Launch(pending=dict.fromkeys(elsewhere))
    return readable(stage, launch, Inputs(stage.model))


def family_folder(model: str) -> Path | None:
    """The folder of the shipped configs for the family of a model; None if there is none, or the
    family is not one of flowalign's."""
    if model == "tiny":
        return CONFIGS / "tiny"
    try:
        family = family_of(pipeline_name(model))
    except ModelError:
        return None
    for file in sorted(CONFIGS.glob("*/eval.yaml")):
        shipped = family_of(find(read(file)["model"]["id"]).pipeline)
        if issubclass(family, shipped) or issubclass(shipped, family):
            return file.parent
    return None


def named_sources(texts: Sequence[str]) -> dict[str, str]:
    """{name: source} of NAME=SOURCE texts. A source without a name is named like its folder or
    file."""
    named: dict[str, str] = {}
    for number, text in enumerate(texts, 1):
        name, equals, source = text.partition("=")
        if not equals:
            name = Path(text.removesuffix("/adapter")).name
            source = text
            name = name.removesuffix(".safetensors")
        named[f"{name}_{number}" if name in named else name] = source
    return named


class Draft:
    """A raw config from options of the command line. What they leave out is taken from the shipped
    config of the family; `known` says whether the family is the model's. Raises ValueError for
    options that allow no config."""

    def __init__(
        self,
        stage: str,
        model: str,
        out: Path,
        *,
        reward: Sequence[str] = (),
        teachers: Sequence[str] = (),
        prompts: Sequence[str] = (),
    ) -> None:
        self.stage = stage
        self.model = model
        self.out = out
        self.like = most_like(stage)
        for option, values in (("reward", reward), ("teachers", teachers), ("prompts", prompts)):
            if values and self.like not in USED[option]:
                text = f"not for the stage {stage}; it is for {', '.join(USED[option])}."
                raise ValueError(f"--{option}: {text}")
        family = family_folder(model)
        self.known = family is not None
        self.folder = family or SD35
        usual = "pickscore" if self.like == "gradient" else "ocr"
        self.rewards = reward or ([usual] if self.like in TEACHER_STAGES else [])
        self.prompts = prompts
        # every family has these two
        self.student, self.eval = self._shipped("student_flow_opd"), self._shipped("eval")
        # tasks of the family, else of SD35, each by its name and by its reward
        tasks = [] if model == "tiny" else read(SD35 / "student_flow_opd.yaml")["tasks"]
        tasks += self.student["tasks"]
        self.tasks = {key: task for task in tasks for key in (task["name"], task["reward"]["name"])}
        self.adapters = named_sources(teachers)
        self.taught = stage == "recipe" and not teachers and bool(reward)  # by the recipe itself
        if self.taught:
            names = named_sources([f"{_short(name)}=" for name in reward])
            self.adapters = {name: f"stage:teacher_{name}" for name in names}

    def _shipped(self, name: str) -> dict[str, Any]:
        return read(self.folder / f"{name}.yaml")

    def data(self) -> dict[str, Any]:
        """The raw config; ValueError for numbers of files that do not fit."""
        data: dict[str, Any]
        if self.like in TEACHER_STAGES:  # a task for each reward
            data = self._teacher(self.like, self.rewards[0])
            data |= self._tasks(map(_short, self.rewards))
            data["tasks"] = self._paid(data["tasks"])
            if data.get("evaluation"):
                watch = data["evaluation"].pop("watch", None) or self._watch()
                watch = unpaid(watch, [task["reward"] for task in data["tasks"]])
                data["evaluation"] |= {"watch": watch} if watch else {}
        elif self.like == "merge":
            shipped = [teacher["adapter"] for teacher in self.student["teachers"].values()]
            data = _average(list(self.adapters.values()) or shipped) | {"method": "concat"}
        else:
            makers = {"recipe": self._recipe, "eval": self._evaluation, "dpo": self._pairs}
            data = makers.get(self.like, self._student)()
        model = self.eval["model"] | data.get("model", {}) | {"id": self.model}
        card = card_of(self.model)
        if card and card[0] <= FEW_STEPS:
            data = _without_sampling(data)
            if self.like in ("opd", "recipe"):
                # a teacher's velocity is right only at its own noise levels
                student = data["stages"]["student"] if self.like == "recipe" else data
                student["rollout"] = student["rollout"] | {"kind": "ode"}
                student["student"] = student["student"] | {"noise_levels": {"select": "all"}}
        data |= {"stage": self.stage, "output": f"outputs/{self.out.stem}", "model": model}
        # a plugin's stage lacks some keys of the built-in one; its own section has others
        fields = stage_class(self.stage).model_fields
        if self.stage != self.like and self.stage in fields and self.like in data:
            section: Any = fields[self.stage].annotation
            copied = {k: v for k, v in data[self.like].items() if k in section.model_fields}
            data[self.stage] = copied | own_keys(section)
        return {k: v for k, v in data.items() if k in fields}

    def notes(self, data: Mapping[str, Any]) -> Iterator[str]:
        label = label_of(self.folder / "eval.yaml")
        if label and self.stage in STAGES:  # not a plugin
            text = f"{label} with the prompts and rewards there ({LABELS[label]})"
            yield f"settings as in configs/{self.folder.name}: {text}."
        if self.stage not in STAGES:
            yield f"keys that {self.stage} does not declare itself are those of {self.like}."
        if not self.known:
            text = "is not known here, so the values are those of Stable Diffusion 3.5"
            yield f"the family of {self.model} {text}. Check model, guidance and steps."
        stages = data.get("stages", {})
        if guided := stages.get("guided"):
            scale = guided["teachers"]["base"]["guidance"]
            text = f"`guided` puts the base's CFG of {scale:g} (card or shipped config) into a LoRA"
            yield f"{text}. Then all is trained and sampled at 1, with labels at {LABELS_AT:g}."
        if self.like in TEACHER_STAGES and not (data.get("evaluation") or {}).get("watch"):
            text = "here are no prompts of another task with a judge that is on this disk"
            yield f"no judge watches for a hacked reward: {text} (docs/alarm.md)."
        if stages.get("student", data).get("evaluation", "on") is None:
            yield (
                "evaluation is off, so the last weights are kept, not the best. It needs held-out "
                "prompts (NAME_val.txt) of every task that has a reward, or of all if none has."
            )

    # Stages ------------------------------------------------------------------------------------

    def _teacher(self, stage: str, reward: str) -> dict[str, Any]:
        """The shipped teacher of a reward; where the family has none of this stage, the one of SD35
        with the family's guidance."""
        for folder in (self.folder, SD35):
            files = [file for name in ("teacher_*", "dpo") for file in folder.glob(f"{name}.yaml")]
            # if a reward has two, use the shorter name: x.yaml, not x_published.yaml
            configs = [c for c in map(read, sorted(files, reverse=True)) if c["stage"] == stage]
            by_reward = {first_judge(c["tasks"][0]): c for c in configs}
            if by_reward:
                break
        data = by_reward.get(reward) or by_reward.get("ocr") or next(iter(by_reward.values()))
        if folder != self.folder:
            guidance = {"guidance": self.student["rollout"]["guidance"]}
            data |= {"model": {}, "rollout": data["rollout"] | guidance}
        return data

    def _paid(self, tasks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Tasks of a student, as tasks of a teacher: with the shipped rewards, which may score only
        parts of what is judged."""
        stage = self.like if self.like in TEACHER_STAGES else "nft"
        paid = []
        for task in tasks:
            (shipped,) = self._teacher(stage, task["reward"]["name"])["tasks"]
            parts = {part.name: part for part in parts_of(shipped["reward"])}
            same = parts.get(task["reward"]["name"])
            reward = {"name": same.name, "options": same.options} if same else task["reward"]
            paid.append({**task, "reward": reward})
        if len(paid) == 1:
            paid[0].pop("weight", None)
        return paid

    def _watch(self) -> list[dict[str, Any]]:
        """What a run may watch (docs/alarm.md): the prompts of the family's tasks whose sets are
        here, with the judges whose weights are on this disk."""
        found = []
        for task in self.student["tasks"]:
            judges = {name: self._reward(name) for name in (task["reward"]["name"], *QUALITY)}
            judges = {name: reward for name, reward in judges.items() if on_disk(reward)}
            if judges and path_of(task["prompts"]).is_file():
                shared = {"name": f"watched_{task['name']}", "limit": WATCHED}
                found.append({**shared, "prompts": task["prompts"], "rewards": judges})
        return found

    def _pairs(self) -> dict[str, Any]:
        """The shipped teacher from pairs, with the user's pairs if --prompts names them."""
        data = self._teacher("dpo", "")
        (task,) = data["tasks"]
        (pairs,) = _one_each("--prompts", self.prompts, 1)
        return data | {"tasks": [task | ({"prompts": pairs} if pairs else {})]}

    def _student(self) -> dict[str, Any]:
        """A student of the teachers that are given, else of the shipped ones, a task for each."""
        shipped = self.like == "sft" and (self.folder / "sft.yaml").is_file()
        data = self._shipped("sft") if shipped else dict(self.student)
        like = dict(next(iter(data["teachers"].values())))
        if like.get("guidance") != data["rollout"]["guidance"]:  # that of the shipped teachers
            like.pop("guidance", None)
            if self.taught:
                like["guidance"] = data["rollout"]["guidance"]
        teachers = {name: like | {"adapter": adapter} for name, adapter in self.adapters.items()}
        data["teachers"] = teachers or data["teachers"]
        data |= self._tasks(data["teachers"])
        if teachers and data.get("anchor"):  # as in the paper: a LoRA of good pictures
            of = {task["name"]: task.get("reward", {}).get("name") for task in data["tasks"]}
            good = [teachers[name]["adapter"] for name, reward in of.items() if reward in QUALITY]
            # the base as anchor costs a pass and does not help (docs/results.md)
            chosen = {"adapter": good[0], "weight": ANCHOR_WEIGHT} if good else {}
            data["anchor"] = data["anchor"] | chosen if good else None
        if not any("reward" in task for task in data["tasks"]) and self.like != "sft":
            # LoRAs of styles matter at every sigma, rewards mostly at high ones
            data["student"] = data["student"] | {"noise_levels": {"select": "random", "count": 1}}
            # the shipped number of updates is for rewards: end when the distance stops falling
            if (evaluation := data.get("evaluation", {})) is not None:
                data["student"] |= {"patience": 3}
                data["evaluation"] = evaluation | {"every": 10}
        return data

    def _tasks(self, names: Iterable[str]) -> dict[str, Any]:
        """Tasks of these names. An evaluation measures their scores or, for a student without any
        reward, the distances to its teachers."""
        names = list(names)
        rewards = _one_each("--reward", self.rewards, len(names))
        prompts = _one_each("--prompts", self.prompts, len(names))
        tasks = list(map(self._task, names, rewards, prompts))
        files = [task["prompts"] for task in tasks if "reward" not in task]
        if same := next((file for file in files if files.count(file) > 1), ""):
            text = f"several LoRAs would have the prompts of {same}, and a prompt has one teacher"
            raise ValueError(f"--prompts: {text}. Give one file for each, with its trigger words.")
        judged = [task for task in tasks if "reward" in task] or (
            [] if self.like == "sft" else tasks
        )
        for task in tasks:
            if task not in judged:
                task.pop("validation", None)
        held_out = judged and all("validation" in task for task in judged)
        return {"tasks": tasks} | ({} if held_out else {"evaluation": None})

    def _recipe(self) -> dict[str, Any]:
        """A teacher for each reward, if none are given; the merge of the teachers, the student that
        starts from it, and the table."""
        student: dict[str, Any] = self._student() | {"stage": "opd"}
        adapters = {name: teacher["adapter"] for name, teacher in student["teachers"].items()}
        if unscored := [task["name"] for task in student["tasks"] if "reward" not in task]:
            raise ValueError(
                f"--reward: missing for {', '.join(unscored)}. Give one for each of the "
                f"{len(adapters)} teachers, in their order; it scores the images of the table."
            )
        models = {"base": None, **adapters}
        stages = dict[str, Any]()
        table = dict[str, Any]()
        if self.taught:
            for task in student["tasks"]:  # each has the name of its teacher
                off = {} if "validation" in task else {"evaluation": None}
                data = self._teacher("nft", task["reward"]["name"])
                taught = {"stage": "nft", "tasks": self._paid([task]), **off}
                stages[f"teacher_{task['name']}"] = data | taught
            if scale := self._cfg_scale():
                models = {"base": None, "base_cfg": None, **adapters}
                table = {"guidance": {"base_cfg": scale}, "compare": {"student": ["base_cfg"]}}
                student["lora"] = {"init": next(iter(adapters.values()))}
                if self.model != "tiny":  # whose shipped settings are of a base without CFG
                    stages = _without_cfg(stages, student, scale)
                    models["guided"] = "stage:guided"
                    table["sampling"] = self.eval["sampling"] | {"guidance": 1.0}
        if len(adapters) > 1:
            stages["merge"] = {"stage": "merge"} | _average(list(adapters.values()))
            student["lora"] = {"init": "stage:merge"}
            models["merge"] = "stage:merge"
        models["student"] = "stage:student"
        rows = [
            self._benchmark(t["name"], t["reward"], fallback=t.get("validation", t["prompts"]))
            for t in student["tasks"]
        ]
        stages |= {"student": student, "table": self._table(models, rows) | table}
        for name, stage in stages.items():
            stages[name] = {key: value for key, value in stage.items() if key not in SHARED}
        return {"seed": 0, "stages": stages}

    def _cfg_scale(self) -> float | None:
        """The usual scale of a base with classifier-free guidance; None for others."""
        usual = 3.0 if self.model == "tiny" else self.eval["sampling"]["guidance"]
        steps, scale = card_of(self.model) or (FEW_STEPS + 1, usual)
        shipped = self.eval["model"]["id"]
        spec = known(ModelConfig(id=self.model)) or known(ModelConfig(id=shipped))
        return scale if spec and spec.family.guidance == "cfg" and steps > FEW_STEPS else None

    def _evaluation(self) -> dict[str, Any]:
        files = _one_each("--prompts", self.prompts, len(self.rewards))
        rows = [
            self._benchmark(_short(name), self._reward(name), file)
            for name, file in zip(self.rewards, files, strict=True)
        ]
        data = self._table({"base": None, **self.adapters}, rows or self.eval["benchmarks"])
        *others, last = self.adapters or [""]
        return data | ({"compare": {last: others}} if others else {})

    def _table(self, models: Mapping[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
        """The family's evaluation of other models on these benchmarks."""
        data = self.eval | {"models": models, "benchmarks": rows}
        shipped = {benchmark["prompts"] for benchmark in self.eval["benchmarks"]}
        if not {row["prompts"] for row in rows} <= shipped:
            data.pop("fidelity", None)  # its reference images belong to the shipped prompts
        return data

    # Tasks and rewards -------------------------------------------------------------------------

    def _benchmark(
        self, name: str, reward: Mapping[str, Any], prompts: str = "", fallback: str = ""
    ) -> dict[str, Any]:
        """A benchmark. Without `prompts` it has the shipped test prompts of its reward, else
        `fallback`, else the prompts of any reward."""
        shipped = self.eval["benchmarks"]
        like = next((b for b in shipped if b["reward"]["name"] == reward["name"]), None)
        prompts = prompts or (like or {"prompts": fallback})["prompts"] or shipped[-1]["prompts"]
        return (like or shipped[-1]) | {"name": name, "reward": reward, "prompts": prompts}

    def _task(self, name: str, reward: str, prompts: str) -> dict[str, Any]:
        """A task; what is "" comes from the shipped task of that reward or name, if any."""
        general = {key: self.tasks["preference"][key] for key in ("prompts", "validation")}
        task = {**self.tasks.get(reward or name, general), "name": name}
        if reward not in ("", NONE):
            task["reward"] = self._reward(reward)
        elif prompts:  # the user's own; their judge is not known by a name
            task.pop("reward", None)
        if prompts:
            path = Path(prompts)  # of x_train or x, x_val
            validation = str(path.with_stem(f"{path.stem.removesuffix('_train')}_val"))
            task["prompts"] = prompts
            task["validation"] = validation if path_of(validation).is_file() else None
        return {key: value for key, value in task.items() if value}

    def _reward(self, name: str) -> dict[str, Any]:
        """A reward with the options of the shipped configs; for a URL the reward `remote`. Raises
        ValueError for an unknown reward, or one that needs other options."""
        if name == "remote":
            text = "give the URL of its server in its place, as --reward http://HOST:PORT"
            raise ValueError(f"--reward remote: {text} (docs/rewards/remote.md).")
        options = self.tasks.get(name, {}).get("reward", {}).get("options", {})
        if name.startswith(URLS):
            options = {"urls": name}
            name = "remote"
        reward_registry.RewardSpec(name, options).check()
        return {"name": name} | ({"options": options} if options else {})


def _without_sampling(data: Any) -> Any:
    """A raw config without steps, scales and parts of the schedule. For a distilled model its card
    decides these; the shipped config is for its base."""
    if not isinstance(data, dict):
        return data
    left_out = {"steps", "guidance", "window", "levels", "within"}
    return {key: _without_sampling(value) for key, value in data.items() if key not in left_out}


def _without_cfg(
    teachers: Mapping[str, dict[str, Any]], student: dict[str, Any], scale: float
) -> dict[str, dict[str, Any]]:
    """These stages, after one that puts the base's guidance into a LoRA, where they start. They and
    the student are sampled without CFG."""
    without = {"guidance": 1.0}
    student["rollout"] = student["rollout"] | without
    for teacher in student["teachers"].values():
        teacher["guidance"] = LABELS_AT
    tasks = [{key: t[key] for key in ("name", "prompts")} | {"teacher": "base"}
             for t in student["tasks"]]  # fmt: skip
    guided = read(CONFIGS / "common" / "_guided.yaml") | {"evaluation": None, "tasks": tasks}
    guided["teachers"] = {"base": {"adapter": None, "guidance": scale}}
    stages = {"guided": guided}
    for name, data in teachers.items():
        guided |= {"lora": data["lora"]} if "lora" in data else {}  # all stages have its rank
        start = {"lora": {"init": "stage:guided"}, "rollout": data["rollout"] | without}
        stages[name] = data | start
    return stages


def parts_of(reward: Mapping[str, Any] | None) -> list[reward_registry.RewardSpec]:
    """The judges that a reward of a raw config is made of."""
    if reward is None:
        return []
    return list(reward_registry.RewardSpec(reward["name"], reward.get("options", {})).parts())


def first_judge(task: Mapping[str, Any]) -> str | None:
    """The judge that a task is for: of a product, the one that it names first."""
    return next((part.name for part in parts_of(task.get("reward"))), None)


def unpaid(
    watch: Sequence[Mapping[str, Any]], rewards: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The watched benchmarks without the judges that the rewards of a run are made of."""
    paid = {part.name for reward in rewards for part in parts_of(reward)}
    kept = []
    for benchmark in watch:
        judges = benchmark.get("rewards", {}).items()
        left = {name: judge for name, judge in judges if judge["name"] not in paid}
        alone = benchmark.get("reward")
        if left:
            kept.append({**benchmark, "rewards": left})
        elif alone and alone["name"] not in paid:
            kept.append({**benchmark})
    return kept


def own_keys(section: type[Section]) -> dict[str, Any]:
    """The defaults of the keys that a plugin's section declares itself."""
    kinds = (kind for kind in section.__mro__ if not kind.__module__.startswith("flowalign."))
    names = {name for kind in kinds for name in inspect.get_annotations(kind)}
    return {
        name: field.get_default(call_default_factory=True)
        for name, field in section.model_fields.items()
        if name in names and not field.is_required()
    }


def on_disk(reward: Mapping[str, Any]) -> bool:
    """Whether a reward can be built without a download."""
    spec = reward_registry.RewardSpec(reward["name"], reward.get("options", {}))
    return not spec.missing_packages and all(files.cached for files in spec.hub_files)


def _average(adapters: list[str]) -> dict[str, Any]:
    return {"adapters": adapters, "weights": [round(1 / len(adapters), 4)] * len(adapters)}


def _one_each(flag: str, values: Sequence[str], count: int) -> Sequence[str]:
    """The values of a flag, one for each task; "" each where none are given."""
    if values and len(values) != count:
        raise ValueError(f"{flag}: got {len(values)} for {count} tasks or benchmarks; one each.")
    return values or [""] * count


def _short(reward: str) -> str:
    """The name of a task for a reward: redness for my_rewards:redness, remote_gpu7_8000 for the URL
    http://gpu7:8000."""
    if reward.startswith(URLS):
        address = reward.partition("://")[2].rstrip("/")
        return re.sub(r"\W+", "_", f"remote_{address}")
    return reward.rpartition(":")[2].rpartition(".")[2]


class _Writer:
    """Sections as YAML, in the schema's order. The meaning of a key stands above its first use.
    every: with the keys at their defaults, too."""

    def __init__(self, every: bool) -> None:
        self.every = every
        self.explained = set[tuple[type[Section], str]]()

    def text(self, section: Any, without: Sequence[str] = ()) -> str:
        parts = []
        kind = type(section)
        # lora.init decides the other keys of `lora`
        every = self.every and not getattr(section, "init", None)
        for key, field in kind.model_fields.items():
            if key in without or not (every or key in section.model_fields_set):
                continue
            if (kind, key) not in self.explained:
                self.explained.add((kind, key))
                parts.append(_comment(field.description or about(field.annotation)))
            value = getattr(section, key)
            if key == "stages":
                shared = {"model": section.model, "output": section.output}
                value = {n: STAGES[part["stage"]](**part, **shared) for n, part in value.items()}
            parts.append(self._entry(key, value))
        return "\n".join(parts)

    def _entry(self, key: str, value: Any) -> str:
        if isinstance(value, Section):
            text = self.text(value, SHARED if isinstance(value, Stage) else ())
        elif isinstance(value, list) and any(isinstance(part, Section) for part in value):
            text = "\n".join(f"- {textwrap.indent(self.text(p), '  ')[2:]}" for p in value)
        elif isinstance(value, dict) and any(isinstance(p, Section) for p in value.values()):
            text = "\n".join(self._entry(name, part) for name, part in value.items())
        else:
            return f"{inline_yaml(key)}: {inline_yaml(to_jsonable_python(value))}"
        return f"{inline_yaml(key)}:\n{textwrap.indent(text, '  ')}"


def _comment(text: str) -> str:
    return "\n".join(f"# {line}" for line in textwrap.wrap(" ".join(text.split()), COMMENT_WIDTH))
