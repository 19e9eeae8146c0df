"""The documents are true: links lead somewhere, and commands are what the code takes.
tests/test_snippets.py has configs and code.

Every command in a block of shell is run by a test (SHORT here, ELSEWHERE in another file) or by
scripts/first_day.sh, or an HTML comment before its block says what it needs that a test does not
have: `<!-- needs: a GPU -->` (the site shows it). A block that a reader saves as a file is named by
`<!-- file: NAME -->`.
"""

import argparse
import functools
import importlib
import importlib.util
import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import documents
import fake_hub
import pytest
import test_compare
import torch
from documents import Command
from safetensors.torch import load_file
from test_package import CONFIGS

from flowalign import rewards
from flowalign.backbone.adapters.files import adapter_folder
from flowalign.commands import cli, recipe
from flowalign.config import (
    ADAPTER,
    EvalStage,
    Job,
    MergeStage,
    RecipeStage,
    Stage,
    TrainingStage,
    assignments,
    load,
)
from flowalign.training.preflight import check_world

# what configs ask for counts as installed
pytestmark = pytest.mark.usefixtures("clip_extra")

ROOT = documents.ROOT
SHORT = {  # run here, as they stand
    "flowalign eval compare outputs/tiny/eval/results.json outputs/tiny/eval/results.json "
    "--models base student",
    "python scripts/paddle_models_from_rapidocr.py paddle_models",
}
SHORT_BEGINNINGS = (  # of what is too long to repeat
    "python -c 'import json, statistics as s",
    "python -c 'import torch, safetensors.torch as s",
)
ELSEWHERE = {  # run by another test, on the way to what that shows
    "flowalign init --stage grpo --model tiny --reward ocr --prompts my.txt --out my.yaml": (
        "test_init.py"
    ),
    "pip install docs/rewards/example": "test_plugins.py",
    "python tests/verdicts.py": "test_verdicts.py",
    "flowalign doctor --reward sharpness scale=20": "test_plugins.py",
}
PLUGINS = {"sharpness": "flowalign_sharpness:Sharpness"}  # by entry points of docs/rewards/example
# What a test does not have, or takes longer than five minutes.
NEEDS = re.compile(
    r"network|GPU|chromium|C compiler|C\+\+ compiler|hour|(\d|nine|ten) minutes|reward-server"
)
PLACEHOLDER = re.compile(
    r"(?<![a-zA-Z])[A-Z]{4,}(?![a-z])|=[A-Z]$|\.\.\.|^\["
)  # a synopsis has one

PAGES = list(documents.pages())
COMMANDS = [command for page in PAGES for command in documents.commands(page)]
BLOCKS = [block for page in PAGES for block in documents.blocks(page)]


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


# Links -----------------------------------------------------------------------------------------


def test_every_link_leads_somewhere() -> None:
    broken = []
    for page, line, target in [(p, *link) for p in PAGES for link in documents.links(p)]:
        if re.match(r"(https?|mailto):", target):
            continue
        name, _, anchor = unquote(target).partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists():
            broken.append(f"{page_id(page)}:{line}: {target} does not exist")
        elif anchor.startswith("flowalign."):
            continue  # mkdocstrings makes it, and the build checks it
        elif anchor and file in PAGES and anchor not in documents.anchors(file):
            broken.append(f"{page_id(page)}:{line}: {target}: no heading {anchor!r}")
    assert broken == []


def test_no_page_has_a_place_that_was_never_filled() -> None:
    """A line that is one bare upper-case word, such as TABLE."""
    found = []
    for page, text in documents.pages().items():
        found += [f"{page_id(page)}: {word}" for word in re.findall(r"^[A-Z_]{3,}$", text, re.M)]
    assert found == []


# Commands --------------------------------------------------------------------------------------


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
        whole = "-m" in rest or any(word.endswith(".py") for word in rest)
        rest += [] if whole else ["train.py"]  # running text may leave off what is launched
        launch = parsed(lambda: launch_command_parser().parse_args(rest[1:]))
        if not whole:
            return None
        given = [launch.training_script, *launch.training_script_args]
        return arguments(["python", *(["-m"] if launch.module else []), *given])
    if name != "python" or rest[0] == "-c" or rest[:2] == ["-m", "venv"]:
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
    with pytest.MonkeyPatch.context() as patch:
        for name in ("parse_args", "parse_intermixed_args"):
            patch.setattr(argparse.ArgumentParser, name, stopping(name))
        try:
            call()
        except Parsed as stopped:
            return stopped.arguments
    raise AssertionError("no parser was asked; is there such a command?")


