"""Stored values that transformers derives from generated configurations, so that no torch is needed
to compare with them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

from tests.parity import config_zoo, zoo_reference
from tests.parity.config_zoo import Derived, Generated

FILE = Path(__file__).parent / "derived.json"
NUM_REFUSED = 20


@dataclasses.dataclass(frozen=True)
class Stored:
    """A configuration, and what transformers makes of it: values, or its refusal."""

    generated: Generated
    theirs: Derived | str


def name_of(one: Stored) -> str:
    """The family and the rule, as a test's id."""
    return f"{one.generated.family}-{one.generated.traits['rule']}".replace(" ", "_")


@functools.cache
def read() -> tuple[Stored, ...]:
    """Everything that is stored."""
    rows = json.loads(FILE.read_text(encoding="utf-8"))
    return tuple(
        Stored(
            Generated(**row["generated"]),
            row["theirs"] if isinstance(row["theirs"], str) else Derived.from_json(row["theirs"]),
        )
        for row in rows
    )


def make() -> None:
    """Write the file: the configurations whose logits are compared, and the first ones that
    transformers refuses.
    """
    rows = [_row(index) for index in config_zoo.chosen_for_logits()]
    for index in range(config_zoo.NUM_CONFIGS):
        if sum(isinstance(row["theirs"], str) for row in rows) < NUM_REFUSED:
            row = _row(index)
            rows += [row] if isinstance(row["theirs"], str) else []
    lines = ",\n".join(json.dumps(row) for row in rows)
    FILE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def _row(index: int) -> dict[str, object]:
    one = config_zoo.generate(index)
    theirs = zoo_reference.derived(one)
    kept = theirs.splitlines()[0] if isinstance(theirs, str) else theirs.as_json()
    return {"generated": dataclasses.asdict(one), "theirs": kept}
