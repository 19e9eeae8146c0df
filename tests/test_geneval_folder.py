"""GenEval's folder in and out; the official prompts are judged; bad folders are refused."""

from __future__ import annotations

import json
import os
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import geneval_models
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from flowalign.eval.geneval import summarize
from flowalign.eval.geneval_folder import FolderError, evaluate, main, read, write
from flowalign.types import Detections

DOG = {"tag": "single_object", "include": [{"class": "dog", "count": 1}], "prompt": "a dog"}
CATS = {
    "tag": "counting",
    "include": [{"class": "cat", "count": 2}],
    "exclude": [{"class": "cat", "count": 3}],
    "prompt": "two cats — «här»",
}


class Reds:
    """Finds as many red dogs and cats as the first pixel's red says; remembers the sizes."""

    name = "reds 1"

    def __init__(self, score: float = 0.95) -> None:
        self.score, self.sizes = score, []

    def __call__(self, images: Tensor) -> list[Detections]:
        self.sizes.append(tuple(images.shape))
        counts = [round(float(image[0, 0, 0]) * 255) for image in images]
        boxes = [[[9.0 * i, 0, 9 * i + 5, 5, self.score] for i in range(n)] for n in counts]
        return [Detections({"dog": b, "cat": b}, lambda name, index: "red") for b in boxes]


