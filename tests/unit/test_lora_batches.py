"""A batch over eight adapters and none: each row gives the tokens and log-probabilities that it
gives alone on merged weights. And two hundred adapters take turns in four slots.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay.errors import EnginebayError
from enginebay_lora.store import LoraStore
from tests.adapters import change_config, change_tensors, write_adapter, write_merged
from tests.brief import TINY
from tests.parity import tiny
from tests.unit.test_embed import PreemptsOnce

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_sizes_module")]

NUM_ROWS, NUM_ADAPTERS = 32, 8
SIZES: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": NUM_ROWS,
    "max_num_batched_tokens": 64,  # long prompts are chunked
    "generation_config": "none",
}
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=0)
NAMES = [None if i % 9 == 8 else f"adapter-{i % 9}" for i in range(NUM_ROWS)]
TOLERANCE = 1e-4

Row = tuple[list[int], list[float]]
"""New tokens, and their log-probabilities."""


@dataclasses.dataclass(frozen=True)
class Family:
    """A checkpoint, its adapters by name, and what each row gives alone on merged weights."""

    model: Path
    adapters: dict[str, str]
    prompts: list[list[int]]
    alone: list[Row]


@pytest.fixture(scope="module", params=["llama-mha", "qwen3-tied", "gemma3-mixed"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny.write_checkpoint(folder / "model", request.param)
    targets = (["q_proj", "v_proj"], ["k_proj", "o_proj", "up_proj"], None)
    adapters = {}
    for i in range(NUM_ADAPTERS):
        own: dict[str, Any] = {} if (one := targets[i % 3]) is None else {"targets": one}
        own |= {"rank": 2 + i % 7, "use_rslora": i % 2 == 0, "scale": 1.5}
        adapters[f"adapter-{i}"] = write_adapter(folder / f"{i}", model, seed=i, **own)
    rng = np.random.default_rng(5)
    shared = rng.integers(0, tiny.VOCAB_SIZE, 40).tolist()
    prompts = [
        [*(shared if i % 4 == 0 else []), *rng.integers(0, tiny.VOCAB_SIZE, 1 + 2 * i).tolist()]
        for i in range(NUM_ROWS)
    ]
    alone: list[Row] = [([], [])] * NUM_ROWS
    for name in dict.fromkeys(NAMES):
        merged = (
            model if name is None else write_merged(folder / f"m-{name}", model, adapters[name])
        )
        with LLM(str(merged), **SIZES) as llm:
            for i in (i for i in range(NUM_ROWS) if NAMES[i] == name):
                [alone[i]] = rows_of(llm, [prompts[i]])
    return Family(model, {name: str(one) for name, one in adapters.items()}, prompts, alone)


def rows_of(llm: LLM, prompts: Sequence[list[int]], names: Any = None) -> list[Row]:
    rows = []
    for output in llm.generate(list(prompts), GREEDY, lora=names):
        one = output.outputs[0]
        assert one.logprobs is not None
        rows.append(
            (
                list(one.token_ids),
                [told[t] for told, t in zip(one.logprobs, one.token_ids, strict=True)],
            )
        )
    return rows


def assert_alone(found: Sequence[Row], alone: Sequence[Row]) -> None:
    for i, (one, other) in enumerate(zip(found, alone, strict=True)):
        assert one[0] == other[0], f"row {i}, {NAMES[i]}"
        np.testing.assert_allclose(one[1], other[1], atol=TOLERANCE, err_msg=f"row {i}, {NAMES[i]}")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_loras": 3},
        {"engine": "vinference"},
        {"proposer": "ngram"},
        {"mesh": {"tensor": 2}},
        {"mesh": {"tensor": 4}},
        {"kernels": {"lora": "xla"}},
    ],
    ids=lambda fields: "-".join(map(str, fields)) or "default",
)
def test_each_row_is_as_alone_on_merged_weights(family: Family, fields: dict[str, Any]) -> None:
    if "mesh" in fields:
        fields = fields | {"mesh": {"tensor": int(fields["mesh"]["tensor"])}}
    with LLM(str(family.model), **SIZES | {"lora": family.adapters} | fields) as llm:
        assert len({tuple(row[0]) for row in family.alone}) > NUM_ADAPTERS
        assert_alone(rows_of(llm, family.prompts, NAMES), family.alone)
        # now prefixes are in the cache
        assert_alone(rows_of(llm, family.prompts, NAMES), family.alone)
        alone = [rows_of(llm, [family.prompts[i]], NAMES[i])[0] for i in range(0, NUM_ROWS, 5)]
        assert [row[0] for row in alone] == [row[0] for row in family.alone[::5]]
        llm.run_on_engine(llm.engine.ledger.check)


def test_preempted_rows_go_on_with_their_adapter(family: Family) -> None:
    with LLM(str(family.model), **SIZES, lora=family.adapters) as llm:
        scheduler = PreemptsOnce(llm.loop.scheduler)
        llm.loop.scheduler = scheduler
        assert_alone(rows_of(llm, family.prompts, NAMES), family.alone)
        assert scheduler.preempted


def test_two_hundred_adapters_take_turns_in_four_slots(tmp_path: Path) -> None:
    count, rng = 200, random.Random(7)
    folders = {
        f"a{i}": str(write_adapter(tmp_path / f"a{i}", TINY, seed=i, rank=2, scale=3.0))
        for i in range(count)
    }
    prompts = {
        name: np.random.default_rng(i).integers(0, 96, 1 + i % 40).tolist()
        for i, name in enumerate(folders)
    }
    broken = write_adapter(tmp_path / "broken", TINY, rank=2)
    tensors = broken / "adapter_model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-9])
    wrong = write_adapter(tmp_path / "wrong", TINY, rank=2)
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    change_tensors(wrong, {f"{module}.lora_A.weight": np.ones((2, 3), np.float32)})
    ranked = change_config(write_adapter(tmp_path / "ranked", TINY, rank=9), r=9)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    sizes = SIZES | {"max_num_seqs": 8}
    found: dict[str, list[int]] = {}
    with LLM(TINY, **sizes, max_loras=4, max_lora_rank=8) as llm:

        def use(names: Sequence[str]) -> None:
            for name in names:
                llm.load_adapter(name, folders[name])
                [output] = llm.generate([prompts[name]], params, lora=name)
                found[name] = list(output.outputs[0].token_ids)
                for folder in (broken, wrong, ranked, tmp_path / "none"):
                    with pytest.raises(EnginebayError):
                        llm.load_adapter("bad", folder)
                if rng.random() < 0.5:
                    llm.unload_adapter(name)

        names = list(folders)
        rng.shuffle(names)
        with ThreadPoolExecutor(10) as pool:
            list(pool.map(use, (names[i::10] for i in range(10))))
        assert len(found) == count
        store = llm.plan.adapters
        assert isinstance(store, LoraStore)
        assert store.counts().evicted > 50
        left = list(store.loaded())
        assert 0 < len(left) < count
        for name in left:
            llm.unload_adapter(name)
        llm.run_on_engine(llm.engine.ledger.check)
        assert not store.loaded()
        assert not llm.engine.rows.adapters.any()
        for name in names:  # alone, in another slot
            llm.load_adapter(name, folders[name])
            [output] = llm.generate([prompts[name]], params, lora=name)
            assert list(output.outputs[0].token_ids) == found[name]
            llm.unload_adapter(name)
        counts = llm.counts()
        assert (counts.running, counts.waiting) == (0, 0)
    for name in names[::20]:
        merged = write_merged(tmp_path / f"m-{name}", TINY, Path(folders[name]))
        with LLM(str(merged), **sizes) as llm:
            [output] = llm.generate([prompts[name]], params)
            assert list(output.outputs[0].token_ids) == found[name]
