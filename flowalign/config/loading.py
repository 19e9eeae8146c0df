"""YAML -> frozen pydantic models. A wrong config is refused with everything that is wrong in it.

    config = load("configs/tiny/teacher_ocr.yaml", ["optimizer.lr=3e-4", "tasks.0.weight=2"])

A config is made of layers. Each is laid over those before it, section by section: sections are
merged, any other value is replaced. The order is: the file that `use` names (after the one that
that file uses), the file itself, the variant's keys for its kind of stage, the `key.path=value`
texts of the command line. The layers of a recipe's stage are: the file that its `use` names, the
keys beside `use`, the recipe's model, the recipe's variant, the recipe's output and seed (a seed
beside `use` stays), the texts of its `set`. The command line of a recipe changes the recipe, so it
reaches a stage as one of the keys beside `use`: `stages.NAME.train.updates=3`.
A text replaces what is at its path, even a whole section. An item of a list is named by its `name`
or its index (`benchmarks.geneval.limit=8`, `benchmarks.0.limit=8`), and so it is in a layer:
`tasks: {ocr: {weight: 2}}` over a list of tasks changes the one that is named ocr.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from yaml import YAMLError

from flowalign.config import safe_yaml
from flowalign.config.section import MARKS, REMOVED, RENAMED, ConfigError, Section, close_to
from flowalign.config.stages import (
    STAGES,
    Stage,
    TrainingStage,
    Variant,
    command,
    stage_class,
    stage_names,
)
from flowalign.system import files

C = TypeVar("C", bound=Stage)
CHAIN = 20  # files that use each other
SHOWN = 50  # problems of one config; more are counted


# Reading ---------------------------------------------------------------------------------------


def load(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    stage: type[C] = TrainingStage,
    variant: str | Path | None = None,
) -> C:
    """The config in a file; ConfigError with all that is wrong in it.

    overrides: `key.path=value` texts, values as YAML. stage: the kind of config that is wanted, one
    of STAGES' values or a base of them. variant: a file with keys for each kind of stage
    (`grpo: {...}`, `opd: {...}`): the same run for other hardware.
    """
    data = read(path)
    if variant is not None and isinstance(data, Mapping):
        keys, problems = _validate(Variant, read(variant))
        if problems:
            raise ConfigError(problems, str(variant))
        kind = str(data.get("stage"))
        keys = {"variant": keys} if kind == "recipe" else keys.get(kind, {})
        data = overlay(data, keys, source=str(variant))
    return parse(data, overrides, source=str(path), stage=stage)


def read(path: str | Path, above: Sequence[Path] = ()) -> Any:
    """What a YAML file holds, unchecked, laid over the file that its key `use` names (relative to
    it), if any; ConfigError if it is missing or not YAML. above: the files that led here."""
    path = Path(path)
    if problem := files.impossible(str(path)):
        raise ConfigError([f"no such file: its name {problem}."], _cut(str(path)))
    if not path.is_file():
        present = ", ".join(sorted(str(p) for p in path.parent.glob("*.yaml"))[:12])
        hint = f"there are {present}" if present else f"no .yaml lies in {path.parent.absolute()}"
        raise ConfigError([f"no such file; {hint}."], str(path))
    try:
        with path.open(encoding="utf-8") as file:
            data = safe_yaml.load(file.read(safe_yaml.LONGEST + 1))
    except (YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError([f"not readable as YAML: {error}"], str(path)) from None
    if not isinstance(data, Mapping) or "use" not in data:
        return data
    own = dict(data)
    name = own.pop("use")
    if not isinstance(name, str):
        raise ConfigError([f"use: got {_shown(name)}; want the name of a YAML file."], str(path))
    if problem := files.impossible(name):
        raise ConfigError([f"use: {_shown(name)} {problem}."], str(path))
    if len(above) == CHAIN:
        raise ConfigError([f"use: the last of {CHAIN} files in a chain names one more."], str(path))
    if (path.parent / name).resolve() in (chain := [*above, path.resolve()]):
        raise ConfigError([f"use: {name} leads back to itself. Break the circle."], str(path))
    base = read(path.parent / name, chain)
    return overlay(base if isinstance(base, Mapping) else {}, own, source=str(path))


def overlay(*layers: Mapping[str, Any], source: str = "config", place: str = "") -> dict[str, Any]:
    """The layers, each laid over those before it, section by section; keys over a list of items
    with names change these items. ConfigError for an item that is not in the list.

    source, place: of the last layer, for the error: its file, and where the layers lie in it.
    """
    whole: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            old, where = whole.get(key), f"{place}{key}"
            if isinstance(value, Mapping) and isinstance(old, Mapping):
                value = overlay(old, value, source=source, place=f"{where}.")
            elif isinstance(value, Mapping) and isinstance(old, list) and old and all(_names(old)):
                items = {str(index): item for index, item in enumerate(old)}
                own = {}
                for name, item in value.items():
                    if (index := _index(old, str(name))) is None:
                        raise ConfigError([f"{where}: {_no_item(old, str(name))}"], source)
                    own[str(index)] = item
                value = [*overlay(items, own, source=source, place=f"{where}.").values()]
            whole[key] = value
    return whole


def _names(items: Sequence[Any]) -> list[str | None]:
    """The name of each item; None for one that has none."""
    return [item.get("name") if isinstance(item, Mapping) else None for item in items]


def _index(items: Sequence[Any], key: str) -> int | None:
    """The place of the item with this index, or else with this name; None if there is none."""
    if key.isdecimal() and len(key) < 10 and int(key) < len(items):
        return int(key)
    names = _names(items)
    return names.index(key) if key in names else None


def _no_item(items: Sequence[Any], key: str) -> str:
    """What is said of a key that names no item of a list."""
    names = [str(name) for name in _names(items) if name is not None]
    close = close_to(key, names)
    possible = f", named {', '.join(names[:12])}" if names else ""
    hint = f" Did you mean {close!r}?" if close else ""
    return f"no item {_cut(repr(key))}; it has {len(items)} items, from 0{possible}.{hint}"


def assignments(texts: Sequence[str]) -> dict[str, Any]:
    """{key: value} of `key.path=value` texts, as overrides are read; ConfigError for others."""
    data: dict[str, Any] = {}
    problems = [problem for text in texts if (problem := _assign(data, text))]
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
    """The config in a mapping; every problem is collected into one ConfigError."""
    if not isinstance(data, Mapping):
        raise ConfigError([f"want keys and values at the top, got {_shown(data)}."], source)
    data = _copy(data)  # overrides are written into it
    problems = [problem for text in overrides if (problem := _assign(data, text))]
    possible = {name: kind for name, kind in STAGES.items() if issubclass(kind, stage)}
    name = data.get("stage")
    if isinstance(name, str) and name in stage_names() and issubclass(stage_class(name), stage):
        possible[name] = stage_class(name)  # pyright: ignore[reportArgumentType]
    listed = " or ".join(map(repr, possible))
    if isinstance(name, str) and name in stage_names() and name not in possible:
        text = f"stage: {name!r} is run by `{command(name)}`; this command wants {listed}."
        raise ConfigError([*problems, text], source)
    if not isinstance(name, str) or name not in possible:
        close = close_to(str(name).lower(), possible)
        if "stage" in data:
            hint = f" Did you mean {close!r}?" if close else ""
            problems.append(f"stage: got {_shown(name)}; want {listed}.{hint}")
        else:
            problems.append(f"stage: missing. Add `stage:` with {listed}.")
        # The other keys are checked as those of the stage that was probably meant.
        shared = {kind: len(data.keys() & possible[kind].model_fields) for kind in possible}
        data["stage"] = name = close or max(shared, key=shared.__getitem__)
    config, wrong = _validate(possible[name], data)
    if wrong := problems + (wrong or list(_impossible(data))[:SHOWN]):
        raise ConfigError(wrong, source)
    return config


def to_yaml(config: Stage) -> str:
    """The whole config, defaults included; `parse` of it gives the same config."""
    return safe_yaml.dump(config.model_dump(mode="json"), sort_keys=False)


def _assign(data: dict[str, Any], text: str) -> str | None:
    """Write one `key.path=value` into the raw data; return what is wrong with it, if anything."""
    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys) or not path.isprintable():
        return f"override {_cut(text)!r}: want key.path=value, for example optimizer.lr=1e-4."
    if len(keys) > safe_yaml.DEEPEST:
        return f"override {_cut(text)!r}: a path of {len(keys)} keys; no config is so deep."
    try:
        parsed = safe_yaml.load(value)
    except YAMLError as error:
        return f"override {_cut(text)!r}: the value is not YAML: {error}"
    here: Any = data
    for depth, key in enumerate(keys):
        name, last = ".".join(keys[:depth]), depth == len(keys) - 1
        place: Any = key
        if isinstance(here, list):
            place = _index(here, key)
            if place is None:
                return f"override {_cut(text)!r}: {name}: {_no_item(here, key)}"
        elif not isinstance(here, dict):
            return f"override {_cut(text)!r}: {name} is {_shown(here)}, which has no keys."
        elif not last and here.get(key) is None:  # a section that is off or not given
            here[key] = {}
        if last:
            here[place] = parsed
        here = here[place]
    return None


def _copy(value: Any, depth: int = 0) -> Any:
    """The value with mappings and lists of its own; whole numbers as keys become texts, as they do
    in every file that is written."""
    if depth > 2 * safe_yaml.DEEPEST:
        raise ConfigError([f"nested more than {depth - 1} levels deep."])
    if isinstance(value, Mapping):
        return {
            str(key) if type(key) is int else key: _copy(item, depth + 1)  # true stays
            for key, item in value.items()
        }
    return [_copy(item, depth + 1) for item in value] if isinstance(value, list) else value


def _impossible(value: Any, place: str = "") -> Iterator[str]:
    """What no file can hold, wherever the schema takes any value."""
    where = _cut(place.removeprefix(".")) or "config"
    if isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(key, str) and not safe_yaml.IMPOSSIBLE.search(key):
                yield from _impossible(item, f"{place}.{key}")
            else:
                yield f"{where}: the key {_cut(repr(key))}; want a text. Put it in quotes."
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _impossible(item, f"{place}.{index}")
    elif isinstance(value, str) and (bad := safe_yaml.IMPOSSIBLE.search(value)):
        yield f"{where}: the character {bad[0]!r} is not possible in a text."
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{where}: got {value}; want a finite number."
    elif isinstance(value, int) and abs(value) >= 10**30:
        yield f"{where}: a whole number of more than 30 digits."


# Explaining ------------------------------------------------------------------------------------


def _validate(kind: Any, data: Any) -> tuple[Any, list[str]]:
    """The value of that type, and what is wrong with it."""
    try:
        return TypeAdapter(kind).validate_python(data, strict=True), []
    except ValidationError as error:
        details = error.errors()
        problems = [text for detail in details[:SHOWN] for text in _explain(detail, kind)]
        more = len(details) - SHOWN
        return None, problems + ([f"config: {more} more problems of this kind"] if more > 0 else [])


def _explain(error: Any, root: Any) -> list[str]:
    """One of pydantic's errors: where, what was seen, what is possible, what to do."""
    marks = ("[key]", *MARKS)  # so pydantic marks a mapping's key, and one of several forms
    place = [part for part in error["loc"] if part not in marks]
    where, seen = ".".join(_cut(str(part)) for part in place), error["input"]
    if error["type"] == "problems":  # of a section: see Section.problems
        return [f"{where}.{text}" if where else text for text in error["ctx"]["problems"]]
    where, name = where or "config", place[-1] if place else ""
    owner, inner = _annotation_at(place[:-1], root), _annotation_at(place, root)
    fields = owner.model_fields if _is_section(owner) else {}
    example = _example(fields[name]) if name in fields else ""
    keys = f"the keys {', '.join(inner.model_fields)}" if _is_section(inner) else ""
    wanted = re.sub(
        "^Input should be |valid | after validation|^(List|Tuple|Dictionary) should have ",
        "",
        error["msg"],
    )
    if error["type"] == "extra_forbidden":
        if where in RENAMED:
            return [f"{where}: renamed to `{RENAMED[where]}`. Use that key."]
        if where in REMOVED:
            return [f"{where}: removed: {REMOVED[where]}"]
        close = close_to(str(name), fields, cutoff=0.5)
        hint = f" Did you mean `{close}`?" if close else ""
        return [f"{where}: unknown key.{hint} Possible keys: {', '.join(fields)}."]
    if error["type"] == "missing":
        return [f"{where}: missing. Add `{name}:`{keys and f' with {keys}'}.{example}"]
    if error["type"].startswith("model_") and keys:
        wanted, example = keys, ""
    elif error["type"] == "literal_error":
        close = close_to(str(seen).lower(), re.findall(r"'(.*?)'", wanted))
        example = f" Did you mean {close!r}?" if close else ""
    elif error["type"] == "string_type" and not isinstance(seen, (list, dict, type(None))):
        example = f" Put it in quotes if it is meant as text.{example}"
    return [f"{where}: got {_shown(seen)}; want {wanted}.{example}"]


