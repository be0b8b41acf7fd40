"""Tables of tuned configurations: where they are found, which entry serves a bucket, and what auto
makes of them.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from enginebay.compose.composition import make_engine, make_plan
from enginebay.compose.kernel_configs import kernel_configs
from enginebay.compose.tuned_files import load_tuned, table_name, tuned_folder
from enginebay.config import make_config
from enginebay.errors import ConfigError, UnsupportedError
from enginebay.ops.attention import ATTENTION
from enginebay.ops.caps import Env
from enginebay.ops.select import Candidate, choose
from enginebay.ops.spec import AttnSpec, Bucket
from enginebay.ops.tuned_tables import (
    TunedConfigs,
    TunedEntry,
    TunedTable,
    bucket_key,
    read_table,
    spec_key,
)
from enginebay.plugins.hooks import Declaration
from enginebay.plugins.registry import Entry, Registry
from enginebay_xla.layout import HndLayout

ENV = Env("cpu", "", "a processor")
SPEC = AttnSpec(4, 2, 16, window=9)
LAYOUT = HndLayout(8, 16, 2, 16, "float32")


@dataclasses.dataclass(frozen=True)
class Size:
    size: int


@dataclasses.dataclass(frozen=True)
class Impl:
    name: str = "mine"
    version: str = "1"
    sizes: tuple[int, ...] = (1, 2, 3, 4)

    def default_config(self, *_: Any) -> Size:
        return Size(1)

    def candidates(self, *_: Any) -> list[Size]:
        return [Size(size) for size in self.sizes]


def bucket(tokens: int, context: int = 64) -> Bucket:
    return Bucket(tokens, 2, context // 16, tokens, context, "mixed")


def entry(where: Bucket, size: int | None, *, median_s: float = 1.0, **fields: Any) -> TunedEntry:
    known: dict[str, Any] = {
        "spec": spec_key(SPEC),
        "layout": "hnd",
        "page_size": 16,
        "bucket": bucket_key(where),
        "config": None if size is None else {"size": size},
        "median_s": median_s,
        "default_median_s": 2.0,
        "roofline": 0.5,
    }
    return TunedEntry(**known | fields)


def table(*entries: TunedEntry, impl: str = "mine", **fields: Any) -> TunedTable:
    known: dict[str, Any] = {
        "op": "attention",
        "impl": impl,
        "version": "1",
        "device_kind": "a processor",
        "environment": {"jax": "0"},
        "command": "enginebay tune",
    }
    return TunedTable(entries=entries, **known | fields)


def look_up(
    tables: TunedConfigs, where: Bucket, spec: AttnSpec = SPEC, impl: Impl | None = None
) -> Any:
    return tables.config("attention", impl or Impl(), ENV, spec, where, LAYOUT)


def test_the_exact_bucket_goes_before_the_next_larger_and_both_before_the_default() -> None:
    tables = TunedConfigs(
        (table(entry(bucket(64), 4), entry(bucket(16), 2), entry(bucket(32), 3)),), "auto"
    )
    assert look_up(tables, bucket(16)) == (Size(2), "tuned")
    assert look_up(tables, bucket(17)) == (Size(3), "tuned for a larger bucket")
    assert look_up(tables, bucket(33)) == (Size(4), "tuned for a larger bucket")
    assert look_up(tables, bucket(65)) == (Size(1), "default")
    assert look_up(tables, bucket(16, context=80)) == (Size(1), "default")


def test_what_a_developer_has_tuned_does_not_reach_the_tests(repo_root: Path) -> None:
    folder = tuned_folder("auto")
    assert folder.is_relative_to(repo_root)
    assert not folder.exists(), "a test has tuned for all others"


def test_the_users_tables_go_before_those_of_packages() -> None:
    tables = TunedConfigs((table(entry(bucket(16), 2)), table(entry(bucket(16), 3))), "auto")
    assert look_up(tables, bucket(16)) == (Size(2), "tuned")


@pytest.mark.parametrize(
    "other",
    [
        {"version": "2"},
        {"device_kind": "another"},
        {"op": "linear"},
        {"impl": "other"},
    ],
)
def test_tables_of_something_else_do_not_count(other: dict[str, str]) -> None:
    found = look_up(TunedConfigs((table(entry(bucket(16), 2), **other),), "auto"), bucket(16))
    assert found == (Size(1), "default")


def test_entries_of_other_problems_do_not_count() -> None:
    tables = TunedConfigs((table(entry(bucket(16), 2)),), "auto")
    decode = dataclasses.replace(bucket(16), mode="decode")
    assert look_up(tables, decode)[1] == "default"
    assert look_up(tables, bucket(16), dataclasses.replace(SPEC, window=10))[1] == "default"
    assert (
        look_up(tables, bucket(16), dataclasses.replace(SPEC, deterministic=True))[1] == "default"
    )
    assert look_up(tables, bucket(16), dataclasses.replace(SPEC, scale=0.3))[1] == "tuned"
    assert look_up(tables, bucket(16), impl=Impl(sizes=(1, 3)))[1] == "default", (
        "no longer a candidate"
    )
    assert look_up(TunedConfigs(tables.tables, "off"), bucket(16))[1] == "default"
    default = TunedConfigs((table(entry(bucket(16), 1)),), "auto")
    assert look_up(default, bucket(16), impl=Impl(sizes=(3,))) == (Size(1), "tuned"), (
        "the default may be the fastest"
    )


def test_a_miss_is_an_error_on_request() -> None:
    tables = TunedConfigs((table(entry(bucket(16), 2)),), "require")
    assert look_up(tables, bucket(16)) == (Size(2), "tuned")
    with pytest.raises(
        UnsupportedError, match=r"mine 1 has no tuned configuration for .*tokens=32.*enginebay tune"
    ):
        look_up(tables, bucket(32))
    assert look_up(tables, bucket(32), impl=Impl(sizes=())) == (Size(1), "default")


def test_auto_takes_what_was_measured_faster_in_the_same_buckets() -> None:
    first, second = Impl("first"), Impl("second")
    tables = TunedConfigs(
        (
            table(
                entry(bucket(16), 1, median_s=4.0), entry(bucket(32), 1, median_s=1.0), impl="first"
            ),
            table(
                entry(bucket(16), 2, median_s=1.0),
                entry(bucket(64), 2, median_s=0.1),
                impl="second",
            ),
        ),
        "auto",
    )
    ask = (ENV, [SPEC], "mixed")
    assert tables.faster_than("attention", [first, second], *ask) == (
        second,
        "measured fastest: 0.25 of the time of first over 1 tuned buckets",
    )
    assert tables.faster_than("attention", [second, first], *ask) is None
    assert tables.faster_than("attention", [first, second], ENV, [SPEC], "decode") is None
    able = [Candidate("first", 5, first), Candidate("second", 0, second)]

    def faster(impls: Any) -> Any:
        return tables.faster_than("attention", impls, *ask)

    chosen, reason = choose("kernels.attention.mixed", "auto", able, lambda _: None, faster)
    assert chosen.name == reason.chosen == "second"
    assert "measured fastest" in reason.why
    assert reason.refused == (("first", "measured slower, or not measured in the same buckets"),)
    assert (
        choose("kernels.attention.mixed", "first", able, lambda _: None, faster)[0].name == "first"
    )


def test_tables_survive_json_and_broken_ones_are_named() -> None:
    whole = table(entry(bucket(16), 2), entry(bucket(32), None))
    assert read_table(whole.model_dump_json(), "here") == whole
    with pytest.raises(ConfigError, match="here"):
        read_table('{"format": 2}', "here")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with a folder of tables, which must be found without importing it."""
    folder = tmp_path / "site" / "a_tuned_package"
    (folder / "tuned").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder / "tuned"


