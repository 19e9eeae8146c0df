"""How a run shows itself: a rich bar on a terminal, one plain line per update in a log."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from flowalign import metrics

SHOWN = {
    metrics.REWARD: "reward {:.3f}",
    metrics.DISTILL: "distance {:.4f}",
    metrics.KL: "KL {:.2e}",
    metrics.CLIP_FRACTION: "clip {:.0%}",
    metrics.IMAGES_PER_SECOND: "{:.1f} images/s",
    metrics.HEADLINE: "held-out {:.3f}",
    metrics.LOST: "held-out scores are missing",
}


class Progress:
    """Shows the updates of a run; silent on all processes but the main one."""

    def __init__(self, total: int, main: bool) -> None:
        self.console = Console(stderr=True)
        self.main, self.total = main, total
        self.held_out = ""  # of the last evaluation; shown beside every later update
        self.bar: Bar | None = None  # None in a log file

    def begin(self, loop) -> None:
        """Start the bar at the update that the loop is at."""
        if self.main and self.console.is_terminal:
            self.bar = Bar(
                TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(),
                TimeRemainingColumn(), TextColumn("{task.fields[figures]}"), console=self.console,
            )  # fmt: skip
            self.bar.add_task("update", total=self.total, completed=loop.update, figures="")
            self.bar.start()

    def update(self, update: int, values: Mapping[str, float]) -> None:
        """Show the metrics of an update, or of an evaluation."""
        if not self.main:
            return
        line = "  ".join(text.format(values[k]) for k, text in SHOWN.items() if k in values)
        if metrics.HEADLINE in values:
            self.held_out, line = line, ""
        if self.bar:
            figures = f"{line}  {self.held_out}" if line else self.held_out
            self.bar.update(self.bar.task_ids[0], completed=update, figures=figures)
        else:
            text = f"update {update}/{self.total}  {line or self.held_out}"
            self.console.print(text, soft_wrap=True)  # one line each, for grep

    def end(self) -> None:
        """Leave the terminal in order."""
        if self.bar:
            self.bar.stop()


def quiet() -> None:
    """Silence the loading bars of the libraries; errors and our own log stay. To be called before
    the libraries are imported, since some warn at their import."""
    import logging
    import warnings

    warnings.filterwarnings("ignore", "IProgress not found")  # tqdm's, in notebooks
    from diffusers.utils import logging as diffusers_log
    from transformers.utils import logging as transformers_log

    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    for name in ("httpx", "RapidOCR", "onnxruntime", "matplotlib", "PIL"):  # they log at INFO
        logging.getLogger(name).setLevel(logging.WARNING)
    for library in (diffusers_log, transformers_log):
        library.disable_progress_bar()
        library.set_verbosity_error()
