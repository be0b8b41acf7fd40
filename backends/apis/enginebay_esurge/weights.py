"""Exchange of an engine's weights: the programs stay, and the prefix cache is cleared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from enginebay.compose.composition import open_checkpoint
from enginebay.compose.plan import Plan
from enginebay.contracts.model import Checkpoint, Weights
from enginebay.errors import InputError, InternalError
from enginebay.weights import KEY_CENTERS, flat_weights, merge_weights
from enginebay_paged.engine import PagedEngine, is_paged


def paged(engine: Any) -> PagedEngine:
    """Return the engine, which must be a paged engine."""
    if not is_paged(engine):
        raise InternalError(f"an eSurge over a {type(engine).__name__}")
    return engine


def load_changes(
    plan: Plan,
    model: str | Path | Checkpoint | None,
    graphdef: Any,
    graphstate: Any,
    graphother: Any,
) -> Callable[[Weights], Weights]:
    """Return a function that takes the present weights and returns the new ones.

    The new weights are those of `model`, or the present ones if it is None, with the single weights
    of `graphstate` and `graphother` put in their places. Each new weight must have the shape and
    dtype of the present one. A `graphdef` changes nothing: the programs are those of the present
    model. InputError (a ValueError) if all four are None.
    """
    if all(given is None for given in (model, graphdef, graphstate, graphother)):
        raise InputError(
            "no weights", "model, graphstate or graphother", "Pass at least one of them."
        )
    changes = [change for change in (graphstate, graphother) if change is not None]
    if model is None:
        return lambda base: merge_weights(base, *changes)
    checkpoint = (
        open_checkpoint(plan.registry, plan.config, str(model))
        if isinstance(model, str | Path)
        else model
    )
    loaded = plan.load_weights(checkpoint)
    if changes:  # its centres are those of its own keys: the engine measures them again
        loaded = {p: one for p, one in loaded.items() if not p.startswith(KEY_CENTERS)}
    return lambda base: merge_weights(base, loaded, *changes)


def swap(engine: PagedEngine, change: Callable[[Weights], Weights]) -> None:
    """Exchange the weights of an engine without rows. Call it on the engine's thread, or when it is
    stopped.
    """
    weights = engine.executor.weights()
    before = flat_weights(weights)
    changed = {p: w for p, w in flat_weights(change(weights)).items() if w is not before[p]}
    engine.set_weights(changed)
