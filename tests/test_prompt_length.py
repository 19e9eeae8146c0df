"""How many tokens a prompt has: the family's default and limit, and what a limit cuts."""

from pathlib import Path
from typing import Any

import fakes
import pytest
import test_families
from test_families import NAMES, PIPES

from flowalign.backbone import Backbone, ModelError
from flowalign.backbone.family import default_length
from flowalign.backbone.sana import Sana
from flowalign.backbone.structure import cut_prompts
from flowalign.checks import Launch, prompts, stage_problems
from flowalign.config import ModelConfig
from flowalign.training.inputs import Inputs

TEXTS = ["red", "a red sign", "a blue star and a green circle on a red square"]
OWN = {"sd3": 128, "schnell": 256}  # where the pipeline's default is not the family's


@pytest.fixture(scope="module", params=NAMES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    found = tmp_path_factory.mktemp(family)
    PIPES(family).save_pretrained(found)
    return str(found)


def test_a_family_has_its_own_default_and_its_limit(family: str) -> None:
    pipe = PIPES(family)
    model: dict[str, Any] = {"id": "random", "height": 64, "width": 64}
    found = Backbone(pipe, ModelConfig(**model))
    assert found.text.max_sequence_length == OWN.get(family, default_length(type(pipe)))
    most = found.family.longest
    Backbone(pipe, ModelConfig(**model, max_sequence_length=most))
    with pytest.raises(ModelError, match=f"max_sequence_length: {most + 1}"):
        Backbone(pipe, ModelConfig(**model, max_sequence_length=most + 1))


def tokens(family: str, text: str) -> int:
    """The least limit that keeps a whole prompt: what the pipeline itself gives its encoder."""
    pipe = PIPES(family)
    part = {"sd3": "3", "flux": "2", "schnell": "2"}.get(family)
    encoder, seen = getattr(pipe, f"text_encoder_{part}" if part else "text_encoder"), []

    def count(module: Any, args: Any, kw: Any) -> None:
        ids = kw["input_ids"] if "input_ids" in kw else args[0]
        seen.append(int((ids[0] != 0).sum()))  # 0 is the padding

    hook = encoder.register_forward_pre_hook(count, with_kwargs=True)
    test_families.backbone(pipe).family.encode([text], 512, "cpu")
    hook.remove()
    if family == "qwen_image":
        return seen[-1] - pipe.prompt_template_encode_start_idx
    if family == "sana":
        instruction = "\n".join(Sana(pipe).instruction)
        return seen[-1] - len(pipe.tokenizer.encode(instruction)) + 2
    return seen[-1]


def test_a_prompt_is_cut_below_the_tokens_that_its_encoder_is_given(family: str, folder: str):
    """Chat templates and marks included."""
    for text in TEXTS:
        least = tokens(family, text)
        assert cut_prompts(ModelConfig(id=folder, max_sequence_length=least), [text]) == []
        below = ModelConfig(id=folder, max_sequence_length=least - 1)
        assert cut_prompts(below, [text]) == [text]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["flux2", "qwen_image"])
def test_prompts_that_a_template_leaves_no_room_for_are_refused(family: str, tmp_path: Path):
    PIPES(family).save_pretrained(tmp_path / "model")
    run = fakes.settings(str(tmp_path / "model"), tmp_path / "run", "model.height=64",
                         "model.width=64", "model.max_sequence_length=8")  # fmt: skip
    keys = [problem.key for problem in stage_problems(run, Launch())]
    assert "model.max_sequence_length" in keys
    long = list(prompts.lengths(run, Launch(), Inputs(run.model)))
    assert len(long) == len(run.tasks)
