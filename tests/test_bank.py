"""Labels of a mixed batch are those of each teacher alone, and the student does not notice."""

from pathlib import Path

import fakes
import pytest
import torch
from torch import Tensor

from flowalign.backbone import Backbone
from flowalign.backbone.adapters import read_lora, write_lora
from flowalign.teachers.bank import Bank, Member
from flowalign.training.algorithm import STUDENT
from flowalign.training.nonfinite import NotFinite
from flowalign.training.rollout import Noise, Schedule, places, sample
from flowalign.types import PromptBatch, Rollout

KINDS = {  # teachers that differ in rank, alpha and layers
    "ocr": {"rank": 4, "alpha": 4.0, "targets": fakes.TARGETS},
    "geneval": {"rank": 2, "alpha": 6.0, "targets": ["attn.to_q", "attn.to_v", "ff.net.2"]},
}
ROUTING = {"ocr": "ocr", "geneval": "geneval", "photo": "base"}


@pytest.fixture(scope="module")
def members(random_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Member]:
    found: dict[str, Member] = {"base": Member(None)}
    for seed, (name, kind) in enumerate(KINDS.items()):
        folder = tmp_path_factory.mktemp(name)
        fakes.adapted(random_model, "t", **kind, seed=seed, scale=0.3).save_adapter("t", folder)
        found[name] = Member(folder)
    return found


def rollout(backbone: Backbone, copies: int = 2) -> Rollout:
    """Six images of three tasks at two trained steps."""
    prompts = PromptBatch(fakes.PROMPTS[:3], ["geneval", "photo", "ocr"], [{}] * 3)
    schedule = Schedule(backbone.sigmas(4), "sde", 0.7, (0, 2))
    where = places(3, copies)
    return sample(
        backbone, prompts.select([prompt for prompt, _ in where]), schedule, guidance=1.0,
        noise=Noise((0,)), places=where, decode=False,
    )  # fmt: skip


def alone(model: str, member: Member, found: Rollout, guidance: float, rows: list[int]) -> Tensor:
    """The states of some images through a backbone that knows nothing but this teacher."""
    backbone = fakes.backbone(model)
    if member.adapter:
        backbone.load_adapter("only", member.adapter)
    return fakes.velocities(backbone, found, rows, guidance)


def test_a_mixed_batch_is_each_teacher_alone_to_the_bit(random_model, members: dict[str, Member]):
    """Each at its own CFG scale."""
    student = fakes.adapted(random_model)
    found = rollout(student)
    scales = {"base": 1.0, "ocr": 4.5, "geneval": 2.0}
    scaled = {name: Member(m.adapter, scales[name]) for name, m in members.items()}
    label = Bank(student, scaled, ROUTING, dtype=torch.float32)(found)
    assert label.teacher == ["geneval"] * 2 + ["base"] * 2 + ["ocr"] * 2
    for name, member in members.items():
        rows = [i for i, teacher in enumerate(label.teacher) if teacher == name]
        expected = alone(random_model, member, found, scales[name], rows)
        assert torch.equal(label.velocity[rows], expected)


def test_batch_size_changes_nothing_and_labels_are_stored_in_bf16(
    random_model: str, members: dict[str, Member]
) -> None:
    student = fakes.adapted(random_model)
    found = rollout(student)
    exact = Bank(student, members, ROUTING, dtype=torch.float32)(found).velocity
    other = fakes.adapted(random_model)
    small = Bank(other, members, ROUTING, batch_size=5, dtype=torch.float32)(found).velocity
    torch.testing.assert_close(small, exact, rtol=0, atol=1e-6)
    third = fakes.adapted(random_model)
    stored = Bank(third, members, ROUTING)(found).velocity
    assert stored.dtype == torch.bfloat16
    torch.testing.assert_close(stored.float(), exact, rtol=2**-8, atol=1e-6)


