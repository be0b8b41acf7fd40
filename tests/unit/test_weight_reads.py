"""Reads of weights are counted from the text of a compiled program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from enginebay.plugins.registry import load_registry
from enginebay_bench.weight_reads import count_reads, layer_reads
from enginebay_pallas.compiler import compiler as tpu
from enginebay_testing.cross_compile import DecodeShape, compile_decode_step
from enginebay_testing.toolchains import KernelCompiler
from enginebay_triton.compiler import compiler as gpu

SMALL_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def test_reads_of_a_loop_count_once_and_what_is_handed_on_not_at_all() -> None:
    def step(weights: dict[str, jax.Array], x: jax.Array, num: jax.Array) -> jax.Array:
        y = jnp.dot(x, weights["layers.once"])
        y = jnp.dot(jnp.sin(jnp.dot(y, weights["layers.twice"])), weights["layers.twice"])

        def turn(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            at, z = carry
            return at + 1, jnp.tanh(jnp.dot(z, weights["layers.looped"]))

        return jax.lax.while_loop(lambda carry: carry[0] < num, turn, (jnp.int32(0), y))[1]

    one = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    names = ("layers.once", "layers.twice", "layers.looped", "layers.unused")
    number = jax.ShapeDtypeStruct((), jnp.int32)
    text = jax.jit(step).lower(dict.fromkeys(names, one), one, number).compile().as_text()
    assert text is not None
    assert count_reads(text) == {"layers.once": 1, "layers.twice": 2, "layers.looped": 1}


TPU_STEP = """HloModule jit_step

ENTRY %main.9 (w.1: bf16[8,64]) -> bf16[64] {
  %w.1 = bf16[8,64]{1,0:T(8,128)} parameter(0), metadata={op_name="weights['layers.sliced']"}
  %p.1 = bf16[8,64]{1,0:T(8,128)} parameter(1), metadata={op_name="weights['layers.ahead']"}
  %bitcast.1 = s8[1024]{0} bitcast(%w.1)
  %slice-start = ((s8[1024]), s8[256], s32[]) slice-start(%bitcast.1), slice={[0:256]}
  %slice-done = s8[256]{0} slice-done(%slice-start)
  %slice-start.1 = ((s8[1024]), s8[512], s32[]) slice-start(%bitcast.1), slice={[256:768]}
  %slice-done.1 = s8[512]{0} slice-done(%slice-start.1)
  %slice.2 = bf16[2,64]{1,0} slice(%w.1), slice={[6:8], [0:64]}
  %copy-start = (bf16[8,64], bf16[8,64], u32[]) copy-start(%p.1), cross_program_prefetch_index=0
  %copy-done = bf16[8,64]{1,0} copy-done(%copy-start)
  %fusion.1 = bf16[64]{0} fusion(%slice-done, %slice-done.1, %slice.2, %copy-done), calls=%f
  %copy-start.1 = (bf16[8,64], bf16[8,64], u32[]) copy-start(%p.1)
  %copy-done.1 = bf16[8,64]{1,0} copy-done(%copy-start.1)
  ROOT %tuple = (bf16[64]) tuple(%fusion.1)
}
"""


def test_slices_are_shares_and_a_fetch_for_the_next_run_is_none_of_this_one() -> None:
    assert count_reads(TPU_STEP) == {"layers.sliced": 1, "layers.ahead": 1}
    used = TPU_STEP.replace("%slice.2, %copy-done)", "%slice.2, %copy-done, %copy-done.1)")
    assert count_reads(used) == {"layers.sliced": 1, "layers.ahead": 2}


@pytest.mark.matrix
@pytest.mark.parametrize(("compiler", "target"), [(tpu, "v5e"), (tpu, "v6e"), (gpu, "sm_90")])
def test_a_mixed_step_reads_each_weight_once_and_has_one_copy_of_the_cache(
    compiler: KernelCompiler, target: str
) -> None:
    if (reason := compiler.why_not(target)) is not None:
        pytest.skip(reason)
    decode, mixed = (
        compile_decode_step(
            load_registry(),
            SMALL_LLAMA,
            compiler,
            target,
            shape=DecodeShape(num_pages=2049, prefill_tokens=num_tokens),
        )
        for num_tokens in (0, 512)
    )
    figures = mixed.compiled.figures
    assert mixed.cache_bytes <= figures["alias_bytes"] < mixed.cache_bytes + (8 << 20)
    assert figures["temp_bytes"] < mixed.cache_bytes // 2
    assert set(layer_reads(mixed)) == set(layer_reads(decode))
    for reads in (layer_reads(mixed), layer_reads(decode)):
        # Vectors, of which two kernels may each read a copy, are none of the traffic.
        matrices = {path: num for path, num in reads.items() if not path.endswith("norm.scale")}
        assert len(matrices) == 5 * 2
        assert set(matrices.values()) == {1}
