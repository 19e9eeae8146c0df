"""Images that another program made are scored as our own; bad ones are refused before any model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import fakes
import numpy as np
import pytest
import torch
from PIL import Image

import flowalign
from flowalign import rewards
from flowalign.backbone import Backbone
from flowalign.commands.evaluate import main
from flowalign.config import EvalStage, load
from flowalign.eval.images import ImagesError, check_images, find_images
from flowalign.system.images import image_files, pixels_of, read_image, stacked
from flowalign.training.data import load_prompts
from flowalign.training.rollout import Noise

WORDS = ["a dog", "two cats «ici»", "a dog"]  # the set lists the first one twice
DOG = {"tag": "single_object", "include": [{"class": "dog", "count": 1}]}
CATS = {"tag": "counting", "include": [{"class": "cat", "count": 2}]}
ROWS = [{**DOG, "prompt": WORDS[0]}, {**CATS, "prompt": WORDS[1]}, {**DOG, "prompt": WORDS[2]}]
SIZE = (32, 32)


def picture(path: Path, shade: int, size: tuple[int, int] = SIZE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (shade, 9, 9)).save(path)
    return path


def geneval(folder: Path, copies: int = 2) -> Path:
    for number, row in enumerate(ROWS):
        for copy in range(copies):
            picture(folder / f"{number:05}/samples/{copy:05}.png", 20 * number + copy)
        (folder / f"{number:05}/metadata.jsonl").write_text(json.dumps(row))
    return folder


def beside(folder: Path) -> Path:
    for number, word in enumerate(WORDS):
        for copy in range(2):
            file = picture(folder / f"{number}/{copy}.png", 20 * number + copy)
            file.with_suffix(".txt").write_text(f"{word}\n", encoding="utf-8")
    return folder


def paths(number: int) -> list[str]:
    return [f"made/{number:05}/samples/{copy:05}.png" for copy in range(2)]


def as_jsonl(folder: Path) -> Path:
    geneval(folder / "made")
    rows = [{"prompt": word, "images": paths(i)} for i, word in enumerate(WORDS[:2])]
    rows += [{"prompt": WORDS[2], "images": path} for path in paths(2)]
    (folder / "images.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "images.jsonl"


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:

    def load(*args: Any, **options: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(Backbone, "load", load)


def config(folder: Path, source: Path, *marks: dict[str, Any], **keys: Any) -> Path:
    """An evaluation of the images of `source`: two for each of three prompts."""
    models = {"theirs": {"images": str(source)}}
    marks = marks or ({"images": 2},)
    return fakes.evaluation("tiny", folder, ROWS, *marks, **{"models": models, **keys})


def rows(folder: Path, model: str = "theirs") -> dict[str, list[dict[str, Any]]]:
    return json.loads((folder / "out" / "results.json").read_text())["models"][model]["images"]


@pytest.mark.usefixtures("never")
@pytest.mark.parametrize("form", [geneval, beside, as_jsonl])
def test_each_form_gives_each_image_to_its_prompt(form: Callable[[Path], Path], tmp_path: Path):
    source = form(tmp_path / "theirs")
    before = {path: path.read_bytes() for path in source.parent.rglob("*") if path.is_file()}
    assert main(["--config", str(config(tmp_path, source))]) == 0
    scored = rows(tmp_path)["red"]
    assert [(row["index"], row["copy"]) for row in scored] == [*product(range(3), range(2))]
    shades = [round(row["value"] * 255 + 9) for row in scored]  # redness: red less the others
    assert shades == [20 * number + copy for number in range(3) for copy in range(2)]
    assert {path: path.read_bytes() for path in before} == before
    table, document = (tmp_path / "out" / "table.md").read_text(), tmp_path / "out" / "results.json"
    settings = json.loads(document.read_text())["models"]["theirs"]["settings"]
    assert (settings["height"], settings["steps"]) == (32, None) and str(source) in table
    assert {"report.html", "grid.png"} <= {path.name for path in (tmp_path / "out").iterdir()}


# What is refused ---------------------------------------------------------------------------------


def in_folder(spoil: Callable[[Path], Any]) -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        spoil(geneval(folder))
        return folder

    return made


def in_file(name: str, content: str, encoding: str = "utf-8") -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        geneval(folder / "made")
        (folder / name).write_text(content, encoding)
        return folder / name

    return made


def table(*rows: tuple[str, Any]) -> str:
    return "\n".join(json.dumps({"prompt": prompt, "images": images}) for prompt, images in rows)


def no_prompt(folder: Path) -> Path:
    (beside(folder) / "1" / "0.txt").unlink()
    return folder


def as_jpeg(folder: Path) -> None:
    path = folder / "00001/samples/00001.png"
    noise = torch.randint(256, (32, 32, 3), dtype=torch.uint8).numpy()
    Image.fromarray(noise).save(path, format="JPEG")
    path.write_bytes(path.read_bytes()[:-400])


DOGS, CAT = paths(0) + paths(2), paths(1)
BAD = {
    "no source": (lambda folder: folder / "no", "no such folder"),
    "an empty folder": (lambda folder: folder.mkdir() or folder, "holds no images"),
    "a file that is not there": (
        in_file("images.jsonl", table((WORDS[0], DOGS), (WORDS[1], ["x.png", "y.png"]))), "x.png"
    ),
    "one image where two are expected": (
        in_file("images.jsonl", table((WORDS[0], DOGS), (WORDS[1], CAT[0]))), "images of 'two"
    ),
    "fewer prompts": (in_file("images.jsonl", table((WORDS[0], DOGS))), "1 of 2 prompts have no"),
    "a prompt with a slip": (
        in_file("images.jsonl", table((WORDS[0], DOGS), ("a cta", CAT))), "none of them: 'a cta'"
    ),
    "a repeated prompt once": (
        in_file("images.jsonl", table((WORDS[0], DOGS[:2]), (WORDS[1], CAT))), "images of 'a dog'"
    ),
    "an image without a prompt": (no_prompt, "0.png has no prompt beside it, in 0.txt"),
    "a number that is missing": (in_folder(lambda f: (f / "00001").rename(f / "00007")), "gaps"),
    "no metadata": (in_folder(lambda f: (f / "00001/metadata.jsonl").unlink()), "metadata.jsonl"),
    "a JPEG that is cut off": (in_folder(as_jpeg), "00001.png is no image"),
    "mixed sizes": (
        in_folder(lambda f: picture(f / "00001/samples/00001.png", 0, (16, 32))), "32x16"
    ),
}  # fmt: skip


@pytest.mark.usefixtures("never")
@pytest.mark.parametrize(("make", "said"), BAD.values(), ids=BAD)
def test_bad_images_are_refused_in_a_sentence_before_a_judge_is_built(
    make: Callable[[Path], Path], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setattr(rewards, "build", lambda *_, **__: pytest.fail("a judge was built"))
    assert main(["--config", str(config(tmp_path, make(tmp_path / "theirs")))]) == 2
    (problem,) = [line for line in capsys.readouterr().err.splitlines() if "models." in line]
    assert problem.startswith("  - models.theirs: ") and said in problem
    assert problem.count("images.json") <= 1 and "KeyError" not in problem
    assert not list((tmp_path / "out").glob("*.*"))


@pytest.mark.usefixtures("never")
def test_more_prompts_than_the_benchmark_has_are_left_alone_and_a_limit_takes_the_first(
    tmp_path, caplog
):
    source = as_jsonl(tmp_path / "theirs")
    with source.open("a") as file:
        file.write(f"\n{table(('a cow', 'nowhere.png'))}")
    path = str(config(tmp_path, source))
    for limit, count, lost in ((1, 2, 1), (2, 4, 0), (3, 6, 0)):  # the same images and two more
        caplog.clear()
        assert main(["--config", path, f"benchmarks.0.limit={limit}"]) == 0
        assert len(rows(tmp_path)["red"]) == count
        assert len([r for r in caplog.messages if "1 of 2 tags" in r]) == lost


@pytest.mark.usefixtures("never")
def test_images_that_changed_are_not_taken_for_those_that_were_scored(tmp_path: Path, capsys):
    source = geneval(tmp_path / "theirs")
    path = str(config(tmp_path, source))
    assert main(["--config", path]) == 0
    picture(source / "00001/samples/00001.png", 200)
    assert main(["--config", path]) == 2
    assert "files.3" in capsys.readouterr().err


# Beside our own images ---------------------------------------------------------------------------

STEPS, SEED, GUIDANCE = 3, 7, 2.0
SAMPLED = {"sampling": {"steps": STEPS, "guidance": GUIDANCE, "seed": SEED, "batch_size": 2}}


def by_diffusers(folder: Path) -> Path:
    """What a user's own code would write, with the initial noise of our seed."""
    pipe, words, lines = flowalign.load("tiny"), [row["prompt"] for row in ROWS[:2]], []
    pipe.set_progress_bar_config(disable=True)
    folder.mkdir()
    channels, side = pipe.transformer.config.in_channels, 96 // pipe.vae_scale_factor
    for index, word in enumerate(words):
        noise = [Noise((SEED,)).draw(index, copy, (channels, side, side), 0) for copy in range(2)]
        made = pipe(
            [word] * 2, latents=torch.cat(noise), num_inference_steps=STEPS,
            guidance_scale=GUIDANCE, height=96, width=96,
        ).images  # fmt: skip
        names = [f"{index}_{copy}.png" for copy in range(2)]
        for name, image in zip(names, made, strict=True):
            image.save(folder / name)
        lines.append((word, names))
    (folder / "images.jsonl").write_text(table(*lines))
    return folder / "images.jsonl"


