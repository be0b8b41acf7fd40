"""Draws small faults (mutants) of a module. The same text and seed give the same faults.

Only the bodies of functions get faults. Annotations, docstrings, assertions, raise statements and
log calls get none.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import hashlib
import re
from collections.abc import Iterator
from typing import Any

Change = tuple[str, ast.AST, str]
"""Operator (the kind of fault), the node to replace, and the new text."""

SWAPS = {
    "Lt": "LtE",
    "LtE": "Lt",
    "Gt": "GtE",
    "GtE": "Gt",
    "Eq": "NotEq",
    "NotEq": "Eq",
    "Is": "IsNot",
}
SWAPS |= {
    "IsNot": "Is",
    "In": "NotIn",
    "NotIn": "In",
    "And": "Or",
    "Or": "And",
    "Add": "Sub",
    "Sub": "Add",
}
SWAPS |= {"Mult": "FloorDiv", "FloorDiv": "Mult", "Div": "Mult", "Mod": "Mult", "BitAnd": "BitOr"}
SWAPS |= {"BitOr": "BitAnd", "BitXor": "BitAnd", "LShift": "RShift", "RShift": "LShift"}
LEFT_OUT = (ast.Raise, ast.Assert, ast.JoinedStr, ast.pattern, ast.arguments)
LEFT_OUT_FIELDS = ("annotation", "returns", "decorator_list", "type_params")
TELLS = re.compile(r"_?(log|logger|logging|warnings)\.|(explain|unknown_name|print|isinstance)$")
"""Calls that get no faults, because they only produce text for people, or check types."""


def draw(text: bytes, seed: int, count: int) -> list[dict[str, Any]]:
    """At most `count` mutants, in the order drawn.

    A second mutant on a line, or more than a quarter with one operator, is drawn only when no
    others are left. Each mutant has line, operator, before and after (the changed lines) and text
    (the whole module). A fault's place in the order is a hash of its text and its function's name,
    so that a change elsewhere in the module leaves most of the drawn mutants as they are.
    """
    keyed, seen = [], collections.Counter[str]()
    for node, function, name in _nodes(ast.parse(text)):
        for operator, old, new in (*_of_expressions(node), *_of_statements(node, function)):
            key = f"{seed} {name} {operator} {ast.get_source_segment(text.decode(), old)}"
            seen[key] += 1
            keyed.append(
                (hashlib.sha256(f"{key} {seen[key]}".encode()).digest(), operator, old, new)
            )
    keyed.sort(key=lambda row: row[0])
    drawn: dict[bytes, dict[str, Any]] = {}
    for max_of_operator, max_of_line in ((-(-count // 4), 1), (count, 1), (count, count)):
        for _, operator, old, new in keyed:
            place = {"line": getattr(old, "lineno", 0), "operator": operator}
            of_line, of_operator = (sum(m[k] == place[k] for m in drawn.values()) for k in place)
            if len(drawn) < count and of_operator < max_of_operator and of_line < max_of_line:
                mutant = _planted(text, old, new)
                if mutant is not None:
                    drawn.setdefault(mutant["text"], place | mutant)
    return list(drawn.values())


def _planted(text: bytes, old: Any, new: str) -> dict[str, Any] | None:
    """Return the module with `old` replaced by `new`; None if the result is invalid or
    unchanged.
    """
    lines = text.splitlines(keepends=True)
    first, last = old.lineno - 1, old.end_lineno
    head, tail = lines[first][: old.col_offset], lines[last - 1][old.end_col_offset :]
    texts, programs = [], []
    for part in (new, f"({new})"):  # parentheses, where operator precedence needs them
        with contextlib.suppress(SyntaxError):
            whole = b"".join([*lines[:first], head, part.encode(), tail, *lines[last:]])
            programs.append(ast.dump(ast.parse(whole)))
            texts.append(whole)
    if not programs or ast.dump(ast.parse(text)) in programs:
        return None
    sides = {"before": b"".join(lines[first:last]), "after": head + new.encode() + tail}
    told = {name: " ".join(side.decode().split()) for name, side in sides.items()}
    return told | {"text": texts[0] if programs[0] == programs[-1] else texts[-1]}


def _nodes(
    node: ast.AST, function: ast.AST | None = None, name: str = ""
) -> Iterator[tuple[Any, Any, str]]:
    """The nodes that can have faults, each with its function and the function's qualified name."""
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if (
                field in LEFT_OUT_FIELDS
                or not isinstance(child, ast.AST)
                or isinstance(child, LEFT_OUT)
            ):
                continue
            if isinstance(child, ast.Call) and TELLS.match(ast.unparse(child.func)):
                continue
            if isinstance(child, ast.keyword) and child.arg == "strict":
                continue  # zip(strict=True) is an assertion
            if function is not None:
                yield child, function, name
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            inner = (
                f"{name}.{child.name}" if is_function or isinstance(child, ast.ClassDef) else name
            )
            yield from _nodes(child, child if is_function else function, inner)


def _swapped(op: ast.AST) -> Any:
    """The operator that replaces `op`, or None."""
    other = SWAPS.get(type(op).__name__)
    return getattr(ast, other)() if other else None


def _of_expressions(node: Any) -> Iterator[Change]:
    match node:
        case ast.Compare(left=left, ops=ops, comparators=others):
            for i, op in enumerate(ops):
                swapped = [*ops[:i], _swapped(op), *ops[i + 1 :]]
                yield "compare", node, ast.unparse(ast.Compare(left, swapped, others))
        case ast.BinOp(left=left, op=op, right=right) if new := _swapped(op):
            yield "arithmetic", node, ast.unparse(ast.BinOp(left, new, right))
        case ast.BoolOp(op=op, values=values):
            yield "and/or", node, ast.unparse(ast.BoolOp(_swapped(op), values))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not", node, ast.unparse(operand)
        case ast.Constant(value=bool(value)):
            yield "bool", node, str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "number", node, str(value + 1)
        case ast.Slice(lower=lower, upper=upper):
            for bound in (lower, upper):
                if bound is not None and not isinstance(bound, ast.Constant):
                    yield "slice", bound, f"{ast.unparse(bound)} + 1"


def _of_statements(node: Any, function: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Return(value=ast.expr()):
            yield "return", node, "return None"
        case ast.Break():
            yield "loop", node, "continue"
        case ast.Continue():
            yield "loop", node, "break"
        case ast.AugAssign(target=target, op=op, value=value):
            if new := _swapped(op):
                yield "arithmetic", node, ast.unparse(ast.AugAssign(target, new, value))
            yield "delete", node, "pass"
        case ast.Expr(value=ast.Call(func=func)) if not TELLS.match(ast.unparse(func)):
            yield "delete", node, "pass"
        case ast.Assign() if _leaves_names(node, function):
            yield "delete", node, "pass"


def _leaves_names(node: ast.Assign, function: ast.AST) -> bool:
    """Whether its names are also bound elsewhere in the function.

    Without the only assignment of a name, any test that runs the line fails: such a fault shows
    nothing.
    """
    if getattr(function, "name", "") == "__init__":
        return False
    every = collections.Counter(_bound(function))
    return all(every[name] > num for name, num in collections.Counter(_bound(node)).items())


def _bound(node: ast.AST) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id
        elif isinstance(child, ast.arg):
            yield child.arg
