"""Models of experts, of a latent cache and of recurrent states on live engines: batched, chunked,
after a shared prefix, preempted and sharded, against stored outputs of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay_bench.scoring import scoring
from enginebay_paged.engine import is_paged
from tests.parity import tiny
from tests.unit.loops import Preempting

NUM_NEW, PAGE_SIZE, CHUNK, TOLERANCE = 12, 16, 64, 1e-4
PARAMS = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
INDICES = (2, 3, 4)
"""Prompts of 7, 33 and 150 tokens: the last is cut into chunks."""

ENGINES: dict[str, Any] = {
    "vinference": "vinference",
    "oengine": {"name": "oengine", "page_size": PAGE_SIZE},
}
VARIANTS = (
    *("deepseek_v2-grouped", "lfm2-mixed", "qwen3_moe-normed"),
    *("falcon_h1-one", "granitemoehybrid-one", "nemotron_h-one"),
)
QUICK = {("deepseek_v2-grouped", "oengine", 1)}
"""What `make test` runs."""


def cases() -> Iterator[Any]:
    for variant in VARIANTS:
        for engine in ENGINES:
            for num_devices in (1, 2, 4):
                case = (variant, engine, num_devices)
                yield pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)


def tokens_of(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, PARAMS)]


@pytest.mark.long
@pytest.mark.usefixtures("few_sizes_module")
@pytest.mark.parametrize(("variant", "engine", "num_devices"), list(cases()))
def test_a_live_engine_gives_what_transformers_gives(
    variant: str, engine: str, num_devices: int, tmp_path: Path
) -> None:
    if len(jax.devices()) < num_devices:
        pytest.skip(f"needs {num_devices} devices, there are {len(jax.devices())}")
    goldens, every_logits = tiny.read_golden(variant)
    expected = [goldens[i][:NUM_NEW] for i in INDICES]
    prompts = [tiny.prompts()[i] for i in INDICES]
    choices: dict[str, Any] = {
        "engine": ENGINES[engine],
        "mesh": {"tensor": num_devices},
        "dtype": "float32",
        "generation_config": "none",
        "max_model_len": 256,
        "max_num_seqs": 3,
        "max_num_batched_tokens": CHUNK,
        "decode_steps": 4,
    }
    with LLM(str(tiny.write_checkpoint(tmp_path / "model", variant)), **choices) as llm:
        alone = tokens_of(llm, prompts[2:])
        assert alone == expected[2:]
        llm.run_on_engine(lambda: (llm.engine.drop_arrays(), llm.engine.make_arrays()))
        assert tokens_of(llm, prompts) == expected, "in a batch, in chunks"
        longer = [*prompts[2], *goldens[4][:5]]
        again = llm.generate([longer], PARAMS)[0]
        assert list(again.outputs[0].token_ids) == goldens[4][5 : 5 + NUM_NEW]
        num_shared = (len(longer) - 1) // PAGE_SIZE * PAGE_SIZE if is_paged(llm.engine) else 0
        assert again.metrics is not None
        assert again.metrics.num_cached_tokens == num_shared
        scheduler = Preempting(llm.loop.scheduler, after=5)
        llm.run_on_engine(lambda: setattr(llm.loop, "scheduler", scheduler))
        llm.run_on_engine(lambda: setattr(llm.loop, "_state", scheduler.initial_state()))
        assert tokens_of(llm, prompts) == expected, "preempted in the middle of the output"
        assert len(scheduler.preempted) == len(prompts)
        with scoring(llm) as scorer:
            sequence = [*prompts[2], *goldens[4]]
            logits = scorer.score(sequence[:-1]).logits
        at = tiny.golden_positions(len(prompts[2]))[:-1]
        logits = tiny.stored_part(variant, logits[at])
        assert np.abs(logits - every_logits[4][: len(at)]).max() <= TOLERANCE
