"""Named shapes for kernel benchmarks: layers of real models, in steps as in serving.

A shape is MODEL/MODE/bROWS/cCONTEXT, such as llama-3.1-8b/decode/b32/c4096; for products, a part of
the layer follows, such as .../gate_up. The first pieces alone stand for all usual values of the
pieces that are left out.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from enginebay.config_sections import PHASES
from enginebay.errors import InputError, unknown_name
from enginebay.ops.spec import AttnSpec, Bucket, Mode

ALL = "all"
STEP_TOKENS = 512
"""Tokens of a mixed step: a chunk of a prompt, and rows that decode."""

CONTEXTS = (1024, 4096, 32768)
BATCHES: dict[Mode, tuple[int, ...]] = {
    "decode": (1, 8, 32, 128),
    "prefill": (1,),
    "mixed": (8, 32),
}


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """One kind of layer of a model, with all sizes that its ops need."""

    name: str
    hidden: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    window: int | None = None
    softcap: float | None = None
    rope_theta: float = 10000.0
    experts: tuple[int, int, int] | None = None
    """Number of experts, experts per token, and width of an expert. None: eight experts that share
    `mlp`, two per token.
    """

    def spec(self, dtype: str) -> AttnSpec:
        """Return the attention, cache and activations of the layer in one dtype."""
        return AttnSpec(
            self.num_q_heads,
            self.num_kv_heads,
            self.head_dim,
            window=self.window,
            softcap=self.softcap,
            q_dtype=dtype,
            kv_dtype=dtype,
        )


GEMMA = LayerShape(
    name="gemma-2-9b-global",
    hidden=3584,
    num_q_heads=16,
    num_kv_heads=8,
    head_dim=256,
    mlp=14336,
    vocab=256000,
    softcap=50.0,
)

LAYERS: dict[str, LayerShape] = {
    layer.name: layer
    for layer in (
        LayerShape(
            name="llama-3.1-8b",
            hidden=4096,
            num_q_heads=32,
            num_kv_heads=8,
            head_dim=128,
            mlp=14336,
            vocab=128256,
            rope_theta=500000.0,
        ),
        LayerShape(
            name="qwen3-0.6b",
            hidden=1024,
            num_q_heads=16,
            num_kv_heads=8,
            head_dim=128,
            mlp=3072,
            vocab=151936,
            rope_theta=1000000.0,
        ),
        GEMMA,
        dataclasses.replace(GEMMA, name="gemma-2-9b-local", window=4096),
        LayerShape(
            *("qwen3-30b-a3b", 2048, 32, 4, 128, 6144, 151936),
            rope_theta=1000000.0,
            experts=(128, 8, 768),
        ),
        LayerShape(
            name="smollm2-135m",
            hidden=576,
            num_q_heads=9,
            num_kv_heads=3,
            head_dim=64,
            mlp=1536,
            vocab=49152,
            rope_theta=100000.0,
        ),
    )
}
"""Published sizes; Gemma 2 has two kinds of layers."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """A step of `batch` rows of up to `context` tokens (0: the op does not depend on the context)
    through a layer.
    """

    layer: LayerShape
    mode: Mode
    batch: int
    context: int
    part: str = ""

    @property
    def name(self) -> str:
        """Return the name as written on the command line."""
        pieces = [self.layer.name, self.mode, f"b{self.batch}"]
        pieces += [f"c{self.context}"] if self.context else []
        return "/".join(pieces + ([self.part] if self.part else []))

    def lengths(self, *, ragged: bool, seed: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (q_lens, kv_lens) of the rows, in the order of a step. Ragged lengths lie between
        an eighth of the context and all of it.

        The first row always has the whole context. In a mixed step, the rows that decode come
        before a chunk of a prompt.
        """
        rng = np.random.default_rng([seed, self.batch, self.context])
        low = max(1, self.context // 8)
        lens = np.exp(rng.uniform(np.log(low), np.log(self.context), self.batch)).astype(int)
        kv_lens = (
            [self.context, *np.maximum(lens, 1).tolist()[1:]]
            if ragged
            else [self.context] * self.batch
        )
        if self.mode == "decode":
            return (1,) * self.batch, tuple(kv_lens)
        if self.mode == "prefill":
            return tuple(kv_lens), tuple(kv_lens)
        chunk = max(1, min(STEP_TOKENS - self.batch + 1, self.context // 2))
        decoding = (max(2, n) for n in kv_lens[1:])
        return (1,) * (self.batch - 1) + (chunk,), (*decoding, self.context)

    def num_tokens(self) -> int:
        """Return the number of new tokens of the step, for ops that depend on nothing else."""
        if self.mode == "prefill":
            return self.batch * max(1, self.context)
        return self.batch if self.mode == "decode" else STEP_TOKENS

    def bucket(
        self, q_lens: Sequence[int], page_size: int, min_rows: int, *, compact: bool
    ) -> Bucket:
        """Return the bucket in which an engine would run these rows; `compact`: decode on a copy
        with one page per row.
        """
        pages = -(-self.context // page_size)
        if self.mode == "decode":
            seqs = max(self.batch, min_rows)
            pages = 1 if compact else pages
            return Bucket(seqs, seqs, pages, 1, self.context, "decode", rows_are_pages=compact)
        tokens = max(16, 1 << (sum(q_lens) - 1).bit_length())
        return Bucket(tokens, self.batch, pages, tokens, self.context, self.mode)


def bucket_lengths(bucket: Bucket, *, seed: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (q_lens, kv_lens) of ragged rows that fill an engine's bucket, in the order of a step;
    the longest row has the max length.
    """
    rng = np.random.default_rng([seed, bucket.tokens, bucket.seqs])
    count, longest = min(bucket.seqs, bucket.tokens), bucket.max_kv_len
    ragged = np.exp(rng.uniform(np.log(max(1, longest // 8)), np.log(longest), count)).astype(int)
    kv_lens = [longest, *np.clip(ragged, min(2, longest), longest).tolist()[1:]]
    if bucket.mode == "decode":
        return (1,) * count, tuple(kv_lens)
    if bucket.mode == "prefill":
        shares = rng.dirichlet(np.ones(count))
        q_lens = [min(longest, 1 + int(share * (bucket.tokens - count))) for share in shares]
        return tuple(q_lens), tuple(q_lens)
    chunk = max(1, min(bucket.tokens - count + 1, longest // 2))
    return (1,) * (count - 1) + (chunk,), (*kv_lens[1:], longest)


@dataclasses.dataclass(frozen=True)
class Axes:
    """The values of batch, context and part that an op's shapes take when a name leaves
    them out.
    """

    batches: Mapping[Mode, tuple[int, ...]]
    contexts: Mapping[Mode, tuple[int, ...]]
    parts: tuple[str, ...] = ("",)


def parse_shapes(texts: Iterable[str], axes: Axes) -> list[Shape]:
    """Return the shapes that the names select, each once; "all" selects every shape. InputError for
    an invalid name.
    """
    found: dict[Shape, None] = {}
    for text in texts:
        for name in LAYERS if text == ALL else [text]:
            found |= dict.fromkeys(_expand(name, axes))
    return list(found)


def _expand(text: str, axes: Axes) -> list[Shape]:
    layer, *pieces = text.strip().split("/")
    if layer not in LAYERS:
        raise unknown_name("shape of model", layer, [*LAYERS, ALL])
    mode = pieces.pop(0) if pieces else ""
    if mode and mode not in PHASES:
        raise unknown_name(f"mode of shape {text!r}", mode, PHASES)
    batch = _number(pieces, "b", text)
    context = _number(pieces, "c", text)
    part = pieces.pop(0) if pieces else ""
    if pieces or (part and part not in axes.parts):
        names = ", ".join(p for p in axes.parts if p)
        known = f"/PART, where PART is one of {names}" if names else "; this op has no parts to add"
        raise InputError(
            f"shape {text!r}",
            f"MODEL/MODE/bROWS/cCONTEXT{known}",
            "Pass --shapes llama-3.1-8b/decode, for example.",
        )
    shapes = []
    for one in PHASES:
        if mode not in ("", one):
            continue
        contexts = (
            axes.contexts[one] if context is None or axes.contexts[one] == (0,) else (context,)
        )
        for b in axes.batches[one] if batch is None else (batch,):
            shapes += [
                Shape(LAYERS[layer], one, b, c, p)
                for c in contexts
                for p in axes.parts
                if part in ("", p) and b <= STEP_TOKENS
            ]
    return shapes


def _number(pieces: list[str], letter: str, text: str) -> int | None:
    """Take the next piece if it is the letter and a number of at least one."""
    if not pieces or re.fullmatch(rf"{letter}\d+", pieces[0]) is None:
        return None
    value = int(pieces.pop(0)[1:])
    if value < 1:
        raise InputError(
            f"shape {text!r}", f"{letter} and a number of at least 1", f"Write {letter}1 or more."
        )
    return value
