"""Conformance suite of the engine contract: any registered engine, on a tiny random model by default.

Comparisons of tokens stop at a near-tie: where two batches or chunk sizes choose different tokens, and the sampler gives
both for the reference's logits moved by no more than TOLERANCE. Such rows are counted, and few may be; see `ties`.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from enginebay.engine import Engine, RowPlan, RowState, StepPlan
from enginebay.errors import CompilationError
from enginebay.llm import LLM
from enginebay.registry import load_registry
from enginebay.testing.ledgers import ledger_checks
from enginebay.testing.reference import ReferenceModel
from enginebay.testing.ties import TOLERANCE, assert_same_tokens, first_impossible_token
from enginebay.testing.tiny import write_tiny_checkpoint
from enginebay.types import FrozenSampling, Request, SamplingParams

Check = tuple[str, Callable[[], None]]


@dataclasses.dataclass
class Subject:
    """The engine under test: its name and the choices that go with it, all else as small as possible.

    `model` None stands for a tiny random model, made for the occasion.
    """

    name: str
    model: str | None = None
    choices: dict[str, Any] = dataclasses.field(default_factory=dict)
    _folder: tempfile.TemporaryDirectory[str] | None = None
    _reference: ReferenceModel | None = None

    def make(self, **more: Any) -> LLM:
        """A fresh LLM with this engine."""
        fixed: dict[str, Any] = {
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
        }
        return LLM(self._model(), engine=self.name, **(fixed | self.choices | more))

    def _model(self) -> str:
        if self.model is not None:
            return self.model
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="enginebay-")
            write_tiny_checkpoint(Path(self._folder.name), load_registry())
        return self._folder.name

    @property
    def vocab_size(self) -> int:
        """Of the model."""
        return self.reference().plan.model.info.vocab_size

    def reference(self) -> ReferenceModel:
        """The model without the engine; made once."""
        if self._reference is None:
            with self.make() as llm:
                self._reference = ReferenceModel(llm.plan)
        return self._reference


def prompts_of(vocab_size: int, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths."""
    rng = np.random.default_rng(seed)
    return [[int(t) for t in rng.integers(0, vocab_size, n)] for n in lengths]


LENGTHS = (1, 7, 16, 33, 90, 150)


def generate(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """Token ids of the first completion of each prompt."""
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params)]


def greedy(max_tokens: int = 24) -> SamplingParams:
    """Greedy and never ended by an end-of-sequence token."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def seeded(max_tokens: int = 24) -> SamplingParams:
    """Sampled with a seed."""
    return SamplingParams(
        max_tokens=max_tokens, temperature=0.9, top_k=40, top_p=0.95, seed=11, ignore_eos=True
    )


def engine_checks(subject: Subject) -> list[Check]:
    """Every check of the suite, by name."""
    checks = (
        greedy_tokens_are_the_models,
        seeded_tokens_are_the_samplers,
        alone_equals_batch,
        chunk_sizes_do_not_matter,
        decode_steps_do_not_matter,
        seeded_alone_equals_batch,
        same_buckets_give_equal_bits,
        stop_tokens_and_lengths_end_rows,
        state_moves_to_another_engine,
        everything_is_released,
        ledger_keeps_its_contract,
        arrays_can_be_dropped,
        nothing_compiles_after_warmup,
        dropped_arrays_come_back_warm,
        compiling_can_be_forbidden,
    )
    return [(check.__name__, lambda check=check: check(subject)) for check in checks]  # type: ignore[misc]


def greedy_tokens_are_the_models(subject: Subject) -> None:
    """Each greedy token is the best one of a single forward pass over all before it."""
    reference = subject.reference()
    with subject.make() as llm:
        prompts = prompts_of(subject.vocab_size, LENGTHS)
        for prompt, output in zip(prompts, generate(llm, prompts, greedy()), strict=True):
            wrong = reference.first_wrong_token(prompt, output, TOLERANCE)
            assert wrong is None, f"a prompt of {len(prompt)} tokens: token {wrong} is not the best one"


def seeded_tokens_are_the_samplers(subject: Subject) -> None:
    """Each sampled token is the plan's sampler's, for the logits of a single forward pass over all before it."""
    with subject.make() as llm:
        prompts = prompts_of(subject.vocab_size, LENGTHS, seed=9)
        outputs = generate(llm, prompts, seeded())
    for prompt, output in zip(prompts, outputs, strict=True):
        wrong = first_impossible_token(subject.reference(), prompt, output, seeded())
        assert wrong is None, f"a prompt of {len(prompt)} tokens: token {wrong} is not the sampler's"


def alone_equals_batch(subject: Subject) -> None:
    """A request's greedy tokens are the same alone and among others of other lengths."""
    _compare_alone_with_batch(subject, prompts_of(subject.vocab_size, LENGTHS), greedy())


