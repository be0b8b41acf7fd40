"""Conversion of the prompts that a DashInfer engine accepts to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from enginebay.errors import RequestError, shown
from enginebay_dashinfer.generation_config import ASGenerationConfigBuilder
from enginebay_dashinfer.installed import InstalledModel
from enginebay_dashinfer.model_loader import ModelLoader
from enginebay_dashinfer.multimedia import Capsule
from enginebay_dashinfer.statuses import AsStatus, RefusedError


def ids_of_input(inputs: Mapping[str, Any]) -> list[int]:
    """Return the token ids of {"input_ids": ...}, which may also be a DLPack capsule, and may have
    a first dimension of 1. RequestError (a ValueError) for other values.
    """
    if not isinstance(inputs, Mapping) or set(inputs) != {"input_ids"}:
        given_text = f"inputs {shown(inputs)}"
        raise RequestError(given_text, '{"input_ids": token ids}', "Pass such a mapping.")
    given = inputs["input_ids"]
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


def several_texts(given: Sequence[str]) -> list[str]:
    """Return a list of the texts. RefusedError for no texts, RequestError for another value."""
    if not isinstance(given, list | tuple):
        given_text = f"a text of type {type(given).__name__}"
        raise RequestError(given_text, "a text, or a list of texts", "Pass a str or a list.")
    if not given:
        refuse_empty("an empty list of texts")
    return list(given)


def fields_of(builder: ASGenerationConfigBuilder) -> dict[str, Any]:
    """Return the fields that a builder builds. RequestError for another object."""
    if not isinstance(builder, ASGenerationConfigBuilder):
        given = f"a generate_config_builder of type {type(builder).__name__}"
        todo = "Make one, or call create_reference_generation_config_builder() of the loader."
        raise RequestError(given, "an ASGenerationConfigBuilder", todo)
    return builder.build()


def encode_text(model: InstalledModel, loader: ModelLoader | None, text: str) -> list[int]:
    """Return the token ids of a text by the tokenizer of a loader, or of the installed model.
    RequestError for a value that is no text, PromptLengthError for a text that is much too long.
    """
    if not isinstance(text, str):
        raise RequestError(f"a text of type {type(text).__name__}", "text", "Pass a str.")
    if not isinstance(loader, ModelLoader | None):
        given, todo = f"a model of type {type(loader).__name__}", "Pass the loader, or None."
        raise RequestError(given, "a HuggingFaceModel or a DashInferModel", todo)
    longest = model.settings.engine_max_length - 1
    if loader is None:
        return model.tokenizer.encode(text, max_prompt_tokens=longest)
    return loader.encode(text, longest)


def refuse_empty(what: str) -> NoReturn:
    """Raise RefusedError for a prompt without tokens."""
    raise RefusedError(
        AsStatus.ALLSPARK_EMPTY_REQUEST, what, "at least one token", "Pass a prompt."
    )
