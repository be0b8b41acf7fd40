"""The small models of the tests. Each is written once, to the checkout's cache.

BRIEF has the first two layers of the demo model and its tokenizer, for tests of text, chats and
stop texts. Decoded greedily, BRIEF repeats one token. LATE has the last two layers; its greedy
tokens vary, so a wrong cache changes them. LEAST has the first layer alone. TINY has random weights
and a vocabulary of 96 tokens; it compiles fastest, and its tokens vary too. Tests that use the same
model, engine and sizes share compiled programs.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

from safetensors.numpy import load_file, save_file

from enginebay.plugins.registry import load_registry
from enginebay_testing.tiny import write_tiny_checkpoint

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "backends" / "models" / "enginebay_models" / "demo"
MODELS = ROOT / ".cache" / "models"
FIRST, LAST = (0, 1), (4, 5)


def _make(folder: Path, layers: tuple[int, ...]) -> None:
    """Write the demo model with only `layers` into a folder."""
    layer = re.compile(r"model\.layers\.(\d+)\.")
    kept = {}
    for name, tensor in load_file(DEMO / "model.safetensors").items():
        at = layer.match(name)
        if at is None:
            kept[name] = tensor
        elif int(at[1]) in layers:
            kept[f"model.layers.{layers.index(int(at[1]))}.{name[at.end() :]}"] = tensor
    for file in DEMO.glob("*.json"):
        shutil.copyfile(file, folder / file.name)
    config = json.loads((DEMO / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": len(layers)}))
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def _keep(made: Path, name: str) -> str:
    """Move a folder to its name in the cache; delete it if another process has put one there."""
    folder = made.parent / name
    try:
        made.rename(folder)
    except OSError:
        shutil.rmtree(made)
    return os.fspath(folder)


def _find_some(kind: str, layers: tuple[int, ...]) -> str:
    """The folder of some layers. The first process that needs it writes it.

    The folder's name contains a digest of the demo model's weights.
    """
    digest = hashlib.sha256((DEMO / "model.safetensors").read_bytes()).hexdigest()[:12]
    name = f"{kind}-{len(layers)}-{digest}"
    if (MODELS / name).exists():
        return os.fspath(MODELS / name)
    made = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=MODELS))
    _make(made, layers)
    return _keep(made, name)


def _find_tiny() -> str:
    """The folder of TINY. Its name contains a digest of its content.

    A changed generator therefore writes another folder.
    """
    made = write_tiny_checkpoint(
        Path(tempfile.mkdtemp(prefix="tiny-", dir=MODELS)), load_registry()
    )
    content = b"".join(file.read_bytes() for file in sorted(made.iterdir()))
    return _keep(made, f"tiny-{hashlib.sha256(content).hexdigest()[:12]}")


MODELS.mkdir(parents=True, exist_ok=True)
BRIEF = _find_some("brief", FIRST)
LEAST = _find_some("least", FIRST[:1])
LATE = _find_some("late", LAST)
TINY = _find_tiny()
