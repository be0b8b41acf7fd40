"""The op swiglu by blocks of columns. The two products of a block are used at once, so memory never
holds a product of all columns [T, out].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax

from enginebay.ops.caps import Env
from enginebay.ops.tuning import OpProblem
from enginebay_swiglu import plain

BLOCKS = (32, 64, 128, 256, 512, 1024)


@dataclasses.dataclass(frozen=True)
class Block:
    """The setting that can be tuned: the columns of the result in a block."""

    columns: int


@dataclasses.dataclass(frozen=True)
class BlockedSwiglu:
    """Computes all columns at once when no block size divides their number.

    `choose` returns the configuration of a call. None: the default configuration.
    """

    name: str = "blocks"
    version: str = "1"
    choose: Callable[[OpProblem], Block] | None = None

    def default_config(self, env: Env, problem: OpProblem) -> Block:
        """Return the largest block of at most 256 columns that divides the result, else all."""
        columns = int(dict(problem.sizes)["out"])
        return Block(max((b for b in BLOCKS if b <= 256 and columns % b == 0), default=columns))

    def candidates(self, env: Env, problem: OpProblem) -> list[Block]:
        """Return every block that divides the result, for `enginebay tune`."""
        columns = int(dict(problem.sizes)["out"])
        return [Block(b) for b in BLOCKS if b < columns and columns % b == 0]

    def tuned(self, choose: Callable[[OpProblem], Block]) -> BlockedSwiglu:
        """Return the same kernel with `choose`, which is called while a call is traced."""
        return dataclasses.replace(self, choose=choose)

    def __call__(self, x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Compute the op; SwigluOp describes it."""
        columns, features = gate.shape
        sizes = (("in", features), ("out", columns), ("dtype", str(x.dtype)))
        problem = OpProblem(x.shape[0], sizes)
        config = self.choose(problem) if self.choose else self.default_config(Env("cpu"), problem)
        if config.columns >= columns:
            return plain.swiglu(x, gate, up)
        weights = (w.reshape(-1, config.columns, features) for w in (gate, up))
        blocks = jax.lax.map(lambda pair: plain.swiglu(x, *pair), tuple(weights))
        return blocks.transpose(1, 0, 2).reshape(x.shape[0], columns)


swiglu = BlockedSwiglu()
