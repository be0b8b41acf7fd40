"""Checks of the collectives all_reduce, all_gather and all_to_all. Their meshes have up to four
devices, as far as there are devices.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from enginebay.ops.caps import Env
from enginebay_testing.covering import DTYPES, OpAxes
from enginebay_testing.exact import hold
from enginebay_testing.op_kit import (
    CaseBudget,
    LayoutTypes,
    OpCase,
    OpKit,
    PlainCase,
    covering_cases,
)
from enginebay_testing.oracle import EPS
from enginebay_testing.verdicts import expect

MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "two": ((2,), ("a",)),
    "one": ((1,), ("a",)),
    "three": ((3,), ("a",)),
    "four": ((4,), ("a",)),
    "two_by_two": ((2, 2), ("a", "b")),
    "two_by_two_turned": ((2, 2), ("b", "a")),
    "first_of_two_by_two": ((2, 2), ("a",)),
    "second_of_two_by_two": ((2, 2), ("b",)),
}
"""Sizes of the mesh axes "a" and "b", and the axes that a collective is called with."""

_AXES = OpAxes(
    "collective",
    {
        "dtype": (*DTYPES, "int32"),
        "mesh": tuple(MESHES),
        "rows": (4, 1, 7),
        "features": (6, 1, 129),
        "dims": (2, 3),
        "data": ("plain", "special"),
    },
    extremes=({"rows": 4133, "features": 64},),
    each=("mesh",),
)
"""rows: of each device; for all_to_all, of each piece. dims: dimensions of the arrays. data
"special": negative zeros, NaN and infinities, which copies keep.
"""

ALL_REDUCE_AXES = dataclasses.replace(
    _AXES, op="all_reduce", values={**_AXES.values, "data": ("plain", "one_sign", "apart")}
)
"""data "apart": each device has numbers of another magnitude."""

ALL_GATHER_AXES = dataclasses.replace(
    _AXES, op="all_gather", values={**_AXES.values, "dim": ("last", "first")}
)
ALL_TO_ALL_AXES = dataclasses.replace(_AXES, op="all_to_all")


def _call(
    x: Any, *, kernel: Any, mesh: Mesh, axes: tuple[str, ...], keywords: tuple[tuple[str, Any], ...]
) -> Any:
    def run(mine: Any) -> Any:
        return kernel(mine[0], axes=axes, **dict(keywords))[None]

    split = PartitionSpec(mesh.axis_names)
    return jax.shard_map(run, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)(x)


@dataclasses.dataclass(frozen=True)
class _Between:
    """The devices of a case; `groups` int [groups, devices] are those that exchange arrays, in the
    order of the collective's axes.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    groups: np.ndarray

    @classmethod
    def of(cls, case: PlainCase) -> _Between:
        sizes, axes = MESHES[str(case.row["mesh"])]
        names = ("a", "b")[: len(sizes)]
        count = math.prod(sizes)
        devices = np.array(jax.local_devices()[:count]).reshape(sizes)
        mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
        numbers = np.arange(count).reshape(sizes)
        order = [*(names.index(n) for n in names if n not in axes), *map(names.index, axes)]
        width = math.prod(sizes[names.index(n)] for n in axes)
        return cls(mesh, axes, numbers.transpose(order).reshape(-1, width))

    @property
    def width(self) -> int:
        """Return how many devices exchange arrays."""
        return int(self.groups.shape[1])


