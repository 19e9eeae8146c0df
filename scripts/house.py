"""Draw the house: rooms, arrows between them, tokens, public names, the longest chain of calls.

    python scripts/house.py [ROOT]
    python scripts/house.py --budget    # fails where a room has more tokens than BUDGET (and 5 %)

A room is a module or a package directly under flowalign/ (rewards, teachers and eval included). An
arrow is an import of one room by another, at any depth of the code. An arrow is upward if it has to
go for the rooms to stand in an order in which each imports only those below it.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import io
import itertools
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

LINKED = ("rewards", "teachers", "eval")
# Tokens of code in each room. A room may have SLACK times as many; a larger change says so here.
BUDGET = {
    "backbone": 22222,
    "checks": 4749,
    "commands": 32471,
    "config": 11063,
    "credit": 1074,
    "eval": 18786,
    "flowalign": 241,
    "report": 11309,
    "rewards": 28249,
    "sde": 1041,
    "system": 7526,
    "teachers": 10490,
    "training": 20344,
    "types": 1489,
}
SLACK = 1.05
LONG = 80  # lines of a function that are worth a warning
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Methods of lists, dicts, texts, files ...: a call of one of these names says nothing of its class.
KINDS = [
    kind
    for kind in (*vars(builtins).values(), io.StringIO, io.BytesIO, Path)
    if isinstance(kind, type) and not issubclass(kind, BaseException)
]
COMMON = {name for kind in KINDS for name in dir(kind)}


def modules(root: Path) -> dict[str, Path]:
    """Import name -> file, each file once."""
    files = {}
    for name in ("flowalign", *LINKED):
        top = root / name
        for path in sorted(top.rglob("*.py")):
            parts = path.relative_to(top).with_suffix("").parts
            if name == "flowalign" and parts[0] in LINKED:
                continue
            prefix = ("flowalign",) if name == "flowalign" else ("flowalign", name)
            files[".".join([*prefix, *(p for p in parts if p != "__init__")])] = path
    return files


def room(module: str) -> str:
    """The room of a module: the second part of its name; the package itself is `flowalign`."""
    return module.split(".")[1] if "." in module else module


def imports(tree: ast.AST, known: dict[str, Path]) -> Iterator[str]:
    """The modules of the library that a tree imports, but for type checkers alone."""
    unseen = set[ast.AST]()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            unseen.update(ast.walk(node))
    for node in ast.walk(tree):
        if node in unseen:
            continue
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in known or node.module in known:
                    yield whole if whole in known else node.module


def by_name(tree: ast.AST, known: dict[str, Path]) -> Iterator[str]:
    """The modules of the library that a tree names in texts, as module:function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            module, colon, name = node.value.partition(":")
            if colon and name.isidentifier() and module in known:
                yield module


def unread(tree: ast.AST) -> Iterator[ast.stmt]:
    """The statements that are no code to read: docstrings and imports."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and ast.get_docstring(node):
            yield node.body[0]


def code_size(text: str) -> tuple[int, int]:
    """(Tokens, lines) of a module's code: without docstrings, imports, comments and line breaks."""
    skipped: set[int] = set()
    for node in unread(ast.parse(text)):
        skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    layout = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in layout and token.start[0] not in skipped
    ]
    return len(tokens), len({token.start[0] for token in tokens})


def room_tokens(root: Path) -> Counter[str]:
    """The tokens of code in each room."""
    tokens: Counter[str] = Counter()
    for module, path in modules(root).items():
        tokens[room(module)] += code_size(path.read_text())[0]
    return tokens


def above_budget(root: Path) -> list[str]:
    """The rooms with more tokens than BUDGET and its slack, one text each."""
    texts = []
    for name, count in room_tokens(root).items():
        most = int(BUDGET.get(name, 0) * SLACK)
        if count > most:
            texts.append(f"{name}: {count} tokens, {count - most} above its budget with slack")
    return texts


def shape(node: ast.AST) -> str:
    """An expression without its names and values: equal for `box[0] / 2` and `size[1] / 2`."""
    node = ast.parse(ast.unparse(node), mode="eval")
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            inner.id = ""
        elif isinstance(inner, ast.Attribute):
            inner.attr = ""
        elif isinstance(inner, ast.Constant):
            inner.value = type(inner.value).__name__
    return ast.dump(node)


