"""The stages of run.py that use enginebay. Each figure is printed as one line of JSON.

python tools/gpu_check/measure.py device|stream|check|kernel|eval|engine|host [--tiny] ...
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import math
import shutil
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
from enginebay.jax_start import start_jax
from enginebay.ops.batches import derive_batch
from enginebay.ops.spec import AttnSpec, Bucket
from enginebay.plugins.registry import load_registry
from enginebay_bench.attention import attention_cost
from enginebay_testing.layouts import installed_layouts
from enginebay_testing.suites import best_platform
from enginebay_testing.verdicts import FAULTS
from lifetime import end_with_parent

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 5
ROUND_S = 0.05
AWAKE_S = 0.5
"""Seconds of work before a measurement: an idle device starts at a fraction of its clock."""
CHAIN_BYTES = 1 << 30
"""Total bytes of the caches that one program reads in turn, about as many as those of
all layers.
"""
MAX_CACHES = 64

LIBRARIES = ("jax", "jaxlib", "jax-triton", "triton", "torch", "transformers")
MAX_F32_KL = 1e-4
"""Max KL divergence between logits of a random model from two orders of the same float32 sums; a
wrong kernel gives 1e-2 and more.
"""


def tell(figure: str, value: float | None, unit: str, fraction: float | None = None) -> None:
    """Print one figure as JSON."""
    print(
        json.dumps({"figure": figure, "value": value, "unit": unit, "fraction": fraction}),
        flush=True,
    )


def seconds(run: Any, *, tiny: bool) -> float:
    """Return the median time per call over rounds of calls that are launched together, after a
    warm-up of the device.
    """
    jax.block_until_ready(run())
    start, calls = time.perf_counter(), 0
    while calls == 0 or time.perf_counter() - start < (0.0 if tiny else AWAKE_S):
        jax.block_until_ready(run())
        calls += 1
    repeats = max(1, math.ceil(ROUND_S * calls / (time.perf_counter() - start)))
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(repeats):
            result = run()
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / repeats)
    return statistics.median(times)


def stream_bytes_per_s(*, tiny: bool) -> float:
    """Return the read bandwidth for an array far larger than any cache of the device: the better of
    two ways to read.
    """
    size = 1 << 22 if tiny else 1 << 32
    x = jnp.arange(size // 4, dtype=jnp.int32)
    whole, rows = jax.jit(jnp.max), jax.jit(lambda x: x.reshape(-1, 1 << 14).max(axis=1))
    return size / min(seconds(functools.partial(read, x), tiny=tiny) for read in (whole, rows))


def device(args: argparse.Namespace) -> int:
    """Print the device and the libraries. Without a GPU, return 2 and print the reason, unless
    shapes are tiny.
    """
    cuda = load_registry()
    reason = cuda.load(cuda.find("platform", "cuda"))().why_not()
    if reason is not None and not args.tiny:
        print(
            f"no GPU: {reason}. Pass --tiny to run the same stages on any device.",
            file=sys.stderr,
        )
        return 2
    versions = []
    for name in LIBRARIES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    versions.append(f"assembler {shutil.which('ptxas') or 'not on the path'}")
    found = jax.devices()
    tell(
        f"{found[0].device_kind}, Python {sys.version.split()[0]}, {', '.join(versions)}",
        len(found),
        "",
    )
    return 0


def stream(args: argparse.Namespace) -> int:
    """Measure the read bandwidth of the device."""
    tell("read-only stream", stream_bytes_per_s(tiny=args.tiny) / 1e9, "GB/s")
    return 0


def check(args: argparse.Namespace) -> int:
    """Run `enginebay check` for every kernel that only runs on this platform: all cases, eight at a
    time.
    """
    platform = best_platform(load_registry()).name
    entries = [
        e for e in load_registry().entries if e.kind == "kernel" and e.declaration is not None
    ]
    names = sorted(
        f"kernel:{e.op}:{e.name}"
        for e in entries
        if e.declaration and e.declaration.platforms == (platform,)
    )
    tell(f"kernels for {platform}", len(names), "")
    names, how = (names[:1], []) if args.tiny else (names, ["--all", "--jobs", "8"])
    failed = 0
    for name in names:
        command = [sys.executable, "-m", "enginebay", "check", name, "--level", "run", *how]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, preexec_fn=end_with_parent
        )
        lines = done.stdout.splitlines()
        # The last line counts the verdicts. A kernel without any case that ran does not count as
        # checked.
        told = next(
            (line for line in reversed(lines) if line.startswith(f"{name} run")), "no verdicts"
        )
        is_good = done.returncode == 0 and " PASS" in told
        tell(f"check --level run {name}", int(not is_good), f"({told})")
        if not is_good:
            failed = 1
            shown = [line for line in lines if any(fault in line for fault in FAULTS)]
            print("\n".join(shown[-40:]), done.stderr[-2000:], sep="\n", file=sys.stderr)
    return failed


def lengths(rows: int, context: int, *, ragged: bool) -> list[int]:
    """Return the number of positions of each row: `context`, or if `ragged`, up to twice `context`
    with the same mean.
    """
    if not ragged:
        return [context] * rows
    return np.random.default_rng(0).integers(1, 2 * context, rows, endpoint=True).tolist()


def kernel(args: argparse.Namespace) -> int:
    """Measure decode attention over paged caches with the heads of an 8B model; one program reads
    several caches in turn, like layers.
    """
    registry, platform = load_registry(), best_platform(load_registry())
    env, bandwidth = platform.env(), stream_bytes_per_s(tiny=args.tiny)
    name = "triton" if env.platform == "cuda" else "xla"
    impl = registry.load(registry.find("kernel", name, "attention"))
    heads, kv_heads, width = (4, 2, 16) if args.tiny else (32, 8, 128)
    dtype = "float32" if args.tiny else "bfloat16"
    spec = AttnSpec(heads, kv_heads, width, q_dtype=dtype, kv_dtype=dtype)
    sizes = ((1, 4096), (8, 4096), (32, 1024), (32, 4096), (128, 4096))
    cases = [(rows, context, 64, False) for rows, context in (((2, 128),) if args.tiny else sizes)]
    if not args.tiny:
        cases += [(32, 4096, 16, False), (32, 4096, 64, True)]
    for rows, context, page, ragged in cases:
        lens = lengths(rows, context, ragged=ragged)
        most = 2 * context if ragged else context
        pages = most // page
        layout = installed_layouts()[impl.caps.layouts[0]](
            rows * pages, page, kv_heads, width, dtype
        )
        bucket = Bucket(rows, rows, pages, 1, most, "decode")
        rng = np.random.default_rng(0)
        order = jnp.asarray(rng.permutation(rows * pages).reshape(rows, pages), jnp.int32)
        batch = derive_batch(
            jnp.ones(rows, jnp.int32), jnp.asarray(lens, jnp.int32), order, page, bucket
        )
        count = 2 if args.tiny else max(2, min(MAX_CACHES, -(-CHAIN_BYTES // layout.num_bytes())))
        caches = [
            {
                key: jax.random.normal(jax.random.key(number), s.shape, s.dtype)
                for key, s in layout.shapes().items()
            }
            for number in range(count)
        ]
        q = jnp.asarray(rng.normal(size=(rows, heads, width)), dtype)
        step = functools.partial(
            impl, spec=spec, layout=layout, config=impl.default_config(env, spec, bucket, layout)
        )

        def layers(q: Any, caches: Any, batch: Any, step: Any = step) -> Any:
            for cache in caches:
                q = step(q, None, None, cache, batch)[0]
            return q

        time_s = (
            seconds(functools.partial(jax.jit(layers), q, caches, batch), tiny=args.tiny) / count
        )
        size = attention_cost(spec, [1] * rows, lens, kv_bytes=jnp.dtype(dtype).itemsize)
        rate = size.bytes_read / time_s
        what = f"{name} decode attention, {rows} rows of {context}"
        what += f", pages of {page}" * (page != 64) + ", uneven" * ragged
        tell(what, rate / 1e9, "GB/s", rate / bandwidth)
    return 0


def eval_(args: argparse.Namespace) -> int:
    """Run `enginebay eval`: compare the kernels that an engine chooses here with plain ones, in
    float32 and in the engine's dtype.
    """
    config = shapes.config(args.model, tiny=args.tiny)
    folder = shapes.write(args.folder, config, "float32" if args.tiny else "bfloat16")
    text = folder / "text.txt"
    words = np.random.default_rng(0).integers(3, config["vocab_size"], 64 if args.tiny else 1024)
    text.write_text(" ".join(f"w{word}" for word in words), encoding="utf-8")
    failed = 0
    for dtype in ("float32",) if args.tiny else ("float32", "bfloat16"):
        options = [
            "--model",
            str(folder),
            "--text",
            str(text),
            "--engine",
            args.engine,
            "--dtype",
            dtype,
        ]
        sizes = ["--new-tokens", "8", "--max-num-seqs", "4", "--max-model-len", "640"]
        command = [sys.executable, "-m", "enginebay", "eval", *options, *sizes, "--json"]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=False, preexec_fn=end_with_parent
        )
        if done.returncode:
            failed = 1
            continue
        told = json.loads(done.stdout)
        for phase in ("prefill", "decode"):
            tell(
                f"{args.model} {dtype}, KL divergence of {phase}",
                told[phase]["max"],
                "nats at most",
            )
        worst = max(told[phase]["max"] for phase in ("prefill", "decode"))
        if dtype == "float32" and not worst < MAX_F32_KL:
            print(f"a KL divergence of {worst} in float32, more than {MAX_F32_KL}", file=sys.stderr)
            failed = 1
    return failed


def engine(args: argparse.Namespace) -> int:
    """Measure decoded tokens per second for each batch size, and their share of the limit set by
    reading weights and cache.
    """
    batches = [int(part) for part in args.batches.split(",")]
    config = shapes.config(args.model, tiny=args.tiny)
    dtype = "float32" if args.tiny else "bfloat16"
    folder = shapes.write(args.folder, config, dtype)
    bandwidth = stream_bytes_per_s(tiny=args.tiny)
    prompt, new = (8, 24) if args.tiny else (1024, 128)
    most = max(batches)
    length = prompt + 2 * new
    # All requests of a batch are admitted together, so that only a decode of that many rows is
    # measured.
    options = {
        "dtype": dtype,
        "engine": args.engine,
        "scheduler": "static",
        "max_model_len": length,
        "max_num_seqs": most,
        "generation_config": "none",
    }
    with LLM(str(folder), **options) as llm:
        for batch in batches:
            rate = decode_rate(llm, batch, prompt, new, config["vocab_size"])
            context = batch * (prompt + new // 2)  # the mean during the decode
            read = shapes.weight_bytes(config, dtype) + context * shapes.kv_bytes(config, dtype)
            limit = bandwidth * batch / read
            share = None if rate is None else rate / limit
            tell(f"{args.model}, batch {batch}", rate, "tokens/s", share)
    return 0


def decode_rate(llm: Any, batch: int, prompt: int, new: int, vocab: int) -> float | None:
    """Return tokens per second from the first token of the last row to the last token of all rows,
    by the times of the engine's loop.

    None where the two times are equal: the work is too small to measure here.
    """
    rng = np.random.default_rng(batch)

    def once() -> float:
        prompts = rng.integers(3, vocab, size=(batch, prompt)).tolist()
        params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
        told = [output.metrics for output in llm.generate(prompts, params)]
        begins = max(one.first_token_s for one in told)
        if min(one.finished_s for one in told) < begins:
            raise SystemExit(f"{batch} rows do not decode together; the cache may be too small")
        return max(one.finished_s for one in told) - begins

    once()  # compile what is not compiled yet
    span = statistics.median(once() for _ in range(3))
    return batch * (new - 1) / span if span > 0 else None


def host(args: argparse.Namespace) -> int:
    """Measure the host's work for a decode step of the demo model, without the device's work."""
    sys.path.insert(0, str(ROOT))
    from tests.benchmarks.host_time import Host

    rows, turns = ((1, 2), 4) if args.tiny else ((1, 32, 128), 100)
    for engine in args.engines.split(","):
        with LLM(
            "demo",
            engine=engine,
            max_num_seqs=max(rows),
            max_model_len=1024,
            generation_config="none",
        ) as llm:
            measured = Host(llm)
            for count in rows:
                time_s = measured.measure(count, turns)
                tell(f"{engine}, {count} rows: CPU time of a step", time_s.cpu_s * 1e6, "us")
                tell(f"{engine}, {count} rows: of that the launch", time_s.launch_s * 1e6, "us")
    return 0


def main() -> int:
    """Run one stage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    stages = {
        f.__name__.rstrip("_"): f for f in (device, stream, check, kernel, eval_, engine, host)
    }
    parser.add_argument("stage", choices=stages)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--model", default="qwen3-0.6b", choices=shapes.MODELS)
    parser.add_argument("--engine", default="oengine")
    parser.add_argument("--engines", default="oengine,vinference")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--batches", default="1,8,32,128")
    args = parser.parse_args()
    end_with_parent()
    start_jax()
    return stages[args.stage](args)


if __name__ == "__main__":
    sys.exit(main())
