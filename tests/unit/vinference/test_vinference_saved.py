"""Saved inferences: loaded in a fresh process without compiling, and refused when they are not what
was saved.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jax.sharding import PartitionSpec

from enginebay_native.compiling import library
from enginebay_vinference import vInference, vInferencePreCompileConfig
from enginebay_vinference.saved import MANIFEST
from enginebay_vinference.state_steps import Programs
from tests.brief import TINY
from tests.unit.vinference.small import (
    BUCKETS,
    CONFIG,
    MODEL,
    SIXTEEN,
    TEXTS,
    encode,
    last,
    like,
    new_tokens,
    padded,
)

pytestmark = [pytest.mark.xdist_group("vinference"), pytest.mark.long]

# holds V40

SAVE = """
import sys
from enginebay_vinference import vInference
from tests.unit.vinference.small import BUCKETS, CONFIG, MODEL
inference = vInference(MODEL, None, CONFIG, seed=5, inference_name="mine")
assert inference.precompile(BUCKETS)
inference.save_inference(sys.argv[1])
"""

LOAD = """
import json, logging, sys
import jax
misses = []
def listen(name, **_):
    if name.endswith("/cache_misses"):
        misses.append(name)
jax.monitoring.register_event_listener(listen)
logging.basicConfig(level=logging.WARNING)
from enginebay_vinference import vInference
from tests.unit.vinference.small import MODEL, TEXTS, encode, last, new_tokens
inference = vInference.load_inference(sys.argv[1], MODEL, None)
states = [last(inference.generate(*encode(inference, *texts))) for texts in (TEXTS[:1], TEXTS)]
rows = [new_tokens(state) for state in states]
print(json.dumps([rows, len(misses), inference.inference_name, sorted(inference.precompiled)]))
"""


TINY_MODEL = {**MODEL, "model": TINY}

LOAD_TINY = """
import json, sys
from enginebay_vinference import vInference
from tests.unit.vinference.test_vinference_saved import TINY_MODEL, generated
print(json.dumps(generated(vInference.load_inference(sys.argv[1], TINY_MODEL, None))))
"""


def run(code: str, folder: Path, cache: Path, root: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    env.pop("JAX_COMPILATION_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        cwd=root,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, inference: vInference) -> Path:
    folder: Path = tmp_path_factory.mktemp("saved") / "inference"
    inference.save_inference(folder)
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


@pytest.mark.slow
def test_a_fresh_process_generates_the_same_tokens_and_compiles_nothing(
    inference: vInference, tmp_path: Path, repo_root: Path
) -> None:
    folder, cache = tmp_path / "saved", tmp_path / "cache"
    run(SAVE, folder, cache, repo_root)
    loaded = run(LOAD, folder, cache, repo_root)
    rows, misses, name, precompiled = json.loads(loaded.stdout)
    assert rows == [
        new_tokens(last(inference.generate(*encode(inference, *texts))))
        for texts in (TEXTS[:1], TEXTS)
    ]
    assert misses == 0
    assert name == "mine"
    assert precompiled == sorted(inference.precompiled)
    assert (cache / "enginebay" / "programs").stat().st_mode & 0o077 == 0
    assert not [
        path for path in folder.rglob("*") if path.suffix not in ("", ".json", ".stablehlo")
    ]


def generated(inference: vInference) -> list[list[int]]:
    return new_tokens(last(inference.generate(*padded([[5, 6, 7, 8]]))))


@pytest.mark.long
def test_a_fresh_process_registers_the_native_kernels_of_what_it_loads(
    tmp_path: Path, repo_root: Path
) -> None:
    config = dataclasses.replace(CONFIG, pad_token_id=0, eos_token_id=0)
    made = vInference(TINY_MODEL, None, config)
    kernels = made.programs.engine.parts.kernels
    if {kernels["linear"], kernels["attention.decode"]} != {"native"}:
        pytest.skip("no C++ compiler: only xla can be chosen here")
    assert made.precompile(SIXTEEN)
    made.save_inference(tmp_path / "saved")
    compiled = library("linear_f32").parent  # C++ that need not be compiled again
    shutil.copytree(compiled, tmp_path / "cache" / "enginebay" / "native")
    loaded = run(LOAD_TINY, tmp_path / "saved", tmp_path / "cache", repo_root)
    assert json.loads(loaded.stdout) == generated(made)


@pytest.mark.long
def test_configuration_and_buckets_are_restored(inference: vInference, saved: Path) -> None:
    loaded = vInference.load_inference(saved, MODEL, None)
    assert loaded.generation_config == inference.generation_config
    assert loaded.precompiled == inference.precompiled
    assert loaded.seed == inference.seed == 5
    before = loaded.num_compilations
    assert loaded.precompile(BUCKETS)
    assert loaded.num_compilations == before
    texts = encode(loaded, *TEXTS)
    assert new_tokens(last(loaded.generate(*texts))) == new_tokens(last(inference.generate(*texts)))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Without the digest of itself."""
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    manifest.pop("self")
    return manifest


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """With its digest, so that it counts as whole."""
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps({**manifest, "self": digest}))


