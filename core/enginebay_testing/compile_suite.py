"""The checks of one kernel away from its device: programs at the shapes of real models that its
compiler must take.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from enginebay.cache import KVLayout
from enginebay.ops.bound import AttentionImpl
from enginebay.ops.caps import Env
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket, Mode
from enginebay.ops.toolchains import KernelCompiler
from enginebay_testing.op_kit import OpKit, OpProgram
from enginebay_testing.traits import traits_of


@dataclasses.dataclass(frozen=True)
class CompileCheck:
    """A program for a target, and the function that compiles it: figures, or SkipTest with the
    reason not to.
    """

    target: str
    name: str
    run: Callable[[], Mapping[str, int]]
    representative: bool
    traits: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class HeadShape:
    """The heads of a model: query heads, KV heads, head_dim, and what its layers have beside."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    softcap: float | None = None
    v_head_dim: int | None = None
    """Of values that are a prefix of their keys."""


SHAPES: dict[str, HeadShape] = {
    "8b": HeadShape(32, 8, 128),
    "qwen3_0.6b": HeadShape(16, 8, 128),
    "small": HeadShape(14, 2, 64),
    "wide": HeadShape(16, 8, 256),
    "latent": HeadShape(16, 1, 576, v_head_dim=512),
}
"""Llama 3.1 8B, Qwen3 0.6B, Qwen2.5 0.5B, Gemma 2's wide heads, and DeepSeek-V2-Lite."""

EVERYWHERE = "decode_8b"
BY_TURNS = (("prefill_8b",), ("mixed_8b", "decode_latent"), ("decode_small",))
"""The programs that stand for all: one is compiled for every target, each of the others, which take
some compilers half a minute, for one.
"""

MODES: tuple[Mode, ...] = ("decode", "prefill", "mixed")

BUCKETS: dict[Mode, tuple[int, int, int, int]] = {
    "decode": (32, 32, 1, 4096),
    "prefill": (2048, 4, 2048, 2048),
    "mixed": (512, 32, 512, 4096),
}
"""Tokens, rows, longest query and longest context of the compiled steps."""


