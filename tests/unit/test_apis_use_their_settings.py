"""The APIs with steps of their own refuse the parts of a configuration that they would not use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from enginebay.errors import ConfigError
from enginebay_oengine.opened_model import open_model
from enginebay_vinference.loaded_model import make_loaded_model

APIS: dict[str, Callable[[Any], Any]] = {
    "oengine": open_model,
    "vinference": make_loaded_model,
}


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    ("setting", "value"),
    [("scheduler", "priority"), ("proposer", "ngram"), ("executor", "mine:Executor")],
)
def test_a_part_that_an_api_would_not_use_is_refused_by_name(
    api: str, setting: str, value: str
) -> None:
    with pytest.raises(ConfigError, match=f"{setting} = {value!r} for .*would not use it"):
        APIS[api]({"model": "demo", setting: value})


def test_usual_parts_may_be_named() -> None:
    usual = {"scheduler": "fcfs", "proposer": "none", "executor": "local"}
    opened = open_model({"model": "demo", "max_model_len": 64, **usual})
    assert opened.plan.config.scheduler.name == "fcfs"
