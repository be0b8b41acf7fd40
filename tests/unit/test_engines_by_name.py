"""The engines that the program is asked for by name: all give the same text, and "esurge" is the
paged one under its own options.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from enginebay import LLM
from enginebay.errors import ConfigError
from enginebay.plugins.registry import load_registry
from tests.brief import BRIEF
from tests.unit.serving import SIZES

pytestmark = [pytest.mark.xdist_group("llm"), pytest.mark.usefixtures("pooled")]
Run = Callable[..., tuple[int, str, str]]

ENGINES = ("vinference", "oengine", "esurge")
PROMPT = "Once upon a time"


def options_of(**values: Any) -> Any:
    registry = load_registry()
    return registry.options(registry.find("engine", "esurge"), values)


@pytest.mark.long
def test_every_engine_gives_the_same_text(run: Run, config: str) -> None:
    command = ("generate", PROMPT, "--max-tokens", "24", "--config", config)
    results = {name: run(*command, "--engine", name) for name in ENGINES}
    code, text, err = results["vinference"]
    assert (code, err) == (0, "")
    assert len(text) > len(PROMPT) + 24
    assert results == dict.fromkeys(ENGINES, results["vinference"])


@pytest.mark.long
def test_a_file_may_name_esurge_and_give_its_options(run: Run, config: str, tmp_path: Path) -> None:
    sizes = Path(config).read_text(encoding="utf-8")
    command = ("generate", PROMPT, "--max-tokens", "24", "--config")
    expected = run(*command, config, "--engine", "oengine")
    short, section = tmp_path / "short.toml", tmp_path / "section.toml"
    short.write_text('engine = "esurge"\n' + sizes, encoding="utf-8")
    section.write_text(
        sizes + '\n[engine]\nname = "esurge"\nhbm_utilization = 0.5\n', encoding="utf-8"
    )
    assert run(*command, str(short)) == expected
    code, out, _ = run("explain", "--json", "--config", str(section))
    chosen = {choice["setting"]: choice for choice in json.loads(out)["choices"]}["engine"]
    assert (code, chosen["chosen"], chosen["why"]) == (0, "esurge", "chosen by name")


def test_auto_takes_another_engine(run: Run, config: str) -> None:
    _, out, _ = run("explain", "--json", "--config", config)
    engine = {choice["setting"]: choice for choice in json.loads(out)["choices"]}["engine"]
    assert engine["chosen"] == "oengine"
    refused = {one["name"]: one["reason"] for one in engine["refused"]}
    assert refused["vinference"] == "lower priority (-10)"
    assert refused["esurge"] == "lower priority (-20)"


def test_options_are_those_of_esurge_with_its_defaults() -> None:
    options = options_of()
    assert (options.page_size, options.hbm_utilization, options.enable_prefix_caching) == (
        128,
        0.85,
        True,
    )
    paged = options.paged()
    assert (paged.page_size, paged.prefix_caching) == (128, True)
    assert paged.memory_utilization is None, "the paged engine's own default, at most this share"
    assert options_of(hbm_utilization=0.85).paged().memory_utilization == 0.85
    assert (paged.num_pages, paged.cache_bytes) == (None, None)


@pytest.mark.parametrize("size", [{"num_pages": 7}, {"cache_bytes": 1 << 20}])
def test_a_size_by_number_replaces_the_share_of_memory(size: dict[str, int]) -> None:
    paged = options_of(
        **size, reserve_all=True, prefix_ttl_s=2.0, enable_prefix_caching=False
    ).paged()
    assert paged.memory_utilization is None
    assert {name: getattr(paged, name) for name in size} == size
    assert (paged.reserve_all, paged.prefix_ttl_s, paged.prefix_caching) == (True, 2.0, False)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"num_pages": 7, "hbm_utilization": 0.5}, "num_pages and hbm_utilization"),
        ({"num_pages": 7, "cache_bytes": 1 << 20}, "num_pages and cache_bytes"),
        ({"memory_utilization": 0.5}, "memory_utilization"),
        ({"prefix_caching": False}, "prefix_caching"),
        ({"hbm_utilization": 1.5}, "hbm_utilization"),
        ({"page_size": 12}, "page_size"),
    ],
)
def test_other_options_are_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        options_of(**values)


def test_options_reach_the_pages() -> None:
    engine = {"name": "esurge", "page_size": 16, "num_pages": 12, "enable_prefix_caching": False}
    with LLM(BRIEF, engine=engine, **SIZES) as llm:
        shape = llm.engine.sizes.whole["full"]
        assert (shape.page_size, shape.num_pages) == (16, 12)
        assert llm.engine.ledger.groups["full"].store.index is None
