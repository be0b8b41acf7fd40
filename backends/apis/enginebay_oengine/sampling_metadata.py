"""ModelRunnerSamplingMetadata: the sampling parameters of the rows of one step."""

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
from enginebay.json_text import parse_json
from enginebay.types import ROW_VALUES
from enginebay_oengine.documented_rows import SparseParams
from enginebay_oengine.row_arrays import (
    build_allowed_mask,
    build_sampling_arrays,
    fill_slice,
    pack_prompts,
)
from enginebay_oengine.sequence_buffer import SequenceBuffer
from enginebay_shared.stored import Storage

STORAGE = Storage("sampling metadata")
_FLAGS = ("all_greedy", "logprobs", "no_penalties")
_CARRIED = frozenset({"penalties", "min_tokens"})
"""Logits processors whose parameters are fields of ModelRunnerSamplingMetadata."""


@dataclasses.dataclass(frozen=True, eq=False)
class ModelRunnerSamplingMetadata:
    """Sampling parameters of rows 0 to B-1 of a table (B is padded_num_reqs): a pytree with three
    static flags.

    ::

        temperature, min_p, top_p                      f32 [B]; -1, 0, 1 in free rows
        top_k                                          i32 [B]; 0 keeps all
        frequency_, presence_, repetition_penalties    f32 [B]; 0, 0, 1 in free rows
        prompt_token_ids                               i32 [B, longest], padded with vocab_size
        output_token_ids                               a list for each row, empty for free rows
        logit_bias                                     a mapping for each row: token id -> bias
        allowed_token_ids_mask                         bool [B, vocabulary], True is not allowed
        min_tokens                                     row -> (min new tokens, stop token ids)
        bad_words_token_ids                            row -> forbidden sequences of token ids

    Penalties and prompt_token_ids are None with `no_penalties`. Each of the last three fields is
    None if no row uses it.
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
        """Return the metadata of a table's first padded_num_reqs rows, which must include all of
        its requests.

        If all requests are greedy, temperature, min_p, top_k and top_p are zeros unless
        `generate_params_if_all_greedy`; the other fields are set in any case, because penalties
        apply to greedy rows as well. The arrays have the table's sharding and do not change with
        the table. InputError for a request beyond padded_num_reqs, and for parameters without a
        field: other logits processors, or a repetition penalty on the output only.
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
        """Return a copy with other values. TypeError for an unknown field."""
        return dataclasses.replace(self, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as values for strict JSON, without loss."""
        return {
            field.name: STORAGE.to_plain(getattr(self, field.name))
            for field in dataclasses.fields(self)
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the metadata that to_dict() stored. InputError for other data."""
        fields = {name: STORAGE.from_plain(value) for name, value in data.items()}
        try:
            return cls(**fields)
        except TypeError as error:
            raise InputError(
                f"wrong fields ({error})",
                "the fields of to_dict()",
                "Store the metadata again.",
            ) from None

    def to_json(self, **kwargs: Any) -> str:
        """Return to_dict() as strict JSON; `kwargs` are passed to json.dumps."""
        return json.dumps(self.to_dict(), **({"allow_nan": False} | kwargs))

    @classmethod
    def from_json(cls, json_str: str) -> Self:
        """Return the metadata that to_json() stored. InputError for other text."""
        data = parse_json(json_str)
        if not isinstance(data, dict):
            given, allowed = f"JSON of type {type(data).__name__}", "the text of to_json()"
            raise InputError(given, allowed, "Store the metadata again.")
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


_WITHOUT_A_FIELD = {
    name: one.neutral
    for name, one in ROW_VALUES.items()
    if name.replace("penalty", "penalties") not in ModelRunnerSamplingMetadata.__dataclass_fields__
}
"""Values of rows that ModelRunnerSamplingMetadata has no field for, with their neutral values."""


def _check_holds_all(table: SequenceBuffer, num_rows: int) -> None:
    rows = table.taken_rows
    if num_rows < 1 or (len(rows) and rows[-1] >= num_rows):
        raise InputError(
            f"{num_rows} rows for {table.num_reqs} requests in rows {rows.tolist()}",
            "at least one row, including all rows with requests",
            "Raise padded_num_reqs, or call condense() first.",
        )


def _check_carries_all(table: SequenceBuffer) -> None:
    for row in table.taken_rows.tolist():
        processors = {one.name: one.values for one in table.request(row).sampling.processors}
        lost = sorted(processors.keys() - _CARRIED)
        if processors.get("penalties", {}).get("output_only"):
            lost.append("suppress_repetition_in_generation")
        lost += [n for n, neutral in _WITHOUT_A_FIELD.items() if table.column(n)[row] != neutral]
        if lost:
            raise InputError(
                f"row {row} with {', '.join(lost)}",
                "parameters with a field in ModelRunnerSamplingMetadata",
                "Run this request with LLM.generate or eSurge.",
            )


def _zeros(num_rows: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Four separate arrays, so that each can be donated."""
    temperature, min_p, top_p = (jnp.zeros(num_rows, jnp.float32) for _ in range(3))
    return temperature, min_p, top_p, jnp.zeros(num_rows, jnp.int32)


def _sampling_arrays(
    table: SequenceBuffer, num_rows: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The table's columns; free rows between requests are padding as well."""
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
    """Penalties, and prompts padded to a power of two, which limits the number of programs."""
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
        if one.stage == "penalty" and name not in _WITHOUT_A_FIELD
    }


def _output(table: SequenceBuffer, row: int) -> list[int]:
    if row >= table.max_num_reqs:
        return []
    return table.token_ids[row, table.num_prompt_tokens[row] : table.num_tokens[row]].tolist()


def _sparse(table: SequenceBuffer, num_rows: int) -> list[SparseParams]:
    """The parameters of each row, including rows beyond the table."""
    return [*table.sparse[:num_rows], *[SparseParams()] * (num_rows - table.max_num_reqs)]


def _allowed_mask(table: SequenceBuffer, num_rows: int) -> jax.Array | None:
    """None if every request allows every token. Free rows, and rows that allow every token, have no
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
    found = {row: sparse.min_tokens for row, sparse in enumerate(table.sparse) if sparse.min_tokens}
    return {
        row: (n, tuple(table.request(row).sampling.stop_token_ids)) for row, n in found.items()
    } or None


def _bad_words(table: SequenceBuffer) -> dict[int, list[list[int]]] | None:
    return {
        row: [list(word) for word in sparse.bad_words_token_ids]
        for row, sparse in enumerate(table.sparse)
        if sparse.bad_words_token_ids
    } or None
