"""compare: tokens first, then speed; what is wrong, or other work, is never ranked."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginebay.cli.program import main
from enginebay.config import EngineConfig
from enginebay.errors import InputError
from enginebay_bench.compare.comparison import ComparedRow, Comparison
from enginebay_bench.compare.page import page
from enginebay_bench.compare.process import VariantError, VariantProcess
from enginebay_bench.compare.records import Cell, read_record
from enginebay_bench.compare.session import ComparisonSession, compare, workload
from enginebay_bench.compare.statistics import paired_ratio, ratio_of_medians
from enginebay_bench.compare.table import cell_table, csv_text, json_text, markdown_text
from enginebay_bench.compare.variants import ComparedVariant, peer_variant
from enginebay_bench.compare.verdicts import token_verdict

FAKE = Path(__file__).with_name("fake_peer.py")
CELL = Cell(1, 16, 8)


def fake(name: str, *faults: str) -> ComparedVariant:
    return ComparedVariant(name, (sys.executable, str(FAKE), *faults))


def run(*variants: ComparedVariant, rounds: int = 3, **options: Any) -> dict[str, ComparedRow]:
    found = compare(variants, [CELL], rounds=rounds, **options)
    return {row.variant: row for row in found.rows}


def test_a_slower_variant_is_found_and_the_same_is_not() -> None:
    rng = np.random.default_rng(0)

    def times(factor: float) -> np.ndarray:
        return factor * rng.lognormal(0.0, 0.01, 10)

    verdicts = [paired_ratio(times(1), times(1)).verdict for _ in range(200)]
    assert verdicts.count("no difference") >= 180, "of A against A, about one in twenty"
    slower = [paired_ratio(1 / times(1.03), 1 / times(1)).verdict for _ in range(20)]
    assert slower.count("slower") >= 19, "3 % with ten rounds"
    drift = 1 + np.arange(10) / 10  # the machine becomes slower, for both
    assert paired_ratio(times(1) * drift, times(1.03) * drift).verdict == "slower"
    assert ratio_of_medians(times(1.2), times(1)).verdict == "faster"
    assert ratio_of_medians(times(1), times(1)).low < 1.02


def answer(*tokens: int, **more: Any) -> dict[str, Any]:
    logprobs = [{str(token): -0.5, "90": -0.5005, "91": -3.0} for token in tokens]
    return {"token_ids": list(tokens), "text": str(tokens), "logprobs": logprobs, **more}


@pytest.mark.parametrize(
    ("got", "verdict", "text"),
    [
        (answer(5, 7, 9), "equal", ""),
        (answer(5, 90, 9), "near ties", "request 0, token 1, 0.0005 nats"),
        (answer(5, 91, 9), "wrong", "request 0, token 1: 91 in place of 7"),
        (answer(5, 33, 9), "wrong", "request 0, token 1: 33 in place of 7"),
        (answer(5, 7), "wrong", "request 0: 2 tokens in place of 3"),
        ({"text": "(5, 7, 9)"}, "equal", ""),
        ({"text": "(5, 8, 9)"}, "wrong", "request 0: its text differs from character 4 on"),
        ({"end_s": 1.0}, "unknown", "the program returns neither tokens nor texts"),
    ],
)
def test_tokens_are_compared_up_to_the_first_that_differs(
    got: dict[str, Any], verdict: str, text: str
) -> None:
    found = token_verdict([answer(5, 7, 9)], [got], "float32")
    assert (found.verdict, found.text) == (verdict, text)


def test_what_is_wrong_or_other_work_has_no_ratio_and_no_rank() -> None:
    variants = [fake("right"), fake("same"), fake("wrong", "wrong"), fake("short", "short")]
    variants += [fake("narrow", "bfloat16"), fake("near", "near")]
    found = compare(variants, [CELL], rounds=6)
    rows = {row.variant: row for row in found.rows}
    assert {name: row.parity.verdict for name, row in rows.items()} == {
        "right": "reference",
        "same": "equal",
        "wrong": "wrong",
        "short": "wrong",
        "narrow": "equal",
        "near": "near ties",
    }
    assert rows["narrow"].other_work == "dtype bfloat16, the reference has float32"
    assert rows["short"].other_work == "an answer has 7 tokens, the reference's 8"
    assert {row.variant for row in found.ranking(CELL)} == {"right", "same", "near"}
    assert not found.is_right
    titles, lines = cell_table(found, CELL)
    shown = {line[1]: line[titles.index("speed / reference's")] for line in lines}
    assert shown["wrong"] == "not ranked: wrong"
    assert shown["narrow"].startswith("not comparable: dtype bfloat16")
    assert re.fullmatch(r"\d\.\d+ \(.* to .*\)", shown["same"])


def test_a_slow_variant_is_ranked_last_with_its_ratio() -> None:
    found = compare([fake("right"), fake("slow", "slow")], [CELL], rounds=6)
    assert [row.variant for row in found.ranking(CELL)] == ["right", "slow"]
    [ratio] = [r.ratios["output_tokens_per_s"] for r in found.rows if r.variant == "slow"]
    assert ratio.verdict == "slower"
    assert ratio.high < 0.8
    assert found.is_right


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("dies", "ended with exit code 3: no more memory"),
        pytest.param("stops", "longer than", marks=pytest.mark.long),
    ],
)
def test_a_variant_that_fails_is_left_out(fault: str, why: str) -> None:
    rows = run(fake("right"), fake("bad", fault), limit_s=3.0 if fault == "stops" else 60.0)
    assert rows["bad"].parity.verdict == "failed"
    assert why in rows["bad"].parity.text
    assert len(rows["right"].rounds["ttft_ms"]) == 3
    with pytest.raises(VariantError, match=why):
        run(fake("bad", fault), fake("right"), limit_s=3.0 if fault == "stops" else 60.0)


def test_a_program_that_cannot_be_started_or_says_nonsense_is_told() -> None:
    rows = run(
        fake("right"),
        ComparedVariant("none", ("/no/program",)),
        ComparedVariant("echo", ("echo", "hello")),
    )
    assert "cannot be started" in rows["none"].parity.text
    assert "wrote 'hello\\n', which is no record" in rows["echo"].parity.text


@pytest.mark.parametrize(
    ("faults", "verdict", "text"),
    [
        (("cheats",), "wrong", ": 0 in place of "),
        (("ahead",), "failed", "did not answer run 2"),
        (("end_s=0",), "failed", "end_s 0, which is no time"),
        (("end_s=NaN",), "failed", "end_s nan"),
        (("first_s=-1",), "failed", "first_s -1"),
        (('cached="x"',), "failed", "cached 'x'"),
        (("token_ids=5",), "failed", "token_ids that are no list"),
        (("logprobs=[]",), "failed", "logprobs that are no numbers"),
        (("token_ids=null", "text=null"), "failed", "neither token_ids nor text"),
    ],
    ids=lambda value: value[0].split("=")[0] if isinstance(value, tuple) else "",
)
def test_a_cheat_or_a_damaged_answer_is_never_ranked(
    faults: tuple[str, ...], verdict: str, text: str
) -> None:
    found = compare([fake("right"), fake("bad", *faults)], [CELL], rounds=2)
    [bad] = [row for row in found.rows if row.variant == "bad"]
    assert bad.parity.verdict == verdict
    assert text in bad.parity.text
    assert [row.variant for row in found.ranking(CELL)] == ["right"]
    assert not bad.ratios


def test_our_clock_ranks_and_wrong_times_are_told() -> None:
    found = compare([fake("right"), fake("bad", "boasts")], [CELL], rounds=6)
    [bad] = [row for row in found.rows if row.variant == "bad"]
    assert bad.ratios["output_tokens_per_s"].ratio < 10, "it says 1,000"
    rows = run(fake("right"), fake("bad", "boasts", "sleeps"), rounds=1)
    assert "says that a run of " in rows["bad"].parity.text


def test_a_program_that_tells_texts_alone_has_no_rate() -> None:
    found = compare(
        [fake("right"), fake("text", "token_ids=null", "logprobs=null")], [CELL], rounds=2
    )
    [row] = [row for row in found.rows if row.variant == "text"]
    assert row.parity.verdict == "equal"
    assert row.other_work == "its number of tokens is not known"
    assert "output_tokens_per_s" not in row.figures


@pytest.mark.long
@pytest.mark.parametrize(
    "script",
    [
        "sleep 600 & exec {0} {1}",
        "echo '{{\"ready\": {{}}}}'; sleep 600",
        "echo '{{\"ready\": {{}}}}'; exec >&-; sleep 600",
    ],
    ids=["a child of its own", "never reads", "closed its output"],
)
def test_a_program_that_would_hang_is_ended(script: str) -> None:
    text = script.format(sys.executable, FAKE)
    rows = run(fake("right"), ComparedVariant("x", ("bash", "-c", text)), limit_s=3.0)
    assert rows["right"].parity.is_right


def test_cells_have_no_prefix_in_common() -> None:
    for size in (1, 4):
        cells = [Cell(size, 16, 8), Cell(size, 64, 8), Cell(size, 64, 9)]
        first = {workload(cell, n, 500, 3).prompts[0][:4] for cell in cells for n in range(5)}
        assert len(first) == 15


def test_another_program_does_not_continue_a_record(tmp_path: Path) -> None:
    path = str(tmp_path / "runs.jsonl")
    compare([fake("a")], [CELL], rounds=1, output=path)
    other = ComparedVariant("a", ("/bin/python", str(FAKE)))
    with pytest.raises(InputError, match="other variants than the record has"):
        compare([other], [CELL], rounds=2, output=path, resumed=read_record(path))


def test_a_cut_record_is_continued(tmp_path: Path) -> None:
    path = str(tmp_path / "runs.jsonl")
    variants = [fake("right"), fake("same")]
    compare(variants, [CELL], rounds=2, output=path)
    whole = Path(path).read_text()
    assert json.loads(whole.partition("\n")[0])["schema"] == "enginebay.compare"
    Path(path).write_text(whole[: len(whole) - 40])
    cut = read_record(path)
    assert len(cut.of("run")) == 3
    found = compare(variants, [CELL], rounds=4, output=path, resumed=cut)
    lines = read_record(path).of("run")
    assert len(lines) == 8
    assert lines[:3] == cut.of("run"), "what was there is kept"
    assert {(one["variant"], one["round"]) for one in lines} == {
        (name, number) for name in ("right", "same") for number in (1, 2, 3, 4)
    }
    assert Comparison.of(read_record(path)).rows == found.rows
    with pytest.raises(InputError, match="other cells than the record has"):
        compare(variants, [Cell(1, 8, 8)], rounds=2, output=path, resumed=read_record(path))


HEADER = '{"schema": "enginebay.compare", "version": 1}'


@pytest.mark.parametrize("text", ["", "{}\n", "no\n", f"{HEADER}\n", f"{HEADER}\n[]\n"])
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=r"the record .*runs\.jsonl"):
        read_record(path)


def test_rounds_begin_with_each_variant_in_turn() -> None:
    found = compare([fake("a"), fake("b"), fake("c")], [CELL], rounds=3)
    order = [line["variant"] for line in found.record.of("run")]
    assert order == [*"bca", *"cab", *"abc"]


def test_one_process_is_there_at_a_time_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[int] = []
    measure = ComparisonSession._measure

    def watch(self: ComparisonSession, *args: Any) -> None:
        measure(self, *args)
        alive.append(len(self._processes))

    monkeypatch.setattr(ComparisonSession, "_measure", watch)
    run(fake("a", "cuda"), fake("b", "cuda"), rounds=2)
    assert alive == [1] * 4
    alive.clear()
    run(fake("a"), fake("b"), rounds=2)
    assert alive == [2] * 4


def test_processes_end_with_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[VariantProcess] = []
    init = VariantProcess.__init__

    def keep(self: VariantProcess, *args: Any) -> None:
        made.append(self)
        init(self, *args)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(VariantProcess, "__init__", keep)
    monkeypatch.setattr(ComparisonSession, "_measure", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(fake("a"), fake("b"))
    assert [one._process.returncode for one in made] == [-9, -9]


def test_changes_since_an_older_record_are_shown() -> None:
    older = compare([fake("a"), fake("b", "slow")], [CELL], rounds=6).record
    newer = compare([fake("a"), fake("b")], [CELL], rounds=6).record
    rows = {row.variant: row for row in Comparison.of(newer, older).rows}
    assert rows["b"].changes["output_tokens_per_s"].verdict == "faster"
    assert "faster" in markdown_text(Comparison.of(newer, older))


def test_reports_are_whole() -> None:
    found = compare([fake("a <b>"), fake("c|d", "wrong")], [CELL], rounds=2, command="compare <x>")
    text = page(found)
    assert not re.search(r"https?://|<script|src=", text)
    assert "a &lt;b&gt;" in text
    assert "compare &lt;x&gt;" in text
    assert text.count("<svg") >= 5
    assert found._repr_html_() in text
    assert "c\\|d" in markdown_text(found)
    assert len(csv_text(found).splitlines()) == 1 + 2 * 5
    assert json.loads(json_text(found))["rows"][1]["parity"]["verdict"] == "wrong"


def test_peers_are_named_by_kind() -> None:
    config = EngineConfig(model="demo")
    assert peer_variant("x=command:prog -a", config, "float32").command == ("prog", "-a")
    found = peer_variant("x=http://h:1/v1#name", config, "float32").command
    assert found[1].endswith("http_peer.py")
    assert found[2:] == ("http://h:1/v1", "name")
    python = sys.executable
    dtyped = [(kind, "float32") for kind in ("transformers", "openvino", "vllm")]
    for kind, more in (*dtyped, ("llama.cpp", "4096")):
        _, script, model, last = peer_variant(f"x={kind}:{python}", config, "float32").command
        assert Path(script).is_file()
        assert Path(model, "config.json").is_file(), "the folder that the name stands for"
        assert last == more
    for wrong in (
        "x",
        "x=",
        "x=command:'a",
        "x=command: ",
        "=http://h",
        "x=none:/bin/sh",
        "x=transformers:/none",
    ):
        with pytest.raises(InputError, match="--peer"):
            peer_variant(wrong, config, "float32")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--rounds", "0"), "--rounds 0"),
        (("--prompt-len", "12,x"), "--prompt-len 12,x"),
        (("--limit-s", "inf"), "--limit-s inf"),
        (("--resume",), "--resume without --output"),
        (("--output", "EXISTS"), "which exists"),
        (("--reference", "none"), "--reference none"),
        (("--variant", "x"), "--variant x"),
        (("--variant", "x:seed=1", "--variant", "x:seed=2"), "two variants named x"),
        (("--read", "EXISTS"), "does not begin with the schema"),
    ],
)
def test_wrong_flags_are_refused_before_anything_runs(
    flags: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "there"
    path.write_text("{}\n")
    given = [str(path) if flag == "EXISTS" else flag for flag in flags]
    assert main(["compare", *given]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> dict[str, EngineConfig]:
    """The configurations of our engines by variant; programs that are none run in their place."""
    found: dict[str, EngineConfig] = {}

    def without_engine(name: str, config: EngineConfig) -> ComparedVariant:
        found[name] = config
        return fake(name)

    monkeypatch.setattr("enginebay_bench.compare.variants.engine_variant", without_engine)
    return found


def test_bench_compares_the_listed_engines_on_its_two_workloads(
    configs: dict[str, EngineConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    decode = ("--attention", "xla", "--attention", "decode=xla,decode=native")
    sizes = ("--prompt-len", "16", "--rounds", "1", "--json")
    assert main(["bench", "latency", "--engine", "oengine,vinference", *decode, *sizes]) == 0
    found = json.loads(capsys.readouterr().out)
    names = [f"{e} decode={d}" for e in ("oengine", "vinference") for d in ("xla", "native")]
    assert [row["variant"] for row in found["rows"]] == names == list(configs)
    assert {row["cell"] for row in found["rows"]} == {"16+64 tokens"}
    for name, config in configs.items():
        engine, _, phase = name.partition(" decode=")
        assert config.engine.name == engine
        chosen = {"decode": phase, "prefill": "xla", "mixed": "xla"}
        assert config.model_dump()["kernels"]["attention"] == chosen
    few = ("--num-requests", "3", "--new-tokens", "8", "--scheduler", "fcfs,static")
    assert main(["bench", "throughput", *few, *sizes]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["variant"] for row in found["rows"]] == ["fcfs", "static"]
    for row in found["rows"]:
        assert row["cell"] == "3 requests up to 16+8 tokens"
        assert row["figures"].keys() == {"ttft_ms", "tpot_ms", "output_tokens_per_s"}


def test_an_interrupted_bench_prints_what_there_is(
    configs: dict[str, EngineConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    measure = ComparisonSession._measure

    def until_the_second_round(self: ComparisonSession, *arguments: Any) -> None:
        if arguments[-1] == 2:
            raise KeyboardInterrupt
        measure(self, *arguments)

    monkeypatch.setattr(ComparisonSession, "_measure", until_the_second_round)
    assert main(["bench", "latency", "--prompt-len", "16", "--new-tokens", "4"]) == 130
    out, err = capsys.readouterr()
    assert "this configuration has 1 of 10 runs" in out
    assert "interrupted" in err


@pytest.mark.parametrize("what", ["lines", "input"])
def test_a_program_says_what_is_printed_and_that_its_input_is_wrong(
    what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if what == "lines":
        found = compare([fake("first"), fake("other", "says")], [CELL], rounds=2)
        assert "- other: run 3 is done" in markdown_text(found)
    else:
        with pytest.raises(InputError, match="refused: 'no such setting'"):
            run(fake("first"), fake("refused", "refuses"))


@pytest.mark.long
def test_engines_and_a_peer_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runs.jsonl"
    sizes = ("--max-model-len", "64", "--max-num-seqs", "1", "--max-num-batched-tokens", "16")
    flags = ("--prompt-len", "16", "--new-tokens", "8", "--rounds", "2", "--output", str(path))
    peer = ("--peer", f"fake=command:{sys.executable} {FAKE}", "--dtype", "float32")
    assert main(["compare", "--engine", "oengine,vinference", *peer, *sizes, *flags]) == 1
    record = read_record(path)
    rows = {row.variant: row for row in Comparison.of(record).rows}
    assert rows["vinference"].parity.verdict == "equal"
    assert rows["fake"].parity.verdict == "wrong"
    assert rows["oengine"].facts["num_programs"] > 2
    assert rows["oengine"].peak_mib is not None
    capsys.readouterr()
    assert main(["compare", "--read", str(path), "--format", "md"]) == 1
    assert "not ranked: wrong" in capsys.readouterr().out
