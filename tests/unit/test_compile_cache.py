"""The folder of compiled programs is private, or it is not used: what lies in it is executed."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from enginebay import jax_config as jaxconfig
from enginebay.errors import ConfigError
from enginebay.jax_config import configure_compile_cache, default_cache_folder

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture(autouse=True)
def no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """JAX without a folder, a user whose cache is in tmp_path, and everything as it was at
    the end.
    """
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    jaxconfig.compilation_cache.reset_cache()


def mode(folder: Path) -> int:
    return stat.S_IMODE(folder.stat().st_mode)


def test_the_default_folder_is_made_private(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        folder = configure_compile_cache("auto")
    finally:
        os.umask(old)
    assert folder == tmp_path / "enginebay" / "programs"
    assert mode(folder) == 0o700
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0


def test_off_leaves_jax_as_it_is(tmp_path: Path) -> None:
    assert configure_compile_cache("off") is None
    assert jax.config.jax_compilation_cache_dir is None
    assert list(tmp_path.iterdir()) == []


def test_auto_keeps_a_folder_that_jax_was_given(tmp_path: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "given"))
    assert configure_compile_cache("auto") == tmp_path / "given"
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "given")
    assert not (tmp_path / "enginebay").exists()


def test_an_explicit_folder_wins_over_the_one_that_jax_was_given(tmp_path: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "given"))
    assert configure_compile_cache(str(tmp_path / "mine")) == tmp_path / "mine"
    assert mode(tmp_path / "mine") == 0o700


def test_an_explicit_folder_may_be_in_the_users_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert configure_compile_cache("~/programs") == tmp_path / "programs"


@pytest.mark.parametrize("open_to", [0o750, 0o707, 0o777, 0o701])
def test_a_folder_open_to_others_is_refused_or_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, open_to: int
) -> None:
    folder = default_cache_folder()
    folder.mkdir(parents=True)
    folder.chmod(open_to)
    with pytest.raises(
        ConfigError, match=f"its mode is {open_to:04o}, which other users can access.*mode 0700"
    ):
        configure_compile_cache(str(folder))
    assert configure_compile_cache("auto") is None
    assert jax.config.jax_compilation_cache_dir is None
    assert "compiled programs are not cached" in caplog.text


def test_somebody_elses_folder_is_refused_or_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match="it belongs to another user"):
        configure_compile_cache(str(tmp_path / "theirs"))
    assert configure_compile_cache("auto") is None
    assert "it belongs to another user" in caplog.text


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="compile_cache = "):
            configure_compile_cache(str(path))


def test_a_user_without_a_home_goes_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setattr(Path, "home", nowhere)
    assert configure_compile_cache("auto") is None
    assert "home directory" in caplog.text


LATE = """
import sys, jax
jax.jit(lambda x: x + 1)(1)
from enginebay.jax_config import configure_compile_cache
configure_compile_cache(sys.argv[1])
jax.jit(lambda x: x * 3)(1)
"""


def test_a_process_that_has_compiled_already_still_keeps_what_follows(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION_CACHE")}
    folder = tmp_path / "late"
    subprocess.run(
        [sys.executable, "-c", LATE, str(folder)], check=True, env=environment, timeout=120
    )
    assert list(folder.iterdir())


def compile_one() -> None:
    """Compile the same program as before, or read it from the folder: each lambda is a function of
    its own.
    """
    jax.block_until_ready(jax.jit(lambda x: x * 3 + 41)(1.5))


def test_an_entry_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written under another name first. A process that ends before the entry has its name
    leaves none.
    """
    configure_compile_cache(str(tmp_path / "kept"))

    def ended(*_: object) -> None:
        raise OSError("the process ends")

    monkeypatch.setattr(Path, "replace", ended)
    with pytest.warns(UserWarning, match="Error writing persistent compilation cache entry"):
        compile_one()
    assert not list((tmp_path / "kept").iterdir())


@pytest.mark.parametrize("damaged", ["cut", "empty", "zeros"])
def test_a_damaged_entry_is_replaced_and_warned_about_once(tmp_path: Path, damaged: str) -> None:
    configure_compile_cache(str(tmp_path / "kept"))
    compile_one()
    entries = {path: path.read_bytes() for path in (tmp_path / "kept").glob("jit*-cache")}
    assert entries
    for path, content in entries.items():
        changed = {"cut": content[: len(content) // 2], "empty": b"", "zeros": bytes(len(content))}
        path.write_bytes(changed[damaged])
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
        compile_one()
    for path, content in entries.items():
        assert len(path.read_bytes()) > len(content) // 2, "a whole program again"
    compile_one()  # warnings are errors
