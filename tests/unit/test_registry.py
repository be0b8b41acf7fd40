"""The plugin host: what is broken is listed and harmless, names are found or the nearest is told,
options are checked.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from enginebay.errors import ConfigError, PluginError, UnknownNameError
from enginebay.plugins.hooks import Declaration
from enginebay.plugins.registry import PLUGINS_VARIABLE, Entry, Registry, load_registry

Install = Callable[..., None]

LIFO = """
from enginebay.plugins.hooks import hookimpl

@hookimpl
def register_schedulers(register):
    parts = "{module}_parts:Lifo"
    register("lifo", parts, options="{module}_parts:Options", summary="newest first")
"""

PARTS = """
from pydantic import BaseModel, ConfigDict

class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    depth: int = 1

class Lifo:
    class Inner:
        pass
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a distribution with one plugin where Python finds it."""
    monkeypatch.delenv(PLUGINS_VARIABLE, raising=False)
    monkeypatch.syspath_prepend(tmp_path)

    def put(module: str, source: str, *, name: str | None = None, parts: str = "") -> None:
        info = tmp_path / f"{module}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.5\n")
        (info / "entry_points.txt").write_text(f"[enginebay]\n{name or module} = {module}\n")
        for file, text in ((module, source), (f"{module}_parts", parts)):
            (tmp_path / f"{file}.py").write_text(textwrap.dedent(text).replace("{module}", module))
            monkeypatch.delitem(sys.modules, file, raising=False)

    return put


def register(call: str, kind: str = "scheduler") -> str:
    """A plugin's source with one registration."""
    head = "from enginebay.plugins.hooks import hookimpl\n@hookimpl\n"
    return f"{head}def register_{kind}s(register):\n    {call}\n"


def plugin_entry(registry: Registry, name: str) -> Entry:
    return next(e for e in registry.entries if e.kind == "plugin" and e.name == name)


def part_entry(registry: Registry, package: str) -> Entry:
    return next(e for e in registry.entries if e.package == package)


def test_a_plugins_part_is_listed_found_and_loaded_when_it_is_picked(install: Install) -> None:
    install("external", LIFO, parts=PARTS)
    registry = load_registry()
    assert part_entry(registry, "external").record() == {
        "kind": "scheduler",
        "name": "lifo",
        "op": "",
        "package": "external",
        "version": "1.5",
        "distribution": "external",
        "state": "ready",
        "reason": "",
    }
    assert "lifo" in registry.names("scheduler")
    assert "external_parts" not in sys.modules
    assert registry.load(registry.find("scheduler", "lifo")).__name__ == "Lifo"
    assert "external_parts" in sys.modules


def test_a_plugin_with_the_name_of_a_former_one_of_enginebay_is_loaded(install: Install) -> None:
    install("outside", LIFO, name="executor", parts=PARTS)
    assert part_entry(load_registry(), "executor").name == "lifo"
    assert part_entry(load_registry(["executor"]), "executor").distribution == "outside"


