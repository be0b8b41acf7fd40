"""Measures ways to quantise a cache on a real model, and prints the table of decision 15.

python tools/cache_schemes.py FOLDER --text FILE... [--schemes "A;B"]

FOLDER is the folder of tools/format_table.py: its checkpoint in float32 and its answers to 20
chats. The model of the Llama family is computed here, in one pass over each text; a scheme replaces
the keys and values that attention reads by those that it would read from a cache. An answer counts
as equal when each of its tokens is the best one after the tokens before it, as in greedy decoding.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from enginebay.ops.head_rotation import rotation

PASSAGE_LEN, NUM_TOKENS = 512, 4096
NUM_DRAWN, DISTANCE = 64, 32
"""The tokens whose keys are averaged, and the positions from one to the next: those of
enginebay.compose.key_centers.
"""
COLUMNS = (
    "scheme",
    "bits",
    "perplexity",
    "KL, nats",
    "same best token, %",
    "change of an answer's log-probability",
    "equal answers",
)
Quantizer = Callable[[jax.Array], jax.Array]
"""From heads [rows, heads, tokens, head_dim] to the values that a cache of them reads as."""


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How a cache changes keys and values.

    bits: of a value, with its share of scales and zero points, for heads of 64.
    before_rope: keys are stored before the rotary turn, which is applied to what is read.
    centered: the mean key of a head, over tokens drawn at random, is subtracted before a key is
      stored. All scores of a query change by the same, so attention does not.
    newest: this many tokens, the newest ones of each query, are read as they were.
    """

    bits: float
    keys: Quantizer
    values: Quantizer
    before_rope: bool = False
    centered: bool = False
    newest: int = 0


def uniform(x: jax.Array, bits: int, group: int = 64, axis: int = -1) -> jax.Array:
    """Return x rounded to 2**bits steps between the least and the largest value of each group of
    neighbours along an axis; scales as bfloat16. What is left beyond whole groups stays as it is.
    """
    moved = jnp.moveaxis(x, axis, -1)
    whole = moved.shape[-1] // group * group
    part = moved[..., :whole].reshape(*moved.shape[:-1], -1, group)
    low, high = part.min(axis=-1, keepdims=True), part.max(axis=-1, keepdims=True)
    scales = ((high - low) / (2**bits - 1)).astype(jnp.bfloat16).astype(jnp.float32)
    scales = jnp.where(scales == 0, 1, scales)
    zeros = -jnp.rint(low / scales)
    codes = (jnp.rint(part / scales) + zeros).clip(0, 2**bits - 1)
    read = ((codes - zeros) * scales).reshape(*moved.shape[:-1], whole)
    return jnp.moveaxis(jnp.concatenate([read, moved[..., whole:]], axis=-1), -1, axis)


def symmetric(x: jax.Array, largest: int, group: int = 64) -> jax.Array:
    """Return x rounded to whole multiples, from -largest to largest, of a scale of each group."""
    part = x.reshape(*x.shape[:-1], -1, group)
    scales = jnp.abs(part).max(axis=-1, keepdims=True) / largest
    scales = scales.astype(jnp.bfloat16).astype(jnp.float32)
    scales = jnp.where(scales == 0, 1, scales)
    return (jnp.rint(part / scales).clip(-largest, largest) * scales).reshape(x.shape)


def to_the_extreme(x: jax.Array, group: int = 32) -> jax.Array:
    """Return x rounded to multiples -8 to 7 of a scale of each group, whose value of the largest
    magnitude is -8 of them, as in llama.cpp's q4_0.
    """
    part = x.reshape(*x.shape[:-1], -1, group)
    largest = jnp.take_along_axis(part, jnp.abs(part).argmax(axis=-1, keepdims=True), axis=-1)
    scales = (largest / -8).astype(jnp.bfloat16).astype(jnp.float32)
    scales = jnp.where(scales == 0, 1, scales)
    return (jnp.rint(part / scales).clip(-8, 7) * scales).reshape(x.shape)


