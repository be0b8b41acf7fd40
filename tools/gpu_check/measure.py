"""The stages of run.py that use enginebay: one JSON line a figure.

python tools/gpu_check/measure.py device|stream|check|kernel|engine|host [--tiny] ...
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shapes
from enginebay import LLM, SamplingParams
from enginebay.build.start import start_jax
from enginebay.cache import BUILTIN_LAYOUTS
from enginebay.ops.cost import attention_cost
from enginebay.ops.spec import AttnSpec, Bucket, derive_batch
from enginebay.registry import load_registry
from enginebay.testing.suites import best_platform

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 5
LIBRARIES = ("jax", "jaxlib", "jax-triton", "triton", "torch", "transformers")


def tell(figure: str, value: float | None, unit: str, fraction: float | None = None) -> None:
    """Print one figure."""
    print(json.dumps({"figure": figure, "value": value, "unit": unit, "fraction": fraction}), flush=True)


def seconds(run: Any, repeats: int) -> float:
    """Median time of one of `repeats` calls that are launched together, over rounds."""
    jax.block_until_ready(run())
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(repeats):
            result = run()
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / repeats)
    return statistics.median(times)


def stream_bytes_per_s(*, tiny: bool) -> float:
    """Read-only bandwidth: the maximum of an array far larger than any cache of the device."""
    size = 1 << 22 if tiny else 1 << 30
    x = jnp.arange(size // 4, dtype=jnp.int32)
    return size / seconds(functools.partial(jax.jit(jnp.max), x), 10)


def device(args: argparse.Namespace) -> int:
    """What is measured, and with which libraries; 2 and the reason where there is no GPU, unless shapes are tiny."""
    cuda = load_registry()
    reason = cuda.load(cuda.find("platform", "cuda"))().why_not()
    if reason is not None and not args.tiny:
        print(
            f"no GPU: {reason}. Option --tiny goes through the same motions on any device.", file=sys.stderr
        )
        return 2
    versions = []
    for name in LIBRARIES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    found = jax.devices()
    tell(f"{found[0].device_kind}, Python {sys.version.split()[0]}, {', '.join(versions)}", len(found), "")
    return 0


def stream(args: argparse.Namespace) -> int:
    """What the device reads."""
    tell("read-only stream", stream_bytes_per_s(tiny=args.tiny) / 1e9, "GB/s")
    return 0


def check(args: argparse.Namespace) -> int:
    """`enginebay check` of every kernel that is for this platform alone."""
    platform = best_platform(load_registry()).name
    entries = [e for e in load_registry().entries if e.kind == "kernel" and e.declaration is not None]
    names = sorted(
        f"kernel:{e.op}:{e.name}" for e in entries if e.declaration and e.declaration.platforms == (platform,)
    )
    tell(f"kernels for {platform}", len(names), "")
    failed = 0
    for name in names[:1] if args.tiny else names:
        command = [sys.executable, "-m", "enginebay", "check", name, "--level", "run"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        # The last lines count the verdicts.
        told = [line for line in done.stdout.splitlines() if line.startswith(f"{name} run")]
        tell(f"check --level run {name}", done.returncode, f"({'; '.join(told) or 'no verdicts'})")
        if done.returncode:
            failed += 1
            print(done.stdout[-4000:], done.stderr[-2000:], file=sys.stderr)
    return int(bool(failed))


def kernel(args: argparse.Namespace) -> int:
    """Decode attention over a paged cache: 32 rows of 4,096 positions, heads of an 8B model."""
    registry, platform = load_registry(), best_platform(load_registry())
    env, bandwidth = platform.env(), stream_bytes_per_s(tiny=args.tiny)
    name = "triton" if env.platform == "cuda" else "xla"
    impl = registry.load(registry.find("kernel", name, "attention"))
    heads, kv_heads, width = (4, 2, 16) if args.tiny else (32, 8, 128)
    dtype = "float32" if args.tiny else "bfloat16"
    spec = AttnSpec(heads, kv_heads, width, q_dtype=dtype, kv_dtype=dtype)
    page = 64
    for rows, context in (
        ((2, 128),) if args.tiny else ((1, 4096), (8, 4096), (32, 4096), (32, 1024), (128, 4096))
    ):
        pages = context // page
        layout = BUILTIN_LAYOUTS[impl.caps.layouts[0]](rows * pages, page, kv_heads, width, dtype)
        bucket = Bucket(rows, rows, pages, 1, context, "decode")
        rng = np.random.default_rng(0)
        order = jnp.asarray(rng.permutation(rows * pages).reshape(rows, pages), jnp.int32)
        lens = jnp.full(rows, context, jnp.int32)
        batch = derive_batch(jnp.ones(rows, jnp.int32), lens, order, page, bucket)
        cache = {key: jnp.ones(s.shape, s.dtype) for key, s in layout.shapes().items()}
        q = jnp.asarray(rng.normal(size=(rows, heads, width)), dtype)
        config = impl.default_config(env, spec, bucket, layout)
        step = functools.partial(impl, spec=spec, layout=layout, config=config)
        run = jax.jit(lambda q, cache, batch, step=step: step(q, None, None, cache, batch)[0])
        time_s = seconds(functools.partial(run, q, cache, batch), 20)
        size = attention_cost(spec, [1] * rows, [context] * rows, kv_bytes=jnp.dtype(dtype).itemsize)
        rate = size.bytes_read / time_s
        tell(f"{name} decode attention, {rows} rows of {context}", rate / 1e9, "GB/s", rate / bandwidth)
    return 0


def engine(args: argparse.Namespace) -> int:
    """Tokens per second of decoding at each batch, and the share of what reading weights and cache allows."""
    batches = [int(part) for part in args.batches.split(",")]
    config = shapes.config(args.model, tiny=args.tiny)
    dtype = "float32" if args.tiny else "bfloat16"
    folder = shapes.write(args.folder, config, dtype)
    bandwidth = stream_bytes_per_s(tiny=args.tiny)
    prompt, new = (8, 24) if args.tiny else (1024, 128)
    most = max(batches)
    length = prompt + 2 * new
    options = {"dtype": dtype, "engine": args.engine, "max_model_len": length, "max_num_seqs": most}
    with LLM(str(folder), **options) as llm:
        for batch in batches:
            rate = decode_rate(llm, batch, prompt, new, config["vocab_size"])
            context = batch * (prompt + new // 2)  # half-way
            read = shapes.weight_bytes(config, dtype) + context * shapes.kv_bytes(config, dtype)
            limit = bandwidth * batch / read
            share = None if rate is None else rate / limit
            tell(f"{args.model}, batch {batch}", rate, "tokens/s", share)
    return 0


def decode_rate(llm: Any, batch: int, prompt: int, new: int, vocab: int) -> float | None:
    """Tokens per second between the end of short outputs and of long ones, prompts being equally long.

    None where the short ones took longer: the work is too small for this machine's noise.
    """
    rng = np.random.default_rng(batch)

    def timed(count: int) -> float:
        prompts = rng.integers(3, vocab, size=(batch, prompt)).tolist()
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(prompts, params)
        return time.perf_counter() - start

    timed(2)
    timed(new)
    span = statistics.median(timed(new) - timed(2) for _ in range(3))
    return batch * (new - 2) / span if span > 0 else None


def host(args: argparse.Namespace) -> int:
    """What the host does for a decode step of the demo model, with the device's work taken out."""
    sys.path.insert(0, str(ROOT))
    from tests.benchmarks.host_time import Host

    rows, turns = ((1, 2), 4) if args.tiny else ((1, 32, 128), 100)
    for engine in args.engines.split(","):
        with LLM("demo", engine=engine, max_num_seqs=max(rows), max_model_len=1024) as llm:
            measured = Host(llm)
            for count in rows:
                time_s = measured.measure(count, turns)
                tell(f"{engine}, {count} rows: CPU time of a step", time_s.cpu_s * 1e6, "us")
                tell(f"{engine}, {count} rows: of that the launch", time_s.launch_s * 1e6, "us")
    return 0


def main() -> int:
    """One stage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    stages = {f.__name__: f for f in (device, stream, check, kernel, engine, host)}
    parser.add_argument("stage", choices=stages)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--model", default="qwen3-0.6b", choices=shapes.MODELS)
    parser.add_argument("--engine", default="oengine")
    parser.add_argument("--engines", default="oengine,vinference")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--batches", default="1,8,32,128")
    args = parser.parse_args()
    start_jax()
    return stages[args.stage](args)


if __name__ == "__main__":
    sys.exit(main())
