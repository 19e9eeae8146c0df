"""What the documents show works as it stands there: configs, in a folder with the files that they
name; Python; JSON, and the output of commands. What takes long is slow."""

import contextlib
import importlib
import importlib.util
import json
import re
import runpy
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import documents
import fake_hub
import pytest
import torch
import yaml
from documents import Block
from test_docs import BLOCKS, ROOT, hub

from flowalign import rewards
from flowalign.backbone.adapters import adapter_folder
from flowalign.config import STAGES, EvalStage, Stage, TaskConfig, TrainingStage, load, read
from flowalign.training.preflight import check_world

__all__ = ["hub"]  # a fixture

REQUIRED: dict[str, Any] = {  # what a page that shows a part of a config leaves out
    "output": "outputs/x",
    "model": {"id": "tiny", "height": 64, "width": 64},
    "tasks": [{"name": "signs", "prompts": "prompts.jsonl", "reward": {"name": "ocr"}}],
    "benchmarks": [{"name": "ocr", "prompts": "tiny/ocr_test", "reward": {"name": "ocr"}}],
    "adapters": ["tiny/ocr", "tiny/geneval"],
    "stages": {"ocr": {"use": "teacher_ocr.yaml"}},
}
YAML = [block for block in BLOCKS if block.language in ("yaml", "yml")]
SIGN = 'a sign that says "KITE"'
ROW = {"prompt": SIGN, "tag": "single_object", "include": [{"class": "kite", "count": 1}]}


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


def make_files(config: Stage, hub: fake_hub.Hub) -> None:
    """The prompt sets and adapters that a config names, where it names them."""
    sources = []
    if isinstance(config, TrainingStage):
        sources += [source for task in config.tasks for source in (task.prompts, task.validation)]
    if isinstance(config, EvalStage):
        sources += [benchmark.prompts for benchmark in config.benchmarks]
    for source in filter(None, sources):
        if not source.startswith("tiny/"):
            Path(source).parent.mkdir(parents=True, exist_ok=True)
            Path(source).write_text(SIGN if source.endswith(".txt") else json.dumps(ROW))
    for source in config.inputs.values() if isinstance(config, TrainingStage | EvalStage) else ():
        if source.startswith(("runs/", "outputs/")):
            Path(source).mkdir(parents=True, exist_ok=True)
            for name, content in fake_hub.PEFT.items():
                (Path(source) / name).write_bytes(content)
        elif not source.startswith("tiny/"):
            hub.put(source, fake_hub.PEFT)


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


def check_block(block: Block, folder: Path, hub: fake_hub.Hub) -> Stage:
    """A config as a command reads and checks it, in a folder with what it names."""
    file = folder / "block.yaml"
    file.write_text(block.text)
    if "stage" not in (data := read(file)):
        file.write_text(yaml.safe_dump(whole(data)))
    config = load(file, stage=Stage)
    make_files(config, hub)
    with modules_of(block.page, folder):
        check_world(config, 1)
    return config


def test_every_config_in_a_document_is_one_that_a_command_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: fake_hub.Hub, clip_extra: None
) -> None:
    """No unknown key, no value out of range, no reward, prompt set or adapter that is refused."""
    monkeypatch.setenv("FLOWALIGN_JUDGE_KEY", "secret")  # as the page of vlm tells its reader
    if importlib.util.find_spec("paddleocr") is None:  # the page of ocr says how to install it
        (tmp_path / "extra" / "paddleocr").mkdir(parents=True)
        (tmp_path / "extra" / "paddleocr" / "__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path / "extra")
    fake_hub.go_online(hub, monkeypatch, tmp_path / "hub")
    stages = []
    for number, block in enumerate(YAML):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        try:
            stages.append(check_block(block, folder, hub).stage)
        except Exception as error:
            pytest.fail(f"{block.place}: {error}")
    assert {"grpo", "opd", "eval"} <= set(stages)


PYTHON = [block for block in BLOCKS if block.language == "python"]
SMALLER = {  # for a block that needs a GPU and the weights
    "stabilityai/stable-diffusion-3.5-medium": "tiny",
    "cuda": "cpu",
    "bfloat16": "float32",
    "512": "64",
    "40": "2",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "block", [b for b in PYTHON if "file" not in b.notes], ids=lambda block: block.place
)
def test_python_in_a_document_runs(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("evaluation_metadata.jsonl").write_text(json.dumps(ROW))
    text = block.text
    for adapter in re.findall(r'lora="(outputs/.+?)"', text):
        shutil.copytree(adapter_folder("tiny/ocr"), adapter)
    for word, smaller in SMALLER.items() if "needs" in block.notes else ():
        text = re.sub(rf"\b{re.escape(word)}\b", smaller, text)
    Path("snippet.py").write_text(text)
    runpy.run_path("snippet.py")


def test_rewards_that_a_reader_writes_score_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert set(scored) == {"redness", "OldDeQA"}


def test_the_example_of_a_package_is_the_one_that_ships() -> None:
    page = ROOT / "docs/rewards/plugins.md"
    (text,) = (block.text for block in documents.blocks(page) if block.language == "toml")
    assert text in (ROOT / "docs/rewards/example/pyproject.toml").read_text()
