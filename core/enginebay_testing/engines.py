"""Conformance suite of the engine contract, by default on a tiny random model.

Token comparisons stop at a near-tie: two batches or chunk sizes choose different tokens, and the
sampler gives both when logits of the reference move by at most TOLERANCE, or by more where the
weights ask for inputs that are rounded to int8 (`ReferenceModel.rounding`). Few rows may end this
way; see `near_ties`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from enginebay.contracts.commands import SetWeights
from enginebay.contracts.engine import Engine, Pending, StepPlan
from enginebay.errors import CompilationError, RequestError, UnsupportedError
from enginebay.serving import LLM
from enginebay.serving.abilities import Abilities
from enginebay.serving.segments import Segments
from enginebay.types import SamplingParams
from enginebay.weights import flat_weights
from enginebay_runtime.engine import StepEngine
from enginebay_testing.driver import RequestDriver, request_of
from enginebay_testing.engine_logprobs import logprobs_are_the_models
from enginebay_testing.engine_moves import put_restores_the_bytes, state_moves_to_another_engine
from enginebay_testing.ledgers import ledger_checks
from enginebay_testing.near_ties import TOLERANCE, assert_same_tokens, first_impossible_token
from enginebay_testing.subject import (
    LENGTHS,
    EngineSubject,
    generate,
    greedy,
    penalty_params,
    random_prompts,
    seeded,
)
from enginebay_testing.verdicts import Check


def engine_checks(subject: EngineSubject, layouts: Sequence[str] = ()) -> list[Check]:
    """Return every check of the suite, by name. `layouts` names the quantised cache layouts: in
    each of them, as in the engine's own layout, rows are taken out of the cache and put back.
    """
    checks = (
        nothing_compiles_after_warmup,  # first, so that the other checks share a warm engine
        greedy_tokens_are_the_models,
        seeded_tokens_are_the_samplers,
        penalised_tokens_are_the_models,
        recomputed_rows_keep_their_counts,
        logprobs_are_the_models,
        hidden_states_are_the_models,
        alone_equals_batch,
        chunk_sizes_do_not_matter,
        decode_steps_do_not_matter,
        seeded_alone_equals_batch,
        same_buckets_give_equal_bits,
        stop_tokens_and_lengths_end_rows,
        steps_do_not_wait,
        state_moves_to_another_engine,
        put_restores_the_bytes,
        everything_is_released,
        ledger_keeps_its_contract,
        arrays_can_be_dropped,
        dropped_arrays_come_back_warm,
        compiling_can_be_forbidden,
        weights_are_what_was_set,
    )
    quantised = [
        (
            f"put_restores_the_bytes[{name}]",
            functools.partial(put_restores_the_bytes, subject, name),
        )
        for name in layouts
    ]
    own = [(check.__name__, functools.partial(check, subject)) for check in checks]
    return [*own, *quantised]


def greedy_tokens_are_the_models(subject: EngineSubject) -> None:
    """Each greedy token is the best token of a single forward pass over all tokens before it."""
    reference = subject.reference()
    with subject.make() as llm:
        prompts = random_prompts(subject.vocab_size, LENGTHS)
        for prompt, output in zip(prompts, generate(llm, prompts, greedy()), strict=True):
            wrong = reference.first_wrong_token(prompt, output, TOLERANCE)
            assert wrong is None, (
                f"a prompt of {len(prompt)} tokens: token {wrong} is not the best token"
            )


def seeded_tokens_are_the_samplers(subject: EngineSubject) -> None:
    """Each token is what the plan's sampler draws from the logits of a forward pass over all before
    it.
    """
    prompts = random_prompts(subject.vocab_size, LENGTHS, seed=9)
    penalties = penalty_params().model_dump(
        include={"presence_penalty", "frequency_penalty", "repetition_penalty"}
    )
    both = seeded(), SamplingParams(**(seeded().model_dump() | penalties))
    with subject.shared() as llm:
        outputs = [generate(llm, prompts, params) for params in both]
    for params, of_all in zip(both, outputs, strict=True):
        for prompt, output in zip(prompts, of_all, strict=True):
            wrong = first_impossible_token(subject.reference(), prompt, output, params)
            assert wrong is None, (
                f"a prompt of {len(prompt)} tokens: token {wrong} is not what the sampler draws"
            )


def penalised_tokens_are_the_models(subject: EngineSubject) -> None:
    """Each token is the best one after penalties that the host counts, however rows are batched.

    The requests of the batch differ, their prompts are cut into chunks, and the cache may have a
    prefix of them.
    """
    prompts = random_prompts(subject.vocab_size, LENGTHS * 2, seed=11)
    params = [penalty_params(kind=i) for i in range(len(prompts))]
    with subject.shared() as llm:
        plain = generate(llm, prompts, greedy())
        for _ in range(2):
            outputs = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
            different = sum(a != b for a, b in zip(plain, outputs, strict=True))
            assert different > len(prompts) // 2, (
                f"penalties change only {different} of {len(prompts)} outputs"
            )
            for prompt, output, own in zip(prompts, outputs, params, strict=True):
                wrong = subject.reference().first_wrong_token(prompt, output, TOLERANCE, own)
                assert wrong is None, (
                    f"{len(prompt)} tokens, then {own}: token {wrong} is not the best one"
                )


def recomputed_rows_keep_their_counts(subject: EngineSubject) -> None:
    """A row whose output is prefilled again, as after a preemption, counts these tokens
    as output.
    """
    prompt = random_prompts(subject.vocab_size, (15,), seed=12)[0]
    with subject.shared() as llm:
        for params in (penalty_params(24, kind) for kind in range(3)):
            output = llm.run_on_engine(
                functools.partial(_interrupt_and_recompute, llm.engine, prompt, params)
            )
            assert len(output) == 24
            wrong = subject.reference().first_wrong_token(prompt, output, TOLERANCE, params)
            assert wrong is None, f"{params}: token {wrong} is not the best one"


def _interrupt_and_recompute(
    engine: Engine, prompt: list[int], params: SamplingParams
) -> list[int]:
    """Generate 24 tokens; the first twelve are prefilled again in another row."""
    first = RequestDriver(engine, request_of(prompt, params))
    tokens = first.prefill() + first.decode(4) + first.decode(4) + first.decode(3)
    first.close()
    other = RequestDriver(engine, request_of(prompt[::-1], greedy(), "in the way"))
    second = RequestDriver(engine, request_of(prompt, params))
    second.resume(tokens)
    tokens += second.prefill() + second.decode(4) + second.decode(4) + second.decode(3)
    second.close()
    other.close()
    return tokens


def alone_equals_batch(subject: EngineSubject) -> None:
    """A request's greedy tokens are the same alone and in a batch of other lengths."""
    _compare_alone_with_batch(subject, random_prompts(subject.vocab_size, LENGTHS), greedy())


