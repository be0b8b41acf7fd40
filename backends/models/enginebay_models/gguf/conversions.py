"""Says which weights of a GGUF file are not stored in the types of their tensors, and in which form
they are stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from enginebay.contracts.model import Model
from enginebay.weights import QuantizedArray, WeightFormat
from enginebay_models.gguf.header import GgufTensorInfo
from enginebay_models.quantized_tensors import QuantizedTensor, Tensors


def conversions(
    model: Model,
    tensors: Tensors,
    infos: Mapping[str, GgufTensorInfo],
    form: WeightFormat,
) -> list[str]:
    """Return a sentence for each kind of conversion: tensors of several types that one weight joins
    get a common form, and quantised tensors become plain if they have none.
    """
    found: Counter[tuple[str, str]] = Counter()
    specs = model.weight_specs()
    for path, source in model.tensor_sources().items():
        given = [tensors[name] for name in source.names]
        if not any(isinstance(one, QuantizedTensor) for one in given):
            continue
        types = sorted({infos[one.name].type_name for one in given})
        stored = form.stored(path, specs[path])
        if not isinstance(stored, QuantizedArray):
            found[" and ".join(types), f"plain {form.dtype}"] += 1
        elif len(types) > 1:
            groups = f"{stored.method} with {stored.scales.spec.shape[-1]} groups"
            found[" and ".join(types), groups] += 1
    return [
        f"{types} are joined as {stored} in {count} of {len(specs)} weights"
        for (types, stored), count in sorted(found.items())
    ]
