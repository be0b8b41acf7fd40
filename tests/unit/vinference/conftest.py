"""One inference over the demo model in a small size, compiled for two shapes."""

from __future__ import annotations

import pytest

from enginebay_vinference import vInference
from tests.unit.vinference.small import BUCKETS, CONFIG, MODEL


@pytest.fixture(scope="session")
def inference() -> vInference:
    """Precompiled for BUCKETS. Tests that change anything make their own."""
    made = vInference(MODEL, None, CONFIG, seed=5)
    assert made.precompile(BUCKETS)
    return made
