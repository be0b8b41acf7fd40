"""The engine contract: how steps run, and how the cache is laid out."""

from __future__ import annotations

import dataclasses
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from enginebay.background import Background
from enginebay.cache import KVLayout, Lease, Ledger
from enginebay.errors import InternalError, UnsupportedError
from enginebay.memory import MemoryPlan
from enginebay.ops.shadow import ShadowReport
from enginebay.ops.spec import Bucket
from enginebay.processor import RowValues
from enginebay.rows import RowTable


# Not frozen, for speed: one is made for every row of every step.
@dataclasses.dataclass(slots=True)
class RowPlan:
    """One row's part of a step. `num_tokens` new tokens after `num_computed` ones already in the
    cache. Nobody changes it.

    With `draft_token_ids` a decoding row has no unread step: num_computed is exact. The lease has
    room for the drafts.

    `samples` is False for a prompt's chunks but the last. For a decoding row num_computed is an
    upper bound: tokens of launched but unread steps count, and the row may have finished in them.
    `returns_prompt`: the log-probabilities of the prompt's tokens that follow these are read, too.
    """

    row: int
    lease: Lease
    num_computed: int
    num_tokens: int
    samples: bool
    update: tuple[RowValues, ...] = ()
    """Of a row that samples: fields of its logits processors to write before the step."""
    returns_prompt: bool = False
    decodes: bool = False
    """Of a row of a prefill: it goes on by one token from the one that it sampled last."""
    pools: bool = False
    """Whether the hidden states of these tokens are read."""
    draft_token_ids: tuple[int, ...] = ()
    """What may come after the row's last token, to be verified."""


