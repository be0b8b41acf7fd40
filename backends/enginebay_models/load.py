"""Loads weights from memory-mapped files to the devices, tensor by tensor and shard by shard. No
weight is in memory twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from enginebay.errors import CheckpointError, ConfigError, explain
from enginebay.model import Model, TensorSource
from enginebay.weights import Quantization, QuantizedArray, Weight, WeightFormat, WeightSpec
from enginebay_models.checkpoint import check_tensors
from enginebay_models.safetensors_file import StoredTensor
from enginebay_models.tensors import Index

Place = Callable[[str, WeightSpec], Sharding | None]
LoadProgress = Callable[[int, int], None]

DTYPES = ("float32", "bfloat16", "float16")
# XLA:CPU uses the memory of a NumPy array without a copy if it is aligned to this.
_ALIGNMENT = 64
# Size of a piece of a tensor: memory in addition to the weights.
_PIECE_BYTES = 32 << 20


def load_weights(
    model: Model,
    stored: Mapping[str, StoredTensor],
    *,
    dtype: str,
    place: Place,
    quantization: Quantization | None = None,
    verify: bool = False,
    progress: LoadProgress | None = None,
) -> dict[str, Weight]:
    """Load every weight of `model` from `stored` tensors, in `dtype`.

    Each shard is built on the host and sent to its devices. `quantization` applies to weights that
    have `num_inputs`. `place` returns the sharding of a weight, None for the default device. Peak
    memory is the weights, _PIECE_BYTES, and, if the devices are not the host's own, one shard (all
    shards of a quantised weight). Raises CheckpointError, which names the tensor, for a tensor that
    is missing, extra, or of a wrong shape or dtype, and for NaN and infinity: in quantised weights
    always, in others with `verify`.
    """
    if dtype not in DTYPES:
        raise ConfigError(explain(f"dtype {dtype!r}", ", ".join(DTYPES), "Choose one of these."))
    form = WeightFormat(dtype, quantization)
    check_tensors(model, stored)
    specs, sources = model.weight_specs(), model.tensor_sources()
    total = sum(stored[name].num_bytes for source in sources.values() for name in source.names)
    done = 0
    weights: dict[str, Weight] = {}
    for path, spec in specs.items():
        tensors = [stored[name] for name in sources[path].names]
        part = _Part(sources[path], tensors, jnp.dtype(dtype), verify=verify)
        arrays = form.stored(spec)
        if isinstance(arrays, QuantizedArray) and quantization is not None:
            quantized = part.quantized(spec, arrays, quantization)
            weights[path] = jax.tree.map(
                lambda array, one, path=path: jax.device_put(array, place(path, one.spec)),
                quantized,
                arrays,
            )
        else:
            weights[path] = _to_devices(part, spec.shape, place(path, spec))
        done += sum(tensor.num_bytes for tensor in part.tensors)
        if progress is not None:
            progress(done, total)
    return weights


class _Part:
    """Builds parts of one weight in the target dtype."""

    def __init__(
        self, source: TensorSource, tensors: list[StoredTensor], dtype: np.dtype, *, verify: bool
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
        self, spec: WeightSpec, arrays: QuantizedArray, quantization: Quantization
    ) -> QuantizedArray:
        """Return the whole weight quantised, as NumPy arrays with the shapes of `arrays`."""
        assert spec.num_inputs is not None, "only such a weight is quantised"
        out = jax.tree.map(lambda a: _aligned_empty(a.spec.shape, jnp.dtype(a.dtype)), arrays)
        for rows, built in self.pieces([(0, size) for size in spec.shape]):
            if has_non_finite(built):
                raise self._non_finite()
            made = quantization.quantize(built.astype(np.float32), spec.num_inputs)
            for whole, piece in zip(jax.tree.leaves(out), jax.tree.leaves(made), strict=True):
                whole[rows] = piece
            del built, made
        return out

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
            if has_non_finite(reader):
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
