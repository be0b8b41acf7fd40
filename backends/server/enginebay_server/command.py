"""serve: the flags of the HTTP server, and the check that its extra is installed."""

from __future__ import annotations

import argparse
import importlib.util
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginebay.cli.command import LOG_LEVELS, Command
from enginebay.cli.options import add_engine_arguments, flag_values
from enginebay.config import make_config
from enginebay.errors import InputError, UnsupportedError
from enginebay.toml_file import engine_settings
from enginebay_server.keys import read_api_keys
from enginebay_server.serve_section import MODELS, Repeated, flag_defaults
from enginebay_server.settings import LIMITS, ServerSettings, ToolPrompt, UnknownFields, Warmup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from enginebay.config import EngineConfig
import os
from collections.abc import Mapping
from urllib.parse import urlsplit

NEEDED = ("fastapi", "uvicorn", "orjson", "prometheus_client")
CLUSTER = ("ray", "smg", "httptools")
DEFAULTS = ServerSettings()
FLAG_OF = {name: name.removesuffix("_s") for name, one in LIMITS.items() if one.meaning}
"""Setting that is a number -> the name of its flag, with underscores."""


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Models, address, keys, limits, and the engine's flags."""
    _add_own(parser)
    parser.set_defaults(file_models=None, file_settings={})
    add_engine_arguments(parser)


