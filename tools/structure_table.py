"""Counts what a reader of the code pays, as a table: `python tools/structure_table.py [TREE ...]`.

Each TREE is a checkout, by default this one; with two trees, the table compares them.

Calls with many arguments by position are those whose language permits keywords. Not counted are

- calls of what `jax.jit` compiled with donated arguments, which JAX finds by their position: of a
  name or attribute that the module binds to a call of `jit` or of a function `compiled` around it;
- calls of what `jax.ffi.ffi_call` returns, which takes the operands of a foreign function.
"""

from __future__ import annotations

import ast
import collections
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

CODE = ("core", "backends", "samplers", "schedulers")
MANY_ARGUMENTS = 6


class Tree:
    """The tracked files of a checkout."""

    def __init__(self, root: Path) -> None:
        self.root = root
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True
        )
        self.files = [root / name for name in listed.stdout.split("\0") if name]

    @functools.cached_property
    def modules(self) -> dict[Path, ast.Module]:
        """The modules of our packages, parsed."""
        found = {}
        for path in self.files:
            is_code = path.relative_to(self.root).parts[0] in CODE and path.suffix == ".py"
            if is_code and path.exists():
                found[path] = ast.parse(path.read_text(encoding="utf-8"))
        return found

    @functools.cached_property
    def lines(self) -> dict[Path, int]:
        """The number of lines of each module."""
        return {path: path.read_text(encoding="utf-8").count("\n") for path in self.modules}

    def package(self, path: Path) -> str:
        """The top-level package of a module."""
        return next(part for part in path.parts[len(self.root.parts) :] if "enginebay" in part)

    @functools.cached_property
    def imports(self) -> dict[str, set[str]]:
        """Package -> the other packages of ours that it imports, anywhere in its code."""
        ours = {self.package(path) for path in self.modules}
        found: dict[str, set[str]] = {name: set() for name in ours}
        for path, module in self.modules.items():
            here = self.package(path)
            found[here] |= {name for name in imported(module) if name in ours} - {here}
        return found

    def rows(self) -> Iterator[tuple[str, object]]:
        """The lines of the table."""
        lines = self.lines.values()
        project = tomllib.loads((self.root / "pyproject.toml").read_text(encoding="utf-8"))
        contracts = project["tool"]["importlinter"]["contracts"]
        words = [path for path in self.files if path.suffix == ".md" and path.exists()]
        yield "packages", len(self.imports)
        yield "modules", len(self.modules)
        yield "lines", sum(lines)
        yield "modules of at most 100 lines", sum(count <= 100 for count in lines)
        yield "modules of more than 600 lines", sum(count > 600 for count in lines)
        yield (
            "exceptions in import contracts",
            sum(len(c.get("ignore_imports", ())) for c in contracts),
        )
        yield "packages in circles", ", ".join(circles(self.imports)) or 0
        yield "plugin kinds", self.kinds()
        yield f"calls with more than {MANY_ARGUMENTS} arguments by position", self.long_calls()
        yield "words of documentation", sum(len(path.read_text("utf-8").split()) for path in words)
        yield "decisions", sum("decisions" in path.parts for path in words) - 1
        counts: collections.Counter[str] = collections.Counter()
        for path, count in self.lines.items():
            counts[self.package(path)] += count
        for name, count in sorted(counts.items()):
            yield f"lines of {name}", count
        largest = sorted(self.lines.items(), key=lambda one: -one[1])[:5]
        yield "largest modules", ", ".join(f"{path.name} {count}" for path, count in largest)

    def kinds(self) -> int:
        """The number of hooks that register parts."""
        texts = [path.read_text("utf-8") for path in self.modules if path.name == "hooks.py"]
        return len(set(re.findall(r"def (register_\w+)\(self", "".join(texts))))

    def long_calls(self) -> int:
        """Calls with many arguments by position, where keywords are possible."""
        return sum(
            isinstance(node, ast.Call)
            and len(node.args) > MANY_ARGUMENTS
            and not is_by_position(node, module)
            for module in self.modules.values()
            for node in ast.walk(module)
        )


def name_of(node: ast.expr) -> str:
    """The last name of an expression: `jit` of `jax.jit`, `forward` of `self.forward`, or ""."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def is_by_position(call: ast.Call, module: ast.Module) -> bool:
    """Whether what is called takes its arguments by position alone, as the module's text says."""
    if isinstance(call.func, ast.Call):
        return name_of(call.func.func) == "ffi_call"
    compiled = {
        name_of(target)
        for node in ast.walk(module)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        if name_of(node.value.func) in ("jit", "compiled")
        for target in node.targets
    }
    return name_of(call.func) in compiled


def imported(module: ast.Module) -> Iterator[str]:
    """The top-level names of what a module imports."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


def circles(imports: Mapping[str, set[str]]) -> list[str]:
    """Packages that import themselves through others."""

    def reached(name: str) -> set[str]:
        seen: set[str] = set()
        left = [name]
        while left:
            new = imports[left.pop()] - seen
            seen |= new
            left += new
        return seen

    return sorted(name for name in imports if name in reached(name))


def main(arguments: list[str]) -> None:
    """Print the table of the trees."""
    roots = [Path(one).resolve() for one in arguments] or [Path(__file__).resolve().parents[1]]
    columns = [dict(Tree(root).rows()) for root in roots]
    names = list(dict.fromkeys(name for column in columns for name in column))
    print("| |", " | ".join(root.name for root in roots), "|")
    print("|---|" + "---|" * len(roots))
    for name in names:
        print("|", name, "|", " | ".join(str(column.get(name, "")) for column in columns), "|")


if __name__ == "__main__":
    main(sys.argv[1:])
