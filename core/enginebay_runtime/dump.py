"""dump_program: writes a compiled step to a folder: its text before and after XLA, and its memory
use.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from enginebay.contracts.cache import CacheLayout

log = logging.getLogger("enginebay_runtime")

MEMORY_FIGURES = (
    "argument_size_in_bytes",
    "output_size_in_bytes",
    "alias_size_in_bytes",
    "temp_size_in_bytes",
    "generated_code_size_in_bytes",
)


def dump_program(
    folder: Path, title: str, layouts: Mapping[str, CacheLayout], lowered: Any, compiled: Any
) -> None:
    """Write NAME.stablehlo.txt, NAME.hlo.txt and NAME.json; NAME is made of the title and the
    cache's size.

    The JSON has the title, the cache size of each group, and XLA's memory analysis in bytes per
    device, null where the platform has none. Aliased bytes count as arguments and as outputs: they
    are the cache, which is updated in place.
    """
    sizes = {name: f"{at.num_pages}x{at.page_size}" for name, at in layouts.items()}
    name = re.sub(
        r"[^a-z0-9]+", "-", " ".join([title, *dict.fromkeys(sizes.values())]).lower()
    ).strip("-")
    (folder / f"{name}.stablehlo.txt").write_text(lowered.as_text(), encoding="utf-8")
    (folder / f"{name}.hlo.txt").write_text(compiled.as_text() or "", encoding="utf-8")
    analysis = compiled.memory_analysis()
    memory = (
        None
        if analysis is None
        else {figure: getattr(analysis, figure) for figure in MEMORY_FIGURES}
    )
    record = {"program": title, "pages": sizes, "memory": memory}
    (folder / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    log.info("described %s in %s", title, folder / name)
