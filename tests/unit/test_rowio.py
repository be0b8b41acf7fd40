"""Rows that are taken out of an engine and put into another one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from enginebay.compose.composition import make_plan
from enginebay.config import EngineConfig
from enginebay.contracts.commands import Put
from enginebay.contracts.engine import RowState
from enginebay.errors import InputError
from enginebay_runtime.row_io import put_row
from tests.brief import LEAST

CONTEXT = 64
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
ROPES: dict[str, Any] = {
    "dynamic": DYNAMIC,
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": CONTEXT},
}


def write(folder: Path, rope: dict[str, Any]) -> str:
    """A copy of the smallest model whose rotary frequencies depend on max_model_len."""
    shutil.copytree(LEAST, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if rope["rope_type"] == "longrope":
        rope = rope | {"short_factor": [1.0] * (width // 2), "long_factor": [4.0] * (width // 2)}
    longest = CONTEXT if rope["rope_type"] == "dynamic" else 4 * CONTEXT
    config |= {"rope_scaling": rope, "max_position_embeddings": longest}
    config.pop("rope_parameters", None)
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize("kind", ROPES)
def test_a_row_does_not_cross_the_border_of_rotary_frequencies(tmp_path: Path, kind: str) -> None:
    model = write(tmp_path / kind, ROPES[kind])

    def constants(max_model_len: int) -> str:
        plan = make_plan(EngineConfig(model=model, max_model_len=max_model_len, max_num_seqs=1))
        return plan.model.info.constants

    short, shorter, long = constants(CONTEXT), constants(CONTEXT // 2), constants(4 * CONTEXT)
    assert short == shorter
    none = np.zeros(0, np.int32)
    row = RowState(none, 0, 0, {}, {}, constants=short)
    runner: Any = SimpleNamespace(info=SimpleNamespace(constants=long))
    with pytest.raises(InputError, match="with the same max_model_len"):
        put_row(runner, SimpleNamespace(), Put(0, {}, row))
