"""House sizes and house rules that a machine can check: what fits a screen, and what no file may
name.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("layout")  # sources are read once
ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("core", "backends", "samplers", "schedulers", "tools", "docs", "tests")
KERNEL_PACKAGES = ("backends/kernels/enginebay_pallas/", "backends/kernels/enginebay_triton/")
KERNEL_FILES = (*KERNEL_PACKAGES, "backends/kernels/enginebay_xla/")

MAX_FILE_LINES, MAX_KERNEL_FILE_LINES = 600, 700
MAX_FUNCTION_LINES, MAX_KERNEL_LINES = 100, 150
MAX_METHODS = 12
MAX_INIT_PARAMETERS = 6

# path, or path::name, and why it may be larger. A row that is no longer needed fails too.
LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}
MANY_METHODS: dict[str, str] = {
    "core/enginebay/plugins/hooks.py::Hooks": "one hook for each kind of part",
    "core/enginebay/serving/llm.py::LLM": (
        "the public API: generate, stream and chat with their async twins; it hands over at once"
    ),
    "core/enginebay/contracts/engine.py::Engine": "what a loop asks of engines; half is optional",
    "core/enginebay_runtime/local.py::LocalExecutor": (
        "the owner of the device: its arrays, the commands that change them, and their programs"
    ),
    "core/enginebay_testing/scheduler_simulation.py::LoopSimulation": (
        "a method for each event of the loop"
    ),
    "backends/apis/enginebay_dashinfer/engine.py::Engine": (
        "the documented API; hands over at once"
    ),
    "backends/apis/enginebay_dashinfer/generation_config.py::ASGenerationConfigBuilder": (
        "the documented builder: a method for each field"
    ),
    "backends/apis/enginebay_dashinfer/installed.py::InstalledModel": "a method for each call",
    "backends/apis/enginebay_dashinfer/runtime_config.py::AsModelRuntimeConfigBuilder": (
        "the documented builder: a method for each field"
    ),
    "backends/apis/enginebay_esurge/esurge.py::eSurge": "the documented API; hands over at once",
    "core/enginebay/contracts/cache.py::Ledger": (
        "six are abstract; others are for ledgers that share pages"
    ),
    "core/enginebay_runtime/engine.py::StepEngine": "the contract of engines",
    "backends/engines/enginebay_paged/ledger.py::PageLedger": (
        "the contract of ledgers; hands over to held pages and prefixes"
    ),
    "backends/apis/enginebay_oengine/oengine.py::oEngine": (
        "the documented API; hands over at once"
    ),
    "backends/apis/enginebay_oengine/sequence_buffer.py::SequenceBuffer": (
        "the documented API; hands over at once"
    ),
    "backends/apis/enginebay_vinference/inference.py::vInference": (
        "the documented API: half of them are properties"
    ),
}
WIDE_CONSTRUCTORS: dict[str, str] = {
    "backends/apis/enginebay_esurge/esurge.py::eSurge.__init__": (
        "the documented signature; hands over at once"
    ),
    "backends/apis/enginebay_oengine/oengine.py::oEngine.__init__": (
        "the documented signature; hands over at once"
    ),
    "backends/apis/enginebay_vinference/inference.py::vInference.__init__": (
        "the documented signature; hands over at once"
    ),
}

Definition = tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]


@cache
def files() -> tuple[Path, ...]:
    """What git tracks, or would track: generated and ignored files are not ours."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is no git checkout, so the project's own files are not known")
    paths = (ROOT / name for name in listing.split("\0") if name)
    return tuple(path for path in paths if path.is_file())


@cache
def python_sources() -> dict[str, tuple[int, ast.Module]]:
    """Number of lines and syntax tree by path."""
    found = {}
    for path in files():
        name = path.relative_to(ROOT).as_posix()
        if path.suffix == ".py" and name.startswith(SOURCES):
            text = path.read_text(encoding="utf-8")
            found[name] = (text.count("\n"), ast.parse(text))
    return found


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements right inside a node, and clauses that have statements. Expressions have
    none.
    """
    for name in ("body", "orelse", "handlers", "finalbody", "cases"):
        inside = getattr(node, name, ())
        if isinstance(inside, list):
            yield from inside


def all_statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements inside a node, at any depth."""
    for one in statements(node):
        yield one
        yield from all_statements(one)


