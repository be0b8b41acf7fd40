"""MPT: the fields of its config.json, and its slopes by distance."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from enginebay.errors import CheckpointError, ConfigError
from enginebay_models.alibi import slopes_of
from enginebay_models.mpt import family as mpt

MPT: dict[str, Any] = {"vocab_size": 32, "d_model": 24, "n_heads": 3, "n_layers": 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_heads": 5}, "d_model = 24. Allowed: a multiple of n_heads = 5"),
        ({"hidden_size": 32}, "hidden_size = 32. Allowed: d_model, which is 24"),
        ({"no_bias": False}, "no_bias = False. Allowed: True, or absent"),
        ({"expansion_ratio": 2}, "expansion_ratio = 2. Allowed: 4, or absent"),
        ({"attn_config": {"alibi": False}}, "attn_config.alibi = False. Allowed: True, or absent"),
        ({"attn_config": {"prefix_lm": True}}, "attn_config.prefix_lm = True. Allowed: False"),
        ({"attn_config": {"clip_qkv": -1}}, "attn_config.clip_qkv = -1. Allowed: a positive"),
        ({"attn_config": 3}, "attn_config = 3. Allowed: an object, or absent"),
    ],
)
def test_mpt_refuses_what_it_does_not_serve(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        mpt.build(MPT | changes, dtype="float32")


def test_mpt_has_slopes_for_any_number_of_heads_and_shards_that_divide_them() -> None:
    np.testing.assert_allclose(slopes_of(4), [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])
    np.testing.assert_allclose(slopes_of(3), [2.0**-4, 2.0**-8, 2.0**-2])
    np.testing.assert_allclose(slopes_of(1), [2.0**-8])
    usual = {"vocab_size": 32, "hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 1}
    assert mpt.build(usual, dtype="float32").info == mpt.build(MPT, dtype="float32").info
    info = mpt.build(MPT | {"max_seq_len": 99}, dtype="float32").info
    assert (info.max_model_len, info.attention["full"].inputs) == (99, ("slopes",))
    with pytest.raises(ConfigError, match="2 shards for 3 heads"):
        mpt.build(MPT, dtype="float32", num_shards=2)
