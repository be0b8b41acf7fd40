"""Native kernels beside the suites that all kernels go through: odd sizes, equal bits for a row,
and who computes what.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginebay.errors import UnsupportedError
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket
from enginebay.weights import QuantizedArray
from enginebay_lora.ops import lora_oracle
from enginebay_testing import kernels, oracle
from enginebay_testing.attention_inputs import AttentionInputs, make_problem
from enginebay_testing.kernels import AttentionCase
from enginebay_xla.layout import HndLayout

pytestmark = pytest.mark.xdist_group("native")

NARROW_AND_WIDE = ("float32", "bfloat16")


def load(name: str) -> Any:
    try:
        return importlib.import_module(f"enginebay_native.{name}")
    except UnsupportedError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def module() -> Any:
    """enginebay_native.linear."""
    return load("linear")


@pytest.fixture(scope="module")
def attention() -> Any:
    return load("attention").attention


def arrays(rows: int, num_in: int, num_out: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([rows, num_in, num_out])
    x, weight = rng.normal(size=(rows, num_in)), rng.normal(size=(num_out, num_in))
    return x.astype(jnp.dtype(dtype)), weight.astype(jnp.dtype(dtype))


def is_native(function: Callable[..., jax.Array], *args: np.ndarray) -> bool:
    return "ffi_call" in str(jax.make_jaxpr(function)(*args))


SIZES = [(1, 1), (5, 2), (15, 3), (16, 4), (33, 5), (47, 6), (64, 7), (100, 8), (131, 9), (515, 50)]
"""Inputs and outputs: fewer than a vector, a whole number of vectors of any processor, and what is
left over.
"""


@pytest.mark.long
def test_a_product_with_int8_values_is_that_of_the_same_values_in_f32(module: Any) -> None:
    rng = np.random.default_rng(5)
    sizes = [(rows, *SIZES[i]) for i, rows in ((2, 1), (4, 3), (7, 48), (8, 128))]
    x = [rng.normal(size=(rows, num_in)).astype(np.float32) for rows, num_in, _ in sizes]
    values = [rng.integers(-127, 128, size=size[:0:-1], dtype=np.int8) for size in sizes]
    scales = [rng.random((len(each), 1), np.float32) for each in values]

    def both(x: list[Any], values: list[Any], scales: list[Any]) -> Any:
        int8 = [QuantizedArray(v, s, None, "int8") for v, s in zip(values, scales, strict=True)]
        narrow = [module.linear(*pair) for pair in zip(x, int8, strict=True)]
        wide = [module.linear(a, v.astype(jnp.float32)) for a, v in zip(x, values, strict=True)]
        return narrow, [w * s[:, 0] for w, s in zip(wide, scales, strict=True)]

    assert str(jax.make_jaxpr(both)(x, values, scales)).count("ffi_call") == 2 * len(sizes)
    for got, wanted in zip(*jax.jit(both)(x, values, scales), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


@pytest.mark.long
def test_a_grouped_rows_product_is_the_same_bits_alone_and_among_others() -> None:
    """And of int8 values that of the values in f32; weights of groups without rows are not read."""
    grouped = load("grouped_linear").grouped_linear
    rng = np.random.default_rng(6)
    sizes = np.array([0, 5, 1, 0, 60, 2], np.int32)
    group = np.repeat(np.arange(6), sizes)
    x = rng.normal(size=(70, 131)).astype(np.float32)
    values = rng.integers(-127, 128, size=(6, 50, 131), dtype=np.int8)
    scales = rng.random((6, 50, 1), np.float32)
    int8 = QuantizedArray(values, scales, None, "int8")

    @jax.jit
    def products(x: Any) -> Any:
        wide = jnp.where((sizes == 0)[:, None, None], jnp.nan, values.astype(np.float32))
        narrow = (x.astype(jnp.bfloat16), values.astype(jnp.bfloat16))
        ones = np.eye(6, dtype=np.int32)[group]
        alone = jax.lax.map(lambda row: grouped(row[0][None], wide, row[1]), (x[:68], ones))
        return (
            grouped(x, wide, sizes),
            alone,
            grouped(x, int8, sizes),
            grouped(*narrow, sizes, out_dtype=jnp.float32),
        )

    among, alone, quantized, narrow = map(np.asarray, products(x))
    assert among[:68].tobytes() == alone.tobytes()
    assert not among[68:].any()
    np.testing.assert_allclose(quantized[:68], among[:68] * scales[group, :, 0], rtol=1e-6)
    exact = oracle.grouped_linear(
        np.asarray(x.astype(jnp.bfloat16), np.float64), values.astype(np.float64), sizes
    )
    np.testing.assert_allclose(narrow, exact, rtol=1e-4, atol=1e-2)


@pytest.mark.long
def test_a_tokens_adapter_adds_the_same_bits_alone_and_among_others() -> None:
    """Adapters that no token has are not read, and tokens without one keep their bits."""
    lora = load("lora").lora
    rng = np.random.default_rng(8)
    places = np.repeat(np.array([3, 0, 1, 5, 3], np.int32), [1, 2, 70, 6, 2])
    order = rng.permutation(len(places))
    places = places[order]
    x = rng.normal(size=(len(places), 131)).astype(np.float32)
    y = rng.normal(size=(len(places), 3, 4, 9)).astype(np.float32)
    a = rng.normal(size=(5, 3, 7, 131)).astype(np.float32)
    b = rng.normal(size=(5, 7, 3, 4, 9)).astype(np.float32)
    a[[1, 3]] = b[[1, 3]] = np.nan
    how = {"axis": 1, "ends": (2, 3, 4)}

    @jax.jit
    def added(y: Any, x: Any) -> Any:
        few = (y[::9], x[::9], places[::9])
        alone = jax.lax.map(
            lambda row: lora(row[0][None], row[1][None], a, b, row[2][None], **how), few
        )
        return lora(y, x, a, b, places, **how), alone

    among, alone = map(np.asarray, added(y, x))
    assert among[::9].tobytes() == alone.tobytes()
    assert (among[places == 0] == y[places == 0]).all()
    exact = lora_oracle(y, x, a, b, places, **how)
    np.testing.assert_allclose(among, exact, rtol=1e-5, atol=1e-4)


@pytest.mark.long
def test_groups_of_many_narrow_rows_are_left_to_xla() -> None:
    module = load("grouped_linear")
    rng, sizes = np.random.default_rng(7), np.array([150, 0, 70], np.int32)
    x = rng.normal(size=(225, 40)).astype(jnp.bfloat16)
    weight = rng.normal(size=(3, 24, 40)).astype(jnp.bfloat16)
    few = 3 * module.MAX_NARROW_ROWS
    assert is_native(module.grouped_linear, x[:few], weight, sizes)
    assert not is_native(module.grouped_linear, x, weight, sizes)
    product = functools.partial(module.grouped_linear, out_dtype="float32")
    got = np.asarray(jax.jit(product)(x, weight, sizes))
    np.testing.assert_allclose(got, oracle.grouped_linear(x, weight, sizes), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", NARROW_AND_WIDE)
@pytest.mark.parametrize(("num_in", "num_out"), SIZES)
def test_a_rows_product_is_the_same_bits_alone_and_among_others(
    module: Any, num_in: int, num_out: int, dtype: str
) -> None:
    x, weight = arrays(module.MAX_ROWS[dtype], num_in, num_out, dtype)
    product = jax.jit(functools.partial(module.linear, out_dtype="float32"))
    assert is_native(product, x, weight)
    alone = np.concatenate([np.asarray(product(row, weight)) for row in np.split(x, x.shape[0])])
    exact = oracle.linear(x, weight, None)
    sums = oracle.linear(np.abs(x), np.abs(weight), None)
    assert (np.abs(alone - exact) <= 4 * oracle.EPS["float32"] * sums).all()
    order = np.random.default_rng(0).permutation(x.shape[0])
    batches = [np.arange(rows) for rows in (2, 3, 4, 5, 7, 8, 11, 13, 29, 48)] + [order]
    # One program with a product for each batch.
    products = jax.jit(lambda parts, weight: [product(part, weight) for part in parts])
    for rows, among in zip(batches, products([x[rows] for rows in batches], weight), strict=True):
        assert np.asarray(among).tobytes() == alone[rows].tobytes(), f"{len(rows)} rows"


@pytest.mark.parametrize("dtype", NARROW_AND_WIDE)
def test_a_long_products_bits_do_not_depend_on_how_it_is_shared_out(
    module: Any, dtype: str
) -> None:
    """More outputs than a block and than a thread's share: whole ones and a rest."""
    x, weight = arrays(5, 300, 1501, dtype)
    product = jax.jit(module.linear)
    whole = np.asarray(product(x, weight))
    assert (
        np.asarray(product(x, weight[:7])).tobytes() == np.ascontiguousarray(whole[:, :7]).tobytes()
    )
    assert (
        np.asarray(product(x, weight[1490:])).tobytes()
        == np.ascontiguousarray(whole[:, 1490:]).tobytes()
    )
    kernels.check_linear(module.linear, dtype, rows=5, in_dims=(300,), out_dims=(1501,))


