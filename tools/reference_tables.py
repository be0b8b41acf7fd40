"""Makes the tables of flags, fields, options, hooks and metrics, from the parsers and from the
declarations of the code. A page has `<!-- table: NAME -->` where the site shows the table
of this name, and `<!-- file: PATH -->` where it shows a file of the repository.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from enginebay.cli.parsing import CommandParser
from enginebay.cli.program import load_command
from enginebay.config import EngineConfig
from enginebay.config_sections import Choice, GuidedLimits, TemplateLimits
from enginebay.contracts.cache import KVLayout, Ledger
from enginebay.contracts.platform import Hardware, Platform
from enginebay.ops.caps import Caps
from enginebay.ops.op import Op
from enginebay.plugins.hooks import CAPABILITIES, INTERFACE_VERSIONS, Declaration, Hooks, hook_name
from enginebay.plugins.registry import Entry, Registry, load_registry
from enginebay.validation import allowed_values
from enginebay_esurge import eSurge
from enginebay_server.api_fields import FIELDS_OF_PATH
from tools.metric_table import esurge_metrics, server_metrics
from tools.sampling_page import parameters

ROOT = Path(__file__).parents[1]
FILE = re.compile(r"^<!-- file: ([\w./-]+) -->$", re.MULTILINE)
LANGUAGES = {".service": "ini", ".conf": "nginx", ".toml": "toml"}
MARK = re.compile(r"^<!-- table: ([\w ]+) -->$", re.MULTILINE)
ENGINE = "engine"
"""The group of flags that choose the parts, which many commands have."""
BAR = re.compile(r"(`[^`]*`)|\|")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of Markdown. A bar is escaped outside of code."""
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for row in rows:
        cells = [BAR.sub(lambda found: found[1] or r"\|", cell) for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def groups(command: str) -> Iterator[tuple[str, list[tuple[argparse.Action, str]]]]:
    """Return the groups of a command's flags: the title, and each flag with its help."""
    parser = CommandParser(prog=f"enginebay {command}")
    load_command(command).add_arguments(command, parser)
    formatter = parser._get_formatter()
    for group in parser._action_groups:
        flags = [a for a in group._group_actions if a.option_strings and a.dest != "help"]
        if flags:
            title = "" if group is parser._optionals else str(group.title)
            yield title, [(action, formatter._expand_help(action)) for action in flags]


def names(action: argparse.Action) -> str:
    """Return the names of a flag with its value."""
    value = "|".join(map(str, action.choices)) if action.choices else action.metavar
    what = f" {value}" if value and action.nargs != 0 else ""
    return ", ".join(f"`{flag}{what}`" for flag in action.option_strings)


def flags_of(command: str) -> str:
    """Return the flags of a command, without those that choose the parts."""
    parts = []
    for title, flags in groups(command):
        if title != ENGINE:
            rows = [(names(action), text) for action, text in flags]
            parts += [f"*{title[:1].upper()}{title[1:]}*"] if title else []
            parts.append(table(("flag", "meaning"), rows))
    return "\n\n".join(parts)


def engine_flags() -> list[tuple[argparse.Action, str]]:
    """Return the flags that choose the parts, with their help."""
    return dict(groups("explain"))[ENGINE]


def flags_of_parts() -> str:
    """Return the flags that choose the parts."""
    rows = [(names(action), text) for action, text in engine_flags()]
    return table(("flag", "meaning"), rows)


def default_of(field: FieldInfo) -> str:
    """Return the default of a field as a file has it; "" for a section and what is unset."""
    default = field.get_default(call_default_factory=True)
    if isinstance(default, Choice):
        return default.name
    if default is None or isinstance(default, BaseModel) or default in ({}, ()):
        return ""
    return str(default).lower() if isinstance(default, bool) else f"{default}"


def fields() -> str:
    """Return the fields of a configuration."""
    flags: dict[str, list[str]] = {"kernels": ["--attention", "--kernel"]}
    for action, _ in engine_flags():
        flags.setdefault(action.dest, list(action.option_strings))
    schema = EngineConfig.model_json_schema()["properties"]
    rows = [
        (
            f"`{name}`",
            ", ".join(f"`{flag}`" for flag in flags.get(name, ())),
            default_of(field),
            values(schema[name]),
            str(field.description),
        )
        for name, field in EngineConfig.model_fields.items()
    ]
    return table(("field", "flag", "default", "values", "meaning"), rows)


def values(schema: dict[str, Any]) -> str:
    """Return the values that a field allows, where its schema limits them."""
    if schema.get("$ref", "").endswith("/Choice"):
        return "a name, or a section with `name` and options"
    text = allowed_values(schema)
    return "" if text == "a text" else text


def options_of(registry: Registry, entry: Entry) -> list[tuple[str, ...]]:
    """Return a row for each option of a part of ours: name, default, values, meaning."""
    options = entry.declaration and entry.declaration.options and registry.options(entry, {})
    return rows_of(type(options)) if isinstance(options, BaseModel) else []


def rows_of(model: type[BaseModel]) -> list[tuple[str, ...]]:
    """Return a row for each field of a section: name, default, values, meaning."""
    schema = model.model_json_schema()["properties"]
    return [
        (f"`{name}`", default_of(field), values(schema[name]), str(field.description))
        for name, field in model.model_fields.items()
    ]


def limits() -> str:
    """Return the fields of the two sections of limits."""
    sections = (("template_limits", TemplateLimits), ("guided_limits", GuidedLimits))
    rows = [(f"`{name}`", *row) for name, model in sections for row in rows_of(model)]
    return table(("section", "field", "default", "values", "meaning"), rows)


def options() -> str:
    """Return the options of our parts. Logits processors have theirs from requests."""
    registry, rows = load_registry(), []
    for entry in registry.entries:
        if entry.distribution == "enginebay" and entry.kind != "processor":
            of = options_of(registry, entry)
            rows += [(f"{entry.kind} `{entry.name}`", *row) for row in of]
    return table(("part", "option", "default", "values", "meaning"), rows)


def processors() -> str:
    """Return the logits processors with their options, in the order in which they are applied."""
    registry = load_registry()
    rows: list[tuple[str, ...]] = []
    found = (one for one in registry.entries if one.kind == "processor")
    for entry in sorted(found, key=lambda one: float(one.capability("order", math.inf))):
        declared = entry.declaration
        if declared and entry.distribution == "enginebay":
            rows.append((f"`{entry.name}`", "", "", "", declared.summary))
            rows += [("", *row) for row in options_of(registry, entry)]
    return table(("processor", "option", "default", "values", "meaning"), rows)


def model_families() -> str:
    """Return the model families of ours, as the docstrings of their classes describe them."""
    registry = load_registry()
    found = (one for one in registry.entries if one.kind == "model")
    rows = []
    for entry in sorted(found, key=lambda one: one.name):
        if entry.distribution == "enginebay":
            served = ", ".join(f"`{one}`" for one in entry.capability("architectures", ()))
            docstring = str(inspect.getdoc(type(registry.load(entry))))
            rows.append((f"`{entry.name}`", served, " ".join(docstring.split())))
    return table(("family", "architectures", "attention and other properties"), rows)


def hooks() -> str:
    """Return the hooks of plugins, as their docstrings describe them."""
    rows = []
    for kind in INTERFACE_VERSIONS:
        text = " ".join(str(inspect.getdoc(getattr(Hooks, hook_name(kind)))).split())
        what, _, target = text.partition(" Target: ")
        rows.append((f"`{hook_name(kind)}`", kind, what, target))
    return table(("hook", "kind", "what it does", "target"), rows)


def capabilities() -> str:
    """Return the capabilities that enginebay reads."""
    rows = [
        (f"`{name}`", kind, what) for kind, of in CAPABILITIES.items() for name, what in of.items()
    ]
    return table(("capability", "kind", "meaning"), rows)


def described(names: Sequence[str], docstring: str | None) -> list[tuple[str, str]]:
    """Return the names with their text in a docstring, which describes each as "NAME: text"."""
    text = " ".join(inspect.cleandoc(str(docstring)).split())
    pieces = re.split(rf"(?:(?<=[.:\]] )|^)`?({'|'.join(names)})`?: ", text)
    found = dict(zip(pieces[1::2], pieces[2::2], strict=True))
    return [(name, found[name].strip()) for name in names]


def fields_in_docstring(record: type) -> str:
    """Return the fields of a dataclass that its docstring describes."""
    rows = described([field.name for field in dataclasses.fields(record)], record.__doc__)
    return table(("field", "meaning"), [(f"`{name}`", text) for name, text in rows])


def arguments(function: Callable[..., Any], docstring: str | None) -> str:
    """Return the arguments of a function with their defaults, as the docstring describes them."""
    rows = []
    parameters = inspect.signature(function).parameters
    named = {n: one for n, one in parameters.items() if n not in ("self", "model")}
    for name, text in described(list(named), docstring):
        default = named[name].default
        is_set = default is not inspect.Parameter.empty
        rows.append(
            (f"`{name}`", str(getattr(default, "__name__", default)) if is_set else "", text)
        )
    return table(("argument", "default", "what it does"), rows)


def members(contract: type) -> str:
    """Return the public members of a contract with the first paragraph of what documents them."""
    rows = []
    source = ast.parse(inspect.getsource(contract)).body[0]
    body = source.body if isinstance(source, ast.ClassDef) else []
    for node, after in itertools.zip_longest(body, body[1:]):
        name, text = "", None
        if isinstance(node, ast.FunctionDef):
            arguments = ", ".join(one.arg for one in node.args.args[1:])
            name = node.name if is_property(node) else f"{node.name}({arguments})"
            text = ast.get_docstring(node)
        elif isinstance(node, ast.AnnAssign):
            name = ast.unparse(node.target)
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = str(after.value.value)
        if text and not name.startswith("_"):
            rows.append((f"`{name}`", " ".join(text.partition("\n\n")[0].split())))
    return table(("member", "meaning"), rows)


def is_property(function: ast.FunctionDef) -> bool:
    """Return whether a method is a property."""
    return "property" in [ast.unparse(one) for one in function.decorator_list]


def benchmarks() -> str:
    """Return the benchmarks that run as modules, with what each measures."""
    rows = []
    for path in sorted((ROOT / "tests" / "benchmarks").glob("[a-z]*.py")):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        what, _, usage = text.partition("\n\n")
        if f"python -m tests.benchmarks.{path.stem}" in usage:
            rows.append((f"`{path.stem}`", " ".join(what.split())))
    return table(("`python -m tests.benchmarks.NAME`", "what it measures"), rows)


def metrics(found: dict[str, str]) -> str:
    """Return the metrics of a package."""
    return table(("metric", "meaning"), [(f"`{name}`", what) for name, what in found.items()])


def fields_of_apis() -> str:
    """Return the fields of the APIs that the server does not read, with the reason."""
    rows = [
        (f"`{path}`", f"`{name}`", what, f"{one.why}")
        for path, api in FIELDS_OF_PATH.items()
        for what, fields in (("ignored", api.ignored), ("refused", api.refused))
        for name, one in sorted(fields.items())
    ]
    return table(("path", "field", "what becomes of it", "because"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "flags that choose the parts": flags_of_parts,
    "fields": fields,
    "limits": limits,
    "options": options,
    "sampling parameters": lambda: "\n".join(parameters()),
    "logits processors": processors,
    "model families": model_families,
    "hooks": hooks,
    "fields of a declaration": lambda: fields_in_docstring(Declaration),
    "capabilities": capabilities,
    "fields of Op": lambda: fields_in_docstring(Op),
    "fields of Caps": lambda: fields_in_docstring(Caps),
    "members of Platform": lambda: members(Platform),
    "fields of Hardware": lambda: fields_in_docstring(Hardware),
    "members of Ledger": lambda: members(Ledger),
    "members of KVLayout": lambda: members(KVLayout),
    "benchmarks": benchmarks,
    "fields of the APIs": fields_of_apis,
    "metrics of the server": lambda: metrics(server_metrics()),
    "options of eSurge": lambda: arguments(eSurge.__init__, eSurge.__doc__),
    "arguments of start_monitoring": lambda: arguments(
        eSurge.start_monitoring, eSurge.start_monitoring.__doc__
    ),
    "metrics of eSurge": lambda: metrics(esurge_metrics()),
}


def with_tables(text: str) -> str:
    """Return the text of a page with its tables and files."""

    def made(found: re.Match[str]) -> str:
        name = found[1]
        is_flags = name.startswith("flags of ")
        return flags_of(name.removeprefix("flags of ")) if is_flags else TABLES[name]()

    def shown(found: re.Match[str]) -> str:
        path = ROOT / found[1]
        language = LANGUAGES.get(path.suffix, "")
        return f"```{language}\n{path.read_text(encoding='utf-8')}```"

    return FILE.sub(shown, MARK.sub(made, text))