def test_the_built_in_parts_are_all_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PLUGINS_VARIABLE, raising=False)
    built_in = [e for e in load_registry().entries if e.distribution == "enginebay"]
    assert {"engine", "kernel", "model", "sampler", "scheduler", "platform"} <= {
        e.kind for e in built_in
    }
    assert not [e for e in built_in if e.state == "broken"]


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    registry = load_registry(["schedulers"])
    with pytest.raises(UnknownNameError, match=r"unknown scheduler 'fcsf'.*Did you mean 'fcfs'"):
        registry.find("scheduler", "fcsf")
    with pytest.raises(UnknownNameError, match="Allowed: none is installed"):
        registry.find("engine", "vinference")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "import module_that_is_not_there",
            "ModuleNotFoundError: No module named 'module_that_is_not_there'",
        ),
        ("def broken(:", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("x = 1", "it implements no hook of enginebay"),
        (register("pass"), "its hooks register no part"),
        (register("pass").replace("(register)", "(registrar)"), "PluginValidationError.*registrar"),
        (
            register("pass", kind="sheduler"),
            "PluginValidationError.*unknown hook 'register_shedulers'",
        ),
        (register("pass", kind="binder"), "former hook register_binders.*the rule `partition`"),
        (
            register("pass", kind="executor"),
            "former hook register_executors.*executor = .mod",
        ),
        (
            register("pass", kind="logits_processor"),
            "former hook register_logits_processors.*register_processors",
        ),
        (
            register("pass", kind="tool_parser"),
            r"former hook register_tool_parsers.*reads=\(\"tool_calls\",\).*register_formats",
        ),
        (
            register("pass", kind="reasoning_parser"),
            r"former hook register_reasoning_parsers.*reads=\(\"reasoning\",\).*register_formats",
        ),
        (
            register("register('x', 'a:b')", kind="format"),
            r"tuple of tool_calls, reasoning or both for the capability reads, not \(\)",
        ),
        (
            register("register('x', 'a:b', capabilities={'reads': ('calls',)})", kind="format"),
            r"the capability reads, not \('calls',\)",
        ),
        (
            register("register('x', 'a:b', capabilities={'reads': (['calls'],)})", kind="format"),
            r"the capability reads, not \(\['calls'\],\)",
        ),
        (register("1 / 0"), "register_schedulers failed: ZeroDivisionError"),
        (register("register('x')"), "register_schedulers failed: TypeError"),
        (register("register('x', 'a:b', colour='red')"), "register_schedulers failed: TypeError"),
        (register("register('x', 'a.b')"), 'a target of the form "module:attribute"'),
        (register("register('x', 'a:b', op='attention')"), "an op for a kernel, and none"),
        (register("register('x', 'a:b')", kind="kernel"), "an op for a kernel, and none"),
        (register("register(None, 'a:b')"), "no /, no : and no control"),
        (register("register('a/b', 'a:b')"), "no /, no : and no control"),
        (register("register('a:b', 'a:b')"), "no /, no : "),
        (register(r"register('a\x1b[31m', 'a:b')"), "control characters"),
        (register("register('auto', 'a:b')"), "that is not auto"),
        (register("register('x', 'a:b', requires='torch')"), "tuples for platforms, requires"),
        (
            register("register('x', 'a:b', platforms='cpu')"),
            "tuples for platforms, requires and custom_calls",
        ),
        (
            register(
                "register('x', 'a:b', op='rope', capabilities={'custom_calls': 'f'})", kind="kernel"
            ),
            "tuples for platforms, requires",
        ),
        (
            register("register('x', 'a:b', capabilities={'priority': 'high'})"),
            "whole number for the capability priority",
        ),
        (
            register("register('x', 'a:b', capabilities={'prority': 3})"),
            (
                "scheduler 'x': unknown capability 'prority'. Allowed: order, priority. "
                "Did you mean 'priority'"
            ),
        ),
    ],
)
def test_a_broken_plugin_is_listed_with_its_reason_and_harms_nobody(
    install: Install, source: str, reason: str
) -> None:
    install("external", source)
    registry = load_registry()
    entry = plugin_entry(registry, "external")
    assert entry.state == "broken"
    with pytest.raises(PluginError, match=reason):
        registry.find("scheduler", "external")
    with pytest.raises(PluginError, match=reason):
        registry.find("scheduler", "external/lifo")
    assert registry.find("scheduler", "fcfs").state == "ready"


def test_a_plugins_own_capability_has_a_dot_and_is_kept(install: Install) -> None:
    install("external", register("register('lifo', 'a:b', capabilities={'external.depth': 3})"))
    declaration = load_registry().find("scheduler", "lifo").declaration
    assert declaration is not None
    assert declaration.capabilities == {"external.depth": 3}


@pytest.mark.long
def test_the_ops_of_the_built_in_kernels_are_registered_through_the_same_hooks() -> None:
    entries = load_registry().entries
    assert {e.op for e in entries if e.kind == "kernel"} == {
        e.name for e in entries if e.kind == "op"
    }


KERNEL = """
from enginebay.plugins.hooks import hookimpl

@hookimpl
def register_kernels(register):
    register("x", "a:b", op="{op}")
"""


