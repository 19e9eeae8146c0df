"""Merging adds whole weight updates, exactly where it can, and refuses what does not fit."""

from functools import partial
from pathlib import Path

import fakes
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowalign.backbone import Backbone
from flowalign.backbone.adapters import read_lora, write_lora
from flowalign.commands.cli import main
from flowalign.commands.doctor import advise
from flowalign.config import Stage, parse
from flowalign.teachers.merge import Factors, merge, merge_layer
from flowalign.training.inputs import Inputs

SHAPES = [(4, 4.0, 1), (6, 12.0, 2)]  # rank, alpha, seed


def teacher(model: str, folder: Path, rank: int, alpha: float, seed: int, **kwargs) -> Path:
    targets = kwargs.get("targets")
    backbone = fakes.adapted(model, "t", rank=rank, alpha=alpha, targets=targets, seed=seed)
    backbone.name = kwargs.get("base")
    backbone.save_adapter("t", folder)
    return folder


@pytest.fixture(scope="module")
def teachers(random_model: str, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two adapters of the same layers, of different rank and alpha."""
    folder = tmp_path_factory.mktemp("teachers")
    return [teacher(random_model, folder / str(s[2]), *s) for s in SHAPES]


def velocity(backbone: Backbone) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, *backbone.latent_shape, generator=generator)
    with torch.no_grad():
        return backbone.velocity(x, 0.6, backbone.encode(fakes.PROMPTS[:4]), guidance=1.0)


def updates(folder: Path) -> dict[str, Tensor]:
    """{layer: dW}, from the plain definition."""
    state, config = read_lora(folder).weights, read_lora(folder).metadata
    scale = config["lora_alpha"] / config["r"]
    layers = {key.split(".lora_")[0] for key in state}
    return {
        layer: scale
        * state[f"{layer}.lora_B.weight"].double()
        @ state[f"{layer}.lora_A.weight"].double()
        for layer in layers
    }


def test_concat_is_the_sum_of_the_outputs(random_model: str, teachers: list[Path], tmp_path: Path):
    report = merge(teachers, tmp_path, weights=[0.5, 2.0])
    both = fakes.backbone(random_model)
    for name, folder in zip("ab", teachers, strict=True):
        both.load_adapter(name, folder)
    both.core.set_adapters(["a", "b"], [0.5, 2.0])  # peft adds the outputs of both
    merged = fakes.backbone(random_model)
    merged.load_adapter("m", tmp_path)
    assert_close(velocity(merged), velocity(both), rtol=0, atol=1e-6)
    assert set(report.ranks.values()) == {10} and report.worst == 0


def test_svd_takes_the_largest_rank_and_reports_what_is_lost(teachers: list[Path], tmp_path: Path):
    first, second = map(updates, teachers)
    report = merge(teachers, tmp_path, method="svd")
    assert set(report.ranks.values()) == {6}
    for layer, found in updates(tmp_path).items():
        whole = first[layer] + second[layer]
        lost = torch.linalg.svdvals(whole)[6:].norm() / whole.norm()
        assert_close((found - whole).norm() / whole.norm(), lost, rtol=1e-4, atol=1e-6)
        assert report.errors[layer.removeprefix("transformer.")] == pytest.approx(float(lost))


@pytest.mark.parametrize("rank", [1, 3, 7, 12])
def test_svd_is_that_of_the_dense_update(rank: int) -> None:
    """The factors' own SVD, as it is computed, against the one of the whole matrix, down to a layer
    that is narrower than the sum of the ranks."""
    generator = torch.Generator().manual_seed(rank)
    for out, wide in ((40, 30), (30, 40), (9, 40), (9, 8)):
        draw = partial(torch.randn, generator=generator, dtype=torch.float64)
        parts = [Factors(draw(4, wide), draw(out, 4)) for _ in range(3)]
        weights = [1.0, -0.5, 2.0]
        whole = torch.stack([w * p.up @ p.down for w, p in zip(weights, parts, strict=True)]).sum(0)
        left, sizes, right = torch.linalg.svd(whole, full_matrices=False)
        nearest = left[:, :rank] * sizes[:rank] @ right[:rank]
        found, error = merge_layer(parts, weights, "svd", rank, 0.5)
        assert_close(found.up @ found.down, nearest, rtol=0, atol=1e-12 * float(sizes[0]))
        assert found.down.dtype == torch.float64
        lost = float(sizes[rank:].norm() / sizes.norm())
        assert error == pytest.approx(lost, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("method", ["ties", "dare"])
def test_with_nothing_dropped_one_adapter_is_itself(teachers: list[Path], tmp_path, method: str):
    merge(teachers[:1], tmp_path, method=method, density=1 - 1e-9 if method == "ties" else 0.999999)
    for layer, update in updates(teachers[0]).items():
        kept = updates(tmp_path)[layer]
        assert (kept - update).norm() / update.norm() < 0.05


def test_ties_drops_what_points_the_other_way(teachers: list[Path], tmp_path: Path) -> None:
    """One adapter against a third of its negative: the larger one wins, undiluted."""
    negative, out = tmp_path / "negative", tmp_path / "out"
    merge(teachers[:1], negative, weights=[-1 / 3])
    merge([teachers[0], negative], out, method="ties", density=0.999, rank=64)
    merge(teachers, tmp_path / "plain")
    for layer, update in updates(teachers[0]).items():
        found = updates(out)[layer]
        assert (found - update).norm() / update.norm() < 0.05  # the sum would be 2/3 of it


def test_dare_is_drawn_from_its_seed_alone(teachers: list[Path], tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        merge(teachers, tmp_path / name, method="dare", seed=seed, rank=20)
    assert torch.equal(torch.random.get_rng_state(), state)
    a, b, c = (read_lora(tmp_path / name).weights for name in "abc")
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not all(torch.equal(a[key], c[key]) for key in a)


@pytest.mark.parametrize("method", ["concat", "svd", "ties", "dare"])
def test_a_layer_that_an_adapter_lacks_has_the_update_zero(
    random_model: str, teachers: list[Path], tmp_path: Path, method: str
) -> None:
    """Against the same adapter with a B of zeros in the layers that it lacks."""
    targets = ["attn.to_q", "ff.net.2"]  # the first is also adapted by the other, the second not
    few = teacher(random_model, tmp_path / "few", 3, 3.0, 5, targets=targets)
    zeros = {
        name: torch.zeros(3, w.shape[1]) if "lora_A" in name else torch.zeros(w.shape[0], 3)
        for name, w in read_lora(teachers[0]).weights.items()
    }
    lora = read_lora(few)
    metadata = lora.metadata | {"target_modules": [*targets, *fakes.TARGETS]}
    write_lora(tmp_path / "filled", zeros | lora.weights, metadata)
    options = {} if method == "concat" else {"rank": 40, "density": 0.999999}
    sources = [teachers[0], few]
    report = merge(sources, tmp_path / "out", method=method, **options)
    merge([teachers[0], tmp_path / "filled"], tmp_path / "same", method=method, **options)
    whole, found = updates(tmp_path / "same"), updates(tmp_path / "out")
    assert {layer for layer in found if "ff.net.2" in layer}
    for layer, update in found.items():
        assert_close(update, whole.get(layer, updates(few).get(layer)), rtol=1e-4, atol=1e-5)
    settings = {"stage": "merge", "output": "x", "model": {"id": random_model}, "method": method}
    settings |= {"adapters": list(map(str, sources)), "rank": options.get("rank")}
    inputs = Inputs()
    stage = parse(settings, stage=Stage)
    advise.forecasts({"m": stage}, advise.Device(1), inputs)
    expected = inputs.pending[str(stage.folder.adapter)].ranks
    if method in ("concat", "svd"):
        assert expected == report.ranks
    else:  # no rank is larger than the layer
        assert {layer: min(r, report.ranks[layer]) for layer, r in expected.items()} == report.ranks


@pytest.mark.parametrize(
    "options",
    [{"method": "sum"}, {"weights": [1.0]}, {"rank": 8}, {"method": "svd", "rank": 0},
     {"method": "ties", "density": 0.0}],
)  # fmt: skip
def test_wrong_options_are_refused(teachers: list[Path], tmp_path: Path, options: dict) -> None:
    with pytest.raises(ValueError, match="want a"):
        merge(teachers, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_adapters_that_do_not_fit_are_refused(random_model: str, tmp_path: Path) -> None:
    dev, schnell = (f"black-forest-labs/FLUX.1-{name}" for name in ("dev", "schnell"))
    one = teacher(random_model, tmp_path / "one", 2, 2.0, 1, base=dev)
    other = teacher(random_model, tmp_path / "other", 2, 2.0, 1, base=schnell)
    state, metadata = read_lora(one).weights, read_lora(one).metadata
    wide = {k: torch.cat([v, v], 1) if "lora_A" in k else v
            for k, v in state.items()}  # fmt: skip
    write_lora(tmp_path / "wide", wide, metadata)
    for folder, message in (
        (other, f"{dev} in .*{schnell} in "),
        (tmp_path / "wide", r"is \[\d+, \d+\] in"),
    ):
        with pytest.raises(ValueError, match=message):
            merge([one, folder], tmp_path / "out")
        assert not (tmp_path / "out").exists()
    unnamed = teacher(random_model, tmp_path / "unnamed", 2, 2.0, 1)
    with pytest.raises(ValueError, match=f"{dev} in .*{schnell} in "):
        merge([unnamed, one, other], tmp_path / "out")
    copied = teacher(random_model, tmp_path / "copied", 2, 2.0, 1, base="/scratch/jane/flux")
    merge([unnamed, one, copied], tmp_path / "out", model="other")
    assert read_lora(tmp_path / "out").base == dev
    with pytest.raises(FileExistsError, match="already holds an adapter"):
        merge([one], other)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("stage: opd")
    with pytest.raises(FileExistsError, match="already holds a run"):
        merge([one], tmp_path / "run")
    with pytest.raises(ValueError, match="0 adapters"):
        merge([], tmp_path / "out")


def test_the_command_merges_and_refuses(teachers: list[Path], tmp_path, capsys) -> None:
    command = ["merge", *map(str, teachers), "--out", str(tmp_path / "out"), "--weights", "1", "2"]
    assert main(command) == 0
    assert "rank 10" in capsys.readouterr().out
    assert set(read_lora(tmp_path / "out").ranks.values()) == {10}  # --out is the adapter itself
    assert main(command) == 2  # it already holds an adapter