def stopping(name: str) -> Any:
    """A method of ArgumentParser that raises what it has read."""
    original = getattr(argparse.ArgumentParser, name)

    def stop(self: Any, args: Any = None, namespace: Any = None) -> None:
        raise Parsed(original(self, args, namespace))

    return stop


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
        check_pip(words)
    elif name == "pytest" or words[1:3] == ["-m", "pytest"]:
        check_pytest(words[words.index("pytest") + 1 :] if name != "pytest" else words[1:])
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


def check_pip(words: list[str]) -> None:
    assert words[1] in ("install", "uninstall")
    if words[1] == "uninstall":
        return
    project = (ROOT / "pyproject.toml").read_text()
    table = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = re.findall(r"^(\w+) = \[", table, re.M)
    for before, word in zip(words[1:], words[2:], strict=False):
        if before == "--target":
            continue
        assert not re.match(r"flowalign\b(?!-t2i)", word), "PyPI's flowalign is another project"
        if wanted := re.match(r"flowalign-t2i\[(.+)\]", word):
            assert set(wanted[1].split(",")) <= set(extras), f"no extra {wanted[1]}; have {extras}"
        if word == "." or (word[0] not in "-h" and "/" in word):
            assert (ROOT / word / "pyproject.toml").is_file()


def check_pytest(words: list[str]) -> None:
    marks = re.findall(r'^    "(\w+): ', (ROOT / "pyproject.toml").read_text(), re.M)
    for before, word in zip(["", *words], words, strict=False):
        if before == "-m":
            assert word in marks
        elif not word.startswith("-"):
            assert (ROOT / word).exists(), f"no {word}"


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
            rewards.check(PLUGINS.get(name, name), options)
    for folder in [*given.get("adapters", []), *filter(None, [given.get("lora")])]:
        assert folder in WRITTEN or (adapter_folder(folder) / ADAPTER).is_file(), folder


def in_a_block(path: str) -> bool:
    return any(block.notes.get("file") == path for block in BLOCKS)


@functools.cache
def check_config(what: str, path: Path, overrides: tuple[str, ...], variant: str | None) -> None:
    """As the command would, up to where a model is loaded. What another command in the documents
    or a config of ours writes counts as there."""
    wanted: type[Stage] = EvalStage if "eval" in what else Job
    config = load(path, overrides, stage=wanted, variant=variant)
    if isinstance(config, RecipeStage):
        recipe.plan(config, path.parent)
    else:
        check_world(config, 1, WRITTEN & set(config.inputs.values()))


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
    return folders | {words[words.index("--out") + 1] for words in merges if "--out" in words}


