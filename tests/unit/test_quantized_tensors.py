"""Checkpoints with quantised tensors: how tensors of several forms join to weights."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginebay.errors import CheckpointError
from enginebay.weights import QuantizedArray, WeightFormat
from enginebay_models.checkpoint import find_tensors
from enginebay_models.load import load_weights
from enginebay_models.quantized_tensors import (
    VALUES,
    QuantizedForm,
    QuantizedTensor,
    Tensors,
    common_form,
    quantized_weights,
)
from enginebay_testing.oracle import quantized_weight
from tests.unit.checkpoints import model_of, random_tensors, write

ATTENTION = "model.layers.0.self_attn"
Q, K, V = (f"{ATTENTION}.{one}_proj.weight" for one in "qkv")


def tensor_of(name: str, form: QuantizedForm, shape: tuple[int, int]) -> QuantizedTensor:
    """A tensor of random numbers in a form."""
    rng = np.random.default_rng(len(name) + shape[0])
    low = 0 if form.method == "uint4" else -7
    values = rng.integers(low, 8, shape).astype(jnp.dtype(VALUES[form.method]))
    dtype = jnp.dtype(form.scale_dtype)
    scales = rng.uniform(0.01, 0.1, (shape[0], form.groups)).astype(dtype)
    points = rng.uniform(-2, 9, scales.shape).astype(dtype) if form.has_zero_points else None

    def read(first: int, last: int) -> QuantizedArray:
        kept = None if points is None else points[first:last]
        return QuantizedArray(
            values[first:last], scales[first:last], kept, form.method, form.activations
        )

    return QuantizedTensor(Path("x"), name, shape, values.size, form, read, lambda: None)


def some_quantized(folder: Path, forms: dict[str, QuantizedForm]) -> Tensors:
    """A checkpoint in which the tensors of `forms` are quantised."""
    tensors: dict[str, object] = dict(find_tensors(write(folder, random_tensors(model_of()))))
    for name, form in forms.items():
        rows, inputs = tensors[name].shape  # type: ignore[attr-defined]
        tensors[name] = tensor_of(name, form, (rows, inputs))
    return tensors  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("forms", "common"),
    [
        ({Q: QuantizedForm("int4", 2)} | dict.fromkeys((K, V), QuantizedForm("int4", 4)),
         QuantizedForm("int4", 4)),
        ({Q: QuantizedForm("int4", 2, "float16"), K: QuantizedForm("uint4", 2, "float16", True),
          V: QuantizedForm("uint4", 4, "float16", True)},
         QuantizedForm("uint4", 4, "float16", True)),
        ({Q: QuantizedForm("uint4", 2, "float16", True), K: QuantizedForm("int8_group", 4),
          V: QuantizedForm("int8")}, QuantizedForm("int8_group", 4, "float32", True)),
        ({Q: QuantizedForm("fp8"), K: QuantizedForm("int8"), V: QuantizedForm("int8")}, None),
        ({Q: QuantizedForm("int8"), K: QuantizedForm("int8")}, None),
    ],
)  # fmt: skip
def test_tensors_of_several_forms_join_to_a_weight_without_loss(
    forms: dict[str, QuantizedForm], common: QuantizedForm | None, tmp_path: Path
) -> None:
    """The weight has the numbers of its dequantised tensors, also where it stays plain."""
    tensors, model = some_quantized(tmp_path, forms), model_of()
    found = quantized_weights(model, tensors)
    assert [*found] == ([] if common is None else ["layers.0.attention.qkv"])
    if common is not None:
        assert QuantizedForm.of(found["layers.0.attention.qkv"]) == common
    plain = load_weights(model, tensors, form=WeightFormat("float32"), place=lambda *_: None)
    form = WeightFormat("float32", found, "mine")
    for path, weight in load_weights(model, tensors, form=form, place=lambda *_: None).items():
        arrays = form.stored(path, model.weight_specs()[path])
        shapes = [one.spec.shape for one in jax.tree.leaves(arrays)]
        assert [one.shape for one in jax.tree.leaves(weight)] == shapes
        if isinstance(weight, QuantizedArray):
            np.testing.assert_allclose(quantized_weight(weight), plain[path], rtol=1e-6, atol=1e-6)
        else:
            np.testing.assert_array_equal(weight, plain[path])


def test_a_common_form_keeps_the_rounding_of_inputs() -> None:
    rounded = QuantizedForm("int8", activations="int8")
    assert common_form([rounded, rounded]) == rounded
    assert common_form([rounded, QuantizedForm("int8")]) is None


def test_another_checkpoint_must_be_stored_as_the_plan_says(tmp_path: Path) -> None:
    forms = dict.fromkeys((Q, K, V), QuantizedForm("int8"))
    tensors, model = some_quantized(tmp_path, forms), model_of()
    form = WeightFormat("float32", quantized_weights(model, tensors), "mine")
    plain = find_tensors(tmp_path)
    with pytest.raises(CheckpointError, match=rf"{Q}' in model.safetensors is F32.*int8"):
        load_weights(model, plain, form=form, place=lambda *_: None)


def test_a_scale_that_is_not_finite_is_refused_by_name(tmp_path: Path) -> None:
    tensors, model = dict(some_quantized(tmp_path, {})), model_of()
    name = "model.layers.1.mlp.up_proj.weight"
    good = tensor_of(name, QuantizedForm("int8"), (24, 16))
    read = good.read

    def broken(first: int, last: int) -> QuantizedArray:
        rows = read(first, last)
        rows.scales[-1] = np.inf
        return rows

    tensors[name] = QuantizedTensor(
        good.path, name, good.shape, good.num_bytes, good.form, broken, good.forget
    )
    form = WeightFormat("float32", quantized_weights(model, tensors), "mine")
    with pytest.raises(CheckpointError, match=name):
        load_weights(model, tensors, form=form, place=lambda *_: None)
