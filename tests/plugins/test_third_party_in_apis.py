"""Each API that takes a configuration uses a plugin's executor, scheduler, sampler and layout, or
refuses the part by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay.compose import composition
from enginebay.contracts.commands import ExecutorCommand, Step
from enginebay.contracts.executor import EngineParts, Executor, Report
from enginebay.contracts.sampler import SamplingState
from enginebay.contracts.scheduler import Decision, Scheduler, SchedulerView
from enginebay.contracts.step_key import StepKey, StepNeeds
from enginebay.errors import ConfigError
from enginebay.plugins.hooks import Declaration
from enginebay.plugins.registry import Entry, Registry, load_registry
from enginebay_esurge import eSurge
from enginebay_oengine import HBMPageManager, PagedAttentionCache, oEngine, open_model
from enginebay_runtime.background import Background
from enginebay_runtime.local import LocalExecutor
from enginebay_schedulers.fcfs import Fcfs
from enginebay_vinference import vInference, vInferencePreCompileConfig
from tests.brief import BRIEF
from tests.plugins.install import EXAMPLES, put, visible
from tests.pool import few_sizes

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("third_party_in_apis")]

Result = TypeVar("Result")
Stranger = dict[str, list[Any]]
SEVEN, LAYOUT = 7, "int8_heads"
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8, 9], [11, 12]]
SIZES: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "decode_steps": 1,
    "processors": (),
}
CHOSEN = {"sampler": "sevens", "layout": LAYOUT}
ALL = CHOSEN | {"executor": f"{__name__}:Forwarding", "scheduler": "counting"}
SEEN: Stranger = {"commands": [], "decisions": []}


def sevens(logits: jax.Array, state: SamplingState) -> jax.Array:
    """A sampler that returns one token."""
    return jnp.full(logits.shape[:1], SEVEN, jnp.int32)


class Counting(Scheduler):
    """First come, first served, and notes its decisions."""

    def __init__(self) -> None:
        self._inner = Fcfs()

    def initial_state(self) -> None:
        """Return None."""

    def decide(self, view: SchedulerView, state: None) -> tuple[Decision, None]:
        decision, _ = self._inner.decide(view, state)
        SEEN["decisions"].append(decision)
        return decision, None


class Forwarding(Executor):
    """Notes the commands, and lets another executor run them."""

    def __init__(self, parts: EngineParts) -> None:
        self._inner = LocalExecutor(parts)
        self.compilations = self._inner.compilations

    def run(self, command: ExecutorCommand[Result]) -> Result:
        SEEN["commands"].append(command)
        return self._inner.run(command)

    def swap(self, parts: EngineParts) -> Callable[[], None]:
        return self._inner.swap(parts)

    def choose(self, key: StepKey, need: StepNeeds) -> StepKey:
        return self._inner.choose(key, need)

    def compile_all(self, keys: Sequence[StepKey], progress: Report | None, *, copies: bool) -> int:
        return self._inner.compile_all(keys, progress, copies=copies)

    def compile_first(
        self, keys: Sequence[StepKey], progress: Report | None, *, copies: bool
    ) -> Background:
        return self._inner.compile_first(keys, progress, copies=copies)

    def close(self) -> None:
        self._inner.close()

    @property
    def cache_dtypes(self) -> set[str]:
        """The dtypes of the arrays that the device holds."""
        return dtypes(self._inner.state)


def dtypes(arrays: Any) -> set[str]:
    return {str(one.dtype) for one in jax.tree.leaves(arrays)}


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """The parts of the example's layout, and those of this file."""
    with visible(put(EXAMPLES / "third_party_layout", tmp_path_factory.mktemp("site"))):
        declared = [
            Declaration("scheduler", "counting", f"{__name__}:Counting"),
            Declaration("sampler", "sevens", f"{__name__}:sevens"),
        ]
        added = [
            Entry(d.kind, d.name, "third_party", "1", "third_party", declaration=d)
            for d in declared
        ]
        yield Registry([*load_registry().entries, *added])


@pytest.fixture(autouse=True)
def plugin_parts(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(composition, "load_registry", lambda: registry)
    for seen in SEEN.values():
        seen.clear()
    with few_sizes():
        yield


def assert_all_were_used(engine: Any, tokens: list[list[int]]) -> None:
    assert tokens == [[SEVEN] * 4] * 2, "the sampler's"
    assert isinstance(engine.executor, Forwarding)
    assert any(isinstance(command, Step) for command in SEEN["commands"])
    assert SEEN["decisions"], "the scheduler's"
    assert "int8" in engine.executor.cache_dtypes, "the layout's codes"
    assert engine.parts.kernels["attention.decode"].endswith("int8_scan")


@pytest.mark.parametrize("engine", ["oengine", "vinference"])
def test_llm_uses_every_part(engine: str) -> None:
    with LLM(BRIEF, engine=engine, **SIZES, **ALL) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        assert_all_were_used(llm.engine, [one.outputs[0].token_ids for one in outputs])


def test_esurge_uses_every_part() -> None:
    options: dict[str, Any] = {"page_size": 16, "compile_runner": False, "use_aot_forward": False}
    with eSurge(BRIEF, **options, **SIZES, **ALL) as engine:
        outputs = engine.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert_all_were_used(engine.engine, [one.outputs[0].token_ids for one in outputs])


def test_oengine_uses_sampler_and_layout() -> None:
    model = open_model({"model": BRIEF} | SIZES | CHOSEN)
    metadata = PagedAttentionCache.create_metadata(model, page_size=16, num_pages=9)
    storage, manager = PagedAttentionCache.init_cache(metadata), HBMPageManager(metadata)
    engine = oEngine(model, None, storage, manager, 2, 1, prefill_lengths=[16])
    prefix, first = engine.prefill(
        engine.graphstate, engine.graphothers, np.asarray(PROMPTS[0]), None, len(PROMPTS[0])
    )
    state = engine.insert(prefix, engine.init_decode_state(), 0)
    state, second = engine.decode(engine.graphstate, engine.graphothers, state)
    for result in (first, second):
        assert result.convert_to_numpy().get_result_at_slot(0).tokens[0, 0] == SEVEN
    assert "int8" in dtypes(engine.storage)


def test_vinference_uses_sampler_and_layout() -> None:
    inference = vInference({"model": BRIEF} | SIZES | CHOSEN, None, max_new_tokens=4)
    assert inference.precompile(vInferencePreCompileConfig(1, len(PROMPTS[0])))
    for state in inference.generate(np.asarray(PROMPTS[:1]), sampling_params=PARAMS):
        found = dtypes(state.model_kwargs["past_key_values"])
        tokens = np.asarray(state.sequences)[0, int(state.padded_length) :]
    assert tokens[: PARAMS.max_tokens].tolist() == [SEVEN] * 4
    assert "int8" in found


@pytest.mark.parametrize("part", ["executor", "scheduler"])
@pytest.mark.parametrize("make", [open_model, functools.partial(vInference, processor_class=None)])
def test_apis_with_steps_of_their_own_refuse_the_others_by_name(
    make: Callable[[Any], Any], part: str
) -> None:
    with pytest.raises(ConfigError, match=f"{part} = '{ALL[part]}' for .*would not use it"):
        make({"model": BRIEF} | SIZES | {part: ALL[part]})
