"""new: writes a plugin into a folder of its own. The plugin installs and passes its conformance
suite without any change.
"""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from string import Template

from enginebay.cli.command import Command
from enginebay.config_sections import AUTO
from enginebay.errors import InputError, unknown_name
from enginebay.plugins.hooks import FORMER_KINDS

KINDS: Mapping[str, str] = {
    "kernel": "kernel:attention:",
    "scheduler": "scheduler:",
    "sampler": "sampler:",
    "processor": "processor:",
    "proposer": "proposer:",
    "platform": "platform:",
    "engine": "engine:",
}
"""What can be written, with the prefix of its name in `enginebay check`."""

HOW_TO_CHOOSE: Mapping[str, str] = {
    "kernel": "enginebay generate --attention {name}",
    "scheduler": "enginebay generate --scheduler {name}",
    "sampler": "enginebay generate --sampler {name}",
    "proposer": "enginebay generate --proposer {name}",
    "platform": "enginebay generate --platform {name}",
    "engine": "enginebay generate --engine {name}",
}
"""The command that uses the part. Logits processors are absent: requests name them."""

MAX_CHARACTERS = 24
"""Max length of a name, so that the lines of the templates stay within 100 columns."""


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the kind, the name and the folder."""
    parser.add_argument("kind", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("name", metavar="NAME", help="name that the part is registered under")
    parser.add_argument(
        "--path",
        metavar="DIR",
        type=Path,
        help="folder of the plugin, which must not exist (default: enginebay-NAME)",
    )


def run(name: str, args: argparse.Namespace) -> int:
    """Write the plugin and print the next steps."""
    kind, _ = FORMER_KINDS.get(args.kind, (args.kind, None))
    folder = write_plugin(kind, args.name, args.path)
    print(f"wrote a {kind} to {folder}:")
    for path in sorted(folder.iterdir()):
        print(f"  {path.name}")
    print("\nnext:")
    print(f"  pip install -e '{folder}[test]'")
    print("  enginebay plugins")
    if kind in HOW_TO_CHOOSE:
        print(f"  {HOW_TO_CHOOSE[kind].format(name=args.name)}")
    else:
        print(
            f'  # LLM(..., processors=["{args.name}"]), then '
            f'SamplingParams(processors={{"{args.name}": {{}}}})'
        )
    print(f"  enginebay check {KINDS[kind]}{args.name}")
    print(f"  cd '{folder}' && pytest")
    return 0


def write_plugin(kind: str, name: str, path: Path | None = None) -> Path:
    """Write a plugin with one part of this name, and return its folder: pyproject.toml, one module
    and its test.

    Raises InputError for an unknown kind, a name that is invalid or taken, or a folder that exists
    or cannot be written.
    """
    if kind not in KINDS:
        raise unknown_name("kind of plugin", kind, KINDS)
    _check_name(name)
    folder = Path(f"enginebay-{name.replace('_', '-')}") if path is None else path
    if folder.exists():
        raise InputError(
            f"{folder} exists",
            "a folder that does not exist yet",
            "Pass another folder with --path.",
        )
    files = render(kind, name)
    try:
        folder.mkdir(parents=True)
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(
            f"{folder}: {reason}", "a folder that can be written to", "Pass another with --path."
        ) from None
    return folder


def render(kind: str, name: str) -> dict[str, str]:
    """Return the text of each file, by file name, for a valid kind and name."""
    module = f"enginebay_{name}"
    words = {
        "kind": kind,
        "name": name,
        "module": module,
        "cls": "".join(word.capitalize() for word in name.split("_")),
        "distribution": module.replace("_", "-"),
        "selector": KINDS[kind] + name,
    }
    templates = resources.files("enginebay.cli") / "templates"

    def fill(template: str) -> str:
        return Template((templates / template).read_text(encoding="utf-8")).substitute(words)

    return {
        "pyproject.toml": fill("pyproject.toml.txt"),
        f"{module}.py": fill(f"{kind}.py.txt"),
        f"test_{module}.py": fill("test.py.txt"),
    }


def _check_name(name: str) -> None:
    """Raise InputError unless the name is valid for a part, a module and a distribution, and is
    free.
    """
    is_right = re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) and len(name) <= MAX_CHARACTERS
    if not is_right or name == AUTO or keyword.iskeyword(name):
        allowed = (
            "lower-case words of letters and digits with _ between them, at most "
            f"{MAX_CHARACTERS} characters, not auto and no keyword"
        )
        raise InputError(f"name {name!r}", allowed, "Choose a name such as my_kernel.")
    from enginebay.plugins.registry import load_registry

    entries = load_registry(None).entries
    has_it = [e.distribution for e in entries if name in (e.name, e.package)]
    if has_it or importlib.util.find_spec(f"enginebay_{name}") is not None:
        owner = has_it[0] if has_it else f"module enginebay_{name}"
        raise InputError(
            f"name {name!r}, which {owner} has already",
            "a name that no installed part, plugin or module has",
            "Choose another name; `enginebay plugins` lists the installed parts.",
        )


COMMAND = Command(add_arguments, run)