def _add_own(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the server, which may stand in the section [serve] of the file."""
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="folder, hub id, or demo; several are served by one process",
    )
    parser.add_argument(
        "--served-model-name",
        metavar="NAME",
        action=Repeated,
        default=[],
        help="name for clients, once for each MODEL (default: the MODEL itself)",
    )
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="Jinja file to use in place of the model's chat template",
    )
    for flag, what in (("--tool-parser", "tool calls"), ("--reasoning-parser", "reasoning")):
        parser.add_argument(
            flag,
            default="auto",
            metavar="NAME",
            help=f"format in which the model writes {what}; none: no parsing",
        )
    parser.add_argument(
        "--tool-prompt",
        choices=typing.get_args(ToolPrompt),
        default="auto",
        help="auto: a system text describes tools to a model whose chat template has no place for "
        "them; none: such a model gets no tools",
    )
    _add_address(parser)
    _add_replicas(parser)
    _add_limits(parser)


def _add_address(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("address")
    group.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on"
    )
    group.add_argument(
        "--port", type=int, default=8000, metavar="N", help="port to listen on; 0: any free port"
    )
    group.add_argument("--tls-cert", metavar="FILE", help="certificate chain in PEM, for HTTPS")
    group.add_argument("--tls-key", metavar="FILE", help="private key in PEM, for HTTPS")
    group.add_argument(
        "--keep-alive",
        type=int,
        default=60,
        metavar="SECONDS",
        help="how long an idle connection stays open",
    )
    group.add_argument(
        "--cors-origin",
        metavar="ORIGIN",
        action=Repeated,
        default=[],
        help="origin of a web site whose pages may send requests; may be repeated",
    )
    group.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        help="receiver of OpenTelemetry traces by OTLP over HTTP, such as http://127.0.0.1:4318 "
        "(default: as in OTEL_EXPORTER_OTLP_ENDPOINT, else no traces)",
    )


def _add_replicas(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("replicas")
    group.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="start N engine processes behind the address, which Ray places and restarts; needs "
        "the extra cluster (default: one engine in this process)",
    )
    group.add_argument(
        "--replica-gpus",
        type=float,
        metavar="N",
        help="GPUs of each replica (default: an equal share of those that Ray has)",
    )
    group.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="address of a running Ray cluster, for replicas on several machines "
        "(default: all replicas run on this machine)",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("clients")
    group.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="file with one key per line; a client must send one of them, or the key in the "
        "environment variable ENGINEBAY_API_KEY (default: no key is needed)",
    )
    for name, flag in FLAG_OF.items():
        default = getattr(DEFAULTS, name)
        is_time = isinstance(default, float)
        group.add_argument(
            f"--{flag.replace('_', '-')}",
            type=type(default),
            default=default,
            metavar="SECONDS" if is_time else "N",
            help=f"{LIMITS[name].meaning} (default: {f'{default:g}' if is_time else default})",
        )
    group.add_argument(
        "--lora-routes",
        action="store_true",
        help="let clients load adapters, from any folder that this server can read, and unload "
        "them (default: off)",
    )
    group.add_argument(
        "--response-store",
        metavar="FILE",
        help="SQLite file in which responses are kept (default: they are kept in memory)",
    )
    group.add_argument(
        "--unknown-fields",
        choices=typing.get_args(UnknownFields),
        default=DEFAULTS.unknown_fields,
        help="refuse: an unknown field of a request is an error; ignore: the answer's header "
        "x-enginebay-ignored names the unknown fields",
    )
    group.add_argument(
        "--warmup",
        choices=typing.get_args(Warmup),
        default=DEFAULTS.warmup,
        help="background: answer requests when a few programs are compiled that can run all of "
        "them, and compile the others meanwhile; full: compile every program before the first "
        "request is answered; lazy: answer at once, and compile a program when a request needs it",
    )


def settings_from(args: argparse.Namespace) -> ServerSettings:
    """The settings of the flags, and the keys of file and environment."""
    limits = {name: getattr(args, flag) for name, flag in FLAG_OF.items()}
    return ServerSettings(
        api_keys=read_api_keys(args.api_key_file),
        unknown_fields=args.unknown_fields,
        cors_origins=tuple(args.cors_origin),
        warmup=args.warmup,
        response_store=args.response_store,
        lora_routes=args.lora_routes,
        traces_url=traces_url(args.otlp_endpoint),
        **limits,
    )


def configs_from(args: argparse.Namespace) -> dict[str, EngineConfig]:
    """Return the configuration of each model by served name. InputError for a wrong number of names
    or for a repeated name.
    """
    if args.models and args.model:
        raise InputError("MODEL and --model are both set", "one of the two", "Leave --model out.")
    models = args.models or ([args.model] if args.model else args.file_models or [None])
    entries = [one if isinstance(one, Mapping) else {"model": one} for one in models]
    given = [_config_of(entry, args) for entry in entries]
    _refuse_shared_captures(given, args.replicas)
    names = args.served_model_name or [
        entry.get("name", config.model) for entry, config in zip(entries, given, strict=True)
    ]
    if len(names) != len(given) or len(set(names)) != len(names) or not all(names):
        raise InputError(
            f"the names {', '.join(map(repr, names))} for {len(given)} models",
            "one name per model, all different",
            "Pass --served-model-name once for each MODEL, in their order, or set `name` in each "
            "table of serve.models.",
        )
    return dict(zip(names, map(_for_serving, given, [args.warmup] * len(given)), strict=True))


def _config_of(entry: Mapping[str, Any], args: argparse.Namespace) -> EngineConfig:
    """Return the configuration of a model: the file, the settings of its own table, the flags."""
    own = {name: value for name, value in entry.items() if name not in ("name", "model")}
    flags = flag_values(args)
    model = {} if entry["model"] is None else {"model": entry["model"]}
    return make_config(args.file_settings, own, {**flags, **model})


def _refuse_shared_captures(configs: Sequence[EngineConfig], replicas: int | None) -> None:
    """Raise InputError where several engines would write the file of one capture."""
    files = [config.capture.file for config in configs if config.capture is not None]
    if len(set(files)) < len(files) or (files and replicas is not None):
        raise InputError(
            f"capture.file = {files[0]!r} for several engines",
            "a file for each engine",
            "Serve one model in this process, or set capture in each table of serve.models.",
        )


def _file_defaults(file: Mapping[str, Any]) -> Mapping[str, Any]:
    parser = argparse.ArgumentParser(add_help=False)
    _add_own(parser)
    parser.add_argument("--log-level", choices=LOG_LEVELS)
    found = flag_defaults(file, parser)
    models = found.pop(MODELS, None)
    return {**found, "file_models": models, "file_settings": engine_settings(file)}


def _for_serving(config: EngineConfig, warmup: Warmup) -> EngineConfig:
    """Forbid compilation for a request after the warm-up, unless a shadow or a capture needs it."""
    if warmup == "lazy" or config.shadow or config.capture:
        return config
    return config.model_copy(update={"forbid_compiling": True})


def read_template(path: str | None) -> str | None:
    """The text of --chat-template."""
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(
            f"--chat-template {path}: {why}", "a readable Jinja file", "Pass the path of one."
        ) from None


def check_extra(what: str, modules: Sequence[str], extra: str) -> None:
    """Raise UnsupportedError if a module of an extra is not installed."""
    missing = [one for one in modules if importlib.util.find_spec(one) is None]
    if missing:
        raise UnsupportedError(
            f"{what} needs {', '.join(missing)}, not installed here",
            f"an environment with the extra {extra}",
            f"Install it: pip install 'enginebay[{extra}]'",
        )


def check_replicas(args: argparse.Namespace) -> None:
    """Check the flags of replicas. InputError for wrong values, UnsupportedError without the extra
    cluster.
    """
    if args.replicas is None:
        for flag, value in (
            ("--replica-gpus", args.replica_gpus),
            ("--ray-address", args.ray_address),
        ):
            if value is not None:
                raise InputError(
                    f"{flag} without --replicas", "both or neither", "Pass --replicas."
                )
        return
    if args.replicas < 1:
        raise InputError(f"--replicas {args.replicas}", "1 or more", "Pass --replicas 2.")
    if args.replica_gpus is not None and not args.replica_gpus >= 0:
        raise InputError(
            f"--replica-gpus {args.replica_gpus}", "0 or more", "Pass --replica-gpus 1."
        )
    if args.ray_address is not None and args.response_store is None:
        raise InputError(
            "--ray-address without --response-store",
            "a file that all machines of the cluster reach",
            "Pass --response-store with a path of a shared file system.",
        )
    check_extra("enginebay serve --replicas", CLUSTER, "cluster")


def run(name: str, args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    check_extra("enginebay serve", NEEDED, "serve")
    check_replicas(args)
    settings, template = settings_from(args), read_template(args.chat_template)
    configs = configs_from(args)
    from enginebay_server.serving import Address, Chats, serve

    chats = Chats(template, args.tool_parser, args.reasoning_parser, args.tool_prompt)
    address = Address(args.host, args.port, args.tls_cert, args.tls_key, args.keep_alive)
    if args.replicas is None:
        return serve(configs, address, settings, chats)
    from enginebay_server.replicas.serve import Cluster, serve_replicas

    cluster = Cluster(args.replicas, args.ray_address, args.replica_gpus)
    return serve_replicas(configs, address, settings, chats, cluster)


COMMAND = Command(add_arguments, run, _file_defaults)


OTEL_MODULES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
TRACES_PATH = "/v1/traces"


def traces_url(endpoint: str | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the URL that spans are sent to: that of `endpoint` (--otlp-endpoint), or of the
    standard variables of OpenTelemetry. None when neither is set.

    Raises InputError for an endpoint that is no URL, and UnsupportedError without the extra otel.
    """
    url = environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or None
    base = endpoint or (None if url else environment.get("OTEL_EXPORTER_OTLP_ENDPOINT"))
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" and endpoint is None:
        return None
    if base:
        url = base.rstrip("/")
        url = url if url.endswith(TRACES_PATH) else url + TRACES_PATH
    if url is None:
        return None
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise InputError(
            f"the endpoint {base or url} of OpenTelemetry",
            "the URL of a receiver of OTLP over HTTP",
            "Pass one, such as --otlp-endpoint http://127.0.0.1:4318.",
        )
    missing = [name for name in OTEL_MODULES if not _is_installed(name)]
    if missing:
        raise UnsupportedError(
            f"traces to {url} without {', '.join(missing)}",
            "an environment with the extra otel",
            "Install it: pip install 'enginebay[otel]'",
        )
    return url


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package above it is missing
        return False
