"""A trial of one kernel: whether it earns its results, or cheats the code that checks and times it.

A kernel is called with known inputs, with secret ones, with other contents at the same address, and
with inputs that look constant; then it is timed on new, on repeated and on constant inputs. What it
returned is compared with the op's reference only after all calls, and after the state of the
process was compared. Code that runs in the same process can always hide: docs/checking.md says what
a trial does not find.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter, process_time, sleep
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.compose.quick_cases import QuickCase
from enginebay.compose.quick_check import why_different
from enginebay.ops.op import Op
from enginebay.plugins.registry import import_target
from enginebay_testing.process_state import ProcessState
from enginebay_testing.verdicts import CheatError

EARLIER = "returns an earlier call's result"
ADDRESS = "returns an earlier call's result where its inputs lie at the same address"
ROWS = "leaves rows of an earlier call's result"
MEMORY = "returns what it finds in the checker's memory"
KNOWN = "is right for known inputs only"
FIRST = "is right in its first calls only"
LATE = "returns before its result is complete"
WRITES = "writes into its inputs"
CONSTANT = "skips work where inputs look constant"
CACHED = "keeps results by the contents of its inputs"
RUNS_ON = "leaves work running after its call"
OTHERWISE = "gives other results outside of a check"
KINDS = (
    *(EARLIER, ADDRESS, ROWS, MEMORY, KNOWN, FIRST),
    *(LATE, WRITES, CONSTANT, CACHED, RUNS_ON, OTHERWISE),
)
"""How cheats are named, besides what they change and who answers for them."""

NUM_TIMED = 4
"""Calls of each series that are timed, in turn with the other series; the fastest counts."""

SHORTCUT, SHORTCUT_S, NUM_SERIES = 3.0, 1e-3, 3
"""By which factor, and by how many seconds, new inputs must take longer than repeated or constant
ones, each of so many times, before a kernel is said to keep results or to skip work. Other programs
delay single calls: on a CPU, the processor's time must differ as much.
"""

LATE_S = 0.3
"""Seconds in which a wrong result must not change any more."""

IDLE_S, BUSY_SHARE, NUM_IDLE = 0.04, 0.1, 50
"""Seconds of a pause, the share of a processor that a process may use in it, and how many pauses
must all be busy.
"""

Leaves = list[np.ndarray]
Results = dict[str, np.ndarray]
_Series = dict[str, tuple[float, float]]


@dataclasses.dataclass
class _Call:
    """One call: its inputs, what it returned, and a function that copies that again."""

    leaves: Leaves
    found: Results
    again: Callable[[], Results]


@dataclasses.dataclass(frozen=True)
class Trial:
    """What is tried: a kernel of an op on one of the op's quick cases. `seed` makes the secret
    inputs. `rivals`: by name, the functions that may not answer in the kernel's place.
    """

    op: Op[Any]
    kernel: Any
    case: QuickCase
    seed: int
    rivals: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)

    def run(self, before: ProcessState | None = None) -> None:
        """Raise CheatError, which names the cheat, or AssertionError for a kernel that is wrong.

        `before`: the state of the process before the kernel was imported; None: now.
        """
        before = before or ProcessState.now()
        runner = _Runner(self)
        with _watched(self.rivals, self.kernel) as answered:
            calls = runner.calls()
        _refuse_changes(before)
        if answered:
            raise CheatError(f"answers with {', '.join(sorted(answered))}")
        if _is_busy():
            raise CheatError(RUNS_ON)
        wanted = functools.cache(lambda i: runner.wanted(calls[i].leaves))
        self._judge_calls(runner, calls, wanted)
        timed, series = runner.timed_calls()
        _refuse_changes(before)
        for call in timed:
            if self._difference(call.found, runner.wanted(call.leaves)) is not None:
                earlier = [one.found for one in [*calls, *timed] if one is not call]
                raise CheatError(_from_earlier(call.found, earlier, {}) or FIRST)
        _refuse_shortcuts(runner, series)

    def secret(self, number: int) -> Leaves:
        """Return the case's inputs with secret numbers: those of each array are shuffled along its
        last axis and scaled. Whole numbers stay, and so do NaN and infinity.
        """
        rng = np.random.default_rng([self.seed, number])
        return [_shuffled(leaf, rng) for leaf in self.known()]

    def known(self) -> Leaves:
        """Return the case's own inputs."""
        return [np.array(jnp.asarray(leaf)) for leaf in jax.tree.leaves(self.case.inputs)]

    def wanted(self, leaves: Leaves) -> Results:
        """Return the reference's results for inputs."""
        return _Runner(self).wanted(leaves)

    def _difference(self, found: Results, wanted: Results) -> str | None:
        return why_different(self.op, self.case, found, wanted)

    def _judge_calls(
        self, runner: _Runner, calls: Sequence[_Call], wanted: Callable[[int], Results]
    ) -> None:
        """Raise when a result is wrong: CheatError where its numbers, or the place of the wrong
        call among the calls, name a cheat.
        """
        differences = [self._difference(c.found, wanted(i)) for i, c in enumerate(calls)]
        wrong = [i for i, difference in enumerate(differences) if difference is not None]
        if not wrong:
            return
        sleep(LATE_S)
        for number in wrong:
            found, again = calls[number].found, calls[number].again()
            if any(not _is_equal(array, again[name]) for name, array in found.items()):
                raise CheatError(LATE)
            source = _from_earlier(found, [one.found for one in calls[:number]], runner.decoys)
            others = (self._difference(found, wanted(i)) for i in range(number))
            if not source and any(difference is None for difference in others):
                source = EARLIER
            if source:
                is_same = number == _SAME_ADDRESS and source == EARLIER and _SECRET not in wrong
                raise CheatError(ADDRESS if is_same else source)
        if wrong == [_CONSTANT]:
            raise CheatError(CONSTANT)
        first = differences[wrong[0]]
        if _KNOWN in wrong:
            raise AssertionError(first)
        raise CheatError(f"{KNOWN}: with secret inputs {first}")


