"""Commands on a real engine: pages leave the device and come back, and a recorded run is replayed
bit by bit.
"""

from __future__ import annotations

import collections
import contextlib
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay.contracts.commands import DecodeInputs, Drop, PageIn, PageOut, SetParts, Step
from enginebay.errors import InputError, UnsupportedError
from enginebay_paged import sizing
from enginebay_runtime.codec import decode
from enginebay_runtime.engine import StepEngine
from enginebay_runtime.tables import max_changes
from enginebay_testing.recording import frames, recorded, replay
from tests.brief import BRIEF
from tests.pool import EnginePool
from tests.unit.loops import NUM_PAGES, PAGED, make_llm

pytestmark = pytest.mark.xdist_group("tiny")


@pytest.fixture(scope="module")
def llm(engine_pool: EnginePool) -> Iterator[LLM]:
    """A warm paged engine with too few pages for all rows; nothing more is compiled."""
    with engine_pool.leases(), make_llm("oengine", **PAGED) as llm:
        yield llm


def engine_of(llm: LLM) -> StepEngine:
    assert isinstance(llm.engine, StepEngine)
    return llm.engine


def test_pages_leave_the_device_and_come_back_to_others(llm: LLM) -> None:
    llm.generate([list(range(40))], SamplingParams(max_tokens=8, ignore_eos=True))
    executor = engine_of(llm).executor

    def move() -> None:
        state = engine_of(llm).executor.arrays()
        before = {name: np.asarray(a) for name, a in flat(state.cache).items()}
        [used, *_] = before.values()
        held = np.flatnonzero(used.reshape(len(used), -1).any(axis=1))
        source = held[[2, 0, 1]].astype(np.int32)
        target = np.setdiff1d(np.arange(len(used)), source)[-3:].astype(np.int32)
        found = executor.run(PageOut({"full": source}))
        out = {name: np.asarray(values) for name, values in found.items()}
        assert all(values.any() for values in out.values()), "there is something in the pages"
        executor.run(PageIn({"full": target}, out))
        after = flat(engine_of(llm).executor.arrays().cache)
        for name, array in after.items():
            moved, whole = np.asarray(array), before[name]
            assert moved[target].tobytes() == whole[source].tobytes()
            others = np.setdiff1d(np.arange(len(whole)), target)
            assert moved[others].tobytes() == whole[others].tobytes()
        assert set(out) == set(after)

    llm.run_on_engine(move)
    llm.run_on_engine(lambda: (engine_of(llm).drop_arrays(), engine_of(llm).make_arrays()))


def flat(cache: Any) -> dict[str, jax.Array]:
    return {
        f"{group}/{number}/{name}": array
        for group, layers in cache.items()
        for number, layer in enumerate(layers)
        for name, array in layer.items()
    }


