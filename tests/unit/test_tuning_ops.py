"""Configurations of ops without phases: tables serve them by the rules of attention's, steps use
them, and tune finds them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginebay import LLM
from enginebay.compose.composition import make_parts
from enginebay.compose.override import overridden_plan
from enginebay.errors import UnsupportedError
from enginebay.ops.caps import Env
from enginebay.ops.norm import RMS_NORM
from enginebay.ops.select import Candidate
from enginebay.ops.tuned_tables import TunedConfigs, TunedEntry, TunedTable
from enginebay.ops.tuning import OpProblem, TunableOp
from enginebay_bench.kernels import measure_shape
from enginebay_bench.shapes import Shape
from enginebay_bench.tune import tune_shape
from enginebay_xla.norm import rms_norm
from tests.unit.test_bench_kernels import ENV, TINY, bench, setting, xla

pytestmark = pytest.mark.xdist_group("llm")


@dataclasses.dataclass(frozen=True)
class Tile:
    size: int


@dataclasses.dataclass(frozen=True)
class TiledNorm:
    """XLA's norm, of which only a tile of 1, the default, is slow, and one of 2 is wrong."""

    name: str = "tiled"
    version: str = "1"
    choose: Callable[[OpProblem], Tile] = lambda _: Tile(1)

    def default_config(self, env: Env, problem: OpProblem) -> Tile:
        return Tile(1)

    def candidates(self, env: Env, problem: OpProblem) -> list[Tile]:
        return [Tile(size) for size in (1, 2, 3)]

    def tuned(self, choose: Callable[[OpProblem], Tile]) -> TiledNorm:
        return dataclasses.replace(self, choose=choose)

    def __call__(self, x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
        size = self.choose(problem_of(x.size // x.shape[-1], x.shape[-1])).size
        slow = jax.lax.fori_loop(0, 2_000_000 if size == 1 else 1, lambda i, y: y + jnp.sin(i), 0.0)
        factor = jnp.where(slow == 0.123, 0.0, 1.0) * (1.1 if size == 2 else 1.0)
        return (rms_norm(x, weight, eps=eps) * factor).astype(x.dtype)


def problem_of(rows: int, features: int = TINY.hidden) -> OpProblem:
    return OpProblem(rows, (("features", features),))


def entry(rows: int, size: int, features: int = TINY.hidden) -> TunedEntry:
    return TunedEntry(
        spec={"features": features},
        layout="",
        page_size=0,
        bucket={"rows": rows},
        config={"size": size},
        median_s=1.0,
        default_median_s=2.0,
        roofline=0.5,
    )


def tables(*entries: TunedEntry, mode: Any = "auto", impl: str = "tiled") -> TunedConfigs:
    kind = ENV.device_kind
    table = TunedTable(
        op="rms_norm",
        impl=impl,
        version="1",
        device_kind=kind,
        environment={},
        command="",
        entries=entries,
    )
    return TunedConfigs((table,), mode)


def test_the_rules_are_those_of_attention_with_rows_for_the_bucket() -> None:
    assert isinstance(TiledNorm(), TunableOp)
    known = tables(entry(8, 3), entry(2, 2), entry(64, 3, features=7))

    def look_up(problem: OpProblem) -> Any:
        return known.op_config("rms_norm", TiledNorm(), ENV, problem)

    assert look_up(problem_of(2)) == (Tile(2), "tuned")
    assert look_up(problem_of(3)) == (Tile(3), "tuned for a larger bucket")
    assert look_up(problem_of(9)) == (Tile(1), "default")
    assert look_up(problem_of(2, features=8)) == (Tile(1), "default")
    required = dataclasses.replace(known, mode="require").bound("rms_norm", TiledNorm(), ENV)
    assert required.choose(problem_of(8)) == Tile(3)
    with pytest.raises(
        UnsupportedError,
        match=r"rms_norm tiled 1 has no tuned configuration for 9 rows .*enginebay tune",
    ):
        required.choose(problem_of(9))
    assert known.bound("rms_norm", rms_norm, ENV) is rms_norm


def test_the_fastest_right_configuration_of_an_op_is_found() -> None:
    candidates = [Candidate("tiled", 0, TiledNorm()), xla("rms_norm")]
    tiled, plain = tune_shape(
        bench(rounds=3), RMS_NORM, Shape(TINY, "decode", 4, 0), setting(), candidates
    )
    assert tiled.entry is not None
    assert (tiled.entry.config, tiled.entry.bucket, tiled.entry.spec) == (
        {"size": 3},
        {"rows": 4},
        {"features": TINY.hidden},
    )
    assert tiled.entry.median_s < tiled.entry.default_median_s
    assert [name for name, _ in tiled.refused] == ["tiled: size 2"]
    assert plain.reason == "the implementation has no configurations here"


def test_benchmarks_measure_what_is_tuned_and_say_so() -> None:
    shape = Shape(TINY, "decode", 4, 0)
    tuned = dataclasses.replace(setting(), tuned=tables(entry(4, 3)))
    (figure,) = measure_shape(bench(), RMS_NORM, shape, tuned, [Candidate("tiled", 0, TiledNorm())])
    assert (figure.config, figure.config_source) == ({"size": 3}, "tuned")
    assert figure.parity is not None
    assert figure.parity.is_right


def test_steps_ask_the_tables(llm: LLM) -> None:
    """A step of an engine takes the wrong tile, because a table has it."""
    plan = overridden_plan(llm.plan, {"rms_norm": TiledNorm()}, check=False)
    kernels = plan.kernels
    features = plan.model.info.hidden_size
    every = tables(entry(4096, 2, features))
    env = dataclasses.replace(kernels.env, device_kind=ENV.device_kind)
    ops = []
    for tuned in (TunedConfigs(), every):
        changed = dataclasses.replace(kernels, tuned=tuned, env=env)
        factory = make_parts(dataclasses.replace(plan, kernels=changed)).ops
        bucket, layouts = llm.engine.attention_problems()[0]
        ops.append(factory(bucket, layouts))
    x, weight = jnp.ones((2, features)), jnp.ones(features)
    default, wrong = (np.asarray(one[RMS_NORM](x, weight, eps=1e-5)) for one in ops)
    assert np.allclose(wrong, 1.1 * default)


def test_native_products_are_the_same_bits_in_every_configuration() -> None:
    native = pytest.importorskip("enginebay_native.linear", exc_type=UnsupportedError)
    rng = np.random.default_rng(0)
    for rows in (1, 3, 12):
        x = jnp.asarray(rng.standard_normal((rows, 300)), jnp.float32)
        weight = jnp.asarray(rng.standard_normal((1001, 300)), jnp.float32)
        expected = np.asarray(native.linear(x, weight))
        np.testing.assert_allclose(
            expected, np.asarray(x) @ np.asarray(weight).T, rtol=2e-5, atol=2e-4
        )
        asked: list[OpProblem] = []

        def ask(problem: OpProblem, asked: list[OpProblem] = asked) -> Any:
            asked.append(problem)
            return native.WorkSplit()

        native.linear.tuned(ask)(x, weight)
        (problem,) = asked
        assert problem.rows == 1 << (rows - 1).bit_length()
        configs = native.linear.candidates(ENV, problem)
        assert native.linear.default_config(ENV, problem) in configs
        for config in (*configs, native.WorkSplit(1, 1), native.WorkSplit(1 << 20, 1000)):
            got = native.linear.tuned(lambda _, config=config: config)(x, weight)
            assert np.asarray(got).tobytes() == expected.tobytes(), config


def test_the_program_tunes_native_products_and_engines_read_the_table(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = pytest.importorskip("enginebay_native.linear", exc_type=UnsupportedError)
    monkeypatch.setattr("enginebay_bench.roofline.STREAM_BYTES", 1 << 20)
    monkeypatch.setattr("enginebay_bench.roofline.MATRIX", 32)
    monkeypatch.setattr("enginebay_bench.timing.ROTATED_BYTES", 1 << 20)
    shapes = ("--op", "linear", "--impl", "native", "--shapes", "smollm2-135m/decode/b2/o")
    folder = ("--tuned-folder", str(tmp_path))
    code, out, err = run("tune", *shapes, "--dtype", "float32", "--rounds", "1", *folder, "--json")
    assert (code, err) == (0, "")
    record = json.loads(out)
    (result,) = record["results"]
    assert result["num_tried"] == len(native.BLOCK_KIB) * len(native.TASKS_PER_THREAD)
    assert not result["refused"]
    entry = json.loads(Path(record["tables"][0]).read_text(encoding="utf-8"))["entries"][0]
    assert entry["bucket"] == {"rows": 2}
    assert entry["spec"] == {"inputs": 576, "outputs": 576, "dtype": "float32"}
    code, out, err = run(
        "bench", "kernels", *shapes, "--dtype", "float32", "--rounds", "1", *folder, "--json"
    )
    assert (code, err) == (0, "")
    (figure,) = json.loads(out)["figures"]
    assert (figure["config"], figure["config_source"]) == (entry["config"], "tuned")
