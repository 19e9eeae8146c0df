"""Shared by all tests: as many torch threads as there are cores, shared among xdist's workers."""

import copy
import functools
import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
torch.set_num_threads(max(1, min(torch.get_num_threads(), _cores // _workers)))


def pytest_configure() -> None:
    """Ctrl-C interrupts, also where pytest is a job in the background, which ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a GPU are skipped where there is none, also under `-m gpu`."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a small SD3 pipeline with random weights (tests/fakes.py)."""
    import fakes

    folder = tmp_path_factory.mktemp("model")
    fakes.pipeline().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session", autouse=True)
def cheap(random_model: str) -> Iterator[None]:
    """What costs most of a small run and what no test looks at: the random model is read once and
    copied from then on, and files are not forced to the disk."""
    from flowalign.backbone import base
    from flowalign.system import files

    read, plain = base.load_pipeline, ({}, None, torch.float32)

    @functools.cache
    def kept() -> Any:
        return read(random_model)

    def load(model: str, **options: Any) -> Any:
        if model != random_model or any(value not in plain for value in options.values()):
            return read(model, **options)
        parts = kept().components  # whose tokenizers, which take the longest, nobody changes
        shared = {id(part): part for name, part in parts.items() if "tokenizer" in name}
        return copy.deepcopy(kept(), shared)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "load_pipeline", load)
        patch.setattr(files.os, "fsync", lambda number: None)
        yield


@pytest.fixture(scope="module")
def read_from_files(cheap: None) -> Iterator[None]:
    """No copies (`cheap`): another process reads the random model from its files, where tensors lie
    at other addresses, which changes last bits."""
    from flowalign.backbone import base, loading

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "load_pipeline", loading.load_pipeline)
        yield


@pytest.fixture(scope="session")
def finished_run(random_model: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run that is over (fakes.FinishedRun), for all tests that only read it."""
    import fakes

    return fakes.finish_run(random_model, tmp_path_factory.mktemp("finished") / "a run")


@pytest.fixture(scope="session")
def finished_recipe(random_model: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A recipe that is over (test_recipe.FinishedRecipe). A test that damages it repairs it."""
    import test_recipe

    return test_recipe.finish(random_model, tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="session")
def open_clip() -> Iterator[ModuleType]:
    """open_clip, from where scripts/setup.sh puts it if the environment has none.

    Its torchvision may be built for CUDA and lack two operators on a CPU; no test calls them. That
    transformers has no torchvision is settled before it could find this one.
    """
    from transformers.utils import is_torchvision_available

    is_torchvision_available()
    path = list(sys.path)
    if importlib.util.find_spec("open_clip") is None:
        folder = Path(sys.prefix) / "open_clip"
        if not folder.is_dir():
            pytest.skip("open_clip is not installed; run scripts/setup.sh")
        sys.path.append(str(folder))
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms") if torch.version.cuda is None else ():
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    module = importlib.import_module("open_clip")
    sys.path[:] = path
    yield module


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn (fakes.save_undrawn)."""
    import fakes

    monkeypatch.setattr(fakes.Figure, "savefig", fakes.savefig)


@pytest.fixture
def clip_extra(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty open_clip, for tests of configs that only ask whether it is there."""
    folder = tmp_path_factory.mktemp("extra")
    (folder / "open_clip").mkdir()
    (folder / "open_clip" / "__init__.py").touch()
    if importlib.util.find_spec("open_clip") is None:
        monkeypatch.syspath_prepend(folder)


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts whose images an evaluation samples, as they are."""
    from flowalign.eval import suite

    found: list[str] = []
    real = suite.generate

    def generate(backbone: Any, prompts: Any, *rest: Any) -> Any:
        found.extend(prompts.prompts)
        return real(backbone, prompts, *rest)

    monkeypatch.setattr(suite, "generate", generate)
    return found
