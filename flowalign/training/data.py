"""Prompt sets, one per task, and the sampler that draws P prompts of mixed tasks per update."""

from __future__ import annotations

import csv
import io
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from itertools import islice
from math import lcm
from pathlib import Path
from typing import Any

from flowalign.backbone.tiny import PROMPTS
from flowalign.config import TrainingStage
from flowalign.system.files import by_number
from flowalign.training import sources
from flowalign.types import PromptBatch

Row = tuple[str, dict[str, Any]]  # a prompt, its metadata
DPG_COLUMNS = ("proposition_id", "dependency", "tuple", "question_natural_language")


class PromptError(ValueError):
    """A prompt set that is missing, empty or malformed."""


def load_prompts(source: str | Path, task: str) -> PromptBatch:
    """The prompts of a file or folder, in its order.

    `.txt`: one a line. `.jsonl`: an object a line, its key `prompt`; the other keys are metadata.
    `.csv`: a header with the column `prompt` (or `text`); the other columns are metadata, and rows
    of one `item_id` are one prompt (DPG-Bench's dpg_bench.csv has a row a question).
    `.json`: a list of prompts or of such objects, or a file of CVTG-2K. A folder: one prompt a
    `.txt`, whose name becomes the metadata `item_id` (DPG-Bench's prompts/), CVTG-2K's of
    SET/REGIONS.json, or GenEval's folder of images: one prompt a NUMBER/metadata.jsonl.
    `tiny/NAME` is a set that ships with the package. Blank lines are skipped, repeats are kept.
    `SET#WORDING` has the prompts in other words (`reworded`). Raises PromptError for a set that is
    missing, empty or malformed, or lacks that wording.
    """
    plain, mark, wordings = str(source).partition("#")
    if mark and not Path(source).exists():
        return reworded(load_prompts(plain, task), wordings, str(source))
    path = _locate(str(source))
    if path.is_dir():
        rows = _read_folder(path)
    elif reader := READERS.get(path.suffix.lower()):
        rows = reader(path, _text(path))
    else:
        raise PromptError(f"{path}: want a .txt, .jsonl, .csv or .json file, or a folder of them.")
    if not rows:
        raise PromptError(f"{path} holds no prompts. Write one a line.")
    prompts, metadata = map(list, zip(*rows, strict=True))
    return PromptBatch(prompts, [task] * len(prompts), metadata)


def reworded(prompts: PromptBatch, wordings: str, where: str) -> PromptBatch:
    """Prompts in other words; the metadata, by which they are judged, stay. wordings: one, or
    several separated by |; all prompts are repeated for each. A wording is a name in the metadata's
    `wordings` {name: prompt}, or a template such as "a photo of {prompt}"."""
    texts = []
    for wording in wordings.split("|"):
        for text, row in zip(prompts.prompts, prompts.metadata, strict=True):
            prompt_of = wordings_of(row)
            if not isinstance(prompt_of.get(wording), str) and "{prompt}" not in wording:
                have = (
                    f"has the wordings {', '.join(prompt_of)}" if prompt_of else "has no `wordings`"
                )
                raise PromptError(f"{where}: {text[:80]!r} {have}. Or give a template: {{prompt}}.")
            texts.append(prompt_of.get(wording) or wording.replace("{prompt}", text))
    batch = prompts.select([*range(len(prompts))] * len(wordings.split("|")))
    return replace(batch, prompts=texts)


def wordings_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The wordings {name: prompt} in a row's metadata; {} if there are none."""
    wordings = row.get("wordings")
    return dict(wordings) if isinstance(wordings, Mapping) else {}


