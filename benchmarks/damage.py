"""Damages what a run has kept, and continues the run: `python benchmarks/damage.py`.

Each file of a checkpoint, of `adapter/`, of the log and of finished stages of a recipe is cut,
emptied, deleted, replaced by an older one, or has one bit flipped in its head, middle or tail;
folders are empty, half, or of another run. Then the same command is given again. A row of the table
is right if the damage was named, if there was no traceback, and if the end has the files of the run
that nobody damaged (`same_files`), or if the run was refused where nothing sound was left.
Exit status: 0 all right, 1 not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import kill_test
import killing
import same_files
import torch
from killing import OUT

Harm = Callable[[Path], None]
LAST, BEFORE = "update_000005", "update_000004"  # the checkpoints that a run of training keeps
REFUSED = 2  # exit status
# What a run writes after its last update: it is not there yet when a run is killed before.
FINAL = ("metrics.png", "before_after.png", "report.html", "adapter/README.md")


# Harms -------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    """Keep the first half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path: Path) -> None:
    """No bytes."""
    path.write_bytes(b"")


def flipped(where: float, path: Path) -> None:
    """One bit, at this share of the file."""
    content = bytearray(path.read_bytes())
    content[int(where * (len(content) - 1))] ^= 1
    path.write_bytes(content)


HARMS: dict[str, Harm] = {
    "cut": cut,
    "emptied": emptied,
    "deleted": Path.unlink,
    "bit in head": partial(flipped, 0.0),
    "bit in middle": partial(flipped, 0.5),
    "bit in tail": partial(flipped, 1.0),
}


def swapped(older: Path, path: Path) -> None:
    """The file of an older state in its place."""
    shutil.copyfile(older, path)