def _example(info: Any) -> str:
    """An example of a field: its own, or its default, as YAML."""
    default = None if info.is_required() else info.get_default()
    example = info.examples[0] if info.examples else default
    if example is None or isinstance(example, BaseModel):
        return ""
    text = safe_yaml.dump([example], default_flow_style=True, width=1000)
    return f" For example: {text.strip()[1:-1]}."


def _annotation_at(place: Sequence[int | str], root: Any) -> Any:
    """The type that the schema has at this place; None where it has none."""
    here: Any = root
    for part in place:
        if _is_section(here):
            here = here.model_fields[part].annotation if part in here.model_fields else None
        else:
            here = get_args(here)[-1] if get_args(here) else None  # of a mapping: its values
        while get_origin(here) in (Annotated, Union, UnionType):
            # X of `X | None` and of Annotated[X, ...]; the section where another form has no keys
            forms = [_plain(form) for form in get_args(here)]
            here = next(filter(_is_section, forms), forms[0])
    return here


def _plain(annotation: Any) -> Any:
    """X of Annotated[X, ...]."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _shown(value: Any) -> str:
    """A value in an error, with its kind, cut to a line."""
    kinds = {str: "text", int: "whole number", float: "number", bool: "true/false", list: "list"}
    if value is None:
        return "nothing (null)"
    value = list(value) if isinstance(value, tuple) else value
    return f"the {kinds.get(type(value), 'mapping')} {_cut(repr(value))}"


def _cut(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
