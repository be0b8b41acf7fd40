"""The flags that choose the parts of an engine, shared by every command that makes one."""

from __future__ import annotations

import argparse
import contextlib
import tomllib
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from enginebay.config import EngineConfig, make_config, merge
from enginebay.config_sections import PHASES, Choice
from enginebay.errors import InputError
from enginebay.toml_file import read_settings

CACHE_DTYPE = "--cache-dtype"
"""The short form of --kv-cache-dtype."""


FLAGS: Mapping[str, str] = {
    "model": "DIR|ID|FILE",
    "platform": "NAME",
    "dtype": "T",
    "weight_dtype": "T",
    "kv_cache_dtype": "T",
    "quantization": "NAME",
    "activation_quantization": "",
    "engine": "NAME",
    "scheduler": "NAME",
    "sampler": "NAME",
    "proposer": "NAME",
    "layout": "NAME",
    "generation_config": "",
    "special_tokens_in_text": "",
    "max_model_len": "N",
    "max_num_seqs": "N",
    "max_num_batched_tokens": "N",
    "decode_steps": "N",
    "mixed_steps": "",
    "stream_chunk_tokens": "N",
    "draft_tokens": "N",
    "max_loras": "N",
    "max_lora_rank": "N",
    "max_cpu_loras": "N",
    "interpret": "",
    "tuned": "",
    "tuned_folder": "DIR",
    "verify_weights": "",
    "compile_cache": "DIR",
    "dump_step": "DIR",
}
"""Fields of EngineConfig that have a flag of the same name, with the placeholder of its value; ""
for a switch, and for one of a few words. Type, words, default and help come from the field.
"""


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --config and one flag per setting; a flag overrides the file."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--config", metavar="FILE", help="TOML file with settings; flags override it"
    )
    for name, metavar in FLAGS.items():
        _add_flag(group, name, metavar)
    _add_kernel_arguments(group)
    group.add_argument(
        "--mesh",
        metavar="AXIS=N",
        action="append",
        default=[],
        help="devices along a mesh axis, such as tensor=2 (default: one device)",
    )
    _add_running_arguments(group)


def _add_flag(group: argparse._ArgumentGroup, name: str, metavar: str) -> None:
    """Declare the flag of a field of EngineConfig."""
    field = EngineConfig.model_fields[name]
    what = str(field.description)
    flags = [f"--{name.replace('_', '-')}", *([CACHE_DTYPE] if name == "kv_cache_dtype" else [])]
    if field.annotation is bool:
        group.add_argument(*flags, action="store_true", default=None, help=what)
    elif metavar:
        kind = int if field.annotation in (int, int | None) else str
        group.add_argument(*flags, type=kind, metavar=metavar, help=with_default(what, name))
    else:
        choices = typing.get_args(field.annotation)
        group.add_argument(*flags, choices=choices, help=with_default(what, name))


def only_adapter(config: EngineConfig) -> str | None:
    """Return the name of the only adapter in the configuration, which a command with one request
    uses; None when there is none. InputError when there are several.
    """
    if len(config.lora) > 1:
        raise InputError(
            f"{len(config.lora)} adapters: {', '.join(config.lora)}",
            "one adapter for this command",
            "Pass --lora once, and leave the section `lora` out of the configuration file.",
        )
    return next(iter(config.lora), None)


def _add_running_arguments(group: argparse._ArgumentGroup) -> None:
    """Declare the flags for how steps run and compile, and --set."""
    group.add_argument(
        "--no-overlap",
        dest="overlap_execution",
        action="store_false",
        default=None,
        help="read the tokens of each step before the next step is launched",
    )
    group.add_argument(
        "--lora",
        metavar="NAME=DIR",
        action="append",
        default=[],
        help="load a LoRA adapter in the format of PEFT; may be repeated (default: none)",
    )
    group.add_argument(
        "--set",
        dest="settings",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="any setting, by its name in a configuration file, "
        "such as engine.page_size=32 or seed=3; may be repeated",
    )


def with_default(what: str, field: str) -> str:
    """Return a help text with the default of a field of EngineConfig. What an unset field means
    becomes the default.
    """
    found = EngineConfig.model_fields[field]
    default = found.default.name if isinstance(found.default, Choice) else found.default
    if default is None:  # the description says what an unset field means
        default = str(found.description).partition("unset: ")[2] or "none"
    return f"{what.partition('; unset: ')[0]} (default: {default})".replace("%", "%%")


def add_profile_argument(parser: argparse.ArgumentParser) -> None:
    """Declare --profile, for commands that run an engine; `traced` implements it."""
    parser.add_argument(
        "--profile", metavar="DIR", help="write a trace of JAX's profiler to this folder"
    )


