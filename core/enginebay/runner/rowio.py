"""Taking a row's state out of the step state and putting one in: the way of resuming, moving and
storing.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.engine import RowState
from enginebay.errors import InputError, explain
from enginebay.processor import RowValues
from enginebay.runner.device import COLUMNS, DeviceRows
from enginebay.runner.runner import Runner


def take_row(runner: Runner, row: int, page_ids: np.ndarray, token_ids: np.ndarray) -> RowState:
    """The state of `row`, whose cache lies in the pages page_ids int32 [pages], read to the host."""
    state = runner.state
    columns = {f: np.array(np.asarray(getattr(state.rows, f))[row]) for f in COLUMNS}
    processor_state = {
        f"{one.name}/{f}": v for one in runner.writer.read(row) for f, v in one.values.items()
    }
    num_cached = max(int(columns["length"]) - 1, 0)
    keys: dict[str, np.ndarray] = {}
    values: dict[str, np.ndarray] = {}
    for group, layers in state.cache.items():
        layout = runner.layouts[group]
        position = np.arange(num_cached)
        slots = jnp.asarray(
            page_ids[position // layout.page_size] * layout.page_size + position % layout.page_size,
            jnp.int32,
        )
        pairs = [layout.read_tokens(layer, slots) for layer in layers]
        repeat = runner.info.kv_head_repeat
        keys[group] = np.stack([np.asarray(k)[:, ::repeat] for k, _ in pairs])
        values[group] = np.stack([np.asarray(v)[:, ::repeat] for _, v in pairs])
    return RowState(
        token_ids=np.array(token_ids, np.int32),
        num_cached=num_cached,
        last_token=int(columns["last_token"]),
        k=keys,
        v=values,
        sampling=columns | processor_state,
        constants=runner.info.constants,
    )


def put_row(runner: Runner, row: int, page_ids: np.ndarray, saved: RowState) -> None:
    """Write `saved` into `row` and its pages; InputError when it is from a model of another shape
    or other constants, or too long.
    """
    if saved.constants != runner.info.constants:
        raise InputError(
            explain(
                "row state of a model with another rotary embedding, activation or epsilon",
                "that of this engine, which of some checkpoints depends on max_model_len",
                "Resume in an engine of the same model with the same max_model_len.",
            )
        )
    state = runner.state
    most = state.rows.token_ids.shape[1]
    if len(saved.token_ids) > most:
        raise InputError(
            explain(
                f"row state of {len(saved.token_ids)} tokens",
                f"at most {most}",
                "Resume in an engine with a larger max_model_len.",
            )
        )
    repeat = runner.info.kv_head_repeat
    cache = {}
    for group, layers in state.cache.items():
        layout = runner.layouts[group]
        expected = (len(layers), saved.num_cached, layout.num_kv_heads // repeat, layout.head_dim)
        if group not in saved.k or saved.k[group].shape != expected:
            given = saved.k[group].shape if group in saved.k else "nothing"
            raise InputError(
                explain(
                    f"row state with {given} for cache group {group!r}",
                    f"{expected}",
                    "Resume in an engine of the same model.",
                )
            )
        position = np.arange(saved.num_cached)
        slots = jnp.asarray(
            page_ids[position // layout.page_size] * layout.page_size + position % layout.page_size,
            jnp.int32,
        )
        write = jax.jit(layout.write, donate_argnums=0)
        cache[group] = tuple(
            write(
                layer, slots, *(np.repeat(x[group][i], repeat, axis=1) for x in (saved.k, saved.v))
            )
            for i, layer in enumerate(layers)
        )
    runner.writer.write_all(row, _own_of(saved))
    state = runner.state
    columns: dict[str, Any] = {f: np.asarray(saved.sampling[f])[None] for f in COLUMNS}
    columns["token_ids"] = np.asarray(saved.token_ids, np.int32)[None]
    rows = _put(state.rows, np.array([row], np.int32), DeviceRows(**columns))
    runner.state = dataclasses.replace(
        state, cache=cache, rows=jax.device_put(rows, runner.placement.replicated)
    )


_put = jax.jit(DeviceRows.put)  # one program, instead of some for each column


def _own_of(saved: RowState) -> list[RowValues]:
    """The fields of logits processors among a row's columns, which are called "processor/field"."""
    processor_state: dict[str, dict[str, np.ndarray]] = {}
    for column, value in saved.sampling.items():
        name, _, field = column.rpartition("/")
        if name:
            processor_state.setdefault(name, {})[field] = value
    return [RowValues(name, values) for name, values in processor_state.items()]