@cache
def definitions() -> tuple[Definition, ...]:
    """Every class and function with its path and qualified name."""

    def walk(node: ast.AST, prefix: str, separator: str) -> Iterator[Definition]:
        for child in statements(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}{separator}{child.name}"
                yield name, child
                yield from walk(child, name, ".")
            else:
                yield from walk(child, prefix, separator)

    return tuple(d for path, (_, tree) in python_sources().items() for d in walk(tree, path, "::"))


def hold(measured: dict[str, int], limit: int, exceptions: dict[str, str], what: str) -> None:
    """Compare sizes with their limit, and the list of exceptions with what still needs one."""
    over = {
        name: size for name, size in measured.items() if size > limit and name not in exceptions
    }
    rows = "\n".join(
        f"  {size:5d}  {name}" for name, size in sorted(over.items(), key=lambda row: -row[1])
    )
    assert not over, (
        f"{what}: more than {limit}; split it, or list it in test_layout.py and say why:\n{rows}"
    )
    stale = [name for name in exceptions if measured.get(name, 0) <= limit]
    assert not stale, (
        f"{what}: no longer exceptions, take them off the list in test_layout.py: {stale}"
    )


def test_files_are_within_the_house_size() -> None:
    lines = {name: count for name, (count, _) in python_sources().items()}
    kernels = {name: count for name, count in lines.items() if name.startswith(KERNEL_FILES)}
    others = {name: count for name, count in lines.items() if name not in kernels}
    hold(others, MAX_FILE_LINES, LONG_FILES, "lines of a file")
    hold(kernels, MAX_KERNEL_FILE_LINES, {}, "lines of a kernel file")


def test_functions_fit_a_screen() -> None:
    lines = {
        name: (node.end_lineno or node.lineno) - node.lineno + 1
        for name, node in definitions()
        if not isinstance(node, ast.ClassDef)
    }
    kernels = {name: count for name, count in lines.items() if name.startswith(KERNEL_PACKAGES)}
    others = {name: count for name, count in lines.items() if name not in kernels}
    hold(others, MAX_FUNCTION_LINES, LONG_FUNCTIONS, "lines of a function")
    hold(kernels, MAX_KERNEL_LINES, {}, "lines of a kernel")


def is_operation(node: ast.AST) -> bool:
    """Whether a class member is a method in the sense of the rule.

    Dunder methods, pydantic validators and properties with one statement are data with another
    spelling.
    """
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or re.fullmatch(
        r"__\w+__", node.name
    ):
        return False
    decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
    if "validator" in decorators or "overload" in decorators:
        return False
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return not ("property" in decorators and len(body) <= 1)


def test_classes_have_few_methods() -> None:
    methods = {
        name: sum(map(is_operation, node.body))
        for name, node in definitions()
        if isinstance(node, ast.ClassDef) and not name.startswith("tests/")
    }
    hold(methods, MAX_METHODS, MANY_METHODS, "methods of a class")


def methods_outside(tree: ast.Module) -> list[str]:
    """Functions that are methods but for their place: the first parameter is of a class of the same
    module, and they set its attributes or read private ones.
    """
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    found = []
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or not node.args.args:
            continue
        first = node.args.args[0]
        used = [
            one
            for one in ast.walk(node)
            if isinstance(one, ast.Attribute)
            and isinstance(one.value, ast.Name)
            and one.value.id == first.arg
        ]
        is_own = first.annotation is not None and ast.unparse(first.annotation) in classes
        changes = any(
            isinstance(one.ctx, ast.Store) or re.match("_[^_]", one.attr) is not None
            for one in used
        )
        if is_own and changes:
            found.append(node.name)
    return found


def test_no_method_lives_outside_its_class() -> None:
    exiled = [
        f"{name}::{function}"
        for name, (_, tree) in python_sources().items()
        if not name.startswith("tests/")
        for function in methods_outside(tree)
    ]
    assert not exiled, f"make methods of these, and split the class if it is too large: {exiled}"
    source = (
        "class A: ...\ndef f(a: A) -> None:\n    a.size = 1\ndef g(a: A) -> int:\n    return a.size"
    )
    assert methods_outside(ast.parse(source)) == ["f"]


