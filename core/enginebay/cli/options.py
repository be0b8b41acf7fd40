"""The flags that choose an engine's parts, shared by every command that makes one."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

from enginebay.config import PHASES, EngineConfig, make_config, read_toml
from enginebay.errors import InputError, explain


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """--config and a flag for each choice; flags win over the file."""
    group = parser.add_argument_group("engine")
    group.add_argument("--config", metavar="FILE", help="TOML file with any of the choices below")
    group.add_argument("--model", metavar="DIR|ID", help="folder, hub id, or demo: the embedded model")
    group.add_argument("--platform", metavar="NAME", help="devices to run on")
    group.add_argument("--dtype", metavar="T", help="float32, bfloat16, float16 or auto")
    group.add_argument("--engine", metavar="NAME")
    group.add_argument("--scheduler", metavar="NAME")
    group.add_argument("--sampler", metavar="NAME")
    group.add_argument(
        "--proposer", metavar="NAME", help="who drafts tokens that a step verifies; none by default"
    )
    _add_kernel_arguments(group)
    group.add_argument("--layout", metavar="NAME", help="cache layout")
    group.add_argument(
        "--tuned", choices=["auto", "off", "require"], help="use of tuned kernel configurations"
    )
    group.add_argument("--tuned-folder", metavar="DIR", help="folder of your own tables of tuned kernels")
    group.add_argument(
        "--mesh",
        metavar="AXIS=N",
        action="append",
        default=[],
        help="devices along a mesh axis, such as tensor=2",
    )
    for name, what in (
        ("max-model-len", "longest prompt plus output, in tokens"),
        ("max-num-seqs", "most requests that run together"),
        ("max-num-batched-tokens", "most prompt tokens in one step"),
        ("decode-steps", "most tokens a row gets in one compiled call"),
        ("draft-tokens", "most tokens of a row that are drafted for one pass of the model"),
    ):
        group.add_argument(f"--{name}", type=int, metavar="N", help=what)
    group.add_argument(
        "--no-overlap",
        dest="overlap_execution",
        action="store_false",
        default=None,
        help="read each step before the next is launched",
    )
    group.add_argument(
        "--verify-weights", action="store_true", default=None, help="refuse NaN and infinity while loading"
    )
    group.add_argument("--compile-cache", metavar="DIR", help='folder of compiled programs, auto, or "off"')
    group.add_argument(
        "--dump-step", metavar="DIR", help="write text and memory use of every compiled program into a folder"
    )


def add_profile_argument(parser: argparse.ArgumentParser) -> None:
    """--profile, for the commands that run an engine; `traced` does it."""
    parser.add_argument("--profile", metavar="DIR", help="write a trace of JAX's profiler into a folder")


@contextlib.contextmanager
def traced(args: argparse.Namespace) -> Iterator[None]:
    """While the block lasts, trace into the folder of --profile, if it is given; InputError when it cannot be written."""
    if args.profile is None:
        yield
        return
    import jax

    from enginebay.runner.dump import make_writable

    with jax.profiler.trace(make_writable(args.profile, "--profile")):
        yield


def _add_kernel_arguments(group: argparse._ArgumentGroup) -> None:
    """What computes each op."""
    group.add_argument(
        "--attention",
        metavar="[PHASE=]NAME",
        action="append",
        default=[],
        help="attention kernel, a name or module:attribute, for all phases or for decode, prefill or mixed; may be repeated",
    )
    group.add_argument(
        "--kernel",
        metavar="OP[.PHASE]=NAME",
        action="append",
        default=[],
        help="kernel of an op; may be repeated",
    )
    group.add_argument(
        "--interpret",
        action="store_true",
        default=None,
        help="a kernel for another platform that is chosen by name is interpreted",
    )
    group.add_argument(
        "--shadow",
        metavar="OP=NAME[@SHARE]",
        action="append",
        default=[],
        help="compare a candidate with the chosen kernel on a share of the steps (0.05)",
    )
    group.add_argument(
        "--no-verify-kernels",
        dest="verify_kernels",
        action="store_false",
        default=None,
        help="use kernels given by import path without a check",
    )


PLAIN = (
    "model",
    "platform",
    "dtype",
    "engine",
    "scheduler",
    "sampler",
    "proposer",
    "interpret",
    "layout",
    "tuned",
    "tuned_folder",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "decode_steps",
    "draft_tokens",
    "overlap_execution",
    "verify_weights",
    "verify_kernels",
    "compile_cache",
    "dump_step",
)
"""Flags whose values are configuration values as they are."""


def config_from(args: argparse.Namespace) -> EngineConfig:
    """The configuration of file and flags."""
    return make_config(read_toml(args.config) if args.config else {}, flag_values(args))


def flag_values(args: argparse.Namespace) -> dict[str, Any]:
    """The flags that were given, as configuration values."""
    values: dict[str, Any] = {name: getattr(args, name) for name in PLAIN if getattr(args, name) is not None}
    kernels: dict[str, Any] = {}
    if args.attention:
        kernels["attention"] = attention_by_phase(args.attention)
    for op, name in (split_pair(text, "--kernel", "OP[.PHASE]=NAME") for text in args.kernel):
        plain, _, phase = op.partition(".")
        phases = (phase,) if phase else PHASES
        kernels.setdefault(plain, {}).update(dict.fromkeys(phases, name))
    if kernels:
        values["kernels"] = kernels
    if args.shadow:
        values["shadow"] = dict(split_pair(text, "--shadow", "OP=NAME[@SHARE]") for text in args.shadow)
    if args.mesh:
        values["mesh"] = {
            axis: _count(size, axis) for axis, size in (split_pair(m, "--mesh", "AXIS=N") for m in args.mesh)
        }
    return values


def attention_by_phase(given: list[str]) -> dict[str, str]:
    """The kernel of each phase that is named, out of NAME, which is for all, and PHASE=NAME, which goes before that.

    InputError for a phase that is named twice. An unknown one is refused with the configuration.
    """
    everywhere: dict[str, str] = {}
    by_phase: dict[str, str] = {}
    for text in given:
        if "," in text:
            raise InputError(
                explain(f"--attention {text}", "NAME or PHASE=NAME", "Repeat the flag for each phase.")
            )
        phase, name = split_pair(text, "--attention", "PHASE=NAME") if "=" in text else ("", text)
        target, named = (by_phase, (phase,)) if phase else (everywhere, PHASES)
        if set(named) & set(target):
            once = f"one kernel for {phase or 'all phases'}"
            raise InputError(explain(f"--attention {' and '.join(given)}", once, "Leave one out."))
        target |= dict.fromkeys(named, name)
    return everywhere | by_phase


def split_pair(text: str, flag: str, form: str) -> tuple[str, str]:
    """The two sides of a=b; InputError naming the flag otherwise."""
    left, equals, right = text.partition("=")
    if not (left and equals and right):
        raise InputError(explain(f"{flag} {text}", form, "Write both sides."))
    return left, right


def _count(text: str, axis: str) -> int:
    if not text.isdecimal():
        raise InputError(explain(f"--mesh {axis}={text}", "a whole number of devices", "Correct it."))
    return int(text)
