"""Writes the tables of sampling parameters in docs/sampling.md and docs/commands.md from the fields
of SamplingParams.

python tools/sampling_page.py docs/sampling.md docs/commands.md
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from enginebay.cli.generate import add_sampling_arguments, scalar_fields
from enginebay.types import ROW_VALUES, SamplingParams
from enginebay.validation import allowed_values

BEGIN, END = "<!-- {}: written by tools/sampling_page.py -->", "<!-- end of {} -->"


def parameters() -> list[str]:
    """Return a row per field: its flag, default, values, meaning, and the stage of sampling that
    reads it.
    """
    parser = argparse.ArgumentParser()
    add_sampling_arguments(parser)
    flags = {action.dest: action.option_strings[-1] for action in parser._actions}
    schema = SamplingParams.model_json_schema()["properties"]
    lines = ["| field | flag | default | values | meaning | stage |", "|---|---|---|---|---|---|"]
    for name, field in SamplingParams.model_fields.items():
        default = field.get_default(call_default_factory=True)
        usual = default if isinstance(default, bool | int | float) else default or None
        cells = (
            f"`{name}`",
            f"`{flags[name]}`" if name in flags else "",
            f"{usual:g}" if isinstance(usual, float) else str(usual).lower(),
            allowed_values(schema[name]),
            str(field.description),
            ROW_VALUES[name].stage if name in ROW_VALUES else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def flags() -> list[str]:
    """Return a row per flag that is made from a field."""
    parser = argparse.ArgumentParser()
    add_sampling_arguments(parser)
    lines = ["| flag | meaning |", "|---|---|"]
    for action in parser._actions:
        if action.dest in scalar_fields():
            what = f" {action.metavar}" if action.metavar else ""
            names = ", ".join(f"`{flag}{what}`" for flag in action.option_strings)
            lines.append(f"| {names} | {str(action.help).replace('%%', '%')} |")
    return lines


def written(text: str) -> str:
    """Return the text of a page with new tables between its markers."""
    for title, table in (("sampling parameters", parameters), ("sampling flags", flags)):
        begin, end = BEGIN.format(title), END.format(title)
        if begin in text:
            before, _, rest = text.partition(begin)
            after = rest.partition(end)[2]
            text = "\n".join([f"{before}{begin}", "", *table(), "", f"{end}{after}"])
    return text


if __name__ == "__main__":
    for page in map(Path, sys.argv[1:]):
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
