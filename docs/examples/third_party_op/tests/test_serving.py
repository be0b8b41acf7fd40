"""A model that calls the op is served; its kernels can be explained, overridden and shadowed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from enginebay_swiglu import plain

from enginebay import LLM, SamplingParams
from enginebay.cli import main
from enginebay.errors import IncorrectError, InputError

SIZES: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "decode_steps": 2,
    "processors": (),
}
PROMPTS = [[5, 6, 7], [9, 8]]


@pytest.fixture(scope="module")
def llm(gated: Path) -> Iterator[LLM]:
    """An engine whose steps run the chosen kernel, and the other kernel as its shadow."""
    with LLM(str(gated), shadow={"swiglu": "plain@1"}, **SIZES) as llm:
        yield llm


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=6, ignore_eos=True, temperature=0))
    return [output.outputs[0].token_ids for output in outputs]


def twice(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
    return plain.swiglu(x, gate, 2 * up)


def test_a_model_with_the_op_gives_the_tokens_of_the_one_without(llm: LLM, llama: Path) -> None:
    with LLM(str(llama), **SIZES) as reference:
        assert tokens(llm) == tokens(reference)


def test_a_shadow_compares_the_kernels_on_live_steps(llm: LLM) -> None:
    tokens(llm)
    report = llm.shadow_report()
    assert report is not None
    assert (report.op, report.name, report.error) == ("swiglu", "plain", None)
    decode = next(phase for phase in report.phases if phase.phase == "decode")
    assert decode.chosen == "blocks"
    assert decode.num_compared == decode.num_steps > 0
    assert decode.candidate_s > 0
    calls = [layer for layer in report.layers if layer.phase == "decode"]
    assert [call.layer for call in calls] == [0, 1], "one call for each layer"
    assert all(call.relative < 1e-5 and call.num_tokens for call in calls)


def test_a_kernel_given_by_hand_is_checked_and_used(llm: LLM) -> None:
    expected = tokens(llm)
    with llm.override(swiglu=plain.swiglu):
        assert llm.plan.kernels.names["swiglu"] == "swiglu"
        assert tokens(llm) == expected
    with pytest.raises(IncorrectError, match=r"swiglu of 5: out\[0\] is off by"):
        llm.override(swiglu=twice).__enter__()
    with pytest.raises(InputError, match="calls are swiglu"):
        llm.override(swiglu=lambda x: x).__enter__()


def test_explain_says_which_kernel_serves_and_why(
    gated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "--model", str(gated), "--json"]) == 0
    choices = {c["setting"]: c for c in json.loads(capsys.readouterr().out)["choices"]}
    assert choices["kernels.swiglu"]["chosen"] == "blocks"
    assert choices["kernels.swiglu"]["refused"] == [
        {"name": "plain", "reason": "lower priority (0)"}
    ]
