"""The one training loop: rollout, score or label, update, log, save.

What is learnt is an Algorithm's business: it prepares a rollout once (scores it, or asks
teachers), and turns velocities at (image, step) pairs into a loss. The loop orders the rest.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from diffusers.optimization import get_scheduler
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from flowalign import checkpoint, parallel, trackers
from flowalign.alarm import Alarm
from flowalign.backbone import Backbone
from flowalign.config import TrainingStage
from flowalign.data import PromptSampler
from flowalign.ema import MovingAverage
from flowalign.rollout import Noise, Schedule, See, sample, shard
from flowalign.types import Conditioning, EvalReport, Rollout, Source, StepLoss

log = logging.getLogger("flowalign")

Seen = dict[str, list[tuple[float, int]]]
"""What was measured on the way, by name: means, and of how many pairs each is one."""

STUDENT = "student"  # name of the adapter that is trained


class TrainingError(RuntimeError):
    """A run that must stop: what happened, and what to do."""


@dataclass(frozen=True)
class Pairs:
    """A micro-batch of b (image, step) pairs of a rollout.

    rows [b] images of the rollout, columns [b] positions among its trained steps, steps [b]
    positions in the schedule, sigma [b] there; x [b,C,h,w]. x_next [b,C,h,w] and old_log_prob [b]
    are the sampled action, None where the rollout kept none. size: rows of its forward pass, at
    least b. first: the micro-batch on which costly diagnostics are taken.
    """

    rows: Tensor
    columns: Tensor
    steps: Tensor
    sigma: Tensor
    x: Tensor
    x_next: Tensor | None
    old_log_prob: Tensor | None
    conditioning: Conditioning
    size: int
    first: bool

    def action(self) -> tuple[Tensor, Tensor]:
        """x_next and old_log_prob of a rollout that has them."""
        assert self.x_next is not None and self.old_log_prob is not None
        return self.x_next, self.old_log_prob


@dataclass(frozen=True)
class Prepared:
    """What an algorithm found out about a rollout before the update.

    keep [B]: images that carry gradient; metrics: means over all processes; captions: B lines
    for the sample grid. states: a rollout to train on instead (None = the one that was prepared).
    """

    keep: Tensor
    metrics: Mapping[str, float]
    captions: list[str]
    states: Rollout | None = None


class Algorithm(Protocol):
    """What is learnt from a rollout.

    needs_images: rollouts are decoded; needs_latents: they run to their end. guidance: the
    student's CFG scale where it is trained. see: told of each batch of images while the rollout
    goes on (None = it waits for `prepare`).
    """

    needs_images: bool
    needs_latents: bool
    guidance: float
    see: See | None

    def plan(self, update: int) -> Schedule:
        """How the rollout of an update steps, and which of its states are trained."""
        ...

    def sources(self, tasks: list[str]) -> list[Source] | None:
        """Who samples each image, by its task; None = the student."""
        ...

    def prepare(self, rollout: Rollout, update: int) -> Prepared:
        """Score or label a rollout, once."""
        ...

    def loss(self, pairs: Pairs, velocity: Tensor) -> StepLoss:
        """Mean loss of b pairs, from the student's velocity [b,C,h,w] there."""
        ...


def pairs_of(rollout: Rollout, keep: Tensor, size: int) -> Iterator[Pairs]:
    """All (image, step) pairs of the kept images in micro-batches of `size`: step by step, images
    in order.

    Every forward pass has `size` rows, also that of a smaller last micro-batch: kernels differ in
    the last bits between sizes, so a ratio is exactly 1 where `size` is that of the rollout's
    batches.
    """
    size = min(size, len(rollout) * len(rollout.steps))
    images = keep.nonzero().flatten()
    device = rollout.states.device
    rows = images.repeat(len(rollout.steps))
    columns = torch.arange(len(rollout.steps)).repeat_interleave(len(images))
    steps = torch.tensor(rollout.steps, device=device)
    parts = zip(rows.split(size), columns.split(size), strict=True)
    for i, (r, c) in enumerate(parts):
        r, c = r.to(device), c.to(device)
        yield Pairs(
            rows=r,
            columns=c,
            steps=steps[c],
            sigma=rollout.sigmas.to(device)[steps[c]],
            x=rollout.states[r, c],
            x_next=None if rollout.next_states is None else rollout.next_states[r, c],
            old_log_prob=None if rollout.log_probs is None else rollout.log_probs[r, c],
            conditioning=rollout.conditioning.select(r),
            size=size,
            first=i == 0,
        )


def filled(parts: Iterable[Pairs], count: int) -> Iterator[tuple[Pairs, float]]:
    """The micro-batches with weight 1, then, up to `count`, the last one again with weight 0: for a
    process whose turns must be as many as another's."""
    for pairs in parts:
        count -= 1
        yield pairs, 1.0
    for _ in range(count):
        yield replace(pairs, first=False), 0.0


