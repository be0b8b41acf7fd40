"""The built-in logits processors against what their sources say, in float64 NumPy; each is compiled once, with its cases as rows."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginebay.errors import ConfigError, RequestError
from enginebay.processor import IS_USED, LogitsProcessor, RowFacts, Sizes, row_values
from enginebay.registry import load_registry
from enginebay.sampler import SamplingState, position_keys

VOCAB, WIDTH = 70, 48
SIZES = Sizes(VOCAB, WIDTH)
REGISTRY = load_registry()
EOS = (4, 9)

TEXT = [5, 6, 7, 1, 5, 6, 7, 2, 8, 5, 6, 7]
"""Ends with what it has had twice, which 1 and 2 followed."""


class Row:
    """A case: options, logits [VOCAB], prompt and output, temperature, and its own key."""

    def __init__(
        self,
        options: Mapping[str, Any] | None = None,
        prompt: Sequence[int] = (3, 1),
        output: Sequence[int] = (),
        temperature: float = 1.0,
        logits: np.ndarray | None = None,
        seed: int = 0,
    ) -> None:
        self.options = options
        self.prompt, self.output = list(prompt), list(output)
        self.temperature, self.seed = temperature, seed
        own = np.random.default_rng(seed).normal(size=VOCAB) * 2.0
        self.logits = (own if logits is None else logits).astype(np.float32)

    @property
    def text(self) -> list[int]:
        return self.prompt + self.output

    @property
    def p(self) -> np.ndarray:
        z = self.logits.astype(np.float64) / np.float64(np.float32(self.temperature or 1.0))
        mass = np.exp(z - z.max())
        return mass / mass.sum()

    def __repr__(self) -> str:
        return f"{self.options}, text {self.prompt} + {self.output}, T {self.temperature}, seed {self.seed}"


def processor_of(name: str) -> LogitsProcessor:
    made = REGISTRY.load(REGISTRY.find("logits_processor", name))()
    assert isinstance(made, LogitsProcessor)
    return made


def fields_of(
    name: str, options: Mapping[str, Any], prompt: Sequence[int] = (3, 1)
) -> Mapping[str, np.ndarray]:
    entry = REGISTRY.find("logits_processor", name)
    facts = RowFacts(np.asarray(prompt, np.int32), EOS, SIZES)
    return row_values(name, processor_of(name), REGISTRY.options(entry, options), facts).values


def state_of(rows: Sequence[Row]) -> SamplingState:
    num = len(rows)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (num, WIDTH))
    for row, case in enumerate(rows):
        tokens[row, : len(case.text)] = case.text
    none = jnp.zeros(num, jnp.float32)
    return SamplingState(
        keys=jnp.asarray([(17, r.seed) for r in rows], jnp.uint32),
        positions=jnp.asarray([len(r.text) for r in rows], jnp.int32),
        temperature=jnp.asarray([r.temperature for r in rows], jnp.float32),
        top_k=jnp.zeros(num, jnp.int32),
        top_p=none + 1.0,
        min_p=none,
        presence_penalty=none,
        frequency_penalty=none,
        repetition_penalty=none + 1.0,
        token_ids=jnp.asarray(tokens, jnp.int32),
        prompt_lengths=jnp.asarray([len(r.prompt) for r in rows], jnp.int32),
    )


def own_of(name: str, rows: Sequence[Row]) -> dict[str, jax.Array]:
    each = [fields_of(name, r.options or {}, r.prompt) for r in rows]
    stacked = {field: jnp.asarray(np.stack([values[field] for values in each])) for field in each[0]}
    return stacked | {IS_USED: jnp.asarray([r.options is not None for r in rows])}


def scores_of(name: str, rows: Sequence[Row]) -> np.ndarray:
    logits = jnp.asarray(np.stack([r.logits for r in rows]))
    return np.asarray(jax.jit(processor_of(name).__call__)(logits, own_of(name, rows), state_of(rows)))


def check(name: str, oracle: Callable[[Row], np.ndarray], rows: Sequence[Row], changed: int) -> None:
    """Each row is what `oracle` makes of it, float64 [VOCAB], and at least `changed` of the rows are other than they were."""
    got = scores_of(name, rows)
    wanted = [oracle(row) for row in rows]
    for row, score, right in zip(rows, got, wanted, strict=True):
        np.testing.assert_allclose(score, right, rtol=2e-6, atol=2e-6, err_msg=f"{name}, {row}")
    others = sum(
        not np.array_equal(s, r.logits.astype(np.float64)) for s, r in zip(wanted, rows, strict=True)
    )
    assert others >= changed, f"{name}: only {others} cases change anything"


def banned(row: Row, tokens: set[int]) -> np.ndarray:
    left = row.logits.astype(np.float64)
    left[sorted(tokens)] = -np.inf
    return left if np.isfinite(left).any() else row.logits.astype(np.float64)


def only(*tokens: int) -> np.ndarray:
    """Logits of which these alone are possible."""
    logits = np.full(VOCAB, -np.inf)
    logits[list(tokens)] = np.arange(len(tokens)) + 1.0
    return logits


def test_penalties() -> None:
    def oracle(row: Row) -> np.ndarray:
        options = {
            "presence": 0.0,
            "frequency": 0.0,
            "repetition": 1.0,
            "output_only": False,
            **(row.options or {}),
        }
        score = row.logits.astype(np.float64)
        for token in set(row.output if options["output_only"] else row.text):
            factor = options["repetition"]
            score[token] = score[token] / factor if score[token] > 0 else score[token] * factor
        for token, times in Counter(row.output).items():
            score[token] -= options["frequency"] * times + options["presence"]
        return score

    texts: dict[str, Any] = {"prompt": [1, 2, 2, 60], "output": [2, 7, 7, 69, 0]}
    rows = [
        Row({}, **texts),
        Row({"presence": 1.5}, **texts),
        Row({"frequency": -0.7}, **texts),
        Row({"repetition": 1.8}, **texts),
        Row({"repetition": 1.8, "output_only": True}, **texts),
        Row({"repetition": 0.5, "output_only": True}, prompt=[1, 2, 3]),
        Row({"presence": -2.0, "frequency": 2.0, "repetition": 3.0}, **texts, seed=3),
        Row({"presence": 1.0, "repetition": 100.0}, **texts, logits=only(7, 40)),
    ]
    check("penalties", oracle, rows, changed=6)


def test_logit_bias() -> None:
    def oracle(row: Row) -> np.ndarray:
        score = row.logits.astype(np.float64)
        for token, bias in ((row.options or {}).get("bias") or {}).items():
            score[int(token)] += bias
        return score

    every = {i: 0.1 * i for i in range(VOCAB)}
    biases: list[Any] = [{}, {0: 5, VOCAB - 1: -100.0}, {"12": 100.0}, every]
    rows = [
        *(Row({"bias": b}, seed=i) for i, b in enumerate(biases)),
        Row({"bias": {3: 9.0}}, logits=only(8)),
    ]
    check("logit_bias", oracle, rows, changed=3)


def test_allowed_token_ids() -> None:
    def oracle(row: Row) -> np.ndarray:
        ids = (row.options or {})["token_ids"]
        return banned(row, set(range(VOCAB)) - set(range(VOCAB) if ids is None else ids))

    sets: list[Any] = [None, [0], [31, 32, 33, 63, 64, 69], [69], list(range(1, VOCAB))]
    rows = [Row({"token_ids": ids}, seed=i) for i, ids in enumerate(sets)]
    check("allowed_token_ids", oracle, [*rows, Row({"token_ids": [1, 2]}, logits=only(8, 9))], changed=4)


def test_min_tokens() -> None:
    def oracle(row: Row) -> np.ndarray:
        options = {"stop_token_ids": (), **(row.options or {})}
        early = len(row.output) < options["min_tokens"]
        return banned(row, {*EOS, *options["stop_token_ids"]} if early else set())

    rows = [
        Row({"min_tokens": 3, "stop_token_ids": stops}, output=[8] * num)
        for num in (0, 2, 3, 4)
        for stops in ([], [0, 69])
    ]
    rows += [
        Row({"min_tokens": 0}),
        Row({"min_tokens": 5}, logits=only(*EOS)),
        Row({"min_tokens": 5}, logits=only(4, 8)),
    ]
    check("min_tokens", oracle, rows, changed=5)


def test_bad_words() -> None:
    def oracle(row: Row) -> np.ndarray:
        sequences = (row.options or {})["sequences"]
        ends = {
            s[-1]
            for s in sequences
            if len(s) <= len(row.text) + 1 and row.text[len(row.text) - len(s) + 1 :] == s[:-1]
        }
        return banned(row, ends)

    long = list(range(20, 36))
    rows = [
        Row({"sequences": []}),
        Row({"sequences": [[0], [69]]}),
        Row({"sequences": [[1, 5], [3, 1, 6], [1, 3, 7], [2, 3, 1, 8]]}, prompt=[3, 1]),
        Row({"sequences": [[3, 1, 7, 8], [1, 7, 9], [7, 10], [3, 7, 11]]}, prompt=[3, 1], output=[7]),
        Row({"sequences": [long, [34, 36], [33, 36]]}, prompt=long[:10], output=long[10:15]),
        Row({"sequences": [long]}, prompt=long[1:15]),
        Row({"sequences": [[8]]}, logits=only(8)),
    ]
    check("bad_words", oracle, rows, changed=4)


def test_no_repeat_ngram() -> None:
    def oracle(row: Row) -> np.ndarray:
        size, text = (row.options or {})["size"], row.text
        tail = text[len(text) - size + 1 :] if size > 1 else []
        grams = [text[i : i + size] for i in range(len(text) - size + 1)]
        return banned(row, {g[-1] for g in grams if g[:-1] == tail})

    rows = [Row({"size": n}, prompt=TEXT[:5], output=TEXT[5:]) for n in (1, 2, 3, 4, 5, 20)]
    rows += [Row({"size": n}, prompt=[6]) for n in (1, 2)]
    rows += [
        Row({"size": 3}, prompt=[6] * 6),
        Row({"size": 2}, prompt=[6] * WIDTH),
        Row({"size": 1}, prompt=[8], logits=only(8)),
    ]
    check("no_repeat_ngram", oracle, rows, changed=7)


def dry_oracle(row: Row) -> np.ndarray:
    """As its source has it, token by token."""
    defaults = {"multiplier": 0.8, "base": 1.75, "allowed_length": 2, "sequence_breakers": (), "range": 0}
    options = {**defaults, **(row.options or {})}
    breakers, score = set(options["sequence_breakers"]), row.logits.astype(np.float64)
    text = row.text[-options["range"] :]
    lengths: dict[int, int] = {}
    for i in range(len(text) - 1):
        if text[i] != text[-1] or text[-1] in breakers or text[i + 1] in breakers:
            continue
        length = 1
        while (
            length < 50
            and i - length >= 0
            and text[i - length] == text[-1 - length]
            and text[i - length] not in breakers
        ):
            length += 1
        lengths[text[i + 1]] = max(length, lengths.get(text[i + 1], 0))
    for token, length in lengths.items():
        if length >= options["allowed_length"]:
            score[token] -= options["multiplier"] * options["base"] ** (length - options["allowed_length"])
    return score


def test_dry() -> None:
    texts: dict[str, Any] = {"prompt": TEXT[:5], "output": TEXT[5:]}
    options: list[dict[str, Any]] = [
        {},
        {"allowed_length": 1},
        {"allowed_length": 3, "multiplier": 3.0, "base": 1.0},
        {"allowed_length": 4},
        {"multiplier": 0.0},
        {"allowed_length": 1, "sequence_breakers": [6]},
        {"allowed_length": 1, "sequence_breakers": [7]},
        {"allowed_length": 1, "sequence_breakers": [2, 69]},
        {"allowed_length": 1, "range": 6},
        {"range": 8, "base": 2.0},
    ]
    rows = [Row(o, **texts) for o in options]
    rows += [Row({"base": 4.0}, prompt=[6, 8] * (WIDTH // 2)), Row({"allowed_length": 1}, prompt=[6])]
    check("dry", dry_oracle, [*rows, Row({"allowed_length": 1}, **texts, logits=only(2, 60))], changed=9)


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
    rows = [Row({"typical_p": s}, temperature=t, seed=i) for i, t in enumerate(TEMPERATURES) for s in shares]
    rows += [Row({"typical_p": 0.5}, logits=peaked), Row({"typical_p": 0.2}, temperature=0.0)]
    rows += [Row({"typical_p": 0.5}, logits=only(3, 4, 8)), Row({"typical_p": 1e-30}, seed=5)]
    assert not np.isfinite(typical_oracle(rows[12])[11]), "the most likely token is not typical there"
    check("typical", typical_oracle, rows, changed=10)


def test_xtc() -> None:
    """Whether it happens is read from the key as the processor's contract says; how often, below."""
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
    rows += [Row({"threshold": 0.02, "probability": c}, seed=i) for i in range(8) for c in (0.0, 0.5)]
    equal = np.zeros(VOCAB)
    equal[5:9] = 4.0
    rows += [Row({"threshold": 0.02, "probability": 1.0}, logits=x) for x in (equal, only(3, 4, 8), only(3))]
    rows += [Row({"threshold": 0.02, "probability": 1.0}, temperature=0.0)]
    keys = np.asarray(jax.random.key_data(position_keys(state_of(rows), stream)))
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
    rows += [Row({"tau": 1.0, "eta": 0.4}, logits=only(3, 4, 8)), Row({"tau": 1.0}, temperature=0.0)]
    check("mirostat", oracle, rows, changed=9)

    own, state = own_of("mirostat", rows), state_of(rows)
    tokens = [int(np.flatnonzero(mirostat_kept(r, 2.0 * (r.options or {})["tau"]))[-1]) for r in rows]
    logits = jnp.asarray(np.stack([r.logits for r in rows]))
    got = jax.jit(processor_of("mirostat").after)(logits, jnp.asarray(tokens, jnp.int32), own, state)["mu"]
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
        Row({"tau": tau, "eta": 0.2}, seed=i, logits=np.random.default_rng(1).normal(size=VOCAB) * 1.5)
        for i in range(8)
    ]
    logits, state, processor = (
        jnp.asarray(np.stack([r.logits for r in rows])),
        state_of(rows),
        processor_of(name),
    )

    def step(own: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        cut = processor(logits, own, state)
        tokens = jax.random.categorical(key, cut)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(cut), tokens[:, None], axis=-1)[:, 0]
        return {**own, **processor.after(logits, tokens, own, state)}, -chosen / np.log(2.0)

    keys = jax.random.split(jax.random.key(3), num)
    surprise = np.asarray(jax.jit(functools.partial(jax.lax.scan, step))(own_of(name, rows), keys)[1])
    assert abs(surprise[num // 4 :].mean() - tau) < 0.1, surprise.mean()


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("logit_bias", {"bias": {VOCAB: 1.0}}, rf"token id {VOCAB}.*0 to {VOCAB - 1}"),
        ("logit_bias", {"bias": dict.fromkeys(range(1025), 1.0)}, "1025.*at most 1024"),
        ("allowed_token_ids", {"token_ids": [3, -1]}, rf"token id -1.*0 to {VOCAB - 1}"),
        ("min_tokens", {"stop_token_ids": [1000]}, "token id 1000"),
        ("min_tokens", {"stop_token_ids": list(range(10, 25))}, "17.*at most 16"),
        ("bad_words", {"sequences": [[1]] * 257}, "257 bad words.*at most 256"),
        ("bad_words", {"sequences": [[1] * 17]}, "17 tokens.*at most 16"),
        ("bad_words", {"sequences": [[1, 70]]}, "token id 70"),
        ("dry", {"sequence_breakers": [-2]}, "token id -2"),
    ],
)
def test_what_cannot_be_served_is_refused(name: str, options: Mapping[str, Any], told: str) -> None:
    with pytest.raises(RequestError, match=told):
        fields_of(name, options)


