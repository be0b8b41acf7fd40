"""Programs as the documentation of DashInfer shows them, written in our own words: the module's
names, the calls in their order, and what the programs print.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from enginebay_dashinfer import allspark
from enginebay_dashinfer.allspark import (
    ASGenerationConfigBuilder,
    AsStatus,
    DashInferModel,
    Engine,
    GenerateRequestStatus,
    TargetDevice,
)
from tests.unit.dashinfer.conftest import SUCCESS

DOCUMENTED = {
    "": "Engine HuggingFaceModel DashInferModel AsModelRuntimeConfigBuilder AsModelConfig "
    "ASGenerationConfigBuilder AsStatus AsCacheMode TargetDevice MultiMediaInfo ResultQueue "
    "GeneratedElements GenerateRequestStatus LLM RuntimeConfig GenerationConfig",
    ".engine": "Engine AsModelConfig AsStatus AsCacheMode TargetDevice ResultQueue "
    "GeneratedElements GenerateRequestStatus LLM RuntimeConfig GenerationConfig",
    ".model_loader": "HuggingFaceModel DashInferModel",
}
"""The documented names by module below enginebay_dashinfer.allspark."""


# holds D01
@pytest.mark.parametrize("module", list(DOCUMENTED))
def test_every_documented_name_can_be_star_imported(module: str) -> None:
    names: dict[str, object] = {}
    exec(f"from enginebay_dashinfer.allspark{module} import *", names)
    assert set(DOCUMENTED[module].split()) <= set(names)
    for name in DOCUMENTED[module].split():
        assert names[name] is getattr(allspark, name), "one class under all of its names"


def test_values_have_the_documented_types(serialised: Path) -> None:
    loader = DashInferModel(serialised, "brief").load_model()
    assert isinstance(loader, allspark.LLM)
    builder = loader.create_reference_runtime_config_builder("any", TargetDevice.CPU, [0], 1)
    config = builder.build()
    assert isinstance(config, allspark.RuntimeConfig)
    generation = loader.create_reference_generation_config_builder(config).build()
    assert isinstance(generation, allspark.GenerationConfig)
    assert generation == dict(generation)


# holds D02, D03, D10, D11
def test_a_program_that_waits_for_its_request(faked: None, serialised: Path) -> None:
    """The short program, with a serialised model in place of a conversion."""
    name, ids = "short program", []
    engine = allspark.Engine()
    loader = allspark.DashInferModel(serialised, "brief")
    loader.load_model().read_model_config().serialize_to_memory(engine).free_model()
    builder = loader.create_reference_runtime_config_builder(
        name, TargetDevice.CPU, [0], max_batch=8
    )
    config = builder.max_length(64).build()
    assert engine.install_model(config) is SUCCESS
    assert engine.start_model(name) is SUCCESS
    generation = loader.create_reference_generation_config_builder(config)
    status, handle, queue = engine.start_request_text(name, loader, "who are you?", generation)
    assert status is SUCCESS
    assert engine.sync_request(name, handle) is SUCCESS
    elements = queue.Get()
    ids += elements.ids_from_generate
    assert 0 < len(ids) == queue.GeneratedLength() <= 64
    assert engine.release_request(name, handle) is SUCCESS
    assert engine.stop_model(name) is SUCCESS
    assert engine.release_model(name) is SUCCESS


# holds D12, D13
def test_a_program_that_reads_tokens_while_they_come(
    running: Engine, loader: DashInferModel
) -> None:
    going_on = {
        GenerateRequestStatus.Init,
        GenerateRequestStatus.ContextFinished,
        GenerateRequestStatus.Generating,
    }
    config = ASGenerationConfigBuilder().do_sample().max_length(60).temperature(0.7).top_k(50)
    status, _, queue = running.start_request_text("one", loader, "who are you?", config)
    assert status is SUCCESS
    ids: list[int] = []
    progress = queue.GenerateStatus()
    while progress in going_on:
        elements = queue.Get()
        if elements is not None:
            ids += elements.ids_from_generate
        progress = queue.GenerateStatus()
        if progress is GenerateRequestStatus.GenerateFinished:
            break
        if progress is GenerateRequestStatus.GenerateInterrupted:
            break
    assert progress is GenerateRequestStatus.GenerateFinished
    assert len(ids) == queue.GeneratedLength() == queue.RequestStatInfo()["generated_token_length"]


# holds D04
def test_a_program_that_sets_every_value_of_a_runtime_by_statement(serialised: Path) -> None:
    names: dict[str, object] = {"folder": serialised}
    program = """
        from enginebay_dashinfer.allspark import *
        from enginebay_dashinfer.allspark.engine import *

        made = AsModelRuntimeConfigBuilder()
        made.model_name("mine")
        made.model_dir(folder, "brief")
        made.compute_unit(TargetDevice.CUDA, [0])
        made.max_batch(32)
        made.max_length(160)
        made.kv_cache_mode(AsCacheMode.AsCacheQuantU4)
        wanted = made.build()
        here = Engine()
        status = here.install_model(wanted)
        reason = here.last_error
    """
    exec(textwrap.dedent(program), names)
    wanted = names["wanted"]
    assert isinstance(wanted, allspark.AsModelConfig)
    assert (wanted.compute_unit, wanted.cache_mode.name) == ("CUDA:0", "AsCacheQuantU4")
    assert names["status"] is AsStatus.ALLSPARK_PARAM_ERROR, "this machine has no such device"
    assert "JAX finds no cuda device" in str(names["reason"])


# holds D08
def test_a_program_that_builds_a_generation_in_one_statement() -> None:
    built = ASGenerationConfigBuilder().do_sample().max_length(512).temperature(0.7).top_k(50)
    fields = built.build()
    assert {name: fields[name] for name in ("do_sample", "max_length", "temperature", "top_k")} == {
        "do_sample": True,
        "max_length": 512,
        "temperature": 0.7,
        "top_k": 50,
    }


# holds D02
@pytest.mark.slow
def test_a_program_that_ends_leaves_no_temporary_files(tmp_path: Path) -> None:
    from tests.brief import LEAST

    program = f"""
        import os
        from enginebay_dashinfer import allspark
        from enginebay_dashinfer.allspark import TargetDevice

        engine = allspark.Engine()
        loader = allspark.HuggingFaceModel({LEAST!r}, "least", user_set_data_type="float32")
        loader.load_model().read_model_config().serialize_to_memory(engine).free_model()
        assert len(os.listdir({str(tmp_path)!r})) == 1
        builder = loader.create_reference_runtime_config_builder(
            "least", TargetDevice.CPU, [0], max_batch=2, max_context_length=32
        )
        assert engine.install_model(builder.lora_max_num(0).build()).value == 0, engine.last_error
        assert engine.start_model("least").value == 0, engine.last_error
        generation = loader.create_reference_generation_config_builder(builder.build())
        status, handle, queue = engine.start_request_text("least", loader, "who?", generation)
        engine.sync_request("least", handle)
        print(len(queue.Get().ids_from_generate) > 0)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert done.stdout.split() == ["True"], done.stderr
    assert not list(tmp_path.glob("enginebay-model-*"))
