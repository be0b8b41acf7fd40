"""How checkpoint tensors of dense families lie in the weights of the shared blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from enginebay_models import tensors
from enginebay_models.tensors import QkvRows

SHAPE = (4, 2, 6)
"""KV heads, queries of each, head size; the checkpoint has half as many KV heads."""
NAMES = ("q", "k", "v")


def separate() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=(rows, 3)) for rows in (4 * 2 * 6, 2 * 6, 2 * 6)]


@pytest.mark.parametrize("index", [slice(None), slice(0, 1), slice(1, 3), slice(3, 4)])
def test_rows_of_one_tensor_become_the_weight_of_three(index: slice) -> None:
    """Whole, and in the shards of devices, where each KV head is there twice."""
    parts = separate()
    apart = tensors.fused_qkv(NAMES, SHAPE, repeats=2, features=(3,))
    wanted = apart.build(parts, (index,))
    by_head = [part.reshape(2, -1, 6, 3) for part in parts]
    for place, tensor in (
        ("stacked", np.concatenate(parts)),
        ("grouped", np.concatenate(by_head, axis=1).reshape(-1, 3)),
    ):
        lie: Any = QkvRows(place)
        source = tensors.fused_qkv(("qkv",), SHAPE, repeats=2, features=(3,), lie=lie)
        assert (source.names, source.shapes) == (("qkv",), (tensor.shape,))
        np.testing.assert_array_equal(source.build([tensor], (index,)), wanted)


def test_neighbours_of_a_rotary_pair_are_moved_apart_in_queries_and_keys_alone() -> None:
    order = [0, 2, 1, 3, 4, 5]
    parts, lie = separate(), QkvRows(interleaved=4)
    plain = tensors.fused_qkv(NAMES, SHAPE, repeats=2, features=(3,)).build(parts, (slice(None),))
    moved = tensors.fused_qkv(NAMES, SHAPE, repeats=2, features=(3,), lie=lie).build(
        parts, (slice(None),)
    )
    np.testing.assert_array_equal(moved[:, :-1], plain[:, :-1, order])
    np.testing.assert_array_equal(moved[:, -1], plain[:, -1])


def test_gate_and_up_of_one_tensor_are_split_as_devices_split_them() -> None:
    tensor = np.arange(24).reshape(8, 3)
    source = tensors.two_parts("gate_up", (2, 4, 3))
    whole = source.build([tensor], (slice(None), slice(None), slice(None)))
    np.testing.assert_array_equal(whole, tensor.reshape(2, 4, 3))
    part = source.build([tensor], (slice(0, 1), slice(1, 3), slice(None)))
    np.testing.assert_array_equal(part, whole[:1, 1:3])