def fitted(x: jax.Array, shares: Sequence[float] = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)) -> jax.Array:
    """Return x rounded to 16 steps of a head's range, or of the share of it with the least squared
    error.
    """
    low, high = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    best = error = None
    for share in shares:
        cut = (high - low) * (1 - share) / 2
        scales = ((high - low) * share / 15).astype(jnp.bfloat16).astype(jnp.float32)
        scales = jnp.where(scales == 0, 1, scales)
        zeros = -jnp.rint((low + cut) / scales)
        read = ((jnp.rint(x / scales) + zeros).clip(0, 15) - zeros) * scales
        off = jnp.square(read - x).sum(axis=-1, keepdims=True)
        if best is None or error is None:
            best, error = read, off
        else:
            best, error = jnp.where(off < error, read, best), jnp.minimum(off, error)
    assert best is not None
    return best


def turned(quantizer: Quantizer) -> Quantizer:
    """Return the quantizer of heads that are rotated by an orthogonal matrix as they are stored."""

    def read(x: jax.Array) -> jax.Array:
        matrix = jnp.asarray(rotation(x.shape[-1]), jnp.float32)
        return quantizer(x @ matrix) @ matrix

    return read


def plain(x: jax.Array) -> jax.Array:
    """Return x."""
    return x


uint4, uint4_of_32 = (
    functools.partial(uniform, bits=4),
    functools.partial(uniform, bits=4, group=32),
)
uint4_of_channel = functools.partial(uniform, bits=4, group=32, axis=-2)
int8 = functools.partial(symmetric, largest=127)
int8_of_32 = functools.partial(symmetric, largest=127, group=32)

SCHEMES: Mapping[str, Scheme] = {
    "float32": Scheme(32, plain, plain),
    "int8": Scheme(8.25, int8, int8),
    "int8, rotated": Scheme(8.25, turned(int8), turned(int8)),
    "int8, groups of 32": Scheme(8.5, int8_of_32, int8_of_32),
    "int8, rotated, groups of 32": Scheme(8.5, turned(int8_of_32), turned(int8_of_32)),
    "int8, keys before the rotary turn": Scheme(8.25, int8, int8, before_rope=True),
    "int8, rotated, keys before the rotary turn": Scheme(
        8.25, turned(int8), turned(int8), before_rope=True
    ),
    "int8, rotated, centered keys": Scheme(8.25, turned(int8), turned(int8), centered=True),
    "int8, rotated, newest 32 exact": Scheme(8.25, turned(int8), turned(int8), newest=32),
    "uint4": Scheme(4.5, uint4, uint4),
    "uint4, rotated": Scheme(4.5, turned(uint4), turned(uint4)),
    "uint4, groups of 32": Scheme(5, uint4_of_32, uint4_of_32),
    "uint4, rotated, groups of 32": Scheme(5, turned(uint4_of_32), turned(uint4_of_32)),
    "uint4, rotated, one signed scale for 32": Scheme(
        4.5, turned(to_the_extreme), turned(to_the_extreme)
    ),
    "uint4, rotated, ranges by least squares": Scheme(4.5, turned(fitted), turned(fitted)),
    "uint4, keys before the rotary turn": Scheme(4.5, uint4, uint4, before_rope=True),
    "uint4, rotated, keys before the rotary turn": Scheme(
        4.5, turned(uint4), turned(uint4), before_rope=True
    ),
    "uint4, keys by channel and 32 tokens, values rotated": Scheme(
        4.75, uint4_of_channel, turned(uint4)
    ),
    "uint4, keys by channel, before the rotary turn, values rotated": Scheme(
        4.75, uint4_of_channel, turned(uint4), before_rope=True
    ),
    "uint4, rotated, centered keys": Scheme(4.5, turned(uint4), turned(uint4), centered=True),
    "uint4, centered keys, values rotated": Scheme(4.5, uint4, turned(uint4), centered=True),
    "uint4, rotated, newest 32 exact": Scheme(4.5, turned(uint4), turned(uint4), newest=32),
    "keys int8, values uint4, rotated": Scheme(6.375, turned(int8), turned(uint4)),
}


