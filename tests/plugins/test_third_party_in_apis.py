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
from enginebay.errors import InputError
from enginebay.plugins.hooks import Declaration
from enginebay.plugins.registry import Entry, Registry, load_registry
from enginebay_dashinfer.allspark import AsModelRuntimeConfigBuilder
from enginebay_esurge import eSurge
from enginebay_oengine import HBMPageManager, PagedAttentionCache, oEngine, open_model
from enginebay_runtime.background import Background
from enginebay_runtime.local import LocalExecutor
from enginebay_schedulers.fcfs import Fcfs
from enginebay_vinference import vInference, vInferencePreCompileConfig
from tests.brief import BRIEF
from tests.plugins.install import EXAMPLES, put, visible
from tests.pool import few_sizes

pytestmark = pytest.mark.xdist_group("third_party_in_apis")

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
SIZES_OF_APIS: dict[str, Any] = {n: x for n, x in SIZES.items() if n != "decode_steps"}
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


def parts_used(tokens: list[list[int]], cache: set[str]) -> set[str]:
    """The parts that answers of these tokens came from, over a cache of these dtypes."""
    shown = {
        "executor": any(isinstance(command, Step) for command in SEEN["commands"]),
        "scheduler": bool(SEEN["decisions"]),
        "sampler": all(row == [SEVEN] * len(row) for row in tokens) and tokens != [],
        "layout": "int8" in cache,
    }
    return {part for part, is_used in shown.items() if is_used}


def used_by_loop(engine: Any, outputs: Sequence[Any]) -> set[str]:
    tokens = [one.outputs[0].token_ids for one in outputs]
    assert [len(row) for row in tokens] == [PARAMS.max_tokens] * len(PROMPTS)
    assert isinstance(engine.executor, Forwarding)
    assert engine.parts.kernels["attention.decode"].endswith("int8_scan")
    return parts_used(tokens, engine.executor.cache_dtypes)


def used_by_llm(parts: dict[str, str], engine: str = "oengine") -> set[str]:
    with LLM(BRIEF, engine=engine, **SIZES, **parts) as llm:
        return used_by_loop(llm.engine, llm.generate(PROMPTS, PARAMS))


def used_by_esurge(parts: dict[str, str]) -> set[str]:
    options: dict[str, Any] = {"page_size": 16, "compile_runner": False, "use_aot_forward": False}
    with eSurge(BRIEF, **options, **SIZES, **parts) as engine:
        return used_by_loop(engine.engine, engine.generate(PROMPTS, PARAMS, use_tqdm=False))


def used_by_oengine(parts: dict[str, str]) -> set[str]:
    model = open_model({"model": BRIEF} | SIZES_OF_APIS | parts)
    metadata = PagedAttentionCache.create_metadata(model, page_size=16, num_pages=9)
    storage, manager = PagedAttentionCache.init_cache(metadata), HBMPageManager(metadata)
    engine = oEngine(model, None, storage, manager, 2, 1, prefill_lengths=[16])
    prefix, first = engine.prefill(
        engine.graphstate, engine.graphothers, np.asarray(PROMPTS[0]), None, len(PROMPTS[0])
    )
    state = engine.insert(prefix, engine.init_decode_state(), 0)
    state, second = engine.decode(engine.graphstate, engine.graphothers, state)
    results = [one.convert_to_numpy().get_result_at_slot(0) for one in (first, second)]
    return parts_used([[int(one.tokens[0, 0]) for one in results]], dtypes(engine.storage))


def used_by_vinference(parts: dict[str, str]) -> set[str]:
    inference = vInference({"model": BRIEF} | SIZES_OF_APIS | parts, None, max_new_tokens=4)
    assert inference.precompile(vInferencePreCompileConfig(1, len(PROMPTS[0])))
    for state in inference.generate(np.asarray(PROMPTS[:1]), sampling_params=PARAMS):
        found = dtypes(state.model_kwargs["past_key_values"])
        tokens = np.asarray(state.sequences)[0, int(state.padded_length) :]
    return parts_used([tokens[: PARAMS.max_tokens].tolist()], found)


def open_for_oengine(parts: dict[str, str]) -> None:
    open_model({"model": BRIEF} | SIZES_OF_APIS | parts)


def open_for_vinference(parts: dict[str, str]) -> None:
    vInference({"model": BRIEF} | SIZES_OF_APIS | parts, None)


def configure_dashinfer(parts: dict[str, str]) -> None:
    AsModelRuntimeConfigBuilder().update_from_dict(parts)


Use = Callable[[dict[str, str]], set[str]]
USERS: dict[str, tuple[Use, dict[str, str]]] = {
    "LLM": (used_by_llm, ALL),
    "LLM on vinference": (functools.partial(used_by_llm, engine="vinference"), ALL),
    "eSurge": (used_by_esurge, ALL),
    "oEngine": (used_by_oengine, CHOSEN),
    "vInference": (used_by_vinference, CHOSEN),
}
"""Of each API, how it serves with parts of a plugin, and the parts that it takes."""

REFUSING: dict[str, tuple[Callable[[dict[str, str]], None], str]] = {
    "oEngine": (open_for_oengine, "{part} = '{name}' for the oEngine API, which would not use it"),
    "vInference": (open_for_vinference, "{part} = '{name}' for vInference, which would not use it"),
    "DashInfer": (configure_dashinfer, "unknown field of a runtime configuration '{part}'"),
}
"""Of each API that does not take every part, how it is configured, and what it answers."""


@pytest.mark.long
@pytest.mark.parametrize("api", USERS)
def test_an_api_uses_each_part_that_it_takes(api: str) -> None:
    use, parts = USERS[api]
    assert use(parts) == set(parts)


@pytest.mark.parametrize(
    ("api", "part"),
    [(api, part) for api in REFUSING for part in ALL if part not in USERS.get(api, ((), ()))[1]],
)
def test_an_api_refuses_each_other_part_by_name(api: str, part: str) -> None:
    configure, message = REFUSING[api]
    with pytest.raises(InputError, match=message.format(part=part, name=ALL[part])):
        configure({part: ALL[part]})


def test_every_documented_api_takes_or_refuses_every_part() -> None:
    documented = {"LLM", "eSurge", "oEngine", "vInference", "DashInfer"}
    assert documented <= {*USERS, *REFUSING}
    assert {api for api in USERS if USERS[api][1] != ALL} <= set(REFUSING)
