"""YAML as configs use it: 1e-4 is a number, 2026-11-22 is a text, and no key is given twice."""

from __future__ import annotations

import re
from typing import Any

import yaml


def load_yaml(text: str) -> Any:
    """The value of a text; yaml.YAMLError for what is not one. No Python object is built."""
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except (ValueError, RecursionError) as error:  # as of `!!int x`
        raise yaml.YAMLError(str(error)) from error


def dump_yaml(value: Any, **options: Any) -> str:
    """The text of a value, which `load_yaml` reads back."""
    return yaml.dump(value, Dumper=_Dumper, **options)


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """As SafeLoader, but the last of two equal keys does not silently win."""
        node, seen = super().compose_mapping_node(anchor), set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                text = f"the key {key.value!r} is given twice"
                raise yaml.MarkedYAMLError(problem=text, problem_mark=key.start_mark)
            seen.add(key.value)
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that _Loader would read as numbers."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _class in (_Loader, _Dumper):  # YAML 1.1 reads 1e-4, without a dot, as text
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+\Z"),
        list("-+.0123456789"),
    )
