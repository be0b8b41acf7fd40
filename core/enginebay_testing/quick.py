"""The quick check: a few cases against the reference, in the shapes of one model, before an
unregistered function is used.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from enginebay.cache import KVLayout
from enginebay.errors import IncorrectError, UnsupportedError, explain
from enginebay.ops.caps import Env
from enginebay.ops.spec import AttnSpec, Mode
from enginebay_testing import kernels
from enginebay_testing.attention_cases import AttentionCase

Check = tuple[str, Callable[[], None]]
"""A case's name, and a function that raises AssertionError when the result is not what it must be.
"""


@dataclasses.dataclass(frozen=True)
class CheckSetting:
    """Where an implementation is to serve: the model's attention layers per shard, the cache, the
    phases, the dtype.
    """

    env: Env
    specs: Sequence[AttnSpec]
    layout_type: type[KVLayout]
    dtype: str
    phases: Sequence[Mode] = ("decode", "prefill", "mixed")
    page_size: int = 64


def quick_check(op: str, impl: Any, setting: CheckSetting, what: str, switch: str) -> int:
    """Run an implementation of an op on a few cases; how many there were.

    IncorrectError names `what`, the case, and the error against its bound, or what the
    implementation raised; `switch` says how to do without the check. UnsupportedError where there
    is nothing to check the op with.
    """
    checks = list(_checks(op, impl, setting))
    if not checks:
        raise UnsupportedError(
            explain(
                f"{what}: there is no quick check of op {op} here",
                f"{', '.join(_PLAIN)} and attention that serves these layers",
                f"Do without the check ({switch}).",
            )
        )
    for name, check in checks:
        try:
            check()
        except AssertionError as error:
            raise _incorrect(what, str(error), switch) from None
        except Exception as error:  # whatever a stranger's function raises is told with its case
            raise _incorrect(
                what, f"{name}: it raised {type(error).__name__}: {error}", switch
            ) from error
    return len(checks)


def _incorrect(what: str, finding: str, switch: str) -> IncorrectError:
    return IncorrectError(
        explain(
            f"{what} fails its quick check: {' '.join(finding.split())}",
            "results within the bound of the reference",
            f"Mend it, or do without the check ({switch}).",
        )
    )


def _checks(op: str, impl: Any, setting: CheckSetting) -> Iterator[Check]:
    if op != "attention":
        yield from _PLAIN.get(op, _nothing)(impl, setting)
        return
    for spec in dict.fromkeys(setting.specs):
        for case in _attention_cases(spec, setting):
            if kernels.why_not(impl, case, setting.layout_type, setting.env) is None:
                check = functools.partial(
                    kernels.check_attention, impl, case, setting.layout_type, setting.env
                )
                yield case.name, check


def _attention_cases(spec: AttnSpec, setting: CheckSetting) -> Iterator[AttentionCase]:
    """Lengths around the borders of a page; decode steps on pages, and on rows that are pages too."""
    size = setting.page_size
    fields: dict[str, Any] = {"spec": spec, "page_size": size, "capacity": 2 * size}
    border = (1, size - 1, size, size + 1, 2 * size)
    if "decode" in setting.phases:
        yield AttentionCase("decode", "decode", (1,) * 5, border, **fields)
        yield AttentionCase(
            "decode_rows_are_pages", "decode", (1,) * 5, border, **fields, rows_are_pages=True
        )
    if "prefill" in setting.phases:
        yield AttentionCase("prefill", "prefill", (3, size + 1), (3, size + 1), **fields)
    if "mixed" in setting.phases:
        yield AttentionCase("mixed", "mixed", (1, 9, 5), (size + 1, 9, size + 3), **fields)


def _linear(impl: Any, setting: CheckSetting) -> Iterator[Check]:
    cases: dict[str, dict[str, Any]] = {
        "3 rows": {},
        "1 row": {"rows": 1},
        "bias": {"bias": True},
        "heads out": {"out_dims": (5, 8)},
        "heads in": {"in_dims": (6, 8)},
        "to float32": {"out_dtype": "float32"},
    }
    for name, fields in cases.items():
        yield (
            f"linear, {name}",
            functools.partial(kernels.check_linear, impl, setting.dtype, **fields),
        )


def _rms_norm(impl: Any, setting: CheckSetting) -> Iterator[Check]:
    yield "rms_norm", functools.partial(kernels.check_rms_norm, impl, setting.dtype)


def _rope(impl: Any, setting: CheckSetting) -> Iterator[Check]:
    for name in ("default", "partial", "llama3", "yarn"):
        yield (
            f"rope, {name}",
            functools.partial(kernels.check_rope, impl, kernels.ROPE_SPECS[name], setting.dtype),
        )


def _embedding(impl: Any, setting: CheckSetting) -> Iterator[Check]:
    yield "embedding", functools.partial(kernels.check_embedding, impl, setting.dtype)


def _kv_write(impl: Any, setting: CheckSetting) -> Iterator[Check]:
    from enginebay_testing.suites import check_kv_write

    yield "kv_write", functools.partial(check_kv_write, impl, setting.layout_type)


def _sample(impl: Any, setting: CheckSetting) -> Iterator[Check]:
    from enginebay_testing.sample_op import sample_checks

    yield from sample_checks(impl)


def _add_rms_norm(impl: Any, setting: CheckSetting) -> Iterator[Check]:
    from enginebay_testing.fused import check_add_rms_norm

    yield "add_rms_norm", functools.partial(check_add_rms_norm, impl, setting.dtype)


def _rope_kv_write(impl: Any, setting: CheckSetting) -> Iterator[Check]:
    from enginebay_testing.fused import rope_kv_write_checks

    yield from rope_kv_write_checks(impl, [setting.layout_type], [setting.dtype])


def _nothing(impl: Any, setting: CheckSetting) -> Iterator[Check]:
    return iter(())


_PLAIN: dict[str, Callable[[Any, CheckSetting], Iterator[Check]]] = {
    "add_rms_norm": _add_rms_norm,
    "embedding": _embedding,
    "kv_write": _kv_write,
    "linear": _linear,
    "rms_norm": _rms_norm,
    "rope": _rope,
    "rope_kv_write": _rope_kv_write,
    "sample": _sample,
}
