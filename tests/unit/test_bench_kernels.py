"""Benchmarks of kernels: shapes by name, parity beside figures, refusals, and the search of
configurations.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from enginebay.compose.candidates import candidates
from enginebay.compose.ops import usable_ops
from enginebay.errors import InputError
from enginebay.ops.caps import Env
from enginebay.ops.select import Candidate
from enginebay.ops.tuned_tables import TunedEntry, TunedTable
from enginebay.plugins.registry import load_registry
from enginebay_bench.kernels import Bench, Figure, ShapeLimits, judged, measure_shape
from enginebay_bench.problem import BenchSetting, bench_of
from enginebay_bench.roofline import Roofline, measure_roofline
from enginebay_bench.shapes import LAYERS, LayerShape, Shape, parse_shapes
from enginebay_bench.tune import Tuned, merge_tables, tune_shape, write_table
from tests.layouts import BUILTIN_LAYOUTS

ENV = Env("cpu", "", "a processor")
TINY = LayerShape("tiny", 32, 4, 2, 16, 64, 96, window=20, softcap=5.0)
REGISTRY = load_registry(["xla", "native"])
OPS, _ = usable_ops(REGISTRY)
RATES = Roofline(1e10, {"float32": 1e11, "bfloat16": 1e11}, 1e-6)


def bench(*, free: int = 1 << 30, rounds: int = 2) -> Bench:
    return Bench(RATES, {}, rounds, ShapeLimits(free, 5.0), jax.devices("cpu")[0])


def setting(dtype: str = "float32", layout: str = "hnd", *, ragged: bool = True) -> BenchSetting:
    (writer,) = candidates(REGISTRY, "kv_write", ENV)
    return BenchSetting(
        ENV, dtype, layout, BUILTIN_LAYOUTS[layout], writer.impl, page_size=8, ragged=ragged
    )


def xla(op: str = "attention") -> Candidate:
    return next(c for c in candidates(REGISTRY, op, ENV) if c.name == "xla")


def only(figures: list[Figure], name: str = "xla") -> Figure:
    return next(f for f in figures if f.implementation == name)


def test_shapes_are_named_by_what_they_are_and_beginnings_stand_for_the_rest() -> None:
    axes = bench_of(OPS["attention"]).axes
    (one,) = parse_shapes(["llama-3.1-8b/decode/b3/c100"], axes)
    assert (one.layer, one.mode, one.batch, one.context) == (
        LAYERS["llama-3.1-8b"],
        "decode",
        3,
        100,
    )
    assert one.name == "llama-3.1-8b/decode/b3/c100"
    decode = parse_shapes(["qwen3-0.6b/decode"], axes)
    assert {s.batch for s in decode} == {1, 8, 32, 128}
    assert {s.context for s in decode} == {1024, 4096, 32768}
    everything = parse_shapes(["all"], axes)
    assert {s.layer.name for s in everything} == set(LAYERS)
    assert parse_shapes([s.name for s in everything], axes) == everything
    heads = parse_shapes(["qwen3-0.6b/decode/b8/head"], bench_of(OPS["linear"]).axes)
    assert [s.name for s in heads] == ["qwen3-0.6b/decode/b8/head"]


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "qwen3-0.6b/train",
        "qwen3-0.6b/decode/c8/b8",
        "qwen3-0.6b/decode/b0",
        "qwen3-0.6b/decode/b1/up",
    ],
)
def test_names_without_a_meaning_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="Allowed"):
        parse_shapes([name], bench_of(OPS["attention"]).axes)


@pytest.mark.parametrize("mode", ["decode", "prefill", "mixed"])
def test_ragged_rows_fit_their_bucket_and_the_first_is_whole(mode: Any) -> None:
    shape = Shape(TINY, mode, 5, 100)
    q_lens, kv_lens = shape.lengths(ragged=True)
    bucket = shape.bucket(q_lens, 8, 2, compact=False)
    assert max(kv_lens) == bucket.max_kv_len == 100
    assert len(set(kv_lens)) > 1
    assert sum(q_lens) <= bucket.tokens
    assert all(0 < q <= kv for q, kv in zip(q_lens, kv_lens, strict=True))
    assert shape.lengths(ragged=False)[1] == (100,) * 5


@pytest.mark.parametrize(
    "mode",
    ["decode", *(pytest.param(mode, marks=pytest.mark.long) for mode in ("prefill", "mixed"))],
)
def test_attention_is_measured_beside_its_parity(mode: Any) -> None:
    figures = measure_shape(
        bench(),
        OPS["attention"],
        Shape(TINY, mode, 3, 40),
        setting(),
        candidates(REGISTRY, "attention", ENV),
    )
    named = {f.implementation: judged(f, RATES) for f in figures}
    right = {n: f for n, f in named.items() if f.reason is None}
    assert "xla" in right
    assert ("xla on a compact copy" in right) == (mode == "decode")
    for figure in right.values():
        assert figure.parity is not None
        assert figure.parity.is_right, figure.parity
        assert figure.timing is not None
        assert (
            figure.timing.quartiles_s[0] <= figure.timing.median_s <= figure.timing.quartiles_s[1]
        )
        assert figure.share == pytest.approx(
            RATES.ideal_s(figure.cost, "float32") / figure.timing.median_s
        )
        assert figure.bound in ("launch", "memory", "arithmetic")
    if mode != "decode":
        assert named["native"].reason, "it decodes only, and says so, or that there is no compiler"


@pytest.mark.long
@pytest.mark.parametrize("op", [op for op, one in OPS.items() if one.bench and op != "attention"])
def test_plain_ops_are_measured_beside_their_parity(op: str) -> None:
    (shape, *_) = [
        dataclasses.replace(s, layer=TINY, batch=3)
        for s in parse_shapes(["smollm2-135m/decode/b1"], bench_of(OPS[op]).axes)
    ]
    figure = only(measure_shape(bench(), OPS[op], shape, setting("bfloat16"), [xla(op)]))
    assert figure.reason is None
    assert figure.parity is not None
    assert figure.parity.is_right, figure.parity
    assert figure.cost is not None
    assert figure.cost.bytes_read > 0


def wrong(change: Callable[..., Any]) -> Candidate:
    """XLA's attention with its results changed."""

    @dataclasses.dataclass(frozen=True)
    class Wrong(type(xla().impl)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return change(*super().__call__(*args, **kwargs))

    return Candidate("wrong", 0, Wrong())


@pytest.mark.parametrize(
    "change",
    [
        lambda out, cache, lse: (out * 1.001, cache, lse),
        lambda out, cache, lse: (out.at[3, 0, 1].set(jnp.nan), cache, lse),
        lambda out, cache, lse: (
            out + 1e-3 * (jnp.arange(out.shape[0]) == out.shape[0] - 1)[:, None, None],
            cache,
            lse,
        ),
        lambda out, cache, lse: (out, cache | {"k": cache["k"].at[0, 0, 0, 0].add(1.0)}, lse),
    ],
    ids=["values", "nan", "padding", "cache"],
)
def test_wrong_results_are_told(change: Callable[..., Any]) -> None:
    # The prefill's bucket has padding behind its 40 tokens.
    shape = Shape(TINY, "prefill", 1, 40)
    figure = only(
        measure_shape(bench(), OPS["attention"], shape, setting(), [wrong(change)]), "wrong"
    )
    assert figure.parity is not None
    assert not figure.parity.is_right
    assert figure.timing is not None


def test_what_fails_and_what_does_not_fit_is_listed_with_the_reason() -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("out of registers")

    shape = Shape(TINY, "prefill", 1, 40)
    figures = measure_shape(bench(), OPS["attention"], shape, setting(), [wrong(fail), xla()])
    assert only(figures, "wrong").reason == "ValueError: out of registers"
    assert only(figures).timing is not None
    assert "are free" in (
        only(measure_shape(bench(free=1000), OPS["attention"], shape, setting(), [xla()])).reason
        or ""
    )
    slow = dataclasses.replace(bench(), limits=ShapeLimits(1 << 40, 1e-9))
    assert "the limit is" in (
        only(measure_shape(slow, OPS["attention"], shape, setting(), [xla()])).reason or ""
    )


def test_rates_of_the_device_are_measured() -> None:
    rates = measure_roofline(
        jax.devices("cpu")[0], ["float32", "bfloat16"], {}, stream_bytes=1 << 20, matrix=32
    )
    assert rates.bytes_per_s > 0
    assert set(rates.flops_per_s) == {"float32", "bfloat16"}
    assert 0 < rates.launch_s < 1
    twice = Roofline(2 * rates.bytes_per_s, rates.flops_per_s, 2 * rates.launch_s)
    assert rates.better(twice) == Roofline(twice.bytes_per_s, rates.flops_per_s, rates.launch_s)


@dataclasses.dataclass(frozen=True)
class Chunk:
    size: int


def tunable(good: int) -> Candidate:
    """XLA's attention whose default, 1, is slow, and whose only right candidate is `good`."""

    @dataclasses.dataclass(frozen=True)
    class Chosen(type(xla().impl)):  # type: ignore[misc]
        def default_config(self, *_: Any) -> Chunk:
            return Chunk(1)

        def candidates(self, *_: Any) -> list[Chunk]:
            return [Chunk(size) for size in (1, 2, 3)]

        def __call__(self, *args: Any, config: Chunk, **kwargs: Any) -> Any:
            out, cache, lse = super().__call__(*args, config=None, **kwargs)
            # So slow that other programs on the machine do not make it the fastest.
            slow = jax.lax.fori_loop(
                0, 4_000_000 if config.size == 1 else 1, lambda i, x: x + jnp.sin(i), 0.0
            )
            factor = jnp.where(slow == 0.123, 0.0, 1.0) * (1.0 if config.size in (1, good) else 1.1)
            return out * factor, cache, lse

    return Candidate("chosen", 0, Chosen())


def test_the_fastest_right_configuration_is_found() -> None:
    (one,) = tune_shape(
        bench(rounds=3), OPS["attention"], Shape(TINY, "prefill", 1, 40), setting(), [tunable(3)]
    )
    assert one.entry is not None
    assert one.entry.config == {"size": 3}
    assert one.entry.median_s < one.entry.default_median_s
    assert [name for name, _ in one.refused] == ["chosen: size 2"]
    assert "wrong" in one.refused[0][1]
    assert one.entry.spec["window"] == 20


def test_tables_keep_what_was_not_measured_again(tmp_path: Path) -> None:
    (one,) = tune_shape(
        bench(rounds=1), OPS["attention"], Shape(TINY, "decode", 2, 40), setting(), [xla()]
    )
    assert one.entry is not None
    assert one.entry.config is None, "decode steps on a compact copy have nothing to choose"
    other = one.entry.model_copy(update={"page_size": 4})
    path = tmp_path / "tables" / "t.json"
    table = TunedTable(
        op="attention",
        impl="xla",
        version="1",
        device_kind="x",
        environment={},
        command="",
        entries=(one.entry, other),
    )
    write_table(path, table)
    again = one.entry.model_copy(update={"median_s": 9.0})
    merged = merge_tables(path, table.model_copy(update={"entries": (again,)}))
    assert merged.entries == (other, again)
    assert merge_tables(
        path, table.model_copy(update={"version": "2", "entries": (again,)})
    ).entries == (again,)


SAME = ("op", "shape", "dtype", "implementation", "cost")
"""What of a figure is equal when the measurement is repeated."""


@pytest.mark.long
def test_the_program_measures_and_tunes_and_engines_find_it(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("enginebay_bench.roofline.STREAM_BYTES", 1 << 20)
    monkeypatch.setattr("enginebay_bench.roofline.MATRIX", 32)
    common = ("--rounds", "1", "--shapes", "smollm2-135m/prefill/b1/c32", "--impl", "xla", "--json")
    code, out, err = run("bench", "kernels", *common)
    assert (code, err) == (0, "")
    record = json.loads(out)
    assert set(record) == {"command", "environment", "roofline", "figures"}
    (figure,) = record["figures"]
    assert figure["parity"]["share"] <= 1
    words = record["command"].split()
    assert words[:3] == ["enginebay", "bench", "kernels"]
    code, out, err = run(*words[1:], "--json")
    assert (code, err) == (0, ""), "the command that the report names runs"
    again = json.loads(out)
    assert again["command"] == record["command"]
    assert {n: again["figures"][0][n] for n in SAME} == {n: figure[n] for n in SAME}
    assert len(again["figures"]) == 1
    code, out, err = run("tune", *common, "--tuned-folder", str(tmp_path))
    assert (code, err) == (0, "")
    (path,) = json.loads(out)["tables"]
    table = json.loads(Path(path).read_text(encoding="utf-8"))
    assert (table["op"], table["impl"], len(table["entries"])) == ("attention", "xla", 1)


@pytest.mark.parametrize(
    ("command", "work"),
    [
        (("bench", "kernels"), "enginebay_bench.kernels.measure_shape"),
        (("tune",), "enginebay_bench.tune.tune_shape"),
    ],
)
def test_ctrl_c_leaves_what_was_measured(
    run: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    work: str,
) -> None:
    monkeypatch.setattr("enginebay_bench.roofline.measure_roofline", lambda *_: RATES)
    found: list[Any] = []

    def interrupted(bench: Bench, op: Any, shape: Shape, setting: BenchSetting, some: Any) -> Any:
        if found:
            raise KeyboardInterrupt
        found.append(shape.name)
        if command == ("tune",):
            entry = TunedEntry(
                spec={},
                layout="",
                page_size=0,
                bucket={},
                config=None,
                median_s=1.0,
                default_median_s=1.0,
                roofline=0.5,
            )
            return [Tuned("linear", "xla", "1", shape.name, setting.dtype, entry, num_tried=1)]
        return [Figure("linear", shape.name, setting.dtype, "xla", reason="not measured")]

    monkeypatch.setattr(work, interrupted)
    shapes = "smollm2-135m/prefill/b1/c32,smollm2-135m/decode/b1"
    chosen = ("--op", "linear", "--impl", "xla", "--shapes", shapes)
    tables = ("--tuned-folder", str(tmp_path)) if command == ("tune",) else ()
    code, out, err = run(*command, *chosen, *tables)
    assert code == 130
    assert "interrupted" in err
    assert found[0] in out
    assert bool(list(tmp_path.iterdir())) == (command == ("tune",)), "a table of what was found"
    found.clear()
    code, out, _ = run(*command, *chosen, *tables, "--json")
    assert code == 130
    record = json.loads(out)
    assert [one["shape"] for one in record.get("figures", record.get("results"))] == found


@pytest.mark.long
def test_the_buckets_of_an_engine_are_tuned(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("enginebay_bench.roofline.STREAM_BYTES", 1 << 20)
    monkeypatch.setattr("enginebay_bench.roofline.MATRIX", 32)
    config = tmp_path / "small.toml"
    sizes = "max_model_len = 16\nmax_num_seqs = 1\nmax_num_batched_tokens = 16"
    config.write_text(f'{sizes}\nlayout = "hnd"\ncompile_cache = "off"\nkernels.attention = "xla"')
    tables = ("--tuned-folder", str(tmp_path / "tables"))
    code, out, err = run("tune", "--config", str(config), "--rounds", "1", *tables)
    assert (code, err) == (0, "")
    assert "prefill, 16 tokens, 1 rows, context 16" in out
    code, _, err = run("explain", "--config", str(config), "--tuned", "require", *tables)
    assert (code, err) == (0, "")
    assert run("tune", "--config", str(config), "--shapes", "all")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("bench", "kernels", "--model", "demo"), "--model"),
        (("bench", "latency", "--shapes", "all"), "--shapes"),
        (("bench", "kernels", "--op", "softmax"), "softmax"),
        (("bench", "kernels", "--impl", "nobody"), "nobody"),
        (("bench", "kernels", "--dtype", "int3"), "int3"),
        (("bench", "kernels", "--rounds", "0"), "--rounds 0"),
        (("tune", "--op", "linear", "--config", "pages.toml"), "--op linear"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_measured(
    run: Callable[..., tuple[int, str, str]], arguments: tuple[str, ...], named: str
) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert named in err
    assert "Allowed" in err
