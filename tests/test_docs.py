"""The documents are true: links lead somewhere, the code takes the commands and the configs, and
Python runs. tests/test_as_written.py follows README and the quick start.

An HTML comment before a block says what it needs, `<!-- needs: a GPU -->` (the site shows it), or
what file a reader saves it as, `<!-- file: NAME -->`.
"""

import argparse
import contextlib
import functools
import importlib
import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import documents
import fake_hub
import pytest
import torch
from documents import Block, Command
from test_package import CONFIGS

from flowalign import rewards
from flowalign.backbone.adapters import adapter_folder
from flowalign.backbone.tiny import MODEL
from flowalign.checks import Launch, check_stage, refused, stage_problems
from flowalign.commands import cli, recipe
from flowalign.config import (
    ADAPTER,
    STAGES,
    EvalStage,
    Job,
    MergeStage,
    RecipeStage,
    Stage,
    TaskConfig,
    TrainingStage,
    assignments,
    load,
    read,
)
from flowalign.config.safe_yaml import dump_yaml

# what configs ask for counts as installed
pytestmark = pytest.mark.usefixtures("clip_extra")

ROOT = documents.ROOT
PLUGINS = {"sharpness": "flowalign_sharpness:Sharpness"}  # by entry points of docs/rewards/example
PLACEHOLDER = re.compile(
    r"(?<![a-zA-Z])[A-Z]{4,}(?![a-z])|=[A-Z]$|\.\.\.|^\["
)  # a synopsis has one

SIGN = 'a sign that says "KITE"'
ROW = {
    "prompt": SIGN, "tag": "single_object", "include": [{"class": "kite", "count": 1}],
    "atom_count": 1, "vqa_list": [["Is there a kite?", "Yes"]], "skills": ["object"],
    "questions": [["1", "0", "entity - whole (kite)", "Is there a kite?"]],
}  # fmt: skip

PAGES = list(documents.pages())
NOW = [page for page in PAGES if page.name != "CHANGELOG.md"]  # which names removed options, too
COMMANDS = [command for page in NOW for command in documents.commands(page)]
BLOCKS = [block for page in PAGES for block in documents.blocks(page)]


def test_every_link_leads_somewhere() -> None:
    broken = []
    for page, line, target in [(p, *link) for p in PAGES for link in documents.links(p)]:
        if re.match(r"(https?|mailto):", target):
            continue
        name, _, anchor = unquote(target).partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists():
            broken.append(f"{page.relative_to(ROOT)}:{line}: {target} does not exist")
        elif page.name == "CHANGELOG.md" and name:  # the site shows it as a page of docs/
            broken.append(f"CHANGELOG.md:{line}: {target}: no link is right in both places")
        elif anchor and file in PAGES and anchor not in documents.anchors(file):
            broken.append(f"{page.relative_to(ROOT)}:{line}: {target}: no heading {anchor!r}")
    assert broken == []


def test_the_reference_says_what_the_code_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """If not: python scripts/docs/reference.py."""
    monkeypatch.syspath_prepend(ROOT / "scripts" / "docs")
    reference = importlib.import_module("reference")
    stale = [
        path.name for path, text in documents.pages().items() if reference.filled(text) != text
    ]
    assert stale == []


def test_the_cases_are_those_of_tests_golden(monkeypatch: pytest.MonkeyPatch) -> None:
    """If not: python scripts/docs/equal.py, which measures the differences, too."""
    monkeypatch.syspath_prepend(ROOT / "scripts" / "docs")
    equal = importlib.import_module("equal")
    page = documents.pages()[equal.PAGE]
    assert equal.filled(page) == page and "|?|" not in page
    assert f" {equal.total()} cases " in documents.pages()[ROOT / "README.md"]