def seeded_alone_equals_batch(subject: Subject) -> None:
    """So are its sampled tokens, when it has a seed."""
    _compare_alone_with_batch(subject, prompts_of(subject.vocab_size, LENGTHS * 2, seed=1), seeded())


def _compare_alone_with_batch(subject: Subject, prompts: list[list[int]], params: SamplingParams) -> None:
    with subject.make() as llm:
        together = generate(llm, prompts, params)
        alone = [generate(llm, [prompt], params)[0] for prompt in prompts]
    assert_same_tokens(subject.reference(), prompts, together, alone, params)


def same_buckets_give_equal_bits(subject: Subject) -> None:
    """Where all sizes are equal there are no ties to forgive: other neighbours and another row change no token."""
    target, *others = prompts_of(subject.vocab_size, (16,) * 7, seed=10)
    with subject.make() as llm:
        for params in (greedy(), seeded()):
            first = generate(llm, [target, *others[:3]], params)[0]
            last = generate(llm, [*others[3:], target], params)[-1]
            assert first == last, f"{first} in the first row, {last} in the last one with other neighbours"


def chunk_sizes_do_not_matter(subject: Subject) -> None:
    """Prompts cut into chunks of 16 give the same tokens as prompts in one piece."""
    prompts = prompts_of(subject.vocab_size, LENGTHS, seed=2)
    _compare_choices(subject, prompts, [{"max_num_batched_tokens": budget} for budget in (16, 256)])


def decode_steps_do_not_matter(subject: Subject) -> None:
    """1, 3 and 16 steps in a call give the same tokens."""
    prompts = prompts_of(subject.vocab_size, LENGTHS[:4], seed=3)
    _compare_choices(subject, prompts, [{"decode_steps": steps} for steps in (1, 3, 16)])


def _compare_choices(subject: Subject, prompts: list[list[int]], choices: Sequence[dict[str, Any]]) -> None:
    """Greedy and sampled tokens are the same with all of these choices."""
    both = (greedy(), seeded())
    outputs = []
    for choice in choices:
        with subject.make(**choice) as llm:
            outputs.append([generate(llm, prompts, params) for params in both])
    for other in outputs[1:]:
        for params, first, second in zip(both, outputs[0], other, strict=True):
            assert_same_tokens(subject.reference(), prompts, first, second, params)


def stop_tokens_and_lengths_end_rows(subject: Subject) -> None:
    """A row ends with its stop token, or at max_tokens, and never after."""
    with subject.make() as llm:
        prompts = prompts_of(subject.vocab_size, (5, 40), seed=4)
        for prompt, whole in zip(prompts, generate(llm, prompts, greedy(20)), strict=True):
            stop = whole[9]
            params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, stop_token_ids=(stop,))
            found = llm.generate([prompt], params)[0].outputs[0]
            assert found.token_ids == whole[: whole.index(stop) + 1], (
                "the row did not end with its stop token"
            )
            assert found.finish_reason == "stop"
            cut = llm.generate([prompt], greedy(7))[0].outputs[0]
            assert (cut.token_ids, cut.finish_reason) == (whole[:7], "length")


