"""Native kernels are compiled once, by the user's compiler, into a folder of the user's own;
without one others serve.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import pytest

from enginebay.errors import UnknownNameError, UnsupportedError
from enginebay_native import compiling
from tests.unit.serving import DEADLOCK_S

pytestmark = pytest.mark.xdist_group("native")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A user whose caches are in the folder, and who has compiled nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path


def need_compiler() -> list[str]:
    """The machine's own; without one there is nothing to test."""
    try:
        return compiling.find_compiler()
    except UnsupportedError as error:
        pytest.skip(str(error))


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o700)
    return path


@pytest.fixture
def compiler(user: Path) -> Path:
    """The machine's compiler without its optimisation, for speed; it writes down what it is called
    with.
    """
    real = shlex.join(need_compiler())
    return script(user / "my-c++", f'echo "$@" >> {user / "calls"}\nexec {real} "$@" -O0')


@pytest.fixture
def pretender(user: Path) -> Path:
    """Writes down the same, and makes an empty file: for tests of where libraries are kept."""
    made = 'for made in "$@"; do :; done\n: > "$made"'
    return script(user / "no-c++", f'echo "$@" >> {user / "calls"}\n{made}')


def calls(user: Path) -> list[str]:
    path = user / "calls"
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def test_a_library_is_kept_in_a_private_folder_and_found_again(
    user: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", f"{compiler} -DOF_MINE")
    first = compiling.library("linear_f32")
    folder = user / "cache" / "enginebay" / "native"
    assert list(folder.iterdir()) == [first], "nothing else is left there"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert hasattr(ctypes.CDLL(str(first)), "enginebay_linear_f32")
    assert compiling.library("linear_f32") == first
    [call] = calls(user)
    assert call.startswith("-DOF_MINE ")


def test_the_library_of_experts_is_not_compiled_when_its_kernel_is_chosen(
    user: Path, pretender: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(pretender))
    monkeypatch.delitem(sys.modules, "enginebay_native.grouped_linear", raising=False)
    importlib.import_module("enginebay_native.grouped_linear")
    assert calls(user) == []


def test_another_processor_gets_a_library_of_its_own(
    user: Path, pretender: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(pretender))
    found = [compiling.library("linear_f32")]
    read_text = Path.read_text
    cpuinfo = "flags : one and another\n"

    def read(path: Path, *args: Any, **options: Any) -> str:
        return cpuinfo if str(path) == "/proc/cpuinfo" else read_text(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", read)
    found.append(compiling.library("linear_f32"))
    cpuinfo = "flags : one\n"
    found.append(compiling.library("linear_f32"))
    monkeypatch.setattr("platform.machine", lambda: "another processor")
    found.append(compiling.library("linear_f32"))
    assert len(set(found)) == len(calls(user)) == 4


def test_what_several_need_at_once_is_compiled_once(
    user: Path, pretender: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(pretender))
    pretender.write_text(pretender.read_text(encoding="utf-8") + "sleep 0.2\n", encoding="utf-8")
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(compiling.library, ["linear_f32"] * 3))
    assert len(set(found)) == 1
    assert len(calls(user)) == 1


def test_libraries_are_compiled_side_by_side(
    user: Path, pretender: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler of one library waits until the compiler of the other has begun."""
    meet = (
        f'case "$@" in *attention_f32.cc*) me=a other=l;; *) me=l other=a;; esac\n'
        f"touch {user}/$me\n"
        f"for i in $(seq 100); do [ -e {user}/$other ] && exit 0; sleep 0.1; done\n"
        "echo alone >&2; exit 1\n"
    )
    pretender.write_text(pretender.read_text(encoding="utf-8") + meet, encoding="utf-8")
    monkeypatch.setenv("CXX", str(pretender))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    compiling.begin_compiling("attention_f32")
    found = [compiling.library(name) for name in ("linear_f32", "attention_f32")]
    for thread in threading.enumerate():
        if thread.name.startswith("enginebay-compile-"):
            thread.join(DEADLOCK_S)
    assert len(calls(user)) == 2
    assert sorted(found[0].parent.iterdir()) == sorted(found), "no lock is left"


def test_what_was_compiled_is_found_without_the_compiler(
    user: Path, pretender: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(pretender))
    first = compiling.library("linear_f32")
    pretender.unlink()
    assert compiling.library("linear_f32") == first
    with pytest.raises(UnsupportedError, match="is not there"):
        compiling.library("attention_f32")


def test_libraries_follow_from_their_own_sources(
    user: Path, pretender: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(pretender))
    sources = user / "src"
    shutil.copytree(compiling.SOURCES, sources)
    monkeypatch.setattr(compiling, "SOURCES", sources)
    before = {name: compiling.library(name) for name in ("linear_f32", "attention_f32")}
    (sources / "linear_f32.cc").write_text("// another", encoding="utf-8")
    assert compiling.library("attention_f32") == before["attention_f32"]
    assert compiling.library("linear_f32") != before["linear_f32"]
    (sources / "vectors.h").write_text("// another", encoding="utf-8")
    assert compiling.library("attention_f32") != before["attention_f32"]


@pytest.mark.parametrize(
    ("features", "level"),
    [
        (set(), None),
        (compiling.SSE4 - {"ssse3"}, None),
        (compiling.AVX2 - {"fma"}, "x86-64-v2"),
        (compiling.AVX2, "x86-64-v3"),
        (compiling.LEVELS["x86-64-v4"], "x86-64-v4"),
    ],
)
def test_a_wheels_library_serves_the_processors_of_its_level(
    user: Path,
    pretender: Path,
    features: set[str],
    level: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shipped = user / "lib"
    shipped.mkdir()
    monkeypatch.setattr(compiling, "SHIPPED", shipped)
    monkeypatch.setenv("CXX", str(pretender))
    made = {name: compiling.build_library("linear_f32", name, shipped) for name in compiling.LEVELS}
    assert ["-march=x86-64-v4" in call for call in calls(user)] == [True, False, False]
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(compiling, "find_compiler", lambda: [str(pretender)])
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(
        compiling, "processor_features", lambda: " ".join(["x86_64", *sorted(features)])
    )
    found = compiling.library("linear_f32")
    assert found == (made[level] if level else found)
    assert (found.parent == shipped) == bool(level)
    assert len(calls(user)) == (3 if level else 4), "what the wheel brought is not compiled"
    monkeypatch.setattr(jax, "__version__", "0.0.1")
    assert compiling.library("linear_f32").parent != shipped, "JAX's headers are compiled in"


def test_what_was_compiled_here_goes_before_what_the_wheel_brought(
    user: Path, pretender: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "find_compiler", lambda: [str(pretender)])
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(
        compiling, "processor_features", lambda: " ".join(["x86_64", *compiling.AVX2])
    )
    first = compiling.library("linear_f32")
    monkeypatch.setattr(compiling, "SHIPPED", user)
    brought = compiling.build_library("linear_f32", "x86-64-v3", user)
    assert compiling.library("linear_f32") == first
    first.unlink()
    assert compiling.library("linear_f32") == brought
    with pytest.raises(UnknownNameError, match="x86-64-v3"):
        compiling.build_library("linear_f32", "x86-64-v1", user)


@pytest.mark.parametrize("trouble", ["open", "a file"])
def test_a_folder_that_is_not_private_is_not_used(
    user: Path,
    pretender: Path,
    trouble: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CXX", str(pretender))
    folder = user / "cache" / "enginebay" / "native"
    folder.parent.mkdir(parents=True)
    if trouble == "open":
        folder.mkdir()
        folder.chmod(0o777)
    else:
        folder.touch()
    made = compiling.library("linear_f32")
    assert folder not in made.parents
    assert stat.S_IMODE(made.parent.stat().st_mode) == 0o700
    assert trouble != "open" or list(folder.iterdir()) == []
    assert [record.name for record in caplog.records] == ["enginebay.native"]
    assert "compiled kernels are not kept" in caplog.text
    assert compiling.library("linear_f32") == made
    assert len(calls(user)) == 1


def test_the_compiler_is_what_cxx_names_or_the_first_on_the_path(
    user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bin_folder = user / "bin"
    bin_folder.mkdir()
    monkeypatch.setenv("PATH", str(bin_folder))
    clang = script(bin_folder / "clang++", "exit 1")
    assert compiling.find_compiler() == [str(clang)]
    first = script(bin_folder / "c++", "exit 1")
    assert compiling.find_compiler() == [str(first)]
    monkeypatch.setenv("CXX", "clang++ -stdlib=libc++")
    assert compiling.find_compiler() == [str(clang), "-stdlib=libc++"]
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(UnsupportedError, match="/nowhere/c\\+\\+ is not there"):
        compiling.find_compiler()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "echo 'unknown option -march=native' >&2; echo more >&2; exit 1",
            "unknown option -march=native",
        ),
        ("exit 3", "exit status 3"),
        ("kill -9 $$", "exit status -9"),
    ],
)
def test_a_compiler_that_fails_says_why_and_leaves_nothing(
    user: Path, text: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(script(user / "bad-c++", text)))
    with pytest.raises(UnsupportedError, match=f"bad-c\\+\\+ failed: {said}") as error:
        compiling.library("linear_f32")
    assert "more" not in str(error.value)
    assert list((user / "cache" / "enginebay" / "native").iterdir()) == []


def test_a_compiler_that_does_not_end_is_ended(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(script(user / "slow-c++", "exec sleep 100")))
    monkeypatch.setattr(compiling, "TIMEOUT_S", 0.2)
    with pytest.raises(UnsupportedError, match="timed out after"):
        compiling.library("linear_f32")


PROGRAM = """
import json, sys
from enginebay.cli.program import main
for arguments in json.loads(sys.argv[1]):
    print("code", main(arguments), flush=True)
"""


def without_compiler(user: Path, *commands: list[str], **variables: str) -> tuple[list[str], str]:
    """Lines of stdout, and stderr, of commands in a fresh process that has a PATH without
    programs.
    """
    nothing = user / "nothing"
    nothing.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)],
        env=os.environ | {"PATH": str(nothing)} | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLOCK_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def reasons(record: Any) -> dict[str, tuple[str, dict[str, str]]]:
    """What was chosen for each setting, and why others were not."""
    return {
        choice["setting"]: (
            choice["chosen"],
            {one["name"]: one["reason"] for one in choice["refused"]},
        )
        for choice in record["choices"]
    }


def test_without_a_compiler_auto_takes_xla_and_a_choice_by_name_is_an_error(
    user: Path, config: str
) -> None:
    named = user / "named.toml"
    section = '\n[kernels.attention]\ndecode = "native"\n'
    named.write_text(Path(config).read_text(encoding="utf-8") + section, encoding="utf-8")
    lines, err = without_compiler(
        user,
        ["explain", "--json", "--config", config],
        ["generate", "Once", "--kernel", "linear=native", "--config", config],
        ["generate", "Once", "--config", str(named)],
    )
    first, *codes = (i for i, line in enumerate(lines) if line.startswith("code "))
    assert [lines[i] for i in (first, *codes)] == ["code 0", "code 2", "code 2"]
    found = reasons(json.loads("\n".join(lines[:first])))
    for setting in ("kernels.linear", "kernels.grouped_linear", "kernels.attention.decode"):
        chosen, refused = found[setting]
        assert chosen == "xla"
        assert refused["native"].startswith(
            "no C++ compiler. Allowed: what CXX names, or one of c++, g++"
        )
    assert err.count("no C++ compiler") == len(err.splitlines()) == 2
    assert "kernels.linear = 'native' cannot be used here" in err
    assert "kernels.attention.decode = 'native' cannot be used here" in err


@pytest.mark.long
def test_the_reason_names_the_compiler_that_cxx_names(user: Path, config: str) -> None:
    command = ["generate", "Once", "--kernel", "linear=native", "--config", config]
    lines, err = without_compiler(user, command, CXX="/nowhere/g++-12")
    assert lines == ["code 2"]
    assert "/nowhere/g++-12 is not there" in err


def test_weights_split_over_devices_are_multiplied_by_xla(run: Run, config: str) -> None:
    need_compiler()
    command = ("--mesh", "tensor=2", "--config", config)
    code, out, _ = run("explain", "--json", *command)
    found = reasons(json.loads(out))
    chosen, refused = found["kernels.linear"]
    assert (code, chosen) == (0, "xla")
    reason = "does not support weights split over devices"
    assert refused == dict.fromkeys(("native", "pallas", "triton"), reason)
    assert found["kernels.attention.decode"][0] == "native"
    code, out, _ = run("explain", "--json", "--kernel", "linear=native", *command)
    assert (code, reasons(json.loads(out))["kernels.linear"][0]) == (0, "native")


def test_one_device_gets_native_kernels_unless_others_are_named(run: Run, config: str) -> None:
    need_compiler()
    found = reasons(json.loads(run("explain", "--json", "--config", config)[1]))
    assert found["kernels.linear"][0] == found["kernels.attention.decode"][0] == "native"
    assert found["kernels.attention.prefill"][0] == "xla"
    others = ("--kernel", "linear=xla", "--attention", "xla")
    found = reasons(json.loads(run("explain", "--json", *others, "--config", config)[1]))
    assert found["kernels.linear"][0] == found["kernels.attention.decode"][0] == "xla"
