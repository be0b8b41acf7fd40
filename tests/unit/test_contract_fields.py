"""No field of a contract exists that nothing reads, or that nothing sets."""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

from enginebay.plugins.hooks import CAPABILITIES

ROOT = Path(__file__).parents[2]
CODE = ("core", "backends", "samplers", "schedulers", "docs/examples")
CONTRACTS = (
    "contracts/cache",
    "contracts/commands",
    "contracts/constraint",
    "contracts/engine",
    "contracts/executor",
    "contracts/model",
    "contracts/platform",
    "contracts/processor",
    "contracts/proposer",
    "contracts/sampler",
    "contracts/scheduler",
    "contracts/step_key",
    "ops/caps",
    "ops/op",
    "ops/spec",
    "plugins/hooks",
    "row_value",
    "serving/messages",
    "serving/observer",
    "types",
)


@dataclasses.dataclass
class Uses:
    """Names that code reads, as attributes or in texts, and names that it sets."""

    read: set[str] = dataclasses.field(default_factory=set)
    written: set[str] = dataclasses.field(default_factory=set)
    num_positional: dict[str, int] = dataclasses.field(default_factory=dict)
    """The most positional arguments of a call, by the name of what is called."""

    def add(self, node: ast.AST) -> None:
        """Take in one node."""
        if isinstance(node, ast.Attribute):
            (self.read if isinstance(node.ctx, ast.Load) else self.written).add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            self.read.add(node.value)  # getattr, or a key of fields that are given as a mapping
            self.written.add(node.value)
        elif isinstance(node, ast.keyword) and node.arg:
            self.written.add(node.arg)
        elif isinstance(node, ast.Assign):
            self.written |= {one.id for one in node.targets if isinstance(one, ast.Name)}
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            spread = any(isinstance(one, ast.Starred) for one in node.args)
            num = 99 if spread else len(node.args)
            self.num_positional[name] = max(num, self.num_positional.get(name, 0))


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """The code, parsed, by file."""
    paths = (path for folder in CODE for path in (ROOT / folder).rglob("*.py"))
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}


@functools.cache
def uses() -> Uses:
    found = Uses()
    for tree in trees().values():
        for node in ast.walk(tree):
            found.add(node)
    return found


def fields() -> Iterator[tuple[str, str, int, bool]]:
    """(class, field, its place, whether it has a default) of every record of a contract."""
    for module in CONTRACTS:
        tree = ast.parse((ROOT / f"core/enginebay/{module}.py").read_text(encoding="utf-8"))
        for made in ast.walk(tree):
            if isinstance(made, ast.ClassDef):
                declared = [
                    n
                    for n in made.body
                    if isinstance(n, ast.AnnAssign) and "ClassVar" not in ast.unparse(n.annotation)
                ]
                for place, one in enumerate(declared):
                    if isinstance(one.target, ast.Name) and not one.target.id.startswith("_"):
                        yield made.name, one.target.id, place, one.value is not None


def test_every_field_of_a_contract_has_a_reader() -> None:
    assert [f"{cls}.{name}" for cls, name, _, _ in fields() if name not in uses().read] == []


def test_every_field_of_a_contract_that_has_a_default_is_set_by_somebody() -> None:
    found = uses()
    unset = {
        f"{cls}.{name}"
        for cls, name, place, has_default in fields()
        if has_default
        and cls != "SamplingParams"  # a request's
        and name not in found.written
        and found.num_positional.get(cls, 0) <= place
    }
    assert unset == set()


def test_every_capability_that_a_plugin_may_declare_has_a_reader() -> None:
    """The core, the kit or a benchmark asks for it; what plugins declare does not count."""
    asked = Uses()
    for path, tree in trees().items():
        if path.is_relative_to(ROOT / "core") and path.name not in ("hooks.py", "plugin.py"):
            for node in ast.walk(tree):
                asked.add(node)
    known = {name for names in CAPABILITIES.values() for name in names}
    assert known - asked.read == set()


def test_every_parameter_of_an_abstract_method_is_read_by_an_implementation() -> None:
    methods = [
        (path, made.name, method)
        for path, tree in trees().items()
        for made in ast.walk(tree)
        if isinstance(made, ast.ClassDef)
        for method in made.body
        if isinstance(method, ast.FunctionDef)
    ]
    read: dict[str, set[str]] = {}
    for _, _, method in methods:
        names = {n.id for line in method.body for n in ast.walk(line) if isinstance(n, ast.Name)}
        read.setdefault(method.name, set()).update(names)
    contracts = [
        (owner, method)
        for path, owner, method in methods
        if path.is_relative_to(ROOT / "core" / "enginebay")
        and any("abstractmethod" in ast.unparse(one) for one in method.decorator_list)
    ]
    assert contracts
    unread = {
        f"{owner}.{method.name}({one.arg})"
        for owner, method in contracts
        for one in (*method.args.args[1:], *method.args.kwonlyargs)
        if one.arg not in read[method.name]
    }
    assert unread == set()
