"""Conformance suite of logits processors. It checks the declaration of a processor, its fields,
and that no row changes the scores of another row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.contracts.processor import (
    IS_USED,
    LogitsProcessor,
    RowFacts,
    RowField,
    Sizes,
    row_values,
)
from enginebay.contracts.sampler import SamplingState
from enginebay_runtime.processing import evolve, process
from enginebay_testing.sampling_oracle import OracleParams, device_params
from enginebay_testing.verdicts import Check

VOCAB, WIDTH = 75, 40
"""Sizes of the rows: the vocabulary is not a round number."""

SIZES = Sizes(VOCAB, WIDTH)
EOS = (4, 9)
NAME = "this"
ROWS_AT_ONCE = 3
"""More rows than one turn takes; the last turn is not full."""

NUM_STEPS = 4
TOLERANCE = 1e-5
"""Relative and absolute tolerance for scores and fields: the order of sums may differ."""

ProcessorRows = tuple[jax.Array, Mapping[str, Any], SamplingState]
"""Logits, fields by processor, and state."""


@dataclasses.dataclass(frozen=True)
class _Case:
    """One row: a request with its options and its position."""

    options: Any
    what: str
    logits: np.ndarray
    num_prompt: int
    num_output: int
    temperature: float


def processor_checks(target: Any, examples: Callable[[], Sequence[Any]]) -> list[Check]:
    """Return every check of a processor: the registered class, and options (or None) of requests.

    If the options' model has `examples` in its JSON schema, each example is tried besides the
    defaults.
    """
    checks: list[tuple[str, Callable[[_ProcessorUnderTest], None]]] = [
        ("is_a_logits_processor", _is_a_logits_processor),
        ("fields_are_as_declared", _fields_are_as_declared),
        ("result_has_the_logits_shape", _result_has_the_logits_shape),
        ("examples_change_scores", _examples_change_scores),
        ("rows_do_not_depend_on_the_batch", _rows_do_not_depend_on_the_batch),
        ("rows_that_do_not_use_it_keep_their_logits", _unused_rows_keep_their_logits),
        ("scores_are_finite_or_minus_infinity", _scores_are_finite_or_minus_infinity),
        ("some_token_stays_possible", _some_token_stays_possible),
        ("impossible_tokens_stay_impossible", _impossible_tokens_stay_impossible),
        ("argmax_is_kept_as_declared", _argmax_is_kept),
        ("tokens_are_read_as_declared", _tokens_are_read_as_declared),
        ("fields_evolve_as_declared", _fields_evolve_as_declared),
    ]
    subject = _ProcessorUnderTest(target, examples)
    return [(name, functools.partial(check, subject)) for name, check in checks]


class _ProcessorUnderTest:
    """The processor under test and its rows, which are made on first use; each shape is compiled
    once.
    """

    def __init__(self, target: Any, examples: Callable[[], Sequence[Any]]) -> None:
        self.target = target
        self._examples = examples

    @functools.cached_property
    def processor(self) -> LogitsProcessor:
        made = self.target()
        assert isinstance(made, LogitsProcessor), f"{self.target} makes no LogitsProcessor"
        return made

    @functools.cached_property
    def cases(self) -> list[_Case]:
        return [case for i, options in enumerate(self._examples()) for case in _cases(options, i)]

    @functools.cached_property
    def rows(self) -> ProcessorRows:
        """All cases in one batch, on the host; the other rows are copied from here."""
        logits = np.stack([case.logits for case in self.cases])
        rows: ProcessorRows = jax.tree.map(
            np.asarray, (logits, {NAME: self._own()}, _state(self.cases))
        )
        return rows

    @functools.cached_property
    def together(self) -> np.ndarray:
        """The scores of all cases in one batch."""
        return self.scores(self.rows)

    def scores(self, rows: ProcessorRows) -> np.ndarray:
        """f32 [S, VOCAB]."""
        return np.asarray(self._call(*rows))

    @functools.cached_property
    def _call(self) -> Any:
        named = ((NAME, self.processor),)
        return jax.jit(
            lambda logits, rows, state: process(
                named, logits, rows, state, rows_at_once=ROWS_AT_ONCE
            )[0]
        )

    @functools.cached_property
    def step(self) -> Any:
        """Return a step (rows, active) -> (rows after one more token, scores), which takes the best
        token.
        """
        named = ((NAME, self.processor),)

        def step(rows: ProcessorRows, active: jax.Array) -> tuple[ProcessorRows, jax.Array]:
            logits, fields, state = rows
            scores, given = process(named, logits, fields, state, rows_at_once=ROWS_AT_ONCE)
            tokens = jnp.argmax(scores, axis=-1).astype(jnp.int32)
            fields = evolve(named, given, tokens, fields, state, active, rows_at_once=ROWS_AT_ONCE)
            at = (jnp.arange(tokens.size), state.positions)
            state = dataclasses.replace(
                state, positions=state.positions + 1, token_ids=state.token_ids.at[at].set(tokens)
            )
            return (jnp.roll(logits, 7, axis=-1), fields, state), scores

        return step

    def _own(self) -> dict[str, np.ndarray]:
        values = [self.values(case) for case in self.cases]
        own = {name: np.stack([v[name] for v in values]) for name in values[0]}
        return own | {IS_USED: np.ones(len(values), bool)}

    def values(self, case: _Case) -> Mapping[str, np.ndarray]:
        """Return the row's fields as the core makes them."""
        facts = RowFacts(_text(case)[: case.num_prompt], EOS, SIZES)
        return row_values(NAME, self.processor, case.options, facts).values


