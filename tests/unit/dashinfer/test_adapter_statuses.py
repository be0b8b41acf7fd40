"""The statuses of adapters, as an engine without adapters and the store of one with two give
them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from enginebay.compose.composition import make_plan
from enginebay.config import EngineConfig
from enginebay.contracts.adapters import required
from enginebay_dashinfer.statuses import AsStatus, status_of
from enginebay_lora.store import LoraStore
from tests.adapters import change_config, write_adapter
from tests.brief import TINY


def test_each_refusal_has_its_status(tmp_path: Path) -> None:
    plan = make_plan(EngineConfig(model=TINY, max_loras=1, max_lora_rank=8, max_cpu_loras=2))
    store = plan.adapters
    assert isinstance(store, LoraStore)
    folder = write_adapter(tmp_path / "a", TINY, targets=["q_proj"])
    wide = change_config(write_adapter(tmp_path / "b", TINY, targets=["q_proj"]), r=9)
    cut = write_adapter(tmp_path / "c", TINY, targets=["q_proj"])
    (cut / "adapter_model.safetensors").write_bytes(np.uint64(7).tobytes())
    store.load("a", folder)
    key = store.key_of("a")

    def status(call: Callable[[], object]) -> AsStatus:
        with pytest.raises(ValueError, match="Allowed: ") as error:
            call()
        return status_of(error.value)

    name = "ALLSPARK_LORA_"
    assert status(lambda: store.key_of("b")).name == f"{name}NOT_FOUND"
    assert status(lambda: store.unload("b", ())).name == f"{name}NOT_FOUND"
    assert status(lambda: store.load("a", folder)).name == f"{name}ALREADY_LOADED"
    assert status(lambda: store.unload("a", [key])).name == f"{name}IN_USE"
    assert status(lambda: store.load("b", wide)).name == f"{name}RANK_EXCEED_LIMIT_ERROR"
    assert status(lambda: store.load("b", cut)) is AsStatus.ALLSPARK_IO_ERROR
    store.load("b", folder)
    assert status(lambda: store.load("c", folder)).name == f"{name}NUM_EXCEED_LIMIT_ERROR"
    assert status(lambda: required(None, "load_lora('a')")).name == f"{name}NUM_EXCEED_LIMIT_ERROR"