@dataclasses.dataclass(frozen=True)
class CompileProblem:
    """One attention problem to compile. A page size that the kernel does not claim is replaced by
    the nearest that it does.
    """

    name: str
    mode: Mode
    spec: AttnSpec
    page_size: int = 64

    def bucket(self) -> Bucket:
        """The step's static shapes."""
        tokens, seqs, max_q_len, max_kv_len = BUCKETS[self.mode]
        return Bucket(
            tokens, seqs, -(-max_kv_len // self.page_size), max_q_len, max_kv_len, self.mode
        )

    def layout(self, layout_type: type[KVLayout]) -> KVLayout:
        """A cache in which every row has its longest context."""
        bucket, spec = self.bucket(), self.spec
        pages = bucket.seqs * bucket.pages_per_seq
        return spec.make_layout(layout_type, pages, self.page_size)


def programs() -> Iterator[CompileProblem]:
    """Every model in every mode; of the first one also other dtypes, page sizes, windows and soft
    caps.
    """
    for model, shape in SHAPES.items():
        for mode in MODES:
            yield CompileProblem(f"{mode}_{model}", mode, _spec(shape))
    shape = SHAPES["8b"]
    for mode in MODES:
        for dtype in ("float32", "float16"):
            yield CompileProblem(f"{mode}_8b_{dtype}", mode, _spec(shape, dtype))
        for page_size in (16, 32, 128, 256):
            yield CompileProblem(f"{mode}_8b_page_{page_size}", mode, _spec(shape), page_size)
        for name, fields in {"window": {"window": 1024}, "softcap": {"softcap": 50.0}}.items():
            spec = _spec(dataclasses.replace(shape, **fields))  # type: ignore[arg-type]
            yield CompileProblem(f"{mode}_8b_{name}", mode, spec)


def _spec(shape: HeadShape, dtype: str = "bfloat16") -> AttnSpec:
    return AttnSpec(
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        shape.v_head_dim,
        v_is_k_prefix=shape.v_head_dim is not None,
        window=shape.window,
        softcap=shape.softcap,
        q_dtype=dtype,
        kv_dtype=dtype,
    )


def attention_programs(
    kernel: AttentionImpl, env: Env, number: int, layouts: Sequence[type[KVLayout]]
) -> Iterator[OpProgram]:
    """The programs of attention in the first layout, none without one; a few stand for all, other
    ones for each target's number.
    """
    stands = {EVERYWHERE, *itertools.chain(*BY_TURNS[number : number + 1])}
    for program in programs() if layouts else ():
        at = _with_claimed_page(program, kernel)
        yield attention_program(kernel, at, layouts[0], env, stands=at.name in stands)


def compile_checks(
    kit: OpKit, kernel: Any, compiler: KernelCompiler, layouts: Sequence[type[KVLayout]]
) -> Iterator[CompileCheck]:
    """Every program of an op for every target of a compiler; `layouts` are those that a kernel says
    it knows.
    """
    for number, target in enumerate(compiler.targets):
        env = Env(compiler.platform, target)
        for program in kit.programs(kernel, env, number, layouts):
            run = functools.partial(compile_program, program, compiler, target)
            yield CompileCheck(target, program.name, run, program.representative, program.traits)


def _with_claimed_page(program: CompileProblem, kernel: AttentionImpl) -> CompileProblem:
    """Programs that are about a page size keep it."""
    if "_page_" in program.name or kernel.caps.page_size(program.page_size):
        return program
    claimed = [size for size in (128, 32, 256, 16) if kernel.caps.page_size(size)]
    return dataclasses.replace(program, page_size=claimed[0]) if claimed else program


def attention_program(
    kernel: AttentionImpl,
    problem: CompileProblem,
    layout_type: type[KVLayout],
    env: Env,
    *,
    stands: bool = False,
) -> OpProgram:
    """One step of one layer with the cache donated, which stays where it is."""
    spec, bucket, layout = problem.spec, problem.bucket(), problem.layout(layout_type)

    def step(q: Any, k: Any, v: Any, cache: Any, batch: AttnBatch) -> Any:
        config = kernel.default_config(env, spec, bucket, layout)
        return kernel(q, k, v, cache, batch, spec=spec, layout=layout, config=config)

    k, v = (
        jax.ShapeDtypeStruct((bucket.tokens, spec.num_kv_heads, width), jnp.dtype(spec.kv_dtype))
        if "fused_write" in kernel.caps.features
        else None
        for width in (spec.head_dim, spec.v_dim)
    )
    q = jax.ShapeDtypeStruct(
        (bucket.tokens, spec.num_q_heads, spec.head_dim), jnp.dtype(spec.q_dtype)
    )
    return OpProgram(
        problem.name,
        step,
        (q, k, v, layout.shapes(), batch_of(bucket)),
        (3,),
        stands,
        traits_of(spec, problem.mode, problem.page_size),
        layout.num_bytes(),
        kernel.caps.why_not(env, spec, bucket, layout),
    )


def batch_of(bucket: Bucket) -> AttnBatch:
    """AttnBatch of a bucket, without arrays."""

    def ints(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    tokens, seqs = bucket.tokens, bucket.seqs
    return AttnBatch(
        ints(tokens),
        ints(seqs + 1),
        ints(seqs),
        ints(seqs, bucket.pages_per_seq),
        ints(tokens),
        ints(tokens),
        ints(3),
        bucket,
    )


def compile_program(program: OpProgram, compiler: KernelCompiler, target: str) -> Mapping[str, int]:
    """Compile a program for a target; AssertionError when its results have a copy of what was
    donated.
    """
    reason = program.why_not or compiler.why_not(target)
    if reason is not None:
        raise unittest.SkipTest(reason)
    made = compiler.compile(
        program.function, program.arguments, target=target, donated=program.donated
    )
    aliased, needed = made.figures.get("alias_bytes"), program.kept_bytes
    if aliased is not None and aliased < needed:
        raise AssertionError(
            f"{program.name}: {aliased} bytes of the results lie in donated arguments, the cache "
            f"alone has {needed}: the program copies it"
        )
    return made.figures
