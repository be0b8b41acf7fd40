"""A request whose logits have NaN or infinity ends with an error; the other rows go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from enginebay import LLM, SamplingParams
from enginebay.errors import NonFiniteError
from enginebay.serving.observer import Ending, Execution, Observer, Update
from enginebay.types import NOT_FINITE
from enginebay_runtime import local
from enginebay_runtime.launched import LaunchedStep
from tests.brief import DEMO, TINY

BROKEN = 7
"""The token whose embedding is NaN. Its prompts have NaN logits, others have not."""
GOOD, BAD = [3, 5, 9], [3, BROKEN, 9]
SIZES: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 4}
LONG = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


class Counts(Observer):
    """Adds up what steps report."""

    def __init__(self) -> None:
        self.num_not_finite = 0
        self.reasons: list[str] = []

    def updated(self, update: Update) -> None:
        pass

    def executed(self, execution: Execution) -> None:
        self.num_not_finite += execution.num_not_finite

    def ended(self, ending: Ending) -> None:
        self.reasons.append(ending.reason)


def broken_copy(
    folder: Path, tensor: str, row: int | slice, value: float, source: Path | str = TINY
) -> Path:
    folder.mkdir()
    (folder / "config.json").write_bytes(Path(source, "config.json").read_bytes())
    for file in Path(source).glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(Path(source, "model.safetensors"))
    weights[tensor] = weights[tensor].copy()
    weights[tensor][row] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def sound() -> list[int]:
    """The tokens that the unbroken model writes after GOOD."""
    with LLM(TINY, **SIZES) as llm:
        ids = llm.generate(GOOD, LONG)[0].outputs[0].token_ids
    assert BROKEN not in ids
    return list(ids)


@pytest.fixture(
    scope="module", params=["oengine", pytest.param("vinference", marks=pytest.mark.long)]
)
def broken(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[LLM]:
    folder = broken_copy(
        tmp_path_factory.mktemp("nan") / "m", "model.embed_tokens.weight", BROKEN, float("nan")
    )
    with LLM(str(folder), engine=request.param, **SIZES) as llm:
        yield llm


@pytest.mark.parametrize(
    "params",
    [
        LONG,
        pytest.param(
            SamplingParams(max_tokens=4, temperature=1.0, seed=1, logprobs=2),
            marks=pytest.mark.long,
        ),
        pytest.param(
            SamplingParams(max_tokens=4, temperature=0, repetition_penalty=1.2),
            marks=pytest.mark.long,
        ),
    ],
    ids=["greedy", "drawn", "penalised"],
)
def test_a_row_with_nan_ends_with_an_error_that_names_the_step(
    broken: LLM, params: SamplingParams
) -> None:
    with pytest.raises(NonFiniteError, match=r"logits for token 1 .*prefill step") as info:
        broken.generate(BAD, params)
    assert "--verify-weights" in str(info.value)
    assert "float16" not in str(info.value)


@pytest.mark.parametrize(
    ("before", "params"),
    [
        ([], LONG),
        pytest.param(
            [GOOD], SamplingParams(max_tokens=4, temperature=1.0, seed=1), marks=pytest.mark.long
        ),
    ],
    ids=["greedy", "drawn"],
)
def test_a_step_finds_nan_without_returning_its_logits(
    broken: LLM, before: list[list[int]], params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all that steps return beside their state, no array has an axis of the vocabulary."""
    returned: list[Any] = []

    def noting(sampled: Any, step: Any) -> LaunchedStep:
        returned.append(sampled)
        return LaunchedStep(sampled, step)

    monkeypatch.setattr(local, "LaunchedStep", noting)
    for prompt in before:
        broken.generate(prompt, params)
    with pytest.raises(NonFiniteError):
        broken.generate(BAD, params)
    info = broken.engine.parts.info
    sizes = {size for one in jax.tree.leaves(returned) for size in one.shape}
    assert not sizes & {info.vocab_size, info.num_token_ids}
    assert any((np.asarray(one.tokens) == NOT_FINITE).any() for one in returned)


@pytest.mark.long
def test_other_rows_go_on_and_a_freed_row_leaves_no_nan(broken: LLM, sound: list[int]) -> None:
    counts = Counts()
    broken.loop.observers.add(counts)
    streams = [broken.stream(prompt, LONG) for prompt in (GOOD, BAD, GOOD, BAD)]
    for stream in streams[1::2]:
        with pytest.raises(NonFiniteError):
            list(stream)
    for stream in streams[::2]:
        assert [t for chunk in stream for t in chunk.delta_token_ids] == sound
    for _ in range(3):  # in the rows and pages that the broken requests had
        assert list(broken.generate(GOOD, LONG)[0].outputs[0].token_ids) == sound
    broken.loop.observers.remove(counts)
    assert counts.num_not_finite == 2
    assert sorted(counts.reasons) == ["error", "error", *["length"] * 5]


@pytest.mark.long
def test_a_decode_step_is_named(broken: LLM, sound: list[int]) -> None:
    """The broken token is the third one: the fourth has NaN logits."""
    params = SamplingParams(max_tokens=8, temperature=0, logit_bias={BROKEN: 100.0}, min_tokens=8)
    with pytest.raises(NonFiniteError, match=r"logits for token 2 .*decode step"):
        broken.generate(GOOD, params)


@pytest.mark.long
def test_a_guided_row_with_nan_is_no_fault_of_its_constraint(tmp_path: Path) -> None:
    """The mask leaves some NaN logits, and the error does not ask for a simpler grammar."""
    weight = "model.layers.5.mlp.up_proj.weight"
    folder = broken_copy(tmp_path / "m", weight, slice(None), float("nan"), DEMO)
    with (
        LLM(str(folder), processors=["guided"], **SIZES) as llm,
        pytest.raises(NonFiniteError, match=r"logits for token 1 .*prefill step"),
    ):
        llm.generate("One day", SamplingParams(max_tokens=5, choice=("yes", "no")))


@pytest.mark.long
def test_embeddings_are_finite_or_an_error(broken: LLM) -> None:
    assert np.isfinite(broken.embed(GOOD)[0]).all()
    with pytest.raises(NonFiniteError, match="hidden states of request"):
        broken.embed(BAD)


@pytest.mark.long
def test_float16_that_overflows_names_the_wider_dtype(tmp_path: Path) -> None:
    up = "model.layers.0.mlp.up_proj.weight"
    folder = broken_copy(tmp_path / "m", up, slice(None), 60000.0)
    with (
        LLM(str(folder), **{**SIZES, "dtype": "float16"}) as llm,
        pytest.raises(NonFiniteError, match="auto chooses a dtype with a wider range"),
    ):
        llm.generate(GOOD, LONG)
    with LLM(str(folder), **SIZES) as llm:
        assert len(llm.generate(GOOD, LONG)[0].outputs[0].token_ids) == 12
