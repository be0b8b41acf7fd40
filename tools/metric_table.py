"""Finds the metrics that a package declares for Prometheus, in its source: a name with a
description behind it, in a call or a tuple.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

APIS = Path(__file__).parents[1] / "backends"
IN_TOTALS = ("counters", "_totals")
"""Functions whose tuples declare counters: prometheus_client adds "_total" to their names."""


def server_metrics() -> dict[str, str]:
    """Return what each metric of `enginebay serve` means, without the prefix of the names."""
    files = sorted((APIS / "server/enginebay_server").rglob("*metrics*.py"))
    return {name: what for path in files for name, what in declared(parsed(path), {})}


def esurge_metrics() -> dict[str, str]:
    """Return what each metric of eSurge means."""
    modules = [parsed(path) for path in sorted((APIS / "apis/enginebay_esurge").glob("*.py"))]
    constants = {name: value for module in modules for name, value in assigned(module)}
    found = [pair for module in modules for pair in declared(module, constants)]
    return {name: what for name, what in found if name.startswith("esurge_")}


def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a module."""
    return ast.parse(path.read_text(encoding="utf-8"))


def assigned(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the texts that a module assigns to names."""
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            for target in node.targets:
                if isinstance(target, ast.Name) and isinstance(node.value.value, str):
                    yield target.id, node.value.value


def declared(module: ast.Module, constants: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield name and description of the metrics of a module, in the order of the source."""
    totals = {
        id(inner)
        for function in ast.walk(module)
        if isinstance(function, ast.FunctionDef) and function.name in IN_TOTALS
        for inner in ast.walk(function)
        if isinstance(inner, ast.Tuple)
    }
    found = []
    for node in ast.walk(module):
        if isinstance(node, ast.Tuple | ast.Call):
            values = node.elts if isinstance(node, ast.Tuple) else node.args
            name, what = (text_of(one, constants) for one in (*values, None, None)[:2])
            is_counter = id(node) in totals or (
                isinstance(node, ast.Call) and ast.unparse(node.func) == "CounterMetricFamily"
            )
            suffix = "_total" if is_counter and not name.endswith("_total") else ""
            if name.replace("_", "").isalnum() and what.endswith("."):
                found.append((node.lineno, name + suffix, what + labels_of(node)))
    yield from ((name, what) for _, name, what in sorted(found))


def text_of(node: ast.expr | None, constants: Mapping[str, str]) -> str:
    """Return the text of an expression, or "". A prefix is left out of an f-string, and other
    values are in capitals.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Attribute):
        return constants.get(node.attr, "")
    parts = node.values if isinstance(node, ast.JoinedStr) else []
    return "".join(
        ast.unparse(one.value).upper().replace("PREFIX", "").replace("TOTAL", "")
        if isinstance(one, ast.FormattedValue)
        else text_of(one, constants)
        for one in parts
    )


def labels_of(node: ast.expr) -> str:
    """Return the labels of a metric family as a sentence, without the label of the model."""
    lists = [one.value for one in getattr(node, "keywords", ()) if one.arg == "labels"]
    names = [
        f"`{one.value!s}`"
        for labels in lists
        for one in getattr(labels, "elts", ())
        if isinstance(one, ast.Constant)
    ]
    return f" Labels: {', '.join(names)}." if names else ""
