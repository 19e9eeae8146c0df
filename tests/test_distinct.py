"""A teacher that changes nothing is refused by name before a distillation begins."""

from collections.abc import Mapping
from pathlib import Path

import fakes
import pytest

from flowalign.config import ConfigError
from flowalign.teachers import distinct
from flowalign.teachers.bank import Bank, Member


def levels(model: str, folder: Path, adapters: Mapping[str, Path | None]) -> dict[str, str]:
    """{key: level} of what is said of these teachers."""
    backbone = fakes.adapted(model)
    bank = Bank(backbone, {name: Member(one) for name, one in adapters.items()}, {})
    states = distinct.base_states(
        fakes.distillation(model, folder), backbone, {"red": fakes.batch(2)}
    )
    return {problem.key: problem.level for problem in distinct.indistinct(bank, states, 8)}


@pytest.fixture(scope="module")
def adapters(random_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("teachers")
    for name, scale in {"good": 0.3, "twin": 0.3, "weak": 3e-3, "lost": 0.0}.items():
        made = fakes.adapted(random_model, "t", scale=scale)
        made.save_adapter("t", folder / name)
    return {name: folder / name for name in ("good", "twin", "weak", "lost")}


def test_lost_weights_twins_and_weak_ones_are_told_apart(random_model, adapters, tmp_path):
    found = levels(random_model, tmp_path / "run", adapters)
    assert found == {"teachers.lost": "refuse", "teachers.weak": "note", "teachers.twin": "refuse"}


def test_the_base_as_a_teacher_is_meant(random_model, adapters, tmp_path) -> None:
    assert levels(random_model, tmp_path / "run", {"good": adapters["good"], "base": None}) == {}


def test_a_run_with_a_lost_teacher_does_not_begin(random_model, adapters, tmp_path) -> None:
    config = fakes.distillation(
        random_model, tmp_path / "run", f"teachers.even.adapter={adapters['lost']}"
    )
    with pytest.raises(ConfigError, match=r"teachers\.even"):
        fakes.wired(config)