class Parsed(Exception):
    """The arguments of a command whose own parser took them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments


def arguments(command: list[str]) -> tuple[str, argparse.Namespace] | None:
    """(what is run, its arguments) as its real parser reads them; None where it has none."""
    name, rest = documents.program(command), command[1:]
    if name == "flowalign":
        return f"flowalign {rest[0]}", parsed(lambda: cli.main(rest))
    if name == "accelerate":
        from accelerate.commands.launch import launch_command_parser

        assert rest[0] == "launch"
        # running text may leave off what is launched
        whole = "-m" in rest or any(word.endswith(".py") for word in rest)
        launch = launch_command_parser().parse_args([*rest[1:], *["train.py"] * (not whole)])
        given = [launch.training_script, *launch.training_script_args]
        return arguments(["python", *["-m"] * bool(launch.module), *given]) if whole else None
    if rest[0] == "-c" or rest[:2] == ["-m", "venv"]:
        return None
    if rest[0] == "-m":
        spec = importlib.util.find_spec(rest[1])
        assert spec, f"no module {rest[1]}"
        if spec.submodule_search_locations:
            spec = importlib.util.find_spec(f"{rest[1]}.__main__")
        assert spec and spec.origin
        return rest[1], parsed(lambda: script(spec.origin or "", rest[2:]))
    if not rest[1:] and "argparse" not in (ROOT / rest[0]).read_text(encoding="utf-8"):
        return None
    return rest[0], parsed(lambda: script(str(ROOT / rest[0]), rest[1:]))


def script(path: str, arguments: list[str]) -> None:
    """Run a file as __main__, with its folder importable, as python does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [path, *arguments])
        patch.syspath_prepend(str(Path(path).parent))
        runpy.run_path(path, run_name="__main__")


def parsed(call: Any) -> argparse.Namespace:
    """What the first ArgumentParser that `call` asks has read; SystemExit where it refuses."""

    def stopping(original: Any) -> Any:
        def stop(self: Any, args: Any = None, namespace: Any = None) -> None:
            raise Parsed(original(self, args, namespace))

        return stop

    with pytest.MonkeyPatch.context() as patch:
        for name in ("parse_args", "parse_intermixed_args"):
            original = getattr(argparse.ArgumentParser, name)
            patch.setattr(argparse.ArgumentParser, name, stopping(original))
        try:
            call()
        except Parsed as stopped:
            return stopped.arguments
    raise AssertionError("no parser was asked; is there such a command?")


def vague(command: Command) -> bool:
    """Does it show where something is to be put, and so cannot be run?"""
    return any(PLACEHOLDER.search(word) for word in command.words)


def checked(command: Command) -> None:
    """Is it a command of ours that its parser takes, with files, options and keys that exist?"""
    words = [w for w in command.words if w.strip("[]") != "..."]
    words = [w.strip("[]") if ("[" in w) != ("]" in w) else w for w in words]  # [--size 512]
    name = documents.program(words)
    if name == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M)
    elif name == "pip":
        table = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dep")[2]
        extras = set(re.findall(r"^(\w+) = \[", table.partition("\n[")[0], re.M))
        for word in words[2:] if words[1] == "install" else ():
            assert not re.match(r"flowalign\b(?!-t2i)", word), "PyPI's flowalign is another project"
            if wanted := re.match(r"flowalign-t2i\[(.+)\]", word):
                assert {*wanted[1].split(",")} <= extras
    elif name == "flowalign" and (
        len(words) == 2
        or words[1:] == ["eval", "compare"]
        or (command.inline and words[-1].startswith("--"))  # `flowalign sample --lora` in a text
    ):
        assert words[1] in (*cli.COMMANDS, "--version")
    elif words[1:2] == ["-m"] and len(words) == 3:  # the name of a command, as above
        assert importlib.util.find_spec(words[2])
    elif name == "python" and words[1] != "-m" and vague(command):
        assert (ROOT / words[1]).is_file()
    elif ours(words) and (call := arguments(words)):
        check_arguments(command, *call)


def ours(words: list[str]) -> bool:
    """Does it run code of this repository?"""
    name = documents.program(words)
    if name == "python":
        module = words[2] if words[1] == "-m" else ""
        return module.startswith("flowalign") or (ROOT / words[1]).is_file()
    return name in ("flowalign", "accelerate")


