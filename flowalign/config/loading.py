"""YAML -> frozen pydantic models. A wrong config is refused with everything that is wrong in it.

config = load("configs/tiny/teacher_ocr.yaml", ["optimizer.lr=3e-4", "tasks.0.weight=2"])
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from flowalign.config.conflicts import conflicts, variant_conflicts
from flowalign.config.schema import STAGES, ConfigError, Section, Stage, TrainingStage, command

C = TypeVar("C", bound=Stage)


# Reading ---------------------------------------------------------------------------------------


def load(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    stage: type[C] = TrainingStage,
    variant: str | Path | None = None,
) -> C:
    """The config in a file, with `key.path=value` overrides (values are YAML, items by index).

    stage: the kind of config that is wanted, one of STAGES' values or Root. variant: a file with
    keys for each kind of stage (`grpo: {...}`, `opd: {...}`), laid over the file before the
    overrides: the same run for other hardware.
    """
    data = read(path)
    if variant is not None and isinstance(data, Mapping):
        data = vary(data, read(variant), str(variant))
    return parse(data, overrides, source=str(path), stage=stage)


def vary(data: Mapping[str, Any], variant: Any, source: str) -> dict[str, Any]:
    """data with a variant's keys for its stage laid over it; a recipe takes it whole, for its
    stages. ConfigError if it is none."""
    if not isinstance(variant, Mapping):
        raise ConfigError([f"want stages and their keys, got {_shown(variant)}."], source)
    if problems := [text for _, text in variant_conflicts(variant)]:
        raise ConfigError(problems, source)
    kind = str(data.get("stage"))
    return overlay(data, {"variant": variant} if kind == "recipe" else variant.get(kind) or {})


def overlay(data: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """data with the keys of own laid over it, section by section."""
    found = dict(data)
    for key, value in own.items():
        old = found.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = overlay(old, value)
        found[key] = value
    return found


def read(path: str | Path, above: Sequence[Path] = ()) -> Any:
    """What a YAML file holds, unchecked, laid over the file that its key `use` names (relative to
    it), if any; ConfigError if it is missing or not YAML. above: the files that led here."""
    path = Path(path)
    data = _read_file(path)
    if not isinstance(data, Mapping) or "use" not in data:
        return data
    name, own = data["use"], {key: value for key, value in data.items() if key != "use"}
    if not isinstance(name, str):
        raise ConfigError([f"use: got {_shown(name)}; want the name of a YAML file."], str(path))
    if (path.parent / name).resolve() in (chain := [*above, path.resolve()]):
        raise ConfigError([f"use: {name} leads back to itself. Break the circle."], str(path))
    base = read(path.parent / name, chain)
    return overlay(base if isinstance(base, Mapping) else {}, own)


def _read_file(path: Path) -> Any:
    if not path.is_file():
        present = ", ".join(sorted(str(p) for p in path.parent.glob("*.yaml"))[:12])
        hint = f"there are {present}" if present else f"no .yaml lies in {path.parent.absolute()}"
        raise ConfigError([f"no such file; {hint}."], str(path))
    try:
        return _read_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([f"not readable as YAML: {error}"], str(path)) from None


def assignments(texts: Sequence[str]) -> dict[str, Any]:
    """{key: value} of `key.path=value` texts, as overrides are read; ConfigError for others."""
    data: dict[str, Any] = {}
    problems = [p for text in texts if (p := _override(data, text))]
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
    data = deepcopy(dict(data))
    problems = [p for text in overrides if (p := _override(data, text))]
    root, wrong = _root(data, stage)
    problems += [wrong] if wrong else []
    if root is None:
        raise ConfigError(problems, source)
    try:
        config = root.model_validate(data)
        bad: set[str] = set()
    except ValidationError as error:
        problems += [_explain(e, root) for e in error.errors()]
        bad = {_dotted(e["loc"]) for e in error.errors()}
        config = _without(root, data, [e["loc"] for e in error.errors()])
    if config is not None:  # conflicts, but for those that involve a value already refused
        problems += [text for keys, text in conflicts(config) if not _touch(keys, bad)]
    if problems or config is None:
        raise ConfigError(problems, source)
    return config


def _root(data: dict[str, Any], wanted: type[C]) -> tuple[type[C] | None, str]:
    """The model that `stage` names, and what is wrong with it ("" = nothing).

    A stage that does not exist is replaced by the one with the nearest name, or else with the
    most of the keys, so that the other keys are checked too.
    """
    possible = {name: root for name, root in STAGES.items() if issubclass(root, wanted)}
    listed = " or ".join(map(repr, possible))
    seen = data.get("stage")
    if isinstance(seen, str) and seen in possible:
        return possible[seen], ""
    if isinstance(seen, str) and seen in STAGES:
        return None, f"stage: {seen!r} is run by `{command(seen)}`; this command wants {listed}."
    close = difflib.get_close_matches(str(seen).lower(), possible, n=1)
    shared = {name: len(data.keys() & root.model_fields) for name, root in possible.items()}
    meant = close[0] if close else max(shared, key=shared.__getitem__)
    if "stage" in data:
        hint = f" Did you mean {close[0]!r}?" if close else ""
        problem = f"stage: got {_shown(seen)}; want {listed}.{hint}"
    else:
        problem = f"stage: missing. Add `stage:` with {listed}."
    data["stage"] = meant
    return possible[meant], problem


def to_yaml(config: Stage) -> str:
    """The whole config, defaults included; `parse` of it gives the same config."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False)


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads 1e-4 as a number and refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As SafeLoader, but the last of two equal keys does not silently win."""
        keys = [k.value for k, _ in node.value if isinstance(k, yaml.ScalarNode)]
        for key_node, _ in node.value:
            if keys.count(key_node.value) > 1:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key_node.value!r} is given twice",
                    problem_mark=key_node.start_mark,
                )
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that _Loader would read as numbers."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+\Z"),
        list("-+.0123456789"),
    )


def _read_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)  # a SafeLoader


def _override(data: dict[str, Any], text: str) -> str | None:
    """Write one `key.path=value` into the raw data; return what is wrong with it, if anything."""
    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        return f"override {text!r}: want key.path=value, for example optimizer.lr=1e-4."
    try:
        parsed = _read_yaml(value)
    except yaml.YAMLError as error:
        return f"override {text!r}: the value is not YAML: {error}"
    here: Any = data
    for depth, key in enumerate(keys):
        name, last = ".".join(keys[:depth]), depth == len(keys) - 1
        place: Any = key
        if isinstance(here, list):
            if not key.isdecimal() or int(key) >= len(here):
                return f"override {text!r}: {name} has {len(here)} items, from 0, and no {key!r}."
            place = int(key)
        elif not isinstance(here, dict):
            return f"override {text!r}: {name} is {_shown(here)}, which has no keys."
        elif not last and here.get(key) is None:
            here[key] = {}
        if last:
            here[place] = parsed
        here = here[place]
    return None


# Explaining ------------------------------------------------------------------------------------


def _explain(error: Any, root: type[Stage]) -> str:
    """One of pydantic's errors as: where, what was seen, what is possible, what to do."""
    *parents, name = error["loc"] or ("config",)
    where, seen = _dotted(error["loc"]), error["input"]
    owner, inner = _annotation_at(parents, root), _annotation_at(error["loc"], root)
    fields = owner.model_fields if _is_section(owner) else {}
    if error["type"] == "extra_forbidden":
        close = difflib.get_close_matches(str(name), fields, n=1, cutoff=0.5)
        hint = f" Did you mean `{close[0]}`?" if close else ""
        return f"{where}: unknown key.{hint} Possible keys: {', '.join(fields)}."
    example = _example(fields.get(name)) if name in fields else ""
    if error["type"] == "missing":
        keys = f" with the keys {', '.join(inner.model_fields)}" if _is_section(inner) else ""
        return f"{where}: missing. Add `{name}:`{keys}.{example}"
    if error["type"].startswith("model_") and _is_section(inner):
        return f"{where}: got {_shown(seen)}; want the keys {', '.join(inner.model_fields)}."
    wanted = re.sub(
        "^Input should be |valid | after validation|^(List|Tuple|Dictionary) should have ",
        "",
        error["msg"],
    )
    if error["type"] == "literal_error":
        close = difflib.get_close_matches(str(seen).lower(), re.findall(r"'(.*?)'", wanted), n=1)
        example = f" Did you mean {close[0]!r}?" if close else ""
    elif error["type"] == "string_type" and not isinstance(seen, (list, dict, type(None))):
        example = f" Put it in quotes if it is meant as text.{example}"
    return f"{where}: got {_shown(seen)}; want {wanted}.{example}"


