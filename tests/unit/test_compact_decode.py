"""Decode steps on a compact copy of the rows' cache, as XLA's attention takes them on a CPU: the
tokens of the model.
"""

from __future__ import annotations

import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay.compose.plan import Plan
from enginebay_testing.reference import ReferenceModel
from tests.brief import TINY
from tests.unit.serving import SIZES

pytestmark = [pytest.mark.usefixtures("few_sizes_module"), pytest.mark.xdist_group("compact")]

PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
TOLERANCE = 1e-3
"""Of logits: rounding in f32."""
LENGTHS = (3, 17, 30, 41)
OPTIONS = {"oengine": {"page_size": 8, "num_pages": 60}, "vinference": {}}


def generate(
    engine: str, attention: str, layout: str, prompts: list[list[int]]
) -> tuple[list[list[int]], set[str], Plan]:
    chosen = {"name": engine, "options": OPTIONS[engine]}
    kernels = {"attention": attention}
    choices = SIZES | {"kernels": kernels, "layout": layout, "processors": (), "max_model_len": 256}
    with LLM(TINY, engine=chosen, **choices) as llm:
        outputs = llm.generate(prompts, PARAMS)
        kinds = {key.kind for key in llm.engine.executor.programs}
        return [output.outputs[0].token_ids for output in outputs], kinds, llm.plan


@pytest.mark.long
@pytest.mark.parametrize(
    ("engine", "layout"), [("oengine", "hnd"), ("oengine", "tpu_rpa"), ("vinference", "nhd")]
)
def test_a_compact_copy_changes_no_token(engine: str, layout: str) -> None:
    """Four steps a call cross borders of pages, and what they write is in the cache of the next
    call.
    """
    rng = np.random.default_rng(7)
    prompts = [rng.integers(0, 96, length).tolist() for length in LENGTHS]
    tokens, kinds, plan = generate(engine, "xla", layout, prompts)
    assert kinds == {"prefill", "compact"}
    reference = ReferenceModel(plan)
    for prompt, new in zip(prompts, tokens, strict=True):
        assert reference.first_wrong_token(prompt, new, TOLERANCE) is None
