"""What a run learns and scores does not depend on how many processes share it (gloo, CPU)."""

import json
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.testing import assert_close

from flowalign.commands import train

LINEAR = ["optimizer.eps=1.0", "optimizer.lr=30.0"]  # Adam that does not blow rounding up
SHARED = ["rollout.prompts=8", "optimizer.updates_per_rollout=2", "optimizer.micro_batch=3",
          "train.updates=2", "train.checkpoint_every=2", *LINEAR]  # fmt: skip
LIMIT = 240  # seconds until a run that waits for ever has failed


def stage(config: Any) -> dict[str, Any]:
    """A config as a stage of a recipe."""
    return config.model_dump(mode="json", exclude={"output", "model"})


def three_tasks(model: str, folder: Path) -> dict[str, Any]:
    """A student of two teachers and the base. Of two processes the first has images of one task,
    the second of two; the third task comes in the last update."""
    found = fakes.distillation(
        model, folder / "opd", *SHARED, "rollout.copies=1", "anchor={adapter: null}",
        "student.states={select: random, count: 2}",
        "optimizer.updates_per_rollout=1",  # DDP regroups its buckets at the next forward pass
        "rollout.prompts=4", "train.updates=3", "train.checkpoint_every=3",
    )  # fmt: skip
    raw = stage(found)
    raw["teachers"]["base"] = {"adapter": None, "guidance": 1.0}
    raw["tasks"].append({**raw["tasks"][0], "name": "base"})
    for task, weight in zip(raw["tasks"], (2.75, 1.0, 0.25), strict=True):
        task["weight"] = weight
    return raw


@pytest.fixture(scope="module")
def recipe(
    random_model: str, read_from_files: None, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """GRPO with two optimizer steps a rollout, a merge, the student, and an evaluation."""
    folder = tmp_path_factory.mktemp("processes")
    grpo = fakes.settings(random_model, folder / "grpo", *SHARED, "grpo.advantage=batch_std",
                          "grpo.kl_weight=0.1", reward="Choosy")  # fmt: skip
    raw = stage(grpo)
    prompts = fakes.PROMPTS
    raw["tasks"][0]["reward"]["options"] = {"bad": prompts[:1], "flat": prompts[3:4]}
    opd = three_tasks(random_model, folder)
    even = opd["teachers"]["even"]["adapter"]
    merge = {"stage": "merge", "adapters": ["stage:grpo", even]}
    table = {
        "stage": "eval",
        "models": {"base": None, "even": even, "merged": "stage:merge"},
        "benchmarks": [
            {"name": "red", "prompts": str(folder / "prompts.txt"), "images": 1,
             "reward": {"name": "fakes:redness"}},
        ],
        "sampling": {"steps": 3, "guidance": 2.0, "batch_size": 3},
    }  # fmt: skip
    found = {"stage": "recipe", "output": str(folder / "one"),
             "model": grpo.model.model_dump(mode="json"),
             "stages": {"grpo": raw, "merge": merge, "opd": opd, "table": table}}  # fmt: skip
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(found, sort_keys=False))
    fakes.AcceleratorState._reset_state(reset_partial_state=True)
    assert train.main(["--config", str(path)]) == 0
    return path


@pytest.mark.long
def test_four_processes_do_what_one_does(recipe: Path) -> None:
    """Stage after stage in the same processes. test_parallel.py has two."""
    one, several, world = recipe.parent / "one", recipe.parent / "four", 4
    done = fakes.launch(fakes.ROOT / "train.py", "--config", recipe, f"output={several}",
                        processes=world, seconds=LIMIT)  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    for name in ("grpo", "opd"):
        weights, expected = (
            load_file(output / name / "adapter" / "pytorch_lora_weights.safetensors")
            for output in (several, one)
        )
        moved = torch.cat([value.flatten() for key, value in expected.items() if "lora_B" in key])
        assert moved.abs().max() > 1e-3
        for key, value in expected.items():
            assert_close(weights[key], value, rtol=0, atol=1e-6, msg=f"{name} {key}")
        (*_, last) = sorted((several / name / "checkpoints").iterdir())
        assert len(list(last.glob("rng_*.json"))) == world  # several, indeed
    found, expected = (
        json.loads((output / "table" / "results.json").read_text())["models"]
        for output in (several, one)
    )
    for model in ("base", "even"):
        assert len(expected[model]["images"]["red"]) == 8
        assert found[model]["images"] == expected[model]["images"]
    values = [[row["value"] for row in models["merged"]["images"]["red"]]
              for models in (found, expected)]  # fmt: skip
    assert_close(values[0], values[1], rtol=0, atol=1e-3)