@pytest.mark.parametrize("dtype", NARROW_AND_WIDE)
def test_many_rows_are_left_to_xla(module: Any, dtype: str) -> None:
    x, weight = arrays(module.MAX_ROWS[dtype] + 1, 40, 24, dtype)
    assert not is_native(module.linear, x, weight)
    assert is_native(module.linear, x[:-1], weight)
    for rows in (module.MAX_ROWS[dtype], module.MAX_ROWS[dtype] + 1):
        kernels.check_linear(module.linear, dtype, rows=rows, bias=True)


@pytest.mark.parametrize("dtype", [*NARROW_AND_WIDE, "float16"])
def test_no_rows_have_no_products(module: Any, dtype: str) -> None:
    kernels.check_linear(module.linear, dtype, rows=0, bias=True)


def test_other_and_mixed_dtypes_are_left_to_xla(module: Any) -> None:
    for left, right in (("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16")):
        x, weight = arrays(3, 40, 24, left)[0], arrays(3, 40, 24, right)[1]
        assert not is_native(module.linear, x, weight)
        got = np.asarray(jax.jit(functools.partial(module.linear, out_dtype="float32"))(x, weight))
        exact = oracle.linear(x, weight, None)
        sums = oracle.linear(np.abs(x), np.abs(weight), None)
        assert got.dtype == np.float32
        assert (np.abs(got - exact) <= 4 * oracle.EPS["float32"] * sums).all(), (left, right)


