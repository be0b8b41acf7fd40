"""Unpacks words of 32 bits of quantised checkpoints, checks the tensors of a layer, and makes its
QuantizedTensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from enginebay.errors import CheckpointError, shown
from enginebay.weights import QuantizedArray
from enginebay_models.quantized_tensors import QuantizedForm, QuantizedTensor
from enginebay_models.safetensors_file import StoredTensor

WORD_BITS = 32
Stored = Mapping[str, StoredTensor]
"""The tensors of a checkpoint's files, by name."""


def unpack(words: np.ndarray, bits: int, order: Sequence[int] = ()) -> np.ndarray:
    """Return the numbers uint8 [rows, columns * 32 / bits] in words int32 [rows, columns], from the
    lowest bits of a word up. `order`: the place of each number of a word, if it is another one.
    """
    shifts = np.arange(0, WORD_BITS, bits, dtype=np.uint32)
    numbers = (words.view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    small = numbers.astype(np.uint8)
    if order:
        small = small[..., np.argsort(order)]
    return small.reshape(words.shape[0], -1)


class PackedModule:
    """The tensors of one quantised linear layer, by the last part of their names.

    `prefix` is the name of the layer, such as "model.layers.0.mlp.up_proj". Each tensor is checked
    when it is taken.
    """

    def __init__(self, prefix: str, stored: Stored, method: str) -> None:
        self.prefix, self.method = prefix, method
        self._stored = stored

    def has(self, part: str) -> bool:
        """Return whether the checkpoint has this tensor of the layer."""
        return f"{self.prefix}.{part}" in self._stored

    def take(self, part: str, dtypes: Sequence[str]) -> StoredTensor:
        """Return a tensor; CheckpointError if it is missing or has another dtype."""
        name = f"{self.prefix}.{part}"
        if name not in self._stored:
            raise CheckpointError(
                f"the checkpoint lacks tensor {name!r} of a {self.method} layer",
                f"all tensors of each {self.method} layer",
                "Fetch the checkpoint again.",
            )
        tensor = self._stored[name]
        if tensor.dtype not in dtypes:
            raise self.wrong(tensor, f"is {tensor.dtype}", " or ".join(dtypes))
        return tensor

    def shaped(self, part: str, dtypes: Sequence[str], shape: tuple[int, ...]) -> StoredTensor:
        """Return a tensor; CheckpointError if it is missing or has another dtype or shape."""
        tensor = self.take(part, dtypes)
        if tensor.shape != shape:
            raise self.wrong(tensor, f"has shape {list(tensor.shape)}", str(list(shape)))
        return tensor

    def wrong(self, tensor: StoredTensor, what: str, allowed: str) -> CheckpointError:
        """Return the error for a tensor that does not fit the layer."""
        return CheckpointError(
            f"tensor {tensor.name!r} ({tensor.dtype}) in {tensor.path.name} {what}",
            f"{allowed}, for {self.method} as config.json describes it",
            "Correct quantization_config in config.json, or fetch the checkpoint again.",
        )

    def tensor(
        self,
        parts: Sequence[StoredTensor],
        shape: tuple[int, int],
        form: QuantizedForm,
        read: Callable[[int, int], QuantizedArray],
    ) -> QuantizedTensor:
        """Return the weight of the layer, which is read from `parts`."""

        def forget() -> None:
            for part in parts:
                part.forget()

        return QuantizedTensor(
            path=parts[0].path,
            name=f"{self.prefix}.weight",
            shape=shape,
            num_bytes=sum(part.num_bytes for part in parts),
            form=form,
            read=read,
            forget=forget,
        )


def num_groups(module: PackedModule, tensor: StoredTensor, inputs: int, size: int) -> int:
    """Return the number of groups of `size` inputs (-1: one group); CheckpointError if they do not
    divide the inputs.
    """
    if size == -1:
        return 1
    if inputs % size:
        raise module.wrong(tensor, f"has {inputs} inputs", f"a multiple of group_size = {size}")
    return inputs // size


def whole_numbers(value: object, name: str, allowed: Sequence[int]) -> int:
    """Return a field of quantization_config that must be one of some whole numbers."""
    if isinstance(value, bool) or not isinstance(value, int) or value not in allowed:
        raise refused(name, value, ", ".join(map(str, allowed)))
    return value


def refused(name: str, value: object, allowed: str) -> CheckpointError:
    """Return the error for a field of quantization_config that is wrong or not served."""
    return CheckpointError(
        f"config.json has quantization_config.{name} = {shown(value)}",
        allowed,
        "Choose a checkpoint that is quantised so, or one without quantisation.",
    )