_KNOWN, _SECRET, _SAME_ADDRESS, _CONSTANT = range(4)
"""The order of a trial's calls."""


class _Runner:
    """Calls one compiled step, in places on the device that it keeps."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._tree = jax.tree.structure(trial.case.inputs)
        self._step = jax.jit(functools.partial(trial.case.run, trial.kernel))
        reference = import_target(trial.op.reference, f"the reference of op {trial.op.name!r}")
        self._reference = jax.jit(functools.partial(trial.case.run, reference))
        self._places: list[jax.Array] = []
        self._kept: list[jax.Array] = []
        """Places of earlier calls, whose addresses no new place may have."""
        shapes = jax.eval_shape(self._reference, *trial.case.inputs)
        rng = np.random.default_rng([trial.seed, 99])
        self.decoys: Results = {
            f"{name} {dtype}": rng.normal(size=shape.shape).astype(dtype)
            for name, shape in shapes.items()
            for dtype in ("float64", shape.dtype)
        }
        """Wrong results, in the shapes of the right ones: who reads the checker's memory for an
        answer returns one of them.
        """

    def wanted(self, leaves: Leaves) -> Results:
        """Return the reference's results."""
        found = self._reference(*jax.tree.unflatten(self._tree, leaves))
        return {name: np.array(array) for name, array in found.items()}

    def calls(self) -> list[_Call]:
        """Call the kernel with each kind of inputs."""
        trial = self._trial
        constant = [_nearly_constant(leaf, trial.seed) for leaf in trial.known()]
        new, same = (trial.known(), trial.secret(0)), (trial.secret(1), constant)
        return [*map(self._new_places_call, new), *map(self._call, same)]

    def timed_calls(self, start: int = 10) -> tuple[list[_Call], _Series]:
        """Return the calls with new inputs, and the fastest call of each series: (seconds, seconds
        of processors). `start` is the number of the first secret inputs.
        """
        trial, calls = self._trial, []
        times: dict[str, list[tuple[float, float]]] = {"new": [], "repeated": [], "constant": []}
        known, constant = trial.secret(start), [_constant(leaf) for leaf in trial.known()]
        self._call(known)
        for number in range(start + 1, start + 1 + NUM_TIMED):
            new = trial.secret(number)
            for name, leaves in (("new", new), ("repeated", known), ("constant", constant)):
                self._fill(leaves)
                inputs = jax.tree.unflatten(self._tree, self._places)
                begin_s, used_s = perf_counter(), process_time()
                out = self._step(*inputs)
                jax.block_until_ready(out)
                times[name].append((perf_counter() - begin_s, process_time() - used_s))
                if name == "new":
                    calls.append(_Call(new, _copied(out), functools.partial(_copied, out)))
        return calls, {name: _fastest(each) for name, each in times.items()}

    def _new_places_call(self, leaves: Leaves) -> _Call:
        self._kept += self._places
        self._places = [jnp.array(leaf, copy=True) for leaf in leaves]
        return self._call(leaves)

    def _call(self, leaves: Leaves) -> _Call:
        self._fill(leaves)
        out = self._step(*jax.tree.unflatten(self._tree, self._places))
        jax.block_until_ready(out)
        found = _copied(out)
        for place, leaf in zip(self._places, leaves, strict=True):
            if np.asarray(place).tobytes() != leaf.tobytes():
                raise CheatError(WRITES)
        return _Call(leaves, found, functools.partial(_copied, out))

    def _fill(self, leaves: Leaves) -> None:
        """Put inputs into the places: on a CPU at the same addresses."""
        if jax.default_backend() != "cpu":
            self._places = [jnp.array(leaf, copy=True) for leaf in leaves]
            return
        for place, leaf in zip(self._places, leaves, strict=True):
            source = np.ascontiguousarray(leaf)
            ctypes.memmove(place.unsafe_buffer_pointer(), source.ctypes.data, source.nbytes)


