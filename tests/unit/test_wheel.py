"""What is in the wheel: every package with its types and entry points, the demo model, and nothing
else.
"""

from __future__ import annotations

import configparser
import importlib.util
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

MAX_DEMO_BYTES = 6_000_000
DEMO = "enginebay_models/demo/"

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("hatchling") is None or importlib.util.find_spec("pip") is None,
        reason="building without an isolated environment needs hatchling and pip; "
        "the test extra has them",
    ),
    pytest.mark.xdist_group("wheel"),
]


@pytest.fixture(scope="module")
def project(repo_root: Path) -> dict[str, Any]:
    return tomllib.loads((repo_root / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def wheel(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        str(repo_root),
        "--no-deps",
        "--no-build-isolation",
    ]
    done = subprocess.run([*command, "-w", str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def test_every_package_is_in_the_wheel_with_its_types(
    wheel: zipfile.ZipFile, project: dict[str, Any]
) -> None:
    folders = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    names = set(wheel.namelist())
    for package in (PurePosixPath(folder).name for folder in folders):
        assert f"{package}/__init__.py" in names
        assert f"{package}/py.typed" in names


def test_the_templates_of_new_plugins_are_in_the_wheel(
    wheel: zipfile.ZipFile, repo_root: Path
) -> None:
    templates = sorted((repo_root / "core/enginebay/cli/templates").iterdir())
    assert templates
    assert {f"enginebay/cli/templates/{path.name}" for path in templates} <= set(wheel.namelist())


def test_libraries_of_the_page_are_in_the_wheel_with_their_licences(
    wheel: zipfile.ZipFile, repo_root: Path
) -> None:
    folder = "enginebay_server/ui/vendor/"
    found = {name.removeprefix(folder) for name in wheel.namelist() if name.startswith(folder)}
    assert found == {
        *("LICENSES.txt", "code-dark.css", "code-light.css", "highlight.js", "marked.js"),
        *("purify.js", "uplot.css", "uplot.js"),
    }
    licences = wheel.read(f"{folder}LICENSES.txt").decode()
    for library in ("marked", "DOMPurify", "highlight.js", "uPlot"):
        assert f": {library} " in licences
    assert any(
        name.endswith("ui/vendor/LICENSES.txt")
        for name in wheel.namelist()
        if ".dist-info/licenses/" in name
    )


def test_every_package_folder_of_the_tree_is_declared(
    repo_root: Path, project: dict[str, Any]
) -> None:
    declared = set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    tops = project["tool"]["hatch"]["build"]["dev-mode-dirs"]
    present = {
        f"{top}/{path.parent.name}"
        for top in tops
        for path in (repo_root / top).glob("*/__init__.py")
    }
    assert present == declared


def test_wheel_has_packages_and_metadata_only(
    wheel: zipfile.ZipFile, project: dict[str, Any]
) -> None:
    folders = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    allowed = {PurePosixPath(folder).name for folder in folders}
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == allowed
    assert not [name for name in wheel.namelist() if "__pycache__" in name]


def test_entry_points_name_modules_of_the_wheel(
    wheel: zipfile.ZipFile, project: dict[str, Any]
) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt")]
    points = configparser.ConfigParser()
    points.read_string(wheel.read(name).decode())
    assert dict(points["enginebay"]) == project["project"]["entry-points"]["enginebay"]
    assert points["console_scripts"]["enginebay"] == "enginebay.cli:main"
    names = set(wheel.namelist())
    for target in points["enginebay"].values():
        module = target.split(":")[0].replace(".", "/")
        assert {f"{module}.py", f"{module}/__init__.py"} & names, f"{target} is not in the wheel"


def test_demo_model_is_a_complete_checkpoint_of_at_most_six_megabytes(
    wheel: zipfile.ZipFile,
) -> None:
    demo = [entry for entry in wheel.infolist() if entry.filename.startswith(DEMO)]
    names = {entry.filename.removeprefix(DEMO) for entry in demo}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    assert any(name.endswith(".safetensors") for name in names)
    assert sum(entry.compress_size for entry in demo) <= MAX_DEMO_BYTES


def test_metadata_carries_the_licence(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = wheel.read(name).decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Author: the enginebay authors" in metadata
    assert any(entry.endswith("licenses/LICENSE") for entry in wheel.namelist())


def tool(repo_root: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, repo_root / f"tools/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_hook(repo_root: Path) -> Any:
    return tool(repo_root, "wheel_hook").NativeHook(str(repo_root), {}, None, None, "", "wheel")


LIBRARIES = [
    *("attention_bf16", "attention_codes", "attention_f32"),
    *(f"group_rounded_linear_{form}" for form in ("s4", "s8", "u4", "zeros_s8")),
    *("grouped_linear", "linear_bf16"),
    *("linear_f32", "linear_f8", "linear_s8", "lora", "panel_linear"),
    *(f"quantized_linear_{form}" for form in ("s4", "s8", "u4", "zeros_s8")),
    *(f"rounded_linear_{form}" for form in ("s4", "s8", "u4", "zeros_s8")),
]


@pytest.mark.parametrize("levels", ["x86-64-v3", "x86-64-v3,x86-64-v4"])
def test_a_wheel_for_levels_of_processors_brings_the_compiled_kernels(
    levels: str, repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretender = tmp_path / "c++"
    pretender.write_text(
        '#!/bin/sh\nfor made in "$@"; do :; done\necho "$@" > "$made"\n', encoding="utf-8"
    )
    pretender.chmod(0o700)
    monkeypatch.setenv("CXX", str(pretender))
    monkeypatch.setattr(sys, "path", list(sys.path))
    data: dict[str, Any] = {"force_include": {}}
    hook = make_hook(repo_root)
    hook.initialize("standard", data)
    assert data == {"force_include": {}}, "without the variable the wheel is plain Python"
    monkeypatch.setenv("ENGINEBAY_WHEEL_CPU", levels)
    hook.initialize("editable", data)
    assert data == {"force_include": {}}
    hook.initialize("standard", data)
    assert data["pure_python"] is False
    assert data["tag"].startswith("py3-none-")
    names = [PurePosixPath(name) for name in data["force_include"].values()]
    assert {name.parent.as_posix() for name in names} == {"enginebay_native/lib"}
    for level in levels.split(","):
        mine = [n.name for n in names if f"-{level}-" in n.name]
        assert sorted(name.partition(f"-{level}-")[0] for name in mine) == LIBRARIES
    made = [Path(path) for path in data["force_include"]]
    texts = [path.read_text(encoding="utf-8") for path in made]
    assert all(
        f"-march={path.name.partition('-')[2].rpartition('-')[0]}" in text
        for path, text in zip(made, texts, strict=True)
    )
    assert len(made) == len(LIBRARIES) * len(levels.split(","))
    hook.finalize("standard", data, "")
    assert not any(path.exists() for path in made)


def test_every_place_names_the_version_of_the_project(repo_root: Path) -> None:
    release = tool(repo_root, "release")
    assert release.version_faults(release.project()["version"]) == []
    assert len(release.version_faults("0.0.1")) == 3
