"""Kernels by import path: found in the current folder too, checked before they are used, and told
as what they are.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from enginebay import LLM, SamplingParams
from enginebay.compose.composition import make_plan
from enginebay.compose.plan import Plan
from enginebay.config import make_config
from enginebay.errors import ConfigError, EnginebayError, IncorrectError, InputError
from tests.unit.serving import SIZES

pytestmark = pytest.mark.xdist_group("llm")
HERE = "tests.unit.unregistered"
PHASES = ("decode", "prefill", "mixed")


def plan_with(kernels: dict[str, Any], **more: Any) -> Plan:
    return make_plan(make_config({"compile_cache": "off", "kernels": kernels, **SIZES, **more}))


def whys(plan: Plan) -> dict[str, str]:
    return {reason.setting: reason.why for reason in plan.reasons}


@pytest.mark.parametrize("phase", PHASES)
def test_an_import_path_is_checked_and_used_for_its_phase_alone(phase: str) -> None:
    # The others are named: "auto" takes what this machine can compile.
    kernels = dict.fromkeys(PHASES, "xla") | {phase: f"{HERE}:plain_attention"}
    plan = plan_with({"attention": kernels})
    why = whys(plan)[f"kernels.attention.{phase}"]
    assert re.fullmatch(r"by import path, passed its quick check \(\d+ cases?\)", why)
    names = {name: plan.kernels.names[f"attention.{name}"] for name in PHASES}
    assert names == kernels
    assert {name: plan.kernels.attention[name].name for name in PHASES} == kernels


def test_a_whole_implementation_is_taken_as_it_is() -> None:
    from enginebay_xla.attention import xla_attention

    decode = {"decode": "enginebay_xla.attention:xla_attention"}
    plan = plan_with({"attention": decode, "rms_norm": "enginebay_xla.norm:rms_norm"})
    assert plan.kernels.attention["decode"] is xla_attention
    assert plan.kernels.attention["decode"].caps.compact_decode
    assert whys(plan)["kernels.rms_norm"] == "by import path, passed its quick check (1 case)"


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        ({"attention": {"decode": f"{HERE}:garbage_attention"}}, (r"kernels\.attention\.decode = "
            r".*fails its quick check: decode, layout hnd: token 0 "
            r"of row 0 is off by .*, allowed .*verify_kernels = false")),
        ({"attention": {"mixed": f"{HERE}:nan_attention"}}, ("mixed, layout hnd: token 0 of row 0 "
            "is off by nan")),
        ({"attention": {"prefill": f"{HERE}:failing_attention"}}, ("prefill: it raised "
            "RuntimeError: not written yet")),
        ({"attention": {"decode": f"{HERE}:flat_attention"}}, (r"flat_attention\. Allowed: an "
            r"array "
            r"\[")),
        ({"linear": f"{HERE}:scaled_linear"}, ("kernels.linear = .*linear float32 3 rows.* is off "
            "by")),
    ],
)  # fmt: skip
def test_one_that_is_wrong_is_refused_with_its_case_and_the_bound(
    kernels: dict[str, Any], message: str
) -> None:
    with pytest.raises(IncorrectError, match=message):
        plan_with(kernels)


def test_the_check_can_be_switched_off() -> None:
    plan = plan_with({"attention": f"{HERE}:garbage_attention"}, verify_kernels=False)
    assert whys(plan)["kernels.attention.mixed"] == "by import path, not checked"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:f", "importing no_such_module failed: ModuleNotFoundError"),
        (f"{HERE}:plain_atention", r"has no 'plain_atention'.*Did you mean 'plain_attention'"),
        (f"{HERE}:NUMBER", "an object of type int. Allowed: an AttentionImpl, or a function"),
        ("enginebay_xla.attention:XlaAttention", "is the class XlaAttention"),
        (
            "enginebay_xla.norm:rms_norm",
            "missing a required argument|too many positional arguments",
        ),
        (f"{HERE}:", 'a name, or "package.module:attribute"'),
        (":f", 'a name, or "package.module:attribute"'),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(path: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan_with({"attention": path})


def test_a_plain_op_must_be_a_function() -> None:
    with pytest.raises(ConfigError, match=r"kernel of op linear .* is of type int"):
        plan_with({"linear": f"{HERE}:NUMBER"})


def test_a_module_that_fails_on_import_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "half_written.py").write_text("import nothing_of_the_kind\n")
    with pytest.raises(ConfigError, match=r"importing half_written failed: .*nothing_of_the_kind"):
        plan_with({"attention": "half_written:f"})


def test_the_command_line_finds_it_in_the_current_folder(
    run: Callable[..., tuple[int, str, str]],
    config: str,
    llm: LLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    (tmp_path / "found_here.py").write_text(f"from {HERE} import plain_attention as kernel\n")
    flags = ("--kernel", "attention.decode=found_here:kernel", "--config", config)
    code, out, err = run("generate", "The fox", "--max-tokens", "8", "--json", *flags)
    assert (code, err) == (0, "")
    expected = llm.generate("The fox", SamplingParams(max_tokens=8))[0].outputs[0].token_ids
    assert json.loads(out)["token_ids"] == expected
    code, out, _ = run(
        "explain",
        "--attention",
        "found_here:kernel",
        "--no-verify-kernels",
        "--json",
        "--config",
        config,
    )
    assert code == 0
    choices = {choice["setting"]: choice for choice in json.loads(out)["choices"]}
    assert choices["kernels.attention.prefill"]["why"] == "by import path, not checked"
    code, _, err = run("explain", "--attention", "found_here:kernal", "--config", config)
    assert code == EnginebayError.exit_code + 1
    assert "Did you mean 'kernel'?" in err
