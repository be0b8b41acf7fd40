"""Tests of what the engine promises in addition to its contract: rings as long as a window, and the
tokens of the paged engine.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from enginebay_ring.engine import RingLedger

from enginebay import LLM, EngineConfig, SamplingParams
from enginebay.contracts.cache import CacheGroup
from enginebay.plugins.registry import load_registry
from enginebay_testing.ledgers import ledger_checks
from enginebay_testing.tiny import write_tiny_checkpoint

SIZES: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "decode_steps": 4,
    "processors": (),
}
WINDOW, BLOCK = 16, 8
GROUPS = [CacheGroup("full", 1, 2, 16, 16), CacheGroup("window", 2, 2, 16, 16, WINDOW)]
AHEAD = 16 + 4
RING = -(-(WINDOW + AHEAD) // BLOCK) + 1


def ledger() -> RingLedger:
    return RingLedger(GROUPS, EngineConfig(model="demo", **SIZES), BLOCK)


CHECKS = ledger_checks(ledger, 2, 128, BLOCK)


@pytest.mark.parametrize("name", [name for name, _ in CHECKS])
def test_the_ledger_keeps_its_contract_with_a_window(name: str) -> None:
    dict(CHECKS)[name]()


def test_a_row_keeps_a_ring_of_blocks_in_a_group_with_a_window() -> None:
    books = ledger()
    assert {group: shape.num_pages for group, shape in books.shapes().items()} == {
        "full": 1 + 2 * 128 // BLOCK,
        "window": 1 + 2 * RING,
    }
    lease = books.admit(1, np.arange(20), 128)
    assert lease is not None
    table = np.zeros((1, 128 // BLOCK), np.int32)
    for committed in (0, 16, 60, 128):
        books.commit(lease, np.arange(committed))
        books.write_table("window", [lease], table)
        kept = np.flatnonzero(table[0])
        assert kept[0] * BLOCK <= max(0, committed + 1 - WINDOW), "a block is missing"
        assert len(kept) <= RING
        assert len(set(table[0, kept].tolist())) == len(kept), "two blocks share a page"
        assert set(table[0, kept].tolist()) <= set(range(1 + RING, 1 + 2 * RING))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of random weights, whose second layer has a window of 16 tokens."""
    windows = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(folder, load_registry(), "Qwen2ForCausalLM", **windows)
    return str(folder)


def test_tokens_are_those_of_the_paged_engine(model: str) -> None:
    prompts = [np.random.default_rng(i).integers(4, 90, n).tolist() for i, n in enumerate((70, 9))]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    tokens = []
    for engine in ({"name": "ring", "block_size": BLOCK}, "oengine"):
        with LLM(model, engine=engine, **SIZES) as llm:
            found = llm.generate(prompts, params)
            tokens.append([out.outputs[0].token_ids for out in found])
            if engine != "oengine":
                assert llm.engine.ledger.windows == {"full": None, "window": WINDOW}
    assert tokens[0] == tokens[1]