class Loop:
    """A run: its adapter, optimizer, EMA, prompts, log and checkpoints."""

    def __init__(
        self,
        config: TrainingStage,
        backbone: Backbone,
        accelerator: Accelerator,
        prompts: PromptSampler,
        algorithm: Algorithm,
        evaluate: Callable[[], tuple[float, EvalReport]] | None = None,
        on_update: Callable[[int, Mapping[str, float]], None] = lambda update, metrics: None,
        draw: Callable[[Path, Tensor, list[str]], None] = lambda path, images, captions: None,
    ) -> None:
        self.config, self.backbone, self.accelerator = config, backbone, accelerator
        self.prompts, self.algorithm, self.evaluate = prompts, algorithm, evaluate
        self.on_update, self.draw = on_update, draw
        self.folder = Path(config.output)
        self.checkpoints = checkpoint.Checkpoints(self.folder / "checkpoints", config.train.keep)
        self.parameters = backbone.adapter_parameters(STUDENT)
        inner = optimizer(config, self.parameters)
        self.parallel = parallel.of(accelerator)
        self.optimizer = self.parallel.prepare(config, backbone, inner)
        self.lr = learning_rate(config, inner)
        self.ema = MovingAverage(self.parameters, **config.ema.model_dump()) if config.ema else None
        self.update = 0  # rollouts done
        self.steps = 0  # optimizer steps done
        self.evaluated = -1  # update of the last evaluation
        self.best: dict[str, float] = {}
        self.alarm = Alarm()
        self._settled()

    # The main path -----------------------------------------------------------------------------

    def run(self) -> None:
        """To the configured end. Ctrl-C leaves a checkpoint of the last whole update (in a run of
        several processes, which it meets at different points, only those written before)."""
        train = self.config.train
        self._settled()
        try:
            self._evaluate()
            while self.update < train.updates:
                self._one_update()
                self._evaluate()
                if self.update == train.updates or self._due(train.checkpoint_every):
                    self.save()
        except KeyboardInterrupt:
            if self._whole and self.accelerator.num_processes == 1:
                checkpoint.set_rng(self._rng)
                self.save()
            raise
        if self.evaluate is None:
            with self.averaged():
                self._keep_adapter({})
        elif self.evaluated != self.update == train.updates:
            raise TrainingError(
                f"update {self.update}: the last evaluation lost too many images (the warnings say "
                "why), so nobody knows whether its adapter is the best. Mend the reward and run "
                "again with --resume: only the evaluation is taken again."
            )

    def _one_update(self) -> None:
        """One rollout and what is learnt from it; Ctrl-C does not leave the learning half done."""
        began = time.perf_counter()
        rollout = self.rollout(self.update)
        sampled = time.perf_counter()
        prepared = self.algorithm.prepare(rollout, self.update)
        scored = time.perf_counter()
        with interrupts_held():
            self._whole = False
            states = prepared.states or rollout
            metrics = dict(prepared.metrics) | self._learn(states, prepared.keep)
            if self._due(self.config.train.sample_every, offset=1):
                self._draw(rollout, prepared.captions)
            done = time.perf_counter()
            images = len(rollout) * self.accelerator.num_processes
            metrics |= {
                "seconds/rollout": sampled - began,
                "seconds/score": scored - sampled,
                "seconds/update": done - scored,
                "images_per_second": images / (done - began),
            }
            self.update += 1
            self.alarm.update(metrics)
            self._log(metrics)
            self._settled()

    def _settled(self) -> None:
        """Remember the global generators: what happened up to here is whole."""
        self._rng = checkpoint.get_rng()
        self._whole = True

    def rollout(self, update: int) -> Rollout:
        """The trajectories of this process for an update: a function of seed, update, weights."""
        settings = self.config.rollout
        places = shard(
            settings.prompts,
            settings.copies,
            self.config.optimizer.updates_per_rollout,
            self.accelerator.process_index,
            self.accelerator.num_processes,
        )
        batch = self.prompts.batch(update).select([prompt for prompt, _ in places])
        return sample(
            self.backbone,
            batch,
            self.algorithm.plan(update),
            guidance=settings.guidance,
            noise=Noise((self.config.seed, update), settings.shared_noise),
            places=places,
            batch_size=settings.batch_size,
            decode=self.algorithm.needs_images,
            finish=self.algorithm.needs_images or self.algorithm.needs_latents,
            sources=self.algorithm.sources(batch.tasks),
            see=self.algorithm.see,
        )

    def _learn(self, rollout: Rollout, keep: Tensor) -> dict[str, float]:
        """The optimizer steps of one rollout, each on an equal share of its images (`shard`)."""
        seen: Seen = defaultdict(list)
        shares = self.config.optimizer.updates_per_rollout
        size = len(rollout) // shares
        for share in range(shares):
            mine = torch.zeros(len(rollout), dtype=torch.bool)
            mine[share * size : (share + 1) * size] = True
            self._step(rollout, mine, mine & keep.cpu(), seen)
        return mean_over_processes(seen)

    def _step(self, rollout: Rollout, share: Tensor, keep: Tensor, seen: Seen) -> None:
        """One optimizer step: the mean loss over all pairs of the share, dropped images as 0.
        What was measured is added to `seen`."""
        if not keep.any():  # every process must take part in the gradient's reduction
            keep = keep | (torch.arange(len(keep)) == share.nonzero()[0])
        count = int(share.sum()) * len(rollout.steps)
        size = min(self.config.optimizer.micro_batch, count)
        batches = self.parallel.most(math.ceil(int(keep.sum()) * len(rollout.steps) / size))
        for i, (pairs, weight) in enumerate(filled(pairs_of(rollout, keep, size), batches)):
            with self.parallel.learning(self.backbone.transformer, last=i == batches - 1):
                found = self.algorithm.loss(pairs, self.velocity(pairs))
                self.accelerator.backward(found.total * (weight * len(pairs.rows) / count))
            metrics = {"loss": float(found.total.detach()), **found.metrics}
            for name, value in metrics.items() if weight else ():
                seen[name].append((value, found.counts.get(name, len(pairs.rows))))
        seen["lr"].append((float(self.lr.get_last_lr()[0]), 1))
        seen["grad_norm"].append((self._descend(), 1))

    def velocity(self, pairs: Pairs) -> Tensor:
        """The student's velocity [b,C,h,w] at the pairs: the forward path of the rollout."""
        return velocity(self.backbone, pairs, self.algorithm.guidance)

    def _descend(self) -> float:
        self.parallel.average(self.parameters)
        norm = self.accelerator.clip_grad_norm_(
            self.parameters, self.config.optimizer.max_grad_norm
        )
        norm = float(norm) if norm is not None else float("nan")
        if not math.isfinite(norm) and self.accelerator.scaler is None:
            raise TrainingError(
                f"update {self.update}: the gradient is not finite. The last checkpoint is "
                f"{self.checkpoints.latest()}; lower optimizer.lr, or use bfloat16 for float16."
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.lr.step()
        self.steps += 1
        if self.ema:
            self.ema.step(self.parameters, self.steps)
        return norm

    # Evaluation, log and pictures --------------------------------------------------------------

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """With the EMA's weights in place of the student's."""
        with self.ema.of(self.parameters, self.steps) if self.ema else nullcontext():
            yield

    def _evaluate(self) -> None:
        """Where it is due: score the averaged adapter on held-out prompts; the best one becomes
        the result. One that lost too many images does not count, as if it had not been taken."""
        settings = self.config.evaluation
        if self.evaluate is None or settings is None or self.evaluated == self.update:
            return
        last = self.update == self.config.train.updates
        if not (last or self._due(settings.every)):
            return
        with self.averaged():
            headline, report = self.evaluate()
            with interrupts_held():
                known = [row for row in report.rows if row.benchmark not in report.lost]
                rows = {f"{r.benchmark}/{r.metric}": (r.mean, r.stderr) for r in known}
                means = {f"eval/{name}": mean for name, (mean, _) in rows.items()}
                if report.lost and self.accelerator.is_main_process:
                    for text in report.lost.values():
                        log.warning("update %d: the evaluation lost %s", self.update, text)
                if math.isnan(headline):
                    self._log({"eval/lost": len(report.lost), **means})
                    return
                alarms = self.alarm.look(rows)
                self._log({"eval/headline": headline, **means, "alarms": len(alarms)})
                if self.accelerator.is_main_process:
                    for text in alarms:
                        log.warning("update %d: %s", self.update, text)
                if headline > self.best.get("headline", float("-inf")):
                    self.best = {"headline": headline, "update": self.update}
                    self._keep_adapter(self.best)
                self.evaluated = self.update
                self._settled()

    def _keep_adapter(self, scores: Mapping[str, float]) -> None:
        if self.accelerator.is_main_process:
            self.backbone.save_adapter(STUDENT, self.folder / "adapter")
            (self.folder / "adapter" / "scores.json").write_text(json.dumps(dict(scores)))

    def _log(self, metrics: Mapping[str, float]) -> None:
        if self.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps({"update": self.update, **metrics}) + "\n")
            self.on_update(self.update, metrics)
        self.accelerator.log(dict(metrics), step=self.update)

    def _draw(self, rollout: Rollout, captions: list[str]) -> None:
        if self.accelerator.is_main_process and rollout.images is not None:
            path = self.folder / "samples" / f"update_{self.update + 1:06d}.png"
            self.draw(path, rollout.images, captions)
            if path.is_file():
                trackers.image(self.accelerator, "samples", path, self.update + 1)

    def _due(self, every: int, offset: int = 0) -> bool:
        return (self.update + offset) % every == 0

    # Checkpoints -------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Any]:
        tensors = {"adapter": self.parameters}
        return tensors | ({"ema": self.ema.shadow_params} if self.ema else {})

    def save(self) -> Path:
        """A complete checkpoint of this moment."""
        scaler = self.accelerator.scaler
        states = {
            "optimizer": self.parallel.optimizer_state(self.optimizer),
            "lr": self.lr.state_dict(),
            "scaler": scaler.state_dict() if scaler else {},
        }
        return self.checkpoints.save(
            self.update,
            self.accelerator,
            tensors=self._tensors(),
            states=states,
            progress={
                "steps": self.steps,
                "evaluated": self.evaluated,
                "best": self.best,
                "alarm": self.alarm.state(),
            },
        )

    def resume(self) -> bool:
        """Continue from the newest complete checkpoint; False if there is none."""
        folder = self.checkpoints.latest()
        if folder is None:
            return False
        found = checkpoint.load(folder, self.accelerator.process_index, self._tensors())
        states, progress = found["states"], found["progress"]
        self.parallel.load_optimizer_state(self.optimizer, states["optimizer"])
        self.lr.load_state_dict(states["lr"])
        if self.accelerator.scaler and states["scaler"]:
            self.accelerator.scaler.load_state_dict(states["scaler"])
        self.update, self.steps = progress["update"], progress["steps"]
        self.evaluated, self.best = progress["evaluated"], progress["best"]
        self.alarm.load(progress["alarm"])
        self._cut_log()
        return True

    def _cut_log(self) -> None:
        """Forget log lines after the checkpoint, and one that a kill cut short: they come again."""
        path = self.folder / "metrics.jsonl"
        if not (self.accelerator.is_main_process and path.exists()):
            return
        kept = []
        for line in path.read_text().splitlines(keepends=True):
            row = json.loads(line) if line.endswith("}\n") else {"update": math.inf}
            evaluation = any(name.startswith("eval/") for name in row)
            done = self.evaluated if evaluation else self.update
            kept += [line] if row["update"] <= done else []
        part = path.with_suffix(".part")
        part.write_text("".join(kept))
        os.replace(part, path)


