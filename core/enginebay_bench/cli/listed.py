"""Variants of a configuration by lists: every combination of the listed settings."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

from enginebay.cli.options import flag_values

ONE_EACH = ("engine", "scheduler", "dtype")
"""Flags that take one list here. --attention takes a list too, and may be repeated, each time with
its own list.
"""


def listed_variants(args: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    """Return every combination of the listed settings, named by the settings that differ."""
    given = [(flag, getattr(args, flag)) for flag in ONE_EACH if getattr(args, flag)]
    given += [("attention", text) for text in args.attention]
    lists = [(flag, list(dict.fromkeys(text.split(",")))) for flag, text in given]
    variants = []
    for combination in itertools.product(*(values for _, values in lists)):
        single = argparse.Namespace(**(vars(args) | {"attention": []}))
        for (flag, _), value in zip(lists, combination, strict=True):
            if flag == "attention":
                single.attention.append(value)
            else:
                setattr(single, flag, value)
        named = [
            one for (_, values), one in zip(lists, combination, strict=True) if len(values) > 1
        ]
        if args.dump_step is not None and named:  # variants have programs of the same names
            single.dump_step = str(Path(args.dump_step, "-".join(named).replace("/", "-")))
        variants.append((" ".join(named) or "this configuration", flag_values(single)))
    return variants
