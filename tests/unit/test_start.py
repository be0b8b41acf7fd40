"""JAX is started quietly where it has plugins for devices that are not there, and as ever where
they may be.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from enginebay import jax_config as jaxconfig
from enginebay import jax_start as start

BOTH_EXTRAS = all(importlib.util.find_spec(name) is not None for name in ("libtpu", "jax_plugins"))
SHAPE = "smollm2-135m/decode/b2/c64"
HERE = start.look_around()
NO_DEVICE = not (HERE.cuda or HERE.tpu)
INSTALLED = start.InstalledPlugins(frozenset({"xla_cuda12"}), libtpu=True)
"""Both extras, and no device."""


@pytest.fixture
def nobody_chose() -> Iterator[None]:
    """As if JAX_PLATFORMS were not set."""
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", None)
    yield
    jax.config.update("jax_platforms", before)


@pytest.mark.usefixtures("nobody_chose")
def test_jax_keeps_to_the_cpu_where_no_device_can_be() -> None:
    assert start.settle_platforms(INSTALLED)
    assert jax.config.jax_platforms == "cpu"


@pytest.mark.usefixtures("nobody_chose")
@pytest.mark.parametrize(
    "found",
    [
        dataclasses.replace(INSTALLED, cuda=True),
        dataclasses.replace(INSTALLED, tpu=True),
        dataclasses.replace(INSTALLED, plugins=frozenset({"xla_cuda12", "somebody_elses"})),
        start.InstalledPlugins(),
    ],
    ids=["cuda", "tpu", "plugin", "nothing"],
)
def test_jax_looks_for_devices_that_may_be_there(found: start.InstalledPlugins) -> None:
    assert not start.settle_platforms(found)
    assert not jax.config.jax_platforms


@pytest.mark.usefixtures("nobody_chose")
def test_platforms_that_somebody_chose_stay() -> None:
    jax.config.update("jax_platforms", "cuda,cpu")
    assert not start.settle_platforms(INSTALLED)
    assert jax.config.jax_platforms == "cuda,cpu"


def test_what_is_installed_here_is_found() -> None:
    """In this process, whose platform is a CPU or what the caller has chosen."""
    assert HERE.libtpu == (importlib.util.find_spec("libtpu") is not None)
    assert HERE.starts_devices == (HERE.libtpu or bool(HERE.plugins))
    assert not HERE.cuda or HERE.plugins, "CUDA is looked for where a plugin could use it"


@pytest.mark.parametrize(
    ("folder", "pattern"), [("/dev", "accel*"), ("/dev/vfio", "[0-9]*"), ("/dev", "none")]
)
def test_a_tpu_is_looked_for_by_its_files(
    monkeypatch: pytest.MonkeyPatch, folder: str, pattern: str
) -> None:  # holds KC4
    def glob(where: Path, wanted: str) -> list[Path]:
        return [where / "0"] if (str(where), wanted) == (folder, pattern) else []

    monkeypatch.setattr(Path, "glob", glob)
    assert start._may_have_tpu() == (pattern != "none")


def test_platforms_are_chosen_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.config, "update", lambda *given: pytest.fail(f"changed {given}"))
    assert jax.config.jax_platforms, "the tests run with a choice"
    assert not jaxconfig.keep_to_cpu()


def test_only_the_known_lines_are_held_back(capfd: pytest.CaptureFixture[str]) -> None:
    with start.without_noise():
        os.write(2, b"I0000 cudart_stub.cc:31] Could not find cuda drivers\nsomething else\n")
    assert capfd.readouterr().err == "something else\n"


def test_what_was_said_before_an_error_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with start.without_noise():
            os.write(2, b"a reason\n")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert capfd.readouterr().err == "a reason\n"


@pytest.mark.skipif(
    not BOTH_EXTRAS, reason="needs libtpu and jax's CUDA plugin, of the extras tpu and gpu"
)
@pytest.mark.skipif(not NO_DEVICE, reason="there may be a device")
@pytest.mark.parametrize(
    "arguments",
    [
        ("plugins",),
        ("explain",),
        ("env",),
        ("generate", "One day", "--max-tokens", "2"),
        ("check", "sampler:greedy"),
        ("config",),
        *(
            pytest.param(arguments, marks=pytest.mark.slow)
            for arguments in (
                ("eval", "--text", "text.txt"),
                (
                    "bench",
                    "kernels",
                    "--shapes",
                    SHAPE,
                    "--op",
                    "attention,rms_norm",
                    "--rounds",
                    "2",
                ),
                ("tune", "--shapes", SHAPE, "--rounds", "2", "--tuned-folder", "tuned"),
                ("new", "kernel", "quiet_kernel"),
                ("generate", "One day", "--engine", "oengine", "--max-tokens", "2", "--json"),
            )
        ),
    ],
    ids=lambda arguments: arguments[0],
)
def test_commands_are_quiet_with_both_extras_and_no_device(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    unset = ("JAX_PLATFORMS", "XLA_FLAGS", "TPU_SKIP_MDS_QUERY", "TF_CPP_MIN_LOG_LEVEL")
    env = {name: value for name, value in os.environ.items() if name not in unset}
    command = [sys.executable, "-m", "enginebay", *arguments]
    (tmp_path / "text.txt").write_text("Once upon a time there was a small bear. " * 8)
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=env, cwd=tmp_path, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.strip()
