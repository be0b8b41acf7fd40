"""A row's state moves between engines that lay their KV heads out differently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from enginebay import LLM
from enginebay.engine import RowState
from enginebay.testing.driver import Driver
from enginebay.types import FrozenSampling, Request
from tests.parity import tiny

VARIANT = "qwen3-tied"  # two KV heads: over four devices each is held twice


def request() -> Request:
    sampling = FrozenSampling(12, 0.0, 0, 1.0, 0.0, (), (), False, True)
    return Request("moved", np.asarray(tiny.prompts()[3], np.int32), sampling, (0, 1), 0.0)


def begin(llm: LLM) -> tuple[RowState, list[int], list[int]]:
    driver = Driver(llm.engine, request())
    before = driver.prefill() + driver.decode(3)
    state = llm.engine.take(driver.lease)
    return state, before, driver.decode(8)


def go_on(llm: LLM, state: RowState, before: list[int]) -> list[int]:
    driver = Driver(llm.engine, request())
    llm.engine.put(driver.lease, state)
    driver.resume(before)
    return driver.decode(8)


@pytest.mark.parametrize(("first", "second"), [(4, 1), (1, 4)])
def test_a_row_goes_on_where_heads_are_held_differently(first: int, second: int, tmp_path: Path) -> None:
    if len(jax.devices()) < max(first, second):
        pytest.skip(f"needs {max(first, second)} devices, there are {len(jax.devices())}")
    folder = str(tiny.write_checkpoint(tmp_path, VARIANT))
    common: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 2, "decode_steps": 8}
    with (
        LLM(folder, mesh={"tensor": first}, **common) as one,
        LLM(folder, mesh={"tensor": second}, **common) as other,
    ):
        state, before, after = one.run_on_engine(lambda: begin(one))
        assert state.k["full"].shape[2] == tiny.CONFIGS[VARIANT]["num_key_value_heads"]
        assert other.run_on_engine(lambda: go_on(other, state, before)) == after