def _example(info: Any) -> str:
    """An example of a field: its own, or its default, as YAML."""
    default = None if info.is_required() else info.get_default()
    example = info.examples[0] if info.examples else default
    if example is None or isinstance(example, BaseModel):
        return ""
    text = yaml.dump([example], Dumper=_Dumper, default_flow_style=True, width=1000)
    return f" For example: {text.strip()[1:-1]}."


def _annotation_at(loc: Sequence[int | str], root: type[Stage]) -> Any:
    """The type that the schema has at this place; None where it has none."""
    here: Any = root
    for part in loc:
        if _is_section(here):
            here = here.model_fields[part].annotation if part in here.model_fields else None
        else:
            here = get_args(here)[-1] if get_args(here) else None  # of a mapping: its values
        while get_origin(here) in (Annotated, Union, UnionType):
            here = get_args(here)[0]
    return here


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _dotted(loc: Sequence[int | str]) -> str:
    return ".".join(str(part) for part in loc)


def _shown(value: Any) -> str:
    kinds = {str: "text", int: "whole number", float: "number", bool: "true/false", list: "list"}
    if value is None:
        return "nothing (null)"
    value = list(value) if isinstance(value, tuple) else value
    text = repr(value)
    text = text if len(text) <= 80 else text[:77] + "..."
    return f"the {kinds.get(type(value), 'mapping')} {text}"


# Checking --------------------------------------------------------------------------------------


def _without(root: type[C], data: dict[str, Any], locs: Sequence[Sequence[int | str]]) -> C | None:
    """The config with the refused keys left out, if the rest makes one."""
    rest = deepcopy(data)
    for loc in locs:
        here: Any = rest
        for part in loc[:-1]:
            here = here.get(part) if isinstance(here, dict) else here[int(part)]
        if not isinstance(here, dict):
            return None  # without an item of a list the others would change their index
        here.pop(loc[-1], None)
    try:
        return root.model_validate(rest)
    except ValidationError:
        return None


def _touch(keys: Sequence[str], bad: set[str]) -> bool:
    pairs = [(f"{key}.", f"{other}.") for key in keys for other in bad]
    return any(a.startswith(b) or b.startswith(a) for a, b in pairs)
