"""credit.py against the published code's numbers, and the rules that it adds."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from flowalign.credit import ADVANTAGES, gdpo, group_relative

GOLDEN = Path(__file__).parent / "golden"
CASES = json.loads((GOLDEN / "advantages.json").read_text())["cases"]
GDPO = json.loads((GOLDEN / "gdpo.json").read_text())["cases"]
NAN = float("nan")


def groups_of(prompts):
    names = sorted(set(prompts))
    return torch.tensor([names.index(p) for p in prompts])


def test_group_relative_is_the_published_one():
    """Where rewards have two columns (one a step), the published rule is per column."""
    stds = [("batch", True), ("group", False)]
    for case, (std, global_std) in itertools.product(CASES, stds):
        rewards = torch.tensor(case["rewards"], dtype=torch.float64)
        recorded = case["expected"][f"grpo.global_std={global_std}"]["advantages"]
        expected = torch.tensor(recorded, dtype=torch.float64)
        group = groups_of(case["prompts"])
        for column, theirs in zip(
            rewards.reshape(len(group), -1).T, expected.reshape(len(group), -1).T, strict=True
        ):
            ours, name = group_relative(column, group, std=std), f"{case['id']} {std}"
            assert ours.dtype == torch.float32, name
            assert_close(ours.double(), theirs, atol=1e-6, rtol=1e-6, msg=name)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_groups_without_spread_get_exactly_zero(name):
    """The recorded case where the published zero test misfires, and three rewards of .1."""
    case = next(c for c in CASES if c["kind"].startswith("zero_variance_inexact"))
    assert any(case["expected"]["grpo.global_std=True"]["nonzero_rows"])  # the misfire
    value = torch.tensor(case["rewards"], dtype=torch.float64)
    group = groups_of(case["prompts"])
    assert torch.equal(ADVANTAGES[name](value, group), torch.zeros(len(value)))

    value = torch.tensor([0.1, 0.1, 0.1, 0.3, 0.1 + 0.2, 0.3, 0.0, 1.0, 2.0], dtype=torch.float64)
    group = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])
    advantage = ADVANTAGES[name](value, group)
    assert torch.equal(advantage[:6], torch.zeros(6))
    assert bool((advantage[[6, 8]] != 0).all())


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_group_of_one_gets_zero_and_the_others_do_not_notice_in_their_group(name):
    value, group = torch.tensor([5.0, 0.0, 1.0]), torch.tensor([7, 3, 3])
    advantage = ADVANTAGES[name](value, group)
    assert advantage[0] == 0 and advantage[1] < 0 < advantage[2]


@pytest.mark.parametrize("name", ADVANTAGES)
def test_invalid_rows_leave_every_statistic(name):
    """The valid rows get what they would get in a batch without the others."""
    generator = torch.Generator().manual_seed(0)
    value, group = torch.rand(12, generator=generator), torch.arange(12) % 3
    valid = torch.ones(12, dtype=torch.bool)
    valid[[0, 4, 5]] = False
    without = ADVANTAGES[name](value[valid], group[valid])
    for broken in (NAN, math.inf, 0.0, 1e6):
        value[~valid] = broken
        advantage = ADVANTAGES[name](value, group, valid=valid)
        assert torch.equal(advantage[valid], without), broken
        assert torch.equal(advantage[~valid], torch.zeros(3)), broken
    none = ADVANTAGES[name](value, group, valid=torch.zeros(12, dtype=torch.bool))
    assert torch.equal(none, torch.zeros(12))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_the_order_of_the_batch_and_the_names_of_groups_do_not_matter(name):
    generator = torch.Generator().manual_seed(1)
    value, group = torch.rand(12, generator=generator), torch.arange(12) // 4
    shuffle = torch.randperm(12, generator=generator)
    shuffled = ADVANTAGES[name](value[shuffle], 90 - 7 * group[shuffle])
    assert_close(shuffled, ADVANTAGES[name](value, group)[shuffle])


def test_every_task_of_a_mixed_batch_gets_the_published_advantages_of_its_own_batch():
    """The official training alternates data sets, so its batches hold one task each: the recorded
    cases as tasks of one batch, whose images are shuffled, give what each gives alone."""
    cases = [case for case in CASES if isinstance(case["rewards"][0], float)]
    assert len(cases) > 3
    rows = []
    for number, case in enumerate(cases):
        group = 100 * number + groups_of(case["prompts"])
        advantages = case["expected"]["grpo.global_std=True"]["advantages"]
        columns = zip(case["rewards"], group.tolist(), advantages, strict=True)
        rows += [(reward, name, number, advantage) for reward, name, advantage in columns]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    value, group, task, expected = torch.tensor(rows, dtype=torch.float64)[order].T
    found = group_relative(value, group, std="batch", task=task)
    assert_close(found.double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_task_of_small_range_is_not_silenced(name):
    """Every variant: what a task gets does not depend on the range of another's rewards."""
    generator = torch.Generator().manual_seed(2)
    one, two = torch.rand(8, generator=generator), torch.rand(8, generator=generator)
    group, task = torch.arange(16) // 4, torch.arange(16) // 8
    small = ADVANTAGES[name](torch.cat([one, 0.05 * two]), group, task=task)
    large = ADVANTAGES[name](torch.cat([one, 50 * two]), group, task=task)
    assert torch.equal(small[:8], large[:8])
    assert float(small[8:].std()) == pytest.approx(float(large[8:].std()), rel=0.01)
    assert float(small[8:].std()) > 0.5