def registry() -> Registry:
    declared = Declaration("kernel", "mine", "a_tuned_package.kernel:kernel", op="attention")
    return Registry([Entry("kernel", "mine", "mine", "1", "mine", declaration=declared)])


def test_packages_ship_tables_of_their_own_kernels(package: Path, tmp_path: Path) -> None:
    (package / "own.json").write_text(table(entry(bucket(16), 2)).model_dump_json())
    (package / "others.json").write_text(table(entry(bucket(16), 2), impl="xla").model_dump_json())
    (package / "broken.json").write_text("{")
    users = tmp_path / "users"
    users.mkdir()
    (users / table_name("attention", "xla", "A (1) kind")).write_text(
        table(impl="xla").model_dump_json()
    )
    assert [path.name for path in users.iterdir()] == ["attention.xla.A-1-kind.json"]
    found = load_tuned(registry(), "auto", str(users))
    assert [t.impl for t in found.tables] == ["xla", "mine"]
    assert "a_tuned_package" not in sys.modules
    assert load_tuned(registry(), "off", str(users)) == TunedConfigs()
    (users / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match=r"bad\.json"):
        load_tuned(registry(), "auto", str(users))
    with pytest.raises(ConfigError, match="tuned_folder"):
        load_tuned(registry(), "auto", str(tmp_path / "nowhere"))