def _copied(out: Mapping[str, Any]) -> Results:
    return {name: np.array(array, copy=True) for name, array in out.items()}


def _is_real(leaf: np.ndarray) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def _shuffled(leaf: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    if not _is_real(leaf) or not leaf.ndim:
        return leaf
    rows = leaf.reshape(-1, leaf.shape[-1]).copy() if leaf.size else leaf.reshape(-1, 1)
    scale = np.float32(rng.uniform(0.5, 1.0))
    for row in rows:
        real = np.flatnonzero(np.isfinite(row.astype(np.float32)))
        row[real] = (rng.permutation(row[real]).astype(np.float32) * scale).astype(leaf.dtype)
    return rows.reshape(leaf.shape)


def _constant(leaf: np.ndarray) -> np.ndarray:
    """Return 0.5 in place of every finite number."""
    if not _is_real(leaf) or not leaf.ndim:
        return leaf
    real = np.isfinite(leaf.astype(np.float32))
    return np.where(real, np.array(0.5, leaf.dtype), leaf)


def _nearly_constant(leaf: np.ndarray, seed: int) -> np.ndarray:
    """Return 0.5 in place of every finite number but those of a secret tenth, which stay. The first
    and the last number become 0.5 too.
    """
    if not _is_real(leaf) or leaf.size < MIN_HIDDEN:
        return leaf
    found, flat = _constant(leaf).reshape(-1), leaf.reshape(-1)
    inside = np.flatnonzero(np.isfinite(flat[1:-1].astype(np.float32))) + 1
    some = np.random.default_rng([seed, 98]).permutation(inside)[: max(1, inside.size // 10)]
    found[some] = flat[some]
    return found.reshape(leaf.shape)


MIN_HIDDEN = 16
"""Numbers of an array among which a few others can hide."""


def _from_earlier(found: Results, earlier: Sequence[Results], decoys: Results) -> str:
    """Return where wrong results come from, or ""."""
    for name, array in found.items():
        for decoy, false in decoys.items():
            if decoy.rpartition(" ")[0] == name and _is_equal(array, false.astype(array.dtype)):
                return MEMORY
        others = [one[name] for one in earlier]
        if not _tells(array):
            continue
        if any(_is_equal(array, other) for other in others):
            return EARLIER
        if array.ndim > 1 and any(_shares_rows(array, other) for other in others):
            return ROWS
    return ""


def _is_equal(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and one.tobytes() == other.tobytes()


def _shares_rows(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and any(
        _tells(row) and _is_equal(row, before) for row, before in zip(one, other, strict=True)
    )


def _tells(array: np.ndarray) -> bool:
    """Return whether an equal array is no chance: it has several different finite numbers."""
    numbers = array.reshape(-1).astype(np.float64)
    numbers = numbers[np.isfinite(numbers)]
    return numbers.size >= MIN_TELLING and bool((numbers != numbers[0]).any())


MIN_TELLING = 4


def _refuse_changes(before: ProcessState) -> None:
    """Raise CheatError for what was changed in the process, after it was set back."""
    if changed := before.changes():
        before.restore()
        raise CheatError("; ".join(changed[:3]))


def _fastest(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return min(wall_s for wall_s, _ in times), min(used_s for _, used_s in times)


def _refuse_shortcuts(runner: _Runner, series: _Series) -> None:
    """Raise CheatError where repeated or constant inputs are much faster than new ones, always."""
    for name, cheat in (("repeated", CACHED), ("constant", CONSTANT)):
        for again in range(1, NUM_SERIES):
            if not _is_shortcut(series["new"], series[name]):
                break
            _, series = runner.timed_calls(start=10 + again * 2 * NUM_TIMED)
        else:
            if _is_shortcut(series["new"], series[name]):
                new_s, other_s = series["new"][0], series[name][0]
                times = f"new inputs take {1e3 * new_s:.3g} ms, {name} ones {1e3 * other_s:.3g} ms"
                raise CheatError(f"{cheat}: {times}")


def _is_shortcut(new: tuple[float, float], other: tuple[float, float]) -> bool:
    pairs = list(zip(new, other, strict=True))
    if jax.default_backend() != "cpu":  # its processors compute elsewhere
        pairs = pairs[:1]
    return all(a > SHORTCUT * b and a - b > SHORTCUT_S for a, b in pairs)


def _is_busy() -> bool:
    """Return whether the process computes although nothing was asked of it. A thread that waits for
    a processor, because other programs use it, counts as one that computes.
    """
    for _ in range(NUM_IDLE):
        begin_s, used_s = perf_counter(), process_time()
        sleep(IDLE_S)
        is_idle = process_time() - used_s < BUSY_SHARE * (perf_counter() - begin_s)
        if is_idle and not _others_are_ready():
            return False
    return True


def _others_are_ready() -> bool:
    """Return whether another thread of the process computes, or waits for a processor; False where
    the system does not tell.
    """
    own = str(threading.get_native_id())
    for path in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the thread has ended
            state = path.read_text(encoding="utf-8").rpartition(") ")[2][:1]
            if state == "R" and path.parent.name != own:
                return True
    return False


@contextlib.contextmanager
def _watched(rivals: Mapping[str, Callable[..., Any]], kernel: Any) -> Iterator[set[str]]:
    """Yield the names of the rivals that are called meanwhile, in any thread. Rivals of the
    kernel's own package may be its parts. Python 3.11 cannot watch, and yields nothing.
    """
    answered: set[str] = set()
    monitoring = getattr(sys, "monitoring", None)
    own = _code_of(kernel)
    codes = {_code_of(rival): name for name, rival in reversed(list(rivals.items()))}
    codes = {
        code: name
        for code, name in codes.items()
        if code not in (None, own) and not _is_of_same_package(rivals[name], kernel)
    }
    if monitoring is None or not codes or monitoring.get_tool(_TOOL) is not None:
        yield answered
        return

    def on_start(code: Any, _: int) -> None:
        answered.add(codes[code])

    monitoring.use_tool_id(_TOOL, __name__)
    monitoring.register_callback(_TOOL, monitoring.events.PY_START, on_start)
    for code in codes:
        monitoring.set_local_events(_TOOL, code, monitoring.events.PY_START)
    try:
        yield answered
    finally:
        for code in codes:
            monitoring.set_local_events(_TOOL, code, 0)
        monitoring.register_callback(_TOOL, monitoring.events.PY_START, None)
        monitoring.free_tool_id(_TOOL)


def _is_of_same_package(one: Any, other: Any) -> bool:
    """Return whether one package has the code of both."""
    packages = []
    for function in (one, other):
        while isinstance(function, functools.partial):
            function = function.func
        module = getattr(function, "__module__", None) or type(function).__module__
        packages.append(module.partition(".")[0])
    return packages[0] == packages[1]


_TOOL = 4
"""A number of sys.monitoring that no usual tool has."""


def _code_of(function: Any) -> Any:
    """Return the code that a call of a function or an object runs, or None for code in C."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__wrapped__", function)
    if not hasattr(function, "__code__"):
        function = vars(type(function)).get("__call__")
    return getattr(function, "__code__", None)
