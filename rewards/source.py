"""A digest of the code that a reward's scores depend on: other code, other scores.

The digest covers the module that defines the reward, and the modules that it imports, inside
functions as well, if they are the user's or other rewards of flowalign. For an installed plugin it
also covers the version. A cell of a notebook counts as a file, with the cells of the functions and
classes that it names. The digest does not cover other installed packages, modules imported by a
computed name, and data files.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import logging
import sys
from collections.abc import Iterator
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
FRAME = {OURS + name for name in ("base", "options", "scoring", "source")}  # shared by all rewards


def digest(code: Any) -> str | None:
    """The digest of a module, by its name or a dotted path, or of a class or function. None if no
    file or cell holds it."""
    module = code.partition(":")[0] if isinstance(code, str) else code.__module__
    if module == "__main__":
        content = _cells(code)
    else:
        content = _files(module, {}, whole=True)
    return json_sha256(content)[:16] if content else None


def _files(module: str, contents: dict[str, Any], whole: bool = False) -> dict[str, Any]:
    """{name: content} of a module and of the modules that it imports, as this process imported
    them. Imports none itself. whole: read the module even if it is installed."""
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
        is_covered = is_user_code or whole and name == module
        if is_covered and name not in contents and spec.has_location:
            now = spec.loader.get_data(spec.origin)  # type: ignore[union-attr]
            # as it was first seen; a module that is reloaded has another spec
            first = vars(spec).setdefault("flowalign_first", now)
            contents[name] = first
            if first != now:
                log.warning("%s was edited. This process runs what it imported: restart it", name)
            if not is_user_code:
                contents |= {d: version(d) for d in packages_distributions().get(top, ())}
            package = name if folders else name.rpartition(".")[0]
            for imported in _imports(first, package):
                _files(imported, contents)
        if not folders:
            break
    return contents


def _imports(content: bytes, package: str) -> Iterator[str]:
    """What a module of a package imports, anywhere in its code: modules, and what is in them."""
    with suppress(SyntaxError, ValueError, ImportError):  # not Python
        for node in ast.walk(ast.parse(content)):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = resolve_name("." * node.level + (node.module or ""), package)
                yield from (f"{base}.{alias.name}" for alias in node.names)


def _cells(definition: Any) -> dict[str, Any]:
    """The cells of a notebook, or the script, that hold a class or function and what it names there
    (classes, functions, plain values); and the files of modules that it names."""
    files: dict[str, Any] = {}
    cells: dict[Any, str] = {}
    values: list[str] = []
    named: list[tuple[str, Any]] = [("", definition)]
    for name, value in named:  # grows
        function = inspect.unwrap(value)
        code = getattr(function, "__code__", None)
        module = getattr(value, "__name__" if isinstance(value, ModuleType) else "__module__", None)
        if isinstance(value, str | int | float):
            values.append(f"{name} = {value!r}")
        elif module != "__main__":
            _files(str(module), files)
        elif inspect.isclass(value) and value not in cells:
            cells[value] = ""
            named += vars(value).items()
        elif code and code.co_filename not in cells:
            text = "".join(linecache.getlines(code.co_filename))
            cells[code.co_filename] = text
            named += [(name, function.__globals__.get(name)) for name in _loaded(text)]
    return files | {"": [*cells.values(), *values]} if any(cells.values()) else {}


def _loaded(text: str) -> list[str]:
    """The names that a cell reads and does not set."""
    names = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)]
    stored = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    return sorted({node.id for node in names} - stored)