SMALL = """
max_model_len = 32
max_num_seqs = 1
max_num_batched_tokens = 16
layout = "hnd"
compile_cache = "off"
[kernels]
attention = "xla"
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("engine", ["oengine", "vinference"])
def test_engines_tell_their_buckets_and_use_what_is_tuned(
    engine: str, run: Run, tmp_path: Path
) -> None:
    config = tmp_path / "small.toml"
    config.write_text(SMALL)
    folder = tmp_path / "tables"
    folder.mkdir()
    flags = ("--config", str(config), "--engine", engine, "--tuned-folder", str(folder))
    code, out, err = run("explain", *flags, "--json")
    assert (code, err) == (0, "")
    before = json.loads(out)["kernel_configs"]
    assert {one["setting"].rpartition(".")[2] for one in before} == {"decode", "prefill", "mixed"}
    assert {one["source"] for one in before} == {"default", None}
    code, _, err = run("explain", *flags, "--tuned", "require")
    assert code == 2
    assert "has no tuned configuration for" in err
    entries = []
    plan = make_plan(make_config({**_toml(config), "engine": engine, "tuned": "off"}))
    for one in kernel_configs(plan, make_engine(plan)):
        if one.source is not None:
            other = {"query_block": 16, "key_chunk": 64}
            known = {
                "spec": spec_key(one.spec),
                "layout": one.layout.name,
                "page_size": one.layout.page_size,
            }
            entries.append(entry(one.bucket, None, config=other, **known))
    name, kind = "xla", plan.kernels.env.device_kind
    whole = table(*entries, impl=name, device_kind=kind)
    (folder / table_name("attention", name, kind)).write_text(whole.model_dump_json())
    code, out, err = run("explain", *flags, "--tuned", "require", "--json")
    assert (code, err) == (0, "")
    after = [one for one in json.loads(out)["kernel_configs"] if one["source"] is not None]
    assert {one["source"] for one in after} == {"tuned"}
    assert [one["config"]["key_chunk"] for one in after] == [64] * len(after)
    code, out, _ = run("explain", *flags)
    assert "tuned, 0 default" in out


def _toml(path: Path) -> dict[str, Any]:
    from enginebay.toml_file import read_toml

    return read_toml(path)


def test_a_steps_attention_gets_the_tuned_configuration(tmp_path: Path) -> None:
    """OpsBinder hands the kernel what the tables say, and what the kernel computes with it stays
    the same.
    """
    from enginebay.compose.binding import OpsBinder

    config = tmp_path / "small.toml"
    config.write_text(SMALL)
    plan = make_plan(make_config({**_toml(config), "tuned": "off"}))
    seen: list[Any] = []
    xla = plan.kernels.attention["prefill"]

    class Recording(type(xla)):  # type: ignore[misc]
        def __call__(self, *args: Any, config: Any, **kwargs: Any) -> Any:
            seen.append(config)
            return super().__call__(*args, config=config, **kwargs)

    (problem,) = [p for p in make_engine(plan).attention_problems() if p[0].mode == "prefill"]
    where, layouts = problem
    ((group, spec),) = plan.model.info.attention.items()
    known = {"spec": spec_key(spec), "layout": "hnd", "page_size": layouts[group].page_size}
    tuned = entry(where, None, config={"query_block": 16, "key_chunk": 64}, **known)
    whole = table(tuned, impl="xla", device_kind=plan.kernels.env.device_kind)
    kernels = dataclasses.replace(
        plan.kernels, attention={"prefill": Recording()}, tuned=TunedConfigs((whole,), "require")
    )
    ops = OpsBinder(kernels, plan.model.info, plan.placement)(where, layouts)
    _trace(ops[ATTENTION], where, layouts[group], spec)
    assert [dataclasses.asdict(config) for config in seen] == [{"query_block": 16, "key_chunk": 64}]


def _trace(attention: Any, where: Bucket, layout: Any, spec: AttnSpec) -> None:
    import jax
    import jax.numpy as jnp

    from enginebay.ops.batches import derive_batch

    ints = jnp.zeros((where.seqs,), jnp.int32)
    table = jnp.zeros((where.seqs, where.pages_per_seq), jnp.int32)
    batch = derive_batch(ints, ints, table, layout.page_size, where)
    q = jnp.zeros((where.tokens, spec.num_q_heads, spec.head_dim))
    k = jnp.zeros((where.tokens, spec.num_kv_heads, spec.head_dim))
    small = layout.resized(num_pages=2)
    jax.eval_shape(lambda *a: attention(*a, batch, spec=spec), q, k, k, small.init())
