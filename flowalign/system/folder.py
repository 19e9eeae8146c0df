"""The names in the folder of a run, a recipe, a merge or an evaluation."""

from __future__ import annotations

from pathlib import Path


class RunFolder:
    """The paths in a folder; each kind of stage has some of them. The disk is not accessed."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"  # complete, without `use`
        self.lock = self.path / ".lock"
        self.page = self.path / "report.html"
        self.warnings = self.path / "warnings.jsonl"
        # a training run
        self.log = self.path / "metrics.jsonl"  # each checkpoint has a copy
        self.curves = self.path / "metrics.png"
        self.samples = self.path / "samples"
        self.checkpoints = self.path / "checkpoints"
        self.tensorboard = self.path / "tensorboard"
        self.wandb = self.path / "wandb"
        self.wandb_run = self.path / "wandb_run.txt"  # the id under which a resumed run goes on
        # the adapter of a run or a merge
        self.adapter = self.path / "adapter"  # the best that was evaluated, else the last
        self.scores = self.adapter / "scores.json"  # of the evaluation that chose it, {} if none
        self.card = self.adapter / "README.md"
        self.merge = self.path / "report.md"  # a merge's adapters, method and error by layer
        # an evaluation
        self.results = self.path / "results.json"
        self.table = self.path / "table.md"
        self.grid = self.path / "grid.png"
        self.images = self.path / "images"
        # a finished stage of a recipe
        self.done = self.path / "done.json"  # a manifest: its config, and what it was made from

    def stage(self, name: str) -> RunFolder:
        """The folder of a stage of a recipe."""
        return RunFolder(self.path / name)