def test_constructors_have_few_parameters() -> None:
    parameters = {}
    for name, node in definitions():
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            arguments = node.args
            parameters[name] = (
                len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs) - 1
            )
    hold(parameters, MAX_INIT_PARAMETERS, WIDE_CONSTRUCTORS, "parameters of a constructor")


def test_every_python_file_says_what_it_is_for() -> None:
    silent = [
        name
        for name, (_, tree) in python_sources().items()
        if tree.body and not ast.get_docstring(tree)
    ]
    assert not silent, f"these open without a sentence that says what they are for: {silent}"


def test_every_package_is_typed() -> None:
    packages = {
        path.parent
        for path in files()
        if path.name == "__init__.py" and path.parent.name.startswith("enginebay")
    }
    untyped = [
        package.relative_to(ROOT).as_posix()
        for package in packages
        if not (package / "py.typed").is_file()
    ]
    assert packages, "no package found"
    assert not untyped, f"py.typed is missing in {untyped}"


def test_no_file_names_a_folder_of_one_machine() -> None:
    # Written in pieces, so that this file does not find itself. The checkout's own path is one
    # machine's too.
    homes = "|".join("/" + name + "/" for name in ("home", "Users", "root"))
    pattern = re.compile(
        rf"(?<![\w.$}}:/-])(?:{homes})[\w.-]+|(?<!\w)C:\\Users\\\w+|{re.escape(str(ROOT))}(?![\w-])"
    )
    found = []
    for path in files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # weights and pictures
        for number, line in enumerate(text.splitlines(), start=1):
            if (match := pattern.search(line)) is not None:
                found.append(f"{path.relative_to(ROOT)}:{number}: {match.group()}")
    assert not found, "absolute paths of one machine:\n" + "\n".join(found)


PACKAGE_FOLDERS = ("core", "backends", "samplers", "schedulers")


def module_name(path: str) -> str | None:
    """The name that a file of our packages is imported by; None for a file elsewhere."""
    folder, *inside = Path(path).with_suffix("").parts
    if folder not in PACKAGE_FOLDERS or not path.endswith(".py"):
        return None
    while inside and not inside[0].startswith("enginebay"):
        del inside[0]
    return ".".join(inside[:-1] if inside[-1:] == ["__init__"] else inside)


def imports_of(tree: ast.Module) -> Iterator[str]:
    """Full names that a module imports, inside functions and for type checking too. The project has
    no relative imports.
    """
    for node in all_statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def circles(imported: dict[str, set[str]]) -> list[str]:
    """Modules that import themselves through others: those left when modules without remaining
    imports, and modules that no remaining module imports, are taken away again and again.
    """
    left = {name: set(others) for name, others in imported.items()}
    while True:
        used = {other for others in left.values() for other in others}
        done = {name for name, others in left.items() if not others or name not in used}
        if not done:
            return sorted(left)
        left = {name: others - done for name, others in left.items() if name not in done}


def test_no_module_imports_itself_through_others() -> None:
    trees = {
        name: tree for path, (_, tree) in python_sources().items() if (name := module_name(path))
    }
    imported: dict[str, set[str]] = {}
    for name, tree in trees.items():
        found = {full if full in trees else full.rpartition(".")[0] for full in imports_of(tree)}
        imported[name] = (found & trees.keys()) - {name}
    assert len(imported) > 300, "the packages were not found"
    assert circles(imported) == []
    assert circles({**imported, "a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c"]


def test_no_package_imports_itself_through_others() -> None:
    imported: dict[str, set[str]] = {}
    for path, (_, tree) in python_sources().items():
        if name := module_name(path):
            found = {full.partition(".")[0] for full in imports_of(tree)}
            imported.setdefault(name.partition(".")[0], set()).update(found)
    ours = {name: others & imported.keys() - {name} for name, others in imported.items()}
    assert len(ours) > 10, "the packages were not found"
    assert circles(ours) == []
