"""The study behind the student's defaults: gradient x weighting x states x start.

    python benchmarks/student_study.py --updates 40 --prompts 384

Each variant changes what its name says in configs/tiny/student_flow_opd.yaml, which starts from the
merge of its teachers here and has no MAR; the teachers, the number of student trajectories and
(but for two variants) of optimizer steps, the learning rate and its decline, and the seed are
held equal. Scores are means over the tasks on the same validation prompts and noise,
differences are paired with the default's. A forward is one image through the transformer once (a
backward pass counts as two); those of evaluation are not counted. Prints Markdown tables.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from flowalign.commands import build
from flowalign.config import OpdStage, load
from flowalign.eval import suite
from flowalign.eval.stats import average, difference
from flowalign.teachers.merge import merge

PRESET = "configs/tiny/student_flow_opd.yaml"
UNTRAINED = "train.updates=0"
SCRATCH = "lora.init=null"
PUBLISHED = "student.weighting=published"
THREE = "student.states={select: random, count: 3}"
TASKS = ("geneval", "ocr", "preference")
DEFAULT = "default: from the merge (average), pathwise, velocity, one high-noise state"
VARIANTS: dict[str, list[str]] = {
    "the base": [SCRATCH, UNTRAINED],
    "the merge": [UNTRAINED],
    DEFAULT: [],
    "start: scratch": [SCRATCH],
    "weighting kl": ["student.weighting=kl"],
    "weighting mean (DiffusionOPD's)": ["student.weighting=mean"],
    "weighting published": [PUBLISHED],
    "states: 1 random": ["student.states={select: random, count: 1}"],
    "states: 1 low-noise (DanceOPD's)": ["student.states={select: low_noise, count: 1}"],
    "states: 3 random": [THREE],
    "states: 3 random, weighting published": [THREE, PUBLISHED],
    "states: all": ["student.states={select: all}"],
    "gradient published, 3 random": ["student.gradient=published", PUBLISHED, THREE],
    "gradient policy, 3 random": ["student.gradient=policy", THREE],
    "ode rollouts": ["rollout.kind=ode"],
    "1 optimizer step a rollout": ["optimizer.updates_per_rollout=1"],
    "8 optimizer steps a rollout": ["optimizer.updates_per_rollout=8"],
    "labels without CFG": [f"teachers.{task}.guidance=1" for task in TASKS],
    "labels at CFG 2": [f"teachers.{task}.guidance=2" for task in TASKS],
}  # fmt: skip


class Meter:
    """Counts the images that pass the transformer while it is on."""

    def __init__(self, core: Any) -> None:
        self.forwards, self.on = 0, True
        core.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        import torch

        cost = 3 if torch.is_grad_enabled() else 1
        self.forwards += cost * len(kwargs["hidden_states"]) * self.on


def config_of(overrides: list[str], out: Path, args: argparse.Namespace) -> OpdStage:
    """The preset with a variant's settings, without evaluations of its own."""
    length = args.updates
    common = [
        f"output={out}", f"seed={args.seed}", "anchor=null", f"train.updates={length}",
        f"train.checkpoint_every={length}", f"train.sample_every={length}", "train.trackers=[]",
        f"lora.init={args.out / 'merged'}",
    ]  # fmt: skip
    settings = [o for o in overrides if o != UNTRAINED]
    return load(PRESET, [*common, *settings, *args.set], stage=OpdStage)


def run(name: str, overrides: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Train and score a variant, or read back what an earlier call left."""
    folder = args.out / "".join(c if c.isalnum() else "_" for c in name)
    found = folder / "study.json"
    if found.exists():
        return json.loads(found.read_text())
    config = config_of(overrides, folder, args)
    loop, _, rewards = build.wire(config)
    meter, evaluate = Meter(loop.backbone.core), loop.evaluations.evaluate
    loop.evaluations.evaluate = None
    began = time.time()
    if UNTRAINED not in overrides:
        loop.run()
    seconds, meter.on = time.time() - began, False
    assert evaluate is not None and config.evaluation is not None
    wide = config.model_copy(
        update={"evaluation": config.evaluation.model_copy(update={"prompts": args.prompts})}
    )
    with loop.step.averaged():
        rows = {
            mark.name: suite.judge_set(
                loop.backbone,
                suite.ImageSet.of(mark),
                config.evaluation_sampling,
                Accelerator(),
            )[0].rows
            for mark in build.held_out(wide, rewards)
        }
    result = {"seconds": seconds, "forwards": meter.forwards, "rows": rows}
    folder.mkdir(parents=True, exist_ok=True)
    found.write_text(json.dumps(result))
    return result


def line(name: str, result: Mapping[str, Any], default: Mapping[str, Any], marks: Any) -> str:
    """One row: each task, their mean, its paired difference to the default, and the cost."""
    cells, gaps = [], []
    for mark in marks:
        report = suite.EvalReport(suite.rows_of(mark, result["rows"][mark.name]))
        cells.append(suite.headline(report, [mark]).mean)
        gaps.append(difference(mark, default["rows"][mark.name], result["rows"][mark.name]))
    gap = average(gaps)  # whose error knows of prompts that tasks share
    scores = " | ".join(f"{c:.3f}" for c in [*cells, sum(cells) / len(cells)])
    cost = f"{result['seconds']:.0f} | {result['forwards'] / 1000:.0f}k"
    return f"| {name} | {scores} | {gap.mean:+.3f} ± {gap.stderr:.3f} | {cost} |"


def main() -> None:
    """Run the variants asked for, in order; finished ones are read back."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=384, help="validation prompts per task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--out", type=Path, default=Path("outputs/study"))
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="key=value", help="for all variants"
    )
    args = parser.parse_args()
    preset = load(PRESET, stage=OpdStage)
    if not (args.out / "merged").exists():
        teachers = [t.adapter for t in preset.teachers.values() if t.adapter]
        average = [1 / len(teachers)] * len(teachers)
        merge(teachers, args.out / "merged", weights=average)
    from flowalign import rewards
    from flowalign.training.report.progress import quiet

    quiet()
    built = {
        t.name: rewards.build(t.reward.name, **t.reward.options) for t in preset.tasks if t.reward
    }
    marks = build.held_out(preset, built)
    names = " | ".join(mark.name for mark in marks)
    head = f"| variant | {names} | mean | to the default | seconds | forwards |"
    results = {}
    for name in dict.fromkeys([DEFAULT, *args.only]):
        results[name] = run(name, VARIANTS[name], args)
        print(name, flush=True)
    print(head + "\n" + "|---" * (len(marks) + 5) + "|")
    for name in args.only:
        print(line(name, results[name], results[DEFAULT], marks))


if __name__ == "__main__":
    main()