@pytest.mark.parametrize(
    ("name", "options", "field"),
    [
        ("penalties", {"presence": 2.5}, "presence"),
        ("penalties", {"repetition": 0.0}, "repetition"),
        ("penalties", {"output_only": 1}, "output_only"),
        ("logit_bias", {"bias": {3: float("inf")}}, "bias.3"),
        ("logit_bias", {"bias": {3: -100.5}}, "bias.3"),
        ("logit_bias", {"bias": {"three": 1.0}}, "bias.three"),
        ("allowed_token_ids", {"token_ids": []}, "token_ids"),
        ("allowed_token_ids", {"token_ids": ["3"]}, "token_ids"),
        ("min_tokens", {"min_tokens": -1}, "min_tokens"),
        ("min_tokens", {"min_tokens": True}, "min_tokens"),
        ("bad_words", {"sequences": [[]]}, "sequences"),
        ("bad_words", {"sequences": [3]}, "sequences"),
        ("no_repeat_ngram", {"size": 0}, "size"),
        ("dry", {"base": 0.5}, "base"),
        ("dry", {"allowed_length": 51}, "allowed_length"),
        ("typical", {"typical_p": 0.0}, "typical_p"),
        ("typical", {"typical_p": float("nan")}, "typical_p"),
        ("xtc", {"probability": 1.1}, "probability"),
        ("mirostat", {"tau": -1.0}, "tau"),
        ("mirostat", {"rate": 0.1}, "rate"),
    ],
)
def test_wrong_options_are_refused_by_name(name: str, options: Mapping[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        REGISTRY.options(REGISTRY.find("logits_processor", name), options)
