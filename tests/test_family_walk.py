"""What a user of a family does with a LoRA from the Hub: merge it, evaluate it, train a student on
it, look at images of all.

`pytest -m long -rP` prints what each command said, and the seconds that it took.
"""

import json
import logging
import re
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fakes
import families
import numpy as np
import pytest
import yaml
from safetensors.torch import load_file, save_file
from test_lora_formats import ab, as_they_are, random_layers, written

import flowalign
from flowalign.backbone import adapters
from flowalign.commands import cli

FORMATS = {  # of the LoRA; None = diffusers' own names, as it reads no others with the family
    "sd3": None, "flux": "kohya_bfl", "schnell": "kohya_bfl", "flux2": "comfy_bfl",
    "klein": "kohya_flux2", "klein_distilled": "comfy", "qwen_image": "kohya",
    "z_image": "kohya_z", "sana": None,
}  # fmt: skip
FAST = ("sana", "z_image")
FAMILIES = [
    pytest.param(name, marks=pytest.mark.slow if name in FAST else pytest.mark.long)
    for name in families.PIPELINES
]
SIZE, LENGTH = (64, 32), 64  # pixels; tokens: templates leave room for the prompts
Say = Callable[..., str]


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Say]:
    """Runs a command; gives what it printed. It says nothing twice in its log."""

    def run(*words: object, status: int = 0) -> str:
        fakes.AcceleratorState._reset_state(reset_partial_state=True)
        adapters._say_once.cache_clear()  # a process has one command
        monkeypatch.setattr(logging.root, "handlers", [])  # pytest's
        began = time.monotonic()
        ended = cli.main([str(word) for word in words])
        printed = "".join(capfd.readouterr())
        shown.append(f"$ {words[0]}: {ended}, {time.monotonic() - began:.1f} s\n{printed}")
        assert ended == status, printed
        logged = re.findall(r"(?m)^\S+ \S+ (?:INFO|WARNING) (.*)$", printed)
        assert len(logged) == len(set(logged)), printed
        return printed

    shown: list[str] = []
    yield run
    print("\n".join(shown))


def public_lora(family: str, folder: Path) -> Path:
    """A LoRA as another program writes it."""
    folder.mkdir()
    if format := FORMATS[family]:
        return written(format, family, folder)[1]
    core = families.pipeline(family).transformer
    save_file(ab("transformer.")(random_layers(core, as_they_are(core))), folder / "x.safetensors")
    return folder


def image(model: Path, lora: Path | None, family: str) -> np.ndarray:
    """As diffusers' own call samples it."""
    pipe: Any = flowalign.load(str(model), lora=lora)
    pipe.set_progress_bar_config(disable=True)
    height, width = SIZE
    options = {"use_resolution_binning": False} if family == "sana" else {}
    size = {"height": height, "width": width, "max_sequence_length": LENGTH}
    words = {"prompt": fakes.PROMPTS[0], "num_inference_steps": 2, "output_type": "np"}
    found = pipe(**words, **size, **options).images
    assert found.shape == (1, height, width, 3)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_public_lora_is_merged_evaluated_and_taught(
    family: str, tmp_path: Path, say: Say
) -> None:
    model, lora = tmp_path / "model", public_lora(family, tmp_path / "public")
    families.pipeline(family).save_pretrained(model)
    conversions = 1 if FORMATS[family] else 0
    merged, student = tmp_path / "merged", tmp_path / "student"
    halves = ["--weights", "0.5", "0.5", "--model", model, "--out", merged]

    printed = [say("merge", lora, lora, *halves)]

    models = {"base": None, "public": str(lora), "merged": str(merged)}
    small = {"id": str(model), "height": SIZE[0], "width": SIZE[1], "max_sequence_length": LENGTH}
    keys = {"models": models, "model": small}
    config = fakes.evaluation(str(model), tmp_path, fakes.PROMPTS[:2], **keys)
    printed.append(say("eval", "--config", config))
    results = json.loads((tmp_path / "out" / "results.json").read_text())["models"]
    plain, public, halved = (
        [row["value"] for row in results[name]["images"]["red"]] for name in models
    )
    assert plain != public and halved == pytest.approx(public, abs=1e-5)
    assert all(re.search(rf"(?m)^\W*{name}\b", printed[-1]) for name in models)  # in the table

    raw = fakes.settings(str(model), student).model_dump(mode="json", exclude={"grpo", "stage"})
    raw |= {"stage": "opd", "teachers": {"red": {"adapter": str(lora)}}, "model": small}
    raw["train"] |= {"updates": 2}
    (tmp_path / "student.yaml").write_text(yaml.dump(raw))
    printed.append(say("train", "--config", tmp_path / "student.yaml"))
    learned = load_file(student / "adapter" / "pytorch_lora_weights.safetensors")
    assert any(bool(w.any()) for name, w in learned.items() if "lora_B" in name)

    small_images = ["--size", "64", "--steps", "2", "--out"]
    words = ["sample", "a red sign", "--model", model, "--lora", lora]
    said = say(*words, *small_images, tmp_path / "public_images.png")
    assert said.count("converted") == conversions
    for name, text in {"merged": printed[0], "student": printed[2]}.items():
        (follow,) = re.findall("(?m)^  flowalign (sample .*)$", text)  # as the command advises
        said = say(*shlex.split(follow), *small_images, tmp_path / f"{name}_images.png")
        assert str(model) in said and "converted" not in said
    assert len(list(tmp_path.glob("*_images.png"))) == 3
    assert [text.count("converted") for text in printed] == [conversions] * 3

    base, *adapted = [image(model, adapter, family) for adapter in (None, merged, student)]
    assert all(np.isfinite(pixels).all() for pixels in adapted)
    assert not any(np.array_equal(base, pixels) for pixels in adapted)