@dataclasses.dataclass(frozen=True, slots=True)
class Demand:
    """What running and waiting requests together may soon need, so that an engine that grows can do
    it once.
    """

    num_rows: int = 0
    num_tokens_per_row: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """What one call of the compiled step does: prefill of chunks, or up to `num_steps` tokens for
    decoding rows. An engine whose configuration has `mixed_steps` on may be given a prefill in
    which rows decode, one token each.

    When rows bring drafts all do, MAX_VERIFIED_ROWS at most, without penalties: each gets those
    that hold and a token more. A row brings config.draft_passes * (config.max_drafts + 1) - 1 of
    them at most; an engine may look at the first config.max_drafts alone, which is one pass of the
    model. Only one that declares the capability "verifies" is given such plans.
    """

    rows: tuple[RowPlan, ...]
    num_steps: int = 0
    """0: prefill. N > 0: decode, N tokens a row at most."""
    demand: Demand = Demand()

    def __post_init__(self) -> None:
        if not self.rows or self.num_steps < 0:
            raise InternalError(
                f"a step of {len(self.rows)} rows and {self.num_steps} decode steps"
            )

    @property
    def is_decode(self) -> bool:
        """Whether rows continue from the token they sampled last."""
        return self.num_steps > 0

    @property
    def verifies(self) -> bool:
        """Whether rows bring drafts."""
        return bool(self.rows[0].draft_token_ids)


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities on the host, by sampled token: first the sampled one's, then those of the
    best, best first.

    token_ids int32 [..., W], values f32 [..., W] = log_softmax of the model's own logits; W is
    MAX_LOGPROBS + 1, or less with a small vocabulary. Of the whole vocabulary they come in the
    order of the ids instead (`of_all`). They mean nothing for a row whose request did not ask, and
    where there is no token.
    """

    token_ids: np.ndarray
    values: np.ndarray

    def of_row(self, row: int, num_tokens: int, num_best: int) -> TokenLogprobs:
        """Those of a row's first num_tokens tokens: [num_tokens, num_best + 1] at most, copied, so
        that no more is kept.
        """
        return TokenLogprobs(
            self.token_ids[row, :num_tokens, : num_best + 1].copy(),
            self.values[row, :num_tokens, : num_best + 1].copy(),
        )

    @staticmethod
    def of_all(token_ids: np.ndarray, values: np.ndarray) -> TokenLogprobs:
        """Those of sampled token_ids int32 [tokens] and of the whole vocabulary, values f32
        [tokens, vocab].
        """
        every = np.broadcast_to(np.arange(values.shape[1], dtype=np.int32), values.shape)
        own = token_ids[:, None]
        return TokenLogprobs(
            np.concatenate([own, every], axis=1),
            np.concatenate([np.take_along_axis(values, own, axis=1), values], axis=1),
        )

    @staticmethod
    def joined(parts: Sequence[TokenLogprobs]) -> TokenLogprobs:
        """Those of tokens that follow one another, [tokens, W] each."""
        return TokenLogprobs(
            np.concatenate([part.token_ids for part in parts]),
            np.concatenate([part.values for part in parts]),
        )


class Pending(ABC):
    """A launched step whose tokens are on their way to the host."""

    @abstractmethod
    def read(self) -> np.ndarray:
        """Wait, and return int32 [rows, steps] in the plan's order; -1 where a row produced no
        token.
        """

    def read_logprobs(self) -> TokenLogprobs:
        """The same of its log-probabilities, [rows, steps, W]; asked for only when a request of its
        rows did.

        An engine that declares the capability "logprobs" gives them; to another no such request
        comes.
        """
        raise InternalError(
            f"{type(self).__name__} was asked for log-probabilities, which it cannot give"
        )

    def read_all_logprobs(self, row: int) -> np.ndarray:
        """Of the plan's row, f32 [steps, vocab]: log_softmax of the logits that each of its tokens
        was sampled from.

        Asked for only when the request wants the whole vocabulary, of steps with one token a row,
        and of engines that declare the capability "full_vocab_logprobs".
        """
        raise InternalError(
            f"{type(self).__name__} was asked for the whole vocabulary, which it cannot tell"
        )

    def read_prompt_logprobs(self, row: int) -> TokenLogprobs:
        """Of the plan's row, which has `returns_prompt`: [tokens, W], the prompt's token after each
        of the row's, and the best.

        The prompt's last token has none after it. For engines that declare the capability
        "full_vocab_logprobs".
        """
        raise InternalError(
            f"{type(self).__name__} was asked for those of a prompt, which it cannot tell"
        )

    def read_hidden(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Of the plan's row, which has `pools`: the sum of the final hidden states of its tokens,
        and that of its last token, f32 [hidden_size] each.

        For engines that declare the capability "hidden_states".
        """
        raise InternalError(f"{type(self).__name__} was asked for hidden states")

    def read_logits(self) -> np.ndarray:
        """Wait, and return f32 [tokens or more, vocab]: the logits after each token of the only row
        of the plan, in order.

        For engines that were made, or swapped, with parts that tell logits; what follows the row's
        tokens means nothing.
        """
        raise UnsupportedError(
            f"the logits of a step, asked of {type(self).__name__}",
            "an engine whose steps tell all their logits",
            "Choose another engine.",
        )


@dataclasses.dataclass(frozen=True)
class GroupState:
    """What one cache group holds of a row, layout-neutral: the positions from `first` to the last
    cached one, of which those before the group's window are left out.

    `arrays` are f32: "k" and "v" [layers, positions, kv_heads, head_dim], the checkpoint's KV heads
    once each however the model is sharded. Of a group with a recurrent state: its arrays [layers,
    *shape] after num_cached tokens, which is `first`.
    """

    first: int
    arrays: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class RowState:
    """A row taken out of an engine: all that its generation depends on, layout-neutral, so that any
    engine can go on.

    `groups` by cache group, positions up to num_cached - 1: `last_token` is not in them yet. Put
    into an engine of the same cache layout, and taken out again, they are the same. `sampling` are
    the row's device columns by name, and its fields of logits processors by "processor/field".
    `constants` are the ModelInfo.constants of the model that computed `groups`: an engine of other
    constants, such as rotary frequencies for another max_model_len, refuses the row.
    """

    token_ids: np.ndarray
    num_cached: int
    last_token: int
    groups: Mapping[str, GroupState]
    sampling: Mapping[str, np.ndarray]
    constants: str = ""