def test_a_kernel_of_a_misspelt_op_is_broken_with_the_nearest_and_its_plugin_stays(
    install: Install,
) -> None:
    install("external", LIFO + KERNEL.replace("{op}", "atention"), parts=PARTS)
    registry = load_registry()
    with pytest.raises(
        PluginError,
        match=(
            r"kernel 'x' cannot be used: unknown op 'atention'\. Allowed: add_rms_norm, "
            r".*attention, .* Did you mean 'attention'"
        ),
    ):
        registry.find("kernel", "x", "atention")
    assert registry.find("scheduler", "lifo").state == "ready"


def test_a_kernel_may_implement_an_op_that_another_plugin_registers(install: Install) -> None:
    install("a_external", KERNEL.replace("{op}", "swing"))
    install("b_external", register("register('swing', 'a:swing')", kind="op"))
    assert load_registry().find("kernel", "x", "swing").state == "ready"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (register("1 / 0", kind="op"), "'b_external' .register_ops failed: ZeroDivisionError"),
        (
            register("register('swing', 'a:swing', interface=9)", kind="op"),
            "op 'swing' of plugin 'b_external' cannot be used: written for version 9",
        ),
        (
            register("register('swing', 'a:swing', requires=('nowhere_at_all',))", kind="op"),
            "op 'swing' of plugin 'b_external' cannot be used: needs nowhere_at_all",
        ),
    ],
)
def test_a_kernel_of_an_op_whose_plugin_is_broken_says_so(
    install: Install, source: str, reason: str
) -> None:
    install("a_external", KERNEL.replace("{op}", "swing"))
    install("b_external", source)
    with pytest.raises(PluginError, match=f"kernel 'x' cannot be used.*{reason}"):
        load_registry().find("kernel", "x", "swing")


def test_a_part_for_another_interface_version_is_broken(install: Install) -> None:
    install("external", register("register('lifo', 'a:b', interface=2)"))
    registry = load_registry()
    assert "lifo" not in registry.names("scheduler")
    with pytest.raises(
        PluginError,
        match="written for version 2 of the scheduler interface; this enginebay has version 1",
    ):
        registry.find("scheduler", "lifo")


@pytest.mark.parametrize("module", ["no_such_module", "no_such_package.deep.module"])
def test_a_part_that_needs_what_is_not_installed_is_unavailable(
    install: Install, module: str
) -> None:
    install("external", register(f"register('lifo', 'a:b', requires=('{module}',), extra='fast')"))
    registry = load_registry()
    assert part_entry(registry, "external").state == "unavailable"
    assert "lifo" in registry.names("scheduler")
    with pytest.raises(PluginError, match=rf"needs {module}; install external\[fast\]"):
        registry.find("scheduler", "lifo")


def test_a_name_that_is_taken_stays_with_the_built_in_plugin(install: Install) -> None:
    install("a_external", register("register('fcfs', 'a:b')"))
    registry = load_registry()
    assert registry.find("scheduler", "fcfs").package == "schedulers"
    assert registry.find("scheduler", "schedulers/fcfs").package == "schedulers"
    with pytest.raises(PluginError, match="the name is already taken by plugin 'schedulers'"):
        registry.find("scheduler", "a_external/fcfs")


def test_a_plugin_that_registers_a_name_twice_keeps_the_first(install: Install) -> None:
    install("external", register("register('lifo', 'a:first'); register('lifo', 'a:second')"))
    registry = load_registry()
    declaration = registry.find("scheduler", "lifo").declaration
    assert declaration is not None
    assert declaration.target == "a:first"


def test_the_same_name_may_stand_for_kernels_of_two_ops(install: Install) -> None:
    two = "register('mine', 'a:b', op='linear'); register('mine', 'a:c', op='rope')"
    install("external", register(two, kind="kernel"))
    registry = load_registry()
    assert {registry.find("kernel", "mine", op).op for op in ("linear", "rope")} == {
        "linear",
        "rope",
    }
    with pytest.raises(UnknownNameError, match="unknown kernel of op attention 'mine'"):
        registry.find("kernel", "mine", "attention")


def test_a_plugin_cannot_take_the_place_of_a_built_in_one(install: Install) -> None:
    install("external", register("register('lifo', 'a:b')"), name="schedulers")
    registry = load_registry()
    assert registry.find("scheduler", "fcfs").distribution == "enginebay"
    entry = plugin_entry(registry, "schedulers")
    assert (entry.distribution, entry.state) == ("external", "broken")
    assert "another distribution" in entry.reason