def images(*counts: int, height: int = 4, width: int = 6) -> Tensor:
    """One image a count, [K,3,H,W], that `Reds` finds that many things in."""
    pixels = torch.randint(0, 256, (len(counts), 3, height, width)) / 255
    pixels[:, 0, 0, 0] = torch.tensor(counts) / 255
    return pixels


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two prompts of three images, each in a size of its own."""
    torch.manual_seed(0)
    write(tmp_path / "made", [DOG, CATS], [images(0, 1, 2), images(1, 2, 3, width=9)])
    return tmp_path / "made"


def official_files(folder: Path) -> dict[str, Any]:
    """{image: metadata} that the official script would evaluate, by its own way of looking."""
    metadata_of = {}
    for sub in os.listdir(folder):
        prompt = os.path.join(folder, sub)
        if os.path.isdir(prompt) and sub.isdigit():
            with open(os.path.join(prompt, "metadata.jsonl")) as file:
                metadata = json.load(file)
            for name in os.listdir(os.path.join(prompt, "samples")):
                path = os.path.join(prompt, "samples", name)
                if os.path.isfile(path) and re.match(r"\d+\.png", name):
                    metadata_of[path] = metadata
    return metadata_of


def test_what_is_written_is_read_again_and_by_the_official_script(tmp_path: Path):
    torch.manual_seed(0)
    pixels = [images(0, 1, 2), images(1, 2, 3, width=9)]
    write(tmp_path, [DOG], pixels[:1])
    write(tmp_path, [CATS], pixels[1:], first=1)
    samples = read(tmp_path)
    assert [str(s.path.relative_to(tmp_path)) for s in samples] == [
        f"0000{prompt}/samples/0000{index}.png" for prompt in range(2) for index in range(3)
    ]
    assert [s.metadata for s in samples] == [DOG] * 3 + [CATS] * 3
    for sample, expected in zip(samples, [*pixels[0], *pixels[1]], strict=True):
        with Image.open(sample.path) as image:
            assert image.mode == "RGB"
            pixels_read = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        assert torch.equal(pixels_read, (expected * 255).round().byte())
    assert official_files(tmp_path) == {str(s.path): s.metadata for s in samples}


def test_a_folder_of_the_official_generator_is_read(folder: Path):
    """It adds a grid, and the system adds files of its own."""
    (folder / "00000" / "grid.png").write_bytes(b"a grid")
    (folder / "00000" / "samples" / ".DS_Store").write_bytes(b"")
    (folder / "logs").mkdir()
    assert [s.path.name for s in read(folder)] == ["00000.png", "00001.png", "00002.png"] * 2


def test_eleven_prompts_are_read_by_number_not_by_name(tmp_path: Path):
    write(tmp_path, [DOG] * 11, [images(1)] * 11)
    for number in range(11):
        (tmp_path / f"{number:05}").rename(tmp_path / str(number))
    assert [s.path.parts[-3] for s in read(tmp_path)] == [str(n) for n in range(11)]


def test_rows_are_those_of_the_official_results_file(folder: Path, tmp_path: Path):
    detector, out = Reds(), tmp_path / "new" / "results.jsonl"
    rows = evaluate(folder, detector, out, batch_size=4)
    assert [json.loads(line) for line in out.read_text().splitlines()] == rows
    keys = ["filename", "tag", "prompt", "correct", "reason", "metadata", "details"]
    assert [list(row) for row in rows] == [keys] * 6
    assert [row["correct"] for row in rows] == [False, True, True, False, True, False]
    reasons = [row["reason"] for row in rows[3:]]
    assert reasons == ["expected cat>=2, found 1", "", "expected cat<3, found 3"]
    assert [json.loads(row["metadata"]) for row in rows] == [DOG] * 3 + [CATS] * 3
    float32 = float(torch.tensor(0.95))  # what the official detector would have answered
    assert json.loads(rows[1]["details"])["dog"] == [[0, 0, 5, 5, float32]]
    assert [len(json.loads(row["details"]).get("cat", [])) for row in rows] == [0, 1, 2, 1, 2, 3]
    assert rows[0]["filename"] == str(folder / "00000" / "samples" / "00000.png")
    assert detector.sizes == [(3, 3, 4, 6), (1, 3, 4, 9), (2, 3, 4, 9)]
    summary = summarize(rows)
    assert summary["tasks"] == pytest.approx({"single_object": 2 / 3, "counting": 1 / 3})
    assert summary["overall"] == pytest.approx(0.5)


def test_the_rules_can_be_set_and_the_batch_size_does_not_matter(folder: Path):
    weak = evaluate(folder, Reds(0.5), threshold=0.6, counting_threshold=0.4)
    assert [row["correct"] for row in weak] == [False, False, False, False, True, False]
    assert json.loads(weak[2]["details"]) == {}
    assert evaluate(folder, Reds(), batch_size=1) == evaluate(folder, Reds(), position_threshold=0)
    with pytest.raises(ValueError, match="`max_objects`"):
        evaluate(folder, Reds(), max_objects=0)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:60])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda f: (f / "00000").rename(f / "x"), "00001, but number 0 is missing"),
        (lambda f: (f / "00001/metadata.jsonl").unlink(), "00001/metadata.jsonl"),
        (lambda f: (f / "00001/metadata.jsonl").write_bytes(b"\xff"), "00001/metadata.jsonl"),
        (lambda f: (f / "00001/metadata.jsonl").write_text("[]"), "has no text `tag`"),
        (
            lambda f: (f / "00001/metadata.jsonl").write_text('{"tag": "a", "prompt": "p"}'),
            "00001/metadata.jsonl: .*`include`",
        ),
        (lambda f: (f / "00001/samples").rename(f / "00001/images"), "nothing that is numbered"),
        (lambda f: [p.unlink() for p in (f / "00001/samples").iterdir()], "nothing that is number"),
        (lambda f: (f / "00001/samples/00001.png").unlink(), "00002.png, but number 1 is missing"),
        (lambda f: (f / "00001/samples/00002.png").unlink(), "holds 2 images, but 00000 has 3"),
        (lambda f: cut(f / "00001/samples/00001.png"), "00001.png is no image that can be read"),
        (lambda f: (f / "00000/samples/00001.png").write_bytes(b""), "00001.png is no image"),
    ],
)
def test_a_bad_folder_is_refused_with_the_place(folder: Path, spoil: Callable, said: str):
    spoil(folder)
    detector = Reds()
    with pytest.raises(FolderError, match=said):
        evaluate(folder, detector)
    assert detector.sizes == []  # before any image is judged


def test_what_cannot_be_scored_is_not_written(folder: Path, tmp_path: Path):
    with pytest.raises(FolderError, match="holds images already"):
        write(folder, [DOG], [images(1)])
    with pytest.raises(ValueError, match="prompt 0: .*`include`"):
        write(tmp_path / "new", [{"tag": "a", "prompt": "p"}], [images(1)])
    with pytest.raises(ValueError, match="NaN"):
        write(tmp_path / "new", [DOG], [torch.full((1, 3, 2, 2), torch.nan)])
    assert not (tmp_path / "new").exists()


# The command --------------------------------------------------------------------------------------


def test_the_command_prints_each_task_and_the_overall(folder: Path, tmp_path, capsys, monkeypatch):
    module = types.ModuleType("stranger")
    module.__dict__["Reds"] = Reds
    monkeypatch.setitem(sys.modules, "stranger", module)
    out = tmp_path / "r.jsonl"
    argv = [str(folder), "--detector", "stranger:Reds", "--option", "score=0.96", "--out", str(out)]
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "detector: reds 1"
    assert lines[1].split() == ["single_object", "66.67%", "(2", "of", "3", "images)"]
    assert lines[2].split() == ["counting", "33.33%", "(1", "of", "3", "images)"]
    assert lines[3].split()[:2] == ["images", "50.00%"]
    assert lines[4].split()[:2] == ["prompts", "100.00%"]
    assert lines[5].split()[:2] == ["overall", "0.50000"]
    assert len(out.read_text().splitlines()) == 6


def test_the_command_runs_the_real_detector(folder: Path, capsys, open_clip, tmp_path: Path):
    clip = geneval_models.clip(open_clip, tmp_path)
    options = {
        "model": geneval_models.mask2former(tmp_path / "mask2former"),
        "clip": clip["architecture"],
        "clip_pretrained": clip["pretrained"],
        "size": "[32, 64]",
        "device": "cpu",
    }
    argv = [f"--option={name}={value}" for name, value in options.items()]
    assert main([str(folder), *argv]) == 0
    said = capsys.readouterr().out
    assert said.startswith(
        f"detector: mask2former {options['model']} at 32/64 px, float32; colours"
    )
    assert re.search(r"^overall +0\.\d{5}", said, re.MULTILINE)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["nowhere", "--detector", "tiny"], "there is no folder nowhere"),
        (["nowhere", "--option", "size"], "'size': want key.path=value"),
        (["nowhere", "--detector", "tiny", "--option", "size=3"], "has no option 'size'"),
    ],
)
def test_the_command_says_what_is_wrong(argv: list[str], said: str, capsys):
    assert main(argv) == 2
    assert said in capsys.readouterr().err
