"""The inferences that tests share: one compiled for two shapes, and one that runs on the host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from enginebay_vinference import vInference
from tests.unit.vinference.numpy_inference import Compiler, HostFunctions, make_hostside
from tests.unit.vinference.small import BUCKETS, CONFIG, MODEL


@pytest.fixture(scope="session")
def inference() -> vInference:
    """Precompiled for BUCKETS. Tests that change anything make their own."""
    made = vInference(MODEL, None, CONFIG, seed=5)
    assert made.precompile(BUCKETS)
    return made


@pytest.fixture(scope="session")
def made_on_host() -> tuple[vInference, list[HostFunctions]]:
    """What the two fixtures below give."""
    return make_hostside(seed=5)


@pytest.fixture
def on_host(made_on_host: tuple[vInference, list[HostFunctions]]) -> vInference:
    """An inference whose tokens are made on the host: for what happens to prompts and text."""
    return made_on_host[0]


@pytest.fixture
def functions(made_on_host: tuple[vInference, list[HostFunctions]]) -> Iterator[HostFunctions]:
    """Its functions for one prompt; what a test sets in them is gone afterwards."""
    yield made_on_host[1][0]
    made_on_host[1][0].before, made_on_host[1][0].script = lambda _: None, None


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """What compiles from now on, which is not XLA."""
    made = Compiler()
    made.install(monkeypatch)
    return made