@pytest.mark.slow
def test_images_of_plain_diffusers_code_have_the_scores_of_our_own(tmp_path: Path):
    """By several judges, in one table. Of diffusers' images a pixel may differ by one level: on
    some CPUs the last bits of a product depend on where the weights lie in memory."""
    source = by_diffusers(tmp_path / "theirs")
    judges = {"red": {"name": "fakes:redness"},
              "geneval": {"name": "geneval", "options": {"detector": "tiny"}},
              "pick": {"name": "pickscore", "options": {"model": "tiny"}}}  # fmt: skip
    mark = {"name": "x", "images": 2, "limit": 2, "rewards": judges}
    models = {"base": None, "theirs": {"images": str(source), "steps": STEPS, "guidance": GUIDANCE}}
    model = {"id": "tiny", "height": 96, "width": 96, "max_sequence_length": 14}
    file = config(tmp_path, source, mark, **SAMPLED, models=models, model=model)
    assert main(["--config", str(file)]) == 0
    ours, theirs = rows(tmp_path, "base"), rows(tmp_path)
    folders = (tmp_path / "out/images/base", source.parent)
    made = [sorted(folder.rglob("*.png")) for folder in folders]
    assert [len(files) for files in made] == [4, 4]
    for pair in zip(*made, strict=True):
        first, second = (np.asarray(Image.open(file).convert("RGB"), int) for file in pair)
        assert abs(first - second).max() <= 1 and (first != second).mean() < 1e-3
    for name, scored in ours.items():
        values = [row["value"] for row in theirs[name]]
        assert values == pytest.approx([row["value"] for row in scored], abs=1e-4)
    assert "same prompts:" in (tmp_path / "out" / "table.md").read_text()


