"""Names the likely cause of a wrong attention output: computes the token again with one thing
wrong, and tells which of these results the kernel returned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from enginebay_testing import oracle
from enginebay_testing.attention_inputs import AttentionInputs

CLOSE = 4.0
"""A result explains an output if it is nearer to it by this factor than the right result is."""


def likely_cause(problem: AttentionInputs, token: int, head: int, got: np.ndarray) -> str:
    """Return the likely cause of the output `got` [Dv] of one query head of one packed token, as
    text that ends a message; "" if no known mistake gives about this output.
    """
    if not np.isfinite(got).all():
        return "; it is not finite, as if a place without a key or value was read"
    right = _attended(problem, token, head)
    off = float(np.abs(got - right).max())
    best = min(
        ((float(np.abs(got - each).max()), text) for text, each in _mistakes(problem, token, head)),
        key=lambda each: each[0],  # the first of equals
        default=(np.inf, ""),
    )
    return f"; likely cause: {best[1]}" if best[0] * CLOSE < off else ""


def _attended(
    problem: AttentionInputs,
    token: int,
    head: int,
    *,
    kept: np.ndarray | None = None,
    kv_head: int | None = None,
    query_head: int | None = None,
    **other: Any,
) -> np.ndarray:
    """Return the output f64 [Dv] of one query head, with other fields of the spec, a KV head, the
    inputs of another query head, or only the keys `kept` bool [kv_len], of which it sees one.
    """
    spec = dataclasses.replace(problem.case.spec, **other)
    row = int(problem.token_rows[token])
    home = head // spec.group if kv_head is None else kv_head
    keys, values = (rows[row][:, home : home + 1] for rows in (problem.keys, problem.values))
    first = int(np.argmax(problem.token_rows == row))
    count = int((problem.token_rows == row).sum())
    position = len(keys) - count + token - first
    at = head if query_head is None else query_head
    one = dataclasses.replace(spec, num_q_heads=1, num_kv_heads=1, scale=spec.softmax_scale)
    given = {name: np.asarray(problem.inputs[name])[at : at + 1] for name in spec.inputs}
    query = np.asarray(problem.q)[token : token + 1, head : head + 1]
    where: dict[str, Any] = {"positions": np.array([position]), "kept": kept}
    out, _ = oracle.attend(query, keys, values, one, inputs=given, **where)
    return np.asarray(out[0, 0])


def _mistakes(problem: AttentionInputs, token: int, head: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield known mistakes with the output that each gives."""
    spec = problem.case.spec

    def other(**fields: Any) -> np.ndarray:
        return _attended(problem, token, head, **fields)

    yield "scale (the scores are not scaled)", other(scale=1.0)
    yield "scale (the scores are scaled twice)", other(scale=spec.softmax_scale**2)
    if spec.scale is not None:
        yield "scale (head_dim ** -0.5 in place of the given scale)", other(scale=None)
    if spec.softcap is not None:
        yield "soft cap (it is not applied)", other(softcap=None)
    for name in spec.inputs:
        others = tuple(one for one in spec.inputs if one != name)
        yield f"{name} (they are not applied)", other(inputs=others)
    if spec.window is not None:
        yield "mask (the window is not applied)", other(window=None)
        for more in (1, -1):
            if spec.window + more > 0:
                text = f"mask (a window of {spec.window + more} in place of {spec.window})"
                yield text, other(window=spec.window + more)
    if spec.causal:
        yield "mask (later tokens are seen)", other(causal=False, window=None)
    for home in range(spec.num_kv_heads):
        if home != head // spec.group:
            yield f"heads (KV head {home} in place of {head // spec.group})", other(kv_head=home)
    for number in (head - 1, head + 1) if spec.inputs else ():
        if 0 <= number < spec.num_q_heads:
            yield (
                f"heads (the {' and '.join(spec.inputs)} of query head {number})",
                other(query_head=number),
            )
    yield from _missing_keys(problem, token, head)


MAX_KEYS = 600
"""Longer rows are not computed again with keys left out."""


def _missing_keys(
    problem: AttentionInputs, token: int, head: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield outputs without some keys: the last or first ones, a page, or a part of a split."""
    row = int(problem.token_rows[token])
    count = len(problem.keys[row])
    size = problem.layout.page_size
    if count > MAX_KEYS:
        return
    at = np.arange(count)
    first = int(np.argmax(problem.token_rows == row))
    position = count - int((problem.token_rows == row).sum()) + token - first
    last = position if problem.case.spec.causal else count - 1
    cuts = {
        "mask (the token itself is not seen)": at != last,
        "mask (the first key is not seen)": at != 0,
        "page (the last page of the row is not read)": at < last // size * size,
        "page (the first page of the row is not read)": at >= size,
    }
    cuts |= {
        f"split (keys from {block} on are not counted)": at < block
        for block in (16, 32, 64, 128, 256, 512)
        if block <= last
    }
    cuts |= {
        f"split (the rest after whole blocks of {block} is not counted)": (
            at < (last + 1) // block * block
        )
        for block in (16, 32, 64, 128, 256)
        if block <= last
    }
    for text, kept in cuts.items():
        if kept.any() and not kept[: last + 1].all():
            yield text, _attended(problem, token, head, kept=kept)