def test_more_changes_than_a_step_takes_are_written_before_it(llm: LLM) -> None:
    engine = engine_of(llm)

    def write() -> None:
        runner = engine.executor
        key = next(key for key in runner.programs if key.kind == "decode" and not key.full_vocab)
        num = max_changes(key.bucket) + 8
        entries = np.stack([np.arange(num) % 4, np.arange(num) // 4, np.arange(num) + 1], axis=1)
        free = np.full(key.bucket.seqs, engine.rows.max_num_reqs, np.int32)
        inputs = DecodeInputs(free, np.asarray(1, np.int32))
        step = Step(key, inputs, np.zeros(0, np.int32), {"full": entries.astype(np.int32)})
        engine.executor.run(step)
        table = np.asarray(runner.state.tables["full"])
        assert (table[entries[:, 0], entries[:, 1]] == entries[:, 2]).all()
        assert np.count_nonzero(table) == num
        engine.drop_arrays()
        engine.make_arrays()
        assert not np.asarray(engine.executor.arrays().tables["full"]).any()

    llm.run_on_engine(write)


@contextlib.contextmanager
def recording(llm: LLM, path: Path) -> Iterator[None]:
    """Records between two steps of a loop that has nothing to do."""
    with contextlib.ExitStack() as stack:
        block = recorded(engine_of(llm), path)
        llm.run_on_engine(lambda: stack.enter_context(block))
        yield
        llm.run_on_engine(stack.pop_all().close)


MIXED = [
    SamplingParams(max_tokens=50, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=0.8, seed=1, n=3, ignore_eos=True),
    SamplingParams(max_tokens=50, presence_penalty=0.5, repetition_penalty=1.2, ignore_eos=True),
    SamplingParams(max_tokens=45, temperature=0.7, seed=2, logprobs=2, ignore_eos=True),
]


def test_a_recorded_run_is_replayed_bit_by_bit(llm: LLM, tmp_path: Path) -> None:
    path, engine = tmp_path / "run", engine_of(llm)
    prompts = [list(range(i, i + 21)) for i in range(len(MIXED))]
    plain = [output.outputs[0].token_ids for output in llm.generate(prompts, MIXED)]
    with recording(llm, path):
        outputs = llm.generate(prompts, MIXED)
        llm.generate([prompts[1]], MIXED[0])  # finds its beginning in the cache
    assert [output.outputs[0].token_ids for output in outputs] == plain
    kinds = [type(decode(data)).__name__ for kind, data in frames(path) if kind == b"C"]
    assert kinds[0] == "Make"
    assert {"Step", "WriteRows", "CopyPages"} <= set(kinds)
    admitted = sum(len(params_n) for params_n in [[0] * p.n for p in MIXED]) + 1
    prefills = [
        decode(data)
        for kind, data in frames(path)
        if kind == b"C" and isinstance(decode(data), Step)
    ]
    sampled = sum(
        int((step.inputs.ints[:, 3] != 0).sum())
        for step in prefills
        if step.program.kind == "prefill"
    )
    assert sampled > admitted, "a row was preempted"

    def replayed(file: Path) -> Any:
        engine.drop_arrays()
        try:
            return replay(file, engine.executor)
        finally:
            engine.executor.run(Drop())
            engine.make_arrays()

    found = llm.run_on_engine(lambda: replayed(path))
    assert (found.different_steps, found.arrays_are_equal) == ((), True)
    assert (found.num_commands, found.num_steps) == (len(kinds), kinds.count("Step"))
    # What is recorded decides what is computed: another token in the last prompt changes the rest.
    wrong = tmp_path / "wrong"
    data = path.read_bytes()
    token = prompts[1][:8]
    old, new = (np.asarray(ids, np.int32).tobytes() for ids in (token, token[::-1]))
    assert data.count(old)
    wrong.write_bytes(data.replace(old, new))
    found = llm.run_on_engine(lambda: replayed(wrong))
    assert found.different_steps
    assert not found.arrays_are_equal
    cut = tmp_path / "cut"
    cut.write_bytes(data[:-40])
    with pytest.raises(InputError, match="cut short"):
        llm.run_on_engine(lambda: replayed(cut))


def test_a_function_given_by_hand_cannot_be_recorded(llm: LLM, tmp_path: Path) -> None:
    def rms_norm(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
        raise AssertionError("it is refused before")

    with (
        recording(llm, tmp_path / "run"),
        pytest.raises(UnsupportedError, match="Pass an import path"),
        llm.override(rms_norm=rms_norm, check=False),
    ):
        raise AssertionError("the block is not entered")
    engine = engine_of(llm)
    assert engine.layouts["full"].num_pages == NUM_PAGES
    assert llm.generate([[5, 6]], SamplingParams(max_tokens=2))[0].finished


NUM_REQUESTS = 2000
NUM_FEW = 200
"""So many of them run a few at a time: rows are drafted only where few run."""
MIN_VERIFIED = 100
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "the",
    "dog",
    "lay",
    "by",
    "the",
    "door",
    "while",
    "rain",
    "fell",
]


def request(number: int) -> tuple[str, SamplingParams]:
    """One of many: greedy, sampled, penalised, forked or guided; prompts that begin alike, some of
    which repeat themselves so that they are drafted.
    """
    chance = random.Random(number)
    prompt = "Once upon a time " + " ".join(chance.choices(WORDS, k=chance.randint(1, 40)))
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "seed": number, "n": chance.choice([1, 2, 3])},
        {"presence_penalty": 0.6, "repetition_penalty": 1.1},
        {"temperature": 0.7, "seed": number, "logprobs": 2, "frequency_penalty": 0.2},
        {"regex": "(cat|dog|rain)( and (cat|dog|rain))*", "max_tokens": 8},
    ]
    kind = 4 if number % 20 == 0 else number % 4
    plain = {"max_tokens": chance.randint(1, 32), "ignore_eos": kind != 4}
    return prompt, SamplingParams(**(plain | kinds[kind]))


