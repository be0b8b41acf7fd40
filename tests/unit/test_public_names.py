"""dir() of the packages that import their names when they are first used."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize(
    "package", ["enginebay", "enginebay_oengine", "enginebay_vinference", "enginebay_esurge"]
)
def test_dir_lists_every_public_name(package: str) -> None:
    module = importlib.import_module(package)
    assert set(module.__all__) <= set(dir(module))
    assert "__name__" in dir(module)
