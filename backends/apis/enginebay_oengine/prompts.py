"""Checks of a prefill's arguments: prompts under a mask, sampling parameters and random keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.errors import InputError
from enginebay.types import FrozenSampling, Request, SamplingParams
from enginebay_oengine.active_batch import StateSizes
from enginebay_oengine.paged_cache import PagedAttentionCacheMetaData

KEY_WORDS = 2

NEUTRAL = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}


def read_prompts(
    tokens: Any,
    valids: Any,
    true_length: Any,
    sampling: tuple[Any, Any, Any],
    rngs: Any,
    metadata: PagedAttentionCacheMetaData,
    sizes: StateSizes,
    max_prompts: int,
) -> list[Request]:
    """Return the core's requests for the prompts in tokens int [L] or [n, L], where `valids` is
    true. None: the first true_length tokens of each row.

    true_length and each of sampling (temperature, top_p, top_k) are a number or [n] numbers; None
    in sampling is the neutral value. rngs: see read_keys. InputError (a ValueError) for wrong
    arguments.
    """
    prompts = _read_tokens(tokens, valids, true_length, max_prompts)
    most = sizes.max_length
    for prompt in prompts:
        if not 0 < len(prompt) < most:
            raise InputError(
                f"a prompt of {len(prompt)} tokens",
                f"1 to {most - 1}, which leaves room for one new token",
                "Shorten the prompt, or raise max_length or the number of pages.",
            )
        metadata.check_token_ids(prompt)
    temperature, top_p, top_k = (
        _broadcast(name, neutral if value is None else value, len(prompts))
        for (name, neutral), value in zip(NEUTRAL.items(), sampling, strict=True)
    )
    keys = read_keys(rngs, len(prompts))
    requests = []
    for i, prompt in enumerate(prompts):
        params = SamplingParams(
            temperature=float(temperature[i]), top_p=float(top_p[i]), top_k=int(top_k[i])
        )
        metadata.check_temperature(params.temperature)
        key = (int(keys[i, 0]), int(keys[i, 1]))
        requests.append(make_request(prompt, params, most, sizes.eos_token_ids, key))
    return requests


def _read_tokens(tokens: Any, valids: Any, true_length: Any, most: int) -> tuple[np.ndarray, ...]:
    """The prompts' tokens without padding, int32 each."""
    ids = np.atleast_2d(np.asarray(tokens))
    count = len(ids)
    if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer) or not 1 <= count <= most:
        raise InputError(
            f"tokens {ids.dtype}{list(np.shape(tokens))}",
            f"int [tokens] or [prompts, tokens] of 1 to {most} prompts (max_concurrent_prefill)",
            "Pass integer token ids, and split more prompts into several calls.",
        )
    lengths = _broadcast("true_length", true_length, count)
    if valids is None:
        mask = np.arange(ids.shape[1]) < lengths[:, None]
    else:
        mask = np.atleast_2d(np.asarray(valids)).astype(bool)
    if mask.shape != ids.shape or (mask.sum(axis=1) != lengths).any():
        raise InputError(
            f"true_length = {lengths.tolist()}, tokens {list(ids.shape)} and valids "
            f"{list(mask.shape)}",
            "valids of the same shape as tokens, in which every row has true_length true values",
            "Pass the number of true values as true_length.",
        )
    return tuple(row[keep].astype(np.int32) for row, keep in zip(ids, mask, strict=True))


def read_keys(rngs: Any, count: int) -> np.ndarray:
    """Return uint32 [count, 2] for one key (jax.random.PRNGKey or jax.random.key), or for one key
    per row.

    One key is used unchanged for a single row, and split for several rows. The key of a seed gives
    the same samples as a request with this seed.
    """
    if isinstance(rngs, jax.Array) and jnp.issubdtype(rngs.dtype, jax.dtypes.prng_key):
        rngs = jax.random.key_data(rngs)
    words = np.asarray(rngs)
    if words.dtype != np.uint32 or words.shape not in ((KEY_WORDS,), (count, KEY_WORDS)):
        raise InputError(
            f"rngs {words.dtype}{list(words.shape)}",
            f"a threefry key, or one for each of {count} rows",
            "Use the engine's prng_key, or jax.random.PRNGKey(seed).",
        )
    if words.ndim == 1 and count > 1:
        typed = jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")
        words = np.asarray(jax.random.key_data(jax.random.split(typed, count)))
    return words.reshape(count, KEY_WORDS)


def _broadcast(name: str, value: Any, count: int) -> np.ndarray:
    """Broadcast a number, or `count` numbers, to [count]."""
    array: Sequence[Any] | np.ndarray = np.asarray(value)
    if np.shape(array) not in ((), (1,), (count,)):
        raise InputError(
            f"{name} of shape {list(np.shape(array))}",
            f"a number, or {count} numbers",
            f"Pass one {name} for each prompt.",
        )
    return np.broadcast_to(array, (count,))


def make_request(
    token_ids: np.ndarray,
    params: SamplingParams,
    max_length: int,
    stop_token_ids: tuple[int, ...],
    key: tuple[int, int],
) -> Request:
    """Return the request of a prompt int32 [tokens] that ends at `max_length` tokens or at a stop
    token.
    """
    sampling = FrozenSampling(max_length - len(token_ids), params, stop_token_ids)
    return Request("", token_ids, sampling, key, arrival_s=0.0)
