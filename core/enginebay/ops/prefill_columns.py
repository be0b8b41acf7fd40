"""The columns of a prefill's int32 and f32 arrays, which have one row per row of the step."""

from __future__ import annotations

from enginebay.ops.row_columns import FLOATS, INTS
from enginebay.types import MAX_STOP_TOKENS

(
    ROW,
    Q_LEN,
    KV_LEN,
    SAMPLES,
    INDEX,
    KEY_HI,
    KEY_LO,
    MAX_LENGTH,
    PROMPT_LENGTH,
    NUM_LOGPROBS,
    ADAPTER,
    PARAMS,
) = range(12)
DECODES = 2
"""In the column SAMPLES: the row decodes, from the token that it sampled last. 1: the row's prompt
ends in this step.
"""
STOP_IDS = PARAMS + len(INTS)
NUM_INT_COLUMNS = STOP_IDS + MAX_STOP_TOKENS
NUM_FLOAT_COLUMNS = len(FLOATS)
