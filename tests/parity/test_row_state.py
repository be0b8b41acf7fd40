"""A row's state moves between engines that lay their KV heads out differently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from enginebay import LLM
from enginebay.contracts.engine import RowState
from enginebay.types import FrozenSampling, Request
from enginebay_testing.driver import RequestDriver
from tests.parity import tiny

VARIANT = "qwen3-tied"  # two KV heads: over four devices each is held twice


def request() -> Request:
    sampling = FrozenSampling(12)
    return Request("moved", np.asarray(tiny.prompts()[3], np.int32), sampling, (0, 1), 0.0)


def begin(llm: LLM) -> tuple[RowState, list[int], list[int]]:
    driver = RequestDriver(llm.engine, request())
    before = driver.prefill() + driver.decode(3)
    state = llm.engine.take(driver.lease)
    after = driver.decode(8)
    driver.close()
    return state, before, after


def go_on(llm: LLM, state: RowState, before: list[int]) -> list[int]:
    driver = RequestDriver(llm.engine, request())
    llm.engine.put(driver.lease, state)
    driver.resume(before)
    after = driver.decode(8)
    driver.close()
    return after


@pytest.mark.long
def test_a_row_goes_on_where_heads_are_held_differently(tmp_path: Path) -> None:
    if len(jax.devices()) < 4:
        pytest.skip(f"needs 4 devices, there are {len(jax.devices())}")
    folder = str(tiny.write_checkpoint(tmp_path, VARIANT))
    common: dict[str, Any] = {
        "dtype": "float32",
        "generation_config": "none",
        "max_num_seqs": 2,
        "decode_steps": 8,
    }
    with (
        LLM(folder, mesh={"tensor": 4}, **common) as split,
        LLM(folder, mesh={"tensor": 1}, **common) as whole,
    ):
        for one, other in ((split, whole), (whole, split)):
            state, before, after = one.run_on_engine(lambda: begin(one))  # noqa: B023
            assert (
                state.groups["full"].arrays["k"].shape[2]
                == tiny.CONFIGS[VARIANT]["num_key_value_heads"]
            )
            assert other.run_on_engine(lambda: go_on(other, state, before)) == after  # noqa: B023


@pytest.mark.parametrize("variant", tiny.CONFIGS)
def test_equal_models_have_equal_constants(variant: str) -> None:
    """Also those of two processes, between which rows move."""
    family, config = tiny.family_of(variant), tiny.CONFIGS[variant]
    one, other = (family.build(config, dtype="float32") for _ in range(2))
    assert one.info.constants == other.info.constants
    assert " at 0x" not in one.info.constants
