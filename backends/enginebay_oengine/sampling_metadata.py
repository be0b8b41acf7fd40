"""ModelRunnerSamplingMetadata, all that sampling needs to know of the rows of one step."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from enginebay.errors import InputError
from enginebay.nesting import parse_json
from enginebay.types import ROW_VALUES
from enginebay_faces.stored import Storage
from enginebay_oengine.documented_rows import SparseParams
from enginebay_oengine.row_arrays import (
    build_allowed_mask,
    build_sampling_arrays,
    fill_slice,
    pack_prompts,
)
from enginebay_oengine.sequence_buffer import SequenceBuffer

STORAGE = Storage("sampling metadata")
_FLAGS = ("all_greedy", "logprobs", "no_penalties")
_CARRIED = frozenset({"penalties", "min_tokens"})
"""Logits processors of an engine's rows whose parameters the fields below have."""


@dataclasses.dataclass(frozen=True, eq=False)
class ModelRunnerSamplingMetadata:
    """Sampling parameters of rows 0 to B-1 of a table (B is padded_num_reqs), a pytree whose three
    flags are static.

    ::

        temperature, min_p, top_p                      f32 [B]; -1, 0, 1 in free rows
        top_k                                          i32 [B]; 0 keeps all
        frequency_, presence_, repetition_penalties    f32 [B]; 0, 0, 1 in free rows
        prompt_token_ids                               i32 [B, longest], filled up with vocab_size
        output_token_ids                               a list for each row, empty for free ones
        logit_bias                                     the same: added to scores of token ids
        allowed_token_ids_mask                         bool [B, vocabulary], True is not allowed
        min_tokens                                     (fewest new tokens, stop token ids) by row
        bad_words_token_ids                            forbidden sequences of token ids, by row

    Penalties and prompt_token_ids are None when `no_penalties`, and each of the last three is None
    when no row has any.
    """

    temperature: jax.Array
    min_p: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    all_greedy: bool = True
    logprobs: bool = False
    no_penalties: bool = True
    prompt_token_ids: Any = None
    frequency_penalties: Any = None
    presence_penalties: Any = None
    repetition_penalties: Any = None
    output_token_ids: list[list[int]] = dataclasses.field(default_factory=list)
    min_tokens: Any = None
    logit_bias: list[dict[int, float]] = dataclasses.field(default_factory=list)
    allowed_token_ids_mask: Any = None
    bad_words_token_ids: Any = None

    @classmethod
    def from_sequence_buffer(
        cls,
        sequence_buffer: SequenceBuffer,
        padded_num_reqs: int,
        generate_params_if_all_greedy: bool = False,  # noqa: FBT001, FBT002 -- the documented signature
    ) -> Self:
        """The metadata of a table's first padded_num_reqs rows, which must hold all of its
        requests.

        When all are greedy, temperature, min_p, top_k and top_p are zeros unless
        `generate_params_if_all_greedy`; the rest is carried in any case, because greedy rows have
        penalties too. The arrays are placed with the table's sharding, and do not change with the
        table. Raises InputError for a request beyond padded_num_reqs, and for an engine's request
        with logits processors, or with a repetition penalty on its output alone, that no field has.
        """
        table, num_rows = sequence_buffer, padded_num_reqs
        _check_holds_all(table, num_rows)
        _check_carries_all(table)
        plain = table.all_greedy and not generate_params_if_all_greedy
        temperature, min_p, top_p, top_k = (
            _zeros(num_rows) if plain else _sampling_arrays(table, num_rows)
        )
        made = cls(
            temperature=temperature,
            min_p=min_p,
            top_k=top_k,
            top_p=top_p,
            all_greedy=table.all_greedy,
            logprobs=table.max_num_logprobs is not None,
            no_penalties=table.no_penalties,
            output_token_ids=[_output(table, row) for row in range(num_rows)],
            min_tokens=_min_tokens(table),
            logit_bias=[dict(sparse.logit_bias) for sparse in _sparse(table, num_rows)],
            allowed_token_ids_mask=_allowed_mask(table, num_rows),
            bad_words_token_ids=_bad_words(table),
            **({} if table.no_penalties else _penalties(table, num_rows)),
        )
        return made._placed(table.sharding) if table.sharding is not None else made

    def replace(self, **kwargs: Any) -> Self:
        """This metadata with other values; TypeError for a field that there is not."""
        return dataclasses.replace(self, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Every field as values that strict JSON can hold; nothing is lost."""
        return {
            field.name: STORAGE.to_plain(getattr(self, field.name))
            for field in dataclasses.fields(self)
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The metadata that to_dict() was called on. InputError for what is none."""
        fields = {name: STORAGE.from_plain(value) for name, value in data.items()}
        try:
            return cls(**fields)
        except TypeError as error:
            raise InputError(
                f"fields that do not fit ({error})", "to_dict()'s", "Store it again."
            ) from None

    def to_json(self, **kwargs: Any) -> str:
        """to_dict() as strict JSON; `kwargs` go to json.dumps."""
        return json.dumps(self.to_dict(), **({"allow_nan": False} | kwargs))

    @classmethod
    def from_json(cls, json_str: str) -> Self:
        """The metadata that to_json() was called on. InputError for text that is none."""
        data = parse_json(json_str)
        if not isinstance(data, dict):
            raise InputError(f"a {type(data).__name__}", "what to_json() gave", "Store it again.")
        return cls.from_dict(data)

    def _placed(self, sharding: jax.sharding.Sharding) -> Self:
        return jax.tree.map(
            lambda v: jax.device_put(v, sharding) if isinstance(v, jax.Array) else v, self
        )


tree_util.register_dataclass(
    ModelRunnerSamplingMetadata,
    data_fields=[
        f.name for f in dataclasses.fields(ModelRunnerSamplingMetadata) if f.name not in _FLAGS
    ],
    meta_fields=list(_FLAGS),
)


def _check_holds_all(table: SequenceBuffer, num_rows: int) -> None:
    rows = table.taken_rows
    if num_rows < 1 or (len(rows) and rows[-1] >= num_rows):
        raise InputError(
            f"{num_rows} rows for {table.num_reqs} requests in rows {rows.tolist()}",
            "at least one row, and all that hold requests",
            "Raise padded_num_reqs, or condense the table.",
        )


def _check_carries_all(table: SequenceBuffer) -> None:
    for row in table.taken_rows.tolist():
        processors = {one.name: one.values for one in table.request(row).sampling.processors}
        lost = sorted(processors.keys() - _CARRIED)
        if processors.get("penalties", {}).get("output_only"):
            lost.append("suppress_repetition_in_generation")
        if lost:
            raise InputError(
                f"row {row} with {', '.join(lost)}",
                "requests whose sampling the sixteen fields describe",
                "Run this request with LLM.generate or eSurge, which apply it.",
            )


def _zeros(num_rows: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Four arrays of their own, so that they can be donated."""
    temperature, min_p, top_p = (jnp.zeros(num_rows, jnp.float32) for _ in range(3))
    return temperature, min_p, top_p, jnp.zeros(num_rows, jnp.int32)


def _sampling_arrays(
    table: SequenceBuffer, num_rows: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The table's columns; rows that are free between taken ones are padding like those
    after them.
    """
    temperature = np.full_like(table.temperature, -1.0)
    temperature[table.taken_rows] = table.temperature[table.taken_rows]
    return build_sampling_arrays(
        temperature,
        table.min_p,
        table.top_p,
        table.top_k,
        min(num_rows, table.max_num_reqs),
        num_rows,
    )


def _penalties(table: SequenceBuffer, num_rows: int) -> dict[str, jax.Array]:
    """The penalties, and the prompts that repetition is counted in: padded to a power of two for
    few programs.
    """
    given = min(num_rows, table.max_num_reqs)
    longest = max(1, int(table.num_prompt_tokens.max()))
    padded_len = min(1 << (longest - 1).bit_length(), table.max_model_len)
    return {
        "prompt_token_ids": pack_prompts(
            table.token_ids, table.num_prompt_tokens, num_rows, padded_len, table.vocab_size
        ),
    } | {
        name.replace("penalty", "penalties"): fill_slice(
            table.column(name), one.neutral, given, num_rows
        )
        for name, one in ROW_VALUES.items()
        if one.stage == "penalty"
    }


def _output(table: SequenceBuffer, row: int) -> list[int]:
    if row >= table.max_num_reqs:
        return []
    return table.token_ids[row, table.num_prompt_tokens[row] : table.num_tokens[row]].tolist()


def _sparse(table: SequenceBuffer, num_rows: int) -> list[SparseParams]:
    """One for each row, those beyond the table included."""
    return [*table.sparse[:num_rows], *[SparseParams()] * (num_rows - table.max_num_reqs)]


def _allowed_mask(table: SequenceBuffer, num_rows: int) -> jax.Array | None:
    """None when every request may sample every token; rows that may, and free ones, have no
    True.
    """
    if table.no_allowed_token_ids:
        return None
    allowed = [sparse.allowed_token_ids for sparse in _sparse(table, num_rows)]
    longest = max(len(ids) for ids in allowed if ids is not None)
    width = 1 << (longest - 1).bit_length()
    padded = np.zeros((num_rows, width), np.int32)
    for row, ids in enumerate(allowed):
        padded[row, : len(ids or ())] = ids or ()
    lengths = np.array([len(ids or ()) for ids in allowed], np.int32)
    return build_allowed_mask(padded, lengths, table.vocab_size, width) & (lengths > 0)[:, None]


def _min_tokens(table: SequenceBuffer) -> dict[int, tuple[int, tuple[int, ...]]] | None:
    asked = {row: sparse.min_tokens for row, sparse in enumerate(table.sparse) if sparse.min_tokens}
    return {
        row: (n, tuple(table.request(row).sampling.stop_token_ids)) for row, n in asked.items()
    } or None


def _bad_words(table: SequenceBuffer) -> dict[int, list[list[int]]] | None:
    asked = {
        row: s.bad_words_token_ids for row, s in enumerate(table.sparse) if s.bad_words_token_ids
    }
    return {row: [list(word) for word in words] for row, words in asked.items()} or None
