"""Fitting of inputs to compiled shapes: prompts are padded on the left or truncated to their last
tokens, and every row keeps its place.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from enginebay.errors import RequestError, UnsupportedError
from enginebay_vinference.errors import InferenceWarning
from enginebay_vinference.precompile import vInferencePreCompileConfig

SEQUENCE_DIM_MAPPING = {
    "input_ids": 1,
    "attention_mask": 1,
    "position_ids": 1,
    "past_key_values": 2,
    "token_type_ids": 1,
    "inputs_embeds": 1,
}
"""The token dimension of each model input."""

PADDED = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "inputs_embeds")
"""The inputs that are padded and truncated here; a cache has its own length."""


@dataclasses.dataclass(frozen=True)
class FitTarget:
    """The target of a fit: compiled standalone configurations, max prompt length, and pad token
    id.
    """

    compiled: tuple[vInferencePreCompileConfig, ...]
    max_prefill_length: int
    pad_token_id: int


def refuse_inputs(others: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for a model input other than ids and mask that is not None: no model
    here uses one.
    """
    used = sorted(name for name, value in others.items() if value is not None)
    if used:
        given = f"model inputs {', '.join(used)}"
        raise UnsupportedError(given, "input_ids and attention_mask", "Omit the other inputs.")


def adjust(
    fit: FitTarget, input_ids: Any, attention_mask: Any, others: Mapping[str, Any]
) -> tuple[dict[str, Any], vInferencePreCompileConfig]:
    """Fit inputs to the smallest compiled (batch, prefill length) that holds them; return the
    fitted inputs and that configuration.

    input_ids int [batch, tokens]; attention_mask of the same shape, 1 on tokens. Rows are padded
    on the left, and empty rows are added after the last row. If no compiled batch is large enough,
    the shape is kept and a warning is issued. A prompt that is longer than all fitting
    configurations keeps its last tokens, with a warning. Entries of `others` with a token
    dimension are fitted like input_ids; pixel_values set the configuration's vision fields; other
    entries stay unchanged. ValueError for no rows, no tokens, or shapes that differ.
    """
    ids = _integers("input_ids", input_ids)
    mask = (
        np.ones_like(ids) if attention_mask is None else _integers("attention_mask", attention_mask)
    )
    if mask.shape != ids.shape:
        raise RequestError(
            f"attention_mask {list(mask.shape)} for input_ids {list(ids.shape)}",
            "equal shapes",
            "Pass a mask with 1 on tokens and 0 on padding.",
        )
    vision = vision_fields(others.get("pixel_values"))
    config = _choose(fit, mask, vision)
    inputs = {"input_ids": ids, "attention_mask": mask, **others}
    along = {name: np.asarray(inputs[name]) for name in PADDED if inputs.get(name) is not None}
    for name, value in along.items():
        if value.shape[:2] != ids.shape:
            raise RequestError(
                f"{name} {list(value.shape)} for input_ids {list(ids.shape)}",
                "the same rows and tokens",
                f"Pad {name} like input_ids.",
            )
    assert isinstance(config.batch_size, int), "standalone"
    assert isinstance(config.prefill_length, int), "resolved by _choose"
    if ids.shape[1] > config.prefill_length:
        along = _keep_ends(along, mask, config.prefill_length)
    fills = {"input_ids": fit.pad_token_id}
    fitted = {
        name: _pad(value, config.batch_size, config.prefill_length, fills.get(name, 0))
        for name, value in along.items()
    }
    return {**inputs, **fitted}, config


def vision_fields(pixel_values: Any) -> dict[str, Any]:
    """The configuration's vision fields for pixel_values.

    pixel_values are [batch, channels, height, width], one image [channels, height, width], or
    patches [patches, features], which count as height and width of one channel.
    """
    if pixel_values is None:
        return {}
    shape = np.shape(pixel_values)
    if not 2 <= len(shape) <= 4:
        allowed = "2, 3 or 4 dimensions"
        todo = "Pass pixel_values of [batch, channels, height, width]."
        raise RequestError(f"pixel_values {list(shape)}", allowed, todo)
    sizes = (*(1,) * (4 - len(shape)), *shape)
    names = ("vision_batch_size", "vision_channels", "vision_height", "vision_width")
    return {"vision_included": True, **dict(zip(names, sizes, strict=True))}


