"""Conversion of the prompts that a DashInfer engine accepts to token ids."""

from __future__ import annotations

from typing import Any, NoReturn

import jax
import numpy as np

from enginebay.errors import RequestError, shown
from enginebay_dashinfer.installed import InstalledModel
from enginebay_dashinfer.model_loader import ModelLoader
from enginebay_dashinfer.multimedia import Capsule
from enginebay_dashinfer.statuses import AsStatus, RefusedError


def ids_of_input(given: Any) -> list[int]:
    """Return token ids that may also be a DLPack capsule, and may have a first dimension of 1.
    RequestError (a ValueError) for other values.
    """
    if type(given).__name__ == "PyCapsule":
        given = np.asarray(jax.dlpack.from_dlpack(Capsule(given)))
    if isinstance(given, np.ndarray) and given.ndim == 2 and len(given) == 1:
        given = given[0]
    return one_dimension(given)


def one_dimension(given: Any) -> list[int]:
    """Return token ids as a list. RequestError (a ValueError) for other values."""
    allowed = "a list, or an array of NumPy, JAX or torch, of whole numbers in one dimension"
    todo = "Start a request for each row of ids."
    if isinstance(given, list | tuple | range):
        values = list(given)
        if any(isinstance(one, list | tuple) for one in values):
            raise RequestError("token ids in more than one dimension", allowed, todo)
    else:
        try:
            array = np.asarray(given)
        except (TypeError, ValueError, RuntimeError):
            array = np.zeros(())
        if array.ndim != 1 or array.dtype.kind not in "iu":
            given_text = f"token ids of type {type(given).__name__} with {array.ndim} dimensions"
            raise RequestError(given_text, allowed, todo)
        values = array.tolist()
    if any(isinstance(one, bool) or not isinstance(one, int | np.integer) for one in values):
        raise RequestError(f"token ids {shown(values)}", allowed, "Pass whole numbers.")
    return [int(one) for one in values]


def encode_text(model: InstalledModel, loader: ModelLoader | None, text: str) -> list[int]:
    """Return the token ids of a text by the tokenizer of a loader, or of the installed model."""
    if not isinstance(text, str):
        raise RequestError(f"a text of type {type(text).__name__}", "text", "Pass a str.")
    return model.tokenizer.encode(text) if loader is None else loader.encode(text)


def refuse_empty(what: str) -> NoReturn:
    """Raise RefusedError for a prompt without tokens."""
    raise RefusedError(
        AsStatus.ALLSPARK_EMPTY_REQUEST, what, "at least one token", "Pass a prompt."
    )
