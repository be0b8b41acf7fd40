"""Reads the sampling that generation_config.json recommends, as fields of SamplingParams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from enginebay.compose.sampling_defaults import GENERATION_FILE
from enginebay.errors import CheckpointError, RequestError, explain
from enginebay.row_value import FromCheckpoint, declared
from enginebay.types import SamplingParams
from enginebay_models.checkpoint import read_json

FIELD_OF = {
    one.name: field
    for field, one in declared(SamplingParams, FromCheckpoint).items()
    if field != "temperature"
}
"""Fields of transformers' GenerationConfig -> fields of SamplingParams with the same meaning.
`temperature` is not among them, because it counts only together with do_sample.
"""


def read_sampling_defaults(folder: Path) -> dict[str, Any]:
    """Return the fields of SamplingParams whose recommended value is not the default.

    The result is {} without a generation_config.json. As in transformers, `temperature` counts only
    with `do_sample: true`, and its default is then 1.0; without `do_sample: true` sampling is
    greedy. CheckpointError for a value that SamplingParams refuses.
    """
    path = folder / GENERATION_FILE
    if not path.exists():
        return {}
    generation = read_json(path)
    samples = generation.get("do_sample")
    if not isinstance(samples, bool | None):
        raise _wrong(path, f"do_sample = {samples!r}", "true or false")
    values = {
        field: generation[name]
        for name, field in FIELD_OF.items()
        if generation.get(name) is not None
    }
    if samples:
        temperature = generation.get("temperature")
        values["temperature"] = 1.0 if temperature is None else temperature
    return recommended(path, values)


def recommended(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of SamplingParams that differ from its defaults. CheckpointError, which
    names the file, for a value that SamplingParams refuses.
    """
    try:
        params = SamplingParams(**values)
    except RequestError as error:
        raise _wrong(path, str(error), "values that SamplingParams accepts") from None
    usual = SamplingParams()
    return {
        name: getattr(params, name)
        for name in values
        if getattr(params, name) != getattr(usual, name)
    }


def _wrong(path: Path, what: str, allowed: str) -> CheckpointError:
    todo = 'Correct the file, or pass generation_config="none" to ignore its sampling.'
    return CheckpointError(explain(f"{path}: {what}", allowed, todo))
