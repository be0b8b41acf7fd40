"""Prefill and decode of a vInference in NumPy.

The rest of vInference is real; nothing is compiled.
"""

from __future__ import annotations

import types
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from enginebay_vinference import vInference, vInferenceConfig
from enginebay_vinference.state_steps import InferenceShape, Pair, Programs
from tests.fake_engine import NUM_SPECIAL
from tests.unit.vinference.small import BUCKETS, CONFIG, MODEL


class HostFunctions:
    """Prefill and decode of one shape. Each calls `before` first, with "prefill" or "decode".

    The next token of a row is the one that `script` has for its number of new tokens, and eos after
    the last of them. Without a script, a greedy row's is computed from the row's tokens, a sampled
    row's also from its key.
    """

    def __init__(self, inference: vInference, shape: InferenceShape) -> None:
        self.shape = shape
        self.vocab_size = inference.model.info.vocab_size
        arrays = inference.programs.arrays(shape, "decode")
        self.cache = arrays["model_kwargs"]["past_key_values"]
        self.before: Callable[[str], object] = lambda _: None
        self.script: list[int] | None = None
        self.eos_token_id = inference.generation_config.eos_token_ids[0]

    def pair(self) -> Pair:
        """Both functions, as Programs keeps them."""
        return Pair(self.prefill, self.decode)

    def prefill(self, _: Any, arrays: Any, keys: Any) -> Any:
        self.before("prefill")
        after = self._writable(arrays)
        kwargs, finished = after["model_kwargs"], after["is_sequence_finished"]
        counts = kwargs["attention_mask"][:, : self.shape.prefill_length].sum(axis=1)
        finished[:] = counts == 0
        kwargs["position_ids"] = counts[:, None].astype(np.int32) - 1
        kwargs["past_key_values"] = jax.tree.map(
            lambda like: np.zeros(like.shape, like.dtype), self.cache
        )
        return after, np.array([self._append(after, np.asarray(keys)), (~finished).sum()])

    def decode(self, _: Any, arrays: Any, keys: Any) -> Any:
        self.before("decode")
        after = self._writable(arrays)
        num_new = 0
        for _step in range(self.shape.chunk):
            if not after["is_sequence_finished"].all():
                num_new += self._append(after, np.asarray(keys))
        return after, np.array([num_new, (~after["is_sequence_finished"]).sum()])

    def _writable(self, arrays: Any) -> dict[str, Any]:
        """The arrays, with copies of those that a step changes. The cache is not copied."""
        kwargs = arrays["model_kwargs"]
        copies = {name: np.array(kwargs[name]) for name in ("attention_mask", "position_ids")}
        others = {name: np.array(arrays[name]) for name in arrays if name != "model_kwargs"}
        return {**others, "model_kwargs": {**kwargs, **copies}}

    def _append(self, after: dict[str, Any], keys: np.ndarray) -> int:
        """Append a token to each row that has not finished; return the number of such rows."""
        column, kwargs = int(after["current_length"]), after["model_kwargs"]
        sampling, positions = kwargs["sampling"], kwargs["position_ids"]
        going = np.flatnonzero(~after["is_sequence_finished"])
        for row in going:
            token = self._next(after, row, keys[row])
            after["sequences"][row, column], kwargs["attention_mask"][row, column] = token, 1
            after["running_token"][row], positions[row] = token, positions[row] + 1
            length = int(positions[row, 0]) + 1
            stops = np.asarray(sampling["stop_ids"])[row]
            after["is_sequence_finished"][row] = (
                token in stops or length >= np.asarray(sampling["max_length"])[row]
            )
        after["current_length"] = np.int32(column + (len(going) > 0))
        return len(going)

    def _next(self, after: dict[str, Any], row: int, key: np.ndarray) -> int:
        if self.script is not None:
            done = int(after["current_length"]) - self.shape.prefill_length
            return [*self.script, self.eos_token_id][min(done, len(self.script))]
        kwargs = after["model_kwargs"]
        seed = zlib.crc32(after["sequences"][row][kwargs["attention_mask"][row] > 0].tobytes())
        if float(np.asarray(kwargs["sampling"]["temperature"])[row]) > 0:
            seed = zlib.crc32(key.tobytes(), seed)
        return NUM_SPECIAL + seed % (self.vocab_size - NUM_SPECIAL)


class Compiler:
    """Replaces XLA's compiler: nothing is traced or compiled.

    It calls `before` with the number of each pair, from 1 on, before it returns the pair.
    """

    def __init__(self) -> None:
        self.num_pairs = 0
        self.before: Callable[[int], object] = lambda _: None

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Replace the tracing and compiling of Programs from now on."""

        def jitted(*_: Any, **__: Any) -> Any:
            return types.SimpleNamespace(lower=lambda *_: None)

        def compile_lowered(programs: Programs, lowered: list[Any]) -> Pair:
            self.num_pairs += 1
            self.before(self.num_pairs)
            programs.engine.compilations.count += len(lowered)
            return Pair(*lowered)

        patch.setattr(Programs, "jitted", jitted)
        patch.setattr(Programs, "compile_lowered", compile_lowered)


def make_hostside(
    config: vInferenceConfig = CONFIG, **options: Any
) -> tuple[vInference, list[HostFunctions]]:
    """A vInference whose functions for BUCKETS are HostFunctions, and these functions."""
    made = vInference(MODEL, None, config, **options)
    settled, functions = made.generation_config, []
    assert settled.pad_token_id is not None
    for one in BUCKETS.get_standalones():
        width = one.prefill_length + settled.max_new_tokens  # type: ignore[operator]
        shape = InferenceShape(
            one.batch_size,  # type: ignore[arg-type]
            one.prefill_length,  # type: ignore[arg-type]
            width,
            settled.streaming_chunks,
            MODEL["max_num_batched_tokens"],
            settled.pad_token_id,
        )
        functions.append(HostFunctions(made, shape))
        made.programs.get(shape, ahead=True, make=functions[-1].pair)
    before = made.num_compilations
    assert made.precompile(BUCKETS)
    assert made.num_compilations == before, "the shapes are those that it asks for"
    return made, functions
