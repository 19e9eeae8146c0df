"""The page configs.md: every stage and key of flowalign/schema.py, from its JSON schema."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flowalign.config.schema import STAGES, Stage, command

HEAD = """# Configs

Made from `flowalign/schema.py` when this page was built.

A run is one YAML file. `stage` says what it does and which keys it may have. Any key can be changed
on the command line, `key.path=value` with the value as YAML and items of a list by index:
`optimizer.lr=3e-4 tasks.0.weight=2`. A config is refused before a model is loaded, with all that is
wrong in it at once: unknown keys, values of another type or outside their range, keys that
contradict each other, prompts, rewards and adapters that are not there. What a run was given lies
in its `config.yaml`, with defaults filled in. The files under `configs/` are the examples to start
from.

`use: FILE` at the top lays a file over another one (relative to it), section by section.
`--variant FILE` on the command line lays the keys that FILE has for this stage over the config:
the same run for other hardware, as in `configs/variants/`.

**Bold** keys have no default and must be given.
"""

Schema = Mapping[str, Any]


def page(configs: Path) -> str:
    """The page in Markdown; `configs` is the folder of the examples."""
    schemas = {stage: root.model_json_schema() for stage, root in STAGES.items()}
    places = _places(schemas)
    parts = [HEAD, "## Stages", _overview()]
    for stage, schema in schemas.items():
        parts += [f"### stage: {stage} {{#stage-{stage}}}", _sentence(schema)]
        parts += [_table(schema), _example(stage, configs)]
    parts += ["## Sections", "The mappings inside a config, each where the heading says."]
    sections = {name: s for schema in schemas.values() for name, s in schema["$defs"].items()}
    for name in places:
        where = ", ".join(f"`{place}`" for place in places[name])
        parts += [f"### {where} {{#{name.lower()}}}", _sentence(sections[name])]
        parts += [_table(sections[name])]
    return "\n\n".join(parts) + "\n"


def _overview() -> str:
    rows = ["| stage | what it does | run by |", "|---|---|---|"]
    for stage, root in STAGES.items():
        rows.append(f"| [`{stage}`](#stage-{stage}) | {_first(root)} | `{command(stage)}` |")
    return "\n".join(rows)


def _first(root: type[Stage]) -> str:
    return (root.__doc__ or "").splitlines()[0]


def _sentence(schema: Schema) -> str:
    return " ".join(schema["description"].split())


def _table(schema: Schema) -> str:
    required = schema.get("required", ())
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, of in schema["properties"].items():
        name = f"**`{key}`**" if key in required else f"`{key}`"
        default = "" if key in required else _default(of)
        rows.append(f"| {name} | {kind(of)} | {default} | {_meaning(of, schema)} |")
    return "\n".join(rows)


def _meaning(of: Schema, owner: Schema) -> str:
    text = " ".join(of.get("description", "").split())
    if not text and (name := _section(of)):
        text = _sentence(owner.get("$defs", {}).get(name, {"description": ""}))
    examples = [_value(example) for example in of.get("examples", ())]
    shown = f" For example {', '.join(examples)}." if examples else ""
    return html.escape(text, quote=False).replace("|", "\\|") + shown


def _default(of: Schema) -> str:
    if _section(of) and of["default"] is not None:
        return "its own"
    return _value(of["default"]) if "default" in of else "its own"


def _value(value: Any) -> str:
    return f"`{json.dumps(value)}`" if not isinstance(value, str) else f"`{value}`"


def _section(of: Schema) -> str | None:
    """The section that a key holds, itself or as its only alternative to null."""
    for each in (of, *of.get("anyOf", ()), of.get("items", {}), of.get("additionalProperties", {})):
        if isinstance(each, Mapping) and "$ref" in each:
            return each["$ref"].rpartition("/")[2]
    return None


def kind(of: Schema) -> str:
    """The type and range of a JSON schema, in words."""
    if "$ref" in of:
        name = of["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in of:
        return " or ".join(kind(each) for each in of["anyOf"])
    if "const" in of:
        return f"`{of['const']}`"
    if "enum" in of:
        return "one of " + ", ".join(f"`{each}`" for each in of["enum"])
    plain = {"integer": "whole number", "number": "number", "boolean": "true or false"}
    named = plain | {"string": "text", "null": "`null`"}
    if of.get("type") == "array":
        if "prefixItems" in of:
            return "[" + ", ".join(kind(each) for each in of["prefixItems"]) + "]"
        return f"list of {kind(of['items'])}"
    if of.get("type") == "object":
        inner = of.get("additionalProperties")
        return f"name: {kind(inner)}" if isinstance(inner, Mapping) and inner else "mapping"
    return " ".join([named.get(of.get("type", ""), "anything"), *_range(of)])


def _range(of: Schema) -> Iterator[str]:
    signs = {
        "minimum": "≥",
        "exclusiveMinimum": ">",
        "maximum": "≤",
        "exclusiveMaximum": "<",
        "multipleOf": "multiple of",
    }
    yield from (f"{sign} {of[key]:g}" for key, sign in signs.items() if key in of)


def _places(schemas: Mapping[str, Schema]) -> dict[str, list[str]]:
    """Section -> the places in configs that hold one, sections in the order they are met."""
    found: dict[str, list[str]] = {}

    def look(properties: Schema, defs: Schema, prefix: str) -> None:
        for key, of in properties.items():
            name = _section(of)
            if name is None:
                continue
            suffix = {"array": "[]", "object": ".NAME"}.get(of.get("type", ""), "")
            place = f"{prefix}{key}{suffix}"
            if place not in found.setdefault(name, []):
                found[name].append(place)
            look(defs[name]["properties"], defs, f"{place}.")

    for schema in schemas.values():
        look(schema["properties"], schema["$defs"], "")
    return found


def _example(stage: str, configs: Path) -> str:
    """A shipped config of that stage, the shortest of the tiny world's where it has one, as a box
    that unfolds."""
    named = [p for p in sorted(configs.rglob("*.yaml")) if _stage(p) == stage]
    of_stage = [p for p in named if p.parent.name == "tiny"] or named
    if not of_stage:
        return ""
    path = min(of_stage, key=lambda p: len(p.read_text(encoding="utf-8")))
    shown = path.relative_to(configs.parent)
    lines = [f'??? example "{shown}"', "", "    ```yaml"]
    lines += [f"    {line}" for line in path.read_text(encoding="utf-8").splitlines()]
    return "\n".join([*lines, "    ```"])


def _stage(path: Path) -> str | None:
    lines = path.read_text(encoding="utf-8").splitlines()
    return next((line.split()[1] for line in lines if line.startswith("stage: ")), None)
