"""The flags that choose the parts of an engine, shared by every command that makes one."""

from __future__ import annotations

import argparse
import contextlib
import tomllib
from collections.abc import Iterator
from typing import Any

from enginebay.config import EngineConfig, make_config, merge
from enginebay.config_sections import PHASES, Choice
from enginebay.errors import InputError
from enginebay.toml_file import read_toml

CACHE_DTYPE = "--cache-dtype"
"""The short form of --kv-cache-dtype."""


NAMED = (
    (
        "model",
        "DIR|ID|FILE",
        "model: a folder, a hub id, a GGUF file, or demo (the built-in model)",
    ),
    ("platform", "NAME", "devices to run on: cpu, cuda, tpu, or a plugin's"),
    ("dtype", "T", "dtype of the computation: float32, bfloat16, float16 or auto"),
    ("weight_dtype", "T", "dtype of the weights; auto: the same as --dtype"),
    ("kv_cache_dtype", "T", "dtype of the cache; int8, uint4, fp8: quantised; auto: --dtype"),
    ("quantization", "NAME", "weights in fewer bits, such as int8; auto: as they are stored"),
    ("engine", "NAME", "engine, which owns the cache and runs the steps"),
    ("scheduler", "NAME", "policy that decides which requests run next"),
    ("sampler", "NAME", "sampler, which chooses each next token"),
    ("proposer", "NAME", "proposer, which drafts tokens for the next step to verify"),
)
"""Settings whose flags take a name: setting, placeholder of the value, help."""


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --config and one flag per setting; a flag overrides the file."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--config", metavar="FILE", help="TOML file with settings; flags override it"
    )
    for name, metavar, what in NAMED:
        flags = [f"--{name.replace('_', '-')}", *([CACHE_DTYPE] if "cache" in name else [])]
        group.add_argument(*flags, metavar=metavar, help=with_default(what, name))
    _add_kernel_arguments(group)
    group.add_argument("--layout", metavar="NAME", help=with_default("cache layout", "layout"))
    group.add_argument(
        "--activation-quantization",
        choices=["auto", "none", "int8"],
        help=with_default("rounding of the inputs of quantised weights", "activation_quantization"),
    )
    group.add_argument(
        "--generation-config",
        choices=["auto", "none"],
        help=with_default(
            "use of sampling defaults in the checkpoint's generation_config.json",
            "generation_config",
        ),
    )
    group.add_argument(
        "--special-tokens-in-text",
        choices=["parse", "text"],
        help=with_default(
            "special tokens in prompts and messages: parse them, or take their letters as text",
            "special_tokens_in_text",
        ),
    )
    group.add_argument(
        "--mesh",
        metavar="AXIS=N",
        action="append",
        default=[],
        help="devices along a mesh axis, such as tensor=2 (default: one device)",
    )
    for name, what in (
        ("max_model_len", "max length of prompt plus output, in tokens"),
        ("max_num_seqs", "max number of requests that run at once"),
        ("max_num_batched_tokens", "max number of prompt tokens in one step"),
        ("decode_steps", "max tokens that a row decodes in one compiled call"),
        ("stream_chunk_tokens", "max tokens in a chunk of a stream, while few requests stream"),
        ("draft_tokens", "max draft tokens per row and step"),
        ("max_loras", "slots for adapters on the device"),
        ("max_lora_rank", "max rank of an adapter"),
        ("max_cpu_loras", "max number of loaded adapters"),
    ):
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, type=int, metavar="N", help=with_default(what, name))
    _add_running_arguments(group)


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
        "--mixed-steps",
        choices=["auto", "on", "off"],
        help=with_default("decode rows and prefill prompts in the same step", "mixed_steps"),
    )
    group.add_argument(
        "--lora",
        metavar="NAME=DIR",
        action="append",
        default=[],
        help="load a LoRA adapter in the format of PEFT; may be repeated (default: none)",
    )
    group.add_argument(
        "--verify-weights",
        action="store_true",
        default=None,
        help="refuse weights that hold NaN or infinity",
    )
    group.add_argument(
        "--compile-cache",
        metavar="DIR",
        help=with_default("folder of compiled programs, or auto or off", "compile_cache"),
    )
    group.add_argument(
        "--dump-step",
        metavar="DIR",
        help="write the text and memory use of every compiled program to this folder",
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
    """Return a help text with the default of a field of EngineConfig."""
    found = EngineConfig.model_fields[field]
    default = found.default.name if isinstance(found.default, Choice) else found.default
    if default is None:  # the description says what an unset field means
        default = str(found.description).partition("unset: ")[2] or "none"
    return f"{what} (default: {default})".replace("%", "%%")


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
        "--interpret",
        action="store_true",
        default=None,
        help="interpret kernels that are chosen by name and made for another platform",
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
        "--no-verify-kernels",
        dest="verify_kernels",
        action="store_false",
        default=None,
        help="use kernels from import paths without checking them first",
    )
    group.add_argument(
        "--tuned",
        choices=["auto", "off", "require"],
        help=with_default("whether tuned kernel configurations are used or required", "tuned"),
    )
    group.add_argument(
        "--tuned-folder",
        metavar="DIR",
        help=with_default("folder of your own tables of tuned kernels", "tuned_folder"),
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
    return make_config(read_toml(args.config) if args.config else {}, flag_values(args))


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