def _cases(options: Any, seed: int) -> list[_Case]:
    """Return the rows for each options: usual logits, few possible tokens, equal logits, large
    logits, and no possible token.
    """
    rng = np.random.default_rng(seed)
    usual, other, large = (rng.normal(size=(3, VOCAB)) * [[2.0], [2.0], [40.0]]).astype(np.float32)
    half, one, none = (
        other.copy(),
        np.full(VOCAB, -np.inf, np.float32),
        np.full(VOCAB, -np.inf, np.float32),
    )
    half[::2], one[seed % 3 + 3] = -np.inf, 1.5
    rows = [
        ("usual", usual, 6, 11, 1.0),
        ("no output yet", other, 9, 0, 0.5),
        ("greedy", usual, 5, 20, 0.0),
        ("every other token impossible", half, 3, 8, 2.0),
        ("one possible token", one, 2, 3, 1.0),
        ("equal logits", np.zeros(VOCAB, np.float32), 12, 18, 1.0),
        ("large logits", large, 1, 5, 1.0),
        ("no possible token", none, 4, 4, 1.0),
    ]
    return [_Case(options, *row) for row in rows]


def _text(case: _Case) -> np.ndarray:
    """Return the row's tokens; only a dozen different ones, so that tokens repeat."""
    seed = 100 * case.num_prompt + case.num_output
    return (
        np.random.default_rng(seed)
        .integers(0, 12, case.num_prompt + case.num_output)
        .astype(np.int32)
    )


def _state(cases: Sequence[_Case]) -> SamplingState:
    num = len(cases)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (num, WIDTH))
    for row, case in enumerate(cases):
        tokens[row, : _text(case).size] = _text(case)
    fields: dict[str, Any] = {  # NumPy's, as jit takes them without a program
        "keys": np.asarray([(17, row) for row in range(num)], np.uint32),
        "positions": np.asarray([c.num_prompt + c.num_output for c in cases], np.int32),
        "params": device_params([OracleParams(temperature=c.temperature) for c in cases]),
        "token_ids": np.asarray(tokens, np.int32),
        "prompt_lengths": np.asarray([c.num_prompt for c in cases], np.int32),
    }
    return SamplingState(**fields)


def _taken(rows: ProcessorRows, order: np.ndarray) -> ProcessorRows:
    taken: ProcessorRows = jax.tree.map(lambda leaf: leaf[order], rows)
    return taken


def _check_same(cases: Sequence[_Case], got: np.ndarray, wanted: np.ndarray, what: str) -> None:
    """Check that rows are equal within the tolerance."""
    for case, one, other in zip(cases, np.asarray(got), np.asarray(wanted), strict=True):
        equal = np.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
        assert equal, f"{what}: {_told(case)}: {_difference(one, other)}"