@pytest.mark.long
def test_elsewhere_it_is_compiled_once_and_says_so(
    copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = read_manifest(copy)
    manifest["environment"]["machine"] = "another"
    for name in ("functions", "precompiled"):
        del manifest[name][1:]
    write_manifest(copy, manifest)
    loaded = vInference.load_inference(copy, MODEL, None)
    assert loaded.num_compilations == 2
    assert "saved in another environment (machine another ->" in caplog.text


@pytest.mark.long
def test_another_models_is_refused(copy: Path) -> None:
    with pytest.raises(ValueError, match="saved for model"):
        vInference.load_inference(copy, {**MODEL, "dtype": "bfloat16"}, None)
    with pytest.raises(ValueError, match="saved for model"):
        vInference.load_inference(copy, {**MODEL, "model": TINY}, None)


@pytest.mark.parametrize("op", ["linear", "attention.decode"])
def test_other_kernels_than_it_was_saved_with_are_refused(saved: Path, op: str) -> None:
    theirs = read_manifest(saved)["kernels"][op]
    choice: Any = "xla" if op == "linear" else {"decode": "xla"}
    if theirs == "xla":
        pytest.skip("no C++ compiler: only xla can be chosen here")
    with pytest.raises(ValueError, match=f"saved with {theirs} for {op} [(]here xla[)]"):
        vInference.load_inference(saved, {**MODEL, "kernels": {op.partition(".")[0]: choice}}, None)


@pytest.mark.slow
def test_what_the_functions_depend_on_is_restored_or_refused(tmp_path: Path) -> None:
    nhd = {**MODEL, "layout": "nhd"}
    made = vInference(nhd, None, CONFIG)
    made.precompile(vInferencePreCompileConfig(1, 16))
    made.save_inference(tmp_path)
    with pytest.raises(ValueError, match="page size"):
        vInference.load_inference(
            tmp_path, {**nhd, "engine": {"name": "vinference", "page_size": 16}}, None
        )
    spec = PartitionSpec("tensor", None)
    split = {**MODEL, "mesh": {"tensor": 2}}
    made = vInference(split, None, CONFIG, input_partition_spec=spec)
    made.save_inference(tmp_path)
    assert vInference.load_inference(tmp_path, split, None).input_partition_spec == spec


@pytest.mark.slow
def test_functions_for_another_pass_are_not_compiled_in_vain(
    copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = vInference.load_inference(copy, {**MODEL, "max_num_batched_tokens": 64}, None)
    assert "another max_num_batched_tokens -> 64" in caplog.text
    assert loaded.num_compilations == 4
    assert {shape.max_batched_tokens for shape in loaded.programs.shapes} == {64}


def test_a_file_outside_the_folder_is_not_read(copy: Path) -> None:
    manifest = read_manifest(copy)
    manifest["sha256"]["../outside"] = "0"
    write_manifest(copy, manifest)
    with pytest.raises(ValueError, match=r"it names '\.\./outside'"):
        vInference.load_inference(copy, MODEL, None)


def damage(kind: str, folder: Path) -> None:
    program = next((folder / "functions").iterdir())
    manifest = folder / "inference.json"
    match kind:
        case "truncated":
            program.write_bytes(program.read_bytes()[:-1])
        case "edited":
            content = bytearray(program.read_bytes())
            content[len(content) // 2] ^= 1
            program.write_bytes(content)
        case "missing":
            program.unlink()
        case "manifest edited":
            manifest.write_text(
                manifest.read_text().replace('"streaming_chunks": 8', '"streaming_chunks": 9')
            )
        case "manifest truncated":
            manifest.write_text(manifest.read_text()[:-5])
        case "no manifest":
            manifest.unlink()


@pytest.mark.parametrize(
    "kind",
    ["truncated", "edited", "missing", "manifest edited", "manifest truncated", "no manifest"],
)
def test_a_damaged_one_is_refused_and_nothing_of_it_runs(
    copy: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from enginebay_vinference import inference as module

    def never(*_: Any) -> None:
        pytest.fail("something was opened or compiled")

    damage(kind, copy)
    monkeypatch.setattr(Programs, "compile_lowered", never)
    monkeypatch.setattr(module, "make_loaded_model", never)
    with pytest.raises(ValueError, match="complete, unchanged"):
        vInference.load_inference(copy, MODEL, None)


def test_saving_twice_replaces_what_was_there(inference: vInference, copy: Path) -> None:
    made = like(inference, most=1, inference_name="second")
    made.precompile(SIXTEEN)
    made.save_inference(copy)
    loaded = vInference.load_inference(copy, MODEL, None)
    assert loaded.inference_name == "second"
    assert len(loaded.precompiled) == 1
    assert sorted(path.name for path in (copy / "functions").iterdir()) == [
        "0-decode.stablehlo",
        "0-prefill.stablehlo",
    ]
