"""Finds and runs the command of a command line; plugins register the commands."""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from enginebay import __version__
from enginebay.cli.command import LOG_LEVELS, Command
from enginebay.cli.interrupts import INTERRUPTED, second_ends
from enginebay.cli.parsing import CommandParser, refuse_rest
from enginebay.cli.waiting import plain_waits
from enginebay.errors import EnginebayError, InputError, PluginError, unknown_name
from enginebay.plugins.registry import Registry, load_registry
from enginebay.toml_file import read_toml

FIRST_STEPS = """\
enginebay runs language models in JAX; every part can be replaced by a plugin.

  enginebay generate "Once upon a time"   text from the small model that comes with it
  enginebay serve demo                    an OpenAI-compatible server, with a chat page at /ui
  enginebay explain                       which engine, kernels and other parts run, and why

`enginebay --help` lists all commands. With --model, generate and explain take a model of yours: a
folder, a GGUF file or a hub id.
"""
"""What the program says when it is run without a command."""

PLUGIN = "cli"
"""The entry point that registers the built-in commands, which are found whatever is chosen."""

ASCII = ("ascii", "us-ascii", "ansi_x3.4-1968")
"""Names of the encoding that Python may choose for a terminal without letters beyond it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code: 0 done, 2 wrong input, 1 our fault, 130
    interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    _show_any_text()
    try:
        with second_ends():
            code = _dispatch(arguments)
        # Flush here, so that a closed pipe raises BrokenPipeError below and not while Python exits.
        sys.stdout.flush()
        return code
    except EnginebayError as error:
        print(f"enginebay: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _show_any_text() -> None:
    """Let stdout write characters that its encoding lacks as escapes, as stderr does, and read
    UTF-8 where Python would read ASCII.
    """
    if isinstance(sys.stdin, io.TextIOWrapper) and sys.stdin.encoding.lower() in ASCII:
        sys.stdin.reconfigure(encoding="utf-8")
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _dispatch(arguments: list[str]) -> int:
    if not arguments:
        print(FIRST_STEPS, end="")
        return 0
    name = next((a for a in arguments if not a.startswith("-")), None)
    _refuse_flags_before(arguments)
    registry = find_commands(name)
    if name in registry.names("command") and not {"-h", "--help"} & set(arguments):
        declared = registry.find("command", name).declaration
        if declared is not None and not declared.capabilities.get("without_jax"):
            from enginebay.jax_start import start_jax

            start_jax()
    command = None if name is None else load_command(name, registry)
    parser = CommandParser(
        prog="enginebay",
        description="Run language models in JAX; every part can be replaced by a plugin.",
    )
    parser.add_argument("--version", action="version", version=f"enginebay {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for listed, summary in summaries(registry).items():
        text = summary.replace("%", "%%")
        sub = commands.add_parser(listed, help=text, description=text[:1].upper() + text[1:] + ".")
        sub.add_argument(
            "--log-level",
            default="warning",
            choices=LOG_LEVELS,
            help="lowest severity of messages that are written to stderr",
        )
        if command is not None and listed == name:
            command.add_arguments(listed, sub)
            sub.set_defaults(**_file_defaults(command, arguments))
    args, rest = parser.parse_known_args(arguments)
    refuse_rest(commands.choices[args.command], args, rest)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLineFormatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logging.basicConfig(level=args.log_level.upper(), handlers=[handler])
    if args.log_level == "info":  # JAX reports there which devices this machine does not have
        logging.getLogger("jax").setLevel(logging.WARNING)
    assert command is not None, "argparse requires a command"
    with plain_waits(args.log_level):
        return command.run(args.command, args)


def _file_defaults(command: Command, arguments: Sequence[str]) -> Mapping[str, Any]:
    """Return the values of flags that the file of --config sets."""
    if command.file_defaults is None or {"-h", "--help"} & set(arguments):
        return {}
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", nargs="?")
    path = parser.parse_known_args(arguments)[0].config
    return {} if path is None else command.file_defaults(read_toml(path))


def find_commands(name: str | None = None) -> Registry:
    """Return the commands of all plugins. If `name` is a built-in command, no other plugin is
    loaded.
    """
    own = load_registry([PLUGIN])
    if name in own.names("command"):
        return own
    others = [entry for entry in load_registry().entries if entry.package != PLUGIN]
    return Registry([*own.entries, *others])


def load_command(name: str, registry: Registry | None = None) -> Command:
    """Load the command of a name; UnknownNameError suggests the nearest name."""
    registry = find_commands(name) if registry is None else registry
    if name not in registry.names("command"):
        raise unknown_name("command", name, list(summaries(registry)), "See `enginebay --help`.")
    command = registry.load(registry.find("command", name))
    if not isinstance(command, Command):
        raise PluginError(
            f"command {name} is a {type(command).__name__}",
            "an enginebay.cli.command.Command",
            "Report this to the author of the plugin.",
        )
    return command


def summaries(registry: Registry | None = None) -> dict[str, str]:
    """Return the names and summaries of all commands."""
    entries = (find_commands() if registry is None else registry).entries
    ready = [e.declaration for e in entries if (e.kind, e.state) == ("command", "ready")]
    return {declared.name: declared.summary for declared in ready if declared is not None}


def _refuse_flags_before(arguments: list[str]) -> None:
    """Raise InputError for a flag before the command, except --help and --version."""
    first = arguments[0] if arguments else ""
    command = next((a for a in arguments if not a.startswith("-")), None)
    if first.startswith("-") and first not in ("-h", "--help", "--version") and command is not None:
        todo = f"Put it after the command: enginebay {command} {first}"
        raise InputError(f"{first} before the command", "--help or --version", todo)


def one_line(text: str) -> str:
    """Return a text with every character that is not printable as an escape: a line
    end would begin a line of its own, and an escape sequence would change what a terminal shows.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text
    )


class OneLineFormatter(logging.Formatter):
    """Formats a record whose message is one line. A traceback follows on lines of its own, each
    with its own characters escaped.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line of a record, without its traceback."""
        return one_line(super().formatMessage(record))

    def formatException(self, ei: object) -> str:
        """Return a traceback: lines that a message in it forges are indented as all others are."""
        text = super().formatException(ei)  # type: ignore[arg-type]
        return "\n".join(f"  {one_line(line)}" for line in text.split("\n"))
