"""Learning from pairs: the arithmetic of Flow-DPO, and what a run makes of files."""

import json
import math
from pathlib import Path
from typing import Any

import fakes
import families
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from flowalign.backbone import family_of
from flowalign.checks import Launch, stage_problems
from flowalign.commands.doctor.count import predict
from flowalign.config import ConfigError
from flowalign.teachers.dpo import dpo_loss
from flowalign.training.step import pairs_of

FIXED = ["rollout.prompts=1", "train.updates=8", "optimizer.lr=1e-2", "ema=null"]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("beta", [0.5, 2000.0])
def test_the_loss_and_its_gradient_are_those_of_the_paper(beta: float) -> None:
    """2501.13918, with means; the gradient by the logistic function, without autograd."""
    v, reference, target = (drawn(6, 4, 3, 3, seed=seed) for seed in range(3))
    v, reference = target + 0.1 * v, target + 0.1 * reference
    found, gain = dpo_loss(v.requires_grad_(), reference.requires_grad_(), target, beta=beta)
    assert found.shape == (3,) and gain.shape == (3, 2)
    found.sum().backward()
    assert v.grad is not None and reference.grad is None
    with torch.no_grad():
        for n in range(3):
            w, lost = 2 * n, 2 * n + 1
            of = [((x - target) ** 2).mean((1, 2, 3)) for x in (v, reference)]
            inside = -beta / 2 * float(of[0][w] - of[1][w] - (of[0][lost] - of[1][lost]))
            expected = math.log1p(math.exp(-inside)) if inside > -500 else -inside
            assert float(found[n]) == pytest.approx(expected, rel=1e-10)
            wrong = 1 / (1 + math.exp(min(inside, 500)))  # sigmoid(-inside)
            for row, sign in ((w, 1), (lost, -1)):
                slope = sign * wrong * beta * (v[row] - target[row]) / target[row].numel()
                assert_close(v.grad[row], slope, rtol=1e-9, atol=1e-14)


def test_the_loss_and_its_gradient_are_the_official_ones() -> None:
    for case in json.loads((fakes.ROOT / "tests/golden/dpo.json").read_text())["cases"]:
        names = ("model", "reference", "target", "gradient")
        tensors = (torch.tensor(case[name], dtype=torch.float64) for name in names)
        # theirs: all chosen images, then all rejected ones; ours: in turn
        v, reference, target, slope = (torch.stack(t.chunk(2), 1).flatten(0, 1) for t in tensors)
        loss, gain = dpo_loss(v.requires_grad_(), reference, target, beta=case["beta"])
        loss.mean().backward()
        assert float(loss.mean().detach()) == pytest.approx(case["loss"], rel=1e-12)
        assert float((gain[:, 0] > gain[:, 1]).double().mean()) == pytest.approx(case["accuracy"])
        assert_close(v.grad, slope, rtol=1e-10, atol=1e-15)


def test_a_model_that_is_its_reference_has_loss_log_2(random_model: str, tmp_path: Path) -> None:
    """Without an adapter to start from, and with one; a pair has one noise and one level."""
    start = fakes.teachers(random_model, tmp_path)["even"]
    for name, given in (("base", []), ("start", [f"lora.init={start}"])):
        loop: Any = fakes.wired(fakes.pairs(random_model, tmp_path / name / "run", *given))
        prepared = loop.algorithm.prepare(loop.rollout(0), 0)
        states = prepared.rollout
        assert states.states.shape[:2] == (4, 3)  # two pairs, three noise levels
        sigma = states.own_sigmas[..., None, None, None]
        clean = states.states - sigma * prepared.velocity
        assert_close(clean[:, 0], clean[:, 2], atol=1e-5, rtol=0)
        noise = (clean + prepared.velocity).unflatten(0, (2, 2))
        assert_close(noise[:, 0], noise[:, 1], atol=1e-5, rtol=0)
        assert torch.equal(states.own_sigmas[::2], states.own_sigmas[1::2])
        assert not torch.equal(states.own_sigmas[0], states.own_sigmas[2])
        (pairs,) = pairs_of(states, prepared.keep, 32)
        step = loop.algorithm.loss(pairs, loop.algorithm.velocity(pairs), prepared)
        assert step.total.item() == pytest.approx(math.log(2), abs=1e-7)
        assert fakes.gradient(loop, step.total).abs().max() > 0


