"""Public models without weights, by their published config files (flowalign/backbone/published)."""

import hashlib
import inspect
import json
from functools import cache, wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from flowalign.backbone import structure
from flowalign.backbone.family import Family
from flowalign.backbone.loading import family_of
from flowalign.backbone.shapes import FOLDER, Architecture, public
from flowalign.backbone.structure import build
from flowalign.config.loading import card_of

FILES = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
TEXT = {  # what the calls of pipelines name it
    "embeds": ["prompt_embeds"], "pooled": ["pooled_prompt_embeds"],
    "mask": ["prompt_embeds_mask", "prompt_attention_mask"],
}  # fmt: skip


class Clip(nn.Module):
    config = SimpleNamespace(max_position_embeddings=77)
    device, dtype = torch.device("cpu"), torch.float32


@cache
def family(name: str) -> Family:
    """Of a pipeline without text encoders, on the meta device."""
    found = public()[FILES[name]["model"]]
    main = {part: found.parts[part] for part in ("transformer", "vae", "scheduler")}
    with structure.weightless():
        bare = Architecture(found.pipeline, main, found.options)
        pipe = build(bare, given={"text_encoder": Clip()})
    return family_of(found.pipeline)(pipe)


@pytest.mark.parametrize("name", FILES)
def test_every_config_has_its_source_and_digests_are_those_of_the_published_files(name: str):
    data = FILES[name]
    digests, sources = data.get("sha256", {}), data.get("source", {})
    assert sorted([*digests, *sources]) == sorted(data["files"])
    for path, digest in digests.items():
        text = json.dumps(data["files"][path], indent=2)
        found = [hashlib.sha256(end.encode()).hexdigest() for end in (text, text + "\n")]
        assert digest in found, path


@pytest.mark.parametrize("name", FILES)
def test_sizes_and_text_are_those_that_are_published(name: str) -> None:
    """Bytes of the weights, and the width of the text encoder whose tokens are seen."""
    found, data = family(name), FILES[name]
    if size := data.get("transformer_bytes"):
        each = 4 if "float32" in data["note"] else 2
        count = sum(p.numel() for p in found.core.parameters())
        assert count * each == pytest.approx(size, rel=1e-5)
    parts = public()[data["model"]].parts
    seen = [config for part, config in parts.items() if "text_encoder" in part][-1]
    seen = {**seen, **seen.get("text_config", {})}
    if width := seen.get("hidden_size") or seen.get("d_model"):
        assert found.text_shapes(8)["embeds"][-1] in (width, 3 * width)
    assert not list(found.length_problems(found.length))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the DPM solver's own
@pytest.mark.parametrize("name", FILES)
def test_our_schedule_is_that_of_the_pipeline(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the card's steps and the model's usual size: what diffusers' own call sets."""
    ours, card = family(name), card_of(FILES[name]["model"]) or (20, 4.5)
    pipe, found = ours.pipe, []
    steps, side = card[0], ours.usual
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
    for part, shape in ours.text_shapes(8).items():
        rows = torch.ones(1, *shape)
        given |= {key: list(rows) if ours.name == "z_image" else rows for key in TEXT[part]}
    given = {key: value for key, value in given.items() if key in call}
    monkeypatch.setattr(type(pipe.scheduler), "set_timesteps", spy)
    with pytest.raises(Stop):
        pipe(**given, height=side, width=side, num_inference_steps=steps)
    monkeypatch.undo()
    latent = side // ours.factor
    sigmas = ours.sigmas(steps, ours.tokens((ours.channels, latent, latent)))
    exact = 1e-3 if ours.name == "sana" else 1e-6  # the solver begins at .9997, rollouts at 1
    assert_close(sigmas, found[0], rtol=0, atol=exact)