def velocity(backbone: Backbone, pairs: Pairs, guidance: float) -> Tensor:
    """The active adapter's velocity [b,C,h,w] at the pairs, from a forward pass of `pairs.size`
    rows; those that are too many repeat the last one, and carry no gradient."""
    count = len(pairs.rows)
    rows = torch.arange(pairs.size, device=pairs.x.device).clamp(max=count - 1)
    x, sigma, cond = pairs.x[rows], pairs.sigma[rows], pairs.conditioning.select(rows)
    return backbone.velocity(x, sigma, cond, guidance=guidance)[:count]


def mean_over_processes(seen: Mapping[str, Sequence[tuple[float, int]]]) -> dict[str, float]:
    """The mean of each name's (mean, count)s, over all processes that have some."""
    sums = {name: (sum(v * n for v, n in vs), sum(n for _, n in vs)) for name, vs in seen.items()}
    everyone: list[Mapping[str, tuple[float, int]]] = gather_object([sums])
    found = {
        name: [each[name] for each in everyone if name in each] for row in everyone for name in row
    }
    return {k: sum(total for total, _ in vs) / sum(n for _, n in vs) for k, vs in found.items()}


@contextmanager
def interrupts_held() -> Iterator[None]:
    """A Ctrl-C inside the `with` takes effect at its end; a second one at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is interrupted
        return
    caught: list[int] = []

    def hold(number: int, frame: object) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    before = signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if caught:
        raise KeyboardInterrupt


def schedule(backbone: Backbone, config: TrainingStage) -> Schedule:
    """The schedule of a config's rollouts: by default every step but the last is trained."""
    rollout = config.rollout
    sigmas = backbone.sigmas(rollout.steps)
    return Schedule(sigmas, rollout.kind, rollout.noise_level, rollout.trained)


def optimizer(config: TrainingStage, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW over the adapter, or its 8-bit form from bitsandbytes."""
    o = config.optimizer
    if o.name == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit as kind  # type: ignore[import-not-found]
    else:
        kind = torch.optim.AdamW
    return kind(parameters, lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay)


def learning_rate(config: TrainingStage, optimizer: torch.optim.Optimizer) -> LambdaLR:
    """diffusers' schedule of that name, over the optimizer steps of the whole run."""
    o = config.optimizer
    name = "constant_with_warmup" if o.schedule == "constant" else o.schedule
    total = config.train.updates * o.updates_per_rollout
    return get_scheduler(name, optimizer, num_warmup_steps=o.warmup, num_training_steps=total)