def test_a_task_without_a_valid_image_leaves_the_others_alone():
    value, group = torch.tensor([0.0, 1.0, NAN, NAN]), torch.tensor([0, 0, 1, 1])
    valid, task = torch.tensor([True, True, False, False]), torch.tensor([5, 5, 2, 2])
    advantage = ADVANTAGES["batch_std"](value, group, valid=valid, task=task)
    assert_close(advantage, torch.tensor([-1.0, 1.0, 0.0, 0.0]), atol=1e-3, rtol=0)


def test_gaussian_gives_normal_quantiles_of_the_ranks():
    value = torch.tensor([-3.0, 900.0, 0.1, 0.2])
    advantage = ADVANTAGES["gaussian"](value, torch.zeros(4))
    quantile = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor([1, 7, 3, 5]) / 8)
    assert_close(advantage, quantile)


def test_gaussian_ties_share_the_mean_of_their_quantiles():
    third = 0.1 + 0.2 - 0.2  # .1 but for rounding
    value = torch.tensor([0.1, 1.0, third, 0.1, 2.0, 1.0], dtype=torch.float64)
    advantage = ADVANTAGES["gaussian"](value, torch.zeros(6))
    q = torch.distributions.Normal(0.0, 1.0).icdf((torch.arange(6) + 0.5) / 6)
    low, middle, high = q[:3].mean(), q[3:5].mean(), q[5]
    assert_close(advantage, torch.stack([low, middle, low, low, high, middle]))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((torch.zeros(2), torch.zeros(2)), {"std": "global"}, "unknown std 'global'"),
        ((torch.zeros(2, 1), torch.zeros(2)), {}, r"must all be \[B\]"),
        ((torch.zeros(2), torch.zeros(3)), {}, r"must all be \[B\]"),
        ((torch.tensor([0.0, NAN]), torch.zeros(2)), {}, "1 of 2 values are not finite"),
        ((torch.zeros(2), torch.zeros(2)), {"task": torch.zeros(3)}, r"must all be \[B\]"),
    ],
)
def test_bad_arguments_are_named(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        group_relative(*arguments, **options)


def parts_of(case):
    names = sorted(case["rewards"])
    parts = torch.tensor([case["rewards"][name] for name in names], dtype=torch.float64)
    weights = torch.tensor([case["weights"][name] for name in names], dtype=torch.float64)
    weights = weights[:, None].expand_as(parts)
    return (weights * parts).sum(0), torch.tensor(case["group"]), parts, weights


def test_gdpo_is_the_published_one():
    assert len(GDPO) > 3
    for case in GDPO:
        value, group, parts, weights = parts_of(case)
        found = gdpo(value, group, parts=parts, weights=weights)
        expected = torch.tensor(case["advantage"], dtype=torch.float64)
        assert_close(found.double(), expected, atol=1e-6, rtol=1e-6, msg=str(case["id"]))


def test_gdpo_as_tasks_of_one_batch_gives_what_each_gives_alone():
    """With other parts in each task, and parts of the others at weight 0."""
    first, second = parts_of(GDPO[0]), parts_of(GDPO[1])
    counts = [len(first[0]), len(second[0])]
    parts, weights = (torch.block_diag(a, b) for a, b in zip(first[2:], second[2:], strict=True))
    parts[weights == 0] = NAN
    value, group = torch.cat([first[0], second[0]]), torch.cat([first[1], 100 + second[1]])
    task = torch.arange(2).repeat_interleave(torch.tensor(counts))
    found = gdpo(value, group, parts=parts, weights=weights, task=task)
    expected = torch.tensor(GDPO[0]["advantage"] + GDPO[1]["advantage"])
    assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_an_invalid_part_leaves_its_own_statistics_only():
    generator = torch.Generator().manual_seed(4)
    a, b = torch.rand(2, 4, generator=generator, dtype=torch.float64)
    group, broken = torch.zeros(4), b.clone()
    broken[0] = NAN
    found = gdpo(a, group, parts=torch.stack([a, broken]))
    part_a = (a - a.mean()) / a.std(correction=0)
    part_b = torch.cat([torch.zeros(1), (b[1:] - b[1:].mean()) / b[1:].std(correction=0)])
    total = part_a + part_b
    expected = (total - total.mean()) / total.std(correction=0)
    assert_close(found.double(), expected, atol=1e-6, rtol=1e-6)