def test_the_student_does_not_notice_the_bank(random_model: str, members: dict[str, Member]):
    student = fakes.adapted(random_model)
    before = rollout(student)
    bank = Bank(student, members, ROUTING)
    bank(before)
    assert torch.equal(rollout(student).states, before.states)
    trained = [name for name, p in student.core.named_parameters() if p.requires_grad]
    assert trained and all(f".{STUDENT}." in name for name in trained)


def test_an_adapter_of_another_base_is_refused(random_model: str, tmp_path: Path) -> None:
    backbone = fakes.adapted(random_model)
    backbone.save_adapter(STUDENT, tmp_path / "mine")
    lora = read_lora(tmp_path / "mine")
    wide = {k: torch.cat([v, v], 1) if "lora_A" in k else v for k, v in lora.weights.items()}
    write_lora(tmp_path / "wide", wide, lora.metadata)
    with pytest.raises(ValueError, match="adapts .*, and the model has such a layer"):
        Bank(backbone, {"t": Member(tmp_path / "wide")}, {"ocr": "t"})


def test_labels_that_are_not_finite_stop_with_the_teacher_named(
    random_model: str, members: dict[str, Member]
) -> None:
    student = fakes.adapted(random_model)
    bank = Bank(student, members, ROUTING)
    student.adapter_parameters("teacher_ocr")[-1].data.fill_(float("nan"))
    with pytest.raises(NotFinite, match="'ocr'.*NaN"):
        bank(rollout(student))


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_target_beyond_its_teacher(random_model, members: dict[str, Member], guidance: float):
    """v_ref + lambda (v - v_ref), of the base and of the start, beside a teacher as it is."""
    student = fakes.adapted(random_model)
    found = rollout(student)
    beyond = {
        "ocr": Member(members["ocr"].adapter, guidance, 1.5),
        "geneval": Member(members["geneval"].adapter, guidance, 0.5, "start"),
        "base": Member(None, guidance),
    }
    start = members["ocr"].adapter
    bank = Bank(student, beyond, ROUTING, batch_size=3, dtype=torch.float32, start=start)
    label = bank(found)
    for task, reference in {"ocr": None, "geneval": start, "photo": None}.items():
        name = ROUTING[task]
        rows = [i for i, teacher in enumerate(label.teacher) if teacher == name]
        own = alone(random_model, members[name], found, guidance, rows)
        base = alone(random_model, Member(reference), found, guidance, rows)
        expected = base + beyond[name].extrapolate * (own - base)
        torch.testing.assert_close(label.velocity[rows], expected, rtol=0, atol=1e-5)


def test_a_label_of_substeps_leads_where_the_teachers_own_path_does(
    random_model: str, members: dict[str, Member]
) -> None:
    """x + dt * label is the end of a plain Euler path of three steps, to the next noise level."""
    student = fakes.adapted(random_model)
    found = rollout(student)
    scales = {"base": 1.0, "ocr": 2.0, "geneval": 1.0}
    scaled = {name: Member(m.adapter, scales[name]) for name, m in members.items()}
    bank = Bank(student, scaled, ROUTING, batch_size=5, dtype=torch.float32, substeps=3)
    label = bank(found)
    for row, name in enumerate(label.teacher):
        backbone = fakes.backbone(random_model)
        if adapter := members[name].adapter:
            backbone.load_adapter("only", adapter)
        for column, step in enumerate(found.steps):
            x = start = found.states[row : row + 1, column]
            text = found.conditioning.select(torch.tensor([row]))
            first, last = found.sigmas[step : step + 2].tolist()
            path = torch.linspace(first, last, 4).tolist()
            for sigma, following in zip(path, path[1:], strict=False):
                with torch.no_grad():
                    v = backbone.velocity(x, sigma, text, guidance=scales[name])
                x = x + (following - sigma) * v
            expected = (x - start) / (path[-1] - path[0])
            torch.testing.assert_close(label.velocity[row, column], expected[0], rtol=0, atol=1e-5)
