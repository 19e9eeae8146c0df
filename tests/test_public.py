"""The configs of public adapters, rehearsed: a small model in place of theirs, a Hub of our own."""

import itertools
import json
from pathlib import Path

import fake_hub
import fakes
import pytest
from fake_hub import PEFT, Hub, online

from flowalign.backbone.adapters import adapter_files, read_lora
from flowalign.checks import Launch, check_stage
from flowalign.commands.evaluate import main as evaluate
from flowalign.commands.train import main
from flowalign.config import EvalStage, load

__all__ = ["online"]  # a fixture

ROOT = Path(__file__).parents[1]
SMALL = ["geneval.images=1", "preference.reward={name: clipscore, options: {model: tiny}}"]
SMALL += ["geneval.reward={name: geneval, options: {detector: tiny}}", "ocr.reward.options={}"]
SMALL += [f"{name}.prompts=tiny/{name}_test" for name in ("geneval", "ocr", "preference")]
SMALL += [f"{name}.limit=2" for name in ("geneval", "ocr", "preference")]
TABLE = [*(f"benchmarks.{change}" for change in SMALL), "sampling.steps=2", "alarm=null"]
TASKS = [f"tasks.{n}.prompts=tiny/{n}_train" for n in ("geneval", "ocr", "preference")]
STUDENT = [*TASKS, "evaluation=null", "train.updates=1", "rollout.prompts=6", "rollout.steps=2",
           "optimizer.updates_per_rollout=1", "alarm=null"]  # fmt: skip
STUDENT += [f"tasks.{n}.{key}=null" for n in ("geneval", "ocr", "preference")
            for key in ("validation", "reward")]  # fmt: skip


def publish(hub: Hub) -> None:
    """The adapters that our configs name, of the small model, each another."""
    strengths = itertools.count(1)
    for repository, folders in {**dict.fromkeys(fake_hub.PUBLIC, [""]), **fake_hub.FOLDERS}.items():
        files = {}
        for folder in folders:
            made = fake_hub.peft(32, next(strengths) / 10)
            files |= {f"{folder}{name}": what for name, what in made.items()}
        hub.put(repository, files)


def rehearse(config: str, hub: Hub, model: str, output: Path, *changes: str) -> dict:
    """The models of the table."""
    publish(hub)
    small = f"model={{id: {model}, height: 64, width: 64}}"
    table = f"stages.table.set={json.dumps(TABLE)}"
    assert main(["--config", str(ROOT / config), small, f"output={output}", table, *changes]) == 0
    return json.loads((output / "table" / "results.json").read_text())["models"]


@pytest.mark.slow
def test_the_public_adapters_of_sd35_share_a_table(
    online: Hub, random_model: str, tmp_path: Path
) -> None:
    found = rehearse("configs/sd35_medium/public.yaml", online, random_model, tmp_path / "out")
    assert list(found) == [
        "base", "base_no_cfg", "grpo_geneval", "grpo_ocr", "grpo_pickscore", "nft_multi",
        "diffusion_opd", "mend_pickscore", "mend_three", "grpo_merge",
    ]  # fmt: skip
    assert all("worst" in model["matrix"] for model in found.values())


@pytest.mark.slow
def test_the_quick_table(online: Hub, random_model: str, tmp_path: Path) -> None:
    publish(online)
    small = f"model={{id: {random_model}, height: 64, width: 64}}"
    config = str(ROOT / "configs" / "sd35_medium" / "public_quick.yaml")
    assert evaluate(["--config", config, small, f"output={tmp_path}", *TABLE]) == 0
    found = json.loads((tmp_path / "results.json").read_text())["models"]
    assert list(found) == ["base", "base_no_cfg", "teacher_geneval", "teacher_ocr",
                           "teacher_pickscore", "diffusion_opd"]  # fmt: skip


@pytest.mark.slow
def test_the_first_run(random_model: str, tmp_path: Path) -> None:
    changes = [
        f"model={{id: {random_model}, height: 64, width: 64}}", f"output={tmp_path / 'out'}",
        "tasks.0.prompts=tiny/ocr_train", "tasks.0.validation=tiny/ocr_val", "train.updates=1",
        "tasks.0.reward.options={}", "rollout.prompts=4", "rollout.group_size=2",
        "evaluation={every: 1, prompts: 2, steps: 2}",
    ]  # fmt: skip
    config = str(ROOT / "configs" / "sd35_medium" / "first_run.yaml")
    assert main(["--config", config, *changes]) == 0
    assert (tmp_path / "out" / "adapter" / "pytorch_lora_weights.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sd35_medium", "flux"])
def test_our_student_is_a_row_of_the_same_table(
    online: Hub, random_model: str, tmp_path: Path, family: str
) -> None:
    fakes.AcceleratorState._reset_state(reset_partial_state=True)  # another test's precision
    config = f"configs/{family}/flow_opd_public.yaml"
    student = f"stages.student.set={json.dumps(STUDENT)}"
    found = rehearse(config, online, random_model, tmp_path / "out", student)
    table = load(ROOT / "configs" / family / "_public.yaml", stage=EvalStage)
    assert found.keys() > table.models.keys() and "flow_opd" in found


def test_a_diffusers_file_is_not_scaled_by_the_alpha_of_pefts(online: Hub) -> None:
    """MEND's repositories have both, of one update."""
    files = {**PEFT, "pytorch_lora_weights.safetensors": PEFT["adapter_model.safetensors"]}
    online.put("me/both", files)
    lora = read_lora("me/both")
    assert lora.file.name == "adapter_model.safetensors" and set(lora.scales.values()) == {2.5}


@pytest.mark.parametrize("family", ["sd35_medium", "flux"])
def test_the_ids_are_of_the_family_and_each_names_one_adapter(
    online: Hub, family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clip_extra: None
) -> None:
    fake_hub.with_public_teachers(online)
    monkeypatch.chdir(tmp_path)
    table = load(ROOT / "configs" / family / "_public.yaml", stage=EvalStage)
    for source in table.inputs.values():
        weights = [
            name for name in adapter_files(source).missing() if name.endswith(".safetensors")
        ]
        assert len(weights) == 1, source
    mark = table.benchmarks[1].model_copy(update={"prompts": "tiny/ocr_test"})
    check_stage(table.model_copy(update={"benchmarks": [mark]}), Launch())
