"""Stored programs: a second process traces nothing; a file that was changed is a miss."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from enginebay import LLM, SamplingParams, folders
from enginebay.jax_config import (
    compiled_programs,
    configure_compile_cache,
    seen_entries,
    stored_programs_folder,
)
from enginebay_runtime import stored_programs
from enginebay_runtime.compiling import StepCompiler
from enginebay_runtime.layered import LayeredStep, ProgramCall, ProgramCalls
from enginebay_runtime.stored_programs import ProgramStore
from tests.brief import ROOT, TINY

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
SIZES: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 32,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 16,
}


class Kept(NamedTuple):
    """A compiled program, and its entry in JAX's cache."""

    program: Any
    entries: list[bytes]


def compiled() -> Kept:
    """Compile a program, or read it from JAX's cache."""
    step = jax.jit(lambda x, y: (x + 1, y * 2), donate_argnums=0)
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    with seen_entries() as entries:
        program = step.lower(shape, shape).compile()
    return Kept(program, entries[-1:])


@pytest.fixture(autouse=True)
def nothing_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests load modules from folders that are gone."""
    monkeypatch.setattr(stored_programs, "_seen", {}, raising=False)


@pytest.fixture(autouse=True)
def modules_of_tests_are_old(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules that tests write are older than the process, and gone after the test."""
    monkeypatch.setattr(stored_programs, "_STARTED_NS", time.time_ns() + 10**12)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("kernel_"):
            del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    before = jax.config.jax_compilation_cache_dir
    (tmp_path / "cache").mkdir(mode=0o700)
    configure_compile_cache(str(tmp_path / "cache"))
    made = stored_programs_folder()
    assert made is not None
    yield made
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def test_beside_a_remote_cache_nothing_is_stored(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    jax.config.update("jax_compilation_cache_dir", "gs://bucket/programs")
    assert stored_programs_folder() is None
    assert not list(Path.cwd().iterdir())


def store_of(folder: Path, digest: str = "parts", device: int = 0) -> ProgramStore:
    parts: Any = SimpleNamespace(
        program_digest=digest,
        placement=SimpleNamespace(devices=jax.devices()[device : device + 1]),
        custom_calls=(),
        register_call=None,
    )
    return ProgramStore(folder, parts)


@pytest.fixture
def store(folder: Path) -> ProgramStore:
    return store_of(folder)


def the_file(folder: Path) -> Path:
    (found,) = folder.glob("*.program")
    return found


def test_a_loaded_program_is_the_one_that_was_stored(store: ProgramStore) -> None:
    assert store.load("step", 1) is None
    store.save(*compiled(), "step", 1)
    loaded = store.load("step", 1)
    assert loaded is not None
    x = jnp.arange(3.0)
    first, second = loaded(x, jnp.ones(3))
    np.testing.assert_array_equal(first, [1, 2, 3])
    np.testing.assert_array_equal(second, [2, 2, 2])
    assert x.is_deleted(), "the first argument is donated"


def test_the_programs_of_a_layered_step_are_in_one_file(store: ProgramStore, folder: Path) -> None:
    one, other = compiled(), compiled()
    both = ProgramCall(0, (0, 2), (3, 4), (0,)), ProgramCall(1, (3, 4), (5, 6), (3, 4))
    tree = jax.tree.structure((0, 0))
    calls = ProgramCalls(both, (np.ones(3, np.float32),), (5, 6), 7, tree)
    entries = [*one.entries, *other.entries]
    store.save(LayeredStep(calls, [one.program, other.program]), entries, "step")
    assert the_file(folder).stat().st_size > sum(map(len, entries))
    loaded = store.load("step")
    assert isinstance(loaded, LayeredStep)
    first, second = loaded(jnp.arange(3.0), None, 0.0, None)
    np.testing.assert_array_equal(first, [2, 3, 4])
    np.testing.assert_array_equal(second, [4, 4, 4])


def test_other_names_other_parts_other_devices_are_misses(
    store: ProgramStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(*compiled(), "step", 1)
    assert store.load("step", 2) is None
    assert store_of(folder, "other parts").load("step", 1) is None
    if len(jax.devices()) > 1:
        assert store_of(folder, device=1).load("step", 1) is None
    for change in (
        lambda: monkeypatch.setattr(stored_programs, "processor_features", lambda: "another"),
        lambda: monkeypatch.setattr(stored_programs, "_distributions", lambda: ("jax-99",)),
        lambda: monkeypatch.setenv("XLA_OF_A_TEST", "1"),
    ):
        change()
        assert store_of(folder).load("step", 1) is None
        monkeypatch.undo()
    assert store_of(folder).load("step", 1) is not None


def test_the_settings_of_the_tracing_thread_are_part_of_a_name() -> None:
    before = stored_programs.trace_settings()
    with jax.default_matmul_precision("highest"):
        assert stored_programs.trace_settings() != before
    assert stored_programs.trace_settings() == before


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def open_to_others(path: Path) -> None:
    path.chmod(0o640)


def link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def another_format(path: Path) -> None:
    path.write_bytes(b"enginebay program 0\n" + path.read_bytes()[20:])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (cut, "changed"),
        (empty, "format"),
        (flip, "changed"),
        (open_to_others, "other users"),
        (link, "symbolic"),
        (fifo, "regular"),
        (another_format, "format"),
    ],
)
def test_a_file_that_was_changed_is_a_miss_with_a_reason(
    change: Callable[[Path], None],
    reason: str,
    store: ProgramStore,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store.save(*compiled(), "step")
    change(the_file(folder))
    with caplog.at_level(logging.DEBUG, "enginebay_runtime"):
        assert store.load("step") is None
    assert reason in caplog.text


def test_two_hundred_changed_cut_and_foreign_files_are_misses_with_reasons(
    store: ProgramStore, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = compiled()
    store.save(*kept, "step")
    file = the_file(folder)
    whole = file.read_bytes()
    store.save(*kept, "another step")
    (other,) = set(folder.glob("*.program")) - {file}
    foreign = [
        other.read_bytes(),
        kept.entries[0],
        pickle.dumps({"program": b""}),
        bytes(len(whole)),
    ]
    random = np.random.default_rng(0)
    contents = list(foreign)
    contents += [whole[:size] for size in (0, 1, 19, 20, 51, 52, len(whole) - 1)]
    contents += [whole[: random.integers(len(whole))] for _ in range(60)]
    contents += [whole + bytes([n]) for n in range(9)]
    while len(contents) < 200:
        changed = bytearray(whole)
        changed[random.integers(len(whole))] ^= 1 << random.integers(8)
        contents.append(bytes(changed))
    for content in contents:
        file.write_bytes(content)
        caplog.clear()
        with caplog.at_level(logging.DEBUG, "enginebay_runtime"):
            assert store.load("step") is None
        assert [record.levelname for record in caplog.records] == ["DEBUG"]
        assert file.name in caplog.text
    file.write_bytes(whole)
    assert store.load("step") is not None


@pytest.mark.parametrize("change", [cut, flip, Path.unlink])
def test_a_changed_entry_of_the_compilation_cache_does_no_harm(
    change: Callable[[Path], None], store: ProgramStore, folder: Path
) -> None:
    store.save(*compiled(), "step")
    (entry,) = folder.parent.glob("*-cache")
    change(entry)
    loaded = store.load("step")
    assert loaded is not None
    np.testing.assert_array_equal(loaded(jnp.zeros(3), jnp.ones(3))[0], [1, 1, 1])


@pytest.mark.long
def test_a_program_that_was_read_from_the_compilation_cache_is_stored_too(
    store: ProgramStore,
) -> None:
    compiled()
    jax.clear_caches()
    store.save(*compiled(), "step")
    loaded = store.load("step")
    assert loaded is not None
    np.testing.assert_array_equal(loaded(jnp.zeros(3), jnp.ones(3))[0], [1, 1, 1])


@pytest.mark.parametrize("target", ["enginebay.ops.batches.derive_batch", "StepCompiler.joined"])
def test_a_process_with_a_replaced_function_neither_loads_nor_stores(
    target: str, store: ProgramStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(*compiled(), "step")
    name = target if target.startswith("enginebay") else f"enginebay_runtime.compiling.{target}"
    with monkeypatch.context() as here:
        here.setattr(name, lambda *_: None)
        other = store_of(folder)
        assert other.load("step") is None
        other.save(*compiled(), "another")
    assert store_of(folder).load("step") is not None
    assert store_of(folder).load("another") is None


def test_a_file_of_another_user_is_a_miss(
    store: ProgramStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(*compiled(), "step")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert store.load("step") is None


def test_a_changed_source_file_is_a_miss(
    store: ProgramStore, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "kernel_of_a_test.py"
    source.write_text("BLOCK = 8\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__("kernel_of_a_test")
    store.save(*compiled(), "step")
    assert store.load("step") is not None
    source.write_text("BLOCK = 9\n")
    assert store.load("step") is None
    source.write_text("BLOCK = 8\n")
    assert store.load("step") is not None
    monkeypatch.setattr(stored_programs, "_STARTED_NS", 0)  # as if this process began long ago
    store.save(*compiled(), "changed while the process ran")
    assert store.load("changed while the process ran") is None
    source.unlink()
    assert store.load("step") is None


def test_a_source_file_that_changed_after_it_was_loaded_is_listed_with_its_old_content(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "kernel_edited_while_it_runs.py"
    source.write_text("BLOCK = 8\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__(source.stem)
    store = store_of(folder)
    source.write_text("BLOCK = 9\n")
    store.save(*compiled(), "step")
    monkeypatch.setattr(stored_programs, "_seen", {}, raising=False)  # as in another process
    assert store_of(folder).load("step") is None
    source.write_text("BLOCK = 8\n")
    monkeypatch.setattr(stored_programs, "_seen", {}, raising=False)
    assert store_of(folder).load("step") is not None


def test_a_process_does_not_load_what_its_older_sources_did_not_make(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "kernel_of_an_older_process.py"
    source.write_text("BLOCK = 8\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__(source.stem)
    old = store_of(folder)
    seen = dict(getattr(stored_programs, "_seen", {}))
    source.write_text("BLOCK = 9\n")
    monkeypatch.setattr(stored_programs, "_seen", {}, raising=False)  # as in a newer process
    store_of(folder).save(*compiled(), "step")
    monkeypatch.setattr(stored_programs, "_seen", seen, raising=False)
    assert old.load("step") is None


def test_a_module_of_another_checkout_is_a_miss(
    store: ProgramStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, block in (("one", 8), ("other", 9)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kernel_in_two_folders.py").write_text(f"BLOCK = {block}\n")
    with monkeypatch.context() as here:
        here.syspath_prepend(str(tmp_path / "one"))
        __import__("kernel_in_two_folders")
    store.save(*compiled(), "step")
    assert store.load("step") is not None
    monkeypatch.delitem(sys.modules, "kernel_in_two_folders")
    assert store.load("step") is not None
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    __import__("kernel_in_two_folders")
    assert store.load("step") is None


def test_odd_modules_and_paths_of_a_process_do_no_harm(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lazy(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"{name} is loaded later")

    given: Any = Path("a.py")
    for name, odd in (("odd_lazy", Lazy("odd_lazy")), ("odd_path", ModuleType("odd_path"))):
        monkeypatch.setitem(sys.modules, name, odd)
    monkeypatch.setattr(sys.modules["odd_path"], "__file__", given, raising=False)
    monkeypatch.setitem(sys.modules, "odd_none", None)  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "path", [*sys.path, given])
    store = store_of(folder)
    store.save(*compiled(), "step")
    assert store.load("step") is not None


def test_installed_modules_of_enginebay_are_among_the_sources(
    store: ProgramStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = Path(stored_programs.__file__).parents[1]
    monkeypatch.setattr(stored_programs, "_site_packages", lambda: {str(core)})
    store.save(*compiled(), "step")
    payload = stored_programs._read(the_file(folder))
    assert payload is not None
    names = {Path(path).name for path in pickle.loads(payload)["sources"]}
    assert {"stored_programs.py", "jax_config.py"} <= names


def test_distributions_outside_the_virtual_environment_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site-packages"
    (folder / "jax-99.dist-info").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(folder))
    assert "jax-99.dist-info" in stored_programs._distributions.__wrapped__()


def test_settings_that_change_programs_are_none_of_logs_and_caches() -> None:
    names = {name for name, _ in stored_programs.trace_settings()}
    assert not {"jax_log_compiles", "jax_compilation_cache_dir", "jax_logging_level"} & names
    words = {"logistic", "topology"}
    assert {n for n in jax.config.values if words & set(n.split("_"))} <= names


def test_nothing_is_left_of_a_file_that_could_not_be_written(
    store: ProgramStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    kept = compiled()
    with monkeypatch.context() as disk:
        disk.setattr(Path, "replace", full)
        store.save(*kept, "step")
    assert not list(folder.iterdir())


def test_what_a_killed_process_left_is_removed_after_an_hour(
    store: ProgramStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_programs, "PRUNE_EVERY", 1)
    old, new = folder / "old.part", folder / "new.part"
    old.write_bytes(b"a program")
    os.utime(old, (0, 0))
    new.write_bytes(b"a program")
    store.save(*compiled(), "step")
    assert not old.exists()
    assert new.exists()
    assert new in compiled_programs()[1]


def test_modules_of_enginebay_are_among_the_sources_and_python_s_own_are_not(
    store: ProgramStore, folder: Path
) -> None:
    store.save(*compiled(), "step")
    payload = stored_programs._read(the_file(folder))
    assert payload is not None
    sources = pickle.loads(payload)["sources"]
    names = {Path(path).name for path in sources}
    assert {"compiling.py", "attention.py"} <= names
    assert any(name.endswith(".cc") for name in names)
    assert not any(Path(path).parts[-2:] == ("jax", "__init__.py") for path in sources)
    assert logging.__file__ not in sources


def test_a_full_disk_and_a_program_that_cannot_be_stored_raise_nothing(
    store: ProgramStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(object(), compiled().entries, "step")
    assert not list(folder.iterdir())

    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders.tempfile, "NamedTemporaryFile", full)
    store.save(*compiled(), "step")
    assert store.load("step") is None


def test_old_files_leave_by_age_and_by_size(
    store: ProgramStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_programs, "PRUNE_EVERY", 1)
    store.save(*compiled(), "old")
    old = the_file(folder)
    os.utime(old, (0, 0))
    store.save(*compiled(), "new")
    assert not old.exists()
    size = the_file(folder).stat().st_size
    monkeypatch.setattr(stored_programs, "MAX_BYTES", int(2.5 * size))
    for number in range(4):
        store.save(*compiled(), "new", number)
    assert len(list(folder.glob("*.program"))) == 2
    assert store.load("new", 3) is not None


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the steps that are traced from now on."""
    found: list[str] = []
    lower = StepCompiler.lower

    def record(self: StepCompiler, key: Any) -> Any:
        found.append(str(key))
        return lower(self, key)

    monkeypatch.setattr(StepCompiler, "lower", record)
    monkeypatch.setattr(stored_programs, "_replaced", lambda: None)  # by the line before
    return found


def answer(folder: Path, **options: Any) -> Any:
    with LLM(str(TINY), compile_cache=str(folder), **(SIZES | options)) as llm:
        return llm.generate([[3, 5, 9]], GREEDY)[0].outputs[0].token_ids


@pytest.mark.long
def test_another_engine_of_the_same_parts_traces_nothing(
    tmp_path: Path, traced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "programs"
    folder.mkdir(mode=0o700)
    first = answer(folder)
    assert traced
    traced.clear()
    assert answer(folder) == first
    assert not traced
    answer(folder, kernels={"attention": "xla"})
    assert traced, "another kernel is another program"
    traced.clear()
    monkeypatch.setenv(
        "ENGINEBAY_PLUGINS", "lora,models,native,oengine,parsers,samplers,schedulers,xla"
    )
    answer(folder)
    assert traced, "a plugin may register another kernel under the same name"


NAMED = """
from types import SimpleNamespace
from enginebay.contracts.step_key import StepKey
from enginebay.ops.spec import Bucket
from enginebay_runtime.compiling import StepCompiler
parts = SimpleNamespace(returns_logits=False, has_greedy=True, processors=())
compiler = SimpleNamespace(
    _parts=parts, _layouts={}, _max_steps=1, _options={}, _held=(), settings=()
)
key = StepKey("decode", Bucket(1, 1, 1, 1, 64, "decode"), names=frozenset("abcdefgh"))
print(StepCompiler.stored_name(compiler, key))
"""


@pytest.mark.long
def test_a_step_with_processors_has_the_same_name_in_another_process() -> None:
    names = {
        subprocess.run(
            [sys.executable, "-c", NAMED],
            env=os.environ | {"PYTHONHASHSEED": seed},
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in "12"
    }
    assert len(names) == 1
