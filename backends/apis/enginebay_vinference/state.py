"""SampleState: everything that a generation needs to continue after a step, as a pytree that can be
stored and moved.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from jax import tree_util
from safetensors.numpy import save_file

from enginebay.errors import InputError, shown, shown_text
from enginebay.json_text import parse_json
from enginebay_shared.stored import Storage
from enginebay_vinference.errors import SpentStateError
from enginebay_vinference.precompile import vInferencePreCompileConfig

STORAGE = Storage("a state", {"$precompile": vInferencePreCompileConfig})

FORMAT = "enginebay.tree.2"
WITHOUT_CHECKSUMS = "enginebay.tree.1"
"""The format of older versions. It is refused, because damage in such a file cannot be detected."""

ARRAY_FIELDS = (
    "current_length",
    "sequences",
    "running_token",
    "is_sequence_finished",
    "model_kwargs",
)
"""The fields with arrays, which are donated to the next step."""


@dataclasses.dataclass(frozen=True, repr=False)
class SampleState:
    """The complete state of a generation of B rows (B is the batch size times
    num_return_sequences).

    current_length: int32 [], used columns of `sequences`. sequences: int32 [B, padded_length +
    max_new_tokens], each prompt padded on the left to padded_length, followed by its new tokens;
    unused columns hold the pad id. running_token: int32 [B, 1], the last sampled token, which is
    not in the cache yet. is_sequence_finished: bool [B]. prng_key: one key, typed or raw (row i
    samples with the key folded with i), or typed keys [B], one for each row. model_kwargs:
    "attention_mask" int32 like sequences, 1 on tokens; "position_ids" int32 [B, 1], the position of
    running_token; "sampling", each row's parameters; and after the prefill "past_key_values", the
    cache: "views", one mapping per layer with the arrays of the engine's layout. generated_tokens:
    tokens sampled so far in all rows. tokens_per_second and `_time_spent_computing` (seconds)
    measure decoding only.

    A step donates its state's arrays, so that the cache is never copied. The state is spent
    afterwards: passing it to a step or reading one of its arrays raises SpentStateError. Its
    numbers stay readable. `copy()` makes a state with arrays of its own.
    """

    current_length: Any
    sequences: Any
    running_token: Any
    is_sequence_finished: Any
    prng_key: Any
    model_kwargs: Any
    tokens_per_second: Any = -math.inf
    generated_tokens: Any = 0
    padded_length: Any = 0
    _time_spent_computing: Any = 0.0
    _compile_config: vInferencePreCompileConfig | None = None

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name in ARRAY_FIELDS and _is_deleted(value):
            raise _spent()
        return value

    def __repr__(self) -> str:
        """Show size and progress, without the arrays; works for a spent state as well."""
        shape = getattr(object.__getattribute__(self, "sequences"), "shape", None)
        end = ", spent" if self.is_spent else ""
        return (
            f"SampleState(sequences {list(shape or ())}, "
            f"generated_tokens={self.generated_tokens}{end})"
        )

    @property
    def is_spent(self) -> bool:
        """Whether the arrays were donated to a later step."""
        return any(_is_deleted(object.__getattribute__(self, name)) for name in ARRAY_FIELDS)

    def check_not_spent(self) -> None:
        """Raise SpentStateError for a spent state."""
        if self.is_spent:
            raise _spent()

    def check(self, vocab_size: int) -> None:
        """Raise InputError for a state that no generation of a model with this vocabulary size
        returns, for example a loaded state of another model.

        Checked are the tokens under the mask, each row's running token, and the counts.
        """
        try:
            num_rows, width = self.sequences.shape
            ids = np.asarray(self.sequences)[np.asarray(self.model_kwargs["attention_mask"]) > 0]
            ids = np.concatenate([ids, np.asarray(self.running_token).reshape(-1)])
            counts = int(self.padded_length), int(self.current_length), int(self.generated_tokens)
            seconds = float(self.tokens_per_second), float(self._time_spent_computing)
            wrong = ids[(ids < 0) | (ids >= vocab_size)]
        except (
            AttributeError,
            IndexError,
            KeyError,
            TypeError,
            ValueError,
            OverflowError,
        ) as error:
            raise _of_another(shown_text(str(error))) from error
        if len(wrong):
            raise InputError(
                f"a state with token id {wrong[0]}",
                f"0 to {vocab_size - 1}",
                "Use the model that made this state.",
            )
        if (
            not num_rows
            or not 0 < counts[0] <= counts[1] <= width
            or counts[2] < 0
            or math.isnan(sum(seconds))
        ):
            raise _of_another(
                f"{counts[0]} of {counts[1]} columns in use, {counts[2]} tokens generated"
            )

    def copy(self) -> SampleState:
        """Return the same state with arrays of its own."""
        self.check_not_spent()
        return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf, self)

    def replace(self, **changes: Any) -> SampleState:
        """Return this state with other values, sharing the arrays. TypeError for an
        unknown field.
        """
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as values for strict JSON, without loss of dtypes, shapes, keys or
        infinities.
        """
        self.check_not_spent()
        return {name: STORAGE.to_plain(value) for name, value in self._fields().items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the state that to_dict() stored. InputError for other data."""
        if not isinstance(data, Mapping):
            given = f"a stored state of type {type(data).__name__}"
            raise InputError(given, "the mapping that to_dict() gave", "Store it again.")
        try:
            return cls._from_fields(
                {name: STORAGE.from_plain(value) for name, value in data.items()}
            )
        except InputError:
            raise
        except (AttributeError, TypeError, ValueError, RecursionError) as error:
            given = (
                f"a stored state that cannot be read ({type(error).__name__}: "
                f"{shown_text(str(error))})"
            )
            raise InputError(given, "the mapping that to_dict() gave", "Store it again.") from error

    def to_json(self, **options: Any) -> str:
        """Return to_dict() as strict JSON; `options` are passed to json.dumps. For large caches use
        save().
        """
        return json.dumps(self.to_dict(), allow_nan=False, **options)

    @classmethod
    def from_json(cls, json_str: str) -> Self:
        """Return the state that to_json() stored. InputError for other text."""
        return cls.from_dict(parse_json(json_str))

    def save(self, path: str | Path) -> None:
        """Write the state to a safetensors file: one tensor for each array, all else in the
        metadata.
        """
        self.check_not_spent()
        write_binary(Path(path), self._fields(), STORAGE)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the state in a file that save() wrote. InputError for a missing, damaged or other
        file.
        """
        return cls._from_fields(read_binary(Path(path), STORAGE))

    def _fields(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def _from_fields(cls, fields: Mapping[str, Any]) -> Self:
        names = {field.name for field in dataclasses.fields(cls)}
        missing = sorted(names - set(fields))
        unknown = sorted(set(fields) - names)
        if missing or unknown:
            raise InputError(
                f"a stored state without {missing} and with {shown(unknown)}",
                ", ".join(sorted(names)),
                "Store the state with this version.",
            )
        return cls(**fields)


tree_util.register_dataclass(
    SampleState,
    data_fields=[f.name for f in dataclasses.fields(SampleState) if f.name != "_compile_config"],
    meta_fields=["_compile_config"],
)


def _is_deleted(value: Any) -> bool:
    arrays = (leaf for leaf in jax.tree.leaves(value) if isinstance(leaf, jax.Array))
    return any(not isinstance(array, jax.core.Tracer) and array.is_deleted() for array in arrays)


def _spent() -> SpentStateError:
    return SpentStateError(
        "a spent state, whose arrays were donated to the next step",
        "the newest state, or a copy",
        "Call state.copy() before the step to use a state again.",
    )


def _of_another(why: str) -> InputError:
    return InputError(
        f"a state of another model or configuration ({why})",
        "a state of this inference",
        "Use the model and configuration that made this state.",
    )


def check_key(key: jax.Array, num_rows: int) -> None:
    """Raise InputError unless `key` is one key, or one key for each of num_rows rows."""
    is_array = isinstance(key, jax.Array | np.ndarray)
    is_typed = is_array and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not is_typed and not (is_array and key.dtype == np.uint32 and key.shape[-1:] == (2,)):
        given = f"{key.dtype}{list(key.shape)}" if is_array else f"a {type(key).__name__}"
        raise InputError(
            f"{given} as prng_key",
            "a typed key, or raw threefry keys, uint32[2] or [rows, 2]",
            "Make one with jax.random.key(seed).",
        )
    rank = key.ndim if is_typed else key.ndim - 1
    if rank == 0 or (rank == 1 and key.shape[0] == num_rows):
        return
    given = f"{key.shape[0]} keys" if rank == 1 else f"a key of shape {list(key.shape)}"
    raise InputError(
        f"{given} for {num_rows} rows",
        "one key, or one for each row",
        "Pass jax.random.split(key, num_rows).",
    )


@functools.partial(jax.jit, static_argnums=1)
def row_keys(key: jax.Array, num_rows: int) -> jax.Array:
    """Return the raw threefry keys uint32 [num_rows, 2] with which the rows of a state sample.

    A single key is folded with each row's index, as a request's key is folded with the index of a
    completion. Keys for each row (typed [n] or raw [n, 2]) are used unchanged, and rows from n on
    get zeros. A key of another implementation than threefry is reduced to two random words first.
    """
    raw = key
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raw = jax.random.key_data(key)
        if raw.shape[-1] != 2:  # words of a threefry key
            draw = functools.partial(jax.random.bits, shape=(2,), dtype=jnp.uint32)
            raw = draw(key) if key.ndim == 0 else jax.vmap(draw)(key)
    if raw.ndim == 2:
        return jnp.pad(raw, ((0, num_rows - raw.shape[0]), (0, 0)))
    typed = jax.random.wrap_key_data(raw, impl="threefry2x32")
    return jax.vmap(lambda row: jax.random.key_data(jax.random.fold_in(typed, row)))(
        jnp.arange(num_rows)
    )


def write_binary(path: Path, fields: Mapping[str, Any], storage: Storage) -> None:
    """Write a mapping of trees. The file appears only when it is complete."""
    tensors: dict[str, np.ndarray] = {}

    def keep(array: np.ndarray) -> dict[str, Any]:
        name = f"{len(tensors):05d}"
        tensors[name] = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
        return {"tensor": name}

    tree = json.dumps(
        {name: storage.to_plain(value, keep) for name, value in fields.items()}, allow_nan=False
    )
    part = path.with_name(path.name + ".part")
    metadata = {"format": FORMAT, "tree": tree, "crc32": str(zlib.crc32(tree.encode()))}
    save_file(tensors, part, metadata=metadata)
    part.replace(path)


def read_binary(path: Path, storage: Storage) -> dict[str, Any]:
    """Return the mapping that write_binary() wrote.

    InputError for a file that is missing, damaged or of another kind.
    """
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            _check_format(path, metadata.get("format"))
            if str(zlib.crc32(metadata["tree"].encode())) != metadata["crc32"]:
                raise _damaged(path, "the checksum of its header does not match")
            plain = parse_json(metadata["tree"])

            def load(head: Mapping[str, Any]) -> bytes:
                return file.get_tensor(head["tensor"]).tobytes()

            return {name: storage.from_plain(value, load) for name, value in plain.items()}
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except (OSError, safetensors.SafetensorError, *_MALFORMED) as error:
        raise _damaged(path, f"{type(error).__name__}: {shown_text(str(error))}") from error


_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


def _check_format(path: Path, found: str | None) -> None:
    if found == WITHOUT_CHECKSUMS:
        raise InputError(
            "a state saved by an older version, without checksums",
            f"a file of format {FORMAT}",
            "Generate the state again and save it with this version.",
        )
    if found != FORMAT:
        raise InputError(
            "a file of another kind", "a file that SampleState.save() wrote", "Pass its path."
        )


def _damaged(path: Path, why: str) -> InputError:
    return InputError(
        f"{path} cannot be read ({why})",
        "a complete, unchanged file that SampleState.save() wrote",
        "Use another copy, or save the state again.",
    )