def test_images_beside_a_model_have_its_size(tmp_path: Path, capsys):
    models = {"base": None, "theirs": {"images": str(geneval(tmp_path / "theirs"))}}
    model = {"id": "tiny", "height": 96, "width": 96}
    file = config(tmp_path, tmp_path, models=models, model=model)
    assert main(["--config", str(file)]) == 2
    assert "models.theirs: red: several sizes" in capsys.readouterr().err


# Without a config --------------------------------------------------------------------------------


def of_tiny(folder: Path, benchmark: str, count: int) -> Path:
    """An image of each of the first prompts of a tiny benchmark, in GenEval's layout."""
    batch = load_prompts(f"tiny/{benchmark}_test", "")
    for i in range(count):
        picture(folder / f"{i:05}/samples/00000.png", i, (64, 64))
        row = {**batch.metadata[i], "prompt": batch.prompts[i]}
        (folder / f"{i:05}/metadata.jsonl").write_text(json.dumps(row))
    return folder


@pytest.mark.usefixtures("never")
def test_flags_choose_the_benchmark_that_the_images_are_of(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # without fetched prompts
    source, out = of_tiny(tmp_path / "my.images", "geneval", 3), tmp_path / "out"
    given = ["--benchmarks", "geneval", "--limit", "3"]
    assert main(["--images", str(source), *given, "--out", str(out)]) == 0
    assert list(rows(tmp_path, "my")) == ["geneval"]
    assert load(str(out / "eval.yaml"), stage=EvalStage).given["my"].images == str(source)


RAMP = np.tile(np.arange(64, dtype=np.uint16) * 1024 + 511, (64, 1))  # 16 bits
GREY = Image.fromarray((RAMP / 257).round().astype(np.uint8))
FULL = Image.new("L", GREY.size, 255)
HOLES = Image.fromarray(np.where(np.arange(64) < 8, 254, np.full((64, 64), 255)).astype(np.uint8))


READ: dict[str, Image.Image] = {
    "grey16.png": Image.fromarray(RAMP), "grey16.tif": Image.fromarray(RAMP.astype(">u2")),
    "grey.bmp": GREY, "alpha.png": Image.merge("LA", (GREY, FULL)),
    "rgba.webp": Image.merge("RGBA", (GREY, GREY, GREY, FULL)), "palette.png": GREY.convert("P"),
    "cmyk.tif": GREY.convert("RGB").convert("CMYK"),
}  # fmt: skip
UNREAD: dict[str, Image.Image] = {
    "grey32.tif": Image.fromarray(RAMP.astype(np.int32)),
    "float.tif": Image.fromarray((RAMP / 65535).astype(np.float32)),
    "alpha.png": Image.merge("LA", (GREY, HOLES)),
    "rgba.webp": Image.merge("RGBA", (GREY, GREY, GREY, HOLES)),
}


def saved(path: Path, image: Image.Image) -> Path:
    image.save(path, lossless=True) if path.suffix == ".webp" else image.save(path)
    return path


@pytest.mark.parametrize("name", READ)
def test_pixels_of_any_kind_are_read_right(name: str, tmp_path: Path) -> None:
    file = saved(tmp_path / name, READ[name])
    truth = torch.from_numpy(RAMP / 65535).float().expand(3, -1, -1)
    for pixels in (stacked(read_image(file))[0], pixels_of(file.read_bytes())):
        torch.testing.assert_close(pixels, truth, rtol=0, atol=1 / 255)
    torch.testing.assert_close(stacked(Image.open(file))[0], truth, rtol=0, atol=1 / 255)


@pytest.mark.parametrize("name", UNREAD)
def test_pixels_that_may_be_read_wrong_are_refused(name: str, tmp_path: Path) -> None:
    file = saved(tmp_path / name, UNREAD[name])
    with pytest.raises(ValueError, match=name):
        read_image(file)
    with pytest.raises(ImagesError, match=name):
        check_images([file], None)


def test_a_transparent_colour_of_a_palette_is_refused_where_it_is_used(tmp_path: Path) -> None:
    palette = GREY.convert("P")
    palette.save(tmp_path / "used.png", transparency=palette.getpixel((0, 0)))
    palette.save(tmp_path / "unused.png", transparency=1)
    assert read_image(tmp_path / "unused.png").mode == "RGB"
    with pytest.raises(ValueError, match=r"used\.png"):
        read_image(tmp_path / "used.png")


def test_hidden_files_and_folders_are_no_images_and_links_are_followed(tmp_path: Path) -> None:
    theirs = beside(tmp_path / "theirs")
    before = find_images(str(theirs))
    for name in ("._0.png", ".ipynb_checkpoints/0-checkpoint.png", "__MACOSX/0/._0.png", "0/.x.png",
                 ".ipynb_checkpoints/metadata.jsonl"):  # fmt: skip
        (theirs / name).parent.mkdir(parents=True, exist_ok=True)
        (theirs / name).write_bytes(b"no image")
    (theirs / "0" / "back").symlink_to(theirs)  # a circle
    assert find_images(str(theirs)) == before
    picture(tmp_path / "elsewhere/x.PNG", 0).with_suffix(".TXT").write_text("linked")
    (theirs / "link").symlink_to(tmp_path / "elsewhere")
    assert find_images(str(theirs)) == {**before, "linked": [theirs / "link" / "x.PNG"]}
    # the same in a folder of prompts
    (theirs / "0" / "._0.txt").write_bytes(b"\xff")
    shutil.move(theirs / "0" / "1.txt", theirs / "0" / "1.TXT")
    assert load_prompts(theirs / "0", "").prompts == [WORDS[0]] * 2
    hidden = tmp_path / ".cache"
    assert image_files(picture(hidden / "a.png", 0).parent) == [hidden / "a.png"]


@pytest.mark.parametrize("suffix", ["avif", "tif", "tiff", "jfif", "gif", "JPG", "webp"])
def test_formats_that_pillow_reads_are_read(tmp_path: Path, suffix: str) -> None:
    form = {"jfif": "JPEG", "JPG": "JPEG"}.get(suffix)
    Image.new("RGB", SIZE, (90, 9, 9)).save(tmp_path / f"a.{suffix}", format=form)
    (tmp_path / "a.txt").write_text("a dog")
    assert [file.name for file in find_images(str(tmp_path))["a dog"]] == [f"a.{suffix}"]
    assert read_image(image_files(tmp_path)[0]).size == SIZE


def test_formats_that_are_not_read_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    picture(tmp_path / "a.png", 0)
    (tmp_path / "phone.HEIC").write_bytes(b"x")
    assert [file.name for file in image_files(tmp_path)] == ["a.png"]
    assert len(image_files(tmp_path)) == caplog.text.count("phone.HEIC") == 1


def test_one_image_is_not_given_twice(tmp_path: Path) -> None:
    picture(tmp_path / "0.png", 0)
    (tmp_path / "link.png").symlink_to("0.png")
    (tmp_path / "inner").mkdir()
    for second in ("0.png", "./inner/../0.png", str(tmp_path / "0.png"), "link.png"):
        rows = [{"prompt": "a", "images": "0.png"}, {"prompt": "b", "images": second}]
        for lines in (rows, [{"prompt": "a", "images": ["0.png", second]}]):
            (tmp_path / "images.jsonl").write_text("\n".join(map(json.dumps, lines)))
            with pytest.raises(ImagesError, match="more than once"):
                find_images(str(tmp_path / "images.jsonl"))
