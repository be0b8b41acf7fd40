"""The documented APIs and ours, with the class that serves over HTTP."""

from __future__ import annotations

from tools.documented_apis import apis, unexplained


def test_every_difference_has_a_reason() -> None:
    assert unexplained(apis()) == []