def _difference(one: np.ndarray, other: np.ndarray) -> str:
    one, other = np.ravel(one), np.ravel(other)
    at = int(np.flatnonzero(~np.isclose(one, other, rtol=TOLERANCE, atol=TOLERANCE))[0])
    return f"place {at} is {one[at]}, not {other[at]}"


def _told(case: _Case) -> str:
    return f"row with options ({case.options}), {case.what}, temperature {case.temperature}"


def _is_a_logits_processor(subject: _ProcessorUnderTest) -> None:
    target = subject.target
    is_class = isinstance(target, type) and issubclass(target, LogitsProcessor)
    assert is_class, f"{target} is not a subclass of enginebay.contracts.processor.LogitsProcessor"
    for flag in ("keeps_argmax", "reads_tokens", "evolves"):
        value = getattr(subject.processor, flag)
        assert isinstance(value, bool), f"{flag} is {value!r}, expected True or False"


def _fields_are_as_declared(subject: _ProcessorUnderTest) -> None:
    declared = subject.processor.fields(SIZES)
    assert IS_USED not in declared, f"the field name {IS_USED} is reserved for the core"
    for name, field in declared.items():
        assert isinstance(field, RowField), f"field {name} is {field!r}, expected a RowField"
        np.dtype(field.dtype)
    assert dict(subject.processor.fields(SIZES)) == dict(declared), (
        "fields() returns different fields for equal sizes"
    )
    for case in subject.cases:
        subject.values(case)  # raises TypeError for another shape


def _result_has_the_logits_shape(subject: _ProcessorUnderTest) -> None:
    logits, fields, state = subject.rows
    got = jax.eval_shape(subject.processor, logits, fields[NAME], state)
    assert (got.shape, got.dtype) == (logits.shape, logits.dtype), (
        f"logits {logits.dtype} {logits.shape} become {got.dtype} {got.shape}"
    )


def _examples_change_scores(subject: _ProcessorUnderTest) -> None:
    changed = (subject.together != np.asarray(subject.rows[0])).any(axis=-1)
    options = {str(case.options) for case in subject.cases}
    assert changed.any(), (
        f"no score changes with options {sorted(options)}: add examples to the options' model "
        "(json_schema_extra) that change scores"
    )


def _rows_do_not_depend_on_the_batch(subject: _ProcessorUnderTest) -> None:
    cases, together = subject.cases, subject.together
    for row, case in enumerate(cases):
        alone = subject.scores(_taken(subject.rows, np.asarray([row])))
        _check_same([case], alone, together[[row]], "alone against all in one batch")
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(cases))
        got = subject.scores(_taken(subject.rows, order))
        _check_same([cases[i] for i in order], got, together[order], "in another order")


def _unused_rows_keep_their_logits(subject: _ProcessorUnderTest) -> None:
    """A row that does not use the processor has fields of zeros; scores of other rows stay the
    same.
    """
    logits, fields, state = subject.rows
    unused = np.arange(len(subject.cases)) % 3 == 1
    own = {
        n: np.where(unused.reshape(-1, *(1,) * (v.ndim - 1)), 0, v).astype(v.dtype)
        for n, v in fields[NAME].items()
    }
    got = subject.scores((logits, {NAME: own}, state))
    wanted = np.where(unused[:, None], np.asarray(logits), subject.together)
    assert np.array_equal(got[unused], wanted[unused]), (
        "the processor changes the logits of a row that does not use it"
    )
    _check_same(subject.cases, got, wanted, "beside rows that do not use it")


def _scores_are_finite_or_minus_infinity(subject: _ProcessorUnderTest) -> None:
    for case, scores in zip(subject.cases, subject.together, strict=True):
        wrong = np.flatnonzero(~(np.isfinite(scores) | np.isneginf(scores)))
        assert not wrong.size, f"{_told(case)}: token {wrong[0]} has the score {scores[wrong[0]]}"


def _some_token_stays_possible(subject: _ProcessorUnderTest) -> None:
    for case, scores in zip(subject.cases, subject.together, strict=True):
        had, has = np.isfinite(case.logits).any(), np.isfinite(scores).any()
        assert has or not had, f"{_told(case)}: the processor makes every token impossible"


