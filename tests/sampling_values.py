"""Values of sampling parameters for tests, and a copy of the tree with one parameter more."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from enginebay.errors import RequestError
from enginebay.types import SamplingParams

ROOT = Path(__file__).parents[1]
CANDIDATES: list[Any] = [
    True,
    False,
    0.5,
    2,
    "a",
    ["a"],
    [5],
    [[5]],
    {5: 1.0},
    {"dry": {}},
]
UNKNOWN = "beam_width"
"""A name that no field has."""

DECLARATION = """    top_a: Annotated[Float, RowValue("float32", 0.0, "filter")] = option(
        0.0,
        ge=0.0,
        le=1.0,
        description="drop tokens below top_a times the square of the best one's",
    )
    presence_penalty: Annotated["""
"""A parameter of a plugin, before the field that it is put in front of."""

COMPUTED = """    z = (logits - highest) / jnp.where(draws, state.params.temperature, 1.0)[:, None]
    best = jnp.exp(-jax.nn.logsumexp(z, axis=-1, keepdims=True))
    z = jnp.where(jnp.exp(z) >= state.params.top_a[:, None] * best, z, -jnp.inf)
"""
"""The file that computes it: the standard sampler."""


def some_value(field: str) -> Any:
    """A value that a field takes, other than its default."""
    for value in CANDIDATES:
        try:
            params = SamplingParams(**{field: value})
        except RequestError:
            continue
        if getattr(params, field) != getattr(SamplingParams(), field):
            return value
    raise AssertionError(f"no value for {field}")


def run_with_top_a(folder: Path, script: str) -> str:
    """Run a script with copies of the two files in which the parameter `top_a` is declared and
    computed, and return its output.
    """
    for package in ("core/enginebay", "samplers/enginebay_samplers"):
        shutil.copytree(ROOT / package, folder / package)
    _change(folder / "core/enginebay/types.py", "    presence_penalty: Annotated[", DECLARATION)
    sampler = folder / "samplers/enginebay_samplers/standard.py"
    _change(sampler, COMPUTED.splitlines(keepends=True)[0], COMPUTED)
    paths = [folder / "core", folder / "samplers", ROOT, os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _change(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), encoding="utf-8")
