"""Triton kernels interpreted on the host: right results inside jit, and faults that a GPU would
hide are found.
"""

import os
import signal
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason='triton is not installed: the extra "gpu" brings it')

from enginebay.errors import UnsupportedError
from enginebay_triton.call import Launch
from enginebay_triton.interpreter import InterpreterWorker, interpret
from tests.unit.triton import faults

F32 = jnp.float32
CALLBACK_ERRORS = (
    jax.errors.JaxRuntimeError,
    ValueError,
)  # which one depends on where jit ran the call-back


def shape(*sizes: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def add_in_place(x: Any, length: Any, y: Any) -> Any:
    how = Launch((2,), (shape(2, dtype=y.dtype),), {"BLOCK": 8}, num_in_place=1)
    return interpret(faults.add_in_place, [x, length, y], how)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_kernel_gives_what_numpy_gives_inside_jit_and_with_a_donated_array(dtype: str) -> None:
    x = np.arange(16, dtype=dtype)
    step = jax.jit(add_in_place, donate_argnums=2)
    y, sums = step(jnp.asarray(x), jnp.asarray([11], jnp.int32), jnp.ones(16, dtype))
    expected = np.where(np.arange(16) < 11, x + 1, 1)
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(sums, [expected[:8].sum(), expected[8:11].sum()])


def test_results_of_one_kernel_go_into_the_next() -> None:
    @jax.jit
    def twice(x: jax.Array, y: jax.Array) -> jax.Array:
        length = jnp.asarray([16], jnp.int32)
        return add_in_place(x, length, add_in_place(x, length, y)[0])[0]

    np.testing.assert_array_equal(twice(jnp.ones(16), jnp.zeros(16)), np.full(16, 2.0))


def test_this_process_goes_on_compiling() -> None:
    import triton

    add_in_place(jnp.ones(16), jnp.asarray([16], jnp.int32), jnp.zeros(16))
    assert type(faults.add_in_place).__name__ == "JITFunction"
    assert isinstance(faults.total, triton.JITFunction)
    assert "TRITON_INTERPRET" not in os.environ


def test_bfloat16_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedError, match="bfloat16"):
        add_in_place(
            jnp.ones(16, "bfloat16"), jnp.asarray([16], jnp.int32), jnp.zeros(16, "bfloat16")
        )


@pytest.mark.parametrize("page", [3, -1, 1 << 30])
def test_a_read_of_a_page_that_is_not_there_is_found(page: int) -> None:
    run = jax.jit(
        lambda cache, table: interpret(
            faults.copy_page, [cache, table], Launch((2,), (shape(2, 4),), {"PAGE": 4})
        )
    )
    cache = jnp.arange(12.0)
    (good,) = run(cache, jnp.asarray([2, 0], jnp.int32))
    np.testing.assert_array_equal(good, [[8, 9, 10, 11], [0, 1, 2, 3]])
    with pytest.raises(CALLBACK_ERRORS, match=r"copy_page.*reads 4 places outside of cache_ptr"):
        jax.block_until_ready(run(cache, jnp.asarray([2, page], jnp.int32)))


@pytest.mark.parametrize("slot", [-1, 12])
def test_a_write_outside_of_the_cache_is_found(slot: int) -> None:
    run = jax.jit(
        lambda x, slots, cache: interpret(
            faults.write_slots, [x, slots, cache], Launch((2,), (), {}, num_in_place=1)
        )
    )
    (good,) = run(jnp.ones(2), jnp.asarray([3, 11], jnp.int32), jnp.zeros(12))
    assert np.flatnonzero(good).tolist() == [3, 11]
    with pytest.raises(CALLBACK_ERRORS, match="writes 1 places outside of cache_ptr"):
        jax.block_until_ready(run(jnp.ones(2), jnp.asarray([3, slot], jnp.int32), jnp.zeros(12)))


def test_a_mask_off_by_one_reads_outside_of_a_full_array() -> None:
    how = Launch((1,), (shape(1),), {"BLOCK": 16})
    (result,) = interpret(faults.sum_up_to, [jnp.ones(9), jnp.asarray([8], jnp.int32)], how)
    assert float(result[0]) == 9.0  # one too many: only a comparison with the reference shows it
    with pytest.raises(CALLBACK_ERRORS, match="outside of x_ptr"):
        jax.block_until_ready(
            interpret(faults.sum_up_to, [jnp.ones(9), jnp.asarray([9], jnp.int32)], how)
        )


def test_what_nobody_wrote_is_no_number() -> None:
    (result,) = interpret(
        faults.half_written, [jnp.ones(8)], Launch((1,), (shape(8),), {"BLOCK": 8})
    )
    np.testing.assert_array_equal(np.isnan(result), np.arange(8) >= 4)


def test_a_race_between_two_programs_is_found() -> None:
    how = Launch((2,), (), {"BLOCK": 8}, num_in_place=1)
    with pytest.raises(CALLBACK_ERRORS, match="a race"):
        jax.block_until_ready(interpret(faults.neighbour, [jnp.ones(16)], how))


def test_a_worker_that_dies_is_told_of_and_replaced() -> None:
    worker = InterpreterWorker()
    try:
        place = ("tests.unit.triton.faults", faults.__file__, "half_written")
        order = (place, (1,), [np.ones(8, np.float32)], 0, [((8,), "float32")], {"BLOCK": 8})
        assert worker.run(order)[0].shape == (8,)
        first = worker.process_id
        assert first is not None
        os.kill(first, signal.SIGKILL)
        os.waitid(
            os.P_PID, first, os.WEXITED | os.WNOWAIT
        )  # dead; its parent may still ask how it ended
        assert worker.run(order)[0].shape == (8,)
        assert worker.process_id not in (None, first)
    finally:
        worker.close()


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's wheels are for Linux")
def test_a_kernel_that_fails_tells_its_own_error() -> None:
    with pytest.raises(CALLBACK_ERRORS, match=r"arange"):
        jax.block_until_ready(
            interpret(faults.half_written, [jnp.ones(7)], Launch((1,), (shape(7),), {"BLOCK": 7}))
        )