# Cases -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A damage, the command that goes on, and what is expected.

    kind: of the scenario, one of kill_test.KINDS. what: the file or folder, and harm: what is done
    to it. damage: does it, given the run's folder. named: the words of which one must be said; ()
    for a damage that is of no consequence. code: the exit status. left: what the damage added and
    nobody removes.
    """

    kind: str
    what: str
    harm: str
    damage: Harm
    named: tuple[str, ...]
    code: int = 0
    left: tuple[str, ...] = ()


def of_file(kind: str, name: str, named: str, older: Path | None = None) -> Iterator[Case]:
    """All harms to one file of a run. named: what is said of it, "" for nothing. older: what it is
    swapped with."""
    harms = dict(HARMS)
    if older is not None:
        harms["swapped"] = partial(swapped, older)
    for harm, damage in harms.items():
        yield Case(
            kind, name, harm, lambda run, damage=damage: damage(run / name), (named,) * bool(named)
        )


def of_checkpoint(run: Path) -> Iterator[Case]:
    """Each file of the newest checkpoint of an undamaged run, its folder, and all checkpoints."""
    newest, older = run / "checkpoints" / LAST, run / "checkpoints" / BEFORE
    for path in sorted(path for path in newest.rglob("*") if path.is_file()):
        inner = path.relative_to(newest)
        other = older / inner
        differs = other.exists() and other.read_bytes() != path.read_bytes()
        name = path.relative_to(run).as_posix()
        yield from of_file("grpo", name, path.name, other if differs else None)
    place = newest.relative_to(run)

    def half(run: Path) -> None:
        for name in ("manifest.json", "states.pt", "progress.json"):
            (run / place / name).unlink()

    def empty(run: Path) -> None:
        shutil.rmtree(run / place)
        (run / place).mkdir()

    def copied(run: Path) -> None:
        shutil.rmtree(run / place)
        shutil.copytree(older, run / place)

    def foreign(run: Path) -> None:
        shutil.rmtree(run / place)
        shutil.copytree(run.parents[2] / "opd_1/whole" / OUT / "checkpoints" / LAST, run / place)

    def beside(run: Path) -> None:
        shutil.copytree(run / place, run / "checkpoints" / f"{LAST}.bak")
        (run / "checkpoints" / "update_000007").touch()

    def everywhere(run: Path) -> None:
        for folder in (run / "checkpoints").iterdir():
            emptied(folder / "states.pt")

    for harm, damage in {"empty": empty, "half": half, "older": copied, "foreign": foreign}.items():
        yield Case("grpo", str(place), harm, damage, (LAST,))
    left = (f"{place}.bak", "checkpoints/update_000007")
    yield Case("grpo", f"{place}.bak", "beside", beside, (), left=left)
    yield Case("grpo", "checkpoints", "all damaged", everywhere, ("states.pt",), REFUSED)


def of_run(run: Path) -> Iterator[Case]:
    """The adapter and the log of a run: both come back from the checkpoint without a word."""
    older = run / "checkpoints" / BEFORE
    for path in sorted((run / "adapter").iterdir()):
        if path.name != "README.md":
            other = older / "kept" / path.name
            differs = other.exists() and other.read_bytes() != path.read_bytes()
            name = path.relative_to(run).as_posix()
            yield from of_file("grpo", name, "", other if differs else None)
    yield Case("grpo", "adapter", "deleted", lambda run: shutil.rmtree(run / "adapter"), ())
    yield from of_file("grpo", "metrics.jsonl", "")


def of_stages(run: Path) -> Iterator[Case]:
    """Each file that a finished stage of a recipe vouches for, and what vouches."""
    for stage in ("teacher", "merged", "student", "table"):
        for name in sorted(json.loads((run / stage / "done.json").read_text())["files"]):
            yield from of_file("recipe", f"{stage}/{name}", Path(name).name)
        harms = {harm: HARMS[harm] for harm in HARMS if harm != "deleted"}
        for harm, damage in harms.items():
            path = f"{stage}/done.json"
            yield Case(
                "recipe", path, harm, lambda run, p=path, d=damage: d(run / p), ("done.json",)
            )


# Running -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """How a case ended. wrong: what is not as promised. said: the line that named the damage."""

    case: Case
    wrong: list[str]
    said: str


def killed(whole: Path, folder: Path, kind: str) -> Path:
    """A copy of an undisturbed run; of a training, as if it had been killed after its last
    checkpoint."""
    run = Path(shutil.copytree(whole / OUT, folder / OUT))
    for name in FINAL if kind != "recipe" else ():
        (run / name).unlink(missing_ok=True)
    return run


def tried(base: Path, number: int, case: Case) -> Row:
    """Damage a copy, run the command again, compare."""
    scenario = kill_test.Scenario(base, case.kind, 1)
    folder = scenario.folder / f"damaged_{number}"
    case.damage(killed(scenario.whole, folder, case.kind))
    (code,) = killing.run(folder, scenario.argv(True)).codes
    log = (folder / "log.0").read_text(errors="replace")
    wrong = [] if code == case.code else [f"exit status {code}"]
    wrong += ["traceback"] if "Traceback" in log else []
    lines = [line for line in log.splitlines() if any(word in line for word in case.named)]
    said = next((line for line in lines if "WARNING" in line or "--resume:" in line), "")
    wrong += ["not named"] if case.named and not said else []
    if case.code == 0:
        lines = same_files.differences(scenario.whole / OUT, folder / OUT)
        wrong += [line for line in lines if not line.startswith(case.left or "?")]
    if not wrong:
        shutil.rmtree(folder)
    return Row(case, wrong, said.replace(str(folder), "").strip())


def all_tried(base: Path, cases: Sequence[Case], workers: int) -> Iterator[Row]:
    """The rows of all cases. Processes are forked, as a case cannot be sent to one."""
    files = [base / f"rows.{worker}.jsonl" for worker in range(workers)]
    for worker, file in enumerate(files):
        if os.fork():
            continue
        try:
            with open(file, "w") as rows:
                for number in range(worker, len(cases), workers):
                    row = tried(base, number, cases[number])
                    rows.write(json.dumps([number, row.wrong, row.said]) + "\n")
                    rows.flush()
                    if row.wrong:
                        print(
                            f"{number}: {row.case.what}, {row.case.harm}: {row.wrong}", flush=True
                        )
        finally:
            os._exit(0)
    for _ in files:
        os.wait()
    ended = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    results = {number: (wrong, said) for number, wrong, said in ended}
    for number, case in enumerate(cases):
        wrong, said = results.get(number, (["the test itself failed"], ""))
        yield Row(case, wrong, said)


def report(rows: Sequence[Row]) -> str:
    """A line for each file or folder, with its harms."""
    lines = ["| run | file or folder | harms | named | continued as if nothing had been |",
             "|---|---|---|---|---|"]  # fmt: skip
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.case.kind, row.case.what), []).append(row)
    for (kind, what), group in groups.items():
        harms = ", ".join(row.case.harm for row in group)
        named = sum("not named" not in row.wrong for row in group)
        refused = any(row.case.code for row in group)
        right = "refused" if refused else f"{sum(not r.wrong for r in group)} of {len(group)}"
        lines.append(f"| {kind} | {what} | {harms} | {named} of {len(group)} | {right} |")
    wrong = sum(bool(row.wrong) for row in rows)
    traces = sum("traceback" in row.wrong for row in rows)
    kinds = Counter(row.case.harm for row in rows)
    lines.append(f"\n{len(rows)} damages ({', '.join(f'{n} {h}' for h, n in kinds.items())}): ")
    return "\n".join(lines) + f"{len(rows) - wrong} right, {wrong} wrong, {traces} tracebacks"


def quick(cases: Sequence[Case]) -> list[Case]:
    """One harm a file, another for each, and all of the folders; of the files of stages every
    fifth."""
    files: dict[str, list[Case]] = {}
    for case in cases:
        files.setdefault(case.what, []).append(case)
    chosen = [group[i % len(group)] for i, group in enumerate(files.values())]
    stages = [case for case in chosen if case.kind == "recipe"]
    return [case for case in chosen if case.kind != "recipe"] + stages[::5]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one harm a file")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--folder", type=Path, help="where the runs lie; default: a temporary one")
    args = parser.parse_args(argv)
    began = time.monotonic()
    base = (args.folder or Path(tempfile.mkdtemp(prefix="damage_"))).resolve()
    base.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # threads do not survive a fork
    if os.fork() == 0:  # what computes is no process that others are forked from
        kill_test.prepare(base)
        os._exit(0)
    os.wait()
    kinds = ("recipe", "grpo", "opd")
    recipe, grpo, opd = (kill_test.Scenario(base, kind, 1) for kind in kinds)
    kill_test.reference(recipe)
    killing.preload(recipe.whole)
    for scenario in (grpo, opd):
        kill_test.reference(scenario)
    whole = grpo.whole / OUT
    cases = [*of_checkpoint(whole), *of_run(whole), *of_stages(recipe.whole / OUT)]
    rows = list(all_tried(base, quick(cases) if args.quick else cases, args.workers))
    print(f"\n{report(rows)}\n{time.monotonic() - began:.0f} s, {base}")
    return int(any(row.wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main())
