"""Attention and whole decode steps compiled for GPUs that are not there: no spills, and no second
copy of the cache.
"""

import functools
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton", reason='triton is not installed: the extra "gpu" brings it')
pytest.importorskip("jax_triton", reason='jax-triton is not installed: the extra "gpu" brings it')

from enginebay.compose.binding import OpsBinder
from enginebay.compose.composition import make_sampler
from enginebay.compose.kernels import choose_kernels
from enginebay.config import DEFAULT_AXIS_RULES, EngineConfig
from enginebay.config_sections import KernelChoice
from enginebay.contracts.commands import DecodeInputs
from enginebay.contracts.executor import EngineParts
from enginebay.contracts.placement import make_placement
from enginebay.contracts.step_key import StepKey
from enginebay.ops.caps import Env
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket
from enginebay.plugins.registry import load_registry
from enginebay.weights import WeightFormat
from enginebay_models import llama
from enginebay_runtime.device import DeviceRows
from enginebay_runtime.step import StepState, decode_step
from enginebay_testing.models import harness_steps
from enginebay_triton.attention import attention
from enginebay_triton.call import graph_features
from enginebay_triton.compiler import compiler
from enginebay_triton.layout import NhdLayout
from enginebay_triton.targets import TARGETS

S = jax.ShapeDtypeStruct
PAGE = 64

absent = compiler.why_not("sm_90")
pytestmark = pytest.mark.skipif(absent is not None, reason=absent or "")

HEADS = {"8b": (32, 8, 128), "0.6b": (16, 8, 128)}
BUCKETS = {
    "decode_1": Bucket(1, 1, 64, 1, 4096, "decode"),
    "decode_32": Bucket(32, 32, 64, 1, 4096, "decode"),
    "prefill": Bucket(2048, 4, 64, 2048, 4096, "prefill"),
    "mixed": Bucket(512, 32, 64, 512, 4096, "mixed"),
}
QUICK = {("8b", "decode_32", "bfloat16", "sm_90"), ("8b", "mixed", "bfloat16", "sm_90")}
ALL = [
    (model, bucket, dtype, target)
    for model in HEADS
    for bucket in BUCKETS
    for dtype in ("bfloat16", "float16", "float32")
    for target in TARGETS
]


@pytest.mark.parametrize(
    ("model", "mode", "dtype", "target"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.matrix) for case in ALL],
)
def test_default_configurations_do_not_spill(
    model: str, mode: str, dtype: str, target: str
) -> None:
    spec = AttnSpec(*HEADS[model], q_dtype=dtype, kv_dtype=dtype)
    bucket = BUCKETS[mode]
    layout = NhdLayout(1024, PAGE, spec.num_kv_heads, spec.head_dim, dtype)
    config = attention.default_config(Env("cuda", target), spec, bucket, layout)
    step = functools.partial(attention, spec=spec, layout=layout, config=config)

    def ints(*shape: int) -> Any:
        return S(shape, jnp.int32)

    tokens, seqs = bucket.tokens, bucket.seqs
    batch = AttnBatch(
        ints(tokens),
        ints(seqs + 1),
        ints(seqs),
        ints(seqs, bucket.pages_per_seq),
        ints(tokens),
        ints(tokens),
        ints(3),
        bucket,
    )
    q = S((tokens, spec.num_q_heads, spec.head_dim), jnp.dtype(dtype))
    report = compiler.compile(
        lambda q, cache, batch: step(q, None, None, cache, batch)[:2],
        [q, layout.shapes(), batch],
        target=target,
        donated=(1,),
    )
    assert report.figures["spill_bytes"] == 0, report
    # A group of keys and one of values are loaded while a tile is computed. True f32 products on
    # Hopper have no registers for that.
    if (dtype, target) != ("float32", "sm_90") or bucket.mode == "decode":
        assert report.figures["copies_in_flight"] >= 2, report
    assert report.figures["shared_bytes"] <= TARGETS[target].shared_bytes_per_block, report
    if "alias_bytes" in report.figures:
        assert report.figures["alias_bytes"] == layout.num_bytes()
        assert report.figures["temp_bytes"] < layout.num_bytes() / 10


LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
ROWS, CONTEXT = 32, 4096
LOOPS_TOO = "--xla_gpu_enable_command_buffer=+WHILE"


