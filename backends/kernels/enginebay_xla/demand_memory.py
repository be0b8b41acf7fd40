"""Arrays on a Linux CPU whose memory becomes resident where they are written, one page of the
system after the other, and can be given back.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from enginebay.contracts.platform import Compiled
from enginebay.errors import InternalError

IS_AVAILABLE = sys.platform == "linux"
"""Whether memory that was given back reads as zeros, as Linux promises for private memory."""


def make_zeros(
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: Sharding,
    compiled: Compiled | None = None,
) -> jax.Array:
    """Return an array of zeros on CPUs, as Platform.zeros does. Its memory is not resident; on a
    single device it never was.
    """
    if len(sharding.device_set) == 1 and _is_registered():
        make = jax.ffi.ffi_call(UNWRITTEN, jax.ShapeDtypeStruct(shape, dtype))
    else:
        make = functools.partial(jnp.zeros, shape, dtype)
    made = (compiled or functools.partial(jax.jit, out_shardings=sharding))(make)()
    if math.prod(shape):
        clear(jax.block_until_ready(made), 0, shape[0])
    return made


def clear(array: jax.Array, first: int, last: int) -> None:
    """Make the entries `first` to `last` - 1 of an array's first axis zeros, in place, and give
    their memory back. The first axis is not sharded. No program may be using the array, and nothing
    else may share its memory.
    """
    if not 0 <= first <= last <= array.shape[0]:
        raise InternalError(
            f"entries {first} to {last} - 1 of an array {list(array.shape)} are cleared"
        )
    for shard in array.addressable_shards:
        data = shard.data
        entry_bytes = data.on_device_size_in_bytes() // data.shape[0]
        start = data.unsafe_buffer_pointer()
        _clear_bytes(start + first * entry_bytes, start + last * entry_bytes)


def _clear_bytes(start: int, end: int) -> None:
    """Make the bytes from the address `start` to before `end` zeros. Pages of the system that other
    bytes share stay resident.
    """
    size = mmap.PAGESIZE
    first, last = -(-start // size) * size, end // size * size
    if first >= last or _libc().madvise(first, last - first, mmap.MADV_DONTNEED):
        ctypes.memset(start, 0, end - start)
        return
    ctypes.memset(start, 0, first - start)
    ctypes.memset(last, 0, end - last)


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


UNWRITTEN = "enginebay_unwritten"
"""The name of a call that does not write its result: JAX has such a call for other devices only."""


@functools.cache
def _is_registered() -> bool:
    """Register the call. Returns whether XLA accepts it."""
    try:
        jax.ffi.register_ffi_target(UNWRITTEN, jax.ffi.pycapsule(_no_writes), platform="cpu")
    except RuntimeError:  # XLA's interface has changed
        return False
    return True


# The beginnings of the structures that XLA passes to a foreign function: xla/ffi/api/c_api.h, which
# promises their order.


class _Version(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    )


class _Api(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("version", _Version),
    )


class _Metadata(ctypes.Structure):
    _fields_ = (("struct_size", ctypes.c_size_t), ("version", _Version))


class _Extension(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("kind", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.POINTER(_Metadata)),
    )


class _CallFrame(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.POINTER(_Extension)),
        ("api", ctypes.POINTER(_Api)),
    )


_METADATA = 1
"""The kind of the extension by which XLA asks for the version of a function."""


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_CallFrame))
def _no_writes(frame: Any) -> None:
    """Write nothing. When XLA asks for the version of the interface, return XLA's own."""
    extension, api = frame.contents.extension, frame.contents.api
    if extension and api and extension.contents.kind == _METADATA:
        asked, own = extension.contents.metadata.contents.version, api.contents.version
        asked.major, asked.minor = own.major, own.minor
