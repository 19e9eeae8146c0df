"""YAML -> frozen pydantic models. A wrong config is refused with a list of all its problems.

    config = load("configs/tiny/teacher_ocr.yaml", ["optimizer.lr=3e-4", "tasks.0.weight=2"])

A config is made of layers. Each is laid over those before it, section by section: sections are
merged, any other value is replaced. The order is: the file that `use` names (after the one that
that file uses), the file itself, the variant's keys for its kind of stage, the `key.path=value`
texts of the command line. The layers of a recipe's stage are: the file that its `use` names, the
keys next to `use`, the recipe's model, the recipe's variant, the recipe's output and seed (a seed
next to `use` stays), the texts of its `set`. The command line of a recipe changes the recipe, so it
reaches a stage as one of the keys next to `use`: `stages.NAME.train.updates=3`. A text replaces
what is at its path, even a whole section. An item of a list is named by its `name` or its index
(`benchmarks.geneval.limit=8`, `benchmarks.0.limit=8`), and so it is in a layer: `tasks: {ocr:
{weight: 2}}` over a list of tasks changes the one that is named ocr.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from yaml import YAMLError

from flowalign.config.safe_yaml import dump_yaml, load_yaml
from flowalign.config.section import ConfigError, did_you_mean, shown_value
from flowalign.config.stages import (
    STAGES,
    stage_class,
    stage_names,
    variant_keys,
    variant_problems,
)
from flowalign.config.stages.base import Stage
from flowalign.config.stages.training import TrainingStage
from flowalign.system.folder import RunFolder
from flowalign.system.hub_address import secrets
from flowalign.types import Problem

C = TypeVar("C", bound=Stage)
DEFAULT_STEPS = 10  # of rollouts and evaluations, at most, as in Flow-GRPO


def load(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    stage: type[C] = TrainingStage,
    variant: str | Path | None = None,
) -> C:
    """Load the config in a file. Raises ConfigError with all its problems.

    overrides: `key.path=value` texts, values as YAML. stage: the kind of config that is wanted, one
    of STAGES' values or a base of them. variant: a file with keys for each kind of stage
    (`grpo: {...}`, `opd: {...}`): the same run for other hardware.
    """
    data = read(path)
    if variant is not None and isinstance(data, Mapping):
        keys = read(variant)
        if problems := list(variant_problems(keys)):
            raise ConfigError(problems, str(variant))
        kind = str(data.get("stage"))
        if kind == "recipe":
            data = overlay(data, {"variant": keys}, source=str(variant))
        else:
            data = varied(data, variant_keys(keys, kind), source=str(variant))
    return parse(data, overrides, source=str(path), stage=stage)


LABELS = {
    "measured": "docs/results.md has the scores of such runs",
    "tested": "CI runs them at a small size",
    "published": "those of an author's run; nobody ran them here",
    "predicted": "memory and hours only; nobody ran them",
    "untested": "nobody ran them",
}


def label_of(path: str | Path) -> str | None:
    """One of LABELS, from a line `# Label: WORD` of a shipped config's head; None without one."""
    text = Path(os.path.expanduser(path)).read_text(encoding="utf-8")
    match = re.match(r"(?:#.*\n)*?# Label: (.*)", text)
    return match[1] if match else None


