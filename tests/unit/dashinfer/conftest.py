"""Engines of the DashInfer API over fake engines, which are made in milliseconds, and a serialised
model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from enginebay_dashinfer.allspark import (
    ASGenerationConfigBuilder,
    AsModelConfig,
    AsModelRuntimeConfigBuilder,
    AsStatus,
    DashInferModel,
    Engine,
    HuggingFaceModel,
    TargetDevice,
)
from tests.brief import BRIEF

SUCCESS = AsStatus.ALLSPARK_SUCCESS
MAX_LENGTH = 160

Settings = Callable[..., AsModelConfig]


@pytest.fixture(scope="session")
def serialised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a serialised model named "brief"."""
    folder = tmp_path_factory.mktemp("serialised")
    model = HuggingFaceModel(BRIEF, "brief", user_set_data_type="float32")
    model.load_model().serialize_to_path(None, folder).free_model()
    return folder


@pytest.fixture
def loader(serialised: Path) -> DashInferModel:
    """The serialised model."""
    return DashInferModel(serialised, "brief").load_model()


@pytest.fixture
def settings(serialised: Path) -> Settings:
    """Makes settings of the serialised model, with small sizes. `changes` are fields."""

    def make(name: str = "one", **changes: Any) -> AsModelConfig:
        builder = AsModelRuntimeConfigBuilder().model_name(name).model_dir(serialised, "brief")
        builder.compute_unit(TargetDevice.CPU).max_length(MAX_LENGTH).max_batch(4)
        builder.max_prefill_length(16).kv_cache_span_size(16).lora_max_num(0)
        return builder.update_from_dict(changes).build()

    return make


@pytest.fixture
def engine(faked: None) -> Iterator[Engine]:
    """An engine whose models compute nothing; all of them must be idle when a test is over."""
    engine = Engine()
    yield engine
    for name in list(engine.model_names):
        engine.stop_model(name)
        assert engine.release_model(name) is SUCCESS, engine.last_error


@pytest.fixture
def running(engine: Engine, settings: Settings) -> Engine:
    """The same with the running model "one"."""
    assert engine.install_model(settings()) is SUCCESS, engine.last_error
    assert engine.start_model("one") is SUCCESS, engine.last_error
    return engine


def greedy(**fields: Any) -> ASGenerationConfigBuilder:
    """A builder of greedy requests without an end."""
    builder = ASGenerationConfigBuilder(seed=1).temperature(0).early_stopping(False)
    return builder.update(fields)
