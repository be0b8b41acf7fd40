"""Dispatch: one parser for the built-in commands, and those of plugins beside it."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Sequence

from enginebay import __version__
from enginebay.cli.interrupts import second_ends
from enginebay.cli.parsing import Parser, refuse_rest
from enginebay.cli.show import INTERRUPTED, plain_waits
from enginebay.errors import EnginebayError, InputError, explain, unknown_name

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
    "check": (
        "enginebay.cli.check",
        "hold registered parts to their contracts, each case in a process of its own",
    ),
    "bench": (
        "enginebay.cli.bench",
        "measure engines side by side, or every implementation of an op",
    ),
    "tune": ("enginebay.cli.tune", "search the fastest configurations of kernels on this machine"),
    "eval": (
        "enginebay.cli.eval",
        (
            "hold a configuration against a reference on a text: perplexity, KL divergence, "
            "greedy tokens"
        ),
    ),
    "new": (
        "enginebay.cli.new",
        "write a plugin to begin with: a kernel, scheduler, sampler, processor, platform or engine",
    ),
}
"""Each command: the module with its `add_arguments(name, parser)` and `run(name, args)`, and what
it does.
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
    if name is not None and name not in COMMANDS:
        return _run_plugin_command(name, arguments)
    if name is not None and name not in WITHOUT_JAX and not {"-h", "--help"} & set(arguments):
        from enginebay.build.start import start_jax

        start_jax()
    parser = Parser(
        prog="enginebay", description="Serve language models with JAX out of replaceable parts."
    )
    parser.add_argument("--version", action="version", version=f"enginebay {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command, (module, summary) in COMMANDS.items():
        sub = commands.add_parser(
            command, help=summary, description=summary[0].upper() + summary[1:] + "."
        )
        sub.add_argument(
            "--log-level",
            default="warning",
            choices=["debug", "info", "warning", "error"],
            help="least severe messages that are written to stderr",
        )
        if command == name:
            importlib.import_module(module).add_arguments(command, sub)
    if name is None and {"-h", "--help"} & set(arguments):
        for command, summary in _plugin_commands():
            commands.add_parser(command, help=summary)
    args, rest = parser.parse_known_args(arguments)
    refuse_rest(commands.choices[args.command], args, rest)
    logging.basicConfig(
        level=args.log_level.upper(),
        format="%(asctime)s %(name)s %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    with plain_waits(args.log_level):
        code: int = importlib.import_module(COMMANDS[args.command][0]).run(args.command, args)
    return code


def _refuse_flags_before(arguments: list[str]) -> None:
    """InputError for a flag before the command: the program itself has two."""
    first = arguments[0] if arguments else ""
    command = next((a for a in arguments if a in COMMANDS), None)
    if first.startswith("-") and first not in ("-h", "--help", "--version") and command is not None:
        todo = f"Put it behind the command: enginebay {command} {first}"
        raise InputError(explain(f"{first} before the command", "--help or --version", todo))


def _plugin_commands() -> list[tuple[str, str]]:
    """Names and summaries of the commands of plugins, for the program's help."""
    from enginebay.registry import load_registry

    found = [
        e.declaration for e in load_registry().entries if e.kind == "command" and e.state == "ready"
    ]
    return [
        (d.name, d.summary.replace("%", "%%"))
        for d in found
        if d is not None and d.name not in COMMANDS
    ]


def _run_plugin_command(name: str, arguments: list[str]) -> int:
    from enginebay.registry import load_registry

    registry = load_registry()
    if name not in registry.names("command"):
        raise unknown_name(
            "command", name, [*COMMANDS, *registry.names("command")], "See `enginebay --help`."
        )
    code: int = registry.load(registry.find("command", name))(
        arguments[arguments.index(name) + 1 :]
    )
    return code


if __name__ == "__main__":
    sys.exit(main())
