"""The rows of the table of sampling parameters, made from the fields of SamplingParams."""

from __future__ import annotations

import argparse

from enginebay.cli.generate import add_sampling_arguments
from enginebay.row_value import FromCheckpoint, declared
from enginebay.types import ROW_VALUES, SamplingParams
from enginebay.validation import allowed_values
from enginebay_server.sampling_fields import HTTP_NAMES


def parameters() -> list[str]:
    """Return a row per field: its flag, its names in requests and checkpoints, default, values,
    meaning, and the stage of sampling that reads it.
    """
    parser = argparse.ArgumentParser()
    add_sampling_arguments(parser)
    flags = {action.dest: action.option_strings[-1] for action in parser._actions}
    schema = SamplingParams.model_json_schema()["properties"]
    in_files = declared(SamplingParams, FromCheckpoint)
    columns = ("field", "flag", "in requests to the server", "in generation_config.json")
    columns += ("default", "values", "meaning", "stage")
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for name, field in SamplingParams.model_fields.items():
        default = field.get_default(call_default_factory=True)
        usual = default if isinstance(default, bool | int | float) else default or None
        cells = (
            f"`{name}`",
            f"`{flags[name]}`" if name in flags else "",
            f"`{HTTP_NAMES[name]}`" if name in HTTP_NAMES else "",
            f"`{in_files[name].name}`" if name in in_files else "",
            f"{usual:g}" if isinstance(usual, float) else str(usual).lower(),
            allowed_values(schema[name]),
            str(field.description),
            ROW_VALUES[name].stage if name in ROW_VALUES else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines
