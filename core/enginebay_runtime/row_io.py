"""Reading a row's state from the step state, and writing one: for resuming, moving and storing
rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.contracts.cache import CacheArrays, CacheGroup, KVLayout
from enginebay.contracts.cache_state import StateGroup
from enginebay.contracts.commands import Put, Take, values_of
from enginebay.contracts.engine import GroupState, RowState
from enginebay.errors import InputError, explain
from enginebay.ops.head_rotation import rotate_on_host, rotated_widths
from enginebay.ops.key_centers import center_path
from enginebay_runtime.device import ADAPTERS, COLUMNS, DeviceRows
from enginebay_runtime.row_writer import RowWriter
from enginebay_runtime.view import ExecutorView


def take_row(executor: ExecutorView, writer: RowWriter, command: Take) -> RowState:
    """Read the state of a row to the host. Some of the row's tokens must have been computed."""
    state, row = executor.state, command.row
    columns = {f: np.array(np.asarray(c)[row]) for f, c in state.rows.columns().items()}
    processor_state = {
        f"{one.name}/{f}": v for one in writer.read(row) for f, v in one.values.items()
    }
    # A row's last sampled token is not in the cache. In the middle of a prompt there is none.
    num_cached = int(columns["length"])
    num_cached -= num_cached >= len(command.token_ids)
    groups: dict[str, GroupState] = {}
    layouts = kv_layouts(executor)
    for one in executor.info.groups if command.pages else ():
        layout, first = layouts[one.name], one.first_position(num_cached)
        slots = _slots(layout, command.pages[one.name], first, num_cached)
        pairs = _read(layout, state.cache[one.name], slots)
        repeat = executor.info.kv_head_repeat
        widths = rotated_widths(executor.info.attention[one.name])
        keys, values = (
            rotate_on_host(np.stack([np.asarray(x)[:, ::repeat] for x in each]), widths)
            for each in zip(*pairs, strict=True)
        )
        if (centers := key_centers(executor, one)) is not None:
            keys += centers[:, None, ::repeat]
        arrays = {"k": keys} if layout.v_prefix_dim else {"k": keys, "v": values}
        groups[one.name] = GroupState(first, arrays)
    for each in executor.info.states if command.pages else ():
        layers = _read_place(state.cache[each.name], command.pages[each.name][0])
        arrays = {
            one.name: np.stack([np.asarray(layer[one.name], np.float32) for layer in layers])
            for one in each.arrays
        }
        groups[each.name] = GroupState(num_cached, arrays)
    return RowState(
        token_ids=np.array(command.token_ids, np.int32),
        num_cached=num_cached,
        last_token=int(columns["last_token"]),
        groups=groups,
        sampling=columns | processor_state,
        constants=executor.info.constants,
    )


def key_centers(executor: ExecutorView, group: CacheGroup) -> np.ndarray | None:
    """The centres of the keys that a cache group stores, f32 [layers, kv_heads, head_dim]; None for
    a group that stores keys as they are.
    """
    centers: Any = executor.model_weights.get(center_path(group.name))
    return None if centers is None else np.asarray(centers)


@functools.partial(jax.jit, static_argnums=0)
def _read(layout: KVLayout, layers: Sequence[CacheArrays], slots: jax.Array) -> Any:
    """Keys and values of each layer at slots."""
    return [layout.read_exact(layer, slots) for layer in layers]


@jax.jit
def _read_place(layers: Sequence[CacheArrays], place: int) -> Any:
    return jax.tree.map(lambda array: array[place], layers)


def kv_layouts(executor: ExecutorView) -> dict[str, KVLayout]:
    """The layouts of the groups with keys and values."""
    return {g: one for g, one in executor.layouts.items() if isinstance(one, KVLayout)}


def _slots(layout: KVLayout, page_ids: np.ndarray, first: int, end: int) -> jax.Array:
    """The slots of positions first to end - 1 in pages page_ids int32 [pages]."""
    position, size = np.arange(first, end), layout.page_size
    return jnp.asarray(page_ids[position // size] * size + position % size, jnp.int32)


def put_row(executor: ExecutorView, writer: RowWriter, command: Put) -> None:
    """Write a state to a row and its pages. InputError for a state that is too long, or from a
    model of another shape or with other constants.
    """
    row, saved = command.row, command.state
    if saved.constants != executor.info.constants:
        raise InputError(
            explain(
                "row state of a model with another rotary embedding, activation or epsilon",
                "the constants of this engine, which for some checkpoints depend on max_model_len",
                "Resume in an engine of the same model with the same max_model_len.",
            )
        )
    state = executor.state
    most = state.rows.token_ids.shape[1]
    if len(saved.token_ids) > most:
        raise InputError(
            explain(
                f"row state of {len(saved.token_ids)} tokens",
                f"at most {most}",
                "Resume in an engine with a larger max_model_len.",
            )
        )
    for group in executor.info.cache_groups:
        _check_group(executor, group, saved)
    cache, layouts = dict(state.cache), kv_layouts(executor)
    for one in executor.info.groups:
        held, layout = saved.groups[one.name], layouts[one.name]
        slots = _slots(layout, command.pages[one.name], held.first, saved.num_cached)
        write = jax.jit(layout.write, donate_argnums=0)
        widths = rotated_widths(executor.info.attention[one.name])
        keys, values = (
            np.repeat(held.arrays[name], executor.info.kv_head_repeat, axis=2)
            for name in ("kk" if layout.v_prefix_dim else "kv")
        )
        if (centers := key_centers(executor, one)) is not None:
            keys = keys - centers[:, None]
        keys, values = (rotate_on_host(heads, widths) for heads in (keys, values))
        cache[one.name] = tuple(
            write(layer, slots, keys[i], values[i]) for i, layer in enumerate(state.cache[one.name])
        )
    for each in executor.info.states:
        arrays, place = saved.groups[each.name].arrays, int(command.pages[each.name][0])
        cache[each.name] = tuple(
            {name: _put_place(array, place, arrays[name][i]) for name, array in layer.items()}
            for i, layer in enumerate(state.cache[each.name])
        )
    writer.write_all(row, values_of(saved))
    state = executor.state
    columns: Any = {f: np.asarray(saved.sampling[f])[None] for f in COLUMNS}
    if state.rows.adapters is not None:
        columns[ADAPTERS] = np.asarray(saved.sampling.get(ADAPTERS, 0), np.int32)[None]
    history: Any = np.asarray(saved.token_ids, np.int32)[None]
    rows = _put(state.rows, np.array([row], np.int32), DeviceRows.of(columns, history))
    executor.state = dataclasses.replace(
        state, cache=cache, rows=jax.device_put(rows, executor.placement.replicated)
    )


@functools.partial(jax.jit, donate_argnums=0)
def _put_place(array: jax.Array, place: int, values: jax.Array) -> jax.Array:
    return array.at[place].set(values.astype(array.dtype))


def _check_group(executor: ExecutorView, group: CacheGroup | StateGroup, saved: RowState) -> None:
    """InputError when a state does not have the arrays that a cache group needs."""
    first = saved.num_cached
    if isinstance(group, StateGroup):
        wanted = {(group.num_layers, *one.shape) for one in group.arrays}
    else:
        first = group.first_position(saved.num_cached)
        heads = group.num_kv_heads // executor.info.kv_head_repeat
        wanted = {(group.num_layers, saved.num_cached - first, heads, group.head_dim)}
    found = saved.groups.get(group.name)
    shapes = set() if found is None else {(found.first, x.shape) for x in found.arrays.values()}
    if shapes != {(first, each) for each in wanted}:
        raise InputError(
            explain(
                f"row state with {sorted(shapes) or 'nothing'} for cache group {group.name!r}",
                f"{', '.join(map(str, sorted(wanted)))} from position {first} on",
                "Resume in an engine of the same model.",
            )
        )


_put = jax.jit(DeviceRows.put)  # a single program instead of several per column
