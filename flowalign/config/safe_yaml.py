"""YAML as configs use it: text, numbers, true/false, null, lists and mappings, and nothing else.

A text may come from a stranger. What cannot be a config is refused as a `yaml.YAMLError`, in time
that grows with the length of the text only: other tags (dates, binary, Python objects), a key given
twice, numbers of many digits, characters that no file name can hold, deep nesting, and aliases that
expand to more values than any config has.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

LONGEST = 300_000  # characters of a text; the longest config that ships has 5,000
DEEPEST = 40  # levels of nesting; a recipe has 8
VALUES = 50_000  # after aliases are expanded; a recipe has about 300
DIGITS = 40  # characters of a whole number
IMPOSSIBLE = re.compile("[\0\ud800-\udfff]")  # in a file name, a terminal or JSON
TAGS = ("null", "bool", "int", "float", "str", "seq", "map")


def load(text: str) -> Any:
    """The value of a text; yaml.YAMLError for what is not one."""
    if len(text) > LONGEST:
        raise yaml.YAMLError(f"it has {len(text)} characters; a config has at most {LONGEST}")
    return yaml.load(text, Loader=_Loader)  # a SafeLoader


def dump(value: Any, **options: Any) -> str:
    """The text of a value, which `load` reads back."""
    return yaml.dump(value, Dumper=_Dumper, **options)


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads 1e-4 as a number, with the limits above."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """As SafeLoader, to a limited depth: each level is a few calls of Python."""
        if self._depth == DEEPEST:
            raise _problem(f"nested more than {DEEPEST} levels deep", self.peek_event())
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def compose_document(self) -> yaml.Node | None:
        """As SafeLoader; the size is checked before anything is built, since each alias is another
        copy to whoever walks through the values."""
        node = super().compose_document()
        if node is not None:
            _count(node, {})
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """As SafeLoader, but the last of two equal keys does not silently win."""
        node, seen = super().compose_mapping_node(anchor), set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise _problem(f"the key {_short(key.value)} is given twice", key)
                seen.add(key.value)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """As SafeLoader; a value that its tag does not fit (`!!int x`) is an error of YAML."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            tag = node.tag.rpartition(":")[2]
            raise _problem(f"{_short(node.value)} is not of the type !!{tag}", node) from error

    def construct_scalar(self, node: Any) -> Any:
        """As SafeLoader, without IMPOSSIBLE, and without numbers that take a second to read."""
        value = super().construct_scalar(node)
        if bad := IMPOSSIBLE.search(value):
            raise _problem(f"the character {bad[0]!r} is not possible in a text", node)
        if node.tag == "tag:yaml.org,2002:int" and len(value) > DIGITS:
            raise _problem(f"a number of {len(value)} characters; at most {DIGITS} are read", node)
        return value


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that _Loader would read as numbers."""


def _count(node: yaml.Node, sizes: dict[yaml.Node, int]) -> int:
    """The number of values below a node, aliases counted each time. sizes: of the nodes before; 0
    for one that is being counted, and so holds itself."""
    if node in sizes:
        if not sizes[node]:
            raise _problem("an alias stands for a value that holds the alias", node)
        return sizes[node]
    sizes[node] = 0
    size = 1
    for child in node.value if isinstance(node, yaml.CollectionNode) else ():
        for part in child if isinstance(child, tuple) else (child,):
            size += _count(part, sizes)
    if size > VALUES:
        raise _problem(f"it holds more than {VALUES} values, aliases expanded", node)
    sizes[node] = size
    return size


def _problem(text: str, where: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=text, problem_mark=where.start_mark)


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else "the value"
    return text if len(text) <= 60 else f"{text[:57]}..."


_Loader.yaml_constructors = {
    tag: construct
    for tag, construct in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or str(tag).rpartition(":")[2] in TAGS  # None: raises for all others
}
_Loader.yaml_implicit_resolvers = {  # 2026-11-22 is a text
    first: [(tag, regexp) for tag, regexp in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _class in (_Loader, _Dumper):  # YAML 1.1 reads 1e-4, without a dot, as text
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+\Z"),
        list("-+.0123456789"),
    )
