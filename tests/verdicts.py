"""Does `flowalign doctor` refuse what `train` and `eval` refuse? `python tests/verdicts.py`

Every shipped config of configs/tiny and configs/sd35_medium, in four worlds. Each is a process
of its own, with prompt sets, adapters on a Hub, and optional packages that are there or not. A
command is followed until it would load weights: that is its verdict "starts".
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORLDS = {  # what is missing
    "all extras": "",
    "no extras": "extras",
    "missing prompts": "prompts",
    "missing adapters": "adapters",
}
CONFIGS = [
    path.relative_to(ROOT).as_posix()
    for folder in ("tiny", "sd35_medium")
    for path in sorted((ROOT / "configs" / folder).glob("[!_]*.yaml"))
]
Verdict = tuple[int, list[str]]  # exit status (0 = it starts), problems


class Started(BaseException):
    """A command has come to its first weights."""


class Without:
    """A finder of modules that does not find some packages."""

    def __init__(self, finder: Any, hidden: set[str]) -> None:
        self.finder, self.hidden = finder, hidden

    def find_spec(self, name: str, *rest: Any) -> Any:
        find = getattr(self.finder, "find_spec", None)
        return None if name.split(".")[0] in self.hidden or not find else find(name, *rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)


def examined() -> dict[str, dict[str, dict[str, Verdict]]]:
    """{world: {config: {command: its verdict}}}."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_TELEMETRY": "1"}
    found = {}
    for world, missing in WORLDS.items():
        command = [sys.executable, __file__, "--missing", missing]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise RuntimeError(f"{world}: {done.stderr}")
        found[world] = json.loads(done.stdout.splitlines()[-1])
    return found


# In the process of a world ---------------------------------------------------------------------


def look(missing: str) -> dict[str, dict[str, Verdict]]:
    """The verdicts of both commands about every config, in this world."""
    sys.path.insert(0, str(ROOT / "tests"))
    from flowalign.system import packages

    hidden = set(packages.EXTRAS) if missing == "extras" else set()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        os.chdir(folder)
        if hidden:
            sys.meta_path[:] = [Without(finder, hidden) for finder in sys.meta_path]
        elif not packages.installed("open_clip"):
            (folder / "extra" / "open_clip").mkdir(parents=True)
            (folder / "extra" / "open_clip" / "__init__.py").touch()
            sys.path.append(str(folder / "extra"))
        stack.enter_context(hub(folder, empty=missing == "adapters"))
        if missing != "prompts":
            write_prompts(folder / "data")
        stop_at_weights()
        return {config: both(str(ROOT / config)) for config in CONFIGS}


def both(config: str) -> dict[str, Verdict]:
    """What doctor says, and the command that runs the config."""
    from flowalign.config import EvalStage, Stage, load

    runs = "eval" if isinstance(load(config, stage=Stage), EvalStage) else "train"
    return {
        "doctor": verdict(["doctor", "--config", config, "--no-model"]),
        runs: verdict([runs, "--config", config]),
    }


def verdict(argv: list[str]) -> Verdict:
    """Exit status and problems of a command, which stops at its first weights."""
    from accelerate.state import AcceleratorState

    from flowalign.commands.cli import main

    AcceleratorState._reset_state(reset_partial_state=True)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            status = main(argv)
        except Started:
            status = 0
    mark = r"^ fault  (.+)" if argv[0] == "doctor" else r"^  - (.+)"
    # doctor's other faults come later, below the name of a stage
    text = printed.getvalue().split("downloads: ")[0]
    return status, re.findall(mark, text, re.MULTILINE) if status == 2 else []


def stop_at_weights() -> None:
    """Whatever would load weights raises Started; of doctor's predictions, which load none, only
    their time is saved."""
    from flowalign import rewards
    from flowalign.backbone import Backbone
    from flowalign.commands.doctor import predictions
    from flowalign.teachers import merge

    def stop(*args: Any, **options: Any) -> Any:
        raise Started

    def skip(*args: Any, **options: Any) -> Any:
        raise LookupError("left out")

    Backbone.load = rewards.build_on = merge.merge = stop
    predictions.predict = skip


def write_prompts(folder: Path) -> None:
    """Every set that a config names, a line each."""
    folder.mkdir()
    for name, thing in (("train", "kite"), ("val", "lamp"), ("test", "clock")):
        row = {"tag": "single_object", "include": [{"class": thing, "count": 1}]}
        row["prompt"] = f"a photo of a {thing}"
        (folder / f"geneval_{name}.jsonl").write_text(json.dumps(row))
        (folder / f"ocr_{name}.txt").write_text(f'a sign that says "{thing}"')
        (folder / f"pickscore_sfw_{name}.txt").write_text(f"a {thing} over a lake")
    (folder / "drawbench.txt").write_text("a clock over a lake")


@contextlib.contextmanager
def hub(folder: Path, *, empty: bool) -> Iterator[None]:
    """A Hub with the public teachers, each a layer of the right size, or with nothing."""
    import fake_hub
    import pytest
    import torch
    from safetensors.torch import save

    with fake_hub.serving() as served, pytest.MonkeyPatch.context() as patch:
        for number, name in enumerate(() if empty else fake_hub.PUBLIC):
            halves = {"A": torch.full((2, 1536), 1.0 + number), "B": torch.ones(1536, 2)}
            weights = {f"{fake_hub.LAYER}.lora_{h}.weight": w for h, w in halves.items()}
            served.put(name, {**fake_hub.PEFT, "adapter_model.safetensors": save(weights)})
        fake_hub.go_online(served, patch, folder / "cache")
        yield


# The table -------------------------------------------------------------------------------------


def differing(verdicts: Mapping[str, Verdict]) -> bool:
    """Whether the two commands differ in what they refuse, or why."""
    doctor, other = verdicts.values()
    return (doctor[0] == 2) != (other[0] == 2) or sorted(doctor[1]) != sorted(other[1])


def main() -> None:
    """Print a line for each world."""
    if "--missing" in sys.argv:
        print(json.dumps(look(sys.argv[2])))
        return
    print("| world | configs | both start | both refuse | problems | verdicts that differ |")
    print("|---|---|---|---|---|---|")
    for world, configs in examined().items():
        refused = [v["doctor"] for v in configs.values() if v["doctor"][0] == 2]
        wrong = [name for name, verdicts in configs.items() if differing(verdicts)]
        problems = sum(len(texts) for _, texts in refused)
        print(f"| {world} | {len(configs)} | {len(configs) - len(refused)} | {len(refused)} | "
              f"{problems} | {', '.join(wrong) or 'none'} |")  # fmt: skip


if __name__ == "__main__":
    main()