def test_a_qualified_name_of_the_wrong_package_is_unknown(install: Install) -> None:
    install("external", LIFO, parts=PARTS)
    registry = load_registry()
    assert registry.find("scheduler", "external/lifo").name == "lifo"
    with pytest.raises(UnknownNameError, match="unknown scheduler 'schedulers/lifo'"):
        registry.find("scheduler", "schedulers/lifo")


@pytest.mark.parametrize(
    "value", ["schedulers", " schedulers , samplers,", "samplers,schedulers,samplers"]
)
def test_the_variable_restricts_what_is_loaded(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(PLUGINS_VARIABLE, value)
    registry = load_registry()
    assert {e.package for e in registry.entries} == {
        n.strip() for n in value.split(",") if n.strip()
    }
    assert not [e for e in registry.entries if e.state == "broken"]


def test_an_empty_variable_loads_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLUGINS_VARIABLE, "")
    assert {"schedulers", "samplers", "xla"} <= {e.package for e in load_registry().entries}


def test_a_misspelt_name_in_the_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLUGINS_VARIABLE, "sheduler")
    with pytest.raises(
        UnknownNameError, match=f"unknown plugin 'sheduler'.*'schedulers'.*{PLUGINS_VARIABLE}"
    ):
        load_registry()


def test_a_plugin_left_out_is_never_imported(install: Install) -> None:
    install("external", LIFO, parts=PARTS)
    load_registry(["schedulers"])
    assert "external" not in sys.modules


def test_options_are_checked_by_the_parts_own_model(install: Install) -> None:
    install("external", LIFO, parts=PARTS)
    registry = load_registry()
    entry = registry.find("scheduler", "lifo")
    options = registry.options(entry, {"depth": 3})
    assert options is not None
    assert options.model_dump() == {"depth": 3}
    with pytest.raises(
        ConfigError, match=r"scheduler 'lifo': width = 2, an unknown field\. Allowed: depth\."
    ):
        registry.options(entry, {"width": 2})
    with pytest.raises(ConfigError, match="scheduler 'lifo': depth = 'deep'"):
        registry.options(entry, {"depth": "deep"})


def test_options_for_a_part_that_has_none_are_refused(install: Install) -> None:
    install("external", register("register('lifo', 'external_parts:Lifo')"), parts=PARTS)
    registry = load_registry()
    entry = registry.find("scheduler", "lifo")
    assert registry.options(entry, {}) is None
    with pytest.raises(ConfigError, match="options depth for scheduler 'lifo'"):
        registry.options(entry, {"depth": 1})


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("external_parts:Missing", "AttributeError"),
        ("nowhere_at_all:x", "ModuleNotFoundError"),
        ("external_parts:", "AttributeError"),
    ],
)
def test_a_part_that_cannot_be_imported_raises_its_reason_when_picked(
    install: Install, target: str, reason: str
) -> None:
    install("external", register(f"register('lifo', '{target}')"), parts=PARTS)
    registry = load_registry()
    entry = registry.find("scheduler", "lifo")
    with pytest.raises(
        PluginError, match=rf"scheduler 'lifo' of plugin 'external': importing .*{reason}"
    ):
        registry.load(entry)


def test_a_target_may_lie_inside_a_class(install: Install) -> None:
    install("external", register("register('lifo', 'external_parts:Lifo.Inner')"), parts=PARTS)
    registry = load_registry()
    assert registry.load(registry.find("scheduler", "lifo")).__qualname__ == "Lifo.Inner"


def test_a_part_says_on_which_platforms_it_cannot_be_used() -> None:
    def part(*platforms: str) -> Entry:
        declared = Declaration("scheduler", "s", "a:b", platforms=platforms)
        return Entry("scheduler", "s", "p", "1", "d", declaration=declared)

    assert part("tpu", "cuda").why_not_on("cuda") is None
    assert part().why_not_on("cpu") is None
    assert part("tpu", "cuda").why_not_on("cpu") == "needs platform tpu or cuda, this is cpu"
