"""Fixtures of the tests of LLM and program."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from enginebay import LLM
from enginebay.cli.program import main
from tests.brief import BRIEF
from tests.fakes import install
from tests.unit import rowtable
from tests.unit.serving import SIZES, assert_idle


@pytest.fixture(scope="session")
def shared_llm() -> Iterator[LLM]:
    """The first layers of the demo model in the small size, on the default engine."""
    with LLM(BRIEF, **SIZES) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """The shared one, which must hold nothing when a test is over."""
    yield shared_llm
    assert_idle(shared_llm)


@pytest.fixture(scope="module")
def shared_fake() -> Iterator[LLM]:
    """An LLM of the same on the fake engine: for what the loop, requests and streams do."""
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        made = LLM(BRIEF, **SIZES)
    with made:
        yield made


@pytest.fixture
def fake_llm(shared_fake: LLM) -> Iterator[LLM]:
    """The shared one, which must hold nothing when a test is over."""
    yield shared_fake
    assert_idle(shared_fake)


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A configuration file of the same."""
    path = tmp_path_factory.mktemp("config") / "small.toml"
    lines = [f"{name} = {json.dumps(value)}" for name, value in ({"model": BRIEF} | SIZES).items()]
    path.write_text("\n".join([*lines, 'compile_cache = "off"']))
    return str(path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command line in this process: exit code, stdout and stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(arguments)
        return code, *capsys.readouterr()

    return call


@pytest.fixture(params=["its own", "of a working engine"])
def row_tables(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has make_table() return tables of their own, or views of tables that engines work on."""
    if request.param != "its own":
        tables = rowtable.served_tables()
        monkeypatch.setattr(rowtable, "new_table", lambda: next(tables))
