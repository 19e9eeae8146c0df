"""YAML as configs use it: numbers as in YAML 1.2, so that 1e-4 and 010 (ten) are numbers, and 1:30
is a text, as is 2026-11-22; and no key is given twice."""

from __future__ import annotations

import re
from typing import Any

import yaml


def load_yaml(text: str) -> Any:
    """Read the value of a text. Raises yaml.YAMLError if it is not YAML. Builds no Python
    objects."""
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except (ValueError, RecursionError) as error:  # as of `!!int x`
        raise yaml.YAMLError(str(error)) from error


def dump_yaml(value: Any, **options: Any) -> str:
    return yaml.dump(value, Dumper=_Dumper, **options)


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping, and refuse a key that is given twice; SafeLoader would take the
        last."""
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                text = f"the key {key.value!r} is given twice"
                raise yaml.MarkedYAMLError(problem=text, problem_mark=key.start_mark)
            seen.add(key.value)
        return node

    def integer(self, node: Any) -> int:  # int(text, 0) refuses 010
        return int(re.sub(r"\b0+\B(?=\d)", "", self.construct_scalar(node)), 0)


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that _Loader would read as numbers."""


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.integer)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, r) for tag, r in resolvers if tag.endswith((":bool", ":null", ":merge"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind, _form in (
    ("int", r"[-+]?(\d[\d_]*|0o[0-7]+|0x[\da-fA-F]+)\Z"),  # 1_000, as in YAML 1.1 and Python
    ("float", r"([-+]?((\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?|\.(inf|Inf|INF))|\.(nan|NaN|NAN))\Z"),
):
    for _class in (_Loader, _Dumper):
        _regexp = re.compile(_form, re.ASCII)
        _first = list("-+.0123456789")
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", _regexp, _first)
