"""All cheats, each with the words that must name it."""

from __future__ import annotations

import dataclasses

from enginebay_testing import trial

COMMANDS = ("check", "bench", "tune", "compare")


@dataclasses.dataclass(frozen=True)
class Cheat:
    """A kernel of rms_norm by import path, and the start of what its trial says of it."""

    name: str
    path: str
    says: str
    apart: bool = False
    """Whether it is tried in a process of its own alone: it recognises checks, or is told by its
    import.
    """
    meets: tuple[str, ...] = COMMANDS
    """The commands that can meet it: the others do not use what it changes or looks at."""


def _cheat(
    path: str, says: str, *, apart: bool = False, meets: tuple[str, ...] = COMMANDS
) -> Cheat:
    name = path.replace(":", "_")
    return Cheat(name, f"tests.zoo.cheats.{path}", says, apart, meets)


CHEATS = (
    _cheat("results:last_call", trial.EARLIER),
    _cheat("results:first_forever", trial.EARLIER),
    _cheat("results:same_address", trial.EARLIER),  # or ADDRESS, which begins with the same words
    _cheat("results:some_rows", trial.ROWS),
    _cheat("results:by_contents", trial.CACHED),
    _cheat("results:few_calls", trial.FIRST),
    _cheat("results:late", trial.LATE),
    _cheat("inputs:writes", trial.WRITES),
    _cheat("inputs:writes_weight", trial.WRITES),
    _cheat("inputs:known", trial.KNOWN),
    _cheat("inputs:recognised", trial.KNOWN),
    _cheat("inputs:constant_ends", trial.CONSTANT),
    _cheat("inputs:constant", trial.CONSTANT),
    _cheat("process:config", "changes jax.config.jax_default_matmul_precision"),
    _cheat("process:environment", "changes the environment variable XLA_FLAGS"),
    _cheat("process:allclose", "replaces numpy.allclose"),
    _cheat("process:flatnonzero", "replaces numpy.flatnonzero"),
    _cheat("process:tolerance", "replaces enginebay.ops"),
    _cheat("process:clock", "replaces time.perf_counter"),
    _cheat(
        "process:bench_clock",
        "replaces enginebay_bench.timing.statistics",
        meets=("bench", "tune"),
    ),
    _cheat("process:wait", "replaces jax.block_until_ready"),
    _cheat("process:square", "replaces jax.numpy.square"),
    _cheat("process:random", "changes the state of numpy.random"),
    _cheat("process:processors", "changes the processors of the process"),
    _cheat("process:spin", trial.RUNS_ON),
    _cheat("importing:norm", "replaces numpy.allclose", apart=True),
    _cheat("answers:reference", "answers with the reference"),
    _cheat("answers:registered", "answers with "),
    _cheat("answers:oracle", "answers with the oracle"),
    _cheat("answers:memory", trial.MEMORY),
    _cheat("answers:modules", trial.OTHERWISE, apart=True),
    _cheat("answers:stack", trial.OTHERWISE, apart=True),
    _cheat("answers:environment", trial.OTHERWISE, apart=True, meets=("check",)),
)
