"""A platform from `enginebay new platform` serves all that XLA's functions can do."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from enginebay.cli.new import write_plugin
from enginebay.plugins.hooks import Declaration, Register
from enginebay.plugins.registry import Entry, Registry, load_registry
from enginebay_testing.platforms import platform_checks
from enginebay_testing.verdicts import Outcome, judge
from tests.plugins.install import put, python

NAME = "my_xpu"


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    return write_plugin("platform", NAME, tmp_path / "plugin")


@pytest.fixture
def outcomes(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Outcome]:
    """What the suite finds of the platform as it is written."""
    file = plugin / f"enginebay_{NAME}.py"
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, file.stem, module)
    spec.loader.exec_module(module)
    found: list[Declaration] = []
    module.register_platforms(Register("platform", found.append))
    assert not hasattr(module, "register_kernels"), "XLA's kernels serve every platform"
    entries = [Entry(d.kind, d.name, NAME, "1", f"enginebay-{NAME}", declaration=d) for d in found]
    registry = Registry([*load_registry().entries, *entries])
    platform = registry.load(registry.find("platform", NAME))()
    return {name: judge(check) for name, check in platform_checks(platform, registry)}


def test_it_passes_every_check_and_supports_all_that_is_checked(
    outcomes: dict[str, Outcome],
) -> None:
    assert {name: o for name, o in outcomes.items() if o.verdict != "PASS"} == {}
    served = {name for name in outcomes if name.endswith("_are_served")}
    assert {"int8_weights_are_served", "int8_caches_are_served"} < served
    assert {"uint4_caches_are_served", "fp8_caches_are_served"} < served
    assert "op_is_served[linear]" in outcomes


TOKENS = """
import json
from enginebay import LLM, SamplingParams

small = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 64}
small |= {"dtype": "float32", "layout": "hnd", "quantization": "int8", "processors": ()}
params = SamplingParams(max_tokens=6, ignore_eos=True)
tokens = {}
for cache in ("int8", "uint4", "fp8"):
    for platform, kernels in (
        ("cpu", {op: "xla" for op in ("attention", "linear")}), ("my_xpu", {})
    ):
        with LLM(
            "demo", platform=platform, kernels=kernels, kv_cache_dtype=cache, **small
        ) as llm:
            outputs = llm.generate([[5, 6, 7], list(range(40, 70))], params)
            found = [o.outputs[0].token_ids for o in outputs]
            tokens.setdefault(cache, []).append(found)
print(json.dumps(tokens))
"""


@pytest.mark.long
def test_int8_weights_and_quantised_caches_give_the_tokens_of_the_cpu(
    plugin: Path, tmp_path: Path
) -> None:
    done = python(put(plugin, tmp_path / "site"), "-c", TOKENS)
    assert done.returncode == 0, done.stderr
    for reference, mine in json.loads(done.stdout).values():
        assert mine == reference