def assigns_unlike(node: ast.Assign) -> bool:
    """Is it `a, b = ...` of values that look unlike, or of attributes from plain names? A value
    that reads an earlier target is a swap, which has no other form."""
    target = node.targets[0]
    if not (isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)):
        return False
    if len(target.elts) != len(node.value.elts):
        return False
    stored = {ast.unparse(element) for element in target.elts}
    if any(ast.unparse(inner) in stored for inner in ast.walk(node.value) if hasattr(inner, "ctx")):
        return False
    stores = all(isinstance(element, ast.Attribute) for element in target.elts)
    plain = all(isinstance(value, ast.Name) for value in node.value.elts)
    return (stores and plain) or len({shape(value) for value in node.value.elts}) > 1


def dense(tree: ast.AST) -> Iterator[str]:
    """Lines that do more than one thing, one text each."""
    heads: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.While)):
            heads.update(ast.walk(node.test))
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and assigns_unlike(node):
            yield f"{node.lineno}: a tuple assignment of unlike values"
        if isinstance(node, ast.NamedExpr) and node not in heads:
            yield f"{node.lineno}: := outside the head of an if or while"
        if isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
            if isinstance(node.iter, ast.IfExp):
                yield f"{node.iter.lineno}: a loop over a conditional expression"
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            yield from multiplied(node)
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            if len(node.generators) > 1 and any(part.ifs for part in node.generators):
                yield f"{node.lineno}: a comprehension of two loops and a condition"
        if isinstance(node, ast.IfExp):
            if any(isinstance(inner, ast.IfExp) for inner in (node.body, node.test, node.orelse)):
                yield f"{node.lineno}: a nested conditional expression"


def multiplied(node: ast.BinOp) -> Iterator[str]:
    """`[x] * condition` and `"text" * condition`."""
    for whole, factor in ((node.left, node.right), (node.right, node.left)):
        text = isinstance(whole, ast.Constant) and isinstance(whole.value, str)
        if not (text or isinstance(whole, (ast.List, ast.Tuple, ast.JoinedStr))):
            continue
        call = isinstance(factor, ast.Call) and ast.unparse(factor.func) in ("bool", "isinstance")
        if call or isinstance(factor, (ast.Compare, ast.BoolOp)):
            yield f"{node.lineno}: a list or text times a condition"


def components(arrows: set[tuple[str, str]]) -> list[list[str]]:
    """The sets of rooms that reach one another (more than one room each)."""
    reach: dict[str, set[str]] = defaultdict(set)
    for a, b in arrows:
        reach[a].add(b)
    for via in list(reach):
        for a in list(reach):
            if via in reach[a]:
                reach[a] |= reach[via]
    groups = {frozenset(b for b in reach if b in reach[a] and a in reach[b]) for a in reach}
    return [sorted(group) for group in groups if len(group) > 1]


def upward(arrows: set[tuple[str, str]]) -> list[tuple[str, str]]:
    """The fewest arrows without which no room reaches itself."""
    gone: list[tuple[str, str]] = []
    for group in components(arrows):
        inside = [(a, b) for a, b in arrows if a in group and b in group]
        for count in range(1, len(inside) + 1):
            choices = itertools.combinations(inside, count)
            fewest = next((c for c in choices if not components(set(inside) - set(c))), None)
            if fewest:
                gone += fewest
                break
    return gone


def functions(trees: dict[str, ast.Module]) -> dict[str, tuple[str, ast.AST]]:
    """Full name -> (module, definition) of every function and method."""
    table: dict[str, tuple[str, ast.AST]] = {}
    for module, tree in trees.items():
        for node in tree.body:
            if isinstance(node, FUNCTIONS):
                table[f"{module}.{node.name}"] = (module, node)
            elif isinstance(node, ast.ClassDef):
                for inner in node.body:
                    if isinstance(inner, FUNCTIONS):
                        table[f"{module}.{node.name}.{inner.name}"] = (module, inner)
    return table