class Model:
    """A Llama checkpoint in float32, computed in one pass over whole texts."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self._weights = {
            name: jnp.asarray(array, jnp.float32)
            for name, array in load_file(folder / "model.safetensors").items()
        }
        rng = np.random.default_rng(0)
        drawn = rng.integers(0, self.config["vocab_size"], (1, NUM_DRAWN), np.int32)
        plain = SCHEMES["float32"]
        run = functools.partial(self._forward, plain, distance=DISTANCE, measures_centers=True)
        self._centers: tuple[jax.Array, ...] = jax.jit(run)(self._weights, jnp.asarray(drawn), ())

    def logits(self, ids: jax.Array, scheme: Scheme) -> jax.Array:
        """Return f32 [rows, tokens, vocab] of ids int32 [rows, tokens]."""
        return self._jitted(scheme)(self._weights, ids, self._centers)

    @functools.cache  # noqa: B019 - one model lives as long as the program
    def _jitted(self, scheme: Scheme) -> Any:
        return jax.jit(functools.partial(self._forward, scheme))

    def _forward(
        self,
        scheme: Scheme,
        weights: Mapping[str, jax.Array],
        ids: jax.Array,
        centers: Sequence[jax.Array],
        *,
        distance: int = 1,
        measures_centers: bool = False,
    ) -> Any:
        config = self.config
        embedding = weights["model.embed_tokens.weight"]
        x, means = embedding[ids], []
        for index in range(config["num_hidden_layers"]):
            prefix = f"model.layers.{index}."
            layer = {n[len(prefix) :]: w for n, w in weights.items() if n.startswith(prefix)}
            inner = self._norm(x, layer["input_layernorm.weight"])
            center = centers[index] if scheme.centered else None
            out, mean = self._attention(scheme, layer, inner, center, distance)
            means.append(mean)
            x = x + out
            inner = self._norm(x, layer["post_attention_layernorm.weight"])
            gate, up = (inner @ layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (jax.nn.silu(gate) * up) @ layer["mlp.down_proj.weight"].T
        if measures_centers:
            return tuple(means)
        return self._norm(x, weights["model.norm.weight"]) @ embedding.T

    def _attention(
        self,
        scheme: Scheme,
        layer: Mapping[str, jax.Array],
        x: jax.Array,
        center: jax.Array | None,
        distance: int,
    ) -> tuple[jax.Array, jax.Array]:
        """Return the output and the mean key of each head."""
        heads, kv_heads = (
            self.config["num_attention_heads"],
            self.config["num_key_value_heads"],
        )
        rows, tokens, _ = x.shape

        def projected(name: str, count: int) -> jax.Array:
            y = x @ layer[f"self_attn.{name}_proj.weight"].T
            return y.reshape(rows, tokens, count, -1).swapaxes(1, 2)

        q, k, v = projected("q", heads), projected("k", kv_heads), projected("v", kv_heads)
        q, exact = self._turn(q, distance), self._turn(k, distance)
        mean = exact.mean(axis=(0, 2), keepdims=True)
        if scheme.before_rope:
            read = self._turn(scheme.keys(k), distance)
        elif center is not None:
            read = scheme.keys(exact - center) + center
        else:
            read = scheme.keys(exact)
        read_v = scheme.values(v)
        ages = jnp.arange(tokens)[:, None] - jnp.arange(tokens)
        new = (ages >= 0) & (ages < scheme.newest)
        repeat = functools.partial(jnp.repeat, repeats=heads // kv_heads, axis=1)
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, repeat(read))
        if scheme.newest:
            scores = jnp.where(new, jnp.einsum("bhqd,bhkd->bhqk", q, repeat(exact)), scores)
        scores = jnp.where(ages >= 0, scores / np.sqrt(q.shape[-1]), -jnp.inf)
        shares = jax.nn.softmax(scores, axis=-1)
        out = jnp.einsum("bhqk,bhkd->bhqd", jnp.where(new, 0, shares), repeat(read_v))
        if scheme.newest:
            out += jnp.einsum("bhqk,bhkd->bhqd", jnp.where(new, shares, 0), repeat(v))
        out = out.swapaxes(1, 2).reshape(rows, tokens, -1)
        return out @ layer["self_attn.o_proj.weight"].T, mean

    def _turn(self, x: jax.Array, distance: int) -> jax.Array:
        """Return heads [rows, heads, tokens, head_dim] turned by the angles of their positions,
        with `distance` positions from one token to the next.
        """
        half = x.shape[-1] // 2
        speeds = self.config["rope_theta"] ** (-np.arange(half) / half)
        angles = np.arange(x.shape[2])[:, None] * distance * speeds
        cos, sin = jnp.asarray(np.cos(angles), x.dtype), jnp.asarray(np.sin(angles), x.dtype)
        a, b = x[..., :half], x[..., half:]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def _norm(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        mean = (x * x).mean(axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(mean + self.config["rms_norm_eps"]) * weight


@dataclasses.dataclass(frozen=True)
class Work:
    """passages int32 [passages, tokens]; of each chat its prompt and the reference's answer."""

    passages: np.ndarray
    prompts: Sequence[Sequence[int]]
    answers: Sequence[Sequence[int]]