def test_the_margin_of_a_pair_grows(random_model: str, tmp_path: Path) -> None:
    loop = fakes.wired(fakes.pairs(random_model, tmp_path / "run", *FIXED, rows=1))
    loop.run()
    rows = fakes.lines(loop)
    assert rows[0]["margin"] == 0 and rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert rows[-1]["margin"] > rows[2]["margin"] > 0 and rows[-1]["pair_accuracy"] == 1
    assert rows[-1]["loss"] < rows[2]["loss"] < math.log(2)


def test_the_reference_stays_what_the_run_began_with(random_model: str, tmp_path: Path) -> None:
    start = fakes.teachers(random_model, tmp_path)["even"]
    given = [*FIXED, "train.updates=2", f"lora.init={start}"]
    found = fakes.pairs(random_model, tmp_path / "run", *given)
    loop = fakes.wired(found)
    reference = loop.backbone.adapter_parameters("reference")
    before = torch.cat([p.detach().flatten() for p in reference]).clone()
    assert torch.equal(before, fakes.weights(loop))
    loop.run()
    assert torch.equal(before, torch.cat([p.detach().flatten() for p in reference]))
    again = fakes.wired(found)
    assert again.resume() and not torch.equal(before, fakes.weights(again))
    parameters = again.backbone.adapter_parameters("reference")
    assert torch.equal(before, torch.cat([p.detach().flatten() for p in parameters]))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a"}, "chosen"),
        ({"prompt": "a", "chosen": "0.png", "rejected": 3}, "rejected"),
        ({"prompt": "a", "chosen": "0.png", "rejected": "none.png"}, "none.png"),
        ({"prompt": "a", "chosen": "0.png", "rejected": "large.png"}, "64x32"),
        ({"prompt": "a", "chosen": "0.png", "rejected": "prompts.txt"}, "prompts.txt"),
    ],
)
def test_a_bad_row_is_refused_by_its_number(
    random_model: str, tmp_path: Path, row: dict[str, Any], said: str
) -> None:
    found = fakes.pairs(random_model, tmp_path / "run")
    Image.new("RGB", (64, 32)).save(tmp_path / "large.png")
    with (tmp_path / "pairs.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    texts = [p.text for p in stage_problems(found, Launch()) if p.key == "tasks.0.prompts"]
    assert texts and all("row 9" in text for text in texts) and said in " ".join(texts)


def image(folder: Path, name: str, mode: str = "RGB", **how: Any) -> Path:
    """A smooth image of 32 by 32 pixels; of mode RGBA with a hole."""
    Image.linear_gradient("L").resize((32, 32)).convert(mode).save(folder / name, **how)
    return folder / name


def cut(path: Path) -> None:
    """Leave the header and a part of the pixels."""
    path.write_bytes(path.read_bytes()[:-100])


def broken(folder: Path) -> dict[str, Path]:
    """Images whose headers are sound, by what is wrong with them."""
    files = {
        "truncated png": image(folder, "cut.png", compress_level=0),
        "truncated jpeg": image(folder, "cut.jpg", quality=95),
        "transparent": folder / "hole.png",
        "no range": image(folder, "float.tif", "F"),
    }
    cut(files["truncated png"])
    cut(files["truncated jpeg"])
    Image.new("RGBA", (32, 32), (9, 9, 9, 0)).save(files["transparent"])
    return files


@pytest.mark.parametrize("kind", ["truncated png", "truncated jpeg", "transparent", "no range"])
@pytest.mark.parametrize("key", ["chosen", "rejected"])
def test_an_image_that_the_run_cannot_read_is_refused_by_its_name(
    random_model: str, tmp_path: Path, kind: str, key: str
) -> None:
    found = fakes.pairs(random_model, tmp_path / "run", rows=2)
    path = broken(tmp_path)[kind]
    with Image.open(path) as header:
        assert header.size == (32, 32)
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    rows[1][key] = path.name
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (problem,) = stage_problems(found, Launch())
    assert problem.key == "tasks.0.prompts"
    assert all(text in problem.text for text in ("row 2", path.name, key))


@pytest.mark.parametrize("copy", ["the path", "another path", "the bytes", "the pixels"])
def test_a_pair_of_one_image_is_refused(random_model: str, tmp_path: Path, copy: str) -> None:
    """Their gains are equal, and Adam would walk on what rounding leaves of the gradient."""
    found = fakes.pairs(random_model, tmp_path / "run", rows=2)
    path = image(tmp_path, "a.png")
    (tmp_path / "folder").mkdir()
    (tmp_path / "b.png").write_bytes(path.read_bytes())
    image(tmp_path, "c.bmp")
    names = {"the path": "a.png", "another path": "folder/../a.png", "the bytes": "b.png"}
    row = {"prompt": "a", "chosen": "a.png", "rejected": names.get(copy, "c.bmp")}
    with (tmp_path / "pairs.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    (problem,) = stage_problems(found, Launch())
    assert problem.key == "tasks.0.prompts"
    assert all(text in problem.text for text in ("row 3", "chosen", "rejected"))


def test_an_image_is_checked_as_it_is_learnt_from(random_model: str, tmp_path: Path) -> None:
    """Turned as its EXIF says, by the check and by the run: a file of 48 by 32 stored pixels is an
    image of 32 by 48."""
    sizes = ["model.height=48", "model.width=32"]
    found = fakes.pairs(random_model, tmp_path / "run", *sizes, rows=1, size=(48, 32))
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: to be turned by a quarter
    file = tmp_path / "0.png"
    with Image.open(file) as upright:
        stored = upright.rotate(90, expand=True)
    stored.save(file, exif=exif)
    assert stage_problems(found, Launch()) == []
    loop: Any = fakes.wired(found)
    loop.algorithm.prepare(loop.rollout(0), 0)
    upright.save(file, exif=exif)
    (problem,) = stage_problems(found, Launch())
    assert "48x32" in problem.text and "32x48" in problem.text


def test_the_first_bad_rows_are_named_and_all_are_counted(
    random_model: str, tmp_path: Path
) -> None:
    found = fakes.pairs(random_model, tmp_path / "run")
    for number in (0, 3, 4, 7, 8, 11):
        cut(tmp_path / f"{number}.png")
    *rows, last = stage_problems(found, Launch())
    assert [f"row {n}: " in row.text for n, row in enumerate(rows, 1)] == [True] * 5
    assert last.key == "tasks.0.prompts" and "6" in last.text and "row" not in last.text


def test_an_empty_prompt_and_a_parted_pair_are_refused(random_model: str, tmp_path: Path) -> None:
    found = fakes.pairs(random_model, tmp_path / "run")
    (tmp_path / "pairs.jsonl").write_text('{"prompt": " ", "chosen": "0.png"}\n')
    (problem,) = stage_problems(found, Launch())
    assert "line 1" in problem.text
    for given, key in (
        ("optimizer.micro_batch=3", "micro_batch"),
        ("rollout.group_size=4", "group_size"),
    ):
        with pytest.raises(ConfigError, match=key):
            fakes.pairs(random_model, tmp_path / "run", given)
    (problem,) = stage_problems(fakes.pairs(random_model, tmp_path / "run"), Launch(3))
    assert "rollout.prompts=3" in problem.text  # no pair is parted by processes


@pytest.mark.parametrize("name", families.PIPELINES)
def test_an_image_is_encoded_as_diffusers_decodes_it(name: str) -> None:
    """By mapping back what decoding maps: the VAE itself is replaced by the identity."""
    pipe = families.pipeline(name)
    family = family_of(type(pipe).__name__)(pipe)
    pipe.vae.encode = lambda images: Encoded(images)
    pipe.vae.decode = lambda latents: Decoded(latents)
    config = pipe.vae.config
    images = torch.randn(2, config.get("latent_channels") or config.z_dim, 8, 8)
    assert_close(family.decode(family.encode_image(images)), images)


class Encoded:
    """What a VAE's encoder gives, with the images as latents."""

    def __init__(self, images: torch.Tensor) -> None:
        self.latent_dist, self.latent = self, images

    def mode(self) -> torch.Tensor:
        return self.latent


class Decoded:
    def __init__(self, latents: torch.Tensor) -> None:
        self.sample = latents


def test_the_doctor_counts_no_rollout(random_model: str, tmp_path: Path) -> None:
    start = fakes.teachers(random_model, tmp_path)["even"]
    base = predict(fakes.pairs(random_model, tmp_path / "run"))
    from_lora = predict(fakes.pairs(random_model, tmp_path / "run", f"lora.init={start}"))
    names = [phase.name for phase in base.phases]
    assert names == ["text", "VAE encode", "noising", "update"]
    assert all(phase.bytes > 0 for phase in base.phases)
    assert "LoRAs of 1 policies" in from_lora.parts and "LoRAs of 1 policies" not in base.parts
