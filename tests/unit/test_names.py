"""One name has one meaning: a public class, function or type that two modules define is a fault,
unless the list below gives a reason.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch

import pytest

from tests.unit.test_layout import module_name, python_sources

pytestmark = pytest.mark.xdist_group("layout")  # sources are read once

TYPE_PARAMETERS = ("TypeVar", "ParamSpec")
"""They belong to the module that defines them: nothing imports them."""


@dataclasses.dataclass(frozen=True)
class Shared:
    """Names that the modules matching `modules` may all define, and why they have one meaning."""

    reason: str
    names: str
    modules: str


ALLOWED = (
    Shared(
        "hooks: the plugin manager finds them by name",
        "register_commands register_engines register_kernels register_layouts register_ops",
        "*.plugin",
    ),
    Shared(
        "the two functions of a command, enginebay.cli.command.Command",
        "add_arguments run",
        "enginebay.cli.* enginebay_testing.cli enginebay_bench.cli.* enginebay_server.command",
    ),
    Shared(
        "the start of a program",
        "main",
        "enginebay.cli enginebay.cli.program enginebay.text.worker.__main__"
        " enginebay_testing.replay enginebay_testing.worker enginebay_testing.bare_call"
        " enginebay_testing.kernel_trial enginebay_bench.weight_reads"
        " enginebay_bench.machine_rates"
        " enginebay_server.replicas.router_process enginebay_bench.compare.engine_process"
        " enginebay_bench.compare.peers.*",
    ),
    Shared(
        "makes the engine of a plan: the composition calls the function of the chosen plugin",
        "make_engine",
        "*.engine enginebay.compose.composition",
    ),
    Shared(
        "the documented name of the DashInfer API; it is no engine of a configuration",
        "Engine",
        "enginebay.contracts.engine enginebay_dashinfer.engine",
    ),
    Shared(
        "the documented name of what a request or a model generates by, in two APIs",
        "GenerationConfig",
        "enginebay_dashinfer.generation_config enginebay_oengine.opened_model",
    ),
    Shared(
        "the capability `attention_problems` of an engine, as the hook's documentation names it",
        "attention_problems",
        "*.engine",
    ),
    Shared(
        "block sizes of the attention kernel of one accelerator",
        "attention_candidates default_config",
        "*.attention_config",
    ),
    Shared(
        "the op of that name: implementations, partition rules, the kit's programs and reference",
        "add_rms_norm embedding grouped_linear kv_write linear lora rms_norm rope sample"
        " short_conv ssd_scan",
        "enginebay_xla.* enginebay_lora.* enginebay_native.* enginebay_samplers.*"
        " enginebay_testing.oracle",
    ),
    Shared(
        "a function in JAX, and its reference in NumPy",
        "first_best gumbel_noise log_softmax rope_frequencies",
        "enginebay.ops.* enginebay_runtime.full_vocab enginebay_xla.kit.sample"
        " enginebay_testing.engine_logprobs enginebay_testing.oracle"
        " enginebay_testing.sampling_oracle",
    ),
    Shared(
        "free memory of a device: an engine does not import the command line, nor the reverse",
        "free_bytes",
        "enginebay.cli.environment enginebay_paged.sizing",
    ),
    Shared(
        "a finished request, under the documented name of both APIs",
        "RequestOutput",
        "enginebay.outputs enginebay_esurge.outputs",
    ),
)


def defined_names(body: list[ast.stmt]) -> Iterator[str]:
    """Public classes, functions and type aliases of a module, inside `if` and `try` too."""
    for node in body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                yield name
            case ast.AsyncFunctionDef(name=name):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                if name[:1].isupper() and not name.isupper() and not is_type_parameter(value):
                    yield name
            case ast.If(body=inner, orelse=other) | ast.Try(body=inner, orelse=other):
                yield from defined_names(inner + other)


def is_type_parameter(value: ast.expr) -> bool:
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Name)
        and value.func.id in TYPE_PARAMETERS
    )


def modules_by_name(trees: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """The modules that define each public name, where these are two or more."""
    found: dict[str, set[str]] = {}
    for module, tree in trees.items():
        for name in defined_names(tree.body):
            if not name.startswith("_"):
                found.setdefault(name, set()).add(module)
    return {name: sorted(modules) for name, modules in found.items() if len(modules) > 1}


def module_trees() -> dict[str, ast.Module]:
    """Syntax trees of the packages by module name."""
    found = {}
    for path, (_, tree) in python_sources().items():
        if name := module_name(path):
            found[name] = tree
    return found


def matches(module: str, patterns: str) -> bool:
    return any(fnmatch(module, pattern) for pattern in patterns.split())


def second_meanings(shared: Mapping[str, list[str]]) -> list[str]:
    """The names whose modules no entry of ALLOWED covers."""
    covered = {name: entry.modules for entry in ALLOWED for name in entry.names.split()}
    return [
        f"{name}: {', '.join(modules)}"
        for name, modules in sorted(shared.items())
        if not all(matches(module, covered.get(name, "")) for module in modules)
    ]


def test_one_name_has_one_meaning() -> None:
    trees = module_trees()
    assert len(trees) > 300, "the packages were not found"
    found = second_meanings(modules_by_name(trees))
    assert not found, (
        "several modules define these names. Rename all but one, or add the name to ALLOWED in "
        "test_names.py with the reason why it has one meaning:\n" + "\n".join(found)
    )


def test_no_exception_is_out_of_date() -> None:
    shared = modules_by_name(module_trees())
    names = [name for entry in ALLOWED for name in entry.names.split()]
    assert len(names) == len(set(names)), "a name is in two entries of ALLOWED"
    single = [name for name in names if name not in shared]
    assert not single, f"one module defines each of these; take them off ALLOWED: {single}"
    unused = [
        pattern
        for entry in ALLOWED
        for pattern in entry.modules.split()
        if not any(fnmatch(m, pattern) for name in entry.names.split() for m in shared[name])
    ]
    assert not unused, f"no module needs these patterns; take them off ALLOWED: {unused}"


def test_a_second_definition_is_found_in_another_package_and_in_the_same_one() -> None:
    text = {
        "enginebay.a": "class Shape: ...\nT = TypeVar('T')\nMAX = 3\nclass _Own: ...\n",
        "enginebay_x.b": "Shape = tuple[int, ...]\nT = TypeVar('T')\nMAX = 4\nclass _Own: ...\n",
        "enginebay_x.c": "if True:\n    async def load(): ...\ndef run(): ...\n",
        "enginebay_x.d": "def load(): ...\nclass A:\n    def only(self): ...\ndef only(): ...\n",
        "enginebay.cli.e": "def run(): ...\n",
    }
    shared = modules_by_name({name: ast.parse(source) for name, source in text.items()})
    assert second_meanings(shared) == [
        "Shape: enginebay.a, enginebay_x.b",
        "load: enginebay_x.c, enginebay_x.d",
        "run: enginebay.cli.e, enginebay_x.c",
    ]
