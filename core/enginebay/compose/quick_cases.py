"""The cases of quick checks. An implementation that is not registered runs them before it is used;
the record of an op names a function that returns them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from enginebay.contracts.cache import KVLayout
from enginebay.ops.caps import Env, always
from enginebay.ops.spec import AttnSpec, Mode


@dataclasses.dataclass(frozen=True)
class CheckSetting:
    """The setting in which an implementation is checked: the device, the model's attention specs on
    one shard, the cache layout and page size, the phases and the dtype.
    """

    env: Env
    specs: Sequence[AttnSpec]
    layout_type: type[KVLayout]
    dtype: str
    phases: Sequence[Mode] = ("decode", "prefill", "mixed")
    page_size: int = 64


@dataclasses.dataclass(frozen=True)
class QuickCase:
    """One problem of an op, for the quick check.

    run: a function (implementation, *inputs) -> arrays by name; it is traced. Where the reference
    has a NaN, the implementation must have one, too: a case puts NaN into the places that must not
    be written. exact: names of the results that must be equal. serves: a function (implementation)
    -> whether the implementation claims to support the case. place: a function (result, row) that
    names a row of a result in messages; None: "CASE: RESULT[ROW]".
    """

    name: str
    run: Callable[..., Mapping[str, jax.Array]]
    inputs: tuple[Any, ...]
    exact: frozenset[str] = frozenset()
    serves: Callable[[Any], bool] = always
    place: Callable[[str, int], str] | None = None
