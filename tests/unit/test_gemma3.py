"""What the family Gemma 3 reads from config.json."""

from __future__ import annotations

import pytest

from enginebay.errors import CheckpointError
from enginebay_models.gemma3 import family as gemma3
from tests.unit.test_models_families import CONFIG


def test_gemma_3_has_rotary_positions_for_each_kind_of_layer() -> None:
    """Old and new spellings; silence means every sixth layer full, and the published bases."""
    old = {"sliding_window_pattern": 2, "sliding_window": 8, "rope_theta": 5e5}
    old |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 1e3}
    new = {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 8,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
    }
    silent, *both = (
        gemma3.build(CONFIG | fields, dtype="float32").info for fields in ({}, old, new)
    )
    assert both[0] == both[1]
    assert [(g.name, g.num_layers, g.window) for g in both[0].groups] == [
        ("window", 2, 8),
        ("full", 2, None),
    ]
    assert [(g.num_layers, g.window, g.head_dim) for g in silent.groups] == [(4, 4096, 256)]
    assert "theta=10000.0" in silent.constants
    assert silent.attention["window"].scale == 1 / 16
    for wrong in (
        {"use_bidirectional_attention": True},
        {"rope_parameters": {"full_attention": 3}},
    ):
        with pytest.raises(CheckpointError, match=next(iter(wrong))):
            gemma3.build(CONFIG | wrong, dtype="float32")
