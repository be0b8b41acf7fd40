"""The built-in plugins declare without importing, and every target that they name is there."""

from __future__ import annotations

import subprocess
import sys

import pytest

from enginebay.plugins.registry import Entry, load_registry

HEAVY = ("fastapi", "jax_triton", "torch", "transformers", "triton", "uvicorn")
ENTRIES = [entry for entry in load_registry().entries if entry.distribution == "enginebay"]

LIST = """
import sys
from enginebay.cli.program import main
code = main(["plugins"])
print(*sorted(name for name in sys.argv[1:] if name in sys.modules), file=sys.stderr)
sys.exit(code)
"""


def test_listing_plugins_imports_no_heavy_library() -> None:
    command = [sys.executable, "-c", LIST, *HEAVY]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr.split(), "imported by `enginebay plugins`"
    assert "vinference" in done.stdout


def test_declarations_do_not_import_jax() -> None:
    code = (
        "import sys; from enginebay.plugins.registry import load_registry; load_registry(); "
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_part_is_imported_before_it_is_picked() -> None:
    modules = {
        name.partition(":")[0]
        for entry in ENTRIES
        if (declared := entry.declaration) is not None
        for name in (declared.target, declared.options)
        if name
    }
    assert len(modules) > 100
    code = (
        "import sys; from enginebay.plugins.registry import load_registry; load_registry(); "
        "print(*(name for name in sys.argv[1:] if name in sys.modules))"
    )
    command = [sys.executable, "-c", code, *modules]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not done.stdout.split(), "imported while plugins were listed"


@pytest.mark.parametrize(
    "entry", ENTRIES, ids=lambda e: ":".join(p for p in (e.kind, e.op, e.name) if p)
)
def test_every_target_can_be_resolved(entry: Entry) -> None:
    if entry.state == "unavailable":
        pytest.skip(entry.reason)
    registry = load_registry()
    assert entry.state == "ready", entry.reason
    assert registry.load(entry) is not None
    assert registry.options(entry, {}) is None or entry.declaration is not None