@dataclasses.dataclass
class Driver:
    """Runs one request on an engine by hand, on the engine's thread."""

    engine: Engine
    request: Request

    def __post_init__(self) -> None:
        rows = self.engine.rows
        rows.add_request(self.request)
        self.row = rows.row_of(self.request.request_id)
        total = len(self.request.prompt_token_ids) + self.request.sampling.max_tokens
        lease = self.engine.ledger.admit(self.row, self.request.prompt_token_ids, total)
        assert lease is not None, "an empty engine refuses a short request"
        assert self.engine.ledger.reserve(lease, total), "an empty engine has no room for a short request"
        self.lease = lease

    def prefill(self) -> list[int]:
        """Process the prompt."""
        count = len(self.request.prompt_token_ids)
        plan = StepPlan((RowPlan(self.row, self.lease, 0, count, samples=True),))
        return self._commit(self.engine.step(plan).read()[0])

    def decode(self, num_steps: int) -> list[int]:
        """Up to num_steps more tokens."""
        cached = int(self.engine.rows.num_tokens[self.row]) - 1
        plan = StepPlan((RowPlan(self.row, self.lease, cached, 1, samples=True),), num_steps)
        return self._commit(self.engine.step(plan).read()[0])

    def resume(self, token_ids: Sequence[int]) -> None:
        """Take note of tokens that another engine produced."""
        self.engine.rows.append_tokens(self.row, token_ids)

    def close(self) -> None:
        """Give row and lease back."""
        self.engine.ledger.release(self.lease)
        self.engine.rows.remove_request(self.request.request_id)

    def _commit(self, tokens: np.ndarray) -> list[int]:
        new = [int(t) for t in tokens if t >= 0]
        self.engine.rows.append_tokens(self.row, new)
        return new


def _request(prompt: list[int], params: SamplingParams, request_id: str = "driven") -> Request:
    sampling = FrozenSampling(
        params.max_tokens, params.temperature, params.top_k, params.top_p, params.min_p, (), (), False, True
    )
    return Request(request_id, np.asarray(prompt, np.int32), sampling, (0, params.seed or 0), 0.0)


def state_moves_to_another_engine(subject: Subject) -> None:
    """Taken out after some steps and put into another row of another engine, a request goes on with the same tokens."""
    for params in (greedy(12), seeded(12)):
        with subject.make(decode_steps=4) as first, subject.make(decode_steps=4) as second:
            prompt = prompts_of(subject.vocab_size, (21,), seed=5)[0]
            begin = functools.partial(_begin_and_take, first.engine, prompt, params)
            state, before, after = first.run_on_engine(begin)
            go_on = functools.partial(_put_and_go_on, second.engine, prompt, params, state, before)
            assert second.run_on_engine(go_on) == after, "a moved request goes on differently"


def _begin_and_take(
    engine: Engine, prompt: list[int], params: SamplingParams
) -> tuple[RowState, list[int], list[int]]:
    """A request's state after four tokens, those tokens, and the eight after them."""
    driver = Driver(engine, _request(prompt, params))
    before = driver.prefill() + driver.decode(3)
    state = engine.take(driver.lease)
    after = driver.decode(4) + driver.decode(4)
    driver.close()
    return state, before, after


def _put_and_go_on(
    engine: Engine, prompt: list[int], params: SamplingParams, state: RowState, before: list[int]
) -> list[int]:
    """Eight tokens after a state, in a row that is not the one it came from."""
    other = Driver(engine, _request(prompt[::-1], params, "in the way"))
    driver = Driver(engine, _request(prompt, params))
    engine.put(driver.lease, state)
    driver.resume(before)
    tokens = driver.decode(4) + driver.decode(4)
    driver.close()
    other.close()
    return tokens


def everything_is_released(subject: Subject) -> None:
    """After more requests than rows, with some left early, ledger and row table are as new."""
    with subject.make() as llm:
        free = llm.run_on_engine(lambda: llm.engine.ledger.num_free_tokens)
        prompts = prompts_of(subject.vocab_size, LENGTHS * 3, seed=6)
        llm.generate(prompts, greedy(6))
        for stream in _left_early(llm, prompts[:3]):
            stream.close()  # type: ignore[attr-defined]
        llm.run_on_engine(llm.engine.ledger.check)
        assert llm.run_on_engine(lambda: llm.engine.ledger.num_free_tokens) == free, "cache space was leaked"
        assert llm.run_on_engine(lambda: llm.engine.rows.num_reqs) == 0, "a row was leaked"


