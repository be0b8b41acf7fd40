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
from enginebay.plugins.registry import load_registry
from enginebay.serving import LLM
from enginebay.types import SamplingParams
from enginebay_testing.reference import ReferenceModel
from enginebay_testing.tiny import write_tiny_checkpoint

SIZES: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,  # a multiple of all usual page sizes
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "decode_steps": 4,
    "processors": (),  # they have their own suite, and would be part of every compiled step
}
"""Settings of all checks except those about other sizes: engines of equal sizes share compiled
programs.
"""


@dataclasses.dataclass
class EngineSubject:
    """The engine under test: its name and its settings; everything else is as small as possible.

    `model` None means a tiny random model, which is made on first use.
    """

    name: str
    model: str | None = None
    choices: dict[str, Any] = dataclasses.field(default_factory=dict)
    _folder: tempfile.TemporaryDirectory[str] | None = None
    _kept: LLM | None = None
    _reference: ReferenceModel | None = None

    def make(self, **more: Any) -> LLM:
        """Make a new LLM with this engine, for checks that need other sizes or a fresh engine."""
        return LLM(**self._choices(more))

    @contextlib.contextmanager
    def shared(self, fresh: LLM | None = None) -> Iterator[LLM]:
        """Yield an idle LLM of SIZES with an empty cache; it is kept, with its programs, for other
        checks.

        `fresh` replaces the kept LLM. An LLM whose check fails is closed.
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
        """Return the vocabulary size of the model."""
        return self.reference().plan.model.info.num_token_ids

    def reference(self) -> ReferenceModel:
        """Return the model without the engine; made once."""
        if self._reference is None:
            self._reference = ReferenceModel(make_plan(make_config(self._choices({}))))
        return self._reference


def _begin_again(llm: LLM) -> None:
    """Check that nothing runs, and empty the cache. This fails in the check that made the engine
    leak.
    """
    llm.engine.ledger.check()
    assert llm.engine.rows.num_reqs == 0, f"{llm.engine.rows.num_reqs} rows are still in use"
    llm.engine.drop_arrays()
    llm.engine.make_arrays()
    llm.engine.compilations.forbidden = False


def random_prompts(vocab_size: int, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Return random prompts of these lengths."""
    rng = np.random.default_rng(seed)
    return [[int(t) for t in rng.integers(0, vocab_size, n)] for n in lengths]


LENGTHS = (1, 7, 16, 33, 90, 150)


def generate(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """Return the token ids of the first completion of each prompt."""
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params)]


def greedy(max_tokens: int = 24) -> SamplingParams:
    """Return greedy parameters that ignore end-of-sequence tokens."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def seeded(max_tokens: int = 24) -> SamplingParams:
    """Return parameters for sampling with a seed."""
    return SamplingParams(
        max_tokens=max_tokens, temperature=0.9, top_k=40, top_p=0.95, seed=11, ignore_eos=True
    )


PENALTIES = ((0.7, 0.4, 1.4), (1.5, 0.0, 1.0), (0.0, 1.1, 1.0), (0.0, 0.0, 1.8), (-0.5, -0.1, 0.8))
"""Presence, frequency and repetition penalties: all, each alone, and negative ones."""


def penalty_params(max_tokens: int = 24, kind: int = 0) -> SamplingParams:
    """Return greedy parameters with the penalties of a kind."""
    presence, frequency, repetition = PENALTIES[kind % len(PENALTIES)]
    return SamplingParams(
        max_tokens=max_tokens,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        ignore_eos=True,
    )
