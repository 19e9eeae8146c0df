"""Changes one sign or constant of a central formula at a time, and asks whether a test notices.

    python tests/mutate.py [WORD ...]

By hand: ten minutes. Each change is made in a copy of the working tree, never in the tree,
and the test files that should notice it run there until one test fails. WORD: only formulas whose
name contains it. Prints a table; exit status 1 if a change was not caught, or its text was not
found in the code.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "outputs", "site")


class Mutation(NamedTuple):
    """One change. tests: names of files, without test_ and .py."""

    formula: str
    file: str
    before: str
    after: str
    tests: str


SDE, CREDIT, LOSSES = "flowalign/sde.py", "flowalign/credit.py", "flowalign/training/losses.py"
MUTATIONS = [Mutation(*row) for row in [
    ("schedule: shift", SDE, "(1 + (shift - 1) * grid)", "(1 - (shift - 1) * grid)", "sde"),
    ("SDE: std", SDE, "std = s * torch.sqrt(-dt)", "std = s * -dt", "sde"),
    ("SDE: drift of x", SDE, "x * (1 + drift * dt)", "x * (1 - drift * dt)", "sde"),
    ("SDE: drift of v", SDE, "drift * (1 - sigma)) * dt", "drift * (1 + sigma)) * dt", "sde"),
    ("CPS: noise kept", SDE, "sigma_next**2 - std**2", "sigma_next**2 + std**2", "sde"),
    ("log-probability", SDE, "- torch.log(std).flatten()", "+ torch.log(std).flatten()", "sde"),
    ("KL of a step", SDE, "/ (2 * p.std**2)", "/ p.std**2", "sde"),
    ("credit: GRPO", CREDIT, "rewards.mean()) / (scale", "rewards.mean()) * (scale", "credit"),
    ("credit: ranks", CREDIT, "(rank - 0.5) / n", "(rank + 0.5) / (n + 1)", "credit"),
    ("credit: GDPO", CREDIT, "(scores - scores.mean())", "(scores + scores.mean())", "credit"),
    ("credit: ADORA", CREDIT, "(values > bars)", "(values < bars)", "credit advantages"),
    ("PPO's clip", LOSSES, "torch.maximum(-adv", "torch.minimum(-adv", "losses loop"),
    ("GRPO: published KL", LOSSES, "return sigmas[:-1] - sigmas[1:] if form",
     "return sigmas[1:] - sigmas[:-1] if form", "losses distillation"),
    ("GRPO: weight of the KL", "teachers/grpo.py", "total + s.kl_weight", "total - s.kl_weight",
     "loop"),
    ("NFT: negative branch", "teachers/nft.py", "(1 + beta) * old", "(1 - beta) * old", "nft"),
    ("NFT: optimality", "teachers/nft.py", "(2 * limit) + 0.5", "(2 * limit) - 0.5", "nft"),
    ("NFT: scale of the error", "teachers/nft.py", "image_mean(error**2) / scale",
     "image_mean(error**2) * scale", "nft"),
    ("AWM: ghuber", "teachers/awm.py", "** power - TINY**power) / power",
     "** power + TINY**power) * power", "matching awm"),
    ("NFT, AWM: old policy", "teachers/forward.py", "rise * (steps - after)",
     "rise * (steps + after)", "nft matching"),
    ("NFT, AWM: drift from the base", "teachers/forward.py", "policy + weight * drift",
     "policy - weight * drift", "matching nft awm"),
    ("DPO: gain", "teachers/dpo.py", "2 * (gain[:, 0] -", "2 * (gain[:, 0] +", "dpo"),
    ("gradient: target", "teachers/gradient.py", "(old - shift.to", "(old + shift.to", "gradient"),
    ("few steps: path of a teacher", "teachers/bank.py", "x + dt.view(", "x - dt.view(", "bank"),
    ("student: KL matching", LOSSES, "squared / (2 * unit.std.flatten() ** 2)",
     "squared / unit.std.flatten() ** 2", "losses distillation student"),
    ("student: velocity matching", LOSSES, "(velocity - target.detach()",
     "(velocity + target.detach()", "losses student"),
    ("student: MAR", "flowalign/training/student/opd.py", "total + self.anchor_weight * anchor",
     "total - self.anchor_weight * anchor", "student"),
    ("student: log-ratios", "flowalign/training/student/opd.py", "- rollout.log_probs",
     "+ rollout.log_probs", "student distillation"),
    ("teachers: extrapolation", "teachers/bank.py", "1 - member.extrapolate",
     "1 + member.extrapolate", "bank"),
    ("noised images", "flowalign/training/noising.py", "(1 - sigma) * clean[:, 0] + sigma",
     "(1 - sigma) * clean[:, 0] - sigma", "noising matching"),
    ("velocity of flow matching", "flowalign/training/noising.py", "noise.sub_(clean)",
     "noise.add_(clean)", "noising matching"),
    ("EMA: decay", "flowalign/training/step.py", "/ (9 + steps)", "/ (8 + steps)", "ema"),
    ("EMA: average", "flowalign/training/step.py", "average - (1 - decay)", "average + (1 - decay)",
     "ema"),
    ("micro-batches: share", "flowalign/training/step.py", "weight * len(pairs.rows) / count",
     "weight * count / len(pairs.rows)", "loop student"),
    ("LoRA: scale", "flowalign/backbone/adapters.py", "self.alphas[layer] / rank**root",
     "self.alphas[layer] * rank**root", "adapters merge"),
    ("merge: scale of the parts", "teachers/merge.py", "up * lora.scales[name]",
     "up / lora.scales[name]", "merge"),
    ("merge: lower rank", "teachers/merge.py", "sizes[:rank].sqrt()", "sizes[:rank]", "merge"),
    ("guidance", "flowalign/backbone/family.py", "negative + scale * (positive - negative)",
     "positive + scale * (positive - negative)", "guidance backbone"),
    ("decoded images", "flowalign/backbone/base.py", ".float() / 2 + 0.5)",
     ".float() / 2 - 0.5)", "backbone"),
    ("GenEval: count", "rewards/geneval_judge.py", '.get(c["class"], [])) >= c["count"]',
     '.get(c["class"], [])) > c["count"]', "geneval judges"),
    ("GenEval: position", "rewards/geneval_judge.py", "shrunk * np.sign(offset)",
     "shrunk * -np.sign(offset)", "geneval judges"),
    ("GenEval: overlap", "rewards/geneval_judge.py", "_area(*b[:4]) - inner",
     "_area(*b[:4]) + inner", "geneval judges"),
    ("GenEval: bounded credit", "rewards/geneval_judge.py",
     "max(0.0, 1 - abs(outcome.wanted - outcome.count)",
     "max(0.0, 1 - abs(outcome.wanted + outcome.count)", "geneval judges"),
    ("OCR reward", "rewards/ocr.py", "return 1 - min(Leven", "return 1 + min(Leven", "ocr"),
    ("PickScore: scale", "rewards/preference.py", "raw / self.normalizer", "raw * self.normalizer",
     "preference"),
    ("ImageReward: scale", "rewards/imagereward.py", "(rating - MEAN) / STD",
     "(rating + MEAN) / STD", "preference"),
    ("weighted sum of rewards", "rewards/combine.py", "value += weight *", "value -= weight *",
     "combine"),
    ("evaluation: standard error", "eval/stats.py", "(prompts / (prompts - 1))",
     "((prompts - 1) / prompts)", "errors eval"),
    ("evaluation: interval", "eval/stats.py", "np.interp(CONFIDENCE,", "np.interp(1 - CONFIDENCE,",
     "errors eval"),
    ("fidelity", "eval/fidelity.py", "(c2) - 2 * root", "(c2) + 2 * root", "fidelity"),
    ("alarm", "flowalign/report/alarm.py", "SURE * math.hypot(low[1], high[1])",
     "math.hypot(low[1], high[1]) / SURE", "alarm"),
]]  # fmt: skip


class FirstFailure:
    """A plugin of pytest: which test failed, or which file could not be read."""

    where = ""

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            self.where = self.where or report.nodeid

    pytest_collectreport = pytest_runtest_logreport


def first_failure(copy: Path, tests: Sequence[str]) -> str:
    """The first of some tests that fails in a copy; "" if none does. In a fork of this process,
    which has imported what takes long, and nothing of the library."""
    read, write = os.pipe()
    if not os.fork():
        said = "the fork failed"
        try:
            said = _first_failure(copy, tests)
        finally:
            os.write(write, said.encode())
            os._exit(0)
    os.close(write)
    with open(read) as pipe:
        said = pipe.read()
    os.wait()
    return said


def _first_failure(copy: Path, tests: Sequence[str]) -> str:
    import pytest

    os.chdir(copy)
    sys.path[:0] = [str(copy)]
    os.environ["PYTHONPATH"] = str(copy)
    plugin, silent = FirstFailure(), io.StringIO()
    ignored = "ignore:Module already imported"  # of pytest's own plugins
    with redirect_stdout(silent), redirect_stderr(silent):
        options = ["-qx", "-p", "no:cacheprovider", "-W", ignored]
        status = pytest.main([*options, *tests], [plugin])
    return plugin.where or f"NOT RUN: pytest ended with status {int(status)}" * bool(status)


def main(words: list[str]) -> int:
    """Exit status."""
    import diffusers
    import peft  # noqa: F401
    import torch
    import transformers

    _ = diffusers.StableDiffusion3Pipeline, transformers.CLIPModel  # imported when named
    torch.set_num_threads(1)  # threads do not survive a fork
    chosen = [m for m in MUTATIONS if not words or any(word in m.formula for word in words)]
    missed, failed = 0, []
    with tempfile.TemporaryDirectory(prefix="mutate_") as folder:
        copy = Path(shutil.copytree(ROOT, Path(folder, "tree"), symlinks=True, ignore=LEFT_OUT))
        print("| formula | change | caught by |\n|---|---|---|", flush=True)
        for m in chosen:
            path = copy / m.file
            text = path.read_text()
            where = "NOT FOUND in the code"
            if text.count(m.before) == 1:
                path.write_text(text.replace(m.before, m.after))
                files = [f"tests/test_{name}.py" for name in m.tests.split()]
                where = first_failure(copy, files) or "NOT CAUGHT"
                path.write_text(text)
            missed += where.startswith("NOT")
            failed += [] if where.startswith("NOT") else [where]
            where = where.removeprefix("tests/")
            print(f"| {m.formula} | `{m.before}` -> `{m.after}` | {where} |", flush=True)
        if broken := first_failure(copy, list(dict.fromkeys(failed))):
            print(f"{broken} fails without any change, too")
            return 1
    print(f"\n{len(chosen) - missed} of {len(chosen)} caught; these tests pass without the changes")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
