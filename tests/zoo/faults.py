"""A fault as a record, and the planting of it: a copy of the package with one line changed,
imported under another name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

Kind = Literal[
    "mask",
    "scale",
    "heads",
    "border",
    "split",
    "accumulator",
    "race",
    "write",
    "dtype",
    "size",
    "feature",
]
More = Literal["storage", "stale", "value"]
"""Kinds that half B alone has: quantised caches, results of earlier calls, and numbers that few
inputs have.
"""

Half = Literal["A", "B"]

ROOT = Path(__file__).parents[2]
FOLDERS = {"right": ROOT / "tests" / "zoo" / "right"}
"""Where packages lie that are not in backends/."""

DEVICE_PACKAGES = ("enginebay_pallas", "enginebay_triton")
"""Whose kernels are interpreted here."""


SHARED = ("layout import", "interpreter")
"""Modules of which a faulty kernel uses the right ones: a kernel may check the class of a layout,
and a process of its own interprets Triton's kernels.
"""


@dataclasses.dataclass(frozen=True)
class Fault:
    """A faulty implementation of an op: in `source` the text `old` of one line is `new`.

    `source` is "package.module" of a right kernel: of a package in backends/, or "right.module" of
    tests/zoo/right. `kernel` is "package.module:attribute", the right implementation that goes
    wrong with it.
    """

    name: str
    op: str
    kind: Kind | More
    kernel: str
    source: str
    old: str
    new: str
    half: Half = "A"

    @property
    def package(self) -> str:
        """The package that is copied."""
        return self.source.partition(".")[0]

    @property
    def is_plain(self) -> bool:
        """Whether it is plain JAX, not a device's kernel that is interpreted."""
        return self.package not in DEVICE_PACKAGES


def source_text(fault: Fault) -> str:
    """The right source."""
    return (_folder(fault.package) / f"{fault.source.partition('.')[2]}.py").read_text(
        encoding="utf-8"
    )


def _folder(package: str) -> Path:
    if package in FOLDERS:
        return FOLDERS[package]
    (folder,) = ROOT.glob(f"backends/*/{package}")
    return folder


def planted(fault: Fault) -> Any:
    """The faulty kernel; a device's is interpreted."""
    text = source_text(fault)
    assert text.count(fault.old) == 1, (
        f"{fault.name}: {fault.old!r} is {text.count(fault.old)} times in {fault.source}"
    )
    alias = f"zoo_{hashlib.sha256(fault.name.encode()).hexdigest()[:12]}"
    folder = Path(tempfile.mkdtemp(prefix="enginebay-zoo-"))
    shutil.copytree(
        _folder(fault.package), folder / alias, ignore=shutil.ignore_patterns("__pycache__")
    )
    inside = "tests.zoo.right" if fault.package == "right" else fault.package
    module = fault.source.partition(".")[2]
    for path in (folder / alias).glob("*.py"):
        code = path.read_text(encoding="utf-8")
        code = code.replace(fault.old, fault.new) if path.stem == module else code
        code = code.replace(inside, alias)
        for shared in SHARED:
            code = code.replace(f"{alias}.{shared}", f"{inside}.{shared}")
        path.write_text(code, encoding="utf-8")
    return _imported(folder, alias, fault.kernel, interpreted=not fault.is_plain)


def _imported(folder: Path, alias: str, kernel: str, *, interpreted: bool) -> Any:
    sys.path.insert(0, str(folder))
    try:
        module, _, attribute = kernel.partition(":")
        made = getattr(importlib.import_module(f"{alias}.{module.partition('.')[2]}"), attribute)
    finally:
        sys.path.remove(str(folder))
        if not interpreted:  # an interpreter's own process may read the files later
            shutil.rmtree(folder)
    return made.interpreted() if interpreted else made


def right_kernel(kernel: str) -> Any:
    """The right implementation of "package.module:attribute"; a device's is interpreted."""
    module, _, attribute = kernel.partition(":")
    package = module.partition(".")[0]
    made = getattr(
        importlib.import_module(f"tests.zoo.{module}" if package == "right" else module), attribute
    )
    return made.interpreted() if package in DEVICE_PACKAGES else made
