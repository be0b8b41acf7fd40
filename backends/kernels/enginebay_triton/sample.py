"""The op sample in Triton: applies top_k, top_p and min_p and draws a token, without sorting."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from enginebay_triton.call import Launch, Launcher, launch, require_versions
from enginebay_triton.interpreter import interpret, require

require_versions()

from enginebay_triton.sample_kernels import sample_kernel  # noqa: E402  # needs Triton


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """Tokens per iteration, and how many of a row's best tokens are kept for the search; warps."""

    block: int = 4096
    capacity: int = 4096
    num_warps: int = 16


DEFAULT = SampleConfig()


@dataclasses.dataclass(frozen=True)
class Sample:
    """The op sample; SampleOp describes it.

    A row is read three times when the tokens that top_k and top_p keep are among the `capacity`
    best ones. Otherwise, in a flat distribution, it is read about sixty times.
    """

    launcher: Launcher = launch
    config: SampleConfig = DEFAULT

    def __call__(
        self,
        z: jax.Array,
        seeds: jax.Array,
        *,
        top_k: jax.Array,
        top_p: jax.Array,
        min_p: jax.Array,
    ) -> jax.Array:
        """Return one token id per row: int32 [S] from z f32 [S, vocab]."""
        num_rows, vocab = z.shape
        whole = 1 << (vocab - 1).bit_length()
        config = self.config
        room = (num_rows, min(config.capacity, whole))
        how = Launch(
            (num_rows,),
            (
                jax.ShapeDtypeStruct((num_rows,), jnp.int32),
                jax.ShapeDtypeStruct(room, jnp.float32),
                jax.ShapeDtypeStruct(room, jnp.int32),
            ),
            {"VOCAB": vocab, "BLOCK": min(config.block, whole), "CAPACITY": room[1]},
            num_warps=config.num_warps,
            num_stages=1,
        )
        tokens, _, _ = self.launcher(sample_kernel, [z, seeds, top_k, top_p, jnp.log(min_p)], how)
        return tokens

    def interpreted(self) -> Sample:
        """Return the same op in Triton's interpreter; raises UnsupportedError without Triton."""
        require()
        return dataclasses.replace(self, launcher=interpret)


sample = Sample()
