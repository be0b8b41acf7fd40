"""The engine contract: an engine runs steps over a model and owns the model's cache."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from enginebay.contracts.adapters import Adapters
from enginebay.contracts.cache import KVLayout, Lease, Ledger
from enginebay.contracts.compilations import Compilations
from enginebay.contracts.processor import RowValues
from enginebay.contracts.rows import EngineRows
from enginebay.contracts.step_key import StepKey
from enginebay.errors import InternalError, UnsupportedError
from enginebay.memory import MemoryPlan
from enginebay.ops.spec import Bucket


# Not frozen, for speed: one is made for every row of every step.
@dataclasses.dataclass(slots=True)
class RowPlan:
    """One row's part of a step: compute `num_tokens` tokens after the first `num_computed` ones,
    which are in the cache already. A RowPlan is not changed after it was made.

    `samples`: whether the row samples a token; False for every chunk of a prompt but the last.
    `num_computed` of a decoding row is an upper bound: it counts the tokens of launched steps that
    were not read yet, in which the row may have finished. A row with drafts has no such step, so
    its num_computed is exact, and its lease has room for the drafts. `returns_prompt`: the step
    also returns the log-probabilities of the prompt tokens that follow these tokens.
    """

    row: int
    lease: Lease
    num_computed: int
    num_tokens: int
    samples: bool
    update: tuple[RowValues, ...] = ()
    """Values of the row's logits processors to write before the step; only for rows that sample."""
    returns_prompt: bool = False
    decodes: bool = False
    """Whether the row decodes one token in a prefill step (mixed steps)."""
    pools: bool = False
    """Whether the caller reads the hidden states of these tokens."""
    draft_token_ids: tuple[int, ...] = ()
    """Draft tokens after the row's last token, for the step to verify."""


@dataclasses.dataclass(frozen=True, slots=True)
class Demand:
    """Rows and tokens per row that all running and waiting requests may soon need together. An
    engine whose cache grows can grow once to this size.
    """

    num_rows: int = 0
    num_tokens_per_row: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of one call of a compiled step. There are three sorts of steps.

    Prefill: each row computes a chunk of its prompt. With `mixed_steps` on, some rows of a prefill
    may decode one token each instead. Decode: each row gets up to `num_steps` tokens. Verify: a
    decode in which every row brings draft tokens (at most MAX_VERIFIED_ROWS rows, none with
    penalties), and receives its accepted drafts plus one token. A row brings at most
    config.draft_passes * (config.max_drafts + 1) - 1 drafts; an engine may use only the first
    config.max_drafts, which one pass of the model verifies. Only engines that declare the
    capability "verifies" receive verify steps.
    """

    rows: tuple[RowPlan, ...]
    num_steps: int = 0
    """0: a prefill. N > 0: a decode with at most N tokens per row."""
    demand: Demand = Demand()

    def __post_init__(self) -> None:
        if not self.rows or self.num_steps < 0:
            raise InternalError(
                f"a StepPlan with {len(self.rows)} rows and num_steps = {self.num_steps}"
            )

    @property
    def is_decode(self) -> bool:
        """Whether the step is a decode: every row continues from its last sampled token."""
        return self.num_steps > 0

    @property
    def verifies(self) -> bool:
        """Whether the step is a verify step: every row brings drafts."""
        return bool(self.rows[0].draft_token_ids)


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of tokens, on the host.

    token_ids int32 [..., W] and values f32 [..., W], with one entry of W values for each token:
    first the token itself, then the top tokens, most likely first. W is MAX_LOGPROBS + 1, or less
    for a small vocabulary. With the whole vocabulary (`of_all`) the tokens after the first are in
    the order of their ids. The values are log_softmax of the model's logits, before penalties,
    processors and temperature. Entries of rows whose request did not ask for log-probabilities, and
    entries without a token, are undefined.
    """

    token_ids: np.ndarray
    values: np.ndarray

    def of_row(self, row: int, num_tokens: int, num_best: int) -> TokenLogprobs:
        """Return the first num_tokens entries of a row, at most [num_tokens, num_best + 1]. The
        result is a copy, so that the arrays of the whole step can be freed.
        """
        return TokenLogprobs(
            self.token_ids[row, :num_tokens, : num_best + 1].copy(),
            self.values[row, :num_tokens, : num_best + 1].copy(),
        )

    @staticmethod
    def of_all(token_ids: np.ndarray, values: np.ndarray) -> TokenLogprobs:
        """Make TokenLogprobs [tokens, vocab + 1] from the sampled token_ids int32 [tokens] and the
        values of the whole vocabulary, f32 [tokens, vocab].
        """
        every = np.broadcast_to(np.arange(values.shape[1], dtype=np.int32), values.shape)
        own = token_ids[:, None]
        return TokenLogprobs(
            np.concatenate([own, every], axis=1),
            np.concatenate([np.take_along_axis(values, own, axis=1), values], axis=1),
        )

    @staticmethod
    def joined(parts: Sequence[TokenLogprobs]) -> TokenLogprobs:
        """Concatenate parts of [tokens, W] along the tokens."""
        return TokenLogprobs(
            np.concatenate([part.token_ids for part in parts]),
            np.concatenate([part.values for part in parts]),
        )


