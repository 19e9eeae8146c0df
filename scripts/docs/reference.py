"""Fills the reference of docs/ from the docstrings: `python scripts/docs/reference.py`.

A page says where: `<!-- reference: flowalign.score -->` ... `<!-- end -->`. After the name may
stand a heading in quotes, or in brackets the members of a class that are shown (all, without).
A section of the config becomes a table of its keys.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(
    r'(<!-- reference: (?P<name>[\w.]+)(?: "(?P<title>.+?)")?(?: \[(?P<members>.+?)\])? -->\n)'
    r".*?(?=<!-- end -->)",
    re.DOTALL,
)
SIGNS = {"ge": "≥ ", "gt": "> ", "le": "≤ ", "lt": "< ", "multiple_of": "multiple of "}
WORDS = {str: "text", bool: "true or false", int: "int", float: "float", NoneType: "null"}


def filled(page: str) -> str:
    """The page, with what its blocks ask for as of the code that is installed."""
    titles = {resolved(m["name"]): m["title"] for m in BLOCK.finditer(page)}

    def block(match: re.Match[str]) -> str:
        thing = resolved(match["name"])
        name = match["name"]
        if hasattr(thing, "model_fields"):
            lines = section(thing, match["title"], titles)
        else:
            members = match["members"] and match["members"].split(", ")
            lines = described(thing, name, members, titles)
        return match[1] + "\n" + "\n".join(lines).strip() + "\n\n"

    return BLOCK.sub(block, page)


def resolved(name: str) -> Any:
    """What a dotted name names."""
    module, _, attribute = name.rpartition(".")
    return pkgutil.resolve_name(f"{module}:{attribute}")


# Sections of the config ---------------------------------------------------------------------------


def section(model: Any, title: str, titles: Mapping[Any, str]) -> Iterator[str]:
    """A table of the keys, without those of a parent with a table of its own. titles: headings of
    the sections that the page has."""
    parent = next((base for base in model.__mro__[1:] if base in titles), None)
    yield f"### {title}"
    yield ""
    yield escaped(inspect.getdoc(model) or "")
    yield ""
    if parent:
        yield f"Besides the keys of [{titles[parent]}](#{slug(titles[parent])}):"
        yield ""
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for key in model.model_fields:
        line = row(key, model, titles)
        if key != "stage" and (not parent or line != row(key, parent, titles)):
            yield line


def row(key: str, model: Any, titles: Mapping[Any, str]) -> str:
    """Of the table; "" if the section has no such key."""
    from flowalign.config.safe_yaml import inline_yaml
    from flowalign.config.section import about

    if key not in model.model_fields:
        return ""
    field = model.model_fields[key]
    meaning = escaped(field.description or about(field.annotation))
    if field.examples:
        meaning += f" For example {', '.join(f'`{inline_yaml(e)}`' for e in field.examples)}."
    cells = f"`{key}`", kind(field.annotation, titles, field.metadata), default(field), meaning
    return "| " + " | ".join(" ".join(cell.replace("|", r"\|").split()) for cell in cells) + " |"


def kind(type_: Any, titles: Mapping[Any, str], about: Sequence[Any] = ()) -> str:
    """A type in words, with its limits; a section as a link to its heading."""
    if get_origin(type_) is Annotated:
        inner, *more = get_args(type_)
        return kind(inner, titles, [n for m in more for n in getattr(m, "metadata", [m])])
    origin, arguments = get_origin(type_), get_args(type_)
    if type_ in titles:
        text = f"[{titles[type_]}](#{slug(titles[type_])})"
    elif origin is Literal:
        text = ", ".join(f"`{value}`" for value in arguments)
    elif origin in (Union, UnionType):
        text = " or ".join(dict.fromkeys(kind(part, titles) for part in arguments))
    elif origin is tuple and Ellipsis not in arguments:
        text = f"[{', '.join(kind(part, titles) for part in arguments)}]"
    elif origin in (list, tuple):
        text = f"list of {kind(arguments[0], titles)}"
    elif origin is not None:
        text = f"mapping to {kind(arguments[-1], titles)}"
    else:
        text = WORDS.get(type_, getattr(type_, "__name__", str(type_)))
    parts = [text]
    for limit in about:
        for name, sign in SIGNS.items():
            value = getattr(limit, name, None)
            if value is not None and value < 10_000:
                parts.append(f"{sign}{value:g}")
    return " ".join(parts)


def default(field: Any) -> str:
    """Of a key, as YAML."""
    from flowalign.config.safe_yaml import inline_yaml
    from flowalign.config.section import Section

    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Section):
        value = value.model_dump(mode="json", exclude_defaults=True)
        return f"`{inline_yaml(value)}`" if value else "its own"
    return f"`{inline_yaml(value)}`"


# Functions and classes ----------------------------------------------------------------------------


def described(
    thing: Any, name: str, members: Collection[str] | None, known: Collection[Any]
) -> Iterator[str]:
    """A function or a class with its public members, signature and docstring. known: what the page
    describes; members of a parent are not repeated."""
    short = name.rpartition(".")[2]
    yield f"### `{name}`"
    yield ""
    yield from documented(thing, short)
    if not isinstance(thing, type):
        return
    own = [base for base in thing.__mro__ if "flowalign" in base.__module__]
    own = [base for base in own if base is thing or base not in known]
    for key in dict.fromkeys(key for base in own for key in vars(base)):
        member = inspect.getattr_static(thing, key)
        member = getattr(member, "__func__", member)  # of a class method
        shown = key in members if members else not key.startswith("_")
        if shown and inspect.isroutine(member) | hasattr(member, "fget") | hasattr(member, "func"):
            yield f"#### `{short}.{key}`"
            yield ""
            yield from documented(member, key)


def documented(thing: Any, name: str) -> Iterator[str]:
    """The signature of a call, and the docstring as Markdown."""
    parameters: Collection[str] = ()
    if callable(thing):
        parameters = inspect.signature(thing).parameters
        yield from ("```py", signature(thing, name), "```", "")
    yield markdown(inspect.getdoc(thing) or "", parameters)
    yield ""


def signature(thing: Callable[..., Any], name: str) -> str:
    """On one line if it fits, else with a line for each parameter."""
    found = inspect.signature(thing)
    parts = []
    for parameter in found.parameters.values():
        text = str(parameter.replace(annotation=parameter.empty, default=parameter.empty))
        if parameter.annotation is not parameter.empty:
            text += f": {parameter.annotation}"
        if parameter.default is not parameter.empty:
            given = getattr(parameter.default, "__name__", repr(parameter.default))
            text += f" = {given}" if ": " in text else f"={given}"
        if parameter.kind is parameter.KEYWORD_ONLY and not any(p.startswith("*") for p in parts):
            parts.append("*")
        parts.append(text)
    back = (
        "" if found.return_annotation in (found.empty, "None") else f" -> {found.return_annotation}"
    )
    line = f"{name}({', '.join(parts)}){back}"
    return line if len(line) <= 92 else f"{name}(\n    " + ",\n    ".join(parts) + f",\n){back}"


def markdown(text: str, names: Collection[str]) -> str:
    """A docstring with lists and code blocks as Markdown wants them: parameters stand as `name:
    text`, formulas are indented. names: the parameters."""
    return "\n\n".join(_paragraph(part, names) for part in text.split("\n\n"))


def _paragraph(text: str, names: Collection[str]) -> str:
    """A list if its first line describes a parameter and lines hang; else text and formulas."""
    lines: list[str] = []
    listed = _parameters(text, names) and "\n    " in text
    for line in text.splitlines():
        last = lines[-1] if lines else ""
        if listed and (described := _parameters(line, names)):
            line = f"- `{described}`{line[len(described) :]}"
        elif line.startswith("    "):
            if not listed and not last.startswith("    "):
                lines.append("")
        elif last.startswith(("- ", "    ")):
            lines.append("")
        lines.append(line if line.startswith("    ") and not listed else escaped(line))
    return "\n".join(lines)


def _parameters(line: str, names: Collection[str]) -> str:
    """`a, b` of a line `a, b: text`, if these are parameters; else ""."""
    described = re.match(r"([\w, ]+): ", line)
    return described[1] if described and set(described[1].split(", ")) <= set(names) else ""


def escaped(text: str) -> str:
    """Text that no reader takes for a tag, but for what stands in backquotes."""
    return re.sub(r"(`[^`]*`)|<", lambda found: found[1] or "&lt;", text)


def slug(title: str) -> str:
    """The anchor of a heading, on the site and on GitHub."""
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


def main() -> int:
    """Rewrite the pages; status 1: some were not as the code is."""
    stale = False
    for path in sorted(DOCS.rglob("*.md")):
        page = path.read_text()
        if (new := filled(page)) != page:
            path.write_text(new)
            print(f"{path} is written anew")
            stale = True
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