def seeded_alone_equals_batch(subject: EngineSubject) -> None:
    """A seeded request's sampled tokens are the same alone and in a batch of other lengths."""
    _compare_alone_with_batch(
        subject, random_prompts(subject.vocab_size, LENGTHS * 2, seed=1), seeded()
    )


def _compare_alone_with_batch(
    subject: EngineSubject, prompts: list[list[int]], params: SamplingParams
) -> None:
    with subject.shared() as llm:
        together = generate(llm, prompts, params)
        alone = [generate(llm, [prompt], params)[0] for prompt in prompts]
    assert_same_tokens(subject.reference(), prompts, together, alone, params)


def same_buckets_give_equal_bits(subject: EngineSubject) -> None:
    """With equal bucket sizes, neighbours and row number change no token, not even at a
    near-tie.
    """
    target, *others = random_prompts(subject.vocab_size, (16,) * 7, seed=10)
    with subject.shared() as llm:
        for params in (greedy(), seeded()):
            first = generate(llm, [target, *others[:3]], params)[0]
            last = generate(llm, [*others[3:], target], params)[-1]
            assert first == last, (
                f"{first} in the first row, but {last} in the last row with other neighbours"
            )


def chunk_sizes_do_not_matter(subject: EngineSubject) -> None:
    """Prompts cut into chunks of 16 give the same tokens as prompts in one piece."""
    prompts = random_prompts(subject.vocab_size, LENGTHS, seed=2)
    _compare_choices(subject, prompts, [{"max_num_batched_tokens": budget} for budget in (16, 256)])


