"""The kit finds every fault of the zoo of each kind, and none in right parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.zoo.kinds import KINDS, MARKS, WITHOUT_PROGRAMS, first_finding, main, zoo_of

pytestmark = pytest.mark.long

QUICK = {
    ("scheduler", "last in, first out, by arrival"),
    ("scheduler", "longest request first"),
    ("scheduler", "a token of cache too many"),
    ("proposer", "positions in place of tokens"),
    ("proposer", "padded with -1"),
    ("cache", "Generous"),
    ("cache", "Whole"),
    ("cache", "Squatting"),
    ("grammar", "the mask allows an end-of-sequence token"),
    ("grammar", "one mask for all time"),
    ("grammar", "one constraint for all completions"),
    ("guide", "no limit of size"),
    ("guide", "grammars mixed up by length"),
    ("guide", "a thread left after close"),
    ("format", "drops text between calls"),
    ("format", "strips values"),
    ("format", "reasoning cut off is the answer"),
}
"""Faults that the quick tests plant: their suites compile nothing."""

LEAST = 8


def parts(which: str) -> list[object]:
    """(kind, name) of every part of FAULTS or RIGHT; all but a few are slow."""
    return [
        pytest.param(
            kind, name, marks=() if (kind, name) in QUICK else pytest.mark.slow, id=f"{kind}-{name}"
        )
        for kind in KINDS
        for name in getattr(zoo_of(kind), which)
    ]


@pytest.mark.parametrize(("kind", "name"), parts("FAULTS"))
def test_the_suite_finds_the_fault(kind: str, name: str) -> None:
    finding = first_finding(kind, name, zoo_of(kind).FAULTS[name])
    assert finding.check is not None, f"{kind} {name!r} passes the suite"


@pytest.mark.parametrize(("kind", "name"), parts("RIGHT"))
def test_a_right_part_passes(kind: str, name: str) -> None:
    finding = first_finding(kind, name, zoo_of(kind).RIGHT[name])
    assert finding.check is None, f"{kind} {name!r} fails {finding.check}: {finding.detail}"


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_faults_enough(kind: str) -> None:
    assert len(zoo_of(kind).FAULTS) >= LEAST


def test_a_fault_that_is_not_found_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{MARKS[0]}\nold\n{MARKS[1]}\nafter\n")
    proposers = zoo_of("proposer")
    assert "proposer" in WITHOUT_PROGRAMS
    faults = {"of int64": proposers.FAULTS["of int64"]}
    monkeypatch.setattr(proposers, "FAULTS", faults)
    assert main(["proposer"], page) == 0
    assert capsys.readouterr().out.startswith("| proposer | of int64 | drafts_are_few_tokens |\n")
    assert "| proposer | 1 | 1 | 1 |" in page.read_text()
    assert "old" not in page.read_text()
    monkeypatch.setattr(proposers, "FAULTS", faults | {"right": proposers.RIGHT["ngram"]})
    assert main(["proposer"]) == 1
    assert "| proposer | right | NOT FOUND |" in capsys.readouterr().out
