"""YAML 1.2 as configs use it: 1e-4 and 010 (ten) are numbers; `on`, 1:30 and 2026-11-22 are texts;
and no key is given twice."""

from __future__ import annotations

import re
from typing import Any

import yaml

# What a text without quotes may be; the first form that it has decides, without one it is a text.
FORMS = {
    "bool": "true|True|TRUE|false|False|FALSE",
    "null": "~|null|Null|NULL|",
    "merge": "<<",
    "int": r"[-+]?(\d[\d_]*|0o[0-7]+|0x[\da-fA-F]+)",  # 1_000, as in YAML 1.1 and Python
    "float": r"[-+]?((\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?|\.(inf|Inf|INF))|\.(nan|NaN|NAN)",
}


def load_yaml(text: str) -> Any:
    """Read the value of a text. Raises yaml.YAMLError if it is not YAML. Builds no Python
    objects."""
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except (ValueError, LookupError, AttributeError, RecursionError) as error:  # as of `!!int x`
        raise yaml.YAMLError(str(error)) from error


def dump_yaml(value: Any, **options: Any) -> str:
    """A value as YAML that readers of YAML 1.1 read alike. options: those of `yaml.dump`."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, **options)


def inline_yaml(value: Any) -> str:
    """A value as YAML on one line, as a key or after one. A text of several lines takes more."""
    return dump_yaml([value], default_flow_style=True, width=10**6).strip()[1:-1]


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # those of YAML 1.1

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
    """Quotes what either version of YAML reads as another value than a text."""


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.integer)
for _kind, _form in FORMS.items():
    for _class in (_Loader, _Dumper):
        _regexp = re.compile(rf"({_form})\Z", re.ASCII)
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", _regexp, None)
