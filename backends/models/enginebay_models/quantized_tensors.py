"""The seam for checkpoints whose tensors are quantised already: GPTQ, AWQ, compressed-tensors, and
files of other formats.

A checkpoint format makes a QuantizedTensor of each quantised tensor, named and oriented as the
plain tensor would be ([outputs, inputs], for example "model.layers.0.mlp.up_proj.weight"). Its
`form` says how the numbers are stored, without a look at the data; its `read` returns some rows.
The other tensors of the checkpoint stay StoredTensors. With this mapping of both kinds,

 - `quantized_weights(model, tensors)` is the answer of `Checkpoint.quantized_weights`: the arrays
   of each weight of the model, by path. Tensors of different forms that one weight joins, such as
   q, k and v, get a common form without loss (`common_form`). A weight stays plain if one of its
   tensors is plain, if the forms have no common one, or if the model has no `num_inputs` for it;
   its tensors are dequantised while it is loaded.
 - `enginebay_models.load.load_weights(model, tensors, form=..., ...)` loads them.

The same TensorSource of the model serves plain and quantised tensors: `places` builds the weight
from tensors of row numbers, and so finds which row of which tensor each output is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from enginebay.contracts.model import Model, TensorSource
from enginebay.weights import FLOAT, QuantizedArray, StoredArray, WeightSpec
from enginebay_models.safetensors_file import StoredTensor

_PIECE = 1 << 22
# Numbers in a piece of a weight that is made of row numbers.

VALUES: Mapping[str, str] = {
    "int8": "int8",
    "int8_group": "int8",
    "int4": "int4",
    "uint4": "uint4",
    "fp8": "float8_e4m3fn",
}
"""Method -> dtype of its values."""


@dataclasses.dataclass(frozen=True)
class QuantizedForm:
    """How the numbers of a quantised tensor or weight are stored.

    groups: number of scales of an output. `QuantizedArray` describes `method` and `activations`.
    """

    method: str
    groups: int = 1
    scale_dtype: str = "float32"
    has_zero_points: bool = False
    activations: str = FLOAT

    @property
    def value_dtype(self) -> np.dtype:
        """The dtype of the values."""
        return jnp.dtype(VALUES[self.method])

    def arrays(self, spec: WeightSpec) -> QuantizedArray:
        """Return the StoredArrays of a weight. Groups are split over devices as the first dimension
        of the inputs is.
        """
        assert spec.num_inputs is not None, "the weight of another op is not quantised"
        outputs = len(spec.shape) - spec.num_inputs
        axis = spec.axes[outputs] if self.groups > 1 else None
        groups = WeightSpec((*spec.shape[:outputs], self.groups), (*spec.axes[:outputs], axis))
        scales = StoredArray(groups, self.scale_dtype)
        points = StoredArray(groups, self.scale_dtype) if self.has_zero_points else None
        values = StoredArray(spec, VALUES[self.method])
        return QuantizedArray(values, scales, points, self.method, self.activations)

    @classmethod
    def of(cls, arrays: QuantizedArray) -> QuantizedForm:
        """Return the form of StoredArrays."""
        groups, points = arrays.scales.spec.shape[-1], arrays.zero_points is not None
        return cls(arrays.method, groups, arrays.scales.dtype, points, arrays.activations)


@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """One quantised tensor of a checkpoint, [outputs, inputs].

    `read(first, last)` returns the rows first to last - 1 as NumPy arrays of `form`: values
    [rows, inputs], scales and zero points [rows, groups]. `forget` releases the memory that reading
    has used. `num_bytes` are those in the file.
    """

    path: Path
    name: str
    shape: tuple[int, int]
    num_bytes: int
    form: QuantizedForm
    read: Callable[[int, int], QuantizedArray]
    forget: Callable[[], None]

    def view(self) -> Any:
        """Return the tensor for reading as f32, piece by piece."""
        return Dequantized(self)


Tensors = Mapping[str, StoredTensor | QuantizedTensor]
"""The tensors of a checkpoint by name."""


class Dequantized:
    """A quantised tensor that is indexed like an f32 array [outputs, inputs]. Only the indexed rows
    are read and dequantised.
    """

    itemsize = 4
    dtype = np.dtype(np.float32)

    def __init__(self, tensor: QuantizedTensor) -> None:
        self.tensor, self.shape = tensor, tensor.shape

    def __getitem__(self, index: slice | tuple[slice, ...]) -> np.ndarray:
        rows, *others = index if isinstance(index, tuple) else (index,)
        first, last, _ = rows.indices(self.shape[0])
        whole = _dequantized(self.tensor.read(first, max(first, last)))
        return whole[(slice(None), *others)]


def _dequantized(weight: QuantizedArray) -> np.ndarray:
    shares = weight.values.reshape(*weight.scales.shape, -1).astype(np.float32)
    if weight.zero_points is not None:
        shares -= weight.zero_points[..., None].astype(np.float32)
    with np.errstate(invalid="ignore"):  # a scale may be infinite; the loader looks for it
        shares *= weight.scales[..., None].astype(np.float32)
    return np.asarray(shares.reshape(weight.shape))


def common_form(forms: Sequence[QuantizedForm]) -> QuantizedForm | None:
    """Return a form that stores the numbers of all `forms` without loss; None if there is none.

    Signed and unsigned 4 bits meet in uint4, other whole numbers in int8_group. The groups are so
    small that each is inside one group of every form.
    """
    if len(set(forms)) == 1:
        return forms[0]
    methods = {form.method for form in forms}
    if len({form.activations for form in forms}) > 1 or (len(methods) > 1 and "fp8" in methods):
        return None
    groups = math.lcm(*(form.groups for form in forms))
    if len(methods) == 1:
        (method,) = methods
    else:
        method = "uint4" if methods == {"int4", "uint4"} else "int8_group"
    if groups > 1 and method in ("int8", "fp8"):
        return None
    dtypes = {form.scale_dtype for form in forms}
    return QuantizedForm(
        method,
        groups,
        dtypes.pop() if len(dtypes) == 1 else "float32",
        method == "uint4" or any(form.has_zero_points for form in forms),
        forms[0].activations,
    )


def widened(rows: QuantizedArray, form: QuantizedForm) -> QuantizedArray:
    """Return NumPy rows in a form that `common_form` returned for theirs and others."""
    times = form.groups // rows.scales.shape[-1]
    dtype = jnp.dtype(form.scale_dtype)
    scales = np.repeat(rows.scales, times, axis=-1).astype(dtype)
    points = rows.zero_points
    values = rows.values.astype(np.int8) if rows.method != form.method else rows.values
    if form.has_zero_points:
        found = np.zeros_like(scales) if points is None else np.repeat(points, times, axis=-1)
        points = found.astype(dtype)
        if form.method == "uint4" and rows.method == "int4":
            values, points = values + np.int8(8), points + dtype.type(8)
    return QuantizedArray(
        values.astype(form.value_dtype),
        scales,
        points,
        form.method,
        form.activations,
    )


def places(spec: WeightSpec, source: TensorSource) -> np.ndarray:
    """Return the place [*outputs] of each output of a weight among the rows of its tensors, one
    tensor after the other. AssertionError for a source that reorders inputs.
    """
    assert spec.num_inputs is not None, "only the weight of a product has inputs"
    starts = np.cumsum([0, *(rows for rows, _ in source.shapes)])
    numbers = [
        np.broadcast_to(np.arange(start, start + shape[0], dtype=np.int32)[:, None], shape)
        for start, shape in zip(starts, source.shapes, strict=False)
    ]
    whole = tuple(slice(0, size) for size in spec.shape[1:])
    first = (0,) * spec.num_inputs
    step = max(1, _PIECE // math.prod(spec.shape[1:]))
    pieces = [
        source.build(numbers, (slice(i, min(i + step, spec.shape[0])), *whole))[(..., *first)]
        for i in range(0, spec.shape[0], step)
    ]
    columns = [np.broadcast_to(np.arange(n, dtype=np.int32), (m, n)) for m, n in source.shapes]
    outputs = len(spec.shape) - spec.num_inputs
    built = source.build(columns, (slice(0, 1), *whole))[(0,) * outputs].ravel()
    assert (built == np.arange(built.size)).all(), "a quantised tensor keeps the order of inputs"
    return np.concatenate(pieces)


def gather(
    tensors: Sequence[QuantizedTensor], rows: np.ndarray, form: QuantizedForm
) -> QuantizedArray:
    """Return the rows [n] that `places` names, of tensors one after the other, in a common form, as
    a QuantizedArray of NumPy arrays [n, ...].
    """
    starts = np.cumsum([0, *(tensor.shape[0] for tensor in tensors)])
    owners = np.searchsorted(starts, rows, side="right") - 1
    made: list[QuantizedArray] = []
    order: list[np.ndarray] = []
    for number in np.unique(owners):
        mine = np.flatnonzero(owners == number)
        wanted = rows[mine] - starts[number]
        first, last = int(wanted.min()), int(wanted.max()) + 1
        read = widened(tensors[number].read(first, last), form)
        made.append(_picked(read, wanted - first))
        order.append(mine)
    back = np.argsort(np.concatenate(order))
    return _picked(_joined(made), back)


def _joined(parts: Sequence[QuantizedArray]) -> QuantizedArray:
    if len(parts) == 1:
        return parts[0]
    points = [part.zero_points for part in parts if part.zero_points is not None]
    return dataclasses.replace(
        parts[0],
        values=np.concatenate([part.values for part in parts]),
        scales=np.concatenate([part.scales for part in parts]),
        zero_points=np.concatenate(points) if points else None,
    )


def _picked(rows: QuantizedArray, numbers: np.ndarray) -> QuantizedArray:
    if (numbers == np.arange(len(rows.values))).all() and numbers.size == len(rows.values):
        return rows
    points = None if rows.zero_points is None else rows.zero_points[numbers]
    return dataclasses.replace(
        rows, values=rows.values[numbers], scales=rows.scales[numbers], zero_points=points
    )


def quantized_weights(model: Model, tensors: Tensors) -> dict[str, QuantizedArray]:
    """Return the StoredArrays of each weight that the tensors store in fewer bits, by path."""
    sources, found = model.tensor_sources(), {}
    for path, spec in model.weight_specs().items():
        given = [tensors.get(name) for name in sources[path].names]
        forms = [one.form for one in given if isinstance(one, QuantizedTensor)]
        if spec.num_inputs is None or not forms or len(forms) < len(given):
            continue
        form = common_form(forms)
        if form is not None:
            found[path] = form.arrays(spec)
    return found
