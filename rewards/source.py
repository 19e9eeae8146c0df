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
from importlib.machinery import PathFinder
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec, resolve_name
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

from flowalign.system.manifest import json_sha256

log = logging.getLogger("flowalign")

OURS = "flowalign.rewards."
FRAME = {OURS + name for name in ("base", "options", "scoring", "source")}  # no reward's own
# of functions, closures, classes, methods, decorated functions, properties and partials
PARTS = "__defaults__ __kwdefaults__ __closure__ cell_contents __bases__ __func__ __self__".split()
PARTS += "__wrapped__ fget func args keywords".split()


def digest(code: Any) -> str | None:
    """Of a module, by its name, or of a class or function. None if no module has that name."""
    found: Any = _files(code if isinstance(code, str) else code.__module__, {}, whole=True)
    if not isinstance(code, str):
        found = [found, *_pieces(code, {})]
    return json_sha256(found)[:16] if found else None


def _files(module: str, found: dict[str, Any], whole: bool = False) -> dict[str, Any]:
    """{name: content} of a module and of those that it imports, as this process imported them;
    imports none. whole: even of an installed one."""
    folders = None
    for name in accumulate(module.split("."), "{}.{}".format):
        if name in sys.modules:
            spec = getattr(sys.modules[name], "__spec__", None)
        else:
            spec = PathFinder.find_spec(name, folders) if folders else find_spec(name)
        if spec is None:
            break  # an attribute, or nothing
        folders = spec.submodule_search_locations
        top = name.partition(".")[0]
        if top == "flowalign":
            is_user_code = name.startswith(OURS) and name not in FRAME
        else:
            installed = {"site-packages", "dist-packages"} & {*Path(spec.origin or "").parts}
            is_user_code = not installed and top not in sys.stdlib_module_names
        counts = is_user_code or whole and name == module
        if counts and name not in found and spec.has_location:
            now = spec.loader.get_data(spec.origin)  # type: ignore[union-attr]
            # as it was first seen; a module that is reloaded has another spec
            first = vars(spec).setdefault("flowalign_first", now)
            found[name] = first
            if first != now:
                log.warning("%s was edited. This process runs what it imported: restart it", name)
            if not is_user_code:
                found |= {d: version(d) for d in packages_distributions().get(top, ())}
            package = name if folders else name.rpartition(".")[0]
            for imported in _imports(first, package):
                _files(imported, found)
        if not folders:
            break
    return found


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
    module = getattr(value, "__name__" if isinstance(value, ModuleType) else "__module__", None)
    files = _files(str(module or "?"), {})
    yield files
    inner = [getattr(value, name, None) for name in PARTS]
    if isinstance(value, Mapping):
        inner = [*value, *value.values()]
    elif isinstance(value, list | tuple):
        inner = value
    elif isinstance(value, set | frozenset):
        inner = sorted(value, key=repr)
    elif inspect.isfunction(value):
        if module == "__main__" or not Path(value.__code__.co_filename).is_file():
            codes = [value.__code__]
            for code in codes:  # with the functions inside it
                inner += [code.co_code, code.co_names, code.co_consts]
                codes += [const for const in code.co_consts if inspect.iscode(const)]
            names = {name for code in codes for name in code.co_names}
            inner += [value.__globals__.get(name) for name in sorted(names)]
    elif module == "__main__" or files and not isinstance(value, type | ModuleType):
        inner += [type(value), getattr(value, "__dict__", None)]
    for part in inner:
        yield from _pieces(part, seen)
