"""The URL that traces are sent to, from the flag and the environment."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from enginebay.errors import InputError, UnsupportedError

NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
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
    missing = [name for name in NEEDED if not _is_installed(name)]
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
