"""Published models without weights: the config files of their repositories, in tests/published.

Each file there names the source of each config. A digest is the SHA-256 of the published file, from
a public list of digests: the config beside it is that file, byte for byte. "as NAME" is the config
of another file. FLUX.1-Krea-dev is missing: its config files were not found.
"""

import hashlib
import inspect
import json
from dataclasses import dataclass, replace
from functools import cache, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from flowalign.backbone import structure
from flowalign.backbone.loading import family_of
from flowalign.backbone.shapes import PUBLIC
from flowalign.backbone.structure import build, find
from flowalign.config.loading import card_of

FOLDER = Path(__file__).parent / "published"
NAMES = sorted(file.stem for file in FOLDER.glob("*.json"))
TEXT = {  # what the calls of pipelines name it
    "embeds": ["prompt_embeds"], "pooled": ["pooled_prompt_embeds"],
    "mask": ["prompt_embeds_mask", "prompt_attention_mask"],
}  # fmt: skip


def read(name: str) -> Any:
    """What a file of tests/published says, with the configs that it has of others."""
    data = json.loads((FOLDER / f"{name}.json").read_text())
    for path, content in data["files"].items():
        while isinstance(content, str):
            other = json.loads((FOLDER / f"{content.removeprefix('as ')}.json").read_text())
            content = data["files"][path] = other["files"][path]
    return data


@dataclass(frozen=True)
class Published:
    """data: what a file says. theirs, ours: the pipeline of its configs and the one of our table,
    without text encoders, on the meta device. encoders: {part: (their config, ours)}"""

    data: Any
    theirs: Any
    ours: Any
    encoders: dict[str, tuple[Any, Any]]

    def family(self, pipe: Any) -> Any:
        return family_of(type(pipe).__name__)(pipe)


@pytest.fixture(scope="module", params=NAMES)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    data, folder = read(request.param), tmp_path_factory.mktemp(request.param)
    for path, content in data["files"].items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(json.dumps(content))
    both = find(str(folder)), PUBLIC[data["model"]]
    assert both[0].pipeline == both[1].pipeline
    encoders = {name: (config, both[1].parts[name])
                for name, config in both[0].parts.items() if "text_encoder" in name}  # fmt: skip
    return Published(data, pipeline(both[0]), pipeline(both[1]), encoders)


class Clip(nn.Module):
    config = SimpleNamespace(max_position_embeddings=77)
    device, dtype = torch.device("cpu"), torch.float32


def pipeline(architecture: Any) -> Any:
    main = {name: architecture.parts[name] for name in ("transformer", "vae", "scheduler")}
    with structure.weightless():
        return build(replace(architecture, parts=main), given={"text_encoder": Clip()})


def shapes(part: nn.Module) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in part.state_dict().items()}


@cache  # the table's encoders, and most of the published ones, are those of several models
def encoder_shapes(config: str) -> dict[str, torch.Size]:
    with structure.weightless():
        return shapes(structure._part(json.loads(config)))


def test_every_config_has_its_source_and_digests_are_those_of_the_published_files(
    published: Published,
) -> None:
    data = published.data
    digests, sources = data.get("sha256", {}), data.get("source", {})
    assert sorted([*digests, *sources]) == sorted(data["files"])
    for path, digest in digests.items():
        text = json.dumps(data["files"][path], indent=2)
        found = [hashlib.sha256(end.encode()).hexdigest() for end in (text, text + "\n")]
        assert digest in found, path


def test_our_table_of_shapes_is_what_was_published(published: Published) -> None:
    theirs, ours = published.theirs, published.ours
    for name in ("transformer", "vae"):
        assert shapes(getattr(theirs, name)) == shapes(getattr(ours, name)), name
    for name in ("scaling_factor", "shift_factor", "latents_mean", "latents_std"):
        assert theirs.vae.config.get(name) == ours.vae.config.get(name)
    for name in ("guidance_embeds", "sample_size", "timestep_scale"):
        assert theirs.transformer.config.get(name) == ours.transformer.config.get(name)
    assert theirs.config.get("is_distilled") == ours.config.get("is_distilled")
    if size := published.data.get("transformer_bytes"):
        each = 4 if "float32" in published.data["note"] else 2
        count = sum(p.numel() for p in theirs.transformer.parameters())
        assert count * each == pytest.approx(size, rel=1e-5)


@pytest.mark.slow
def test_text_encoders_are_what_was_published(published: Published) -> None:
    family = published.family(published.theirs)
    for one, other in published.encoders.values():
        assert encoder_shapes(json.dumps(one)) == encoder_shapes(json.dumps(other))
    for config, _ in list(published.encoders.values())[-1:]:  # the one whose tokens are seen
        config = {**config, **config.get("text_config", {})}
        width = config.get("hidden_size") or config["d_model"]
        assert family.text_shapes(8)["embeds"][-1] in (width, 3 * width)
    assert not list(family.length_problems(family.length))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the DPM solver's own
def test_our_schedule_is_that_of_the_pipeline(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the card's steps and the model's usual size: what diffusers' own call sets."""
    pipe, card = published.theirs, card_of(published.data["model"])
    family, found = published.family(pipe), []
    assert card
    steps, side = card[0], family.usual
    original = type(pipe.scheduler).set_timesteps

    class Stop(Exception):
        pass

    @wraps(original)
    def spy(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **{**options, "device": "cpu"})
        found.append(self.sigmas.float())
        raise Stop

    call = inspect.signature(type(pipe).__call__).parameters
    given = {"true_cfg_scale": 1.0, "guidance_scale": 0.0, "use_resolution_binning": False}
    for name, shape in family.text_shapes(8).items():
        rows = torch.ones(1, *shape)
        given |= {key: list(rows) if family.name == "z_image" else rows for key in TEXT[name]}
    given = {key: value for key, value in given.items() if key in call}
    monkeypatch.setattr(type(pipe.scheduler), "set_timesteps", spy)
    with pytest.raises(Stop):
        pipe(**given, height=side, width=side, num_inference_steps=steps)
    monkeypatch.undo()
    latent = side // family.factor
    sigmas = family.sigmas(steps, family.tokens((family.channels, latent, latent)))
    exact = 1e-3 if family.name == "sana" else 1e-6  # the solver begins at .9997, rollouts at 1
    assert_close(sigmas, found[0], rtol=0, atol=exact)
    ours = published.family(published.ours)
    assert torch.equal(ours.sigmas(steps, ours.tokens((ours.channels, latent, latent))), sigmas)
