"""`flowalign init`: every config that it writes is one that the commands take."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from flowalign.backbone.adapters import describe_adapter, write_lora
from flowalign.backbone.structure import model_spec
from flowalign.checks import Launch, refused
from flowalign.checks.numbers import card
from flowalign.commands import CONFIGS, cli, recipe
from flowalign.commands.doctor import live
from flowalign.commands.init import USED
from flowalign.config import (
    STAGES,
    RecipeStage,
    Section,
    Stage,
    TrainingStage,
    load,
)
from flowalign.config.model import LoraConfig, ModelConfig
from flowalign.config.safe_yaml import load_yaml
from flowalign.rewards import RewardSpec
from flowalign.training.inputs import Inputs

MEDIUM = "stabilityai/stable-diffusion-3.5-medium"
LARGE = "stabilityai/stable-diffusion-3.5-large"
ROW = '{"prompt": "a photo of a kite", "tag": "x", "include": [{"class": "kite", "count": 1}]}'


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def init(*words: str) -> int:
    try:
        return cli.main(["init", *words])
    except SystemExit as refused:  # by argparse
        return int(refused.code or 0)


def written(*words: str) -> Any:
    assert init(*words, "--out", "own.yaml", "--force") == 0
    return load("own.yaml", stage=Stage)


def test_a_run_does_not_watch_a_judge_that_it_learns_from() -> None:
    config = written("--stage", "nft", "--reward", "ocr", "pickscore", "--model", "tiny")
    judges = {spec.name for benchmark in config.watched for spec in benchmark.judges.values()}
    assert judges == {"geneval"}
    every = ("--reward", "ocr", "pickscore", "geneval")
    assert not written("--stage", "nft", *every, "--model", "tiny").watched


def test_a_reward_has_the_settings_of_the_teacher_whose_product_begins_with_it() -> None:
    """The tiny GenEval teacher's reward is GenEval times PickScore."""
    config = written("--stage", "nft", "--reward", "geneval", "--model", "tiny")
    shipped = load_shipped("tiny", "teacher_geneval_nft")
    assert (config.rollout, config.nft) == (shipped.rollout, shipped.nft)
    assert config.tasks[0].reward.options == {"detector": "tiny", "reward": "official"}
    assert {spec.name for one in config.watched for spec in one.judges.values()} == {
        "ocr", "pickscore",
    }  # fmt: skip


def test_a_run_watches_what_is_on_this_disk(capsys: pytest.CaptureFixture[str]) -> None:
    """OCR needs no weights of the Hub; PickScore's are not here."""
    wanted = ("--stage", "nft", "--reward", "pickscore", "--model", MEDIUM)
    assert not written(*wanted).watched
    assert "docs/alarm.md" in capsys.readouterr().out
    Path("data").mkdir()
    Path("data/ocr_train.txt").write_text('a sign that says "KITE"\n' * 30)
    (watched,) = written(*wanted).watched
    assert [spec.name for spec in watched.judges.values()] == ["ocr"] and watched.limit == 24


@pytest.mark.slow
def test_a_config_is_written_for_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ("--stage", "nft", "--reward", "ocr", "--model", MEDIUM)
    config = written(*wanted, "--gpu", "4090")
    assert config.model.gradient_checkpointing and not written(*wanted).model.gradient_checkpointing
    assert "--gpu 4090" in capsys.readouterr().out
    assert init(*wanted, "--hours", "3", "--out", "own.yaml", "--force") == 2  # of what GPU?


def test_a_model_that_nobody_knows_is_not_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ("--stage", "nft", "--reward", "ocr", "--gpu", "4090")
    written(*wanted, "--model", MEDIUM.replace("diffusion", "difusion"))
    out = capsys.readouterr().out
    assert "not predicted for 4090" in out and f"'{MEDIUM}'" in out


