"""LFM2: what the family reads from config.json, what is refused to models with a recurrent state,
and the tokens of transformers on the engines.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay.compose.composition import make_plan
from enginebay.config import EngineConfig
from enginebay.contracts.commands import CopyPages, Drop, PageIn, PageOut
from enginebay.contracts.scheduler import Decision, Scheduler, SchedulerView
from enginebay.contracts.text import ChatPrompt
from enginebay.errors import CheckpointError, UnsupportedError
from enginebay_models.lfm2 import family as lfm2
from enginebay_paged.pools import SNAPSHOTS_PER_ROW
from enginebay_runtime.codec import decode
from enginebay_runtime.engine import StepEngine
from enginebay_testing.engine_moves import MID_PROMPT, moves_between, put_and_compare
from enginebay_testing.recording import frames, replay
from enginebay_testing.subject import greedy, penalty_params, seeded
from tests.parity import tiny
from tests.pool import few_sizes
from tests.unit.test_mixed_steps import mixed, watch
from tests.unit.test_models_families import CONFIG
from tests.unit.test_replay import recording

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


@pytest.mark.long
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


@pytest.mark.long
def test_forks_go_on_from_the_state_before_the_last_token(paged: LLM) -> None:
    """Whatever the cache has: nothing of the prompts, and then a snapshot of their beginning."""
    prompts = tiny.prompts()[2:5]
    params = GREEDY.model_copy(update={"n": 4})
    for _ in range(2):
        for output, tokens in zip(paged.generate(prompts, params), wanted()[2:5], strict=True):
            assert [list(one.token_ids) for one in output.outputs] == [tokens] * 4
        paged.run_on_engine(lambda: (paged.engine.drop_arrays(), paged.engine.make_arrays()))


@pytest.mark.long
def test_only_prompts_that_others_fork_are_cut_before_their_last_token(paged: LLM) -> None:
    (prompt,), chunks = tiny.prompts()[2:3], []
    for n in (1, 2):
        with pytest.MonkeyPatch.context() as patch:
            plans = watch(paged.engine, patch)
            paged.generate([prompt], GREEDY.model_copy(update={"n": n}))
        chunks.append([p.rows[0].num_tokens for p in plans if not p.is_decode])
    assert chunks == [[7], [6, 1, 1]]


@pytest.mark.long
def test_a_chat_is_cut_before_its_generation_prompt(paged: LLM) -> None:
    """The next turn of a conversation may not repeat its last tokens."""
    paged.run_on_engine(lambda: (paged.engine.drop_arrays(), paged.engine.make_arrays()))
    prompt = tiny.prompts()[4]
    assert len(prompt) == 150
    for given, ends in ((ChatPrompt(prompt), [64, 128, 150]), (prompt, [144, 150])):
        with pytest.MonkeyPatch.context() as patch:
            plans = watch(paged.engine, patch)
            assert tokens_of([paged.generate(given, GREEDY)[0]]) == [wanted()[4]]
        rows = [plan.rows[0] for plan in plans if not plan.is_decode]
        assert [row.num_computed + row.num_tokens for row in rows] == ends


class PreemptsPrompts(Scheduler):
    """Preempts each request once, when some of its prompt is computed and some is not."""

    def __init__(self, inner: Scheduler) -> None:
        self.inner, self.computed = inner, dict[str, int]()

    def initial_state(self) -> Any:
        return self.inner.initial_state()

    def decide(self, view: SchedulerView, state: Any) -> tuple[Decision, Any]:
        for row in view.running:
            num_computed = row.num_tokens - row.num_left
            if row.num_left and num_computed and row.request_id not in self.computed:
                self.computed[row.request_id] = num_computed
                return Decision(preempt=(row.request_id,)), state
        return self.inner.decide(view, state)


@contextlib.contextmanager
def scheduled_by(llm: LLM, scheduler: Scheduler) -> Iterator[None]:
    """Within the block, an idle LLM is scheduled by another scheduler."""
    before = llm.loop.scheduler
    llm.run_on_engine(lambda: setattr(llm.loop, "scheduler", scheduler))
    try:
        yield
    finally:
        llm.run_on_engine(lambda: setattr(llm.loop, "scheduler", before))


@pytest.mark.long
def test_rows_preempted_in_the_middle_of_their_prompts_have_the_same_tokens(paged: LLM) -> None:
    """They go on from a snapshot or from the beginning, never from the state that they left."""
    paged.run_on_engine(lambda: (paged.engine.drop_arrays(), paged.engine.make_arrays()))
    prompts, scheduler = tiny.prompts(), PreemptsPrompts(paged.loop.scheduler)
    with scheduled_by(paged, scheduler):
        assert tokens_of(paged.generate(prompts, GREEDY)) == wanted()
    num_computed = sorted(scheduler.computed.values())
    chunked = [prompt for prompt in prompts if len(prompt) > PAGED["page_size"]]
    assert len(num_computed) == len(chunked), "each prompt that is cut was preempted between chunks"
    assert all(num < max(map(len, chunked)) for num in num_computed)
    assert any(num % PAGED["page_size"] for num in num_computed), "one of them without a snapshot"
    paged.engine.ledger.check()


@pytest.mark.long
def test_pages_and_places_leave_the_device_and_come_back_to_others(paged: LLM) -> None:
    paged.generate(tiny.prompts(), GREEDY)

    def move() -> None:
        engine = paged.engine
        assert isinstance(engine, StepEngine)
        before = flat(engine.executor.arrays().cache)
        sources, targets = {}, {}
        for group, layer in engine.executor.arrays().cache.items():
            used = np.asarray(next(iter(layer[0].values())))
            held = np.flatnonzero(used.reshape(len(used), -1).any(axis=1))
            order = [2, 0, 1] if group == "full" else [1]
            sources[group] = held[order].astype(np.int32)
            targets[group] = held[3:][order].astype(np.int32)
        found = engine.executor.run(PageOut(sources))
        out = {name: np.asarray(values) for name, values in found.items()}
        engine.executor.run(PageIn(targets, out))
        after = flat(engine.executor.arrays().cache)
        assert set(out) == set(before) == set(after)
        for name, whole in before.items():
            group = name.partition("/")[0]
            moved, source, target = after[name], sources[group], targets[group]
            assert whole[source].tobytes() != whole[target].tobytes()
            assert moved[target].tobytes() == whole[source].tobytes()
            others = np.setdiff1d(np.arange(len(whole)), target)
            assert moved[others].tobytes() == whole[others].tobytes()
        engine.drop_arrays()
        engine.make_arrays()

    paged.run_on_engine(move)


def flat(cache: Any) -> dict[str, np.ndarray]:
    return {
        f"{group}/{number}/{name}": np.asarray(array)
        for group, layers in cache.items()
        for number, layer in enumerate(layers)
        for name, array in layer.items()
    }


@pytest.mark.long
def test_a_recorded_run_is_replayed_bit_by_bit(paged: LLM, tmp_path: Path) -> None:
    """Of chunks, hits, forks and preempted rows, which copy states to snapshots and back."""
    engine, path = paged.engine, tmp_path / "run"
    assert isinstance(engine, StepEngine)
    record(paged, path)
    commands = [decode(data) for kind, data in frames(path) if kind == b"C"]
    copied = [one.pages for one in commands if isinstance(one, CopyPages)]
    assert {"conv", "full"} <= {group for pages in copied for group in pages}

    def replayed() -> Any:
        engine.drop_arrays()
        try:
            return replay(path, engine.executor)
        finally:
            engine.executor.run(Drop())
            engine.make_arrays()

    found = paged.run_on_engine(replayed)
    assert (found.different_steps, found.arrays_are_equal) == ((), True)
    assert found.num_commands == len(commands)


def record(llm: LLM, path: Path) -> None:
    """Record a run of prompts, preempted once each, and again with forks."""
    forks = GREEDY.model_copy(update={"n": 3})
    with scheduled_by(llm, PreemptsPrompts(llm.loop.scheduler)), recording(llm, path):
        assert tokens_of(llm.generate(tiny.prompts(), GREEDY)) == wanted()
        assert tokens_of(llm.generate(tiny.prompts(), forks)) == wanted()


@pytest.mark.slow
def test_a_recorded_run_is_replayed_in_another_process(folder: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with few_sizes(), LLM(folder, engine=SCARCE, **CHOICES) as llm:
        record(llm, path)
    words = [sys.executable, "-m", "enginebay_testing.replay", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["num_steps"] > 20
    assert (found["different_steps"], found["arrays_are_equal"]) == ([], True)


@pytest.mark.long
def test_the_memory_plan_counts_places_and_snapshots(paged: LLM) -> None:
    """The bytes of the arrays that there are, to the byte."""
    paged.run_on_engine(lambda: assert_planned(paged))
    (conv,) = paged.plan.model.info.states
    (first, second) = paged.run_on_engine(lambda: paged.engine.executor.arrays().cache["conv"])
    num_places = 1 + (1 + SNAPSHOTS_PER_ROW) * CHOICES["max_num_seqs"]
    assert first["inputs"].shape == (num_places, *conv.arrays[0].shape)
    assert first["inputs"].nbytes + second["inputs"].nbytes == 4 * conv.num_layers * math.prod(
        (num_places, *conv.arrays[0].shape)
    )


def assert_planned(llm: LLM) -> None:
    """The memory plan has exactly the bytes that a device holds of the cache."""
    device = llm.plan.placement.device
    held = sum(
        shard.data.nbytes
        for array in jax.tree.leaves(llm.engine.executor.arrays().cache)
        for shard in array.addressable_shards
        if shard.device == device
    )
    assert held == llm.engine.memory.cache_bytes


COMPACT = {"kernels": {"attention": "xla"}, "layout": "hnd"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "mesh", "more"),
    [
        *((engine, mesh, {}) for engine in ("vinference", PAGED) for mesh in (1, 2, 4)),
        (SCARCE, 1, {}),
        *((engine, 1, {"mixed_steps": "on"}) for engine in ("vinference", PAGED)),
        (PAGED, 1, COMPACT),
    ],
    ids=str,
)
def test_rows_have_the_tokens_of_transformers(
    engine: Any, mesh: int, more: dict[str, Any], folder: str
) -> None:
    """On several devices, with too few pages, with a compact copy of keys and values in each
    decode, and where rows decode beside prompts.
    """
    if len(jax.devices()) < mesh:
        pytest.skip(f"needs {mesh} devices, there are {len(jax.devices())}")
    goldens, num_new = tiny.read_golden("lfm2-mixed")[0], 64
    params = GREEDY.model_copy(update={"max_tokens": num_new})
    choices = {**CHOICES, "mesh": {"tensor": mesh}, **more}
    with few_sizes(), LLM(folder, engine=engine, **choices) as llm:
        with pytest.MonkeyPatch.context() as patch:
            plans = watch(llm.engine, patch)
            for _ in range(2):
                outputs = llm.generate(tiny.prompts(), params)
                assert tokens_of(outputs) == [list(tokens[:num_new]) for tokens in goldens]
        assert bool(mixed(plans)) == ("mixed_steps" in more)
        kinds = {key.kind for key in llm.engine.executor.programs}
        assert ("compact" in kinds) == (more is COMPACT)
        llm.engine.ledger.check()
        if engine != "vinference":  # whose slots have not grown to their full length
            llm.run_on_engine(lambda: assert_planned(llm))


def test_a_rule_without_a_base_has_that_of_the_family() -> None:
    rule = {"rope_type": "linear", "factor": 2.0}
    million = rule | {"rope_theta": 1e6}
    infos = [
        lfm2.build(CONFIG | {"rope_theta": None, name: one}, dtype="float32").info
        for name in ("rope_parameters", "rope_scaling")
        for one in (rule, million)
    ]
    assert infos == infos[:1] * 4


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


def test_apis_with_arrays_of_their_own_are_refused(folder: str) -> None:
    from enginebay_oengine import open_model
    from enginebay_vinference.loaded_model import make_loaded_model

    for opened in (open_model, make_loaded_model):
        with pytest.raises(UnsupportedError, match="'lfm2'"):
            opened(folder)


@pytest.mark.long
def test_a_row_moves_within_its_engine_in_the_middle_of_its_prompt(paged: LLM) -> None:
    prompt = tiny.prompts()[3]
    paged.run_on_engine(functools.partial(put_and_compare, paged.engine, prompt, MID_PROMPT))
    moves_between(paged, paged, prompt, [(GREEDY, MID_PROMPT)])


@pytest.mark.slow
def test_rows_move_between_paged_and_contiguous_engines(paged: LLM, folder: str) -> None:
    prompt, kinds = tiny.prompts()[3], (greedy(12), seeded(12), penalty_params(12))
    cases = [(params, end) for params in kinds for end in (None, MID_PROMPT)]
    with few_sizes(), LLM(folder, engine="vinference", **CHOICES) as contiguous:
        for first, second in itertools.product((paged, contiguous), repeat=2):
            moves_between(first, second, prompt, cases)
        for llm, end in itertools.product((paged, contiguous), (None, MID_PROMPT)):
            llm.run_on_engine(functools.partial(put_and_compare, llm.engine, prompt, end))
