"""Fixtures: a tiny checkpoint of Llama, and the same weights with the architecture name of the
example's family.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from enginebay.plugins.registry import load_registry
from enginebay_testing.tiny import write_tiny_checkpoint


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "llama", load_registry())


@pytest.fixture(scope="session")
def gated(llama: Path) -> Path:
    folder = Path(shutil.copytree(llama, llama.with_name("gated")))
    config = json.loads((llama / "config.json").read_text(encoding="utf-8"))
    config["architectures"] = ["SwigluLlamaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