PROMPTS = {  # each read by another reader
    "signs.txt": 'a sign that says "KITE"\na sign that says "LAMP"\n',
    "kites.jsonl": ROW,
    "styles.csv": "prompt,style\na kite over a lake,oil\n",
}
OF: dict[str, list[str | None]] = {  # reward -> prompts; None = those of the shipped configs
    "ocr": [None, "signs.txt"],
    "geneval": [None, "kites.jsonl"],
    "pickscore": [None, *PROMPTS],
}
MODELS = (
    "tiny", MEDIUM, f"{LARGE}-turbo", "black-forest-labs/FLUX.1-dev",
    "black-forest-labs/FLUX.2-dev", "black-forest-labs/FLUX.1-schnell", "Qwen/Qwen-Image",
    "Tongyi-MAI/Z-Image",
    "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers",
)  # fmt: skip


def models_with(stages: Iterable[str]) -> list[Any]:
    """Every (model, stage). The tiny model is fast. Slow are SD3.5 with every stage and every
    family with a teacher and a student; the others are long."""

    def mark(model: str, stage: str) -> tuple[pytest.MarkDecorator, ...]:
        if model == MODELS[0]:
            return ()
        return (
            pytest.mark.slow if model == MEDIUM or stage in ("nft", "opd") else pytest.mark.long,
        )

    return [pytest.param(m, s, marks=mark(m, s)) for s in stages for m in MODELS]


def lora(model: str) -> str:
    """A LoRA of one layer that fits the model, as another trainer might leave it."""
    spec = model_spec(ModelConfig(id=model))
    layer = spec.adapted()[0]
    linear: Any = spec.family.core.get_submodule(layer)
    halves = {"A": (1, linear.in_features), "B": (linear.out_features, 1)}
    weights = {f"{layer}.lora_{half}.weight": torch.ones(shape) for half, shape in halves.items()}
    write_lora("lora", weights, describe_adapter({layer: 1}, {layer: 1.0}, False, model))
    return "lora"


