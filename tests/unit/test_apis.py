"""What the documented APIs share: configurations, special tokens, and values stored as JSON."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Mapping
from typing import Any, Self

import jax.numpy as jnp
import numpy as np
import pytest

from enginebay import EngineConfig
from enginebay.errors import ConfigError, InputError
from enginebay_shared.opening import config_of, eos_token_ids, find_tokenizer
from enginebay_shared.stored import Storage


@pytest.mark.parametrize(
    "model", ["demo", {"model": "demo"}, EngineConfig(model="demo"), {"engine": "oengine"}]
)
def test_a_configuration_gets_the_engine_that_it_leaves_open(model: Any) -> None:
    config = config_of(model, "oengine")
    assert (config.model, config.engine.name) == ("demo", "oengine")


def test_another_engine_and_another_tokenizer_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine = 'vinference'\. Allowed: oengine"):
        config_of({"engine": "vinference"}, "oengine")
    with pytest.raises(ConfigError, match="a processor of type float"):
        find_tokenizer(0.5, plan=None)  # type: ignore[arg-type]


def test_ends_of_sequence_are_the_tokenizers_and_the_others_each_once() -> None:
    tokenizer = types.SimpleNamespace(eos_token_id=5)
    assert eos_token_ids(tokenizer, [7, 5], None, 9) == [5, 7, 9]
    assert eos_token_ids(object()) == []
    with pytest.raises(ConfigError, match="eos_token_id = '</s>'"):
        eos_token_ids(tokenizer, "</s>")


@dataclasses.dataclass(frozen=True)
class Size:
    """A record of an API."""

    rows: int

    def to_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return cls(**data)


STORAGE = Storage("a test's values", {"$size": Size})


def test_what_is_stored_comes_back_as_it_was() -> None:
    value = {"of": {1: (True, None)}, "sizes": [Size(3)], "ids": {4, 2}, "least": -np.inf}
    arrays = {"host": np.arange(3, dtype=np.int8), "device": jnp.ones(2, jnp.bfloat16)}
    stored = json.loads(json.dumps(STORAGE.to_plain(value | arrays), allow_nan=False))
    back = STORAGE.from_plain(stored)
    assert {name: back[name] for name in value} == value
    for name, array in arrays.items():
        assert type(back[name]) is type(array)
        assert back[name].dtype == array.dtype
        np.testing.assert_array_equal(back[name], array)


def test_what_cannot_be_stored_or_read_is_refused() -> None:
    with pytest.raises(InputError, match="type Size in values to be stored"):
        Storage("values").to_plain({"a": [Size(1)]})
    for plain in ({"$size": {"cols": 1}}, {"$nothing": 1}, {"$array": {}}, {"$float": "x"}):
        with pytest.raises(InputError, match="a test's values as stored"):
            STORAGE.from_plain([plain])
