"""Loads weights from memory-mapped files to the devices, tensor by tensor and shard by shard. No
weight is in memory twice.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from enginebay.contracts.model import Model, TensorSource
from enginebay.errors import CheckpointError, ConfigError, explain
from enginebay.weights import Quantization, QuantizedArray, Weight, WeightFormat, WeightSpec
from enginebay_models.checkpoint import check_tensors
from enginebay_models.quantized_tensors import (
    QuantizedForm,
    QuantizedTensor,
    Tensors,
    gather,
    places,
)
from enginebay_models.safetensors_file import StoredTensor
from enginebay_models.tensors import Index

Place = Callable[[str, WeightSpec], Sharding | None]
LoadProgress = Callable[[int, int], None]

DTYPES = ("float32", "bfloat16", "float16")
# XLA:CPU uses the memory of a NumPy array without a copy if it is aligned to this.
_ALIGNMENT = 64
_NUM_THREADS = min(8, os.cpu_count() or 1)
# Weights that are read at the same time. NumPy copies and converts without the GIL.
_PIECE_BYTES = (32 << 20) // _NUM_THREADS
# Size of a piece of a tensor: memory of each thread in addition to the weights.


def load_weights(
    model: Model,
    stored: Tensors,
    *,
    form: WeightFormat,
    place: Place,
    verify: bool = False,
    progress: LoadProgress | None = None,
) -> dict[str, Weight]:
    """Load every weight of `model` from `stored` tensors, in the form that `form` says.

    Plain weights are read several at a time. Each shard is built on the host and sent to its
    devices. `place` returns the sharding of a weight, None for the default device. Peak memory is
    the weights, and for each thread _PIECE_BYTES and, if the devices are not the host's own, one
    shard (all shards of a quantised weight). Raises
    CheckpointError, which names the tensor, for a tensor that is missing, extra, or of a wrong
    shape, dtype or form, and for NaN and infinity: in quantised weights always, in others with
    `verify`.
    """
    dtype = form.dtype
    if dtype not in DTYPES:
        raise ConfigError(explain(f"dtype {dtype!r}", ", ".join(DTYPES), "Choose one of these."))
    check_tensors(model, stored)
    specs, sources = model.weight_specs(), model.tensor_sources()
    total = sum(stored[name].num_bytes for source in sources.values() for name in source.names)
    done = 0
    weights: dict[str, Weight] = {}

    def load_one(path: str) -> Weight:
        spec = specs[path]
        tensors = [stored[name] for name in sources[path].names]
        arrays = form.stored(path, spec)
        part = _Part(sources[path], tensors, jnp.dtype(spec.dtype or dtype), verify=verify)
        if not isinstance(arrays, QuantizedArray):
            return _to_devices(part, spec.shape, place(path, spec))
        made: QuantizedArray = jax.tree.map(
            lambda array, one: jax.device_put(array, place(path, one.spec)),
            part.quantized(spec, arrays, form.quantization),
            arrays,
        )
        return made

    # Blocks of a quantised file become arrays in many short calls, which threads would delay.
    as_stored = form.quantized and form.quantization is None
    with ThreadPoolExecutor(1 if as_stored else _NUM_THREADS, "enginebay-load") as pool:
        for path, weight in zip(specs, pool.map(load_one, specs), strict=True):
            weights[path] = weight
            done += sum(stored[name].num_bytes for name in sources[path].names)
            if progress is not None:
                progress(done, total)
    return weights


class _Part:
    """Builds parts of one weight in the target dtype."""

    def __init__(
        self,
        source: TensorSource,
        tensors: Sequence[StoredTensor | QuantizedTensor],
        dtype: np.dtype,
        *,
        verify: bool,
    ) -> None:
        self.source = source
        self.tensors = tensors
        self.dtype = dtype
        self.verify = verify
        self.readers = [tensor.view() for tensor in tensors]

    def read(self, index: Index, shape: tuple[int, ...]) -> np.ndarray:
        """Read the part at `index` of a weight of this shape, piece by piece, into new memory."""
        bounds = [piece.indices(size)[:2] for piece, size in zip(index, shape, strict=True)]
        out = _aligned_empty(tuple(stop - start for start, stop in bounds), self.dtype)
        for rows, built in self.pieces(bounds):
            with np.errstate(over="ignore", invalid="ignore"):
                np.copyto(out[rows], built, casting="unsafe")
            if self.verify and (has_non_finite(built) or has_non_finite(out[rows])):
                raise self._non_finite()
            del built
        return out

    def quantized(
        self, spec: WeightSpec, arrays: QuantizedArray, quantization: Quantization | None
    ) -> QuantizedArray:
        """Return the whole weight as NumPy arrays with the shapes of `arrays`: quantised, or with
        `quantization` None as the tensors store it.
        """
        out = jax.tree.map(lambda a: _aligned_empty(a.spec.shape, jnp.dtype(a.dtype)), arrays)
        made = (
            self._as_stored(spec, arrays)
            if quantization is None
            else self._rounded(spec, arrays, quantization)
        )
        for rows, piece in made:
            for whole, values in zip(jax.tree.leaves(out), jax.tree.leaves(piece), strict=True):
                whole.reshape(-1, *values.shape[1:])[rows] = values
            del piece
        return out

    def _rounded(
        self, spec: WeightSpec, arrays: QuantizedArray, quantization: Quantization
    ) -> Iterator[tuple[slice, QuantizedArray]]:
        for rows, built in self.pieces([(0, size) for size in spec.shape]):
            if has_non_finite(built):
                raise self._non_finite()
            yield rows, quantization.quantize(built.astype(np.float32), arrays)

    def _as_stored(
        self, spec: WeightSpec, arrays: QuantizedArray
    ) -> Iterator[tuple[slice, QuantizedArray]]:
        """Yield some outputs of the weight, counted as if it had one dimension of outputs."""
        tensors = [one for one in self.tensors if isinstance(one, QuantizedTensor)]
        for plain in (one for one in self.tensors if isinstance(one, StoredTensor)):
            given = f"tensor {plain.name!r} in {plain.path.name} is {plain.dtype}"
            raise CheckpointError(
                given,
                f"a tensor that is stored by {arrays.method}, as the model was planned",
                "Make the engine for this checkpoint.",
            )
        rows, wanted = places(spec, self.source).ravel(), QuantizedForm.of(arrays)
        step = max(
            1,
            (_PIECE_BYTES >> 3)
            // math.prod(spec.shape[len(spec.shape) - (spec.num_inputs or 1) :]),
        )
        for first in range(0, rows.size, step):
            made = gather(tensors, rows[first : first + step], wanted)
            if not np.isfinite(made.scales.astype(np.float32)).all():
                raise self._non_finite()
            yield slice(first, first + step), made
            for tensor in tensors:
                tensor.forget()

    def pieces(self, bounds: Sequence[tuple[int, int]]) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield the part of the weight within `bounds`, piece by piece.

        `bounds` has (start, stop) per dimension. A piece is (rows of the first dimension, counted
        from its start, their values in the dtype of the file).
        """
        (first, last), *others = bounds
        item = self.readers[0].itemsize if self.readers else self.dtype.itemsize
        row_bytes = math.prod(stop - start for start, stop in others) * item
        step = max(1, _PIECE_BYTES // max(row_bytes, 1))
        rest = [slice(*bound) for bound in others]
        for row in range(first, last, step):
            stop = min(row + step, last)
            yield (
                slice(row - first, stop - first),
                self.source.build(self.readers, (slice(row, stop), *rest)),
            )
            for tensor in self.tensors:
                tensor.forget()

    def _non_finite(self) -> CheckpointError:
        for tensor, reader in zip(self.tensors, self.readers, strict=True):
            if has_non_finite(reader[:]):
                given = f"tensor {tensor.name!r} in {tensor.path.name} holds NaN or infinity"
                return CheckpointError(
                    explain(
                        given, "finite weights", "Fetch the checkpoint again, or choose another."
                    )
                )
        names = ", ".join(repr(tensor.name) for tensor in self.tensors)
        given = f"tensor {names} overflows {self.dtype.name}"
        return CheckpointError(
            explain(given, "weights that fit the dtype", "Choose dtype bfloat16 or float32.")
        )


def _to_devices(part: _Part, shape: tuple[int, ...], sharding: Sharding | None) -> jax.Array:
    whole = (slice(None),) * len(shape)
    if sharding is None:
        return jax.block_until_ready(jax.device_put(part.read(whole, shape)))
    by_index: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        pieces = whole if index is None else index
        bounds = tuple(piece.indices(size)[:2] for piece, size in zip(pieces, shape, strict=True))
        by_index.setdefault(bounds, []).append(device)
    shards = []
    for bounds, devices in by_index.items():
        data = part.read(tuple(slice(*bound) for bound in bounds), shape)
        shards += [jax.block_until_ready(jax.device_put(data, device)) for device in devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


def has_non_finite(values: np.ndarray) -> bool:
    """Return whether values contain NaN or infinity; it reads bits only."""
    if values.dtype == np.float32:
        bits, mask = values.view(np.uint32), 0x7F800000
    else:
        bits, mask = values.view(np.uint16), 0x7C00 if values.dtype == np.float16 else 0x7F80
    # NaN and infinity have an exponent of all ones. One maximum over the bits finds it without an
    # array of flags.
    return bool(bits.size) and bool(np.bitwise_and(bits, bits.dtype.type(mask)).max() == mask)
