"""What people see of records in a notebook, and of the program when they run it alone."""

from __future__ import annotations

import dataclasses
import html
import pickle
import pydoc
import re

import pytest

from enginebay import LLM, EngineConfig, SamplingParams
from enginebay.cli.program import main, summaries
from enginebay.outputs import CompletionOutput, RequestOutput
from enginebay.shadow_report import LayerDifference, ShadowPhase, ShadowReport
from enginebay_testing.report import CheckRecord, CheckRecords
from tests.brief import BRIEF
from tests.fakes import install
from tests.unit.serving import SIZES

EXAMPLES = 3


def test_the_program_alone_says_what_one_does_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    said = capsys.readouterr().out
    lines = [line.split() for line in said.splitlines() if line.startswith("  enginebay ")]
    assert len(lines) == EXAMPLES
    assert {words[1] for words in lines} <= set(summaries())


def test_the_help_of_llm_has_a_line_for_each_argument_before_its_methods() -> None:
    said = pydoc.plain(pydoc.render_doc(LLM))
    lines = said[: said.index("Methods defined here")].splitlines()
    assert max(map(len, lines)) <= 100
    named = [found[1] for line in lines if (found := re.match(r" \|      (\w+)  +\w", line))]
    assert sorted(named) == sorted([*EngineConfig.model_fields, "config", "progress"])
    assert len(lines) <= len(named) + 25


def test_a_plan_is_shown_in_a_line_and_outputs_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    with LLM(BRIEF, engine="oengine", **SIZES) as llm:
        shown = repr(llm.plan)
        assert shown.startswith("Plan(model=")
        assert "engine='oengine'" in shown
        assert len(shown) < 1000
        table = llm.plan._repr_html_()
        assert "<th>setting</th><th>chosen</th><th>why</th><th>refused</th>" in table
        assert table.count("<tr>") == 1 + len(llm.plan.reasons)
        [reason] = [one for one in llm.plan.reasons if one.setting == "engine"]
        assert f"<tr><td>engine</td><td>oengine</td><td>{html.escape(reason.why)}</td>" in table
        [output] = llm.generate("Once", SamplingParams(max_tokens=3, temperature=0))
    assert pickle.loads(pickle.dumps(output)) == output


def test_an_output_is_shown_as_a_table_that_keeps_its_text() -> None:
    completions = [
        CompletionOutput(0, "a <b>\n  c", [1, 2, 3], finish_reason="stop"),
        CompletionOutput(1, "d", [4]),
    ]
    shown = RequestOutput("r", "<script>", [7], completions)._repr_html_()
    assert "<script>" not in shown
    assert ">&lt;script&gt;<" in shown
    assert ">a &lt;b&gt;\n  c</span></td><td>3</td><td>stop</td>" in shown
    assert shown.count("<tr>") == 1 + len(completions)
    assert "2 tokens" in RequestOutput("r", None, [7, 8], [])._repr_html_()


def test_records_of_a_check_are_shown_with_what_did_not_pass() -> None:
    record = CheckRecord(
        *("kernel:attention:mine", "attention", "mine", "mine", "1", "runs", "cpu", "b1<2>"),
        verdict="PASS",
        detail="",
        error=None,
        bound=None,
        seconds=0.1,
        figures={},
        traits={},
    )
    wrong = dataclasses.replace(record, case="b8", verdict="INCORRECT", detail="row 3 & 4")
    shown = CheckRecords([record, wrong, record])._repr_html_()
    assert "<b>2 PASS, 1 INCORRECT</b>" in shown
    assert "<td>b8</td><td>INCORRECT</td><td>row 3 &amp; 4</td>" in shown
    assert shown.count("<tr>") == 2
    assert "<table>" not in CheckRecords([record])._repr_html_()


def test_a_shadow_report_is_shown_with_its_worst_layer_and_its_error() -> None:
    layers = tuple(
        LayerDifference(phase, "full", layer, difference, 0.1, num_nonfinite, 0, 9)
        for phase, layer, difference, num_nonfinite in (
            ("decode", 0, 1e-6, 0),
            ("decode", 1, 2.5e-3, 0),
            ("prefill", 3, 0.0, 4),
        )
    )
    phases = (
        ShadowPhase("decode", "xla", 8, 2, 0.001, 0.0025),
        ShadowPhase("prefill", "xla", 1, 1, 0.001, 0.0025),
    )
    report = ShadowReport("attention", "mine<1>", 0.25, phases, layers, 3, "no & never")
    shown = report._repr_html_()
    assert "attention: mine&lt;1&gt;, on 25% of the steps" in shown
    assert "<td>2 of 8</td><td>layer 1: 0.0025</td><td>1.000</td><td>2.500</td>" in shown
    assert "<td>layer 3: 0, 4 values not finite</td>" in shown
    assert "3 steps failed: no &amp; never" in shown
