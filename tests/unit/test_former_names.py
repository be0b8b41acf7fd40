"""Documented import paths of version 0.1 lead to the modules of today."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings

import pytest

from enginebay.contracts.text import Tokenizer
from enginebay.former_names import FORMER_NAMES
from enginebay.ops.linear import LINEAR


@pytest.mark.parametrize("name", FORMER_NAMES)
def test_a_former_path_is_the_module_of_today(name: str) -> None:
    sys.modules.pop(name, None)
    with warnings.catch_warnings(record=True) as warned:  # packages of former modules warn, too
        warnings.simplefilter("always")
        found = importlib.import_module(name)
    assert f"{name} is {FORMER_NAMES[name]} now" in {str(one.message) for one in warned}
    assert found is importlib.import_module(FORMER_NAMES[name])
    spec = found.__spec__
    assert spec is not None
    assert spec.name == FORMER_NAMES[name], "the module of today keeps its own name"


def test_former_homes_of_single_names_have_them() -> None:
    assert importlib.import_module("enginebay.text").Tokenizer is Tokenizer
    assert importlib.import_module("enginebay_xla.ops").LINEAR is LINEAR


def test_a_script_of_version_0_1_runs() -> None:
    script = (
        "import enginebay\n"
        "from enginebay.cache import KVLayout\n"
        "from enginebay.hooks import hookimpl\n"
        "from enginebay_stepping.rows.make import make_row_table\n"
        "import enginebay.contracts.cache as cache, enginebay_runtime.rows.make as make\n"
        "print(KVLayout is cache.KVLayout, make_row_table is make.make_row_table)"
    )
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True True\n", "")