class Pending(ABC):
    """A launched step, whose results are read when they are needed."""

    bucket: Bucket | None = None
    """The sizes of the compiled program that runs the step; None for an engine without buckets."""

    @abstractmethod
    def read(self) -> np.ndarray:
        """Wait for the step and return its tokens, int32 [rows, steps] in the order of the plan; -1
        where a row produced no token, NOT_FINITE where its logits had NaN or infinity.
        """

    def read_logprobs(self) -> TokenLogprobs:
        """Wait for the step and return the log-probabilities of its tokens, [rows, steps, W].

        Called only when a request in the plan asked for log-probabilities, and only on engines that
        declare the capability "logprobs".
        """
        raise _undeclared(self, "read_logprobs")

    def read_all_logprobs(self, row: int) -> np.ndarray:
        """Return f32 [steps, ModelInfo.num_token_ids] for row `row` of the plan: log_softmax of the
        model's logits for each of its tokens.

        Called only when the request asked for the whole vocabulary, only for steps with one token
        per row, and only on engines that declare the capability "full_vocab_logprobs".
        """
        raise _undeclared(self, "read_all_logprobs")

    def read_prompt_logprobs(self, row: int) -> TokenLogprobs:
        """Return [tokens, W] for row `row` of the plan, which has `returns_prompt`: entry i is for
        the prompt token that follows token i of the row's chunk.

        The last token of the prompt has no entry. Called only on engines that declare the
        capability "full_vocab_logprobs".
        """
        raise _undeclared(self, "read_prompt_logprobs")

    def read_hidden(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Return two vectors f32 [hidden_size] for row `row` of the plan, which has `pools`: the
        sum of the final hidden states of its tokens, and the final hidden state of its last token.

        Called only on engines that declare the capability "hidden_states".
        """
        raise _undeclared(self, "read_hidden")

    def read_logits(self) -> np.ndarray:
        """Wait for the step and return f32 [tokens or more, vocab]: the logits after each token of
        the plan's only row, in order. Values after the row's tokens are undefined.

        Works only while the engine runs with `returns_logits` (see `Engine.swap`); UnsupportedError
        otherwise.
        """
        raise UnsupportedError(
            f"the logits of a step of {type(self).__name__}",
            "an engine whose steps return all their logits",
            "Choose another engine with --engine.",
        )


def _undeclared(pending: Pending, method: str) -> InternalError:
    name = f"{type(pending).__name__}.{method}"
    return InternalError(f"{name} was called, but its engine does not declare this capability")


@dataclasses.dataclass(frozen=True)
class GroupState:
    """The cache contents of one row in one cache group, independent of the cache layout.

    Attention: `arrays` has "k" and "v", f32 [layers, positions, kv_heads, head_dim], from position
    `first`, where the group's window begins, to the last cached one. Each KV head of the checkpoint
    occurs once. A recurrent state: `arrays` f32 [layers, *shape] after `first` = num_cached tokens.
    """

    first: int
    arrays: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class RowState:
    """A row taken out of an engine: everything that its next tokens depend on, independent of the
    cache layout, so that any engine of the same model can continue the row.

    `groups`: the cache contents by cache group, for positions 0 to num_cached - 1. The cache does
    not contain `last_token` yet. After `put` into an engine of the same cache layout, `take`
    returns the same values. `sampling`: the row's columns of the row table by name, and its values
    of logits processors by "processor/field". `constants`: ModelInfo.constants of the model that
    computed `groups`; an engine with other constants refuses the row.
    """

    token_ids: np.ndarray
    num_cached: int
    last_token: int
    groups: Mapping[str, GroupState]
    sampling: Mapping[str, np.ndarray]
    constants: str = ""


AttentionProblem = tuple[Bucket, Mapping[str, KVLayout]]
"""The shapes that attention gets from one compiled step: the bucket, and the layout of each cache
group by name.
"""


class LaterCompilation(Protocol):
    """Compilations that run on a thread beside the engine. Any thread may call the methods."""

    def start(self) -> None:
        """Start a thread for what is not compiled. Does nothing while one runs."""

    def stop(self) -> object:
        """Begin no more compilations, and wait for the running one."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the thread has ended or the time is over. Returns whether everything is
        compiled.
        """


class Engine(ABC):
    """Runs steps over a model and owns the model's weights and cache.

    Constructing an engine allocates no device memory: it only plans `memory`. `make_arrays` loads
    the weights and allocates the cache.

    Invariants (tested by the conformance suite): a row's tokens do not depend on the other rows of
    its steps, on chunk sizes, or on the number of decode steps in a call; `step` never waits for
    the device; steps take effect in the order in which they were launched; a row that is copied
    with `take` and `put`, to this or another engine of the same model, continues with the same
    tokens; after all leases are released the ledger is in its initial state.
    """

    ledger: Ledger
    memory: MemoryPlan
    compilations: Compilations
    rows: EngineRows
    """The row table; `RowPlan.row` is an index into it."""
    adapters: Adapters | None = None

    @property
    def weights_version(self) -> str:
        """Names the weights and dtypes behind cached keys and values; changes with the weights."""
        return ""

    @abstractmethod
    def step(self, plan: StepPlan) -> Pending:
        """Launch a step and return at once; the results are read from the Pending."""

    @abstractmethod
    def warmup(self, progress: Callable[[int, int, str], None] | None = None) -> int:
        """Compile every program that serving can need, and return the number of programs.

        `progress(num_done, num_programs, name)` is called after each program. An error that it
        raises ends the warmup once the compilations that are running have finished.
        """

    def begin_warmup(
        self, progress: Callable[[int, int, str], None] | None = None
    ) -> LaterCompilation | None:
        """Compile a few programs that together can run every step, though more slowly, and return
        the compilation of all others, which the caller starts; None when no program is left.

        A step uses the smallest compiled program that can run it; a step that is larger than every
        compiled program runs in several parts, with the same results. `warmup` compiles the
        programs that are still missing. An engine without such parts compiles all programs here.
        """
        self.warmup(progress)
        return None

    def warmup_steps(self) -> tuple[Sequence[StepKey], Sequence[StepKey]]:
        """Return the steps that `begin_warmup` compiles, for reports: those with which every
        request is answered, and those that are compiled later, in order. Works before
        `make_arrays`. An engine without such parts returns ((), ()).
        """
        return (), ()

    def attention_problems(self) -> Sequence[AttentionProblem]:
        """Return the attention problem of every program that serving can need, for reports and
        tuning. Works before `make_arrays`. An engine without buckets returns ().
        """
        return ()

    @abstractmethod
    def take(self, lease: Lease) -> RowState:
        """Copy the row's state to the host. The row stays valid."""

    @abstractmethod
    def put(self, lease: Lease, state: RowState) -> None:
        """Continue `state` in the row of `lease`, whose capacity must cover the state's tokens."""

    def row_values(self, lease: Lease) -> tuple[RowValues, ...]:
        """Return the current values of the logits processors that the row uses. The loop keeps them
        for a preempted request, whose row is computed again later.
        """
        return ()

    @abstractmethod
    def drop_arrays(self) -> None:
        """Free the cache's device memory. Does nothing when it is free. No row may be running."""

    @abstractmethod
    def make_arrays(self) -> None:
        """Load the weights and allocate the cache, unless they exist already.

        Raises UnsupportedError when `memory` does not fit the device together with the other
        engines of this process.
        """

    def release_memory(self) -> float | None:
        """Give memory back that no request uses. The loop calls it some seconds after the last
        request has ended, while none is there. Returns the seconds after which the next call is
        due if no request comes; None: no call is.
        """
        return None

    def save_pages(self) -> None:  # noqa: B027  # most engines have no files
        """Write cached pages that no row uses to files, if it has such. Errors are only logged."""

    def close(self) -> None:  # noqa: B027  # an engine may hold nothing
        """Free weights, cache and programs for good. Closing twice does nothing."""

    def swap(
        self, parts: Mapping[str, object], *, returns_logits: bool = False
    ) -> Callable[[], None]:
        """Replace parts of the running engine, and return a function that undoes the swap. No row
        may be running.

        `parts` maps settings such as "attention.decode", "rms_norm" or "sampler" to registered
        names, to import paths, or to functions. Names and import paths are sent to the executor as
        the command SetParts; functions work in this process only. With `returns_logits` steps
        return all their logits (`Pending.read_logits`).

        The returned function restores the former parts with their compiled programs, and drops the
        programs of `parts`. A swap and its undoing both clear the prefix cache. Swaps nest: undo
        the last swap first.
        """
        raise UnsupportedError(
            f"swapping parts of a running {type(self).__name__}",
            "an engine that can swap parts",
            "Create a new LLM with these parts.",
        )

    @property
    def shadow_report(self) -> Any:
        """The executor's record of shadow mode so far; None when it is off, and while parts are
        swapped.
        """
        return None