def subset(prompts: PromptBatch, count: int) -> PromptBatch:
    """`count` rows that stand for the set, in its order; all of them where there are fewer.

    Every value of the metadata `tag` keeps its share, since many files are sorted by tag (GenEval's
    first 128 rows have two of its six). Rows without a tag count as one more. The choice depends on
    the set alone, and a larger count holds the rows of a smaller one.
    """
    tags: dict[str, list[int]] = {}
    for row, metadata in enumerate(prompts.metadata):
        tags.setdefault(str(metadata.get("tag")), []).append(row)
    order: list[tuple[float, int]] = []
    for tag, rows in tags.items():
        for j, index in enumerate(_permutation(f"subset/{tag}", len(rows))):
            order.append(((j + 0.5) / len(rows), rows[index]))
    return prompts.select(sorted(row for _, row in sorted(order)[:count]))


def spread(total: int, count: int) -> list[int]:
    """`count` of the numbers 0 to total - 1, evenly spaced from the first; all if there are fewer.

    This chooses the prompts that pictures show: by their number alone, never by their scores.
    """
    count = min(count, total)
    return [i * total // count for i in range(count)]


def spread_text(numbers: Sequence[int], total: int) -> str:
    """Which of `total` prompts a picture shows: "24 of 192 prompts, evenly spaced"."""
    if len(numbers) == total:
        return f"all {total} prompts"
    return f"{len(numbers)} of {total} prompts, evenly spaced"


# Reading -----------------------------------------------------------------------------------------


def path_of(source: str) -> Path:
    """The path of a prompt set, which need not exist. tiny/NAME ships with the package."""
    shipped = source.startswith("tiny/") and not Path(source).suffix
    return PROMPTS / f"{source[5:]}.jsonl" if shipped else Path(source).expanduser()


def _locate(source: str) -> Path:
    """The file or folder of a source. The error names the command that writes it, or similar
    files."""
    try:
        path = path_of(source)
        tiny = path.is_relative_to(PROMPTS)
        if path.is_file() or (path.is_dir() and not tiny):
            return path
    except (OSError, ValueError, RuntimeError) as error:  # no file can have this path
        raise PromptError(f"no prompt set {source[:80]!r}: {str(error)[:200]}") from None
    commands = [f"`{text}`" for text in sources.commands(source)]
    present = sorted(p for p in islice(path.parent.glob("*"), 1000) if p.suffix.lower() in READERS)
    names = [f"tiny/{p.stem}" if tiny else str(p) for p in present[:12]] or ["none beside it"]
    raise PromptError(
        f"no prompt set {source!r}. "
        + (f"Run {' or '.join(commands)}." if commands else f"There are {', '.join(names)}.")
    )


def _text(path: Path) -> str:
    try:
        # newlines unchanged: csv decides which of them end a row
        with path.open(encoding="utf-8-sig", newline="") as file:
            return file.read()
    except (UnicodeDecodeError, OSError) as error:
        raise PromptError(f"{path} cannot be read as UTF-8 ({error}).") from None


def _lines(text: str) -> list[tuple[int, str]]:
    """The lines that are not blank, stripped, with their numbers from 1."""
    # not str.splitlines: it also splits at U+2028 and similar, inside a prompt
    lines = enumerate(re.split(r"\r\n?|\n", text), 1)
    return [(number, line.strip()) for number, line in lines if line.strip()]


def _json_row(text: str, where: str) -> Row:
    try:
        row = json.loads(text)
        # as metadata is written later: no NaN, no lone surrogate, no great depth
        json.dumps(row, allow_nan=False, ensure_ascii=False).encode()
        prompt = row.pop("prompt")
        if not (isinstance(prompt, str) and prompt.strip()):
            raise ValueError(f"the prompt is {repr(prompt)[:80]}")
    except KeyError:
        raise PromptError(f"{where} has the keys {list(row)!r:.200}, and no 'prompt'.") from None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise PromptError(
            f'{where}: want {{"prompt": "..."}}, an object of JSON '
            f"({type(error).__name__}: {str(error)[:200]})."
        ) from None
    return prompt, row


def _read_jsonl(path: Path, text: str) -> list[Row]:
    return [_json_row(line, f"{path}, line {number}") for number, line in _lines(text)]


def _read_json(path: Path, text: str) -> list[Row]:
    """The rows of a list of prompts, or of a CVTG-2K file REGIONS.json. Its texts are those that
    the official script finds: everything between two single quotes, including apostrophes."""
    try:
        content = json.loads(text)
        listed = content if isinstance(content, list) else content["data_list"]
        if not isinstance(listed, list):
            raise TypeError("no list")
        items = [json.dumps({"prompt": i} if isinstance(i, str) else i) for i in listed]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        forms = '["a cat", "a dog"], or a file of CVTG-2K, {"data_list": ...}'
        raise PromptError(f"{path}: want {forms} ({error!r:.200}).") from None
    rows = [_json_row(item, f"{path}, prompt {number}") for number, item in enumerate(items, 1)]
    if content is listed:
        return rows
    regions = {"regions": int(path.stem)} if path.stem.isdecimal() else {}
    return [(p, {**row, **regions, "target": re.findall("'(.*?)'", p)}) for p, row in rows]


def _read_csv(path: Path, text: str) -> list[Row]:
    """One prompt per row. Rows with the same item_id become one prompt, with the columns that they
    share and their QUESTIONs."""
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    items: dict[object, Row] = {}
    questions: dict[object, dict[str, list[str]]] = {}  # of DPG-Bench, by their number
    try:
        header = list(reader.fieldnames or ())
        column = next((name for name in ("prompt", "text") if name in header), "")
        if not column or len(set(header)) < len(header):
            raise csv.Error(f"want columns of different names and one `prompt` or `text`: {header}")
        for row in reader:
            if None in row or None in row.values() or not row[column].strip():
                raise csv.Error(f"want a cell for each column, and a prompt in `{column}`")
            prompt = row.pop(column).strip()
            item = row.get("item_id", reader.line_num)
            if set(DPG_COLUMNS) <= row.keys():
                cells = [row.pop(name) for name in DPG_COLUMNS]
                questions.setdefault(item, {})[cells[0]] = cells
            first, shared = items.setdefault(item, (prompt, row))
            if first != prompt:
                raise csv.Error(f"the item {item!r} had another prompt before")
            shared = {key: value for key, value in shared.items() if row[key] == value}
            items[item] = prompt, shared
    except csv.Error as error:
        raise PromptError(f"{path}, line {reader.line_num}: {str(error)[:300]}.") from None
    for item, rows in questions.items():
        skills = [cells[2].split("(")[0].strip() for cells in rows.values()]
        items[item][1].update(questions=[*rows.values()], skills=skills)
    if questions:  # the official script skips the file's first row
        items[next(iter(questions))][1]["first_row"] = True
    return list(items.values())


def _read_folder(path: Path) -> list[Row]:
    """One prompt per file. T2I-CompBench's files of many prompts are refused."""
    if numbered := [file for file in path.glob("*/metadata.jsonl") if file.parent.name.isdecimal()]:
        numbered.sort(key=lambda file: int(file.parent.name))
        return [row for file in numbered for row in _read_jsonl(file, _text(file))]
    if regions := sorted(path.glob("[!.]*/[0-9].json"), key=by_number):
        return [row for file in regions for row in _read_json(file, _text(file))]
    rows: list[Row] = []
    files = [file for file in path.glob("[!.]*.[tT][xX][tT]") if file.is_file()]
    for file in sorted(files, key=by_number):
        lines = _lines(_text(file))
        if len(lines) != 1:
            raise PromptError(
                f"{file} has {len(lines)} lines, but a folder is read as one prompt a file. Give "
                "the path of the file itself, or put each prompt into its own file."
            )
        rows.append((lines[0][1], {"item_id": file.stem}))
    return rows


def _read_txt(path: Path, text: str) -> list[Row]:
    """One prompt per line. Tables and JSON are refused, because their lines are not prompts."""
    lines = _lines(text)
    for number, line in lines:
        if re.match(r'[\[{]\s*($|["\[{])', line):
            form = "JSON; name the file .jsonl (an object a line) or .json"
            raise PromptError(f"{path}, line {number} is {form}: {line[:80]!r}.")
    if lines and all("\t" in line for _, line in lines):
        form = "columns: a tab in each line; keep the prompts alone, or write a .csv with a header"
        raise PromptError(f"{path} has {form}: {lines[0][1][:80]!r}.")
    return [(line, {}) for _, line in lines]


READERS: Mapping[str, Callable[[Path, str], list[Row]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".json": _read_json,
}


# Sampling ----------------------------------------------------------------------------------------


class PromptSampler:
    """Draws the P prompts of an update, a pure function of (seed, update): a resume is exact.

    In every batch the tasks have the proportions of their weights: by the largest remainder, with
    the rounding debt carried to the next batch. Each task goes through a new permutation of its set
    per epoch, so no prompt repeats within an epoch. weights: > 0.
    """

    def __init__(
        self,
        sets: Mapping[str, PromptBatch],
        weights: Mapping[str, float],
        prompts: int,
        seed: int,
    ) -> None:
        self.sets = dict(sets)
        self.prompts = prompts
        self.seed = seed
        # integers, as floats would round debts: 0.1 and 0.2 become 1 and 2
        exact = {task: Fraction(str(weights[task])) for task in sets}
        unit = lcm(*(weight.denominator for weight in exact.values()))
        self._weights = {task: int(weight * unit) for task, weight in exact.items()}
        self._drawn = [dict.fromkeys(exact, 0)]  # [u]: prompts per task before update u; a memo

    @classmethod
    def of(
        cls, config: TrainingStage, read: Callable[[str, str], PromptBatch] = load_prompts
    ) -> PromptSampler:
        """The sampler for a config's tasks. Raises PromptError for an unreadable set."""
        return cls(
            {task.name: read(task.prompts, task.name) for task in config.tasks},
            {task.name: task.weight for task in config.tasks},
            config.rollout.prompts,
            config.seed,
        )

    def batch(self, update: int) -> PromptBatch:
        before, after = (self._before(u) for u in (update, update + 1))
        rows: list[tuple[float, str, int]] = []
        for task in self.sets:
            first, end = before[task], after[task]
            rows += [((n + 0.5) / (end - first), task, first + n) for n in range(end - first)]
        rows.sort(key=lambda row: row[0])  # stable: ties keep the order of the tasks
        picked = [(self.sets[task], self._row(task, number)) for _, task, number in rows]
        return PromptBatch(
            prompts=[source.prompts[i] for source, i in picked],
            tasks=[task for _, task, _ in rows],
            metadata=[source.metadata[i] for source, i in picked],
        )

    def _before(self, update: int) -> dict[str, int]:
        """How many prompts each task has contributed before this update.

        Each slot goes to the task with the largest debt at the end of the batch. So every slot is
        given at a debt > 0, and no task is ahead by a full prompt: debts stay bounded, and the
        long-run shares are exact. Computed in integers, in units of 1/total.
        """
        total = sum(self._weights.values())
        while len(self._drawn) <= update:
            drawn = dict(self._drawn[-1])
            slots = self.prompts * len(self._drawn)
            for _ in range(self.prompts):
                owed = {task: w * slots - drawn[task] * total for task, w in self._weights.items()}
                drawn[max(owed, key=owed.__getitem__)] += 1
            self._drawn.append(drawn)
        return self._drawn[update]

    def _row(self, task: str, number: int) -> int:
        """The dataset row for the task's n-th prompt since the start of the run."""
        epoch, offset = divmod(number, len(self.sets[task]))
        return _permutation(f"{self.seed}/{task}/{epoch}", len(self.sets[task]))[offset]


@lru_cache(maxsize=64)
def _permutation(key: str, size: int) -> list[int]:
    rows = list(range(size))
    random.Random(key).shuffle(rows)  # a text seed goes through SHA-512: the same everywhere
    return rows