def read(path: str | Path, above: Sequence[Path] = ()) -> Any:
    """The raw content of a YAML file, laid over the file that its key `use` names (relative to it),
    if any. Raises ConfigError if it is missing or not YAML. above: the files that led here."""
    path = Path(os.path.expanduser(path))
    if not path.is_file():
        present = sorted(p.name for p in path.parent.glob("*.yaml"))
        listed = f"there are {', '.join(present[:12])}" if present else ""
        seen = listed or f"no .yaml lies in {path.parent.absolute()}"
        hint = did_you_mean(path.name, present)
        raise ConfigError([f"no such file; {seen}.{hint}"], str(path))
    try:
        data = load_yaml(path.read_text(encoding="utf-8"))
    except (YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError([f"not readable as YAML: {error}"], str(path)) from None
    if not isinstance(data, Mapping) or "use" not in data:
        return data
    name = data["use"]
    chain = [*above, path.resolve()]
    if not isinstance(name, str):
        text = f"use: got {shown_value(name)}; want the name of a YAML file."
        raise ConfigError([text], str(path))
    used = path.parent / os.path.expanduser(name)
    if used.resolve() in chain:
        raise ConfigError([f"use: {name} leads back to itself. Break the circle."], str(path))
    base = read(used, chain)
    keys = {key: value for key, value in data.items() if key != "use"}
    return overlay(base if isinstance(base, Mapping) else {}, keys, source=str(path))


class NoRun(ValueError):
    """A folder that holds no run: what was seen, what to do."""


def run_config(run: Path) -> Mapping[str, Any]:
    """The raw config in the folder of a run or a recipe. Raises NoRun."""
    path = RunFolder(run).config
    try:
        config = read(path)
        config["stage"]
        return config
    except (ConfigError, TypeError, KeyError, OSError) as error:
        inside = ", ".join(str(path.parent) for path in sorted(run.glob(f"*/{path.name}"))[:8])
        raise NoRun(
            f"{run} is no run: it has no config.yaml with a `stage`. Name the `output` folder of a "
            f"run of `flowalign train`{f', such as {inside}' if inside else ''}."
        ) from error


def overlay(*layers: Mapping[str, Any], source: str = "config", place: str = "") -> dict[str, Any]:
    """Lay each layer over those before it, section by section; keys over a list of items with names
    change these items. Raises ConfigError for an item that is not in the list.

    source, place: of the last layer, for the error: its file, and where the layers lie in it.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            merged[key] = _merged(merged.get(key), value, f"{place}{key}", source)
    return merged


def varied(data: Mapping[str, Any], keys: Mapping[str, Any], source: str) -> dict[str, Any]:
    """A config with a variant's keys over it, except in sections that it has switched off
    (null)."""
    on = {
        key: value
        for key, value in keys.items()
        if not isinstance(value, Mapping) or data.get(key, {}) is not None
    }
    return overlay(data, on, source=source)


def _merged(old: Any, value: Any, where: str, source: str) -> Any:
    """A value of a layer, laid over the one at the same place of those before it. Options belong to
    a reward: one of another name does not inherit them."""
    if isinstance(old, Mapping) and isinstance(value, Mapping):
        if "name" in value and value["name"] != old.get("name"):
            old = {key: item for key, item in old.items() if key != "options"}
        return overlay(old, value, source=source, place=f"{where}.")
    if isinstance(value, Mapping) and isinstance(old, list) and old and all(map(_name, old)):
        items = list(old)
        for key, change in value.items():
            index = _index(items, str(key), where, source)
            items[index] = _merged(items[index], change, f"{where}.{index}", source)
        return items
    return value


def _name(item: Any) -> str | None:
    return item.get("name") if isinstance(item, Mapping) else None


def _index(items: Sequence[Any], key: str, where: str, source: str = "config") -> int:
    """The index of the item that a key means by its index, or else by its name."""
    if key in map(str, range(len(items))):
        return int(key)
    names = [str(_name(item)) for item in items]
    if key not in names:
        listed = f"no item {key!r}; it has {len(items)} items, from 0, named {', '.join(names)}."
        raise ConfigError([Problem(where, f"{listed}{did_you_mean(key, names)}")], source)
    return names.index(key)


def _replaced(data: Any, path: Sequence[str], value: Any, where: str = "") -> Any:
    """The data with a new value at a path."""
    if not path:
        return value
    key, *rest = path
    if isinstance(data, list) and data:
        index = _index(data, key, where)
        change = _replaced(data[index], rest, value, f"{where}.{index}")
        return [*data[:index], change, *data[index + 1 :]]
    if data is not None and not isinstance(data, Mapping):
        raise ConfigError([f"{where} is {shown_value(data)}, which has no keys."])
    old = {} if data is None else data
    inner = f"{where}.{key}" if where else key
    return {**old, key: _replaced(old.get(key), rest, value, inner)}


def override(data: Mapping[str, Any], texts: Sequence[str]) -> tuple[dict[str, Any], list[Problem]]:
    """The data after `key.path=value` texts, and the problems of these. In a recipe they come after
    what a stage has under `set`."""
    changed = dict(data)
    problems = list[Problem]()
    for text in texts:
        path, equals, value = text.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            problems.append(
                Problem(repr(text), "want key.path=value, for example optimizer.lr=1e-4.")
            )
            continue
        try:
            content = load_yaml(value)
            if keys[0] == "stages" and keys[2:] and keys[2] not in ("use", "set"):
                stage = changed.get("stages", {}).get(keys[1], {})
                if earlier := stage.get("set"):
                    content = [*earlier, f"{'.'.join(keys[2:])}={value}"]
                    keys = ["stages", keys[1], "set"]
            changed = _replaced(changed, keys, content)
        except YAMLError as error:
            problems.append(Problem(repr(text), f"the value is not YAML: {error}"))
        except ConfigError as error:
            problems += error.problems
    return changed, problems


def assignments(texts: Sequence[str]) -> dict[str, Any]:
    """{key: value} of `key.path=value` texts, read like overrides. Raises ConfigError for
    others."""
    data, problems = override({}, texts)
    if problems:
        raise ConfigError(problems, "options")
    return data


def parse(
    data: Any,
    overrides: Sequence[str] = (),
    *,
    source: str = "config",
    stage: type[C] = TrainingStage,
) -> C:
    """The config in a mapping. Raises one ConfigError with all problems."""
    if not isinstance(data, Mapping):
        text = f"want keys and values at the top, got {shown_value(data)}."
        raise ConfigError([text], source)
    data, problems = override(data, overrides)
    if leaks := list(secrets(data, "")):  # alone, as other problems show values
        raise ConfigError(leaks, source)
    name = str(data.get("stage"))
    possible = [n for n in stage_names() if issubclass(STAGES.get(n, TrainingStage), stage)]
    if name not in possible:
        listed = " or ".join(map(repr, possible))
        if name in STAGES:
            text = f"{name!r} is run by `{STAGES[name].command}`; this command wants {listed}."
        elif "stage" in data:
            hint = did_you_mean(name, possible)
            hint += " A stage of yours has an entry point (docs/api.md)."
            text = f"got {shown_value(data['stage'])}; want {listed}.{hint}"
        else:
            text = f"missing. Add `stage:` with {listed}."
        raise ConfigError([*problems, Problem("stage", text)], source)
    kind: Any = stage_class(name)
    config: Any = None
    try:
        config = kind.model_validate(_by_model(data, kind.model_fields))
    except ValidationError as error:
        for e in error.errors():
            problems.append(Problem(".".join(map(str, e["loc"])), e["msg"]))
    if problems:
        raise ConfigError(problems, source)
    return config


@functools.cache
def card_of(model: str) -> tuple[int, float] | None:
    """(steps, guidance) of a public model's card (cards.yaml), by its Hub id or a folder of the
    same name; None = not known."""
    cards = load_yaml(Path(__file__).with_name("cards.yaml").read_text(encoding="utf-8"))
    card = cards.get(Path(model).name.lower())
    return tuple(card) if card else None


def _by_model(data: Mapping[str, Any], sections: Collection[str]) -> Mapping[str, Any]:
    """A raw config whose `rollout` or `sampling` has the steps and guidance of its model's card,
    unless it sets them. A base trains at STEPS of its many steps. Without a card the defaults of
    the sections hold. sections: the names of its stage's sections."""
    kind = "rollout" if "rollout" in sections else "sampling"
    model = data.get("model")
    section = data.get(kind, {})
    if kind not in sections or not isinstance(model, Mapping) or not isinstance(section, Mapping):
        return data
    section = {k: v for k, v in section.items() if v is not None or k not in ("steps", "guidance")}
    if not {"steps", "guidance"} <= section.keys() and isinstance(model.get("id"), str):
        if card := card_of(model["id"]):
            section = {"steps": min(card[0], DEFAULT_STEPS), "guidance": card[1], **section}
    return {**data, kind: section} if section or kind in data else data


def to_yaml(config: Stage) -> str:
    """The config with its defaults as YAML; `parse` of it gives the same config."""
    return dump_yaml(config.model_dump(mode="json"))
