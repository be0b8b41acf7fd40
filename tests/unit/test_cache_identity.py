"""The identity of an engine in files: the same for the same weights, and another for any change."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from enginebay.compose.composition import make_engine, make_plan
from enginebay.config import EngineConfig
from enginebay.errors import UnsupportedError
from enginebay.weights import QuantizedArray
from enginebay_paged.engine import is_paged
from enginebay_paged.identity import _sums, weights_digest
from enginebay_runtime.engine import StepEngine
from tests.brief import LEAST
from tests.unit.test_executors import LISTING, Listing, plan_of


def weights_of(**changed: Any) -> Mapping[str, Any]:
    rng = np.random.default_rng(0)
    codes = rng.integers(-8, 8, (4, 6)).astype(ml_dtypes.int4)
    return {
        "a": jnp.asarray(rng.normal(size=(4, 6)), jnp.float32),
        "b": jnp.asarray(rng.normal(size=(5,)), jnp.bfloat16),
        "c": QuantizedArray(jnp.asarray(codes), jnp.ones((4, 1), jnp.float32), None, "int4"),
        "adapters.a": jnp.zeros((2, 3)),
        **changed,
    }


def test_any_value_shape_dtype_or_name_changes_the_digest_and_adapters_do_not() -> None:
    weights = weights_of()
    a, b, c = np.asarray(weights["a"]), np.asarray(weights["b"]), weights["c"]
    digest = weights_digest(weights)
    assert digest == weights_digest(weights_of())
    assert digest == weights_digest(weights_of(**{"adapters.a": jnp.ones((2, 3))}))
    bit = a.copy()
    bit.view(np.uint32)[2, 3] ^= 1
    swapped = a.copy()
    swapped[0, 0], swapped[3, 5] = a[3, 5], a[0, 0]
    rows = a[::-1].copy()
    codes = np.asarray(c.values).copy()
    codes[1, 1] = -codes[1, 1] - 1
    changes: list[dict[str, Any]] = [
        *({"a": jnp.asarray(one)} for one in (bit, swapped, rows, a.reshape(6, 4))),
        {"b": jnp.asarray(b, jnp.float32)},
        {"c": QuantizedArray(jnp.asarray(codes), c.scales, None, "int4")},
        {"c": QuantizedArray(c.values, c.scales * 2, None, "int4")},
        {"c": QuantizedArray(c.values, c.scales, None, "int4", activations="int8")},
        {"c": QuantizedArray(c.values, c.scales, None, "mxfp4")},
        {"d": jnp.zeros(1)},
    ]
    others = {weights_digest(weights_of(**change)) for change in changes}
    assert len(others | {digest}) == 1 + len(changes)


def test_devices_that_share_an_array_give_its_digest() -> None:
    where = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), PartitionSpec("x"))
    weights = weights_of()
    split = weights_of(a=jax.device_put(weights["a"], where))
    assert weights_digest(split) == weights_digest(weights)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_large_weight_is_summed_without_memory_of_its_size(num_devices: int) -> None:
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("x",))
    where = NamedSharding(mesh, PartitionSpec(None, "x"))
    large = jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16, sharding=where)
    found = _sums.lower(large).compile().memory_analysis()
    assert found.temp_size_in_bytes < 2**16


def engine_of(tmp_path: Path, **choices: Any) -> StepEngine:
    options: Any = {"name": "oengine", "page_size": 16, "num_pages": 9}
    options |= {"prefix_host_bytes": 2**24, "prefix_disk_dir": str(tmp_path)}
    sizes: Any = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 32}
    config: Any = {"model": LEAST, "engine": options, "dtype": "float32", **sizes, **choices}
    engine = make_engine(make_plan(EngineConfig(**config)))
    assert is_paged(engine)
    before = engine.weights_version
    engine.make_arrays()
    assert engine.weights_version != before, "it is not known before the weights are loaded"
    return engine


@pytest.mark.long
def test_versions_are_alike_in_two_engines_and_change_with_weights_parts_and_dtypes(
    tmp_path: Path,
) -> None:
    first, second = engine_of(tmp_path), engine_of(tmp_path)
    whole = first.weights_version
    assert second.weights_version == whole
    quantised = engine_of(tmp_path, kv_cache_dtype="int8")
    assert quantised.weights_version != whole
    weights = first.executor.weights()
    name = next(n for n, one in weights.items() if isinstance(one, jax.Array) and one.ndim > 1)
    before = np.asarray(weights[name])
    changed = before.copy()
    changed[0, 0] += 1e-3
    first.set_weights({name: changed})
    assert first.weights_version not in (whole, quantised.weights_version)
    first.set_weights({name: before})
    assert first.weights_version == whole
    undo = first.swap({"rms_norm": "xla"})
    assert first.weights_version != whole
    undo()
    assert first.weights_version == whole
    for one in (first, second, quantised):
        one.close()


def test_an_executor_without_the_weights_is_refused_and_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Listing] = []

    def close(self: Listing) -> None:
        closed.append(self)

    monkeypatch.setattr(Listing, "close", close)
    options = {"name": "oengine", "prefix_host_bytes": 2**24, "prefix_disk_dir": str(tmp_path)}
    with pytest.raises(UnsupportedError, match="the weights and programs of a Listing"):
        make_engine(plan_of(engine=options, executor=LISTING))
    assert len(closed) == 1