@dataclasses.dataclass(slots=True)
class Compilations:
    """How many programs an engine has compiled, and whether one more is an error
    (CompilationError).
    """

    count: int = 0
    forbidden: bool = False
    _lock: threading.Lock = dataclasses.field(
        default_factory=threading.Lock, repr=False, compare=False
    )

    def add(self) -> None:
        """Count one more, on whichever thread."""
        with self._lock:
            self.count += 1


AttentionProblem = tuple[Bucket, Mapping[str, KVLayout]]
"""What attention sees of a step: its bucket, and the layout of each group."""


class Engine(ABC):
    """Runs steps over a model whose cache it lays out.

    Invariants (held by the conformance suite): a row's tokens do not depend on the other rows of
    its steps, on chunk sizes or on the number of steps in a call; `step` never waits for the
    device; steps take effect in launch order; `take` then `put`, here or in another engine of the
    same model, continues with the same tokens; after every lease is released the ledger is as new.
    Making an engine allocates nothing: `memory` is there, `make_arrays` loads the weights.
    """

    ledger: Ledger
    memory: MemoryPlan
    compilations: Compilations
    rows: RowTable
    """The row table that plans refer to."""

    @property
    def weights_version(self) -> str:
        """Names the weights and dtypes that keys and values depend on; another one after each
        change of weights.
        """
        return ""

    @abstractmethod
    def step(self, plan: StepPlan) -> Pending:
        """Launch a plan."""

    @abstractmethod
    def warmup(self, progress: Callable[[int, int, str], None] | None = None) -> int:
        """Compile every program that serving can need, and return how many there are.

        `progress` is called after each. What it raises ends the compiling, after the programs that
        are being compiled.
        """

    def begin_warmup(self, progress: Callable[[int, int, str], None] | None = None) -> Background:
        """Compile the programs with which every step can run, if slower, and return the compiling
        of the others, which begins when it is started.

        A step takes the smallest program that serves it and is compiled. `warmup` compiles what is
        still missing. An engine that cannot do this compiles everything at once.
        """
        self.warmup(progress)
        return Background()

    def attention_problems(self) -> Sequence[AttentionProblem]:
        """Those of every program that serving can need, for reports and tuning; an engine may tell
        none.

        Nothing need be loaded or allocated.
        """
        return ()

    @abstractmethod
    def take(self, lease: Lease) -> RowState:
        """The row's state on the host; the row goes on being valid."""

    @abstractmethod
    def put(self, lease: Lease, state: RowState) -> None:
        """Continue `state` in the row of `lease`, which promises at least its tokens."""

    def row_values(self, lease: Lease) -> tuple[RowValues, ...]:
        """The fields of the logits processors that the row uses, as they are now: for a request
        that must begin anew.
        """
        return ()

    @abstractmethod
    def drop_arrays(self) -> None:
        """Free the cache's device memory, if there is any; no row may be running."""

    @abstractmethod
    def make_arrays(self) -> None:
        """Load the weights if need be and allocate the cache; nothing to do for what is there.

        UnsupportedError when the memory plan does not fit the device beside those of other engines.
        """

    def close(self) -> None:  # noqa: B027  # an engine may hold nothing
        """Free weights, cache and programs, for good. Closing twice is fine."""

    def swap(
        self, parts: Mapping[str, object], *, returns_logits: bool = False
    ) -> Callable[[], None]:
        """Run steps with other parts than those that the engine was made of; no row may be running.

        `parts` by setting, such as "attention.decode", "rms_norm" or "sampler": registered names
        and import paths, which an executor is given as the command SetParts, or implementations
        themselves, which stay in this process. With `returns_logits` steps give all their logits
        (`Pending.read_logits`).

        The function that comes back brings the former ones back, with the programs that were
        compiled of them, and drops those of `parts`. What the cache knew is forgotten both times.
        Swaps nest: the last one is undone first.
        """
        raise UnsupportedError(
            f"other implementations in a running {type(self).__name__}",
            "an engine that can swap",
            "Make a new one with these implementations.",
        )

    @property
    def shadow_report(self) -> ShadowReport | None:
        """What shadow mode has found so far; None when it is off, or rests while implementations
        are swapped.
        """
        return None


def cache_bytes(arrays: Any) -> int:
    """Bytes of all arrays of a pytree."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))
