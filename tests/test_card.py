"""push.py and card.py: what goes up, what its card says, and that it loads from where it went."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import fake_hub
import fakes
import pytest
import yaml
from accelerate.state import AcceleratorState
from fake_hub import online
from huggingface_hub import ModelCard
from PIL import Image

from flowalign.backbone.adapters import ADAPTER, read_lora
from flowalign.commands import recipe
from flowalign.commands.card import licence, score_table, write_card
from flowalign.commands.cli import main
from flowalign.config import MergeStage, load, parse, to_yaml
from flowalign.eval.run import main as evaluate
from flowalign.system.manifest import MANIFEST
from flowalign.training.preflight import Launch, check_world
from flowalign.training.run.checkpoint import SCORES

__all__ = ["online"]  # a fixture


@pytest.fixture(autouse=True)
def logged_in(monkeypatch: pytest.MonkeyPatch, online: fake_hub.Hub) -> None:
    monkeypatch.setenv("HF_TOKEN", fake_hub.TOKEN)


LOG = [
    {"update": 1, "loss": 1.0},
    *(  # the first weights gave way to a later score within a standard error of theirs
        {"update": n, "eval/headline": v, "eval/red/reward": v, "eval/red/red": 2 * v, "alarms": 0}
        for n, v in ((0, 0.7), (2, 0.6), (4, 0.5))
    ),
]


@pytest.fixture(scope="module")
def trained(random_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run leaves, and what it does not mean to publish."""
    run = tmp_path_factory.mktemp("runs") / "teacher_red"
    prompts = {"tasks.0.validation": "tiny/ocr_test"}
    config = fakes.settings(random_model, run, *(f"{k}={v}" for k, v in prompts.items()))
    backbone = fakes.adapted(random_model, rank=4, alpha=10.0)
    backbone.name = random_model
    backbone.save_adapter("student", run / "adapter")
    (run / "config.yaml").write_text(to_yaml(config))
    (run / "adapter" / SCORES).write_text(json.dumps({"headline": 0.6, "update": 2}))
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LOG))
    (run / "checkpoints" / "update_000004").mkdir(parents=True)
    (run / "checkpoints" / "update_000004" / "optimizer.bin").write_bytes(b"large")
    (run / "samples").mkdir()
    for name in ("metrics", "before_after", "samples/update_000001", "samples/update_000004"):
        Image.new("RGB", (8, 8), (len(name), 0, 0)).save(run / f"{name}.png")
    write_card(run, config, ["/home/me/bin/flowalign", "train", "--config", "a b.yaml"])
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    shutil.copytree(trained, tmp_path / "copy" / trained.name)
    return tmp_path / "copy" / trained.name


def push(folder: Path, *options: object) -> int:
    return main(["push", str(folder), "--repo", "me/red", *map(str, options)])


FILES = {ADAPTER, MANIFEST, "README.md", "config.yaml"}
FILES |= {"metrics.png", "before_after.png", "samples.png"}


