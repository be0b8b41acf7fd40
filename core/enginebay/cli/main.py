"""Dispatch: one parser for the built-in commands, and those of plugins beside it."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Sequence

from enginebay import __version__
from enginebay.cli.command import Command
from enginebay.cli.interrupts import second_ends
from enginebay.cli.parsing import Parser, refuse_rest
from enginebay.cli.show import INTERRUPTED, plain_waits
from enginebay.errors import EnginebayError, InputError, PluginError, unknown_name

COMMANDS = {
    "generate": ("enginebay.cli.generate", "complete a prompt"),
    "chat": ("enginebay.cli.chat", "talk with a model"),
    "plugins": (
        "enginebay.cli.plugins",
        "list every part that is installed, and why one cannot be used",
    ),
    "explain": ("enginebay.cli.inform", "show what a configuration chooses, and why"),
    "config": (
        "enginebay.cli.inform",
        "show a configuration in full, or the schema of configurations",
    ),
    "env": ("enginebay.cli.inform", "show versions and devices, for a bug report"),
    "new": (
        "enginebay.cli.new",
        "write a plugin to begin with: a kernel, scheduler, sampler, processor, platform or engine",
    ),
}
"""The core's commands: the module with `add_arguments(name, parser)` and `run(name, args)`, and a
summary. Plugins bring the others.
"""

WITHOUT_JAX = ("plugins", "config")
"""Commands that end without importing JAX."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code: 0 done, 2 wrong input, 1 our fault, 130
    interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with second_ends():
            code = _dispatch(arguments)
        # so that a reader that went away is found here and not while Python ends
        sys.stdout.flush()
        return code
    except EnginebayError as error:
        print(f"enginebay: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _dispatch(arguments: list[str]) -> int:
    name = next((a for a in arguments if not a.startswith("-")), None)
    _refuse_flags_before(arguments)
    wants_help = bool({"-h", "--help"} & set(arguments))
    if name is not None and name not in WITHOUT_JAX and not wants_help:
        from enginebay.compose.platform_startup import start_jax

        start_jax()
    command = None if name is None else load_command(name)
    parser = Parser(
        prog="enginebay", description="Serve language models with JAX out of replaceable parts."
    )
    parser.add_argument("--version", action="version", version=f"enginebay {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for listed, summary in summaries(with_plugins=name not in COMMANDS).items():
        text = summary.replace("%", "%%")
        sub = commands.add_parser(listed, help=text, description=text[:1].upper() + text[1:] + ".")
        sub.add_argument(
            "--log-level",
            default="warning",
            choices=["debug", "info", "warning", "error"],
            help="least severe messages that are written to stderr",
        )
        if command is not None and listed == name:
            command.add_arguments(listed, sub)
    args, rest = parser.parse_known_args(arguments)
    refuse_rest(commands.choices[args.command], args, rest)
    logging.basicConfig(
        level=args.log_level.upper(),
        format="%(asctime)s %(name)s %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    assert command is not None, "argparse requires a command"
    with plain_waits(args.log_level):
        return command.run(args.command, args)


def load_command(name: str) -> Command:
    """The command of a name, of the core or of a plugin; UnknownNameError names the nearest."""
    if name in COMMANDS:
        module = importlib.import_module(COMMANDS[name][0])
        return Command(module.add_arguments, module.run)
    from enginebay.registry import load_registry

    registry = load_registry()
    if name not in registry.names("command"):
        raise unknown_name("command", name, list(summaries()), "See `enginebay --help`.")
    command = registry.load(registry.find("command", name))
    if not isinstance(command, Command):
        raise PluginError(
            f"command {name} is a {type(command).__name__}",
            "an enginebay.cli.command.Command",
            "Ask the plugin's author to register one.",
        )
    return command


def summaries(*, with_plugins: bool = True) -> dict[str, str]:
    """Names and summaries of all commands, the core's first."""
    found = {name: summary for name, (_, summary) in COMMANDS.items()}
    if with_plugins:
        from enginebay.registry import load_registry

        for entry in load_registry().entries:
            if entry.kind == "command" and entry.state == "ready" and entry.declaration is not None:
                found.setdefault(entry.declaration.name, entry.declaration.summary)
    return found


def _refuse_flags_before(arguments: list[str]) -> None:
    """InputError for a flag before the command: the program itself has two."""
    first = arguments[0] if arguments else ""
    command = next((a for a in arguments if not a.startswith("-")), None)
    if first.startswith("-") and first not in ("-h", "--help", "--version") and command is not None:
        todo = f"Put it behind the command: enginebay {command} {first}"
        raise InputError(f"{first} before the command", "--help or --version", todo)


if __name__ == "__main__":
    sys.exit(main())