def check_arguments(command: Command, what: str, namespace: argparse.Namespace) -> None:
    given = vars(namespace)
    if vague(command):
        return
    if given.get("config") and not in_a_block(given["config"]):
        changes = given["options"] if "options" in given else given["overrides"]
        check_config(what, Path(given["config"]), tuple(changes), given["variant"])
    name = given.get("reward", given.get("name"))
    if isinstance(name, str) and what in ("flowalign doctor", "flowalign serve-reward"):
        options = assignments(given["options"] if "reward" in given else given["pairs"])
        if ":" not in name:  # a module of the reader's is checked with its page's blocks
            rewards.RewardSpec(PLUGINS.get(name, name), options).check()
    loras = given.get("lora") or []
    named = [text.rpartition("=")[2] for text in ([loras] if isinstance(loras, str) else loras)]
    theirs = {text for words in inits() for text in words}  # LoRAs of the reader's own
    for folder in {*given.get("adapters", []), *named} - theirs - {"base"}:
        assert folder in written() or (adapter_folder(folder) / ADAPTER).is_file(), folder


def in_a_block(path: str) -> bool:
    """Is it a file that the reader writes, or that `flowalign init` writes for them?"""
    made = [words[words.index("--out") + 1] for words in inits() if "--out" in words]
    return path in made or any(block.notes.get("file") == path for block in BLOCKS)


def inits() -> list[tuple[str, ...]]:
    """The commands that write a config."""
    return [c.words for c in COMMANDS if c.words[:2] == ("flowalign", "init")]


@functools.cache
def check_config(what: str, path: Path, overrides: tuple[str, ...], variant: str | None) -> None:
    """As the command would, up to where a model is loaded. What another command in the documents
    or a config of ours writes counts as there."""
    wanted: type[Stage] = EvalStage if "eval" in what else Job
    if what in ("flowalign doctor", "flowalign fetch"):  # which read any stage
        wanted = Stage
    config = load(path, overrides, stage=wanted, variant=variant)
    # 4 bits need a GPU and a package, which the reader has, as a LoRA and pairs of their own
    theirs = (
        "model.quantization",
        "'./brand/lora': no such folder",
        "outputs/tiny/pairs/",
        "tasks.0.prompts: row 1: ",
    )
    if isinstance(config, RecipeStage):
        _, problems = recipe.stages_and_problems(config, path.parent)
    else:
        launch = Launch(pending=dict.fromkeys(written()))
        problems = stage_problems(config, launch)
    assert [p for p in refused(problems) if not any(text in str(p) for text in theirs)] == []


