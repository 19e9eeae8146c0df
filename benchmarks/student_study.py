"""The study behind the student's defaults: gradient x weighting x states x start.

    python benchmarks/student_study.py --updates 40 --prompts 384

Each variant changes one setting of configs/tiny/student_flow_opd.yaml without MAR; the teachers,
the number of student trajectories and of optimizer steps, the learning rate and its decline, and
the seed are held equal. Scores are means over the tasks on the same validation prompts and noise,
differences are paired with the default's. A forward is one image through the transformer once (a
backward pass counts as two); those of evaluation are not counted. Prints Markdown tables.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from flowalign import train
from flowalign.config import OpdConfig, load
from flowalign.eval import suite
from flowalign.eval.stats import difference
from flowalign.teachers.merge import merge

PRESET = "configs/tiny/student_flow_opd.yaml"
ALL = "student.states={select: all}"
POLICY = ["student.gradient=policy"]
PUBLISHED = "student.weighting=published"
UNTRAINED = "train.updates=0"
MERGED = "merged"  # stands for the merge of the preset's teachers
VARIANTS: dict[str, list[str]] = {
    "base": [UNTRAINED],
    "default: pathwise, velocity, one high-noise state, from scratch": [],
    "weighting kl": ["student.weighting=kl"],
    "weighting mean (DiffusionOPD)": ["student.weighting=mean"],
    "weighting published": [PUBLISHED],
    "states: all": [ALL],
    "states: all, weighting kl": [ALL, "student.weighting=kl"],
    "states: all, weighting published": [ALL, PUBLISHED],
    "states: random 1": ["student.states={select: random, count: 1}"],
    "states: random 3": ["student.states={select: random, count: 3}"],
    "states: window 3": ["student.states={select: window, count: 3}"],
    "states: low-noise 1 (DanceOPD)": ["student.states={select: low_noise, count: 1}"],
    "ode rollouts": ["rollout.kind=ode"],
    "cps rollouts": ["rollout.kind=cps"],
    "gradient published": ["student.gradient=published", PUBLISHED],
    "gradient published, states: all": ["student.gradient=published", PUBLISHED, ALL],
    "gradient detached, states: all": ["student.gradient=detached", PUBLISHED, ALL],
    "gradient policy, states: all": [*POLICY, ALL],
    "gradient policy, reward to go, states: all": [*POLICY, ALL, "student.reward_to_go=true"],
    "start: merge": [f"lora.init={MERGED}"],
    "start: merge, weighting kl": [f"lora.init={MERGED}", "student.weighting=kl"],
    "start: merge, trained 0 updates": [f"lora.init={MERGED}", UNTRAINED],
    "teachers' guidance 2": [f"teachers.{t}.guidance=2" for t in ("geneval", "ocr", "preference")],
}


class Meter:
    """Counts the images that pass the transformer while it is on."""

    def __init__(self, core: Any) -> None:
        self.forwards, self.on = 0, True
        core.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        import torch

        cost = 3 if torch.is_grad_enabled() else 1
        self.forwards += cost * len(kwargs["hidden_states"]) * self.on


def config_of(overrides: list[str], out: Path, args: argparse.Namespace) -> OpdConfig:
    """The preset with a variant's settings, without evaluations of its own."""
    settings = [o.replace(MERGED, str(args.out / "merged")) for o in overrides]
    updates = (
        [] if any("train.updates" in o for o in settings) else [f"train.updates={args.updates}"]
    )
    length = max(1, args.updates)
    quiet = [
        f"train.checkpoint_every={length}",
        f"train.sample_every={length}",
        "train.trackers=[]",
    ]
    common = [f"output={out}", "anchor=null", "evaluation.every=100000", f"seed={args.seed}"]
    settings = [o for o in settings if o != UNTRAINED]
    return load(PRESET, [*settings, *updates, *quiet, *common, *args.set], stage=OpdConfig)


def run(name: str, overrides: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Train and score a variant, or read back what an earlier call left."""
    folder = args.out / "".join(c if c.isalnum() else "_" for c in name)
    found = folder / "study.json"
    if found.exists():
        return json.loads(found.read_text())
    config = config_of(overrides, folder, args)
    loop, _, rewards = train.wire(config)
    meter, evaluate = Meter(loop.backbone.core), loop.evaluate
    loop.evaluate = None
    began = time.time()
    if UNTRAINED not in overrides:
        loop.run()
    seconds, meter.on = time.time() - began, False
    assert evaluate is not None and config.evaluation is not None
    settings = train.eval_settings(config)
    wide = config.model_copy(
        update={"evaluation": config.evaluation.model_copy(update={"prompts": args.prompts})}
    )
    with loop.averaged():
        rows = {
            mark.name: suite.judge_images(loop.backbone, mark, settings, Accelerator()).rows
            for mark in train.held_out(wide, rewards)
        }
    result = {"seconds": seconds, "forwards": meter.forwards, "rows": rows}
    folder.mkdir(parents=True, exist_ok=True)
    found.write_text(json.dumps(result))
    return result


def line(name: str, result: Mapping[str, Any], default: Mapping[str, Any], marks: Any) -> str:
    """One row: each task, their mean, its paired difference to the default, and the cost."""
    cells, gains, errors = [], [], []
    for mark in marks:
        report = suite.EvalReport(suite.rows_of(mark, result["rows"][mark.name]), {}, {})
        cells.append(suite.headline(report, [mark]))
        gap = difference(mark, default["rows"][mark.name], result["rows"][mark.name])
        gains.append(gap.mean)
        errors.append(gap.stderr)
    mean, error = sum(gains) / len(gains), math.hypot(*errors) / len(errors)
    scores = " | ".join(f"{c:.3f}" for c in [*cells, sum(cells) / len(cells)])
    cost = f"{result['seconds']:.0f} | {result['forwards'] / 1000:.0f}k"
    return f"| {name} | {scores} | {mean:+.3f} ± {error:.3f} | {cost} |"


def main() -> None:
    """Run the variants asked for, in order; finished ones are read back."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=384, help="validation prompts per task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--out", type=Path, default=Path("outputs/study"))
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="key=value", help="for all variants"
    )
    args = parser.parse_args()
    preset = load(PRESET, stage=OpdConfig)
    if not (args.out / "merged").exists():
        merge([t.adapter for t in preset.teachers.values() if t.adapter], args.out / "merged")
    from flowalign import rewards
    from flowalign.progress import quiet

    quiet()
    built = {
        t.name: rewards.build(t.reward.name, **t.reward.options) for t in preset.tasks if t.reward
    }
    marks = train.held_out(preset, built)
    names = " | ".join(mark.name for mark in marks)
    head = f"| variant | {names} | mean | to the default | seconds | forwards |"
    results = {}
    default = next(name for name in VARIANTS if name.startswith("default"))
    for name in dict.fromkeys([default, *args.only]):
        results[name] = run(name, VARIANTS[name], args)
        print(name, flush=True)
    print(head + "\n" + "|---" * (len(marks) + 5) + "|")
    for name in args.only:
        print(line(name, results[name], results[default], marks))


if __name__ == "__main__":
    main()