def replayed_elsewhere(path: Path) -> Any:
    """What a fresh process found that ran the commands of a file."""
    words = [sys.executable, "-m", "enginebay_testing.replay", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_swaps_of_a_kernel_and_the_sampler_are_replayed_in_another_process(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 32}
    path, prompts = tmp_path / "run", [list(range(5, 12)), list(range(30, 40))]
    params = SamplingParams(max_tokens=6, temperature=0.8, seed=3, ignore_eos=True)

    def tokens(llm: LLM) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    with LLM(BRIEF, engine="oengine", dtype="float32", **sizes) as llm, recording(llm, path):
        plain = tokens(llm)
        with llm.override(attention={"decode": "xla"}, linear="xla"):
            tokens(llm)
            with llm.override(sampler="tests.unit.test_swapping_parts:least"):
                worst = tokens(llm)
        with llm.override(sampler="standard"):
            assert tokens(llm) == plain
    assert worst != plain
    named = [
        dict(command.names)
        for kind, data in frames(path)
        if kind == b"C" and isinstance(command := decode(data), SetParts)
    ]
    kernels = {"attention.decode": "xla", "linear": "xla"}
    least = {"sampler": "tests.unit.test_swapping_parts:least"}
    assert named == [kernels, kernels | least, {}, {}, {"sampler": "standard"}, {}]
    found = replayed_elsewhere(path)
    assert (found["different_steps"], found["arrays_are_equal"]) == ([], True)


@pytest.mark.slow
def test_two_thousand_requests_are_replayed_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "FIRST_BYTES", 2**18)
    sizes = {"max_model_len": 256, "max_num_seqs": 16, "max_num_batched_tokens": 64}
    options = {"name": "oengine", "page_size": 8, "num_pages": 161}
    path = tmp_path / "run"
    with LLM(
        BRIEF,
        engine=options,
        dtype="float32",
        decode_steps=4,
        proposer="ngram",
        draft_tokens=3,
        **sizes,
    ) as llm:
        with recording(llm, path):
            each = [request(number) for number in range(NUM_REQUESTS)]
            few = range(NUM_REQUESTS - NUM_FEW, NUM_REQUESTS, 4)
            outputs = []
            for group in (each[:-NUM_FEW], *(each[i : i + 4] for i in few)):
                prompts, params = zip(*group, strict=True)
                outputs += llm.generate(list(prompts), list(params))
        assert len(outputs) == NUM_REQUESTS
        num_tokens = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    kinds: collections.Counter[str] = collections.Counter()
    for kind, data in frames(path):
        if kind == b"C":
            command = decode(data)
            step = f" {command.program.kind}" if isinstance(command, Step) else ""
            kinds[type(command).__name__ + step] += 1
    assert {"Make", "Grow", "WriteRows", "CopyPages", "Step verify"} <= set(kinds)
    assert kinds["Step verify"] >= MIN_VERIFIED
    found = replayed_elsewhere(path)
    sys.stdout.write(f"{num_tokens} tokens, {path.stat().st_size} bytes, {dict(kinds)}\n{found}\n")
    assert found["num_commands"] == kinds.total()
    assert (found["different_steps"], found["arrays_are_equal"]) == ([], True)