def decode_steps_do_not_matter(subject: EngineSubject) -> None:
    """Decoding 1, 3 or 16 steps per call gives the same tokens, with and without overlap."""
    prompts = random_prompts(
        subject.vocab_size, (*LENGTHS[:4], 5), seed=3
    )  # one prompt more than rows, so that a request waits
    choices = [(1, True), (1, False), (3, True), (16, False)]
    _compare_choices(
        subject,
        prompts,
        [{"decode_steps": steps, "overlap_execution": overlap} for steps, overlap in choices],
    )


def _compare_choices(
    subject: EngineSubject, prompts: list[list[int]], choices: Sequence[dict[str, Any]]
) -> None:
    """Check that greedy and sampled tokens are the same under all of these choices."""
    both = (greedy(), seeded())
    outputs = []
    for choice in choices:
        with subject.make(**choice) as llm:
            outputs.append([generate(llm, prompts, params) for params in both])
    for other in outputs[1:]:
        for params, first, second in zip(both, outputs[0], other, strict=True):
            assert_same_tokens(subject.reference(), prompts, first, second, params)


def stop_tokens_and_lengths_end_rows(subject: EngineSubject) -> None:
    """A row ends with its stop token or at max_tokens, and not later."""
    with subject.shared() as llm:
        prompts = random_prompts(subject.vocab_size, (5, 40), seed=4)
        for prompt, whole in zip(prompts, generate(llm, prompts, greedy(20)), strict=True):
            stop = whole[9]
            params = SamplingParams(
                max_tokens=20, temperature=0.0, ignore_eos=True, stop_token_ids=(stop,)
            )
            found = llm.generate([prompt], params)[0].outputs[0]
            assert found.token_ids == whole[: whole.index(stop) + 1], (
                "the last token of the row is not its stop token"
            )
            assert found.finish_reason == "stop"
            cut = llm.generate([prompt], greedy(7))[0].outputs[0]
            assert (cut.token_ids, cut.finish_reason) == (whole[:7], "length")


def steps_do_not_wait(subject: EngineSubject) -> None:
    """step() returns before its tokens are computed; only Pending.read() reads from the device."""
    prompt = random_prompts(subject.vocab_size, (21,), seed=13)[0]
    with subject.shared() as llm:
        waits = llm.run_on_engine(functools.partial(_waits_of_steps, llm.engine, prompt))
        assert not waits, f"step() waits for the device: it calls {', '.join(waits)} on an array"


def _waits_of_steps(engine: Engine, prompt: list[int]) -> list[str]:
    """Return how a prefill and a decode wait, once their programs are compiled."""
    waits: list[str] = []
    for watched in (False, True):
        driver = RequestDriver(engine, request_of(prompt, greedy(12)))
        launch = _watched(engine, waits) if watched else engine.step
        with unittest.mock.patch.object(engine, "step", launch):
            driver.prefill()
            driver.decode(3)
        driver.close()
    return waits


def _watched(engine: Engine, waits: list[str]) -> Callable[[StepPlan], Pending]:
    step = engine.step

    def watched(plan: StepPlan) -> Pending:
        with watching_for_waits() as found:
            pending = step(plan)
        waits.extend(found)
        return pending

    return watched


def everything_is_released(subject: EngineSubject) -> None:
    """After more requests than rows, some of them cancelled, ledger and row table are
    empty again.
    """
    with subject.shared() as llm:
        free = llm.run_on_engine(lambda: llm.engine.ledger.num_free_tokens)
        prompts = random_prompts(subject.vocab_size, LENGTHS * 3, seed=6)
        llm.generate(prompts, greedy(6))
        for stream in _left_early(llm, prompts[:3]):
            stream.close()  # type: ignore[attr-defined]
        llm.run_on_engine(llm.engine.ledger.check)
        assert llm.run_on_engine(lambda: llm.engine.ledger.num_free_tokens) == free, (
            "cache space was leaked"
        )
        assert llm.run_on_engine(lambda: llm.engine.rows.num_reqs) == 0, "a row was leaked"