def _impossible_tokens_stay_impossible(subject: _ProcessorUnderTest) -> None:
    for case, scores in zip(subject.cases, subject.together, strict=True):
        back = np.flatnonzero(np.isneginf(case.logits) & ~np.isneginf(scores))
        assert not back.size, (
            f"{_told(case)}: token {back[0]} was -inf and now has the score {scores[back[0]]}"
        )


def _argmax_is_kept(subject: _ProcessorUnderTest) -> None:
    if not subject.processor.keeps_argmax:
        return
    for case, scores in zip(subject.cases, subject.together, strict=True):
        before, after = int(case.logits.argmax()), int(scores.argmax())
        assert before == after, (
            f"{_told(case)}: keeps_argmax is declared, "
            f"but the best token changes from {before} to {after}"
        )
    logits, fields, state = subject.rows
    for best in (VOCAB - 1, 0, VOCAB // 2):  # a loop over the vocabulary may leave its ends out
        moved: Any = np.where(np.isfinite(logits), logits, np.float32(-50.0))
        moved[:, best] = moved.max(axis=1) + 3.0
        scores = subject.scores((moved, fields, state))
        for case, after in zip(subject.cases, scores.argmax(axis=1).tolist(), strict=True):
            assert after == best, (
                f"{_told(case)}: keeps_argmax is declared, "
                f"but the best token changes from {best} to {after}"
            )


def _tokens_are_read_as_declared(subject: _ProcessorUnderTest) -> None:
    logits, fields, state = subject.rows
    reads = subject.processor.reads_tokens
    known = np.arange(WIDTH) < np.asarray(state.positions)[:, None]
    others = (state.token_ids + 11) % VOCAB
    token_ids: Any = np.where(known & reads, state.token_ids, others)
    got = subject.scores((logits, fields, dataclasses.replace(state, token_ids=token_ids)))
    what = (
        "tokens after its position change its scores"
        if reads
        else "its tokens change its scores, but reads_tokens is not declared"
    )
    _check_same(subject.cases, got, subject.together, what)


def _fields_evolve_as_declared(subject: _ProcessorUnderTest) -> None:
    """Generate token after token: in a loop on the device, alone and in another order give the same
    scores and fields.
    """
    processor = subject.processor
    if not processor.evolves:
        own_after = type(processor).after is not LogitsProcessor.after
        assert not own_after, "it defines after(), which is only called if `evolves` is declared"
        return
    rows, active = subject.rows, np.arange(len(subject.cases)) != 2
    step = jax.jit(subject.step)
    singly, stepped = rows, []
    for _ in range(NUM_STEPS):
        singly, scores = step(singly, active)
        stepped.append(np.asarray(scores))
    changed = [n for n, v in singly[1][NAME].items() if not np.array_equal(v, rows[1][NAME][n])]
    assert changed, f"`evolves` is declared, but no field changes in {NUM_STEPS} tokens"
    for name, value in singly[1][NAME].items():
        assert np.isfinite(value).all(), (
            f"field {name} holds NaN or infinity after {NUM_STEPS} tokens"
        )

    def repeated(rows: ProcessorRows, active: jax.Array) -> tuple[ProcessorRows, jax.Array]:
        return jax.lax.scan(lambda rows, _: subject.step(rows, active), rows, None, NUM_STEPS)

    looped, scanned = jax.jit(repeated)(rows, active)
    for one, other in zip(np.asarray(scanned), stepped, strict=True):
        _check_same(subject.cases, one, other, "in a loop on the device")
    order = np.random.default_rng(1).permutation(len(subject.cases))
    mixed, alone = _taken(rows, order), [_taken(rows, np.asarray([row])) for row in (0, 1)]
    for _ in range(NUM_STEPS):
        mixed, _ = step(mixed, active[order])
        alone = [step(one, np.ones(1, bool))[0] for one in alone]
    for name, value in singly[1][NAME].items():
        wanted = np.asarray(value)
        _check_same(
            subject.cases, looped[1][NAME][name], wanted, f"field {name}, in a loop on the device"
        )
        ordered = [subject.cases[i] for i in order]
        _check_same(ordered, mixed[1][NAME][name], wanted[order], f"field {name}, in another order")
        for row, one in enumerate(alone):
            _check_same(
                [subject.cases[row]], one[1][NAME][name], wanted[[row]], f"field {name}, alone"
            )
