"""A capture writes the calls of a run's steps, and kernels are checked, timed and tuned on them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import jax.numpy as jnp
import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay.cli.program import main
from enginebay.config import EngineConfig
from enginebay.config_sections import CaptureChoice
from enginebay.contracts.step_key import StepKey
from enginebay.errors import ConfigError, InputError, UnsupportedError
from enginebay.ops.caps import Env
from enginebay.ops.rotary import RopeSpec
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket
from enginebay.weights import QuantizedArray
from enginebay_bench.attention import traced_problem
from enginebay_bench.problem import BenchSetting
from enginebay_runtime.call_trace import (
    CallTrace,
    TracedArray,
    TracedAttention,
    TracedCall,
    TracedStep,
)
from enginebay_runtime.capture import Capture, _is_value
from enginebay_testing.attention_inputs import make_problem
from enginebay_testing.traced_cases import (
    SHIPPED,
    attention_case,
    find_trace,
    op_call,
    traced_shapes,
)
from enginebay_xla.layout import HndLayout
from tests.brief import BRIEF

WINDOW = 5
SPEC = AttnSpec(4, 2, 16, window=WINDOW)
BUCKET = Bucket(3, 3, 3, 1, 12, "decode")


def array(*shape: int, dtype: str = "float32", values: Any = None) -> TracedArray:
    return TracedArray(shape, dtype, values)


def step(number: int = 0, **changes: Any) -> TracedStep:
    """Two rows that share their first page of 4 tokens; the entry of row 1 for it is old. Row 0 is
    empty.
    """
    fields: dict[str, Any] = {
        "number": number,
        "bucket": BUCKET,
        "q_lens": np.array([1, 1, 1], np.int32),
        "kv_lens": np.array([0, 11, 6], np.int32),
        "tables": {"full": np.array([[0, 0, 0], [4, 2, 3], [4, 5, 0]], np.int32)},
        "attention": (TracedAttention("full", "xla", SPEC, 7, 4, 2),),
        "calls": (
            TracedCall("linear", "native", (array(3, 8), array(6, 8), None), {}, 4),
            TracedCall("rms_norm", "xla", (array(3, 8), array(8)), {"eps": 1e-5}, 2),
        ),
    }
    return TracedStep(**{**fields, **changes})


def trace(*steps: TracedStep) -> CallTrace:
    return CallTrace({"model": "demo"}, "hnd", steps or (step(),))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "x.trace"
    trace().write(path)
    return path


def test_a_file_has_what_was_captured(tmp_path: Path) -> None:
    weight = QuantizedArray(array(6, 8, dtype="int8"), array(6, 1), None, "int8", "int8")
    narrow = np.arange(6, dtype=np.float32).astype(jnp.bfloat16).reshape(2, 3)
    arguments = (array(2, 3, dtype="bfloat16", values=narrow), weight, None)
    keywords = {"out_dtype": jnp.float32, "spec": RopeSpec(1e4, 8), "more": {"a": (1, "b", True)}}
    calls = (TracedCall("linear", "native", arguments, keywords, 3),)
    path = tmp_path / "x.trace"
    trace(step(7, calls=calls)).write(path)
    found = CallTrace.read(path)
    assert found.run == {"model": "demo"}
    (one,) = found.steps
    assert (one.number, one.bucket, one.attention) == (7, BUCKET, step().attention)
    np.testing.assert_array_equal(one.tables["full"], step().tables["full"])
    (call,) = one.calls
    assert call.arguments[1:] == (weight, None)
    assert call.keywords == {**keywords, "out_dtype": jnp.dtype("float32")}
    kept = call.arguments[0].values
    assert (kept.dtype, kept.tobytes()) == (narrow.dtype, narrow.tobytes())


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    calls = (TracedCall("linear", "native", (object(),), {}, 1),)
    with pytest.raises(UnsupportedError, match=r"type object.*capture\.ops"):
        trace(step(calls=calls)).write(tmp_path / "x.trace")
    assert not list(tmp_path.iterdir())


def changed_header(path: Path, change: Any) -> None:
    """Write the file again with a changed header."""
    with np.load(path) as found:
        arrays = dict(found)
    header = json.loads(arrays["header"].tobytes())
    change(header)
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with path.open("wb") as out:
        np.savez(out, **arrays)


def of_type(name: str) -> Any:
    return lambda header: header["steps"][0].update(record=name)


def of_step(field: str, value: Any) -> Any:
    return lambda header: header["steps"][0]["fields"].update({field: value})


def of_bucket(field: str, value: Any) -> Any:
    return lambda header: header["steps"][0]["fields"]["bucket"]["fields"].update({field: value})


def of_attention(field: str, value: Any) -> Any:
    def change(header: Any) -> None:
        header["steps"][0]["fields"]["attention"]["tuple"][0]["fields"].update({field: value})

    return change


def of_array(shape: tuple[int, ...]) -> Any:
    def change(header: Any) -> None:
        call = header["steps"][0]["fields"]["calls"]["tuple"][0]["fields"]
        call["arguments"]["tuple"][0]["fields"]["shape"] = {"tuple": list(shape)}

    return change


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda header: header.update(format=2), "format is 2, not 1"),
        (of_type("subprocess:Popen"), "no dataclass"),
        (of_type("antigravity:X"), "no dataclass of an imported module"),
        (of_type("enginebay.errors:InputError"), "no dataclass"),
        (of_type("enginebay.__main__:X"), "no dataclass of an imported module"),
        (of_type("enginebay.ops.nope:X"), "enginebay.ops.nope"),
        (lambda header: header.update(run=nested(900)), "no trace of calls"),
        (of_step("bucket", None), "fields of other types"),
        (of_step("attention", 3), "fields of other types"),
        (of_step("q_lens", None), "no int32 of each row"),
        (of_bucket("max_kv_len", 7), "longer than its bucket"),
        (of_bucket("tokens", 1), "more new tokens"),
        (of_bucket("seqs", 1 << 40), "has the size"),
        (of_attention("num_pages", 4), "does not fit the cache"),
        (of_attention("num_pages", 1 << 40), "a cache has"),
        (of_attention("group", "other"), "other"),
        (of_attention("spec", 1), "attention has fields"),
        (of_array((1 << 40, 1 << 40)), "an array of"),
        (of_type("enginebay.ops.spec:Bucket"), "unexpected keyword"),
        (lambda header: header.update(steps=[1]), "no TracedSteps"),
        (lambda header: header["steps"][0]["fields"]["q_lens"].update(array=99), "array_99"),
        (lambda header: header.pop("run"), "run"),
    ],
)
def test_a_damaged_or_hostile_file_is_refused(file: Path, change: Any, says: str) -> None:
    changed_header(file, change)
    with pytest.raises(InputError, match=says):
        CallTrace.read(file)
    assert "antigravity" not in sys.modules


def test_a_file_that_is_none_is_refused(file: Path) -> None:
    whole = file.read_bytes()
    for data in (b"", b"{}", whole[: len(whole) // 2]):
        file.write_bytes(data)
        with pytest.raises(InputError, match="is no trace of calls"):
            CallTrace.read(file)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.npy", b"\0" * (1 << 20))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("enginebay_runtime.call_trace.MAX_BYTES", 1 << 19)
        with pytest.raises(InputError, match="its arrays have 1048576 bytes"):
            CallTrace.read(file)


def test_no_changed_bit_ends_the_reader(file: Path) -> None:
    whole, rng = file.read_bytes(), np.random.default_rng(0)
    refused = 0
    for place in rng.integers(0, 8 * len(whole), 300):
        changed = bytearray(whole)
        changed[place // 8] ^= 1 << (place % 8)
        file.write_bytes(changed)
        try:
            CallTrace.read(file)
        except InputError:
            refused += 1
    assert refused > 100


def test_an_array_is_unpacked_once(file: Path) -> None:
    value = np.zeros(1 << 16, np.int32)
    calls = tuple(
        TracedCall("linear", "xla", (array(1 << 16, dtype="int32", values=value),), {}, number)
        for number in range(50)
    )
    trace(step(calls=calls)).write(file)
    assert file.stat().st_size < 20_000
    found = CallTrace.read(file).steps[0].calls
    assert len({call.arguments[0].values.ctypes.data for call in found}) == 1


def test_equal_calls_of_several_steps_are_one_and_attention_is_of_its_step() -> None:
    both = trace(step(0), step(5))
    assert [one.name for one in traced_shapes(both, "linear")] == [
        "step 0, decode, 2 rows, 3x8 6x8, 4 calls of native"
    ]
    names = [one.name for one in traced_shapes(both, "attention")]
    assert names == [
        "step 0, decode, 2 rows, full, 2 calls of xla",
        "step 5, decode, 2 rows, full, 2 calls of xla",
    ]


def test_saved_numbers_are_used_and_others_are_drawn() -> None:
    ids = np.array([5, 1], np.int32)
    arguments = (array(9, 4), array(2, dtype="int32", values=ids), array(3, dtype="int8"))
    call = TracedCall("embedding", "xla", arguments, {}, 1)
    first, again, other = (op_call(call, seed).arguments for seed in (1, 1, 2))
    np.testing.assert_array_equal(first[1], ids)
    np.testing.assert_array_equal(first[0], again[0])
    assert (first[0] != other[0]).all()
    assert first[2].dtype == np.int8


def test_rows_with_one_page_have_its_keys_and_old_entries_change_nothing() -> None:
    (one,) = traced_shapes(trace(), "attention")
    case = attention_case(one)
    assert (case.q_lens, case.kv_lens, case.padding_rows) == ((0, 1, 1), (0, 11, 6), 0)
    problem = make_problem(case, HndLayout)
    np.testing.assert_array_equal(problem.batch.page_table, one.step.tables["full"])
    shared = problem.keys[1][:4], problem.keys[2][:4]
    np.testing.assert_array_equal(*shared)
    assert np.isfinite(problem.keys[1]).all()
    assert problem.layout.num_pages == 7


def answers(*words: str, capsys: Any) -> tuple[int, Any]:
    code = main([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.long
def test_check_runs_the_calls_of_a_trace(file: Path, capsys: Any) -> None:
    parts = ("kernel:attention:xla", "kernel:linear:xla", "kernel:rms_norm:xla")
    code, records = answers("check", *parts, "--trace", str(file), capsys=capsys)
    assert {r["case"]: r["verdict"] for r in records} == {
        "attention[step 0, decode, 2 rows, full, 2 calls of xla]": "PASS",
        "linear[step 0, decode, 2 rows, 3x8 6x8, 4 calls of native]": "PASS",
        "rms_norm[step 0, decode, 2 rows, 3x8 8, 2 calls of xla]": "PASS",
    }
    assert code == 0


def skips_the_last_row(x: Any, weight: Any, *, eps: float) -> Any:
    """rms_norm that forgets the last row."""
    from enginebay_xla.norm import rms_norm

    return rms_norm(x, weight, eps=eps).at[-1].set(0)


def test_check_finds_a_wrong_kernel_by_a_trace(file: Path, capsys: Any) -> None:
    part = f"kernel:rms_norm:{__name__}:skips_the_last_row"
    assert main(["check", part, "--trace", str(file), "--json"]) == 1
    printed = capsys.readouterr()
    assert [record["verdict"] for record in json.loads(printed.out)] == ["INCORRECT"]
    assert "trace of model demo" in printed.err


def test_the_benchmark_has_the_page_table_of_the_step() -> None:
    (shape,) = traced_shapes(trace(), "attention")
    setting = BenchSetting(Env("cpu"), "float32", "hnd", HndLayout, None)
    inputs = traced_problem(shape, setting).make(float("nan"))
    np.testing.assert_array_equal(inputs.arrays[3].page_table, shape.step.tables["full"])
    keys = np.asarray(inputs.facts.keys)
    np.testing.assert_array_equal(keys[:4], keys[11:15], "rows 1 and 2 share their first page")


@pytest.mark.long
def test_bench_and_tune_run_the_calls_of_a_trace(file: Path, tmp_path: Path, capsys: Any) -> None:
    flags = ("--trace", str(file), "--impl", "xla", "--rounds", "2")
    code, found = answers("bench", "kernels", *flags, capsys=capsys)
    assert code == 0
    rows = {(f["op"], f["shape"]): f["parity"]["share"] for f in found["figures"]}
    assert set(rows) == {
        ("attention", "step 0, decode, 2 rows, full, 2 calls of xla"),
        ("linear", "step 0, decode, 2 rows, 3x8 6x8, 4 calls of native"),
        ("rms_norm", "step 0, decode, 2 rows, 3x8 8, 2 calls of xla"),
    }
    assert all(share <= 1 for share in rows.values())
    assert f"--trace={file}" in found["command"]
    where = ("--op", "attention", "--tuned-folder", str(tmp_path / "tuned"))
    code, found = answers("tune", *flags, *where, capsys=capsys)
    assert code == 0
    assert found["results"][0]["entry"]["bucket"]["max_kv_len"] == BUCKET.max_kv_len


def test_calls_that_update_states_by_rows_are_not_judged(file: Path, capsys: Any) -> None:
    arrays = [np.zeros(2, np.int32)] * 7
    arguments = (array(3, 4), array(4, 3), None, {"conv": array(2, 4, 2)})
    keywords = {"batch": AttnBatch(*arrays, bucket=BUCKET)}
    trace(step(calls=(TracedCall("short_conv", "xla", arguments, keywords, 1),))).write(file)
    parts = ("check", "kernel:short_conv:xla", "--trace", str(file))
    _, (record,) = answers(*parts, capsys=capsys)
    assert (record["verdict"], "updates states" in record["detail"]) == ("UNSUPPORTED", True)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"inputs": ("sinks",)}, "no sinks"),
        ({"kv_shared": True}, "another's cache"),
        ({"num_kv_heads": 1, "v_head_dim": 8, "v_is_k_prefix": True}, "no latent cache"),
    ],
)
def test_the_benchmark_refuses_layers_whose_inputs_it_cannot_make(
    changes: dict[str, Any], says: str
) -> None:
    spec = dataclasses.replace(SPEC, **changes)
    one = step(attention=(TracedAttention("full", "xla", spec, 7, 4, 2),))
    (shape,) = traced_shapes(trace(one), "attention")
    setting = BenchSetting(Env("cpu"), "float32", "hnd", HndLayout, None)
    assert says in (traced_problem(shape, setting).why_not(None) or "")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("bench", "kernels", "--shapes", "all"), "--shapes with --trace"),
        (("bench", "kernels", "--dtype", "float16"), "--dtype with --trace"),
        (("bench", "kernels", "--op", "rope"), "op of the trace"),
        (("check", "scheduler:fcfs"), "--trace for scheduler:fcfs"),
    ],
)
def test_what_a_trace_has_no_part_in_is_refused(
    file: Path, words: tuple[str, ...], says: str, capsys: Any
) -> None:
    assert main([*words, "--trace", str(file)]) == 2
    assert says in capsys.readouterr().err


def test_a_name_that_is_neither_file_nor_shipped_is_refused() -> None:
    with pytest.raises(InputError, match="a file that --capture wrote, or one of"):
        find_trace("no-such-trace")


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*")), ids=lambda path: path.name)
def test_shipped_traces_are_small_and_can_be_read(path: Path) -> None:
    assert path.stat().st_size < 1 << 20
    found = find_trace(path.stem)
    assert {one.bucket.mode for one in found.steps} >= {"decode"}
    assert all(traced_shapes(found, op) for op in ("attention", "linear"))


def key(rows: int) -> StepKey:
    return StepKey("decode", dataclasses.replace(BUCKET, seqs=rows))


@pytest.mark.parametrize(
    ("choice", "captured"),
    [
        ({}, [0, 1]),
        ({"every": 3}, [0, 1, 3]),
        ({"every": 2, "max_steps": 3}, [0, 1, 2]),
        ({"steps": (1, 4)}, [1, 4]),
    ],
)
def test_steps_are_chosen(
    choice: dict[str, Any], captured: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def captured_step(self: Any, executor: Any, one: Any, tables: Any, number: int) -> TracedStep:
        found.append(number)
        return step(number)

    monkeypatch.setattr(Capture, "_captured", captured_step)
    capture = Capture(CaptureChoice(file=str(tmp_path / "x"), **choice), {})
    executor = MagicMock(**{"parts.layout": "hnd"})
    for rows in (1, 2, 1, 1, 2):
        command: Any = MagicMock(program=key(rows))
        capture.watch(executor, command, {})
    assert found == captured
    written = CallTrace.read(tmp_path / "x").steps
    assert [one.number for one in written] == captured


class Flaky(Capture):
    """Captures steps, of which some fail."""

    def _captured(self, executor: Any, step_: Any, tables: Any, number: int) -> TracedStep:
        if number == 0:
            raise KeyError("full")
        if number == 1:
            return step(1, calls=(TracedCall("linear", "xla", (object(),), {}, 1),))
        return step(number)


def test_a_step_that_fails_ends_neither_the_run_nor_the_capture(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "x.trace"
    capture = Flaky(CaptureChoice(file=str(path), every=1), {})
    executor = MagicMock(**{"parts.layout": "hnd"})
    for rows in (1, 2, 3):
        capture.watch(executor, MagicMock(program=key(rows)), {})
    assert [one.number for one in CallTrace.read(path).steps] == [2]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    path.unlink()
    path.mkdir()
    for rows in (3, 4):
        capture.watch(executor, MagicMock(program=key(rows)), {})
    assert len(caplog.records) == 3, "after an error of the file no step is captured"


def test_a_folder_that_cannot_be_written_is_refused_at_the_start() -> None:
    with pytest.raises(InputError, match=r"capture\.file.*cannot be written"):
        Capture(CaptureChoice(file="/proc/nothing/x.trace"), {})


def test_numbers_of_attention_and_of_layers_without_rows_are_left_out() -> None:
    idle = step(kv_lens=np.zeros(3, np.int32))
    assert traced_shapes(trace(idle), "attention") == []
    assert not _is_value("attention", jnp.ones(1))
    assert _is_value("linear", jnp.ones(1))


def test_a_capture_compiles_while_serving() -> None:
    with pytest.raises(ConfigError, match="capture together with forbid_compiling"):
        EngineConfig(capture="x.trace", forbid_compiling=True)  # type: ignore[arg-type]


REPLAY = """
import sys
from enginebay.cli.program import main
sys.exit(main(["check", "kernel:attention:xla", "--trace", sys.argv[1]]))
"""


@pytest.mark.long
@pytest.mark.parametrize("engine", ["oengine", "vinference"])
def test_a_run_is_captured_and_gives_the_same_tokens(engine: str, tmp_path: Path) -> None:
    path = tmp_path / "x.trace"
    prompts = ["Once upon a time", "The dog", "A cat and a bird"]
    params = SamplingParams(max_tokens=6, temperature=0)
    found = []
    for capture in (None, {"file": str(path)}):
        with LLM(str(BRIEF), engine=engine, capture=capture, max_model_len=64) as llm:
            found.append([o.outputs[0].token_ids for o in llm.generate(prompts, params)])
    assert found[0] == found[1]
    captured = CallTrace.read(path)
    assert path.stat().st_size < 1 << 20
    assert {one.bucket.mode for one in captured.steps} >= {"decode"}
    decode = next(one for one in captured.steps if one.bucket.mode == "decode")
    ops = {call.op for call in decode.calls}
    assert ops >= {"linear", "embedding", "rms_norm"}
    assert decode.kv_lens.max() > 4
    done = subprocess.run(
        [sys.executable, "-c", REPLAY, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