@contextlib.contextmanager
def traced(args: argparse.Namespace) -> Iterator[None]:
    """Within the block, write a profiler trace to the folder of --profile, if it was passed.
    InputError when the folder cannot be written.
    """
    if args.profile is None:
        yield
        return
    import jax

    from enginebay.folders import make_writable

    with jax.profiler.trace(make_writable(args.profile, "--profile")):
        yield


def _add_kernel_arguments(group: argparse._ArgumentGroup) -> None:
    """Declare the flags that choose kernels."""
    group.add_argument(
        "--attention",
        metavar="[PHASE=]NAME",
        action="append",
        default=[],
        help="attention kernel, by name or module:attribute, for all phases or for decode, prefill "
        "or mixed; may be repeated (default: auto)",
    )
    group.add_argument(
        "--kernel",
        metavar="OP[.PHASE]=NAME",
        action="append",
        default=[],
        help="kernel of an op, such as linear=xla; may be repeated (default: auto for each)",
    )
    group.add_argument(
        "--shadow",
        metavar="OP=NAME[@SHARE]",
        action="append",
        default=[],
        help="compare a candidate with the chosen kernel on a share of the steps "
        "(default: no candidate; default SHARE: 0.05)",
    )
    group.add_argument(
        "--capture",
        metavar="FILE",
        help="write the calls of ops in some steps into FILE, for --trace of bench kernels, check "
        "and tune (default: no file)",
    )
    group.add_argument(
        "--no-verify-kernels",
        dest="verify_kernels",
        action="store_false",
        default=None,
        help="use kernels from import paths without checking them first",
    )


def _plain_flags() -> list[str]:
    """Return the fields of EngineConfig that a flag of the same name sets without conversion."""
    parser = argparse.ArgumentParser(add_help=False)
    add_engine_arguments(parser)
    fields = EngineConfig.model_fields
    return [a.dest for a in parser._actions if a.dest in fields and a.default is None]


OWN_SAMPLING = {"generation_config": "none"}
"""Defaults of commands that measure, below file and flags: sampling never depends on the
generation_config.json of a checkpoint.
"""


def config_from(args: argparse.Namespace) -> EngineConfig:
    """Make the configuration from the file and the flags."""
    return make_config(read_settings(args.config), flag_values(args))


def flag_values(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags that were passed, as configuration values."""
    values: dict[str, Any] = {
        name: getattr(args, name) for name in _plain_flags() if getattr(args, name) is not None
    }
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
        values["shadow"] = dict(
            split_pair(text, "--shadow", "OP=NAME[@SHARE]") for text in args.shadow
        )
    if args.lora:
        values["lora"] = dict(split_pair(text, "--lora", "NAME=DIR") for text in args.lora)
    if args.mesh:
        values["mesh"] = {
            axis: _count(size, axis)
            for axis, size in (split_pair(m, "--mesh", "AXIS=N") for m in args.mesh)
        }
    for text in args.settings:
        values = merge(values, setting(text))
    return values


def setting(text: str) -> dict[str, Any]:
    """Return the section that --set KEY=VALUE sets; a value that is not TOML becomes a string."""
    key, written = split_pair(text, "--set", "KEY=VALUE")
    try:
        value: Any = tomllib.loads(f"value = {written}")["value"]
    except tomllib.TOMLDecodeError:
        value = written
    for name in reversed(key.split(".")):
        value = {name: value}
    return dict(value)


def attention_by_phase(given: list[str]) -> dict[str, str]:
    """Return the kernel of each phase. NAME sets every phase; PHASE=NAME overrides it for one
    phase.

    Raises InputError for a phase that is set twice. The configuration refuses unknown phases.
    """
    everywhere: dict[str, str] = {}
    by_phase: dict[str, str] = {}
    for text in given:
        if "," in text:
            raise InputError(
                f"--attention {text}", "NAME or PHASE=NAME", "Repeat the flag for each phase."
            )
        phase, name = split_pair(text, "--attention", "PHASE=NAME") if "=" in text else ("", text)
        target, named = (by_phase, (phase,)) if phase else (everywhere, PHASES)
        if set(named) & set(target):
            once = f"one kernel for {phase or 'all phases'}"
            raise InputError(f"--attention {' and '.join(given)}", once, "Leave one out.")
        target |= dict.fromkeys(named, name)
    return everywhere | by_phase


def split_pair(text: str, flag: str, form: str) -> tuple[str, str]:
    """Split a=b; InputError, which names the flag, where a side is missing."""
    left, equals, right = text.partition("=")
    if not (left and equals and right):
        raise InputError(f"{flag} {text}", form, f"Write {flag} {form}.")
    return left, right


def _count(text: str, axis: str) -> int:
    if not text.isdecimal():
        raise InputError(
            f"--mesh {axis}={text}", "a whole number of devices", f"Pass --mesh {axis}=2."
        )
    return int(text)