def _left_early(llm: LLM, prompts: list[list[int]]) -> Iterator[Iterator[Any]]:
    for prompt in prompts:
        stream = llm.stream(prompt, greedy(100))
        next(stream)
        yield stream


def ledger_keeps_its_contract(subject: EngineSubject) -> None:
    """The engine's own ledger passes the suite of the ledger contract."""
    with subject.shared() as llm:
        assert llm.config.max_model_len is not None, "a plan has a max_model_len"
        rows, tokens = llm.config.max_num_seqs, llm.config.max_model_len
        page_size = llm.engine.rows.page_sizes[0]
        for _, check in ledger_checks(lambda: llm.engine.ledger, rows, tokens, page_size):
            llm.run_on_engine(check)


def arrays_can_be_dropped(subject: EngineSubject) -> None:
    """Dropping the arrays and making new ones changes no tokens."""
    with subject.shared() as llm:
        prompts = random_prompts(subject.vocab_size, (9, 70), seed=7)
        before = generate(llm, prompts, greedy(8))
        llm.run_on_engine(llm.engine.drop_arrays)
        llm.run_on_engine(llm.engine.make_arrays)
        assert generate(llm, prompts, greedy(8)) == before


def nothing_compiles_after_warmup(subject: EngineSubject) -> None:
    """With compiling forbidden, requests of all kinds run on the programs that warmup() compiled,
    and the count of compiled programs stays the same.
    """
    with subject.shared(subject.make()) as llm:
        assert llm.warmup() > 0
        _forbid_compiling(llm, forbidden=True)
        before = _num_compiled(llm)
        assert before > 0, "warmup() compiled no program, or the engine did not count it"
        prompts = random_prompts(subject.vocab_size, (1, 5, 17, 40, 50, 60), seed=8)
        lengths = (1, 9, 20, 24, 10, 4)
        for kind in (greedy, penalty_params):
            outputs = llm.generate(prompts, [kind(n) for n in lengths])
            assert tuple(len(o.outputs[0].token_ids) for o in outputs) == lengths
        assert _num_compiled(llm) == before, (
            f"{_num_compiled(llm) - before} programs compiled after warmup()"
        )


def dropped_arrays_come_back_warm(subject: EngineSubject) -> None:
    """Programs from warmup() also serve arrays that were dropped and made again."""
    with subject.shared() as llm:
        llm.warmup()
        _forbid_compiling(llm, forbidden=True)
        prompts = random_prompts(subject.vocab_size, (5, 40), seed=8)
        before = generate(llm, prompts, greedy(9))
        llm.run_on_engine(llm.engine.drop_arrays)
        llm.run_on_engine(llm.engine.make_arrays)
        assert generate(llm, prompts, greedy(9)) == before


def compiling_can_be_forbidden(subject: EngineSubject) -> None:
    """A request that needs a new program fails with CompilationError; later requests are served."""
    with subject.make() as llm:
        prompts = random_prompts(subject.vocab_size, (5,), seed=8)
        _forbid_compiling(llm, forbidden=True)
        try:
            generate(llm, prompts, greedy(3))
        except CompilationError:
            pass
        else:
            raise AssertionError("a program was compiled while compiling was forbidden")
        assert _num_compiled(llm) == 0, "a forbidden program was counted as compiled"
        _forbid_compiling(llm, forbidden=False)
        assert len(generate(llm, prompts, greedy(3))[0]) == 3
        assert _num_compiled(llm) > 0, "the engine did not count a compiled program"


def weights_are_what_was_set(subject: EngineSubject) -> None:
    """An executor returns every weight of the model, and the new values after SetWeights; or it
    refuses to return weights. `wait` returns when the device has run all commands.
    """
    with subject.shared() as llm:
        engine = llm.engine
        if not isinstance(engine, StepEngine):
            raise unittest.SkipTest("only an engine that runs commands has an executor")
        llm.run_on_engine(functools.partial(_set_and_read_weights, engine))


