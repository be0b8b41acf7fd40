"""The paged engine on a CPU with every Pallas kernel interpreted: the tokens are those of the
kernels in plain JAX.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from enginebay import LLM, SamplingParams
from enginebay.plugins.registry import load_registry
from enginebay_testing.tiny import write_tiny_checkpoint

SIZES: dict[str, Any] = {
    "platform": "cpu",
    "dtype": "float32",
    "engine": {"name": "oengine", "page_size": 16, "num_pages": 9},
    "max_model_len": 48,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "decode_steps": 2,
}

OPS = ("attention", "rms_norm", "sample")  # attention writes the cache itself
PALLAS: dict[str, Any] = dict.fromkeys(OPS, "pallas")
FLASH = {"attention": {"decode": "pallas", "prefill": "pallas_flash", "mixed": "pallas"}}

GREEDY = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=3, temperature=0.9, top_k=20, top_p=0.8, seed=5, ignore_eos=True)
PROMPTS = [list(range(5, 16)), [7, 3, 9]]


def tokens_of(folder: Path, **choices: Any) -> list[Any]:
    """Tokens of two prompts of unequal lengths, greedy and drawn; and how each kernel was
    chosen.
    """
    with LLM(str(folder), **SIZES, **choices) as llm:
        outputs = [
            [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
            for params in (GREEDY, SEEDED)
        ]
        return [outputs, llm.config.kernels]


@pytest.mark.matrix
def test_tokens_are_those_of_plain_jax(tmp_path: Path) -> None:
    """Prompts by flash attention, whatever follows by the paged kernel; norms and draws by Pallas
    too.
    """
    folder = write_tiny_checkpoint(tmp_path / "tiny", load_registry())
    wanted, _ = tokens_of(folder, kernels=dict.fromkeys(OPS, "xla"))
    got, kernels = tokens_of(folder, interpret=True, kernels=PALLAS | FLASH)
    assert got == wanted
    assert kernels["attention"].prefill == "pallas_flash"
