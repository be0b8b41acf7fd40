"""Logits processors that cut by probability, against what their sources say, in float64 NumPy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.ops.sampling import position_keys
from tests.unit.processor_rows import (
    VOCAB,
    Row,
    banned,
    check,
    only,
    own_of,
    processor_of,
    scores_of,
    state_of,
)

TEMPERATURES = (0.3, 1.0, 2.5)


def typical_oracle(row: Row) -> np.ndarray:
    share = (row.options or {}).get("typical_p", 0.95)
    if row.temperature == 0.0 or share == 1.0:
        return row.logits.astype(np.float64)
    p = row.p
    information = -np.log(np.where(p > 0, p, 1.0))
    distance = np.where(p > 0, np.abs(information - (p * information).sum()), np.inf)
    order = np.argsort(distance, kind="stable")
    last = np.flatnonzero(np.cumsum(p[order]) >= share)[0]
    return banned(row, set(np.flatnonzero(distance > distance[order[last]] * (1 + 1e-6)).tolist()))


def test_typical() -> None:
    """One that is flat but for a token more likely than is typical loses that one."""
    peaked = np.zeros(VOCAB)
    peaked[11] = 3.0
    shares = (0.05, 0.4, 0.9, 1.0)
    rows = [
        Row({"typical_p": s}, temperature=t, seed=i)
        for i, t in enumerate(TEMPERATURES)
        for s in shares
    ]
    rows += [Row({"typical_p": 0.5}, logits=peaked), Row({"typical_p": 0.2}, temperature=0.0)]
    rows += [Row({"typical_p": 0.5}, logits=only(3, 4, 8)), Row({"typical_p": 1e-30}, seed=5)]
    assert not np.isfinite(typical_oracle(rows[12])[11]), (
        "the most likely token is not typical there"
    )
    check("typical", typical_oracle, rows, changed=10)


def test_xtc() -> None:
    """Whether it happens is read from the key as the processor's contract says; how often,
    below.
    """
    stream = 0x585443

    def oracle(row: Row) -> np.ndarray:
        options = row.options or {}
        score, p = row.logits.astype(np.float64), row.p
        if row.temperature == 0.0 or not (words[row.seed] >> 8) * 2.0**-24 < options["probability"]:
            return score
        top = np.flatnonzero(p >= options["threshold"])
        return banned(row, {int(i) for i in top if p[i] > p[top].min()}) if top.size else score

    rows = [
        Row({"threshold": h, "probability": 1.0}, temperature=t, seed=i)
        for i, t in enumerate(TEMPERATURES)
        for h in (0.0, 0.02, 0.1, 0.6)
    ]
    rows += [
        Row({"threshold": 0.02, "probability": c}, seed=i) for i in range(8) for c in (0.0, 0.5)
    ]
    equal = np.zeros(VOCAB)
    equal[5:9] = 4.0
    rows += [
        Row({"threshold": 0.02, "probability": 1.0}, logits=x)
        for x in (equal, only(3, 4, 8), only(3))
    ]
    rows += [Row({"threshold": 0.02, "probability": 1.0}, temperature=0.0)]
    keys = np.asarray(
        jax.jit(lambda s: jax.random.key_data(position_keys(s, stream)))(state_of(rows))
    )
    words = {row.seed: int(key[0]) for row, key in zip(rows, keys, strict=True)}
    check("xtc", oracle, rows, changed=10)


def test_xtc_happens_as_often_as_it_is_asked_to() -> None:
    rows = [
        Row({"threshold": 0.02, "probability": 0.3}, logits=np.zeros(VOCAB) + only(3, 4), seed=i)
        for i in range(3000)
    ]
    happened = ~np.isfinite(scores_of("xtc", rows)[:, 4])
    assert abs(happened.mean() - 0.3) < 5 * (0.3 * 0.7 / 3000) ** 0.5, happened.mean()
    neighbours = np.corrcoef(happened[:-1], happened[1:])[0, 1]
    assert abs(neighbours) < 5 * 3000**-0.5, neighbours


def mirostat_kept(row: Row, mu: float) -> np.ndarray:
    p = row.p
    surprise = -np.log2(np.where(p > 0, p, 1e-300))
    return (surprise <= mu) | (row.logits == row.logits.max())


def test_mirostat() -> None:
    """The cut at the beginning, where mu is 2 tau, and mu after each of some tokens."""

    def oracle(row: Row) -> np.ndarray:
        if row.temperature == 0.0:
            return row.logits.astype(np.float64)
        return banned(
            row, set(np.flatnonzero(~mirostat_kept(row, 2.0 * (row.options or {})["tau"])).tolist())
        )

    rows = [
        Row({"tau": tau}, temperature=t, seed=i)
        for i, t in enumerate(TEMPERATURES)
        for tau in (0.0, 1.0, 2.5, 5.0)
    ]
    rows += [
        Row({"tau": 1.0, "eta": 0.4}, logits=only(3, 4, 8)),
        Row({"tau": 1.0}, temperature=0.0),
    ]
    check("mirostat", oracle, rows, changed=9)

    own, state = own_of("mirostat", rows), state_of(rows)
    tokens = [
        int(np.flatnonzero(mirostat_kept(r, 2.0 * (r.options or {})["tau"]))[-1]) for r in rows
    ]
    logits = np.stack([r.logits for r in rows])
    got = jax.jit(processor_of("mirostat").after)(logits, np.asarray(tokens, np.int32), own, state)[
        "mu"
    ]
    for row, token, mu in zip(rows, tokens, np.asarray(got), strict=True):
        options = {"eta": 0.1, **(row.options or {})}
        begin = 2.0 * options["tau"]
        among = np.where(mirostat_kept(row, begin), row.p, 0.0)
        error = -np.log2(among[token] / among.sum()) - options["tau"]
        wanted = begin - options["eta"] * error if row.temperature else begin
        np.testing.assert_allclose(mu, wanted, rtol=1e-5, atol=1e-5, err_msg=repr(row))


def test_mirostat_reaches_its_target() -> None:
    """Drawn from one distribution again and again, the mean surprise comes near tau."""
    name, tau, num = "mirostat", 2.0, 400
    rows = [
        Row(
            {"tau": tau, "eta": 0.2},
            seed=i,
            logits=np.random.default_rng(1).normal(size=VOCAB) * 1.5,
        )
        for i in range(8)
    ]
    logits, state, processor = (
        np.stack([r.logits for r in rows]),
        state_of(rows),
        processor_of(name),
    )

    def step(own: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        cut = processor(logits, own, state)
        tokens = jax.random.categorical(key, cut)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(cut), tokens[:, None], axis=-1)[:, 0]
        return {**own, **processor.after(logits, tokens, own, state)}, -chosen / np.log(2.0)

    def draws(own: Any) -> jax.Array:
        return jax.lax.scan(step, own, jax.random.split(jax.random.key(3), num))[1]

    surprise = np.asarray(jax.jit(draws)(own_of(name, rows)))
    assert abs(surprise[num // 4 :].mean() - tau) < 0.1, surprise.mean()
