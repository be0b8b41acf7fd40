"""Variants: what is compared, each by a name and the command that starts its process."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from enginebay.compose.composition import open_checkpoint
from enginebay.config import EngineConfig
from enginebay.errors import InputError
from enginebay.ops.select import is_import_path
from enginebay.plugins.registry import load_registry

PEERS = Path(__file__).parent / "peers"
SCRIPTS = {
    "transformers": "transformers_peer.py",
    "llama.cpp": "llama_cpp_peer.py",
    "openvino": "openvino_peer.py",
    "vllm": "vllm_peer.py",
}
"""The adapters, each a program for an environment that has the other engine."""
KINDS = f"http://ADDRESS, {':PYTHON, '.join(SCRIPTS)}:PYTHON or command:PROGRAM"


@dataclasses.dataclass(frozen=True)
class ForeignKernel:
    """A kernel that is not built in, by its registered name or import path."""

    op: str
    name: str
    platform: str


def foreign_kernels(names: Mapping[str, str], platform: str) -> list[ForeignKernel]:
    """Return the kernels that are not built in, of names by op, or by "op.phase"."""
    registry = load_registry()
    others = {(e.op, e.name) for e in registry.entries if e.kind == "kernel" and not e.built_in}
    pairs = dict.fromkeys((where.partition(".")[0], name) for where, name in names.items())
    return [
        ForeignKernel(op, name, platform)
        for op, name in pairs
        if is_import_path(name) or (op, name) in others
    ]


@dataclasses.dataclass(frozen=True)
class ComparedVariant:
    """A program that answers runs. `is_ours`: an engine of a configuration, whose results are
    those of the reference if nothing is wrong.
    """

    name: str
    command: tuple[str, ...]
    is_ours: bool = False
    kernels: tuple[ForeignKernel, ...] = ()
    """Kernels that the configuration names, without built-in ones."""

    @property
    def record(self) -> dict[str, object]:
        """The fields that are equal if an older record has the same variant."""
        command = ["python" if one == sys.executable else one for one in self.command]
        return {"name": self.name, "command": command, "ours": self.is_ours}


def engine_variant(name: str, config: EngineConfig) -> ComparedVariant:
    """An engine of a configuration, in a process of this Python."""
    module = "enginebay_bench.compare.engine_process"
    named = {
        f"{op}.{phase}": kernel
        for op, choice in config.kernels.items()
        for phase, kernel in choice.model_dump().items()
    }
    return ComparedVariant(
        name,
        (sys.executable, "-m", module, config.model_dump_json()),
        is_ours=True,
        kernels=tuple(foreign_kernels(named, config.platform)),
    )


def peer_variant(text: str, config: EngineConfig, dtype: str) -> ComparedVariant:
    """A peer as NAME=KIND:WHAT or NAME=ADDRESS[#MODEL]. An adapter serves the model and the dtype
    of the configuration.

    InputError for another form, and for a program that does not exist.
    """
    name, has_value, value = text.partition("=")
    kind, _, what = value.partition(":")
    if name and value.startswith(("http://", "https://")):
        address, _, model = value.partition("#")
        return ComparedVariant(
            name, (sys.executable, str(PEERS / "http_peer.py"), address, *[model][: bool(model)])
        )
    if not (name and has_value and what) or kind not in (*SCRIPTS, "command"):
        raise InputError(
            f"--peer {text}", f"NAME={KINDS}", "For example hf=transformers:/venv/bin/python."
        )
    if kind == "command":
        try:
            command = tuple(shlex.split(what))
        except ValueError:
            command = ()
        if not command:
            raise InputError(f"--peer {text}", "a command", "Write it as in a shell.")
        return ComparedVariant(name, command)
    if not os.access(what, os.X_OK):
        raise InputError(
            f"--peer {text}",
            "the path of a Python that can be run",
            "Name the interpreter of the environment that has the other engine.",
        )
    model = str(open_checkpoint(load_registry(), config).folder)
    more = str(config.max_model_len or 4096) if kind == "llama.cpp" else dtype
    return ComparedVariant(name, (what, str(PEERS / SCRIPTS[kind]), model, more))
