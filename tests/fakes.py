"""Puts the fake engine in the place of each built-in engine.

Tests of the loop compose it alone; other tests use it behind LLM, eSurge and vInference.
"""

from __future__ import annotations

import dataclasses
import importlib
import time
from typing import Any

import numpy as np
import pytest

from enginebay.compose.composition import Composed, build, make_plan
from enginebay.config import EngineConfig
from enginebay.contracts.executor import EngineParts
from enginebay.types import FrozenSampling, Request, SamplingParams
from enginebay_contiguous.engine import VInferenceOptions
from enginebay_contiguous.ledger import SlotLedger
from enginebay_esurge.engine_options import ESurgeOptions
from enginebay_paged.engine import make_ledger
from enginebay_paged.options import PagedOptions
from enginebay_paged.pools import make_pools
from enginebay_paged.tiers import make_tiers
from enginebay_runtime.rows import RowTable
from tests.brief import BRIEF
from tests.fake_engine import NUM_SPECIAL, FakeEngine, next_token

DEFAULT_NUM_PAGES = 65
SIZES: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "decode_steps": 4,
}
VOCAB_SIZE = 2048
NAMING_ENGINES = (
    "enginebay_esurge.engine",
    "enginebay_esurge.weights",
    "enginebay_oengine.opened_model",
    "enginebay_vinference.state_steps",
    "enginebay_vinference.loaded_model",
)
"""Modules that import an engine's class.

`install` imports them first: a module imported later would keep the fake class for the whole run.
"""


def _page_sizes(parts: EngineParts, page_size: int) -> list[int]:
    info, longest = parts.model.info, parts.config.max_model_len
    assert longest is not None
    return [page_size] * len(info.groups) + [longest] * len(info.states)


def _rows(parts: EngineParts, page_size: int) -> RowTable:
    config = parts.config
    assert config.max_model_len is not None
    sizes = (config.max_num_seqs, config.max_model_len, config.max_num_batched_tokens)
    return RowTable(*sizes, parts.model.info.vocab_size, _page_sizes(parts, page_size))


def fake_paged(parts: EngineParts, options: PagedOptions) -> FakeEngine:
    """Replaces `enginebay_paged.engine.make_engine`; uses the real page ledger."""
    rows, num_pages = _rows(parts, options.page_size), options.num_pages or DEFAULT_NUM_PAGES
    pools = make_pools(parts.config, options.page_size)
    shapes = pools.shapes(num_pages, parts.model.info.cache_groups, parts.config.max_num_seqs)
    tiers = make_tiers(parts, options, shapes)
    ledger = make_ledger(parts, options, shapes, rows.page_tables, tiers)
    counts = {name: shape.num_pages for name, shape in shapes.items()}
    engine = FakeEngine(rows, ledger, counts, ledger.forget)
    engine.adapters = parts.adapters
    if parts.adapters is not None:
        parts.adapters.write = engine.write_slot
    return engine


def fake_esurge(parts: EngineParts, options: ESurgeOptions) -> FakeEngine:
    """Replaces `enginebay_esurge.engine.make_engine`."""
    return fake_paged(parts, options.paged())


def fake_slots(parts: EngineParts, options: VInferenceOptions) -> FakeEngine:
    """Replaces `enginebay_contiguous.engine.make_engine`; uses the real slot ledger."""
    assert parts.config.max_model_len is not None
    rows = _rows(parts, parts.config.max_model_len)
    groups = [group.name for group in parts.model.info.groups]
    ledger = SlotLedger(rows.max_num_reqs, rows.max_model_len, groups, rows.page_tables)
    return FakeEngine(rows, ledger, dict.fromkeys(groups, rows.max_num_reqs))


def install(patch: pytest.MonkeyPatch) -> None:
    """Make every engine that is composed from now on a fake engine, whatever its name."""
    for module in NAMING_ENGINES:
        importlib.import_module(module)
    patch.setattr("enginebay_paged.engine.make_engine", fake_paged)
    patch.setattr("enginebay_esurge.engine.make_engine", fake_esurge)
    patch.setattr("enginebay_contiguous.engine.make_engine", fake_slots)


def is_installed() -> bool:
    """Whether an engine that is composed now is a fake engine."""
    return importlib.import_module("enginebay_paged.engine").make_engine is fake_paged


def compose_fake(
    name: str = "oengine", options: dict[str, Any] | None = None, **choices: Any
) -> Composed:
    """Compose the first layers of the demo model with a fake engine; all other parts are real."""
    engine: Any = {"name": name, **(options or {})}
    config = EngineConfig(
        **({"model": BRIEF, "processors": (), "engine": engine} | SIZES | choices)
    )
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        return build(make_plan(config))


def sampling_of(max_tokens: int, **fields: Any) -> FrozenSampling:
    """`fields` are those of FrozenSampling or of SamplingParams."""
    own = {field.name for field in dataclasses.fields(FrozenSampling)}
    params = SamplingParams(**{n: v for n, v in fields.items() if n not in own})
    return FrozenSampling(max_tokens, params, **{n: v for n, v in fields.items() if n in own})


def make_request(
    name: str, length: int = 5, max_tokens: int = 12, *, temperature: float = 0.0, **fields: Any
) -> Request:
    """A request whose prompt depends on name and length.

    `fields` are fields of Request or of FrozenSampling.
    """
    seed = sum(map(ord, name))
    prompt = np.random.default_rng(seed).integers(NUM_SPECIAL, VOCAB_SIZE, length).astype(np.int32)
    known = {field.name for field in dataclasses.fields(Request)}
    sampling = sampling_of(
        max_tokens,
        temperature=temperature,
        **{n: v for n, v in fields.items() if n not in known},
    )
    request = Request(name, prompt, sampling, (seed, 7), time.monotonic())
    return dataclasses.replace(request, **{n: v for n, v in fields.items() if n in known})


def expected_tokens(request: Request, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """All tokens that the fake engine generates for a request, its stop token included."""
    prompt, sampling = request.prompt_token_ids.tolist(), request.sampling
    new: list[int] = []
    while len(new) < sampling.max_tokens and not {*new[-1:]} & {*sampling.stop_token_ids}:
        new.append(next_token(np.asarray(prompt + new, np.int32), request, vocab_size))
    return new
