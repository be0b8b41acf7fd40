"""The engine under test, on a tiny random model, and the prompts and parameters that its checks share."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from enginebay.llm import LLM
from enginebay.registry import load_registry
from enginebay.testing.reference import ReferenceModel
from enginebay.testing.tiny import write_tiny_checkpoint
from enginebay.types import SamplingParams


@dataclasses.dataclass
class Subject:
    """The engine under test: its name and the choices that go with it, all else as small as possible.

    `model` None stands for a tiny random model, made for the occasion.
    """

    name: str
    model: str | None = None
    choices: dict[str, Any] = dataclasses.field(default_factory=dict)
    _folder: tempfile.TemporaryDirectory[str] | None = None
    _reference: ReferenceModel | None = None

    def make(self, **more: Any) -> LLM:
        """A fresh LLM with this engine."""
        fixed: dict[str, Any] = {
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "processors": (),  # they have a suite of their own, and would be in every program that warmup() compiles
        }
        return LLM(self._model(), engine=self.name, **(fixed | self.choices | more))

    def _model(self) -> str:
        if self.model is not None:
            return self.model
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="enginebay-")
            write_tiny_checkpoint(Path(self._folder.name), load_registry())
        return self._folder.name

    @property
    def vocab_size(self) -> int:
        """Of the model."""
        return self.reference().plan.model.info.vocab_size

    def reference(self) -> ReferenceModel:
        """The model without the engine; made once."""
        if self._reference is None:
            with self.make() as llm:
                self._reference = ReferenceModel(llm.plan)
        return self._reference


def prompts_of(vocab_size: int, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths."""
    rng = np.random.default_rng(seed)
    return [[int(t) for t in rng.integers(0, vocab_size, n)] for n in lengths]


LENGTHS = (1, 7, 16, 33, 90, 150)


def generate(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """Token ids of the first completion of each prompt."""
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params)]


def greedy(max_tokens: int = 24) -> SamplingParams:
    """Greedy and never ended by an end-of-sequence token."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def seeded(max_tokens: int = 24) -> SamplingParams:
    """Sampled with a seed."""
    return SamplingParams(
        max_tokens=max_tokens, temperature=0.9, top_k=40, top_p=0.95, seed=11, ignore_eos=True
    )


PENALTIES = ((0.7, 0.4, 1.4), (1.5, 0.0, 1.0), (0.0, 1.1, 1.0), (0.0, 0.0, 1.8), (-0.5, -0.1, 0.8))
"""Presence, frequency and repetition: all, each alone, and what asks for more of the same."""


def penalised(max_tokens: int = 24, kind: int = 0) -> SamplingParams:
    """Greedy, with the penalties of a kind."""
    presence, frequency, repetition = PENALTIES[kind % len(PENALTIES)]
    return SamplingParams(
        max_tokens=max_tokens,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        ignore_eos=True,
    )
