"""The model card of an adapter: what it says, what it leaves out, and that its code runs."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import fakes
import pytest
from huggingface_hub import ModelCard

from flowalign.commands import recipe
from flowalign.commands.card import licence, reward_line, write_card
from flowalign.config import MergeStage, load, parse, to_yaml
from flowalign.config.safe_yaml import load_yaml
from flowalign.system.folder import RunFolder

LOG = [
    {"update": 1, "loss": 1.0},
    *(  # the first weights gave way to a later score within a standard error of theirs
        {"update": n, "eval/headline": v, "eval/red/reward": v, "eval/red/red": 2 * v, "alarms": 0}
        for n, v in ((0, 0.7), (2, 0.6), (4, 0.5))
    ),
]


@pytest.fixture(scope="module")
def trained(random_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run leaves."""
    run = tmp_path_factory.mktemp("runs") / "teacher_red"
    prompts = {"tasks.0.validation": "tiny/ocr_test"}
    config = fakes.settings(random_model, run, *(f"{k}={v}" for k, v in prompts.items()))
    backbone = fakes.adapted(random_model, rank=4, alpha=10.0)
    backbone.name = random_model
    backbone.save_adapter("student", run / "adapter")
    (run / "config.yaml").write_text(to_yaml(config))
    RunFolder(run).scores.write_text(json.dumps({"headline": 0.6, "update": 2}))
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LOG))
    write_card(run, config)
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    shutil.copytree(trained, tmp_path / "copy" / trained.name)
    return tmp_path / "copy" / trained.name


def test_the_card_says_base_licence_scores_and_config(trained: Path, random_model: str) -> None:
    card = ModelCard.load(trained / "adapter" / "README.md")
    data = card.data.to_dict()
    assert data["library_name"] == "diffusers" and data["pipeline_tag"] == "text-to-image"
    assert "base_model" not in data and "license" not in data  # a folder of this machine
    # the middle one is of the adapter that was kept
    assert "| red/reward | 0.700 | 0.600 | 0.500 |" in card.text
    assert "By this config, with `flowalign train --config FILE`:" in card.text
    (written,) = card.text.split("```yaml\n")[1:]
    assert parse(load_yaml(written.split("```")[0])) == load(trained / "config.yaml")
    assert f'flowalign.load("{random_model}", lora="{trained / "adapter"}")' in card.text
    assert "Rank 4, scale\n2.5 (alpha / r)" in card.text


def test_a_card_claims_no_score_of_another_adapter(run: Path) -> None:
    """Where no evaluation chose the adapter, as of a run that went on with evaluation=null."""
    RunFolder(run).scores.write_text("{}")
    write_card(run, load(run / "config.yaml"))
    card = ModelCard.load(run / "adapter" / "README.md")
    assert "| red/reward |" not in card.text


def test_an_adapter_of_stable_diffusion_has_the_licence_of_its_base(
    trained: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained / "adapter", tmp_path / "adapter")
    for size in ("3.5-medium", "3-medium-diffusers"):
        base = f"stabilityai/stable-diffusion-{size}"
        config = load(trained / "config.yaml", [f"model.id={base}", "tasks.0.reward.name=ocr"])
        write_card(tmp_path, config)
        card = ModelCard.load(tmp_path / "adapter" / "README.md")
        data = card.data.to_dict()
        assert data["license"] == "other" and data["license_name"] == "stabilityai-ai-community"
        assert data["license_link"] == f"https://huggingface.co/{base}/blob/main/LICENSE.md"
        assert (data["base_model"], data["base_model_relation"]) == (base, "adapter")
        assert f'DiffusionPipeline.from_pretrained("{base}"' in card.text
        assert "- red: reward `ocr` (engine `rapidocr`: Apache-2.0)\n" in card.text
    parts = [{"name": "ocr"}, {"name": "clipscore"}]
    made = reward_line("weighted", {"rewards": parts})
    assert made.startswith("`weighted` of `ocr` (") and "Apache-2.0), `clipscore`" in made
    assert licence("tiny") == {"license": "apache-2.0"} and licence("me/sd") == {}


@pytest.mark.slow
def test_the_python_of_a_card_loads_the_adapter(trained: Path) -> None:
    """With flowalign, and with diffusers alone."""
    text = ModelCard.load(trained / "adapter" / "README.md").text
    blocks = re.findall(r"```python\n(.+?)```", text, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        names: dict[str, Any] = {}
        exec(block, names)
        assert names["pipe"].get_list_adapters()


def test_a_merge_has_a_card_without_scores(
    random_model: str, trained: Path, tmp_path: Path
) -> None:
    other = fakes.teachers(random_model, tmp_path)["even"]
    raw = {"stage": "merge", "output": str(tmp_path / "v1.5"), "model": {"id": random_model}}
    raw["adapters"] = [str(trained / "adapter"), other]
    recipe.run_recipe(parse(raw, stage=MergeStage), tmp_path, print)
    card = ModelCard.load(tmp_path / "v1.5" / "adapter" / "README.md")
    assert "with `merge`." in card.text and f"- adapters.1: `{other}`" in card.text
    assert "- merged as: concat of 2 updates" in card.text and "scale 1" in card.text


def test_a_card_leaves_out_what_looks_like_a_secret(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:

    def text(word: str) -> str:
        caplog.clear()
        config = load(run / "config.yaml")
        project = config.train.model_copy(update={"project": word})
        write_card(run, config.model_copy(update={"train": project}))
        return (run / "adapter" / "README.md").read_text()

    token = f"hf_{'a' * 34}"
    secrets = {"api_key=abc123": "abc123", "my_token='x1y2'": "x1y2", f"note={token}": token}
    secrets |= {"url=https://me:pass0@host/x": "pass0", "PASSWORD: hunter2": "hunter2"}
    for word, secret in secrets.items():
        assert secret not in text(word) and caplog.records, word
    # a variable's name is no secret
    assert all(word in text(word) for word in ("token_env=MY_TOKEN", "token=null", "max_tokens=7"))
    assert not caplog.records
