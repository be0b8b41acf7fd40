"""The cases of attention find faults that only serving's sizes show, and name their causes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginebay.ops.caps import Env
from enginebay.ops.spec import AttnSpec
from enginebay_testing import kernels
from enginebay_testing.attention_axes import DEVICE, attention_covering_cases, claimed_axes
from enginebay_testing.attention_cases import IN_THE_DEFAULT_CHECK, AttentionCase
from enginebay_testing.attention_runs import AttentionRuns, check_case
from enginebay_testing.attention_suite import attention_checks
from enginebay_testing.covering import covering_rows
from enginebay_testing.verdicts import InexactError
from enginebay_xla.attention import xla_attention
from enginebay_xla.layout import HndLayout

CPU = Env("cpu")
CASE = AttentionCase(
    "decode", "decode", (1, 1), (40, 9), AttnSpec(4, 2, 16, window=12, q_dtype="float32")
)
ONCE = AttentionRuns(repeats=1, all_scores=False, neighbours=False)


@dataclasses.dataclass(frozen=True)
class Changed:
    """The plain kernel with a change of its arguments or of its output."""

    spec: Callable[[AttnSpec], AttnSpec] = lambda spec: spec
    out: Callable[[jax.Array], jax.Array] = lambda out: out
    q: Callable[[jax.Array], jax.Array] = lambda q: q
    name: str = "changed"
    version: str = "1"
    priority: int = 0
    caps: Any = xla_attention.caps

    def default_config(self, *problem: Any) -> Any:
        return xla_attention.default_config(*problem)

    def __call__(self, q: jax.Array, *rest: Any, spec: AttnSpec, **more: Any) -> Any:
        out, cache, lse = xla_attention(self.q(q), *rest, spec=self.spec(spec), **more)
        return self.out(out), cache, lse


def message_of(kernel: Any, case: AttentionCase = CASE) -> str:
    with pytest.raises(InexactError) as caught:
        kernels.check_attention(kernel, case, HndLayout)
    return str(caught.value)


def test_a_failure_names_token_row_head_and_feature() -> None:
    text = message_of(Changed(out=lambda out: out.at[1, 2, 5].add(1.0)))
    assert "token 1 of row 1, head 2, feature 5 is off by 1, allowed" in text


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"scale": 1.0}, "scale (the scores are not scaled)"),
        ({"window": None}, "mask (the window is not applied)"),
        ({"window": 13}, "mask (a window of 13 in place of 12)"),
        ({"window": 11}, "mask (a window of 11 in place of 12)"),
    ],
)
def test_a_failure_names_the_likely_cause(change: dict[str, Any], cause: str) -> None:
    kernel = Changed(spec=lambda spec: dataclasses.replace(spec, **change))
    assert f"likely cause: {cause}" in message_of(kernel)


def test_a_failure_of_heads_names_the_head_that_was_read() -> None:
    def turned(q: jax.Array) -> jax.Array:
        return q[:, jnp.array([2, 3, 0, 1])]

    kernel = Changed(q=turned, out=turned)
    text = message_of(kernel)
    head = int(text.partition(", head ")[2].partition(",")[0])
    home = head // CASE.spec.group
    assert f"likely cause: heads (KV head {1 - home} in place of {home})" in text


def test_a_failure_without_a_known_cause_names_none() -> None:
    text = message_of(Changed(out=lambda out: out * 1.5))
    assert "likely cause" not in text


def cases() -> list[AttentionCase]:
    made = attention_covering_cases(
        xla_attention, CPU, {"HndLayout": HndLayout}, DEVICE, triples=False
    )
    return [case for case, _ in made]


def test_default_cases_have_the_sizes_of_serving() -> None:
    found = cases()
    assert max(max(case.kv_lens) for case in found) > 4096
    assert {5, 6, 12} <= {case.spec.group for case in found}
    assert max(case.spec.num_kv_heads for case in found) > 4
    assert any(case.spec.q_dtype != case.spec.kv_dtype for case in found)
    assert {case.values for case in found} == {"plain", "one_sign"}


def test_all_adds_values_and_contexts_up_to_the_declared_limit() -> None:
    def every(limit: int) -> list[AttentionCase]:
        caps = dataclasses.replace(xla_attention.caps, context=lambda n: n <= limit)
        made = attention_covering_cases(
            Changed(caps=caps), CPU, {"HndLayout": HndLayout}, DEVICE, triples=True
        )
        return [case for case, _ in made]

    wide = every(1 << 20)
    assert max(max(case.kv_lens) for case in wide) > 1 << 17
    assert max(max(case.kv_lens) for case in every(16_400)) == 16_384
    axes = claimed_axes(xla_attention.caps, {"HndLayout": HndLayout})
    assert set(axes.known("group")) == {case.spec.group for case in wide}
    assert not set(axes.more["group"]) & {row["group"] for row in covering_rows(axes)}


def test_the_default_check_has_small_cases_with_names() -> None:
    checks = attention_checks(xla_attention, CPU, [HndLayout], triples=False)
    named = {check.case.name for check in checks if check.representative}
    assert named >= IN_THE_DEFAULT_CHECK


def test_an_accumulator_of_16_bits_is_found_by_values_of_one_sign() -> None:
    """Sums of 1,000 numbers near 1 stand still in bfloat16."""

    def narrow_sums(out: jax.Array) -> jax.Array:
        return (out.astype(jnp.float32) * np.float32(1 + 3 * 2.0**-8)).astype(out.dtype)

    case = AttentionCase(
        "decode_one_sign",
        "decode",
        (1, 1),
        (300, 33),
        AttnSpec(4, 2, 16, q_dtype="bfloat16", kv_dtype="bfloat16"),
        capacity=320,
        values="one_sign",
    )
    kernels.check_attention(xla_attention, case, HndLayout)
    with pytest.raises(InexactError):
        kernels.check_attention(Changed(out=narrow_sums), case, HndLayout)


def test_a_kernel_that_keeps_its_last_output_is_found() -> None:
    store: dict[Any, np.ndarray] = {}

    def remembered(out: jax.Array) -> jax.Array:
        def keep(now: np.ndarray) -> np.ndarray:
            return store.setdefault(now.shape, np.array(now))

        return jax.pure_callback(keep, jax.ShapeDtypeStruct(out.shape, out.dtype), out)

    with pytest.raises(AssertionError):
        check_case(Changed(out=remembered), CASE, HndLayout, CPU, ONCE)