def _set_and_read_weights(engine: StepEngine) -> None:
    executor = engine.executor
    executor.wait()
    try:
        before = executor.weights()
    except UnsupportedError as error:
        raise unittest.SkipTest(str(error)) from None
    missing = sorted(engine.parts.model.weight_specs().keys() - before.keys())
    assert not missing, f"the executor returns no weight {missing[0]!r}"
    path, own = next(iter(flat_weights(before).items()))
    for array in (np.zeros(own.shape, own.dtype), own):
        executor.run(SetWeights({path: array}))
        found = np.asarray(flat_weights(executor.weights())[path])
        assert found.tobytes() == np.asarray(array).tobytes(), (
            f"the executor returns other values of {path!r} than SetWeights has set"
        )


def _forbid_compiling(llm: LLM, *, forbidden: bool) -> None:
    llm.run_on_engine(functools.partial(setattr, llm.engine.compilations, "forbidden", forbidden))


def _num_compiled(llm: LLM) -> int:
    return int(llm.run_on_engine(lambda: llm.engine.compilations.count))


HIDDEN_TOLERANCE = 1e-4
"""Max difference between a value of a pooled hidden state and the reference, in f32."""

EMBED_LENGTHS = (3, 41)


def hidden_states_are_the_models(subject: EngineSubject) -> None:
    """`embed` returns the mean or the last of the model's final hidden states. A prompt with
    embeddings gives the same tokens whether or not the cache has a prefix of it.

    An engine that does not declare hidden_states, or prompt_embeds, refuses such requests.
    """
    prompts, reference = (
        random_prompts(subject.vocab_size, EMBED_LENGTHS, seed=17),
        subject.reference(),
    )
    with subject.shared() as llm:
        capabilities = Abilities.of(llm.plan).capabilities
        segments = _segments(llm)
        if "hidden_states" not in capabilities:
            _check_refused(lambda: llm.embed(prompts))
        else:
            for pooling in ("mean", "last"):
                for prompt, found in zip(prompts, llm.embed(prompts, pooling=pooling), strict=True):
                    states = reference.hidden(prompt)
                    expected = states.mean(axis=0) if pooling == "mean" else states[-1]
                    off = float(np.abs(found - expected).max())
                    case = f"a prompt of {len(prompt)} tokens, {pooling}"
                    assert off <= HIDDEN_TOLERANCE, f"{case}: off by {off} from the reference"
        if "prompt_embeds" not in capabilities:
            _check_refused(lambda: llm.generate(segments, greedy(2)))
            return
        first, second = (llm.generate(segments, greedy(6))[0].outputs[0] for _ in range(2))
        assert first.token_ids == second.token_ids, "the same embeddings gave different tokens"


def _segments(llm: LLM) -> Segments:
    width = llm.plan.model.info.hidden_size
    embeds = np.random.default_rng(3).normal(size=(37, width)).astype(np.float32)
    return Segments([1, 2], embeds, [3])


def _check_refused(call: Callable[[], object]) -> None:
    try:
        call()
    except RequestError:
        return
    raise AssertionError("the engine accepted a request of a kind that it does not declare")


METHODS = ("__array__", "__bool__", "__float__", "__index__", "__int__", "item", "tolist")
"""Methods of JAX arrays that wait for the value."""


@contextlib.contextmanager
def watching_for_waits() -> Iterator[list[str]]:
    """Within the block, append to the list each way in which this thread waits for JAX arrays.

    It detects conversions to NumPy and to Python numbers, jax.device_get and jax.block_until_ready.
    """
    found: list[str] = []
    mine = threading.get_ident()

    def spied(name: str, call: Callable[..., Any], *, always: bool) -> Callable[..., Any]:
        def spy(*args: Any, **kwargs: Any) -> Any:
            is_mine = threading.get_ident() == mine
            if is_mine and (always or any(isinstance(a, jax.Array) for a in args[:1])):
                found.append(name)
            return call(*args, **kwargs)

        return spy

    kind = type(jax.device_put(np.zeros(1)))
    with contextlib.ExitStack() as stack:
        for owner, name, always in (
            *((np, name, False) for name in ("asarray", "array")),
            *((jax, name, True) for name in ("device_get", "block_until_ready")),
            *((kind, name, False) for name in METHODS),
        ):
            spy = spied(name, getattr(owner, name), always=always)
            stack.enter_context(unittest.mock.patch.object(owner, name, spy))
        yield found