def calls(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Who calls whom, where a name says so: functions by import, methods by `self`, and a method
    of anything else where only one class has one of that name, and no built-in type has."""
    table = functions(trees)
    methods: dict[str, list[str]] = defaultdict(list)
    for name in table:
        if name.rsplit(".", 1)[0] not in trees and name.rsplit(".", 1)[1] not in COMMON:
            methods[name.rsplit(".", 1)[1]].append(name)
    graph: dict[str, set[str]] = defaultdict(set)
    for name, (module, node) in table.items():
        named = [n for n in trees[module].body if isinstance(n, (*FUNCTIONS, ast.ClassDef))]
        names = {n.name: f"{module}.{n.name}" for n in named}
        for tree in (trees[module], node):
            for inner in ast.walk(tree):
                if isinstance(inner, ast.ImportFrom) and inner.module:
                    names |= {a.asname or a.name: f"{inner.module}.{a.name}" for a in inner.names}
        owner = name.rsplit(".", 1)[0]
        for inner in ast.walk(node):
            if not isinstance(inner, ast.Call):
                continue
            target = inner.func
            if isinstance(target, ast.Name):
                whole = names.get(target.id, "")
                graph[name] |= {w for w in (whole, f"{whole}.__init__") if w in table}
            elif isinstance(target, ast.Attribute):
                base = target.value.id if isinstance(target.value, ast.Name) else ""
                of = owner if base == "self" else names.get(base, "?")
                whole = f"{of}.{target.attr}"
                others = methods[target.attr]
                called = graph[name]
                if whole in table:
                    called.add(whole)
                elif len(others) == 1:
                    called.update(others)
    return graph


def longest(graph: dict[str, set[str]]) -> list[str]:
    """The longest chain of calls, no function twice."""
    best: dict[str, list[str]] = {}

    def chain(name: str, above: frozenset[str]) -> list[str]:
        if name not in best:
            below = [chain(n, above | {name}) for n in graph.get(name, ()) if n not in above]
            best[name] = [name, *max(below, key=len, default=[])]
        return best[name]

    return max((chain(name, frozenset({name})) for name in list(graph)), key=len)


def commented(text: str) -> int:
    """Lines with a comment; pragmas of the tools and a first line `#!` are none."""
    pragmas = ("#!", "# pyright:", "# fmt:", "# noqa", "# type:")
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(t.type == tokenize.COMMENT and not t.string.startswith(pragmas) for t in tokens)


def public(tree: ast.Module) -> Iterator[str]:
    """Functions, classes and methods without a leading underscore."""
    for node in tree.body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and not node.name.startswith("_"):
            yield node.name
            if not isinstance(node, ast.ClassDef):
                continue
            for inner in node.body:
                if isinstance(inner, FUNCTIONS) and not inner.name.startswith("_"):
                    yield f"{node.name}.{inner.name}"


def main(root: Path) -> None:
    """Print the drawing of the house under root."""
    files = modules(root)
    texts = {name: path.read_text() for name, path in files.items()}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    tokens = room_tokens(root)
    lines = sum(code_size(text)[1] for text in texts.values())
    comments = sum(commented(text) for text in texts.values())
    names: Counter[str] = Counter()
    arrows: Counter[tuple[str, str]] = Counter()
    for name, tree in trees.items():
        here = room(name)
        names[here] += len(list(public(tree)))
        arrows.update((here, room(other)) for other in imports(tree, files) if room(other) != here)
    below = defaultdict(list)
    for (a, b), count in sorted(arrows.items()):
        below[a].append(b if count == 1 else f"{b} x{count}")
    for here in sorted(tokens, key=lambda r: -tokens[r]):
        print(f"{here:13}{tokens[here]:7} tokens {names[here]:4} names -> {', '.join(below[here])}")
    up = upward(set(arrows))
    print(
        f"\n{len(tokens)} rooms, {len(files)} modules, {len(arrows)} arrows between rooms, "
        f"{len(up)} upward: {', '.join(f'{a} -> {b}' for a, b in up) or 'none'}"
    )
    total = tokens.total()
    print(f"{total} tokens in {lines} lines of code: {total / lines:.1f} a line")
    whole = sum(len(text.splitlines()) for text in texts.values())
    print(f"{whole} lines in all, {100 * comments / whole:.1f} % with a comment")
    defined = 0
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, FUNCTIONS):
                continue
            defined += 1
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            if size >= LONG:
                print(f"warning: {name}.{node.name} has {size} lines")
    print(f"{names.total()} public names, {defined} functions")
    chain = [link.removeprefix("flowalign.") for link in longest(calls(trees))]
    print(f"longest chain of calls, {len(chain)}: {' > '.join(chain)}")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("root", nargs="?", type=Path, default=Path("."), help="of a checkout")
    options.add_argument("--budget", action="store_true", help="only compare tokens with BUDGET")
    given = options.parse_args()
    if given.budget:
        over = above_budget(given.root)
        print(f"{room_tokens(given.root).total()} tokens, budget {sum(BUDGET.values())}")
        sys.exit("\n".join(over) or 0)
    main(given.root)