@functools.cache
def written() -> set[str]:
    """The adapters that the configs of ours and the merges in the documents write."""
    folders = set()
    for path in CONFIGS:
        config = load(path, stage=Stage)
        if isinstance(config, TrainingStage | MergeStage):
            folders.add(f"{config.output}/adapter")
        elif isinstance(config, RecipeStage):
            folders |= {f"{config.output}/{name}/adapter" for name in config.stages}
    merges = [c.words for c in COMMANDS if c.words[:2] == ("flowalign", "merge")]
    drafts = [Path(words[words.index("--out") + 1]) for words in inits() if "--out" in words]
    folders |= {f"outputs/{draft.stem}/adapter" for draft in drafts}
    return folders | {words[words.index("--out") + 1] for words in merges if "--out" in words}


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like the root of the checkout, with the prompts that configs want users to fetch, a
    line each, and a picture of their style."""
    folder = tmp_path_factory.mktemp("home")
    for path in ROOT.iterdir():
        (folder / path.name).symlink_to(path)
    for config in CONFIGS:
        for name in re.findall(r"data/[\w/]+\.\w+", config.read_text(encoding="utf-8")):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(SIGN if path.suffix == ".txt" else json.dumps(ROW))
    style = folder / "brand" / "pictures" / "a.png"  # of the reader
    style.parent.mkdir(parents=True)
    style.touch()
    return folder


@pytest.fixture
def at_home(monkeypatch: pytest.MonkeyPatch, home: Path, clip_extra: None) -> Iterator[None]:
    """There, with a Hub with the public teachers, and the example of a plugin importable."""
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(ROOT / "docs" / "rewards" / "example")
    with fake_hub.serving() as hub:
        fake_hub.go_online(fake_hub.with_public_teachers(hub), monkeypatch, home / "hub")
        yield


def heads() -> Iterator[Command]:
    """The commands in the first lines of configs, which run this config."""
    for path in CONFIGS:
        place = str(path.relative_to(ROOT))
        head = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        assert place in head
        for words in documents.statements(head.replace(", or: ", "\n"), whole=True):
            yield Command(tuple(words), place)


@pytest.mark.slow
def test_every_command_is_one_that_the_code_takes(
    at_home: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(documents.example_package(tmp_path))
    for command in [*COMMANDS, *heads()]:
        try:
            checked(command)
        except (Exception, SystemExit) as error:
            pytest.fail(f"{command.place}: `{command}`: {error!r}")


REQUIRED: dict[str, Any] = {  # what a page that shows a part of a config leaves out
    "output": "outputs/x",
    "model": {"id": "tiny", "height": 96, "width": 96},
    "tasks": [{"name": "signs", "prompts": "prompts.jsonl", "reward": {"name": "ocr"}}],
    "benchmarks": [{"name": "ocr", "prompts": "tiny/ocr_test", "reward": {"name": "ocr"}}],
    "adapters": ["tiny/ocr", "tiny/geneval"],
    "stages": {"ocr": {"use": "teacher_ocr.yaml"}},
}
YAML = [block for block in BLOCKS if block.language in ("yaml", "yml")]


def whole(data: dict[str, Any]) -> dict[str, Any]:
    """The config that a page shows. One with `stage` is complete: nothing is added. Another is a
    part: keys of a config or of a task."""
    if "stage" in data:
        return data
    if data.keys() <= TaskConfig.model_fields.keys():
        data = {"tasks": [REQUIRED["tasks"][0] | data]}
    for stage, schema in STAGES.items():
        fields = schema.model_fields
        if data.keys() <= fields.keys():
            needed = {key for key, field in fields.items() if field.is_required()}
            rest = {key: REQUIRED[key] for key in needed - data.keys() - {"stage"}}
            if "evaluation" in fields:
                rest["evaluation"] = None  # a part need not say what is held out
            return {"stage": stage, **rest, **data}
    raise AssertionError(f"{sorted(data)} are not keys of any stage")


def make_files(config: Stage) -> None:
    """The prompt sets that a config names, where it names them."""
    for source in (source for judged in config.judged for source in judged.prompts.values()):
        if not source.startswith("tiny/"):
            Path(source).parent.mkdir(parents=True, exist_ok=True)
            Path(source).write_text(SIGN if source.endswith(".txt") else json.dumps(ROW))


@contextlib.contextmanager
def modules_of(page: Path, folder: Path) -> Iterator[set[str]]:
    """The modules that a page tells its reader to write, importable; their names."""
    named = {b.notes["file"]: b.text for b in documents.blocks(page) if b.notes.get("file")}
    names = {Path(name).stem for name in named if name.endswith(".py")}
    for name, text in named.items():
        (folder / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        for name in names:
            patch.delitem(sys.modules, name, raising=False)
        yield names
        for name in names:
            sys.modules.pop(name, None)


def check_block(block: Block, folder: Path) -> Stage:
    """A config as a command reads and checks it, in a folder with what it names but its adapters:
    whoever reads the page is to train them."""
    file = folder / "block.yaml"
    file.write_text(block.text)
    if "stage" not in (data := read(file)):
        file.write_text(dump_yaml(whole(data)))
    config = load(file, stage=Stage)
    make_files(config)
    with modules_of(block.page, folder):
        check_stage(config, Launch(pending=dict.fromkeys(config.inputs.values())))
    return config


def test_every_config_in_a_document_is_one_that_a_command_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clip_extra: None
) -> None:
    """No unknown key, no value out of range, no reward or prompt set that is refused."""
    monkeypatch.setenv("FLOWALIGN_JUDGE_KEY", "secret")  # as the page of vlm tells its reader
    stages = []
    for number, block in enumerate(YAML):
        folder = tmp_path / str(number)
        style = folder / "brand" / "pictures" / "a.png"  # of the reader
        style.parent.mkdir(parents=True)
        style.touch()
        monkeypatch.chdir(folder)
        try:
            stages.append(check_block(block, folder).stage)
        except Exception as error:
            pytest.fail(f"{block.place}: {error}")
    assert {"grpo", "opd", "eval"} <= set(stages)


PYTHON = [block for block in BLOCKS if block.language == "python"]
SMALLER = {  # for a block that needs a GPU and the weights
    "stabilityai/stable-diffusion-3.5-medium": str(MODEL),
    "cuda": "cpu",
    "bfloat16": "float32",
    "512": "64",
    "40": "2",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "block",
    [b for b in PYTHON if "file" not in b.notes and b.page not in documents.FOLLOWED],
    ids=lambda block: block.place,
)
def test_python_in_a_document_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("evaluation_metadata.jsonl").write_text(json.dumps(ROW))
    Path("flowalign").symlink_to(ROOT / "flowalign")  # as in a checkout
    text = block.text
    for adapter in re.findall(r'(?:lora=|load_lora_weights\()"(outputs/.+?)"', text):
        shutil.copytree(adapter_folder("tiny/ocr"), adapter)
    for word, smaller in SMALLER.items() if "needs" in block.notes else ():
        text = re.sub(rf"\b{re.escape(word)}\b", smaller, text)
    Path("snippet.py").write_text(text)
    runpy.run_path("snippet.py")


@pytest.mark.slow
def test_rewards_that_a_reader_writes_score_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every reward in a block that is saved as a file; of it another repository's part is ours."""
    served = types.ModuleType("reward_server.deqa")
    vars(served)["load_deqascore"] = lambda: lambda images: [0.5] * len(images)
    monkeypatch.setitem(sys.modules, "reward_server", types.ModuleType("reward_server"))
    monkeypatch.setitem(sys.modules, "reward_server.deqa", served)
    scored = []
    for block in [b for b in PYTHON if "file" in b.notes]:
        name = Path(block.notes["file"]).stem
        with modules_of(block.page, tmp_path):
            module = importlib.import_module(name)
            own = [k for k, v in vars(module).items() if getattr(v, "__module__", "") == name]
            for attribute in own:
                reward = rewards.build(f"{name}:{attribute}")
                scores = rewards.score(reward, torch.rand(2, 3, 8, 8), [SIGN] * 2, [{}] * 2)
                assert scores.valid.all(), f"{block.place}: {attribute}"
            scored += own
    assert set(scored) == {"redness", "OldDeQA", "Poster"}
    page = ROOT / "docs/rewards/plugins.md"  # the package that it shows is the one that ships
    (text,) = (block.text for block in documents.blocks(page) if block.language == "toml")
    assert text in (ROOT / "docs/rewards/example/pyproject.toml").read_text()


