"""Makes the page that has every documented name, parameter and default of the five APIs beside
ours, with the reason for each difference.

The documented declarations and the reasons are in documented_apis.toml; ours are read from the
code.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator, Mapping
from inspect import Parameter
from pathlib import Path
from typing import Any

import jax.numpy as jnp

DATA = Path(__file__).with_suffix(".toml")
PREFIXES = ("async", "class", "static")
MISSING, REQUIRED, OTHERS, FACTORY = "missing", "required", "any others", "made anew"
VARIABLE = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}
SYMBOLS = {"bfloat16": jnp.bfloat16, "inf": float("inf")}
UNNAMED = re.compile(r"_(\d+)")
TITLE = """# The documented APIs, name by name

This page compares the five APIs that others have documented with ours: each name, each parameter
and each default. It is made from the code and from `tools/documented_apis.toml`. The last column
gives the reason for a difference, and is empty where there is none. `+` marks a parameter that only
ours has; `*` and `**` are the parameters for all other arguments. `_1` is a first parameter that
the documents do not name; ours then stands in the same place.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `theirs` and `ours` are kinds of a name or defaults of a parameter;
    `key` names the difference in the data.
    """

    key: str
    name: str
    parameter: str
    theirs: str
    ours: str
    why: str

    @property
    def differs(self) -> bool:
        """Whether ours is another one."""
        return self.theirs != self.ours

    @property
    def line(self) -> str:
        """The line of Markdown."""
        cells = [f"`{one}`" if one else "" for one in (self.name, self.parameter)]
        values = [self.theirs, "the same" if not self.differs else self.ours]
        return f"| {' | '.join([*cells, *values, self.why])} |"


@dataclasses.dataclass(frozen=True, slots=True)
class Declared:
    """A documented name. `defaults`: parameter -> default; None: the name is no callable.
    `num_positional`: how many of them may be given by their places.
    """

    path: str
    kind: str
    defaults: Mapping[str, str] | None = None
    num_positional: int = 0


def read(declaration: str) -> Declared:
    """Read a line of the data."""
    kind, _, rest = declaration.partition(" ")
    if kind not in PREFIXES:
        kind, rest = "callable", declaration
    path, opening, arguments = rest.partition("(")
    if not opening:
        return Declared(path, "attribute")
    function = ast.parse(f"def f({arguments}: pass").body[0]
    assert isinstance(function, ast.FunctionDef), "a declaration is a signature"
    given = function.args
    missing: list[ast.expr | None] = [None] * (len(given.args) - len(given.defaults))
    pairs = list(zip(given.args, [*missing, *given.defaults], strict=True))
    pairs += zip(given.kwonlyargs, given.kw_defaults, strict=True)
    found = {one.arg: documented(default) for one, default in pairs}
    found |= {"*": OTHERS} if given.vararg else {}
    found |= {"**": OTHERS} if given.kwarg else {}
    return Declared(path, kind, found, len(given.args))


def documented(default: ast.expr | None) -> str:
    """Return a default of the data as text."""
    if default is None:
        return REQUIRED
    text = ast.unparse(default)
    if text == "factory":
        return FACTORY
    return shown(eval(text, {"__builtins__": {}}, SYMBOLS))  # noqa: S307  # the text is our own


def shown(value: Any) -> str:
    """Return a default as text."""
    if repr(value) == "<factory>":
        return FACTORY
    return f"`{jnp.dtype(value).name if value is jnp.bfloat16 else repr(value)}`"


def ours_of(owner: Any, path: str) -> Any:
    """Return our object of a dotted name, or "attribute" for one that instances have; None when
    there is none.
    """
    *parents, last = path.split(".")
    for name in parents:
        owner = getattr(owner, name, None)
    if not parents:
        return getattr(owner, last, None)
    found = inspect.getattr_static(owner, last, None)
    if found is None and inspect.isclass(owner) and is_set(owner, last):
        return "attribute"
    return found


def is_set(owner: type, name: str) -> bool:
    """Return whether a class declares a field, or sets an attribute of its instances."""
    if any(name in inspect.get_annotations(one) for one in inspect.getmro(owner)):
        return True
    return re.search(rf"\bself\.{name}\b[^=\n]*[^=]=[^=]", inspect.getsource(owner)) is not None


def kind_of(found: Any) -> str:
    """Return the kind of an object of ours, in the words of the data."""
    if isinstance(found, classmethod):
        return "class"
    if isinstance(found, staticmethod):
        return "static"
    if inspect.iscoroutinefunction(found):
        return "async"
    return "callable" if inspect.isclass(found) or inspect.isfunction(found) else "attribute"


def parameters_of(found: Any) -> dict[str, Parameter]:
    """Return the parameters of a callable, without self and cls."""
    function = found.__func__ if isinstance(found, classmethod | staticmethod) else found
    parameters = inspect.signature(function).parameters.values()
    return {
        VARIABLE.get(one.kind, one.name): one
        for one in parameters
        if one.name not in ("self", "cls")
    }


def default_of(one: Parameter) -> str:
    """Return what a parameter of ours is without an argument."""
    if one.kind in VARIABLE:
        return OTHERS
    return REQUIRED if one.default is one.empty else shown(one.default)


def rows_of(api: Mapping[str, Any]) -> Iterator[Row]:
    """Return the lines of one API."""
    module = importlib.import_module(api["module"])
    for line in api["declared"].strip().splitlines():
        declared = read(line)
        name, found = declared.path, ours_of(module, declared.path)
        kind = MISSING if found is None else kind_of(found)
        if declared.defaults is None and inspect.isclass(found):
            kind = declared.kind  # documented by its name alone
        yield Row(name, name, "", declared.kind, kind, api["why"].get(name, ""))
        if declared.defaults is not None and kind not in (MISSING, "attribute"):
            for parameter, theirs, ours in compared(declared, parameters_of(found)):
                key = f"{name}.{parameter}"
                yield Row(key, name, parameter, theirs, ours, api["why"].get(key, ""))


def compared(declared: Declared, mine: Mapping[str, Parameter]) -> Iterator[tuple[str, str, str]]:
    """Return each parameter with the documented default and ours. A parameter of ours that stands
    in another place says so.
    """
    assert declared.defaults is not None, "a callable was declared"
    places, used = list(mine), set()
    for place, (parameter, default) in enumerate(declared.defaults.items()):
        unnamed = UNNAMED.fullmatch(parameter)
        name = parameter
        if unnamed and int(unnamed[1]) <= len(places):
            name = places[int(unnamed[1]) - 1]
        if name not in mine:
            yield parameter, default, MISSING
            continue
        used.add(name)
        ours = default_of(mine[name])
        if place < declared.num_positional:
            if mine[name].kind is Parameter.KEYWORD_ONLY:
                ours += ", by keyword only"
            elif places.index(name) != place:
                ours += f", in place {places.index(name) + 1}"
        elif mine[name].kind is Parameter.POSITIONAL_ONLY:
            ours += ", by its place only"
        yield parameter, default, ours
    for name, one in mine.items():
        if name not in used:
            yield f"+{name}", MISSING, default_of(one)


def apis() -> dict[str, Any]:
    """Return the data."""
    return tomllib.loads(DATA.read_text(encoding="utf-8"))


def unexplained(data: Mapping[str, Any]) -> list[str]:
    """Return the differences without a reason, and the reasons without a difference."""
    wrong = []
    for name, api in data.items():
        differing = {row.key: row for row in rows_of(api) if row.differs}
        wrong += [
            f"{name}: {key}: {row.theirs} is {row.ours}, without a reason"
            for key, row in differing.items()
            if not row.why
        ]
        old = api["why"].keys() - differing.keys()
        wrong += [f"{name}: {key}: a reason without a difference" for key in sorted(old)]
    return wrong


def page(data: Mapping[str, Any]) -> str:
    """Return the text of the page."""
    parts = [TITLE]
    for api in data.values():
        rows = list(rows_of(api))
        num = sum(row.differs for row in rows)
        parts.append(
            f"## {api['title']}\n\n[Guide]({api['page']}). Names of `{api['module']}`: "
            f"{len(rows)} lines, {num} of them with a difference.\n\n"
            "| name | parameter | documented | ours | difference |\n|---|---|---|---|---|\n"
            + "\n".join(row.line for row in rows)
            + "\n"
        )
    return "\n".join(parts)
