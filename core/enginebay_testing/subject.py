"""The engine under test, on a tiny random model, and the prompts and parameters that its checks
share.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from enginebay.compose.composition import make_plan
from enginebay.config import make_config
from enginebay.llm import LLM
from enginebay.registry import load_registry
from enginebay.types import SamplingParams
from enginebay_testing.reference import ReferenceModel
from enginebay_testing.tiny import write_tiny_checkpoint

SIZES: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,  # whole pages of any usual size
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "decode_steps": 4,
    "processors": (),  # they have a suite of their own, and would be in every compiled step
}
"""What checks run with unless they are about other sizes: engines of equal sizes share what they
have compiled.
"""


@dataclasses.dataclass
class EngineSubject:
    """The engine under test: its name and the choices that go with it, all else as small as
    possible.

    `model` None stands for a tiny random model, made for the occasion.
    """

    name: str
    model: str | None = None
    choices: dict[str, Any] = dataclasses.field(default_factory=dict)
    _folder: tempfile.TemporaryDirectory[str] | None = None
    _kept: LLM | None = None
    _reference: ReferenceModel | None = None

    def make(self, **more: Any) -> LLM:
        """A fresh LLM with this engine: for checks of beginnings, and of other sizes."""
        return LLM(**self._choices(more))

    @contextlib.contextmanager
    def shared(self, fresh: LLM | None = None) -> Iterator[LLM]:
        """An LLM of SIZES that is idle and has an empty cache; kept for other checks with what it
        has compiled.

        `fresh` takes the place of the one that was kept. One whose check has failed is closed.
        """
        llm = fresh or self._kept or self.make()
        if self._kept is not None and self._kept is not llm:
            self._kept.close()
        self._kept = None
        try:
            yield llm
            llm.run_on_engine(functools.partial(_begin_again, llm))
        except BaseException:
            llm.close()
            raise
        self._kept = llm

    def _choices(self, more: dict[str, Any]) -> dict[str, Any]:
        fixed = {"model": self._model(), "engine": self.name, "generation_config": "none"}
        return fixed | SIZES | self.choices | more

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
            self._reference = ReferenceModel(make_plan(make_config(self._choices({}))))
        return self._reference


def _begin_again(llm: LLM) -> None:
    """Nothing runs, and nothing is in the cache. An engine that leaks is told by the check that
    made it leak.
    """
    llm.engine.ledger.check()
    assert llm.engine.rows.num_reqs == 0, f"{llm.engine.rows.num_reqs} rows are left"
    llm.engine.drop_arrays()
    llm.engine.make_arrays()
    llm.engine.compilations.forbidden = False


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