FOLDERS = {  # the page whose table says what a command leaves -> where the script has it
    ROOT / "docs" / "quickstart.md": "outputs/tiny/teacher_ocr_nft",
    ROOT / "docs" / "evaluation.md": "outputs/tiny/eval",
}
OPTIONAL = ("warnings.jsonl",)  # where a run warned


@pytest.mark.long
def test_all_steps_work_and_leave_the_files_that_documents_name(tmp_path: Path) -> None:
    """In one test, since the steps take minutes; with this test's own environment."""
    done = subprocess.run(
        ["bash", ROOT / "scripts" / "first_day.sh", tmp_path],
        env=os.environ | {"FIRST_DAY_PYTHON": sys.executable}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    clone = tmp_path / "flowalign"
    for page, folder in FOLDERS.items():
        rows = r"^\| file or folder \|.*\n\|---.*\n((?:\|.*\n)+)"
        found = re.search(rows, page.read_text(), re.M)
        table = found[1] if found else ""
        names = [n for row in table.splitlines() for n in re.findall("`(.+?)`", row.split("|")[1])]
        assert len(names) >= 5, page
        for name in names:
            path = name.replace("MODEL", "base").replace("BENCHMARK", "ocr")
            assert name.startswith(OPTIONAL) or (clone / folder / path).exists(), f"{page}: {name}"
    for page in documents.pages():
        for _, token in documents.inline(page, "code_inline"):
            if re.match(r"outputs/(tiny|demo)[\w./-]*$", token.content):
                assert (clone / token.content).exists(), f"{page}: {token.content}"
