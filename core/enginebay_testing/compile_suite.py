"""Checks that a kernel compiles for devices which are absent: programs at the shapes of real
models.
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

from enginebay.contracts.cache import KVLayout
from enginebay.ops.bound import AttentionImpl
from enginebay.ops.caps import Env
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket, Mode
from enginebay_testing.op_kit import OpKit, OpProgram
from enginebay_testing.toolchains import KernelCompiler
from enginebay_testing.traits import traits_of


@dataclasses.dataclass(frozen=True)
class CompileCheck:
    """A program for a target, and the function that compiles it. The function returns figures, or
    raises SkipTest with the reason.
    """

    target: str
    name: str
    run: Callable[[], Mapping[str, int]]
    representative: bool
    traits: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class HeadShape:
    """The attention shape of a model: query heads, KV heads, head_dim, and features of
    its layers.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    softcap: float | None = None
    v_head_dim: int | None = None
    """Width of values that are a prefix of their keys."""


SHAPES: dict[str, HeadShape] = {
    "8b": HeadShape(32, 8, 128),
    "qwen3_0.6b": HeadShape(16, 8, 128),
    "small": HeadShape(14, 2, 64),
    "wide": HeadShape(16, 8, 256),
    "latent": HeadShape(16, 1, 576, v_head_dim=512),
}
"""Llama 3.1 8B, Qwen3 0.6B, Qwen2.5 0.5B, the wide heads of Gemma 2, and DeepSeek-V2-Lite."""

EVERYWHERE = "decode_8b"
BY_TURNS = (("prefill_8b",), ("mixed_8b", "decode_latent"), ("decode_small",))
"""Representative programs: the first is compiled for every target, each other one for one target,
because some compilers need half a minute for a program.
"""

MODES: tuple[Mode, ...] = ("decode", "prefill", "mixed")

BUCKETS: dict[Mode, tuple[int, int, int, int]] = {
    "decode": (32, 32, 1, 4096),
    "prefill": (2048, 4, 2048, 2048),
    "mixed": (512, 32, 512, 4096),
}
"""Tokens, rows, longest query and longest context of the compiled steps, by mode."""


@dataclasses.dataclass(frozen=True)
class CompileProblem:
    """One attention problem to compile. A page size that the kernel does not claim is replaced by
    the nearest claimed one.
    """

    name: str
    mode: Mode
    spec: AttnSpec
    page_size: int = 64

    def bucket(self) -> Bucket:
        """Return the static shapes of the step."""
        tokens, seqs, max_q_len, max_kv_len = BUCKETS[self.mode]
        return Bucket(
            tokens, seqs, -(-max_kv_len // self.page_size), max_q_len, max_kv_len, self.mode
        )

    def layout(self, layout_type: type[KVLayout]) -> KVLayout:
        """Return a cache layout in which every row has its longest context."""
        bucket, spec = self.bucket(), self.spec
        pages = bucket.seqs * bucket.pages_per_seq
        return spec.make_layout(layout_type, pages, self.page_size)


def programs() -> Iterator[CompileProblem]:
    """Yield every model in every mode; the first model also with other dtypes, page sizes, windows
    and soft caps.
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
    """Yield the programs of attention in the first layout, or none without a layout. The
    representative programs depend on the number of the target.
    """
    stands = {EVERYWHERE, *itertools.chain(*BY_TURNS[number : number + 1])}
    for program in programs() if layouts else ():
        at = _with_claimed_page(program, kernel)
        yield attention_program(kernel, at, layouts[0], env, stands=at.name in stands)


def compile_checks(
    kit: OpKit, kernel: Any, compiler: KernelCompiler, layouts: Sequence[type[KVLayout]]
) -> Iterator[CompileCheck]:
    """Return every program of an op for every target of a compiler; `layouts` are the ones that a
    kernel declares.
    """
    for number, target in enumerate(compiler.targets):
        env = Env(compiler.platform, target)
        for program in kit.programs(kernel, env, number, layouts):
            run = functools.partial(compile_program, program, compiler, target)
            yield CompileCheck(target, program.name, run, program.representative, program.traits)


def _with_claimed_page(program: CompileProblem, kernel: AttentionImpl) -> CompileProblem:
    """Return the program with a claimed page size, unless the program is about a page size."""
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
    """Return one step of one layer, which donates the cache and must update it in place."""
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
        name=problem.name,
        function=step,
        arguments=(q, k, v, layout.shapes(), batch_of(bucket)),
        donated=(3,),
        representative=stands,
        traits=traits_of(spec, problem.mode, problem.page_size),
        kept_bytes=layout.num_bytes(),
        why_not=kernel.caps.why_not(env, spec, bucket, layout),
    )


def batch_of(bucket: Bucket) -> AttnBatch:
    """Return the AttnBatch of a bucket, with shapes in place of arrays."""

    def ints(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    tokens, seqs = bucket.tokens, bucket.seqs
    return AttnBatch(
        positions=ints(tokens),
        cu_q_lens=ints(seqs + 1),
        kv_lens=ints(seqs),
        page_table=ints(seqs, bucket.pages_per_seq),
        slots=ints(tokens),
        seq_ids=ints(tokens),
        distribution=ints(3),
        bucket=bucket,
    )


def compile_program(program: OpProgram, compiler: KernelCompiler, target: str) -> Mapping[str, int]:
    """Compile a program for a target and return the compiler's figures; AssertionError if the
    results copy a donated argument.
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
            f"{program.name}: {aliased} bytes of the results share memory with donated arguments, "
            f"expected {needed}: the program copies the cache"
        )
    return made.figures