def test_a_bias_is_added_before_the_result_is_rounded(module: Any) -> None:
    x, weight = arrays(4, 40, 6, "bfloat16")
    bias = np.linspace(-100, 100, 6, dtype=np.float32)
    wide = np.asarray(jax.jit(functools.partial(module.linear, out_dtype="float32"))(x, weight))
    got = jax.jit(module.linear)(x, weight, bias)
    assert np.asarray(got).tobytes() == np.asarray((wide + bias).astype(jnp.bfloat16)).tobytes()


def test_products_of_infinities_and_nans_stay_in_their_rows(module: Any) -> None:
    x, weight = arrays(6, 37, 5, "float32")
    odd = x.copy()
    odd[1, 36], odd[3, 0] = np.inf, np.nan
    product = jax.jit(module.linear)
    plain, got = (np.asarray(product(value, weight)) for value in (x, odd))
    kept = [0, 2, 4, 5]
    assert got[kept].tobytes() == plain[kept].tobytes()
    assert np.isinf(got[1]).all()
    assert np.isnan(got[3]).all()


def spec(group: int, head_dim: int, dtype: str = "float32", **fields: Any) -> AttnSpec:
    base = AttnSpec(2 * group, 2, head_dim, q_dtype=dtype, kv_dtype=dtype, return_lse=True)
    return dataclasses.replace(base, **fields)


def case(
    name: str, of: AttnSpec, lengths: tuple[int, ...] = (1, 0, 50, 16, 33), **fields: Any
) -> AttentionCase:
    """A decode step with rows of these lengths over shuffled pages; 0 is a row that takes no
    part.
    """
    q_lens = tuple(min(1, length) for length in lengths)
    return AttentionCase(f"native_{name}", "decode", q_lens, lengths, of, **fields)


SHAPES = [(1, 8), (2, 20), (3, 40), (4, 64), (5, 80), (6, 96), (7, 128), (8, 256), (2, 9)]
FEATURES: dict[str, dict[str, Any]] = {
    "window_of_one": {"window": 1},
    "window_over_pages": {"window": 20},
    "window_longer_than_any": {"window": 1000},
    "softcap": {"softcap": 3.0},
    "sinks": {"inputs": ("sinks",)},
    "scale": {"scale": 2.0},
    "all": {"window": 17, "softcap": 5.0, "inputs": ("sinks",)},
}


@pytest.mark.parametrize("dtype", NARROW_AND_WIDE)
@pytest.mark.parametrize(("group", "head_dim"), SHAPES)
def test_groups_and_head_sizes(attention: Any, group: int, head_dim: int, dtype: str) -> None:
    kernels.check_attention(
        attention, case(f"{group}_{head_dim}", spec(group, head_dim, dtype)), HndLayout
    )