def test_what_is_listed_goes_up_and_loads_as_a_teacher(
    online: fake_hub.Hub, trained: Path, random_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert push(trained, "--dry-run") == 0
    listed = {line.split()[1] for line in capsys.readouterr().out.splitlines()[:-1]}
    assert listed == FILES and not online.asked
    assert push(trained, "--private") == 0
    out = capsys.readouterr()
    assert f"{online.url}/me/red/commit/" in out.out
    assert fake_hub.TOKEN not in out.out + out.err
    (there,) = online.repositories.values()
    sent = there.revisions["main"]
    assert set(sent) == FILES and there.private
    for name in FILES - {"README.md", "samples.png"}:
        path = trained / ("adapter" if name in (ADAPTER, MANIFEST) else "") / name
        assert sent[name] == path.read_bytes()
    assert sent["samples.png"] == (trained / "samples" / "update_000004.png").read_bytes()
    config = fakes.distillation(random_model, trained.parent / "student", alone="even")
    assert isinstance(config, fakes.config.OpdStage)
    teacher = config.teachers["even"].model_copy(update={"adapter": "me/red"})
    config = config.model_copy(update={"teachers": {"even": teacher}})
    check_world(config, Launch())
    pushed, own = read_lora("me/red"), read_lora(trained / "adapter")
    assert pushed.metadata == own.metadata and pushed.metadata["lora_alpha"] == 10
    assert all((pushed.weights[key] == own.weights[key]).all() for key in own.weights)
    core = fakes.wired(config).backbone.core
    assert core.peft_config["teacher_even"].lora_alpha == 10
    layer = "transformer_blocks.1.attn.to_v"
    loaded = core.get_submodule(layer).lora_B["teacher_even"].weight
    assert (loaded == own.weights[f"{layer}.lora_B.weight"]).all()


def test_a_branch_and_another_s_repository(
    online: fake_hub.Hub, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert push(trained, "--revision", "seed-1") == 0
    made = online.repositories["me/red"]
    assert set(made.revisions["seed-1"]) == FILES and not made.revisions["main"]
    assert push(trained, "--revision", "seed-1") == 0  # it is there already
    capsys.readouterr()
    assert push(trained, "--private") == 2
    assert "me/red is there already, and everyone can see it" in capsys.readouterr().err
    assert not made.revisions["main"]
    assert main(["push", str(trained), "--repo", "you/red"]) == 2
    assert "cannot push to you/red: 403" in capsys.readouterr().err


def test_who_is_not_logged_in_is_told_how(
    online: fake_hub.Hub,
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for token in (None, "hf_" + "w" * 34):
        if token:
            monkeypatch.setenv("HF_TOKEN", token)
        else:
            monkeypatch.delenv("HF_TOKEN")
        assert push(trained) == 2
        said = capsys.readouterr().err
        assert "cannot push to me/red" in said
        assert token is None or token not in said
    assert not online.repositories


def test_the_card_says_base_licence_scores_and_command(trained: Path, random_model: str) -> None:
    card = ModelCard.load(trained / "adapter" / "README.md")
    data = card.data.to_dict()
    assert data["library_name"] == "diffusers" and data["pipeline_tag"] == "text-to-image"
    assert "base_model" not in data and "license" not in data  # a folder of this machine
    scores = {r.metric_name: r.metric_value for r in card.data.get("eval_results")}
    assert scores == {"reward": 0.6, "red": 1.2}  # those of the adapter that was kept
    assert {r.dataset_type for r in card.data.get("eval_results")} == {"tiny/ocr_test"}
    assert "| red/reward | 0.700 | 0.600 | 0.500 |" in card.text
    assert "    flowalign train --config 'a b.yaml'\n" in card.text
    (written,) = card.text.split("```yaml\n")[1:]
    assert parse(yaml.safe_load(written.split("```")[0])) == load(trained / "config.yaml")
    assert f'flowalign.load("{random_model}", lora="{trained / "adapter"}")' in card.text
    assert "Rank 4, scale\n2.5 (alpha / r)" in card.text
    for target in re.findall(r"\]\((.+?)\)", card.text):
        assert (trained / "adapter" / target).is_file(), target


def test_a_card_claims_no_score_of_another_adapter(run: Path) -> None:
    """Where no evaluation chose the adapter, as of a run that went on with evaluation=null."""
    (run / "adapter" / SCORES).write_text("{}")
    write_card(run, load(run / "config.yaml"), ["flowalign"])
    card = ModelCard.load(run / "adapter" / "README.md")
    assert not card.data.get("eval_results") and "| red/reward |" not in card.text
    assert push(run, "--dry-run") == 2


def test_an_adapter_of_stable_diffusion_has_the_licence_of_its_base(
    trained: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained / "adapter", tmp_path / "adapter")
    for size in ("3.5-medium", "3.5-large", "3-medium-diffusers"):
        base = f"stabilityai/stable-diffusion-{size}"
        config = load(trained / "config.yaml", [f"model.id={base}", "tasks.0.reward.name=ocr"])
        write_card(tmp_path, config, ["flowalign"])
        card = ModelCard.load(tmp_path / "adapter" / "README.md")
        data = card.data.to_dict()
        assert data["license"] == "other" and data["license_name"] == "stabilityai-ai-community"
        assert data["license_link"] == f"https://huggingface.co/{base}/blob/main/LICENSE.md"
        assert (data["base_model"], data["base_model_relation"]) == (base, "adapter")
        assert f'DiffusionPipeline.from_pretrained("{base}"' in card.text
        assert "- red: reward `ocr` (engine `rapidocr`: Apache-2.0)\n" in card.text
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


def test_on_the_hub_the_card_loads_from_the_hub_and_keeps_what_was_edited(
    online: fake_hub.Hub, run: Path
) -> None:
    """The folder was moved: its card still names the old place."""
    path = run / "adapter" / "README.md"
    path.write_text(path.read_text() + "\n## Known faults\n\nIt likes red.\n")
    assert push(run / "adapter") == 0  # the adapter's folder will do
    sent = online.repositories["me/red"].revisions["main"]
    card = ModelCard(sent["README.md"].decode())
    assert set(sent) == FILES
    assert card.text.count('"me/red"') == 2 and '/adapter")' not in card.text
    assert "It likes red." in card.text
    for name in ("metrics.png", "before_after.png", "samples.png"):
        assert f"![{name}]({name})" in card.text


def test_a_merge_has_a_card_without_scores(
    random_model: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = fakes.teachers(random_model, tmp_path)["even"]
    stage = parse(
        {
            "stage": "merge",
            "output": str(tmp_path / "merge"),
            "model": {"id": random_model},
            "adapters": [str(trained / "adapter"), other],
        },
        stage=MergeStage,
    )
    recipe.merged(stage)
    card = ModelCard.load(tmp_path / "merge" / "adapter" / "README.md")
    assert "with `merge`." in card.text and f"- adapters.1: `{other}`" in card.text
    assert "- merged as: concat of 2 updates" in card.text and "scale 1" in card.text
    assert push(tmp_path / "merge", "--dry-run") == 2
    assert "holds no scores" in capsys.readouterr().err
    assert push(tmp_path / "merge", "--dry-run", "--force") == 0
    assert " report.md\n" in capsys.readouterr().out


@pytest.fixture(scope="module")
def results(random_model: str, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """results.json of the base, the adapter and another one."""
    home = tmp_path_factory.mktemp("eval")
    models = {"base": None, "red": str(trained / "adapter")}
    models["even"] = fakes.teachers(random_model, home)["even"]
    texts = ["a red sign", "a blue sign"]
    path = fakes.evaluation(random_model, home, texts, {"name": "signs"}, models=models)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert evaluate(["--config", str(path)]) == 0
    return home / "out" / "results.json"


@pytest.mark.slow
def test_scores_of_an_evaluation_take_the_place_of_the_run_s(
    online: fake_hub.Hub, run: Path, results: Path
) -> None:
    """The adapter was moved since: its digest tells it."""
    assert push(run, "--results", results) == 0
    sent = online.repositories["me/red"].revisions["main"]
    assert set(sent) == FILES | {"eval.yaml"}
    card = ModelCard(sent["README.md"].decode())
    models = json.loads(results.read_text())["models"]
    rows = {row["metric"]: row for row in models["red"]["rows"]}
    found = {r.metric_name: r.metric_value for r in card.data.get("eval_results")}
    assert found == {name: pytest.approx(row["mean"], abs=1e-6) for name, row in rows.items()}
    assert card.text.count("## Scores") == 1 and "while training" not in card.text
    assert (results.parent / "table.md").read_text().strip() in card.text
    assert "This adapter is `red`" in card.text
    assert "`flowalign eval --config eval.yaml`" in card.text
    assert yaml.safe_load(sent["eval.yaml"])["benchmarks"][0]["name"] == "signs"
    assert "## What went into it" in card.text


@pytest.mark.slow
def test_results_of_another_adapter_are_refused(
    run: Path, results: Path, random_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    backbone = fakes.adapted(random_model, rank=4, alpha=11.0)  # trained on since, say
    backbone.save_adapter("student", run / "adapter")
    assert push(run, "--dry-run", "--results", results) == 2
    said = capsys.readouterr().err
    assert "has no scores of the adapter in" in said and "evaluate it again" in said


def test_what_is_not_fit_to_be_pushed_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*options: object, folder: Path = run) -> str:
        assert push(folder, "--dry-run", *options) == 2
        return capsys.readouterr().err

    assert "pytorch_lora_weights.safetensors" in refused(folder=tmp_path)
    assert main(["push", str(run), "--repo", "red", "--dry-run"]) == 2
    assert "'red' is no name on the Hub; want owner/name" in capsys.readouterr().err
    assert "not a readable results.json" in refused("--results", tmp_path / "no.json")
    (run / "metrics.jsonl").unlink()  # as of a run that was killed
    (run / "adapter" / "README.md").unlink()
    assert "holds no scores" in refused()
    assert push(run, "--dry-run", "--force") == 0
    (run / "config.yaml").unlink()
    assert "has no README.md, and" in refused("--force")


def test_what_looks_like_a_secret_stays_here(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "adapter" / "README.md"
    text = path.read_text()
    lines = [
        "api_key: abc",
        'url: "https://me:pass@host/x"',
        f"note: hf_{'a' * 34}",
        "my_token = 'x1'",
    ]
    for line in lines:
        path.write_text(f"{text}\n{line}\n")
        assert push(run, "--dry-run") == 2, line
        said = capsys.readouterr().err
        assert "README.md, line" in said and line.split()[-1] not in said, line
    path.write_text(f"{text}\ntoken_env: MY_TOKEN\ntoken: null\nmax_tokens: 7\n")
    assert push(run, "--dry-run") == 0  # a variable's name is no secret


def test_a_card_of_a_run_without_rewards_has_its_distances() -> None:
    rows = [
        {"update": u, "eval/headline": -d, "fixed_path/a": d, "fixed_path/b": d, "loss": 1.0}
        for u, d in ((0, 0.03), (10, 0.01), (20, 0.02))
    ]
    table = score_table(rows, rows[1], "base").splitlines()
    names = [line.split("|")[1].strip() for line in table if line.startswith("|")]
    assert names[2:] == ["fixed_path/a", "fixed_path/b"]
    assert "0.0300 | 0.0100 | 0.0200" in table[2]
