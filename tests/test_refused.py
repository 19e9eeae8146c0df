"""Bad input at the command line of `flowalign eval`: what was seen, what is possible, what to do;
exit status 2, nothing sampled, nothing written and nothing lost."""

import shutil
from pathlib import Path
from typing import Any

import fakes
import pytest
from safetensors.torch import load_file, save_file

from flowalign.commands.evaluate import main
from flowalign.config import ADAPTER
from flowalign.eval import suite

pytestmark = pytest.mark.slow
CUP = {"tag": "single_object", "include": [{"class": "cup", "count": 1}]}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, random_model: str) -> Path:
    """A folder with a config, prompts, adapters and the output of an evaluation that was done."""
    folder = tmp_path_factory.mktemp("done")
    adapter(random_model, folder / "adapter")
    theirs = folder / "theirs"  # as another base would have it: other widths, no name of the base
    theirs.mkdir()
    shutil.copy(folder / "adapter" / ADAPTER, theirs)
    wide = {
        k: v.repeat(1, 2) if k.endswith("lora_A.weight") else v for k, v in weights(theirs).items()
    }
    save_file(wide, theirs / ADAPTER)
    adapter(random_model, folder / "sd3", name="stabilityai/stable-diffusion-3-medium")
    fakes.evaluation(
        random_model, folder, [{"prompt": f'a "{letter}"', **CUP} for letter in "ABC"],
        {"reward": {"name": "fakes:redness"}},
        models={"base": None, "tuned": str(folder / "adapter")}, report={"images": 1},
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["--config", "eval.yaml"]) == 0
    return folder


def weights(folder: Path) -> dict[str, Any]:
    return load_file(folder / ADAPTER)


def adapter(model: str, folder: Path, name: str = "") -> None:
    found = fakes.backbone(model)
    found.name = name or None
    found.add_adapter("a", rank=2, alpha=2.0)
    fakes.shake(found, "a")
    found.save_adapter("a", folder)


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


OUT = "Give another `output`, or delete "
CASES: dict[str, tuple[list[str], list[str]]] = {
    "another stage": (["stage=grpo"], ["`flowalign train`"]),
    "a LoRA that names another base": (
        ["models.tuned=sd3"],
        ["models.tuned: 'sd3' is", "was trained on 'stabilityai/stable-diffusion-3-medium'"],
    ),
    "a LoRA of another base that names none": (
        ["models.tuned=theirs"],
        ["models.tuned: 'theirs' is an adapter", "has such a layer with (2, 32), (32, 2)"],
    ),
    "another seed": (["sampling.seed=1"], ["sampling.seed was 1234 there", OUT]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_evaluated_is_refused(
    done: Path, case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """With the results of an evaluation there, which are left alone, and with nothing there."""
    monkeypatch.chdir(done)
    monkeypatch.setattr(suite, "generate", never)
    before = content(done)
    overrides, said = CASES[case]
    for output in ["out"] if OUT in said else ["out", "new"]:
        status = main(["--config", "eval.yaml", *overrides, f"output={output}"])
        error = capsys.readouterr().err
        missing = [text for text in said if text not in error]
        assert status == 2 and not missing, (output, error)
        assert content(done) == before and not (done / "new").exists(), output


def never(*args: Any, **options: Any) -> None:
    raise AssertionError("something was sampled")


def test_processes_that_do_not_know_of_each_other_are_refused(
    done: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """As `accelerate launch --multi_gpu` starts them where there is no GPU."""
    monkeypatch.chdir(done)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["--config", "eval.yaml"]) == 2
    said = capsys.readouterr().err
    assert "2 processes were started" in said and "configs/accelerate/ddp_2cpu.yaml" in said
