"""The interpreter of TPU kernels finds what a device would hide: races, reads out of bounds, memory
nobody wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from enginebay_pallas.interpret import interpreting

X = jnp.ones((2, 8, 128))

Kernel = Callable[[Any, Any, Any, Any], None]


def good(source: Any, target: Any, buffer: Any, semaphore: Any) -> None:
    copy = pltpu.make_async_copy(source.at[1], buffer, semaphore)
    copy.start()
    copy.wait()
    target[...] = buffer[...] + 1


def reads_before_the_copy_is_done(source: Any, target: Any, buffer: Any, semaphore: Any) -> None:
    copy = pltpu.make_async_copy(source.at[1], buffer, semaphore)
    copy.start()
    target[...] = buffer[...] + 1
    copy.wait()


def reads_out_of_bounds(source: Any, target: Any, buffer: Any, semaphore: Any) -> None:
    copy = pltpu.make_async_copy(source.at[2], buffer, semaphore)
    copy.start()
    copy.wait()
    target[...] = buffer[...] + 1


def reads_what_nobody_wrote(source: Any, target: Any, buffer: Any, semaphore: Any) -> None:
    target[...] = buffer[...] + source[0]


def call(kernel: Kernel) -> Callable[[jax.Array], jax.Array]:
    def called(x: jax.Array) -> jax.Array:
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
            in_specs=[
                pl.BlockSpec(
                    memory_space=pltpu.HBM if kernel is not reads_what_nobody_wrote else pltpu.VMEM
                )
            ],
            scratch_shapes=[pltpu.VMEM(x.shape[1:], x.dtype), pltpu.SemaphoreType.DMA],
        )(x)

    return jax.jit(interpreting(called))


def test_a_right_kernel_gives_its_result() -> None:
    assert (np.asarray(call(good)(X)) == 2).all()


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (reads_before_the_copy_is_done, "races with its own DMAs"),
        (reads_out_of_bounds, "Out-of-bounds read"),
    ],
)
def test_faults_are_raised_and_leave_nothing_behind(kernel: Kernel, reason: str) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=reason):
        np.asarray(call(kernel)(X))
    test_a_right_kernel_gives_its_result()


def test_memory_that_nobody_wrote_is_nan() -> None:
    assert np.isnan(np.asarray(call(reads_what_nobody_wrote)(X))).all()


def test_an_earlier_kernels_race_is_raised_too() -> None:
    right, racing = call(good), call(reads_before_the_copy_is_done)
    with pytest.raises(jax.errors.JaxRuntimeError, match="races"):
        np.asarray(jax.jit(lambda x: (racing(x), right(x))[1])(X))
