"""Arrays whose memory is resident only where they were written."""

from __future__ import annotations

import ctypes
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginebay_xla import demand_memory
from enginebay_xla.platforms import CpuPlatform

pytestmark = pytest.mark.skipif(
    not demand_memory.IS_AVAILABLE, reason="only Linux promises zeros for memory given back"
)

SHAPE = (256, 3, 64, 100)  # 75 KiB an entry, which begins within a page of the system
MIB = 2**20


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the system does not say how much memory is resident")


def sharding(num_devices: int = 1) -> jax.sharding.Sharding:
    devices = np.asarray(jax.local_devices(backend="cpu")[:num_devices])
    mesh = jax.sharding.Mesh(devices, ("tensor",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None, "tensor"))


def make(num_devices: int = 1, dtype: str = "float32") -> jax.Array:
    return CpuPlatform().zeros(SHAPE, jnp.dtype(dtype), sharding(num_devices))


write = jax.jit(lambda array, entry: array.at[entry].set(1), donate_argnums=0)


def write_in_place(array: jax.Array, entry: int) -> None:
    """As a step does. Programs that the tests compile quickly write to the whole array."""
    for shard in array.addressable_shards:
        size = shard.data.nbytes // len(shard.data)
        ctypes.memset(shard.data.unsafe_buffer_pointer() + entry * size, 1, size)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_zeros_are_not_resident_until_they_are_written(num_devices: int) -> None:
    make(num_devices)  # compiles
    before = resident_bytes()
    arrays = [make(num_devices) for _ in range(8)]
    assert sum(array.nbytes for array in arrays) > 140 * MIB
    assert resident_bytes() - before < 8 * MIB
    for array in arrays:
        write_in_place(array, 5)
    assert resident_bytes() - before < 8 * MIB
    assert np.asarray(arrays[3])[4:7].any(axis=(1, 2, 3)).tolist() == [False, True, False]


def test_a_donated_step_writes_to_the_same_memory() -> None:
    array = make()
    address = array.unsafe_buffer_pointer()
    for entry in range(3):
        array = write(array, entry)
    assert array.unsafe_buffer_pointer() == address


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("num_devices", [1, 2])
def test_cleared_entries_are_zeros_and_their_neighbours_stay(num_devices: int, dtype: str) -> None:
    ones = np.ones(SHAPE, jnp.dtype(dtype))
    array = jax.device_put(ones, sharding(num_devices)) + jnp.ones((), dtype)
    jax.block_until_ready(array)
    before = resident_bytes()
    CpuPlatform().clear(array, 7, 250)
    if dtype == "float32":
        assert before - resident_bytes() > 0.8 * array.nbytes
    kept = np.asarray(array).astype(np.int32)
    assert not kept[7:250].any()
    assert (kept[:7] == 2).all()
    assert (kept[250:] == 2).all()


def test_memory_that_was_used_before_reads_as_zeros() -> None:
    for _ in range(4):
        array = CpuPlatform().zeros((3, 5, 7), jnp.dtype("float32"), sharding())
        assert not np.asarray(array).any()
        array = jax.block_until_ready(array + 1)
        del array


def test_without_a_call_that_writes_nothing_zeros_are_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demand_memory, "_is_registered", lambda: False)
    before = resident_bytes()
    array = make()
    assert resident_bytes() - before < 4 * MIB
    assert not np.asarray(array[200]).any()
