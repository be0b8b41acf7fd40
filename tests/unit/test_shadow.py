"""Shadow mode: what it reports, and that nothing it runs can change a token or a bit of the
cache.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from enginebay import LLM
from enginebay.compose.shadowing import choose_shadow
from enginebay.config import EngineConfig, make_config
from enginebay.errors import ConfigError, UnknownNameError, UnsupportedError
from enginebay.shadow_report import ShadowReport
from enginebay_runtime.call_trace import CallTrace
from enginebay_runtime.shadow import Shadow
from tests.brief import BRIEF
from tests.unit.serving import HOT, SIZES, with_

pytestmark = pytest.mark.xdist_group("llm")
HERE = "tests.unit.unregistered"
PROMPTS = ["Once upon a time", "The fox " * 20]


@pytest.fixture(scope="module")
def contiguous_llm(pooled_module: None) -> Iterator[LLM]:
    with LLM(BRIEF, engine="vinference", **SIZES) as llm:
        yield llm


def bits_of_a_run(llm: LLM, prompts: list[str]) -> tuple[list[list[int]], list[bytes]]:
    """Sampled tokens of prompts on a fresh cache, and the bits of the cache and of the rows' state
    afterwards.
    """

    def begin_anew() -> None:
        llm.engine.drop_arrays()
        llm.engine.make_arrays()

    llm.run_on_engine(begin_anew)
    # One after the other, so that both runs launch the same steps.
    tokens = [llm.generate(p, with_(HOT, seed=3))[0].outputs[0].token_ids for p in prompts]
    state = llm.run_on_engine(lambda: jax.tree.leaves(llm.engine.executor.arrays()))
    return tokens, [np.asarray(array).tobytes() for array in state]


def run_beside(
    llm: LLM, name: str, share: float = 1.0, prompts: list[str] = PROMPTS
) -> tuple[list[list[int]], list[bytes], ShadowReport]:
    """The same with a shadow, which needs no other engine: the programs of the live steps are the
    same objects.
    """
    plan = llm.plan
    config = plan.config.model_copy(
        update={"shadow": make_config({"shadow": {"attention": f"{name}@{share}"}}).shadow}
    )
    chosen = choose_shadow(plan.registry, config, plan.kernels, plan.model.info, plan.placement)
    assert chosen is not None
    runner = llm.engine.executor
    runner.shadow = Shadow(chosen.parts(plan.kernels, plan.model.info, plan.placement))
    try:
        tokens, bits = bits_of_a_run(llm, prompts)
        report = llm.shadow_report()
    finally:
        runner.shadow = None
    assert report is not None
    return tokens, bits, report


@pytest.mark.long
@pytest.mark.parametrize(
    ("engine", "name"),
    [
        ("vinference", "plain_attention"),
        ("vinference", "garbage_attention"),
        ("vinference", "failing_attention"),
        ("oengine", "plain_attention"),
        ("oengine", "nan_attention"),
    ],
)
def test_a_shadow_changes_no_token_and_no_bit_whatever_it_returns(
    engine: str, name: str, llm: LLM, contiguous_llm: LLM
) -> None:
    served = contiguous_llm if engine == "vinference" else llm
    prompts = PROMPTS if name == "plain_attention" else PROMPTS[:1]
    tokens, bits = bits_of_a_run(served, prompts)
    compiled = served.engine.compilations.count
    shadowed_tokens, shadowed_bits, report = run_beside(served, f"{HERE}:{name}", prompts=prompts)
    assert shadowed_tokens == tokens
    assert shadowed_bits == bits
    assert served.engine.compilations.count == compiled, (
        "the live steps have the programs that they had"
    )
    if name == "failing_attention":
        assert report.num_failed >= 2, "a program of each phase, once"
        assert report.layers == ()
        assert "RuntimeError: not written yet" in str(report.error)
        return
    assert report.error is None
    decode = next(phase for phase in report.phases if phase.phase == "decode")
    assert decode.num_compared == decode.num_steps > 1
    assert decode.candidate_s > 0
    layers = [layer for layer in report.layers if layer.phase == "decode"]
    assert [layer.layer for layer in layers] == list(
        range(served.plan.model.info.groups[0].num_layers)
    )
    assert all(layer.num_tokens and not layer.num_cache_differences for layer in layers)
    if name == "nan_attention":
        spec = next(iter(served.plan.model.info.attention.values()))
        width = spec.num_q_heads * spec.head_dim
        assert all(layer.num_nonfinite == layer.num_tokens * width for layer in report.layers)
        return
    assert not any(layer.num_nonfinite for layer in report.layers)
    if name == "plain_attention":
        assert all(layer.relative < 1e-5 for layer in report.layers)
    else:
        assert all(layer.absolute > 1 for layer in report.layers)


@pytest.mark.long
@pytest.mark.parametrize("stored", ["int8", "bfloat16"])
def test_a_cache_of_another_dtype_is_compared_and_captured(stored: str, tmp_path: Path) -> None:
    path = tmp_path / "x.trace"
    choices: dict[str, Any] = {
        "kv_cache_dtype": stored,
        "shadow": {"attention": "xla@1"},
        "capture": str(path),
    }
    with LLM(BRIEF, **choices, **SIZES) as llm:
        llm.generate(PROMPTS[0], with_(HOT, max_tokens=3))
        report = llm.shadow_report()
        spec = llm.plan.model.info.attention["full"]
    assert report.error is None
    assert report.phases[0].num_compared > 0
    assert all(layer.relative < 1e-5 for layer in report.layers)
    assert spec.cache_dtype == stored
    assert {one.spec for step in CallTrace.read(path).steps for one in step.attention} == {spec}


@pytest.mark.long
def test_steps_are_sampled_evenly_and_the_first_of_a_phase_always(llm: LLM) -> None:
    report = run_beside(llm, f"{HERE}:plain_attention", 0.25)[2]
    decode = next(phase for phase in report.phases if phase.phase == "decode")
    wanted = 1 + (decode.num_steps - 1) // 4
    assert decode.num_compared == wanted
    mixed = next(phase for phase in report.phases if phase.phase == "mixed")
    assert mixed.num_compared == (mixed.num_steps > 0)
    assert math.isnan(mixed.chosen_s) == (mixed.num_compared == 0)


def test_a_shadow_rests_within_an_override(llm: LLM) -> None:
    assert llm.shadow_report() is None
    plan = llm.plan
    config = plan.config.model_copy(
        update={"shadow": make_config({"shadow": {"attention": "xla@1"}}).shadow}
    )
    chosen = choose_shadow(plan.registry, config, plan.kernels, plan.model.info, plan.placement)
    assert chosen is not None
    llm.engine.executor.shadow = shadow = Shadow(
        chosen.parts(plan.kernels, plan.model.info, plan.placement)
    )
    try:
        with llm.override(attention="xla"):
            assert llm.shadow_report() is None
        assert llm.engine.executor.shadow is shadow
    finally:
        llm.engine.executor.shadow = None


def test_flags_and_sections_say_the_same() -> None:
    as_text = make_config({"shadow": {"attention": "my_pkg:kernel@0.2"}})
    as_section = make_config({"shadow": {"attention": {"name": "my_pkg:kernel", "share": 0.2}}})
    assert as_text == as_section
    assert make_config({"shadow": {"attention": "xla"}}).shadow["attention"].share == 0.05


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shadow": {"attention": "xla@0"}}, "shadow"),
        ({"shadow": {"attention": "xla@2"}}, "shadow"),
        ({"shadow": {"attention": "xla@often"}}, "shadow"),
        ({"shadow": {"attention": "auto@0.5"}}, ("shadow.attention.name = .auto.*Allowed: the name "
            "of a kernel")),
        ({"shadow": {"attention": "@0.5"}}, "shadow"),
        ({"shadow": {"rope": "xla@0.5", "linear": "xla"}}, "shadow"),
        ({"shadow": {"attention": "xla@0.5"}, "forbid_compiling": True}, ("shadow together with "
            "forbid_compiling")),
    ],
)  # fmt: skip
def test_a_wrong_shadow_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(values)


def test_a_candidate_that_cannot_serve_is_refused_with_its_reason(llm: LLM) -> None:
    def choose(name: str) -> object:
        plan = llm.plan
        config = EngineConfig.model_validate({"shadow": {"attention": name}})
        return choose_shadow(plan.registry, config, plan.kernels, plan.model.info, plan.placement)

    with pytest.raises(UnknownNameError, match="Did you mean 'native'"):
        choose("nativ")
    with pytest.raises(ConfigError, match="No module named 'no_such_module'"):
        choose("no_such_module:f")
    with pytest.raises(UnsupportedError, match=r"shadow\.attention = .* layout hnd"):
        choose(f"{HERE}:paged_only")


@pytest.mark.long
def test_the_program_prints_the_report_and_explain_shows_the_shadow(
    run: Callable[..., tuple[int, str, str]], config: str
) -> None:
    flags = ("--shadow", f"attention={HERE}:garbage_attention@1", "--config", config)
    flags = (*flags, "--stream-chunk-tokens", "16")
    code, out, err = run("generate", "The fox", "--max-tokens", "8", "--json", *flags)
    assert code == 0
    assert len(json.loads(out)["token_ids"]) == 8
    assert f"shadow attention={HERE}:garbage_attention, on 1 of the steps:" in err
    assert "decode: 2 of 2 steps compared with" in err
    assert "or infinite: 0" in err
    code, out, _ = run("explain", "--json", *flags)
    choice = next(c for c in json.loads(out)["choices"] if c["setting"] == "shadow.attention")
    assert choice["why"] == "on 1 of the steps, in decode, prefill, mixed"
