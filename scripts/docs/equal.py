"""Fills the table of docs/equal.md: `python scripts/docs/equal.py`.

The cases are those of tests/golden. The differences are measured by running the tests that are
named below: the largest of all that they compare by `pytest.approx` and `assert_close`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
PAGE = ROOT / "docs" / "equal.md"
TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end -->)", re.DOTALL)


FAMILY_CASES = 15  # of CALLS in tests/test_families.py: a pipeline at a guidance


class Row(NamedTuple):
    """what: is computed; code, commit: of the authors; tests: compare the cases; exact: by ==;
    transcribed: not the code itself ran, but a copy of its arithmetic."""

    what: str
    code: str
    commit: str
    cases: int
    tests: tuple[str, ...]
    exact: bool = False
    transcribed: bool = False


@cache
def golden(name: str) -> Any:
    return json.loads((TESTS / "golden" / f"{name}.json").read_text(encoding="utf-8"))


def commit(source: str, repository: str) -> str:
    """As a file of tests/golden names it: "" if it does not."""
    found = re.search(rf"{re.escape(repository)}@([0-9a-f]+)", source)
    return found[1] if found else ""


def rows() -> Iterator[Row]:
    """Of the table. What tests/golden does not say stands here."""
    sde = golden("sde_step")
    opd = golden("opd_loss")
    forward = golden("forward_process")
    text = golden("long_text")
    dpg = golden("dpg")
    geneval = golden("geneval_evaluate")
    opd_commit = commit(opd["source"], "CostaliyA/Flow-OPD")
    for name in ("sde_step", "advantages", "ema", "ocr_reward"):
        assert commit(golden(name)["meta"]["source"], "CostaliyA/Flow-OPD") == opd_commit, name
    grpo = "Flow-GRPO in Flow-OPD", opd_commit

    def modes(*names: str) -> int:
        return sum(case["train"]["reward_mode"] in names for case in opd["cases"])

    def methods(name: str) -> int:
        return sum(case["method"] == name for case in forward["cases"])

    distilled = "test_distillation.py::test_the_published_loss_and_gradient"
    yield Row(
        "SDE and CPS step, log-probability, gradient", *grpo, len(sde["cases"]),
        ("test_sde.py::test_transition_and_log_prob_are_the_published_ones",),
    )  # fmt: skip
    yield Row(
        "sampled step", *grpo, len(sde["sampling"]),
        ("test_sde.py::test_sample_is_the_published_draw",),
    )  # fmt: skip
    yield Row(
        "schedule", f"diffusers {golden('scheduler')['diffusers']}", "",
        len(golden("scheduler")["by_num_steps"]),
        ("test_sde.py::test_sigmas_are_the_recorded_ones",), exact=True,
    )  # fmt: skip
    yield Row(
        "group advantages", *grpo, 2 * len(golden("advantages")["cases"]),
        ("test_credit.py::test_group_relative_is_the_published_one",),
    )  # fmt: skip
    yield Row(
        "KL without dt", "Flow-OPD", opd_commit,
        sum(case["config"] == "kl_only_scale0" for case in opd["cases"]),
        ("test_distillation.py::test_the_published_kl_of_grpo",),
    )  # fmt: skip
    yield Row(
        "exact KL", "Flow-OPD's project page", "",
        sum(min(given["step_index"]) > 0 for given in opd["inputs"].values()),
        ("test_distillation.py::test_the_exact_kl_is_that_of_the_project_page",),
        transcribed=True,
    )  # fmt: skip
    for mode, words in (("gkd", "direct"), ("kl_only", "KL reward"), ("mixed", "KL and task")):
        yield Row(
            f"distillation, {words} (`{mode}`), gradient", "Flow-OPD", opd_commit, modes(mode),
            (f"{distilled}[{mode}]",),
        )  # fmt: skip
    yield Row(
        "weight average (EMA)", *grpo,
        len(golden("ema")["decay"]) + len(golden("ema")["traces"]),
        ("test_ema.py::test_the_warm_up_counts_optimizer_steps",
         "test_ema.py::test_the_average_is_the_published_one"),
    )  # fmt: skip
    yield Row(
        "NFT loss, gradient", "DiffusionNFT", "", methods("nft"),
        ("test_matching.py::test_nft_is_the_published_arithmetic",),
    )  # fmt: skip
    yield Row(
        "decay of NFT's old policy", "DiffusionNFT", "", len(forward["meta"]["decay"]),
        ("test_nft.py::test_the_official_schedules",),
    )  # fmt: skip
    yield Row(
        "AWM loss, gradient", "Flow-Factory", "", methods("awm"),
        ("test_matching.py::test_awm_is_the_published_arithmetic",),
    )  # fmt: skip
    yield Row(
        "DPO loss, gradient", "Diffusion-DPO",
        commit(golden("dpo")["source"], "SalesforceAIResearch/DiffusionDPO"),
        len(golden("dpo")["cases"]),
        ("test_dpo.py::test_the_loss_and_its_gradient_are_the_official_ones",), transcribed=True,
    )  # fmt: skip
    yield Row(
        "GDPO advantages", "Flow-Factory", "", len(golden("gdpo")["cases"]),
        ("test_credit.py::test_gdpo_is_the_published_one",), transcribed=True,
    )  # fmt: skip
    geneval_commit = commit(geneval["meta"]["source"], "djghosh13/geneval")
    yield Row(
        "GenEval verdict, reason, boxes", "geneval", geneval_commit, len(geneval["cases"]),
        ("test_geneval.py::test_decision_and_selection_are_the_official_ones",), exact=True,
    )  # fmt: skip
    yield Row(
        "GenEval training reward", "reward-server", "92ac29f",  # said beside the file
        sum(bool(case["expected_strict"]) for case in geneval["cases"]),
        ("test_geneval.py::test_the_published_score_is_the_reward_servers",),
    )  # fmt: skip
    yield Row(
        "GenEval summary", "geneval", geneval_commit, len(golden("geneval_summary")["cases"]),
        ("test_geneval.py::test_summary_is_the_official_one",),
    )  # fmt: skip
    yield Row(
        "GenEval 2 scores", "GenEval2", "", len(golden("geneval2")["cases"]),
        ("test_geneval2.py::test_scores_and_means_are_those_of_the_official_code",
         "test_geneval2.py::test_the_benchmark_its_skills_and_its_atoms_are_those_of_the_official"
         "_analysis"),
    )  # fmt: skip
    yield Row(
        "OCR reward", "Flow-OPD", opd_commit,
        sum("reward" in case["image"] for case in golden("ocr_reward")["cases"]),
        ("test_ocr.py::test_published_rule_is_the_peers",),
    )  # fmt: skip
    yield Row(
        "DPG-Bench", "ELLA", commit(dpg["meta"]["source"], "TencentQQGYLab/ELLA"),
        sum(map(len, dpg["images"].values())),
        ("test_dpg.py::test_the_official_rule_gives_the_official_numbers",), transcribed=True,
    )  # fmt: skip
    copied = commit(text["meta"]["cvtg2k"], "zlab-princeton/i1")
    yield Row(
        "CVTG-2K", "TextCrafter in i1", copied, len(text["cvtg2k"]["images"]),
        ("test_long_text.py::test_cvtg2k_counts_words_as_the_official_script_does",),
        transcribed=True,
    )  # fmt: skip
    yield Row(
        "LongText-Bench", "X-Omni in i1", copied, len(text["longtext"]["images"]),
        ("test_long_text.py::test_longtext_counts_words_or_characters_as_officially",),
        transcribed=True,
    )  # fmt: skip
    yield Row(
        "merge as sum of outputs", "peft, in the test", "", 1,
        ("test_merge.py::test_concat_is_the_sum_of_the_outputs",),
    )  # fmt: skip
    yield Row(
        "images of nine pipelines, random weights", f"diffusers {golden('scheduler')['diffusers']}",
        "", FAMILY_CASES, ("test_families.py::test_our_images_are_the_pipelines",),
    )  # fmt: skip


def filled(page: str, differences: Mapping[str, str] | None = None) -> str:
    """The page, with the table of what tests/golden holds. Without differences it keeps those
    that it has."""
    found = TABLE.search(page)
    assert found, "no table"
    kept = differences or dict(re.findall(r"^\|([^|]+)\|.*\|([^|]+)\|[^|]+\|$", found[0], re.M))
    lines = ["", "|formula|code|cases|difference|test|", "|---|---|--:|--:|---|"]
    for row in rows():
        for test in row.tests:
            file, _, name = test.partition("::")
            assert f"def {name.partition('[')[0]}(" in (TESTS / file).read_text(), test
        code = f"{row.code}@{row.commit}" if row.commit else row.code
        if row.transcribed:
            code += r" \*"
        file = f"tests/{row.tests[0].partition('::')[0]}"
        difference = kept.get(row.what, "?")
        lines.append(f"|{row.what}|{code}|{row.cases}|{difference}|[`{file}`](../{file})|")
    copied = sum(row.cases for row in rows() if row.transcribed)
    lines += ["", f"Together {total()} cases, {copied} of them from copies of the arithmetic."]
    return TABLE.sub(lambda _: "\n".join(lines) + "\n\n", page)


def total() -> int:
    return sum(row.cases for row in rows())


# Differences --------------------------------------------------------------------------------------


class Recorder:
    """A plugin of pytest: {test: the largest difference of what it compared}."""

    def __init__(self) -> None:
        self.test = ""
        self.largest: dict[str, float] = {}
        self.failed: list[str] = []

    def pytest_runtest_call(self, item: Any) -> None:
        self.test = Path(item.nodeid).name

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def note(self, ours: Any, theirs: Any) -> None:
        """Relative to the largest of their values; absolute where that is below 1e-9."""
        pairs = list(zip(numbers(ours), numbers(theirs), strict=True))
        pairs = [pair for pair in pairs if all(map(math.isfinite, pair))]
        scale = max((abs(b) for _, b in pairs), default=0)
        worst = max((abs(a - b) for a, b in pairs), default=0) / (scale if scale > 1e-9 else 1)
        self.largest[self.test] = max(worst, self.largest.get(self.test, 0))

    def of(self, test: str) -> float:
        found = [v for k, v in self.largest.items() if k == test or k.startswith(f"{test}[")]
        assert found, f"{test} has compared nothing"
        return max(found)


def numbers(values: Any) -> list[float]:
    if hasattr(values, "detach"):
        return values.detach().double().flatten().tolist()
    if isinstance(values, Mapping):
        return [n for key in sorted(values) for n in numbers(values[key])]
    if isinstance(values, (list, tuple)):
        return [n for value in values for n in numbers(value)]
    return [float(values)]


def measured() -> dict[str, str]:
    """{row: largest difference}, by running the tests."""
    import pytest
    import torch

    recorder = Recorder()
    approx: Callable[..., Any] = pytest.approx
    close: Callable[..., None] = torch.testing.assert_close

    class Compared:
        def __init__(self, expected: Any, *args: Any, **options: Any) -> None:
            self.expected = expected
            self.approx = approx(expected, *args, **options)

        def __eq__(self, ours: object) -> bool:
            recorder.note(ours, self.expected)
            return ours == self.approx

        def __ne__(self, ours: object) -> bool:
            return ours != self.approx

    def assert_close(ours: Any, theirs: Any, **options: Any) -> None:
        recorder.note(ours, theirs)
        close(ours, theirs, **options)

    pytest.approx = Compared
    torch.testing.assert_close = assert_close
    wanted = [f"{TESTS}/{test}" for row in rows() for test in row.tests]
    options = ["-q", "-p", "no:cacheprovider", "-m", "not long"]  # slow ones, too
    code = pytest.main([*options, *wanted], plugins=[recorder])
    assert code == 0, recorder.failed
    return {
        row.what: "0" if row.exact else rounded(max(map(recorder.of, row.tests))) for row in rows()
    }


def rounded(value: float) -> str:
    """Up, to one digit."""
    if value == 0:
        return "0"
    power = math.floor(math.log10(value))
    digit = math.ceil(value / 10**power)
    return f"{digit}e{power}" if digit < 10 else f"1e{power + 1}"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), measured()), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {total()} cases")
