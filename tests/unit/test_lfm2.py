"""LFM2: what the family reads from config.json, what is refused to models with a recurrent state, and
the tokens of transformers on the engines.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from enginebay import LLM, SamplingParams
from enginebay.compose.composition import make_plan
from enginebay.config import EngineConfig
from enginebay.errors import CheckpointError, UnsupportedError
from enginebay_models.lfm2 import family as lfm2
from enginebay_testing.engine_moves import moves_between, put_and_compare
from tests.parity import tiny
from tests.pool import few_sizes
from tests.unit.test_models_families import CONFIG

NUM_NEW = 12
GREEDY = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
CHOICES: dict[str, Any] = {
    "dtype": "float32",
    "generation_config": "none",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "decode_steps": 4,
}
PAGED = {"name": "oengine", "page_size": 16, "num_pages": 40, "state_snapshot_tokens": 64}
SCARCE = {**PAGED, "num_pages": 1 + 416 // 16}
"""Too few pages for all prompts and their tokens: rows are preempted."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.write_checkpoint(tmp_path_factory.mktemp("model"), "lfm2-mixed"))


@pytest.fixture(scope="module")
def paged(folder: str) -> Iterator[LLM]:
    with few_sizes(), LLM(folder, engine=PAGED, **CHOICES) as llm:
        yield llm


def wanted() -> list[list[int]]:
    return [tokens[:NUM_NEW] for tokens in tiny.read_golden("lfm2-mixed")[0]]


def tokens_of(outputs: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_paged_rows_have_the_tokens_of_transformers(paged: LLM) -> None:
    """Alone, in a batch of chunks, and after hits, which end at a snapshot."""
    prompts = tiny.prompts()
    assert tokens_of(paged.generate(prompts, GREEDY)) == wanted()
    again = paged.generate(prompts, GREEDY)
    assert tokens_of(again) == wanted()
    assert [o.metrics.num_cached_tokens for o in again] == [0, 0, 0, 32, 144, 288]
    alone = paged.generate([prompts[4] + wanted()[4][:4]], GREEDY)[0]
    assert alone.metrics.num_cached_tokens == 144
    goldens = tiny.read_golden("lfm2-mixed")[0][4]
    assert list(alone.outputs[0].token_ids) == goldens[4 : 4 + NUM_NEW]
    paged.engine.ledger.check()


def test_forks_go_on_from_the_state_before_the_last_token(paged: LLM) -> None:
    """Whatever the cache has: nothing of the prompts, and then a snapshot of their beginning."""
    prompts = tiny.prompts()[2:5]
    params = GREEDY.model_copy(update={"n": 4})
    for _ in range(2):
        for output, tokens in zip(paged.generate(prompts, params), wanted()[2:5], strict=True):
            assert [list(one.token_ids) for one in output.outputs] == [tokens] * 4
        paged.run_on_engine(lambda: (paged.engine.drop_arrays(), paged.engine.make_arrays()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "mesh"),
    [("vinference", 1), (SCARCE, 1), (PAGED, 2), (PAGED, 4), ("vinference", 2), ("vinference", 4)],
    ids=str,
)
def test_rows_have_the_tokens_of_transformers(engine: Any, mesh: int, folder: str) -> None:
    if len(jax.devices()) < mesh:
        pytest.skip(f"needs {mesh} devices, there are {len(jax.devices())}")
    goldens, num_new = tiny.read_golden("lfm2-mixed")[0], 64
    params = GREEDY.model_copy(update={"max_tokens": num_new})
    with few_sizes(), LLM(folder, engine=engine, mesh={"tensor": mesh}, **CHOICES) as llm:
        for _ in range(2):
            outputs = llm.generate(tiny.prompts(), params)
            assert tokens_of(outputs) == [list(tokens[:num_new]) for tokens in goldens]
        llm.engine.ledger.check()


def test_layers_and_widths_follow_transformers() -> None:
    fields = {"num_hidden_layers": 3, "intermediate_size": 96, "block_multiple_of": 16}
    mixed = lfm2.build(CONFIG | fields | {"full_attn_idxs": [1]}, dtype="bfloat16")
    (group,) = mixed.info.states
    (inputs,) = group.arrays
    assert (group.name, group.num_layers, inputs.dtype) == ("conv", 2, "bfloat16")
    assert inputs.shape == (2, CONFIG["hidden_size"])
    assert [one.num_layers for one in mixed.info.groups] == [1]
    assert mixed.weight_specs()["layers.0.mlp.gate"].shape[0] == 64
    assert lfm2.build(CONFIG | fields, dtype="float32").info.states == ()
    wrong: list[tuple[str, Any]] = [
        ("conv_L_cache", 1),
        ("full_attn_idxs", ["1"]),
        ("layer_types", ["conv"] * 3),
    ]
    for name, value in wrong:
        with pytest.raises(CheckpointError, match=name):
            lfm2.build(CONFIG | fields | {name: value}, dtype="float32")


def test_proposers_are_refused_by_name(folder: str) -> None:
    config = EngineConfig(model=folder, proposer="ngram", draft_tokens=3, **CHOICES)
    with pytest.raises(UnsupportedError, match=r"'ngram'.*'lfm2'"):
        make_plan(config)


def test_faces_with_arrays_of_their_own_are_refused(folder: str) -> None:
    from enginebay_oengine import open_model
    from enginebay_vinference.subject import open_subject

    for opened in (open_model, open_subject):
        with pytest.raises(UnsupportedError, match="'lfm2'"):
            opened(folder)


def test_a_row_moves_within_its_engine(paged: LLM) -> None:
    """In the middle of its prompt as in the middle of its output."""
    prompt = tiny.prompts()[3]
    for end in (None, 16):
        paged.run_on_engine(functools.partial(put_and_compare, paged.engine, prompt, end))
    moves_between(paged, paged, prompt, 16)
