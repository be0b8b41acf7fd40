"""The quick cases of the built-in ops find what is wrong, and name the place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

from enginebay.compose.ops import usable_ops
from enginebay.compose.quick_cases import CheckSetting
from enginebay.compose.quick_check import quick_check
from enginebay.errors import IncorrectError, UnsupportedError
from enginebay.ops.caps import Env
from enginebay.ops.spec import AttnSpec
from enginebay.plugins.registry import load_registry
from enginebay_xla.attention import XlaAttention, xla_attention
from enginebay_xla.kv_write import kv_write
from enginebay_xla.layout import HndLayout
from enginebay_xla.rope_kv_write import rope_kv_write
from enginebay_xla.sample import sample

OPS, _ = usable_ops(load_registry())
SPEC = AttnSpec(4, 2, 16, return_lse=True)
SETTING = CheckSetting(Env("cpu"), [SPEC], HndLayout, "float32", ("mixed",), page_size=16)


@dataclasses.dataclass(frozen=True)
class Changed(XlaAttention):
    """Attention whose results are changed by `change` (out, cache, lse, batch)."""

    change: Callable[..., Any] = lambda *results: results[:3]

    def __call__(self, q: Any, k: Any, v: Any, cache: Any, batch: Any, **fields: Any) -> Any:
        return self.change(*super().__call__(q, k, v, cache, batch, **fields), batch)


def noisy_padding(out: Any, cache: Any, lse: Any, batch: Any) -> Any:
    padding = batch.seq_ids >= batch.bucket.seqs
    return jnp.where(padding[:, None, None], 1.0, out), cache, lse


def another_place(out: Any, cache: Any, lse: Any, batch: Any) -> Any:
    return out, {name: jnp.nan_to_num(array) for name, array in cache.items()}, lse


def forgetful(out: Any, cache: Any, lse: Any, batch: Any) -> Any:
    return out, {**cache, "k": cache["k"] * 1.0001}, lse


def without_lse(out: Any, cache: Any, lse: Any, batch: Any) -> Any:
    return out, cache, None


def other_lse(out: Any, cache: Any, lse: Any, batch: Any) -> Any:
    return out, cache, lse * 1.01


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (noisy_padding, "mixed, layout hnd: padding is off by 1, allowed 0"),
        (another_place, r"mixed, layout hnd: k of page \d+ in the cache afterwards is off by nan"),
        (forgetful, r"mixed, layout hnd: k of page \d+ in the cache afterwards is off by"),
        (without_lse, "mixed: the result log-sum-exp is missing"),
        (other_lse, "mixed, layout hnd: log-sum-exp of token 0 of row 0 is off by"),
    ],
)
def test_attention_that_breaks_its_contract_is_found(change: Any, message: str) -> None:
    with pytest.raises(IncorrectError, match=f"it fails its quick check: {message}"):
        quick_check(OPS["attention"], Changed(change=change), SETTING, "it", "a switch")


def drops_nothing(cache: Any, slots: Any, k: Any, v: Any, *, layout: Any) -> Any:
    return kv_write(cache, jnp.abs(slots), k, v, layout)


def unturned(q: Any, *more: Any, **fields: Any) -> Any:
    return q, rope_kv_write(q, *more, **fields)[1]


def without_top_k(z: Any, seeds: Any, *, top_k: Any, **fields: Any) -> Any:
    return sample(z, seeds, top_k=jnp.full_like(top_k, z.shape[1]), **fields)


@pytest.mark.parametrize(
    ("op", "impl", "message"),
    [
        ("kv_write", drops_nothing, r"kv_write of 6: k\[0\] is off by nan, allowed 0"),
        ("rope_kv_write", unturned, r"rope_kv_write, default: q\[1\] is off by"),
        ("sample", without_top_k, r"sample of 40: token\[\d+\] is off by"),
        ("embedding", lambda table, ids: table[ids][:2], r"embedding: out is \(2, 8\) float32"),
    ],
)
def test_an_op_that_breaks_its_contract_is_found(op: str, impl: Any, message: str) -> None:
    with pytest.raises(IncorrectError, match=f"it fails its quick check: {message}"):
        quick_check(OPS[op], impl, SETTING, "it", "a switch")


def test_an_implementation_that_serves_no_case_cannot_be_checked() -> None:
    caps = dataclasses.replace(xla_attention.caps, layouts=("nhd",))
    with pytest.raises(UnsupportedError, match=r"no quick check of op attention here.*a switch"):
        quick_check(OPS["attention"], XlaAttention(caps=caps), SETTING, "it", "a switch")
