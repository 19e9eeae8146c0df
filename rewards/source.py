"""The code that a reward's scores depend on, as a digest: other code, other scores.

That of the module that defines it, and of what this imports, inside functions as well, as far as it
is the user's own or another reward of flowalign; of an installed plugin, its version, too. What was
typed into a notebook counts with the functions, classes and plain values that it uses. Not seen are
other installed packages, modules that are imported by a computed name, and files of data.
"""

from __future__ import annotations

import ast
import inspect
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec, resolve_name
from itertools import accumulate
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from flowalign.system.manifest import json_sha256

log = logging.getLogger("flowalign")

OURS = "flowalign.rewards."
FRAME = {OURS + name for name in ("base", "options", "scoring", "source")}  # no reward's own
# of functions, classes, methods, decorated functions, properties, partials and compiled code
PARTS = "__defaults__ __kwdefaults__ __bases__ __func__ __self__ __wrapped__ fget func args".split()
PARTS += "keywords co_code co_names co_consts".split()
_first: dict[str, tuple[ModuleSpec, bytes]] = {}  # a module's file when it was first looked at


def digest(code: Any) -> str | None:
    """Of a module, by its name, or of a class or function. None if no module has that name."""
    found: Any = _files(code if isinstance(code, str) else code.__module__, {}, whole=True)
    if not isinstance(code, str):
        found = [found, *_pieces(code, {})]
    return json_sha256(found)[:16] if found else None


def _files(module: str, found: dict[str, Any], whole: bool = False) -> dict[str, Any]:
    """{name: content} of a module and of those that it imports; imports none. whole: even of an
    installed one."""
    folders = None
    for name in accumulate(module.split("."), "{}.{}".format):
        if name in sys.modules:
            spec = getattr(sys.modules[name], "__spec__", None)
        else:
            spec = PathFinder.find_spec(name, folders) if folders else find_spec(name)
        if spec is None:
            break  # an attribute, or nothing
        folders, top = spec.submodule_search_locations, name.partition(".")[0]
        installed = not {"site-packages", "dist-packages"}.isdisjoint(Path(spec.origin or "").parts)
        own = not installed and top not in sys.stdlib_module_names
        if top == "flowalign":
            installed, own = False, name.startswith(OURS) and name not in FRAME
        if name not in found and spec.has_location and (own or whole and name == module):
            found[name] = content = _content(name, spec)
            if installed:
                found |= {d: version(d) for d in packages_distributions().get(top, ())}
            for imported in _imports(content, name if folders else name.rpartition(".")[0]):
                _files(imported, found)
        if not folders:
            break
    return found


def _content(name: str, spec: ModuleSpec) -> bytes:
    """Of a module's file, as it was when this process imported it, as far as that is known."""
    now = spec.loader.get_data(spec.origin)  # type: ignore[union-attr]
    if name not in _first or _first[name][0] is not spec:  # not imported yet, or reloaded
        _first[name] = spec, now
    if _first[name][1] != now:
        log.warning("%s was edited. This process still runs what it imported: restart it", name)
    return _first[name][1]


def _imports(content: bytes, package: str) -> Iterator[str]:
    """What a module of a package imports, anywhere in its code: modules, and what is in them."""
    with suppress(SyntaxError, ValueError, ImportError):  # it is no Python
        for node in ast.walk(ast.parse(content)):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = resolve_name("." * node.level + (node.module or ""), package)
                yield from (f"{base}.{alias.name}" for alias in node.names)


def _pieces(value: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """What an object is made of: contents of files, compiled code of what was typed, values."""
    if value is None or isinstance(value, str | bytes | int | float | complex):
        yield repr(value)
        return
    if id(value) in seen:
        return
    seen[id(value)] = value  # kept, as the number of an object that is gone is given again
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        inner = [*value, *value.values()] if isinstance(value, Mapping) else [*value]
        inner = sorted(inner, key=repr) if isinstance(value, set | frozenset) else inner
    else:
        inner = [getattr(value, name, None) for name in PARTS]
        module = getattr(value, "__name__" if isinstance(value, ModuleType) else "__module__", "")
        yield (files := _files(str(module or "?"), {}))
        inner += [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
        if inspect.isfunction(value):
            if module == "__main__" or not Path(value.__code__.co_filename).is_file():
                code = value.__code__
                inner += [code, *(value.__globals__.get(name) for name in sorted(_names(code)))]
        elif module == "__main__" or files and not isinstance(value, type | ModuleType):
            inner += [type(value), *getattr(value, "__dict__", {}).values()]
    for part in inner:
        yield from _pieces(part, seen)


def _names(code: CodeType) -> set[str]:
    """The names that a function uses, and those inside it."""
    return {*code.co_names}.union(*(_names(c) for c in code.co_consts if isinstance(c, CodeType)))