def _integers(name: str, value: Any) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError:
        raise RequestError(
            f"{name} with rows of unequal lengths",
            "[batch, tokens]",
            "Pad the rows, and pass a mask.",
        ) from None
    if array.ndim != 2 or 0 in array.shape:
        raise RequestError(
            f"{name} of shape {list(array.shape)}",
            "[batch, tokens] with at least one of each",
            "Pass a list of rows of token ids.",
        )
    if array.dtype.kind not in "iub":
        raise RequestError(
            f"{name} of dtype {array.dtype}", "integers", f"Pass {name}.astype(int32)."
        )
    limits = np.iinfo(np.int32)
    if array.max() > limits.max or array.min() < limits.min:
        given = f"{name} from {array.min()} to {array.max()}"
        raise RequestError(given, "32-bit integers", "Use the model's tokenizer.")
    return array.astype(np.int32)


def _choose(
    fit: FitTarget, mask: np.ndarray, vision: Mapping[str, Any]
) -> vInferencePreCompileConfig:
    batch, length = mask.shape
    max_tokens = int((mask > 0).sum(axis=1).max())
    own = vInferencePreCompileConfig(batch, min(length, fit.max_prefill_length), **vision)
    able = [c for c in fit.compiled if c.batch_size >= batch and _vision(c) == _vision(own)]
    fitting = [c for c in able if c.prefill_length >= length]
    if fitting:
        return min(fitting, key=_size)
    if able:
        longest = max(able, key=lambda c: (c.prefill_length, -c.batch_size))  # type: ignore[operator]
        if max_tokens > longest.prefill_length:  # type: ignore[operator]
            _warn(
                f"a prompt of {max_tokens} tokens is truncated to its last "
                f"{longest.prefill_length}: precompile a longer prefill_length"
            )
        return longest
    if max_tokens > fit.max_prefill_length:
        _warn(
            f"a prompt of {max_tokens} tokens is truncated to its last "
            f"{fit.max_prefill_length}, which leaves room for max_new_tokens"
        )
    _warn(
        f"nothing is precompiled for a batch of {batch}: compiling for {batch} x "
        f"{own.prefill_length} tokens now"
    )
    return own


def _vision(config: vInferencePreCompileConfig) -> dict[str, Any]:
    return {name: v for name, v in config.extract().items() if name.startswith("vision")}


def _size(config: vInferencePreCompileConfig) -> tuple[int, int]:
    return config.batch_size, config.prefill_length  # type: ignore[return-value]


def _warn(text: str) -> None:
    warnings.warn(text, InferenceWarning, stacklevel=5)


def _keep_ends(
    arrays: Mapping[str, np.ndarray], mask: np.ndarray, length: int
) -> dict[str, np.ndarray]:
    """The last `length` columns, after moving each row's tokens to its end, past padding on the
    right.
    """
    order = np.argsort(mask > 0, axis=1, kind="stable")[:, -length:]
    rows = np.arange(mask.shape[0])[:, None]
    return {name: value[rows, order] for name, value in arrays.items()}


def _pad(value: np.ndarray, batch: int, length: int, fill: int) -> np.ndarray:
    padding = [(0, batch - value.shape[0]), (length - value.shape[1], 0)] + [(0, 0)] * (
        value.ndim - 2
    )
    return np.pad(value, padding, constant_values=fill)


def real_rows(input_ids: np.ndarray, attention_mask: np.ndarray) -> Iterable[list[int]]:
    """The token ids of each row without padding."""
    return (
        [int(t) for t in ids[mask > 0]] for ids, mask in zip(input_ids, attention_mask, strict=True)
    )