@pytest.mark.parametrize(
    ("num_layers", "sampler", "vocab_size"),
    [
        (2, "greedy", 2048),  # most of the time of compiling goes into sorting logits
        pytest.param(2, "standard", 128256, marks=pytest.mark.matrix),
        pytest.param(32, "standard", 128256, marks=pytest.mark.matrix),
    ],
)
def test_a_whole_decode_step_has_one_copy_of_the_cache(
    num_layers: int, sampler: str, vocab_size: int
) -> None:
    registry = load_registry()
    env = Env("cuda", "sm_90")
    config = EngineConfig(
        kernels={"attention": KernelChoice.model_validate("triton")}, layout="nhd", sampler=sampler
    )
    shape = {"num_hidden_layers": num_layers, "vocab_size": vocab_size}
    model = llama.family.build(LLAMA_8B | shape, dtype="bfloat16")
    placement = make_placement(jax.devices(), {}, dict.fromkeys(DEFAULT_AXIS_RULES))
    steps = functools.partial(harness_steps, model.info)
    chosen = choose_kernels(registry, config, env, model.info, placement, "nhd", steps)
    assert chosen.names["attention.decode"] == "triton"
    parts = EngineParts(
        config=config,
        model=model,
        platform=registry.load(registry.find("platform", "cuda"))(),
        placement=placement,
        weight_format=WeightFormat("bfloat16"),
        layout=chosen.layout,
        layout_type=chosen.layout_type,
        ops=OpsBinder(chosen, model.info, placement),
        sampler=make_sampler(registry, config, chosen.plain),
    )
    (group,) = model.info.groups
    layout = NhdLayout(ROWS * CONTEXT // PAGE, PAGE, group.num_kv_heads, group.head_dim, "bfloat16")
    bucket = Bucket(ROWS, ROWS, CONTEXT // PAGE, 1, CONTEXT, "decode")
    sizes = {"layouts": {group.name: layout}, "key": StepKey("decode", bucket), "max_steps": 8}

    def step(weights: Any, state: StepState, row_ids: Any, num_steps: Any, pages: Any) -> Any:
        inputs = DecodeInputs(row_ids, num_steps)
        return decode_step(weights, state, {}, inputs, parts=parts, pages=pages, **sizes)

    weights = {path: S(spec.shape, jnp.bfloat16) for path, spec in model.weight_specs().items()}
    rows = jax.eval_shape(lambda: DeviceRows.empty(ROWS, CONTEXT))
    state = StepState({group.name: tuple(layout.shapes() for _ in range(num_layers))}, rows)
    tables = {group.name: S((ROWS, bucket.pages_per_seq), jnp.int32)}
    report = compiler.compile(
        step,
        [weights, state, S((ROWS,), jnp.int32), S((), jnp.int32), tables],
        target="sm_90",
        donated=(1,),
    )
    assert report.figures["spill_bytes"] == 0, report
    if "alias_bytes" not in report.figures:
        pytest.skip("jax's CUDA runtime (jax-cuda12-pjrt) is not installed: memory is not analysed")
    cache_bytes = layout.num_bytes() * num_layers
    assert report.figures["alias_bytes"] >= cache_bytes, report
    assert report.figures["temp_bytes"] < layout.num_bytes(), report


@pytest.mark.parametrize(("flags", "launches_beside"), [("", 2), (LOOPS_TOO, 0)])
def test_a_decode_step_is_one_cuda_graph(
    flags: str,
    launches_beside: int,
    repo_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What XLA makes of the step above, in its own listing: a graph for each token and what decides
    whether another follows, or one graph for all tokens of a launch.
    """
    if not graph_features():
        pytest.skip("this jax-triton's calls are in no graph")
    monkeypatch.syspath_prepend(str(repo_root / "tools" / "gpu_check"))
    case = f"{__file__}::test_a_whole_decode_step_has_one_copy_of_the_cache[2-greedy-2048]"
    dump = f"--xla_dump_to={tmp_path} --xla_dump_hlo_module_re=.*"
    environment = {
        **os.environ,
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {dump} {flags}",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    command = [sys.executable, "-m", "pytest", "-q", case]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=repo_root, env=environment
    )
    assert done.returncode == 0, done.stdout
    listings = [path.read_text() for path in tmp_path.glob("*thunk_sequence_after_thunk_passes*")]
    if not listings:
        pytest.skip("jax's CUDA runtime (jax-cuda12-pjrt) is not installed: XLA lists nothing")
    listing = max(listings, key=len)
    assert "kWhile" in listing
    count_graphs = importlib.import_module("run").count_graphs
    for name in ("run", "installing"):
        sys.modules.pop(name, None)
    assert count_graphs(listing) == (1, launches_beside)
