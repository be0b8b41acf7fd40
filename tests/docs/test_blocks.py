"""Code blocks of the documentation that are marked `run` run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest

from enginebay.cli.program import main
from tests.docs.blocks import on_brief, with_brief
from tests.docs.test_docs import PAGES, ROOT

pytestmark = pytest.mark.xdist_group("docs")
FENCE = re.compile(r"^```(\w+) run\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FAKED = (
    "README.md-2",
    "README.md-4",
    "docs/configuration.md-3",
    "docs/engines.md-1",
    "docs/engines.md-2",
    "docs/engines.md-3",
    "docs/esurge.md-1",
    "docs/esurge.md-2",
    "docs/sampling.md-3",
    "docs/speculation.md-1",
)
"""Blocks about requests, their order and what is told of them, on the fake engine: no tensor is in
them.
"""


def runnable_blocks() -> Iterator[pytest.ParameterSet]:
    for path in PAGES:
        name = path.relative_to(ROOT).as_posix()
        for number, match in enumerate(FENCE.finditer(path.read_text(encoding="utf-8")), 1):
            block = f"{name}-{number}"
            yield pytest.param(block, match[1], match[2], id=block)


BLOCKS = list(runnable_blocks())


@pytest.mark.long
@pytest.mark.parametrize(("block", "language", "code"), BLOCKS)
def test_code_block_runs(
    block: str,
    language: str,
    code: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("enginebay_bench.roofline.STREAM_BYTES", 1 << 20)
    monkeypatch.setattr("enginebay_bench.roofline.MATRIX", 32)
    request.getfixturevalue("faked" if block in FAKED else "pooled")
    if language == "python":
        code = compile(on_brief(code), "block", "exec", dont_inherit=True)
        exec(code, {"__name__": "__main__"})
        return
    assert language == "sh"
    for line in code.splitlines():
        program, *arguments = shlex.split(line, comments=True) or ["enginebay", "--help"]
        assert program == "enginebay", f"{line}: only enginebay's own commands are run"
        assert main(with_brief(arguments)) == 0, f"{line}: {capsys.readouterr().err}"
        assert capsys.readouterr().out.strip(), f"{line} printed nothing"


def test_named_blocks_are_there() -> None:
    names = {block.values[0] for block in BLOCKS}
    assert names >= set(FAKED)
