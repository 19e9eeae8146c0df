"""The configs of Stable Diffusion 3.5: sound without a model, and the same run on any hardware."""

import json
from collections.abc import Iterator
from pathlib import Path

import fake_hub
import pytest

from flowalign import recipe
from flowalign.checks import check_world
from flowalign.config import STAGES, Config, OpdConfig, RecipeConfig, Root, load

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs/sd35_medium").glob("[!_]*.yaml"))
VARIANTS = sorted((ROOT / "configs/variants").glob("*.yaml"))
MEMORY = {
    "model": {"gradient_checkpointing", "quantization", "offload_text_encoders", "decode_batch"},
    "rollout": {"batch_size"},
    "optimizer": {"micro_batch"},
    "student": {"label_batch"},
    "evaluation": {"batch_size"},
    "sampling": {"batch_size"},
}
"""What a variant may change: where and in which portions things are computed, not what."""


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Prompt sets under the names that the configs use, a line each, and a Hub with the public
    teachers, a layer each."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data"
    folder.mkdir()
    clause = {"class": "kite", "count": 1}
    row = {"tag": "single_object", "include": [clause], "prompt": "a photo of a kite"}
    for name in ("geneval_train", "geneval_test"):
        (folder / f"{name}.jsonl").write_text(json.dumps(row))
    for name in ("ocr_train", "ocr_test"):
        (folder / f"{name}.txt").write_text('a sign that says "KITE"')
    for name in ("pickscore_sfw_train", "pickscore_sfw_test", "drawbench"):
        (folder / f"{name}.txt").write_text("a kite over a lake")
    with fake_hub.serving() as hub:
        fake_hub.go_online(fake_hub.with_public_teachers(hub), monkeypatch, tmp_path / "cache")
        yield


def stages(path: Path, variant: Path | None = None, processes: int = 1) -> dict[str, Root]:
    """Every stage that a config runs, checked as before a run."""
    config = load(path, stage=Root, variant=variant)
    if isinstance(config, RecipeConfig):
        return recipe.plan(config, path.parent, processes)
    check_world(config, processes)
    return {path.stem: config}


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda path: path.stem)
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_variant_runs_the_same_images_and_updates(path: Path, variant: Path) -> None:
    processes = int(variant.stem.split("x")[0])
    plain, varied = stages(path), stages(path, variant, processes)
    assert plain.keys() == varied.keys()
    for name, stage in plain.items():
        here, there = stage.model_dump(), varied[name].model_dump()
        for section, keys in MEMORY.items():
            for part in (here, there):
                if part.get(section):
                    part[section] = {k: v for k, v in part[section].items() if k not in keys}
        assert here == there


@pytest.mark.usefixtures("data")
def test_the_settings_are_the_official_ones() -> None:
    """FACTS, section 9: Flow-OPD on eight GPUs."""
    (found,) = stages(ROOT / "configs/sd35_medium/student_flow_opd.yaml").values()
    assert isinstance(found, OpdConfig)
    rollout, optimizer = found.rollout, found.optimizer
    assert (rollout.steps, rollout.guidance, rollout.noise_level) == (10, 4.5, 0.7)
    assert (rollout.copies, rollout.kind, found.model.height) == (16, "sde", 512)
    assert (found.lora.rank, found.lora.alpha, len(found.lora.targets)) == (32, 64, 8)
    assert (optimizer.lr, optimizer.weight_decay) == (1e-4, 1e-4)
    assert optimizer.updates_per_rollout == 2 and found.ema
    assert (found.ema.decay, found.ema.every) == (0.9, 8)
    assert found.anchor and found.anchor.weight == 0.04
    assert found.model.max_sequence_length == 128
    assert found.evaluation and found.evaluation.steps == 40


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_ratio_is_taken_over_the_batches_of_the_rollout(path: Path) -> None:
    """In 16 bits a ratio is exactly 1 only where rollout and update share their batches."""
    for variant in (None, *VARIANTS):
        for stage in stages(path, variant).values():
            if isinstance(stage, Config) and not (
                isinstance(stage, OpdConfig) and stage.student.gradient == "pathwise"
            ):
                assert stage.rollout.batch_size == stage.optimizer.micro_batch


def test_a_variant_has_keys_for_known_stages_only() -> None:
    for path in VARIANTS:
        for kind, keys in load_variant(path).items():
            assert kind in STAGES and set(keys) <= MEMORY.keys()


def load_variant(path: Path) -> dict[str, dict[str, object]]:
    from flowalign.config import read

    return read(path)
