"""Progress of a run: one line per update. Its warnings are also kept in warnings.jsonl."""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from statistics import fmean

from flowalign.config import TrainingStage
from flowalign.system.escape import harmless
from flowalign.system.folder import RunFolder
from flowalign.training import metrics

LONGEST_WARNING = 4000  # characters of a warning
CLOCK = "%Y-%m-%d %H:%M:%S"  # of every line of a log
OnMetrics = Callable[[dict[str, float]], object]
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
FIGURES = {  # shown for an update: {metric: (label, format)}
    metrics.LOSS: ("loss", "{:.3g}"),  # if there is nothing else
    metrics.REWARD: ("reward", "{:.3f}"),
    metrics.DISTILL: ("distance to the teachers", "{:.4f}"),
    metrics.KL: ("KL to the base", "{:.2e}"),
    metrics.VELOCITY_DRIFT: ("velocity drift", "{:.2e}"),
    metrics.CLIP_FRACTION: ("clipped", "{:.0%}"),
    metrics.INVALID_SHARE: ("without a score", "{:.1%}"),
    metrics.IMAGES_PER_SECOND: ("images/s", "{:.2g}"),
}


def figures(values: Mapping[str, float]) -> list[tuple[str, str]]:
    """(label, number) of each of FIGURES that an update has."""
    names = [name for name in FIGURES if name in values]
    if len({metrics.LOSS, metrics.REWARD, metrics.DISTILL}.intersection(names)) > 1:
        names.remove(metrics.LOSS)  # a policy's loss is always about 0
    labelled = ((values[name], *FIGURES[name]) for name in names)
    return [(label, style.format(value)) for value, label, style in labelled]


class Progress:
    """Shows each update of a run as a line: time, figures, speed, time left. Calls on_update, if
    that is set. Silent on all processes but the main one."""

    def __init__(self, config: TrainingStage, main: bool) -> None:
        self.main = main
        self.total = config.train.updates
        self.folder = Path(config.output)
        self.on_update: OnMetrics | None = None
        self.done = 0  # updates
        self.seconds = deque[float](maxlen=10)  # of the last updates

    def live(self, update: int) -> AbstractContextManager[None]:
        """Record warnings during the run, which starts after `update` updates."""
        self.done = update
        return recorded(self.folder, self.main, lambda: self.done)

    def update(self, update: int, values: Mapping[str, float]) -> None:
        if not self.main:
            return
        self.done = update
        line = "  ".join(map(" ".join, figures(values)))
        if metrics.HEADLINE in values:
            line = metrics.headline_metrics(values)
        elif metrics.LOST in values:
            line = "held-out scores are missing"
        else:
            self.seconds.append(sum(values.get(name, 0.0) for name in metrics.SECONDS))
        parts = [f"update {update}/{self.total}", line]
        if self.seconds:
            left = timedelta(seconds=round(fmean(self.seconds) * (self.total - update)))
            parts += [f"{self.seconds[-1]:.3g} s/update", f"ETA {left}"]
        # not through rich: FORCE_COLOR would put colours into a log
        print(time.strftime(CLOCK), "  ".join(filter(None, parts)), file=sys.stderr, flush=True)
        if self.on_update:
            self.on_update({metrics.UPDATE: update, **values})


@contextmanager
def recorded(
    folder: Path, active: bool = True, update: Callable[[], int] = lambda: 0
) -> Iterator[None]:
    """Inside the `with`, flowalign's warnings are appended to warnings.jsonl in a folder, with
    their time (Unix, seconds) and update. A full disk does not end the run. active: whether this
    process writes the file."""

    path = RunFolder(folder).warnings

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            row = {"time": record.created, "update": update()}
            row["text"] = record.getMessage()[:LONGEST_WARNING]
            with suppress(OSError), open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    logger = logging.getLogger("flowalign")
    recorder = Recorder(logging.WARNING)
    if active:
        logger.addHandler(recorder)
    try:
        yield
    finally:
        logger.removeHandler(recorder)


def quiet() -> None:
    """Silence the progress bars of the libraries; errors and our own log stay. Call it before the
    libraries are imported, because some warn at import."""
    warnings.filterwarnings("ignore", "IProgress not found")  # tqdm's, in notebooks
    from diffusers.utils import logging as diffusers_log
    from transformers.utils import logging as transformers_log

    class Plain(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return harmless(super().format(record))  # reasons and prompts are untrusted texts

    handler = logging.StreamHandler()
    handler.setFormatter(Plain(LOG_FORMAT, CLOCK))
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    for name in ("httpx", "RapidOCR", "onnxruntime", "matplotlib", "PIL"):  # they log at INFO
        logging.getLogger(name).setLevel(logging.WARNING)
    for library in (diffusers_log, transformers_log):
        library.disable_progress_bar()
        library.set_verbosity_error()