@pytest.mark.usefixtures("clip_extra")
@pytest.mark.parametrize("model, stage", models_with(STAGES))
def test_what_is_written_for_any_stage_reward_and_prompts_can_run(
    model: str, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All stages of it, with teachers and prompts of the user's; the shipped configs' prompts are
    where they expect them."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name, text in PROMPTS.items():  # of objects that the model's detector knows
        Path(name).write_text(text.replace("kite", "dog") if model == MODELS[0] else text)
    teachers = [f"one={lora(model)}", "two=lora"]
    taught = stage in USED["teachers"]
    every = [(r, p) for r, several in OF.items() for p in several]
    if stage in ("nft", "awm", "sft"):  # the tasks of grpo and opd
        every = [(reward, several[-1]) for reward, several in OF.items()]
    if stage == "gradient":
        every = [
            (reward, prompts) for reward, prompts in every if RewardSpec(reward).differentiable
        ]
    for reward, prompts in every if stage in USED["reward"] else every[:1]:
        words = ["--stage", stage, "--model", model]
        if taught:
            words += ["--teachers", *teachers]
        if stage in USED["reward"]:
            words += ["--reward", *[reward] * (1 + (taught and stage != "eval"))]
            if prompts:
                words += ["--prompts", *[prompts] * (1 + (taught and stage != "eval"))]
        config = written(*words)
        named = re.findall(r"data/[\w/]+\.\w+", Path("own.yaml").read_text())
        for name in named if stage != "dpo" else ():
            Path("data").mkdir(exist_ok=True)
            Path(name).write_text(PROMPTS["kites.jsonl" if name.endswith("l") else "signs.txt"])
        if stage == "dpo":
            fakes.write_pairs(Path(config.tasks[0].prompts).parent, 1, config.model.size)
        _, problems = recipe.stages_and_problems(config, Path())
        assert refused(problems) == [], (reward, prompts)


WAYS = {  # stage -> what `init` can be given for it
    "opd": ["--loras one=lora two=lora --prompts a.txt b.txt",
            "--loras one=lora two=lora --prompts a.txt b.txt --reward ocr none"],
    "sft": ["--loras one=lora two=lora --prompts a.txt b.txt"],
    "recipe": ["--reward ocr pickscore --prompts a.txt b.txt",
               "--teachers one=lora two=lora --reward ocr pickscore --prompts a.txt b.txt"],
    "gradient": ["", "--reward pickscore --prompts a.txt"],
    "dpo": [""],
}  # fmt: skip


@pytest.mark.usefixtures("clip_extra")
@pytest.mark.parametrize(
    "model, stage", models_with(n for n, kind in STAGES.items() if kind.trains or kind.is_recipe)
)
def test_the_doctor_finds_no_fault_that_train_does_not(
    model: str, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `train` says of a distilled model's card, both say."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for number, name in enumerate(("a", "a_val", "b", "b_val")):
        Path(f"{name}.txt").write_text(f'a sign that says "KITE {number}"\n' * 4)
    lora(model)
    for words in WAYS.get(stage, ["", "--reward ocr --prompts a.txt"]):
        config = written("--stage", stage, "--model", model, *words.split())
        named = re.findall(r"data/[\w/]+\.\w+", Path("own.yaml").read_text())
        for name in named if stage != "dpo" else ():
            Path("data").mkdir(exist_ok=True)  # the shipped configs' prompts
            row = ROW if name.endswith("l") else 'a sign that says "KITE"'
            Path(name).write_text(row.replace("a ", f"a {Path(name).stem} ", 1))
        if stage == "dpo":
            fakes.write_pairs(Path(config.tasks[0].prompts).parent, 1, config.model.size)
        stages, said = recipe.stages_and_problems(config, Path(), Launch(resume=False))
        assert refused(said) == [], words
        _, advised = recipe.stages_and_problems(config, Path(), Launch(resume=False, advise=True))
        assert {p for p in advised if p.level == "fault"} <= {*said}, words
        for part in stages.values():
            if isinstance(part, TrainingStage):
                live.small_run(part, "probe")  # no ConfigError


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "opd" else pytest.mark.long)
        for name, kind in STAGES.items()
        if kind.trains
    ],
)
def test_the_doctor_runs_a_config_as_it_is_written(stage: str, capsys: Any) -> None:
    """README's path, with the small run of the doctor."""
    way = ["--loras", "tiny/ocr", "tiny/preference"]
    way += ["--prompts", "tiny/ocr_train", "tiny/preference_train"]
    config = written("--stage", stage, *(way if stage in ("opd", "sft") else []))
    if stage == "dpo":
        fakes.write_pairs(Path(config.tasks[0].prompts).parent, 8, config.model.size)
    capsys.readouterr()
    assert cli.main(["doctor", "--config", "own.yaml"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    "model, folder, guidance",
    [("black-forest-labs/FLUX.1-dev", "flux", 3.5), ("Qwen/Qwen-Image", "qwen_image", 4.0),
     ("black-forest-labs/FLUX.2-dev", "flux2", 4.0), ("Tongyi-MAI/Z-Image", "z_image", 5.0),
     (MODELS[-1], "sana", 4.5), ("me/unknown", None, 1.0)],
)  # fmt: skip
def test_values_are_those_of_the_model_s_family(
    model: str, folder: str | None, guidance: float, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Where the family ships no config for a stage: the method of SD3.5, its own guidance."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    config = written("--stage", "grpo", "--model", model)
    assert config.rollout.guidance == guidance and config.grpo.clip_range == 1e-5
    assert ("is not known" in capsys.readouterr().out) == (folder is None)
    if folder is None:
        return
    for stage, name in (("nft", "teacher_ocr_nft"), ("opd", "student_flow_opd"), ("eval", "eval")):
        config, shipped = written("--stage", stage, "--model", model), load_shipped(folder, name)
        parts = {"model": shipped.model.model_copy(update={"id": model}), "output": config.output}
        if stage == "nft":
            parts["seed"] = config.seed
        assert config == shipped.model_copy(update=parts)
    recipe = written("--stage", "recipe", "--model", model)
    assert recipe.model.size == shipped.model.size
    sampling = shipped.sampling.model_dump(exclude_unset=True)
    assert recipe.stages["table"]["sampling"] == sampling
    assert recipe.stages["student"]["rollout"]["guidance"] == guidance


def load_shipped(folder: str, name: str) -> Any:
    return load(f"{CONFIGS}/{folder}/{name}.yaml", stage=Stage)


def every_field(value: Any) -> set[tuple[str, str]]:
    """(key, its meaning) of a section and of the sections in it."""
    if isinstance(value, list | dict):
        values = value.values() if isinstance(value, dict) else value
        return set().union(*map(every_field, values))
    if not isinstance(value, Section):
        return set()
    fields = type(value).model_fields.items()
    named = {(key, " ".join((field.description or "").split())) for key, field in fields}
    if isinstance(value, LoraConfig) and value.init:  # it decides the other keys
        named = {(key, meaning) for key, meaning in named if key == "init"}
    return named.union(*(every_field(getattr(value, key)) for key, _ in fields))


def without_marks(text: str) -> str:
    """The text of all comments, as one line."""
    return " ".join(" ".join(re.findall(r"^[\s#-]*# *(.*)$", text, re.M)).split())


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_gives_a_config_that_loads_and_explains_its_keys(
    stage: str, capsys: Any
) -> None:
    short = written("--stage", stage)
    assert (short.stage, short.model.id, short.output) == (stage, "tiny", "outputs/own")
    assert "flowalign doctor --config own.yaml" in capsys.readouterr().out
    text = Path("own.yaml").read_text()
    for key in load_yaml(text):
        meaning = STAGES[stage].model_fields[key].description or ""
        assert " ".join(meaning.split()) in without_marks(text)
    assert without_marks(text).count("`tiny` (ships with the package), a folder, or a Hub id.") == 1
    full = written("--stage", stage, "--all")
    text = Path("own.yaml").read_text()
    for key, meaning in every_field(full):
        assert re.search(rf"^[\s#-]*{key}:", text, re.M), key
        assert meaning in without_marks(text), key
    if not isinstance(full, RecipeStage):
        assert full == short
        return
    assert list(full.stages) == list(short.stages)
    for name, part in full.stages.items():
        given = {"output": "x", "model": short.model}
        kind = STAGES[part["stage"]]
        assert kind(**part, **given) == kind(**short.stages[name], **given)
        assert "seed" not in part  # the recipe gives it


def load_stage(config: Any, name: str) -> Any:
    return recipe.read_stages(config, Path())[0][name]


def test_own_prompts_and_a_reward() -> None:
    Path("my.txt").write_text('a sign that says "KITE"\n')
    config = written("--stage", "grpo", "--reward", "ocr", "--prompts", "my.txt")
    (task,) = config.tasks
    assert (task.name, task.prompts, task.validation) == ("ocr", "my.txt", None)
    assert config.evaluation is None and task.reward and task.reward.options
    Path("my_val.txt").write_text('a sign that says "LAMP"\n')
    config = written("--stage", "grpo", "--reward", "ocr", "--prompts", "my.txt")
    assert config.tasks[0].validation == "my_val.txt" and config.evaluation
    table = written("--stage", "eval", "--reward", "ocr", "--prompts", "my.txt")
    assert table.fidelity is None  # needs tiny prompts
    shipped = written("--stage", "grpo", "--reward", "ocr", "--prompts", "tiny/ocr_train")
    assert shipped.tasks[0].validation == "tiny/ocr_val" and shipped.evaluation
    Path("tiny").mkdir()  # a folder of the user's own
    for name in ("tiny/my.txt", "tiny/my_val.txt"):
        Path(name).write_text('a sign that says "LAMP"\n')
    own = written("--stage", "grpo", "--reward", "ocr", "--prompts", "tiny/my.txt")
    assert own.tasks[0].validation == "tiny/my_val.txt"


@pytest.mark.parametrize("stage", ["nft", "grpo", "recipe"])
def test_a_teacher_is_paid_as_the_shipped_one(stage: str) -> None:
    """GenEval's published reward pays for parts of a scene; the official score does not."""
    config = written("--stage", stage, "--model", MEDIUM, "--reward", "geneval")
    if stage == "recipe":
        judged = config.stages["student"]["tasks"][0]["reward"]["options"]["reward"]
        (task,) = load_stage(config, "teacher_geneval").tasks
        assert judged == "official"
    else:
        (task,) = config.tasks
    assert task.reward.options["reward"] == "published" and task.weight == 1


def test_of_two_shipped_teachers_of_a_reward_the_usual_one_is_taken() -> None:
    config = written("--stage", "nft", "--model", MEDIUM, "--reward", "geneval")
    usual, published = (
        load_shipped("sd35_medium", f"teacher_geneval_nft{end}") for end in ("", "_published")
    )
    assert config.nft == usual.nft != published.nft


def test_names_that_look_like_other_values_stay_names() -> None:
    names = ["1e3", "007", "on", "null", "1_0", "2026-11-22", "true"]
    files = [f"prompts_{number}.txt" for number in range(len(names))]
    for file in files:
        Path(file).write_text("a kite\n")
    words = ["--stage", "opd", "--prompts", *files, "--teachers"]
    config = written(*words, *(f"{name}=base" for name in names))
    assert list(config.teachers) == [task.name for task in config.tasks] == names


def test_own_teachers() -> None:
    config = written("--stage", "opd", "--teachers", "ocr=runs/a/adapter", "photo=me/b")
    adapters = {name: teacher.adapter for name, teacher in config.teachers.items()}
    assert adapters == {"ocr": "runs/a/adapter", "photo": "me/b"}
    assert config.routing == {"ocr": "ocr", "photo": "photo"}
    config = written("--stage", "merge", "--teachers", "tiny/ocr", "tiny/geneval")
    assert config.adapters == ["tiny/ocr", "tiny/geneval"] and config.weights == [0.5, 0.5]
    config = written("--stage", "eval", "--teachers", "runs/a/adapter", "x=runs/b/adapter")
    assert config.models == {"base": None, "a": "runs/a/adapter", "x": "runs/b/adapter"}
    assert config.compare == {"x": ["a"]}  # the last one, besides the base


@pytest.mark.parametrize(
    ("layer", "family"),
    [("transformer.single_transformer_blocks.0.attn.to_q", "FLUX"),
     ("lora_unet_down_blocks_1_attentions_0_proj_in", "Stable Diffusion XL"),
     ("transformer.transformer_blocks.0.attn.to_q", None)],
)  # fmt: skip
def test_a_lora_of_another_family_is_said_at_once(
    layer: str, family: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    width = 1536  # of the Medium
    halves = {"down": torch.ones(2, width), "up": torch.ones(width, 2)}
    save_file({f"{layer}.lora_{h}.weight": halves[h] for h in halves}, "a.safetensors")
    Path("a.txt").write_text("A fox")
    words = ["--stage", "opd", "--model", MEDIUM, "--loras", "a.safetensors", "--prompts", "a.txt"]
    assert init(*words, "--out", "own.yaml") == bool(family)
    said = capsys.readouterr().out
    assert ("problem: teachers.a" in said) == (f"LoRAs of {family}" in said) == bool(family)
    Path("a.safetensors").unlink()
    assert init(*words, "--out", "own.yaml", "--force") == 1
    assert "problem: teachers.a" in capsys.readouterr().out


@pytest.mark.parametrize(("reward", "anchor"), [("pickscore", "tiny/preference"), ("none", None)])
def test_the_anchor_of_own_teachers_is_that_of_good_pictures_or_none(
    reward: str, anchor: str | None
) -> None:
    given = "--teachers tiny/ocr tiny/preference --prompts tiny/ocr_train tiny/preference_train"
    model = ["--model", "stabilityai/stable-diffusion-3.5-medium"]
    config = written("--stage", "opd", *model, *given.split(), "--reward", "ocr", reward)
    assert (config.anchor and config.anchor.adapter) == anchor
    if anchor:
        assert config.anchor.weight == 0.3  # docs/results.md; the paper's is .04


@pytest.mark.parametrize(
    ("stage", "more"), [("nft", ""), ("grpo", ""), ("recipe", ""), ("recipe", "http://b.c/x"),
                        ("eval", "ocr"), ("opd", "none")]
)  # fmt: skip
def test_a_reward_behind_a_url(stage: str, more: str) -> None:
    """`train` and `eval` take the config as soon as the server is there."""
    for name in ("a", "a_val"):
        Path(f"{name}.txt").write_text(f'a sign that says "{name}"\n')
    words = ["--stage", stage, "--reward", "http://127.0.0.1:8000", *more.split()]
    count = 1 + bool(more)
    if stage == "opd":
        words += ["--teachers", "one=tiny/ocr", "two=tiny/geneval"]
    config = written(*words, "--prompts", *["a.txt"] * count)
    stages, problems = recipe.stages_and_problems(config, Path())
    assert refused(problems) == []
    judges = [r for s in stages.values() for j in s.judged for r in j.rewards.values()]
    remote = {reward.options["urls"] for reward in judges if reward.name == "remote"}
    assert remote == {"http://127.0.0.1:8000", *[more] * (stage == "recipe")} - {""}


@pytest.mark.parametrize("stage", ["nft", "awm", "recipe", "eval", "opd"])
@pytest.mark.parametrize(
    ("reward", "name", "row"),
    [("ocr", "a.txt", "a fox in the snow"), ("geneval", "a.txt", "a fox in the snow"),
     ("ocr", "a.csv", "text"), ("geneval", "a.jsonl", '{"prompt": "a fox", "include": 3}')],
)  # fmt: skip
def test_a_reward_says_at_once_that_it_cannot_judge_the_prompts(
    stage: str, reward: str, name: str, row: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(name).write_text(f"{row}\n")
    words = ["--stage", stage, "--reward", reward, "--prompts", name]
    words += ["--teachers", "one=tiny/ocr"] if stage == "opd" else []
    assert init(*words, "--out", "own.yaml") == 2
    assert name in capsys.readouterr().err and not Path("own.yaml").exists()


def test_loras_without_rewards_are_measured_by_their_distance() -> None:
    for name in ("ink", "ink_val", "dots", "dots_val"):
        Path(f"{name}.txt").write_text('a sign that says "KITE"\n')
    words = ["--stage", "opd", "--loras", "loras/ink.safetensors", "--loras", "me/dots"]
    words += ["--prompts", "ink.txt", "dots.txt"]
    config = written(*words)
    adapters = {name: teacher.adapter for name, teacher in config.teachers.items()}
    assert adapters == {"ink": "loras/ink.safetensors", "dots": "me/dots"}
    assert config.mixtures == {}  # at the student's scale, not that of the shipped teachers
    assert [task.validation for task in config.tasks] == ["ink_val.txt", "dots_val.txt"]
    assert config.evaluates and not any(task.reward for task in config.tasks)
    assert config.student.patience and config.evaluation.every == 10  # the run ends by itself
    assert config.student.noise_levels.select == "random"  # styles matter at low noise, too
    both = written(*words, "--reward", "ocr", "none")
    assert [task.reward and task.reward.name for task in both.tasks] == ["ocr", None]
    assert [task.validation for task in both.tasks] == ["ink_val.txt", None]
    assert both.evaluates and both.student.noise_levels.count == 3  # as shipped
    Path("ink_val.txt").unlink()
    assert not written(*words).evaluates
    assert init(*words[:6], "--out", "none.yaml") == 2 and not Path("none.yaml").exists()
    assert init(*words[:6], "--prompts", "ink.txt", "ink.txt", "--out", "none.yaml") == 2


@pytest.mark.parametrize(
    "model", [MODELS[0], *(pytest.param(m, marks=pytest.mark.slow) for m in MODELS[1:4])]
)
def test_a_recipe_of_rewards_trains_a_teacher_for_each(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole method from rewards alone: teachers, their merge, the student, the table."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in ("a.txt", "a_val.txt", "b.txt"):
        Path(name).write_text('a red sign that says "KITE"\n' * 8)
    words = ["--stage", "recipe", "--model", model, "--reward", "ocr", "clipscore"]
    config = written(*words, "--prompts", "a.txt", "b.txt")
    names = ["teacher_ocr", "teacher_clipscore", "merge", "student", "table"]
    first = ["guided"] * (model == MEDIUM)
    assert list(config.stages) == first + names
    taught, blind = (config.stages[name] for name in names[:2])
    assert taught["stage"] == blind["stage"] == "nft" and blind["evaluation"] is None
    assert [task["prompts"] for task in taught["tasks"] + blind["tasks"]] == ["a.txt", "b.txt"]
    student, table = config.stages["student"], config.stages["table"]
    adapters = {"ocr": "stage:teacher_ocr", "clipscore": "stage:teacher_clipscore"}
    assert {key: teacher["adapter"] for key, teacher in student["teachers"].items()} == adapters
    assert config.stages["merge"]["adapters"] == [*adapters.values()]
    cfg = {"base_cfg"} if model in ("tiny", MEDIUM) else set()
    assert set(table["models"]) == {"base", *adapters, "merge", "student", *first, *cfg}
    if model != MODELS[0]:
        Path("data").mkdir()
        Path("data/ocr_test.txt").write_text('a sign that says "KITE"\n')
    _, problems = recipe.stages_and_problems(config, Path())
    assert refused(problems) == []  # a guidance that is an input stays as it is


@pytest.mark.parametrize(
    "model, scale",
    [("tiny", 3.0), (MEDIUM, 4.5), (LARGE, 3.5), ("Qwen/Qwen-Image", 4.0),
     ("Tongyi-MAI/Z-Image", 5.0), ("black-forest-labs/FLUX.2-klein-base-4B", 4.0),
     (MODELS[-1], 4.5), ("me/unknown", 4.5)],
)  # fmt: skip
@pytest.mark.parametrize("count", [1, 2])
def test_a_recipe_of_a_base_with_cfg_counts_it_once(
    model: str, scale: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base's guidance first, all else at 1."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    rewards = ["ocr", "pickscore"][:count]
    config = written("--stage", "recipe", "--model", model, "--reward", *rewards)
    stages: dict[str, Any] = recipe.read_stages(config, Path())[0]
    student, table = stages["student"], stages["table"]
    start = "tiny/guided"  # it ships
    if model != "tiny":
        guided, start = stages["guided"], "outputs/own/guided/adapter"
        assert guided.guidance == 1 and guided.lora.init is None
        assert [(t.adapter, t.guidance) for t in guided.teachers.values()] == [(None, scale)]
        assert f"CFG of {scale:g} " in without_marks(Path("own.yaml").read_text())
    taught = [stages[f"teacher_{name}"] for name in rewards]
    assert [(t.stage, t.guidance, t.lora.init) for t in taught] == [("nft", 1, start)] * count
    assert {teacher.guidance for teacher in student.teachers.values()} == {1.0}
    last = "merge" if count == 2 else "teacher_ocr"
    assert (student.guidance, student.lora.init) == (1, f"outputs/own/{last}/adapter")
    scales = {name: table.sampling_of(name).guidance for name in table.models}
    assert {name for name, value in scales.items() if value != 1} == {"base_cfg"}
    assert scales["base_cfg"] == scale
    problems = recipe.stages_and_problems(config, Path())[1]
    assert {problem.key for problem in problems if problem.level != "refuse"} <= {"card"}


def test_the_table_of_a_recipe_is_of_test_prompts() -> None:
    words = ["--stage", "recipe", "--teachers", "ocr=me/a", "--reward", "ocr"]
    config = written(*words)
    assert list(config.stages) == ["student", "table"]  # one teacher: nothing is merged
    (mark,), (task,) = (config.stages["table"]["benchmarks"], config.stages["student"]["tasks"])
    assert (mark["name"], mark["prompts"]) == ("ocr", "tiny/ocr_test")
    assert "tiny/ocr_test" not in (task["prompts"], task["validation"])


@pytest.mark.parametrize(
    "words, named",
    [
        ([], "--stage"),
        (["--stage", "grpo", "--reward", "orc"], "ocr"),
        (["--stage", "grpo", "--reward", "product"], "rewards"),
        (["--stage", "nft", "--reward", "remote"], "--reward http://HOST:PORT"),
        (["--stage", "nft", "--reward", "http://me:secret@gpu7"], "urls"),
        (["--stage", "grpo", "--teachers", "a=b"], "--teachers"),
        (["--stage", "opd", "--prompts", "a.txt"], "--prompts"),
        (["--stage", "recipe", "--teachers", "ocr=tiny/ocr", "blue=a/b"], "--reward"),
        (["--stage", "merge", "--teachers", "tiny/ocr"], "adapters"),
    ],
)
def test_what_gives_no_config_is_refused_and_nothing_is_written(
    words: list[str], named: str, capsys: Any
) -> None:
    assert init(*words) == 2
    assert named in capsys.readouterr().err
    assert list(Path().iterdir()) == []


def test_the_next_command_trusts_a_reward_of_the_user_s(capsys: Any) -> None:
    written("--stage", "grpo", "--reward", "ocr")
    assert "--trust" not in capsys.readouterr().out
    head = Path("own.yaml").read_text().partition("stage:")[0]
    assert "measured with the prompts and rewards there" in without_marks(head)
    Path("brand.py").write_text("def like(images, prompts, metadata): ...")
    written("--stage", "nft", "--reward", "brand:like")
    assert "doctor --config own.yaml --trust" in capsys.readouterr().out


def test_a_file_that_is_there_stays() -> None:
    Path("grpo.yaml").write_text("mine")
    assert init("--stage", "grpo") == 2
    assert Path("grpo.yaml").read_text() == "mine"


@pytest.mark.parametrize("stage", ["grpo", "opd", "recipe", "eval"])
@pytest.mark.parametrize(
    ("model", "steps"), [("Tongyi-MAI/Z-Image-Turbo", 8), (f"{LARGE}-turbo", 4)]
)
def test_a_distilled_model_has_the_steps_and_the_guidance_of_its_card(
    model: str, steps: int, stage: str
) -> None:
    """Not those of the base whose shipped configs the rest is from."""
    own = ["--reward", "ocr"] if stage != "opd" else []
    config = written("--stage", stage, "--model", model, *own)
    if stage == "recipe":
        stage, config = "opd", load_stage(config, "student")
    sampled = config.sampling if stage == "eval" else config.rollout
    assert (sampled.steps, sampled.guidance) == (steps, 1.0)
    assert set(config.scales.values()) <= {1.0}
    if stage == "grpo":
        assert config.rollout.window is None or config.rollout.trained[-1] < steps
    if stage == "opd":
        assert config.rollout.kind == "ode" and config.student.noise_levels.select == "all"
        assert list(card(config, Launch(), Inputs())) == []


def test_changes_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    """What the doctor advises need not be typed again at each command."""
    changes = ["rollout.prompts=8", "model.gradient_checkpointing=true"]
    assert init("--stage", "nft", "--out", "own.yaml", *changes) == 0
    config = load("own.yaml")
    assert config.rollout.prompts == 8 and config.model.gradient_checkpointing
    assert init("--stage", "nft", "--out", "other.yaml", "rollout.prompt=8") == 2
    assert "rollout.prompt" in capsys.readouterr().err and not Path("other.yaml").exists()
