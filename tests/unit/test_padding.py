"""The padding of a step is rows of zeros, which products in C++ skip; so fewer sizes of steps are
compiled.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginebay.compose.binding import OpsBinder
from enginebay.compose.composition import make_plan
from enginebay.config import EngineConfig
from enginebay.contracts.step_key import StepKey
from enginebay.errors import UnsupportedError
from enginebay.ops.batches import derive_batch
from enginebay.ops.spec import Bucket
from enginebay.weights import QuantizedArray
from enginebay_runtime.buckets import default_sizes
from enginebay_runtime.geometry import Geometry
from enginebay_runtime.programs import parts_of
from tests.unit.checkpoints import model_of, random_tensors, write

CPU: dict[str, Any] = {
    "max_num_seqs": 32,
    "max_num_batched_tokens": 1024,
    "max_model_len": 4096,
    "min_rows": 1,
    "ragged_decode": True,
    "one_prefill_width": True,
}
NUM_IN, NUM_OUT, NUM_LAYERS = 64, 5, 2


def native(name: str) -> Any:
    try:
        return getattr(importlib.import_module(f"enginebay_native.{name}"), name)
    except UnsupportedError as error:
        pytest.skip(str(error))


def weight_of(form: str, *axes: int) -> Any:
    """A weight whose products are all NaN, also those of zeros."""
    shape = (*axes, NUM_OUT, NUM_IN)
    if form in ("float32", "bfloat16"):
        return jnp.full(shape, jnp.nan, form)
    method, _, activations = form.partition("/")
    dtype = {"int8_group": jnp.int8, "uint4": jnp.uint4}.get(method, method)
    groups = (*axes, NUM_OUT, 1 if method == "int8" else 2)
    points = jnp.ones(groups) if method in ("int8_group", "uint4") else None
    values, scales = jnp.ones(shape, dtype), jnp.full(groups, jnp.nan)
    return QuantizedArray(values, scales, points, method, activations or "float")


FORMS = [
    "float32",
    "int8_group",
    *(
        pytest.param(form, marks=pytest.mark.long)
        for form in ("bfloat16", "int4", "uint4", "int8/int8", "int8_group/int8_group")
    ),
]


def rows_of(form: str, num_rows: int, used: list[int]) -> jax.Array:
    """Rows of zeros, one of them with a negative sign; those in `used` have a single number."""
    x = jnp.zeros((num_rows, NUM_IN)).at[-1].set(-0.0)
    return (
        x.at[jnp.array(used), NUM_IN - 1].set(1).astype("float32" if form != "bfloat16" else form)
    )


@pytest.mark.xdist_group("native")
@pytest.mark.parametrize("form", FORMS)
def test_products_do_not_read_weights_for_rows_of_zeros_at_the_end(form: str) -> None:
    linear, weight = native("linear"), weight_of(form)
    free = linear.free_padding_rows(
        {"dtypes": {form}} if form in ("float32", "bfloat16") else {"quantizations": {form}}
    )
    sizes = [min(free, each) for each in (7, 128, 300)]
    used = [[0, 3], [5], [0, 1, 170]]
    x = [rows_of(form, n, [u for u in each if u < n]) for n, each in zip(sizes, used, strict=True)]
    products = jax.jit(lambda x, weight: [linear(each, weight) for each in x])(x, weight)
    for rows, product in zip(x, products, strict=True):
        last = int(np.flatnonzero(np.asarray(rows, np.float32).any(axis=1))[-1])
        got = np.asarray(product, np.float32)
        assert np.isnan(got[last]).all()
        assert not got[last + 1 :].any()


@pytest.mark.long
@pytest.mark.xdist_group("native")
@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "int4"])
def test_experts_are_not_read_for_rows_of_zeros(form: str) -> None:
    grouped, sizes = native("grouped_linear"), jnp.array([4, 3, 2], jnp.int32)
    x = rows_of(form, 10, [0, 7])
    product = jax.jit(grouped)(x, weight_of(form, 3), sizes)
    is_nan = np.isnan(np.asarray(product, np.float32)).all(axis=1)
    assert list(np.flatnonzero(is_nan)) == [0, 7]
    assert not np.asarray(product, np.float32)[~is_nan].any()


def test_hidden_states_are_zeros_on_padding(tmp_path: Path) -> None:
    fields = {"num_hidden_layers": NUM_LAYERS}
    write(tmp_path, random_tensors(model_of(**fields)), **fields)
    plan = make_plan(EngineConfig(model=str(tmp_path), dtype="float32", compile_cache="off"))
    model, layout = plan.model, plan.kernels.layout_type(3, 16, 2, 4, "float32")
    tensors = plan.load_weights()
    for bucket, q_lens in (
        (Bucket(3, 3, 1, 1, 16, "decode"), jnp.ones(3, jnp.int32)),
        (Bucket(8, 3, 1, 8, 16, "mixed"), jnp.array([3, 2, 0])),
    ):
        ops = OpsBinder(plan.kernels, model.info, plan.placement)(bucket, {"full": layout})
        kv_lens = jnp.array([3, 2, 0])
        batch = derive_batch(q_lens, kv_lens, jnp.arange(3)[:, None], 16, bucket)

        def step(weights: Any, bucket: Bucket = bucket, ops: Any = ops, batch: Any = batch) -> Any:
            ids, batches = jnp.ones(bucket.tokens, int), {"full": batch}
            cache = {"full": (layout.init(),) * NUM_LAYERS}
            return model.hidden(weights, ops.in_step(batches), ids, cache, batches)[0]

        hidden = np.asarray(jax.jit(step)(tensors))
        used = np.asarray(batch.seq_ids) < bucket.seqs
        assert hidden[used].any(axis=1).all()
        assert not hidden[~used].any()


def programs(free: int) -> set[StepKey]:
    steps = Geometry(
        default_sizes(**CPU, free_padding_rows=free), 64, 4096, compact_decode=False
    ).all_steps()
    return {part for key in steps for part in parts_of(key)}


def test_an_engine_has_few_programs_where_padding_takes_no_time() -> None:
    assert len(programs(sys.maxsize)) == 12
    assert len(programs(128)) == 13
    assert len(programs(0)) == 20
    sizes = default_sizes(**CPU, free_padding_rows=128)
    assert sizes.decode_rows == (1, 4, 8, 16, 32)
    assert sizes.prefill_tokens == (32, 128, 256, 512, 1024)


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({"dtype": "float32"}, 128),
        ({"dtype": "bfloat16"}, 48),
        ({"dtype": "bfloat16", "weight_dtype": "float32"}, 0),
        ({"dtype": "float32", "quantization": "int8"}, sys.maxsize),
        ({"dtype": "float32", "kernels": {"linear": "xla"}}, 0),
        ({"dtype": "float32", "kernels": {"grouped_linear": "xla"}}, 0),
    ],
)
def test_an_engine_knows_how_many_rows_its_products_skip(
    settings: dict[str, Any], rows: int, tmp_path: Path
) -> None:
    native("linear")
    write(tmp_path, random_tensors(model_of()))
    config = EngineConfig(model=str(tmp_path), compile_cache="off", **settings)
    assert make_plan(config).kernels.free_padding_rows == rows