def _arrays(case: PlainCase, devices: int, rows: int) -> np.ndarray:
    """Return an array of each device, [devices, rows, features] or [devices, rows, 3, features]."""
    features, rng, kind = case.int("features"), case.rng(), case.row["data"]
    shape = (rows, features) if case.int("dims") == 2 else (rows, 3, features)
    if case.row["dtype"] == "int32":
        return rng.integers(-(2**20), 2**20, (devices, *shape)).astype(np.int32)
    x = rng.normal(size=(devices, *shape))
    if kind == "one_sign":
        x = np.abs(x)
    elif kind == "apart":
        x *= np.logspace(-2, 2, devices).reshape(-1, *(1,) * len(shape))
    elif kind == "special":
        x.reshape(-1)[:: max(1, x.size // 4)] = -0.0
        x[-1].reshape(-1)[-1] = np.nan
        x[0].reshape(-1)[-1] = np.inf
    return x.astype(case.dtype)


def _exchanged(kernel: Any, case: PlainCase, x: np.ndarray, between: _Between, **how: Any) -> Any:
    call = functools.partial(
        _call,
        kernel=kernel,
        mesh=between.mesh,
        axes=between.axes,
        keywords=tuple(sorted(how.items())),
    )
    return case.run(call, x)


def _same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    expect(
        (got.shape, got.dtype) == (expected.shape, expected.dtype),
        f"{got.shape} {got.dtype}, expected {expected.shape} {expected.dtype}",
    )
    bits = f"u{got.dtype.itemsize}"
    bad = np.argwhere(got.view(bits) != expected.view(bits))
    if bad.size:
        device, *place = (int(i) for i in bad[0])
        expect(
            False,
            f"device {device}, place {tuple(place)}: {got[tuple(bad[0])]}, expected "
            f"{expected[tuple(bad[0])]}",
        )


def check_all_reduce_case(kernel: Any, case: PlainCase) -> None:
    """Check that each device has the sum over its group, whichever the order of the additions."""
    between = _Between.of(case)
    x = _arrays(case, between.groups.size, case.int("rows"))
    got = _exchanged(kernel, case, x, between)
    wide, sizes = np.zeros(x.shape), np.zeros(x.shape)
    for group in between.groups:
        wide[group] = x[group].astype(np.float64).sum(axis=0)
        sizes[group] = np.abs(x[group].astype(np.float64)).sum(axis=0)
    if x.dtype == np.int32:
        _same_bits(got, wide.astype(np.int32))
        return
    expect(
        (got.shape, got.dtype) == (x.shape, x.dtype),
        f"{got.shape} {got.dtype}, expected {x.shape} {x.dtype}",
    )
    eps = EPS[str(case.row["dtype"])]
    allowed = eps * (between.width - 1) * sizes + float(jnp.finfo(case.dtype).smallest_subnormal)
    hold(np.abs(got.astype(np.float64) - wide), allowed, "all_reduce")


def check_all_gather_case(kernel: Any, case: PlainCase) -> None:
    """Check that each device has the arrays of its group, in their order and bit by bit."""
    between = _Between.of(case)
    x = _arrays(case, between.groups.size, case.int("rows"))
    dim = 0 if case.row["dim"] == "first" else x.ndim - 2
    got = _exchanged(kernel, case, x, between, dim=dim)
    expected: dict[int, np.ndarray] = {}
    for group in between.groups:
        whole = np.concatenate(list(x[group]), axis=dim)
        expected.update((int(device), whole) for device in group)
    _same_bits(got, np.stack([expected[device] for device in range(len(x))]))


def check_all_to_all_case(kernel: Any, case: PlainCase) -> None:
    """Check that each device has its piece of every array of its group, bit by bit."""
    between = _Between.of(case)
    x = _arrays(case, between.groups.size, case.int("rows") * between.width)
    got = _exchanged(kernel, case, x, between)
    expected = np.empty_like(x)
    for group in between.groups:
        pieces = x[group].reshape(between.width, between.width, -1, *x.shape[2:])
        expected[group] = pieces.swapaxes(0, 1).reshape(x[group].shape)
    _same_bits(got, expected)


def _where_devices_are(
    axes: OpAxes, check: Callable[[Any, PlainCase], None]
) -> Callable[[Any, Env, LayoutTypes, CaseBudget], Iterator[OpCase]]:
    """Return cases over the meshes for which there are devices."""

    def cases(kernel: Any, env: Env, layouts: LayoutTypes, extent: CaseBudget) -> Iterator[OpCase]:
        there = len(jax.local_devices())
        meshes = tuple(name for name, (sizes, _) in MESHES.items() if math.prod(sizes) <= there)
        yield from covering_cases(axes.having(mesh=meshes), check)(kernel, env, layouts, extent)

    return cases


ALL_REDUCE = OpKit(_where_devices_are(ALL_REDUCE_AXES, check_all_reduce_case))
ALL_GATHER = OpKit(_where_devices_are(ALL_GATHER_AXES, check_all_gather_case))
ALL_TO_ALL = OpKit(_where_devices_are(ALL_TO_ALL_AXES, check_all_to_all_case))