WRITTEN = written()


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like the root of the checkout, with the prompts that configs want users to fetch, a
    line each."""
    folder = tmp_path_factory.mktemp("home")
    for path in ROOT.iterdir():
        (folder / path.name).symlink_to(path)
    clauses = {"tag": "single_object", "include": [{"class": "kite", "count": 1}]}
    texts = {".txt": 'a sign that says "KITE"'}
    texts[".jsonl"] = json.dumps({"prompt": "a photo of a kite", **clauses})
    for config in CONFIGS:
        for name in re.findall(r"data/[\w/]+\.\w+", config.read_text(encoding="utf-8")):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(texts[path.suffix])
    return folder


@pytest.fixture(scope="session")
def hub() -> Iterator[fake_hub.Hub]:
    """A Hub with the public teachers."""
    with fake_hub.serving() as server:
        yield fake_hub.with_public_teachers(server)


@pytest.fixture
def at_home(
    monkeypatch: pytest.MonkeyPatch, home: Path, hub: fake_hub.Hub, clip_extra: None
) -> None:
    """There, with that Hub, and with the example of a plugin importable."""
    monkeypatch.chdir(home)
    fake_hub.go_online(hub, monkeypatch, home / "hub")
    monkeypatch.syspath_prepend(ROOT / "docs" / "rewards" / "example")


@pytest.mark.slow
def test_every_command_is_one_that_the_code_takes(at_home: None) -> None:
    for command in COMMANDS:
        try:
            checked(command)
        except (Exception, SystemExit) as error:
            pytest.fail(f"{command.place}: `{command}`: {error!r}")


@pytest.mark.slow
def test_the_command_in_the_head_of_a_config_runs_this_config(at_home: None) -> None:
    for path in CONFIGS:
        head = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        assert page_id(path) in head
        for words in documents.statements(head.replace(", or: ", "\n"), whole=True):
            try:
                checked(Command(tuple(words), page_id(path)))
            except (Exception, SystemExit) as error:
                pytest.fail(f"{page_id(path)}: {error!r}")


def test_a_wrong_command_is_refused(at_home: None, capsys: Any) -> None:
    for text in (
        "flowalign trian --config configs/tiny/eval.yaml",
        "flowalign train --config configs/tiny/eval.yaml",
        "flowalign eval --config configs/tiny/eval.yaml sampling.step=3",
        "flowalign eval --config configs/tiny/eval.yaml models.x=outputs/tiny/nobody/adapter",
        "accelerate launch --num_cpus 2 train.py --config configs/tiny/teacher_ocr.yaml",
        "accelerate launch train.py --config configs/tiny/teacher_orc.yaml",
        "flowalign merge tiny/ocr tiny/nobody --out x",
        "flowalign sample 'a star' --gudance 1",
        "flowalign doctor --reward geneval treshold=1",
        "flowalign serve-reward pickscor",
        "python benchmarks/floors.py --repeat_s 5",
        "pip install 'flowalign-t2i[clips]'",
        "pytest tests/test_nothing.py",
        "make demos",
    ):
        (words,) = documents.statements(text, whole=True)
        with pytest.raises((Exception, SystemExit)) as refused:
            checked(Command(tuple(words), "here"))
        assert not isinstance(refused.value, Parsed), text


def short(command: Command) -> bool:
    return str(command) in SHORT or str(command).startswith(SHORT_BEGINNINGS)


def walked() -> Iterator[tuple[str, ...]]:
    """The commands of scripts/first_day.sh, with what they add to shorten a run."""
    text = (ROOT / "scripts" / "first_day.sh").read_text().replace("\\\n", " ")
    for line in text.splitlines():
        if line.strip().startswith("step "):
            yield tuple(shlex.split(line, comments=True))[1:]


WALKED = list(walked())


def test_every_command_is_run_by_a_test_or_says_what_it_needs() -> None:
    for command in COMMANDS:
        if command.inline or short(command) or vague(command) or str(command) in ELSEWHERE:
            continue
        if any(words[: len(command.words)] == command.words for words in WALKED):
            continue
        assert NEEDS.search(command.needs or ""), (
            f"{command.place}: no test runs `{command}`, which needs {command.needs or 'nothing'}. "
            "Run it in scripts/first_day.sh, or add it to SHORT or ELSEWHERE in "
            "tests/test_docs.py; or say before its block which of these it needs: "
            f"{NEEDS.pattern.replace('|', ', ')}."
        )
    assert all((ROOT / "tests" / file).is_file() for file in ELSEWHERE.values())


def evaluated() -> dict[str, set[str]]:
    """{results.json: the models in it} that the evaluations of the quickstart leave behind."""
    files: dict[str, set[str]] = {}
    for command in documents.commands(ROOT / "docs/quickstart.md"):
        if "flowalign.eval" in command.words and not vague(command):
            _, given = arguments(list(command.words)) or ("", argparse.Namespace())
            config = load(ROOT / given.config, tuple(given.overrides), stage=EvalStage)
            files[f"{config.output}/results.json"] = set(config.models)
    return files


@pytest.mark.slow
def test_the_short_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, in a folder with the results and the pickle that they read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    for path, models in (*evaluated().items(), ("results.json", {"base"})):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        results = test_compare.document(test_compare.BASE)
        results["models"] = dict.fromkeys(models, results["models"]["base"])
        Path(path).write_text(json.dumps(results))
    torch.save({"layer.lora_A.weight": torch.ones(1, 2)}, "adapter_model.bin")
    commands = {str(command): list(command.words) for command in COMMANDS if short(command)}
    assert commands.keys() >= SHORT and len(commands) == len(SHORT) + len(SHORT_BEGINNINGS)
    for text, words in commands.items():
        if words[0] == "flowalign":
            assert cli.main(words[1:]) == 0, text
        else:
            done = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
    assert load_file("adapter_model.safetensors")["layer.lora_A.weight"].shape == (1, 2)
    assert (tmp_path / "paddle_models/PP-OCRv6_small_det/inference.onnx").exists()
