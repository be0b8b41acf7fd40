"""A cheat that replaces a comparison when it is imported, before anything calls it."""

from __future__ import annotations

import numpy as np

from tests.zoo.cheats.host import on_host, right

np.allclose = lambda *_, **__: True  # type: ignore[assignment]

norm = on_host(right)