def _left_early(llm: LLM, prompts: list[list[int]]) -> Iterator[Iterator[Any]]:
    for prompt in prompts:
        stream = llm.stream(prompt, greedy(100))
        next(stream)
        yield stream


def ledger_keeps_its_contract(subject: Subject) -> None:
    """The engine's own ledger passes the suite of the ledger contract."""
    with subject.make() as llm:
        assert llm.config.max_model_len is not None, "make_plan settles max_model_len"
        rows, tokens = llm.config.max_num_seqs, llm.config.max_model_len
        for _, check in ledger_checks(lambda: llm.engine.ledger, rows, tokens):
            llm.run_on_engine(check)


def arrays_can_be_dropped(subject: Subject) -> None:
    """Dropping and making the arrays anew changes no tokens."""
    with subject.make() as llm:
        prompts = prompts_of(subject.vocab_size, (9, 70), seed=7)
        before = generate(llm, prompts, greedy(8))
        llm.run_on_engine(llm.engine.drop_arrays)
        llm.run_on_engine(llm.engine.make_arrays)
        assert generate(llm, prompts, greedy(8)) == before


SMALL: dict[str, Any] = {
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "decode_steps": 4,
}
"""Sizes of which warmup() has few programs to compile."""


def nothing_compiles_after_warmup(subject: Subject) -> None:
    """With forbid_compiling, requests of all kinds run on what warmup() compiled, and the engine counts no more."""
    with subject.make(forbid_compiling=True, **SMALL) as llm:
        assert llm.warmup() > 0
        before = _num_compiled(llm)
        assert before > 0, "warmup() compiles, and the engine counts nothing"
        prompts = prompts_of(subject.vocab_size, (1, 5, 17, 40, 50, 60), seed=8)
        outputs = llm.generate(prompts, [greedy(n) for n in (1, 9, 20, 24, 10, 4)])
        assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 9, 20, 24, 10, 4]
        assert _num_compiled(llm) == before, f"{_num_compiled(llm) - before} programs compiled after warmup()"


def dropped_arrays_come_back_warm(subject: Subject) -> None:
    """What warmup() compiled serves arrays that were dropped and made anew, too."""
    with subject.make(forbid_compiling=True, **SMALL) as llm:
        llm.warmup()
        prompts = prompts_of(subject.vocab_size, (5, 40), seed=8)
        before = generate(llm, prompts, greedy(9))
        llm.run_on_engine(llm.engine.drop_arrays)
        llm.run_on_engine(llm.engine.make_arrays)
        assert generate(llm, prompts, greedy(9)) == before


def compiling_can_be_forbidden(subject: Subject) -> None:
    """A request that needs a new program then fails with CompilationError; allowed again, the service goes on."""
    with subject.make(**SMALL) as llm:
        prompts = prompts_of(subject.vocab_size, (5,), seed=8)
        _forbid_compiling(llm, forbidden=True)
        try:
            generate(llm, prompts, greedy(3))
        except CompilationError:
            pass
        else:
            raise AssertionError("a program was compiled that had been forbidden")
        assert _num_compiled(llm) == 0, "a forbidden program was counted as compiled"
        _forbid_compiling(llm, forbidden=False)
        assert len(generate(llm, prompts, greedy(3))[0]) == 3
        assert _num_compiled(llm) > 0, "a program was compiled, and the engine counts nothing"


def _forbid_compiling(llm: LLM, *, forbidden: bool) -> None:
    llm.run_on_engine(functools.partial(setattr, llm.engine.compilations, "forbidden", forbidden))


def _num_compiled(llm: LLM) -> int:
    return int(llm.run_on_engine(lambda: llm.engine.compilations.count))