def read_work(folder: Path, texts: Sequence[Path]) -> Work:
    """Read the passages of the texts and the chats of FOLDER."""
    tokenizer = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    text = "".join(path.read_text(encoding="utf-8") for path in texts)
    ids = tokenizer.encode(text, add_special_tokens=False).ids[:NUM_TOKENS]
    found = json.loads((folder / "results.json").read_text(encoding="utf-8"))["float32"]
    return Work(
        np.asarray(ids, np.int32).reshape(-1, PASSAGE_LEN),
        found["prompts"],
        found["answers"]["alone"],
    )


def best_tokens(model: Model, work: Work, scheme: Scheme) -> tuple[list[int], np.ndarray]:
    """Return how many tokens of each answer come before the first that is not the best one, and
    log-probabilities [chats, tokens] of the answers.
    """
    longest = max(len(p) + len(a) for p, a in zip(work.prompts, work.answers, strict=True))
    ids = np.zeros((len(work.prompts), longest), np.int32)
    for row, both in enumerate(zip(work.prompts, work.answers, strict=True)):
        whole = [*both[0], *both[1]]
        ids[row, : len(whole)] = whole
    logprobs = np.asarray(jax.nn.log_softmax(model.logits(jnp.asarray(ids), scheme)))
    agreeing, found = [], []
    for row, (prompt, answer) in enumerate(zip(work.prompts, work.answers, strict=True)):
        mine = logprobs[row, len(prompt) - 1 :][: len(answer)]
        same = mine.argmax(axis=-1) == np.asarray(answer)
        agreeing.append(len(answer) if same.all() else int(same.argmin()))
        found.append(mine[np.arange(len(answer)), np.asarray(answer)])
    return agreeing, np.asarray(found)


def main() -> None:
    """Measure the schemes, and print a row of each as it is known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--schemes", default=";".join(SCHEMES), help="names between semicolons")
    args = parser.parse_args()
    work, model = read_work(args.folder, args.text), Model(args.folder / "model")
    reference, length = [], work.passages.shape[1]
    for row in work.passages:
        whole = model.logits(jnp.asarray(row[None]), SCHEMES["float32"])
        reference.append(np.asarray(jax.nn.log_softmax(whole)[0]))
    _, base = best_tokens(model, work, SCHEMES["float32"])
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    for name in args.schemes.split(";"):
        scheme = SCHEMES[name]
        losses, kls, same = [], [], []
        for row, theirs in zip(work.passages, reference, strict=True):
            mine = np.asarray(jax.nn.log_softmax(model.logits(jnp.asarray(row[None]), scheme))[0])
            losses.append(-mine[np.arange(length - 1), row[1:]])
            kls.append((np.exp(theirs) * (theirs - mine)).sum(axis=-1))
            same.append(mine.argmax(axis=-1) == theirs.argmax(axis=-1))
        agreeing, logprobs = best_tokens(model, work, scheme)
        cells = (
            name,
            f"{scheme.bits:g}",
            f"{np.exp(np.mean(losses)):.2f}",
            f"{np.mean(kls):.5f}",
            f"{100 * np.mean(same):.1f}",
            f"{np.abs(logprobs - base).mean():.4f}",
            f"{sum(a == len(b) for a, b in zip(agreeing, work.answers, strict=True))}",
        )
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