@pytest.mark.parametrize("dtype", NARROW_AND_WIDE)
@pytest.mark.parametrize("name", list(FEATURES))
def test_features_over_several_pages(attention: Any, name: str, dtype: str) -> None:
    kernels.check_attention(attention, case(name, spec(3, 24, dtype, **FEATURES[name])), HndLayout)


def in_numpy(batch: AttnBatch) -> Any:
    """The same record on the host, where it is changed without a program."""
    return jax.tree.map(np.asarray, batch)


def written(problem: AttentionInputs) -> dict[str, np.ndarray]:
    """The cache with the tokens of this step in it, on the host."""
    write = jax.jit(problem.layout.write)
    cache = write(dict(problem.cache), problem.batch.slots, problem.k, problem.v)
    return {name: np.asarray(array) for name, array in cache.items()}


def attend(
    attention: Any, problem: AttentionInputs, batch: AttnBatch, cache: Any
) -> tuple[bytes, bytes]:
    """Bits of the output and of the log-sum-exp, of rows that take part."""
    step = jax.jit(functools.partial(attention, spec=problem.case.spec, layout=problem.layout))
    out, _, lse = step(problem.q, None, None, cache, batch, **problem.inputs)
    live = problem.token_rows >= 0
    return np.asarray(out)[live].tobytes(), np.asarray(lse)[live].tobytes()


@pytest.mark.parametrize("dtype", NARROW_AND_WIDE)
def test_bits_depend_neither_on_where_pages_lie_nor_on_how_wide_their_table_is(
    attention: Any, dtype: str
) -> None:
    problem = make_problem(
        case("places", spec(4, 24, dtype, inputs=("sinks",), window=30)), HndLayout
    )
    batch, cache = in_numpy(problem.batch), written(problem)
    expected = attend(attention, problem, batch, cache)
    order = np.random.default_rng(0).permutation(problem.layout.num_pages)
    moved = {name: array[np.argsort(order)] for name, array in cache.items()}
    table = order.astype(np.int32)[batch.page_table]
    assert (
        attend(attention, problem, dataclasses.replace(batch, page_table=table), moved) == expected
    )
    # Whatever stands past a row's length in a wider table is never looked at.
    wide = np.pad(table, ((0, 0), (0, 3)), constant_values=2**30)
    bucket = dataclasses.replace(batch.bucket, pages_per_seq=wide.shape[1])
    wider = dataclasses.replace(batch, page_table=wide, bucket=bucket)
    assert attend(attention, problem, wider, moved) == expected


@pytest.mark.parametrize("dtype", NARROW_AND_WIDE)
def test_a_rows_bits_are_the_same_alone_and_among_others(attention: Any, dtype: str) -> None:
    problem = make_problem(
        case("alone", spec(3, 40, dtype), (5, 50, 16, 33), padding_rows=0), HndLayout
    )
    batch, cache, q = in_numpy(problem.batch), written(problem), np.asarray(problem.q)
    step = jax.jit(functools.partial(attention, spec=problem.case.spec, layout=problem.layout))
    among = np.asarray(step(q, None, None, cache, batch)[0])
    for row in range(4):
        one = dataclasses.replace(
            batch,
            page_table=batch.page_table[row : row + 1],
            kv_lens=batch.kv_lens[row : row + 1],
            bucket=dataclasses.replace(batch.bucket, tokens=1, seqs=1),
        )
        alone, _, _ = step(q[row : row + 1], None, None, cache, one)
        assert np.asarray(alone).tobytes() == among[row : row + 1].tobytes(), f"row {row}"


def test_what_it_does_not_serve_has_a_reason(attention: Any) -> None:
    from enginebay.ops.caps import Env

    layout = HndLayout(4, 16, 2, 16, "float32")
    bucket = Bucket(tokens=1, seqs=1, pages_per_seq=1, max_q_len=1, max_kv_len=16, mode="decode")
    why = functools.partial(attention.caps.why_not, layout=layout)
    assert why(Env("cpu"), spec(2, 16), bucket) is None
    assert "platform cpu" in why(Env("cuda"), spec(2, 16), bucket)
    assert "mode prefill" in why(
        Env("cpu"), spec(2, 16), dataclasses.replace(bucket, mode="prefill")
    )
    assert "dtype float16" in why(Env("cpu"), spec(2, 16, "float16"), bucket)
