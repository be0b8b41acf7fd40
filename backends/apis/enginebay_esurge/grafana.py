"""A Grafana for the engine: a local server if it is installed, or a container if requested.

`start_monitoring(start_grafana=True)` of the documented API starts a Grafana and returns its URL,
so a command in the documentation is not enough. The data source and the dashboard of each engine
are files that only this process can write, because it knows the exporter's port.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from enginebay.waits import wait_for_killed
from enginebay_esurge.dashboard import DATASOURCE_UID, write_provisioning
from enginebay_esurge.monitoring_settings import MonitoringSettings

log = logging.getLogger("enginebay.esurge")

START_S = 60.0
"""Max seconds until a server answers."""

STOP_S = 10.0
HERE = "127.0.0.1"
LOOPBACK = (None, "localhost", HERE, "::1")


class Grafana:
    """A running server with a folder of its own. `close` stops the server and removes the
    folder.
    """

    def __init__(
        self, settings: MonitoringSettings, source_url: str, *, speculates: bool = False
    ) -> None:
        """Start a server that reads from source_url, after check_grafana. RuntimeError, and
        nothing is left, when it does not start.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="esurge-grafana-"))
        self._server = contextlib.ExitStack()
        try:
            self._start(settings, source_url, speculates=speculates)
        except BaseException:
            self.close()
            raise
        self.url = f"http://{settings.grafana_host or 'localhost'}:{settings.grafana_port}"

    def close(self) -> None:
        """Stop the server, and remove its folder."""
        self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, settings: MonitoringSettings, source_url: str, *, speculates: bool) -> None:
        provisioning = write_provisioning(
            self._folder,
            name=settings.grafana_datasource_name,
            uid=settings.grafana_datasource_uid or DATASOURCE_UID,
            url=source_url,
            speculates=speculates,
        )
        variables = _variables(settings, self._folder, provisioning)
        command = _local_command()
        stop_command: Sequence[str] = ()
        if command is not None:
            for name in ("data", "logs", "plugins"):
                (self._folder / name).mkdir(mode=0o700)
                variables[f"GF_PATHS_{name.upper()}"] = str(self._folder / name)
        else:
            docker = shutil.which("docker")
            assert docker is not None, "check_grafana found it"
            container = f"esurge-grafana-{uuid.uuid4().hex[:12]}"
            stop_command = (docker, "stop", "--time", str(int(STOP_S)), container)
            command = _docker_command(docker, container, settings, self._folder, variables)
        port, output = settings.grafana_port, self._folder / "output.txt"
        self._server.enter_context(
            running("Grafana", command, port, output, variables=variables, stop=stop_command)
        )


def check_grafana(settings: MonitoringSettings) -> None:
    """Raise RuntimeError when neither a server nor a requested container can be started."""
    if _local_command() is None:
        if not settings.grafana_use_docker:
            raise RuntimeError("grafana-server is not on PATH, and grafana_use_docker is False")
        if shutil.which("docker") is None:
            raise RuntimeError("neither grafana-server nor docker is on PATH")
    _check_free(settings.grafana_port)


def _variables(settings: MonitoringSettings, folder: Path, provisioning: Path) -> dict[str, str]:
    """Grafana's settings, as environment variables, because every user can read a command line."""
    return {
        "GF_SERVER_HTTP_PORT": str(settings.grafana_port),
        "GF_SERVER_HTTP_ADDR": HERE if settings.grafana_host in LOOPBACK else "",
        "GF_SECURITY_ADMIN_USER": settings.grafana_admin_user,
        "GF_SECURITY_ADMIN_PASSWORD": settings.grafana_admin_password,
        "GF_AUTH_ANONYMOUS_ENABLED": str(settings.grafana_allow_anonymous).lower(),
        "GF_AUTH_ANONYMOUS_ORG_ROLE": "Admin",
        "GF_PATHS_PROVISIONING": str(provisioning),
        "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH": str(folder / "dashboards" / "esurge.json"),
        "GF_ANALYTICS_REPORTING_ENABLED": "false",
        "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
        "GF_ANALYTICS_CHECK_FOR_PLUGIN_UPDATES": "false",
    }


def _local_command() -> list[str] | None:
    server = shutil.which("grafana-server")
    if server is None:
        return None
    # Without --homepath, Grafana searches its files in the current directory.
    homes = (Path(server).resolve().parent.parent, Path("/usr/share/grafana"))
    home = next((home for home in homes if (home / "conf" / "defaults.ini").is_file()), None)
    return [server] if home is None else [server, "--homepath", str(home)]


def _docker_command(
    docker: str,
    container: str,
    settings: MonitoringSettings,
    folder: Path,
    variables: Mapping[str, str],
) -> list[str]:
    """On Linux the container uses the host's network, where the exporter listens. Elsewhere Docker
    reaches the host by itself.
    """
    names = list(variables)
    network = ["--network", "host"]
    if sys.platform != "linux":
        names.remove("GF_SERVER_HTTP_ADDR")
        names.remove("GF_SERVER_HTTP_PORT")
        address = f"{HERE}:" if settings.grafana_host in LOOPBACK else ""
        network = ["--publish", f"{address}{settings.grafana_port}:3000"]
    given = [part for name in names for part in ("--env", name)]
    mounted = ["--volume", f"{folder}:{folder}:ro"]
    run = [docker, "run", "--rm", "--name", container]
    return [*run, *network, *mounted, *given, settings.grafana_image]


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HERE, port))
        except (OSError, OverflowError) as error:
            raise RuntimeError(f"port {port} cannot be opened ({error})") from error


@contextlib.contextmanager
def running(
    name: str,
    command: Sequence[str],
    port: int,
    output: Path,
    *,
    variables: Mapping[str, str] | None = None,
    stop: Sequence[str] = (),
) -> Iterator[None]:
    """Run a server that answers at `port` until the block ends. Its output goes to a file; `stop`
    is a command that ends it. RuntimeError when it ends or does not answer.
    """
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            env=os.environ | (variables or {}),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C at the terminal must not end the server
        )
    try:
        _wait_until_it_answers(name, process, port, output)
        yield
    finally:
        if stop:
            # If the command fails, the container's client is ended below.
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(stop, capture_output=True, check=False, timeout=4 * STOP_S)
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            wait_for_killed(process, name)


def _wait_until_it_answers(
    name: str, process: subprocess.Popen[bytes], port: int, output: Path
) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            said = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            raise RuntimeError(f"{name} ended with code {process.returncode}: {''.join(said)}")
        connection = http.client.HTTPConnection(HERE, port, timeout=1)
        try:
            connection.request("GET", "/api/health")
            connection.getresponse()
        except (OSError, http.client.HTTPException):
            time.sleep(0.1)
        else:
            return
        finally:
            connection.close()
    raise RuntimeError(f"{name} did not answer within {START_S:.0f} s")


SCRAPE_S = 5


@contextlib.contextmanager
def local_prometheus(metrics_url: str) -> Iterator[str]:
    """Run the `prometheus` that is on PATH until the block ends, and yield its URL. It reads
    `metrics_url` every 5 s and keeps the values of a day.

    RuntimeError, and nothing is left, when it is not installed or does not start.
    """
    program = shutil.which("prometheus")
    if program is None:
        raise RuntimeError("prometheus is not on PATH")
    folder = Path(tempfile.mkdtemp(prefix="esurge-prometheus-"))
    try:
        address = urllib.parse.urlsplit(metrics_url)
        target = {"targets": [address.netloc]}
        job = {"job_name": "esurge", "metrics_path": address.path, "static_configs": [target]}
        config = {"global": {"scrape_interval": f"{SCRAPE_S}s"}, "scrape_configs": [job]}
        (folder / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        with socket.socket() as probe:
            probe.bind((HERE, 0))
            port = probe.getsockname()[1]
        command = [
            program,
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            "--storage.tsdb.retention.time=1d",
            f"--web.listen-address={HERE}:{port}",
        ]
        with running("Prometheus", command, port, folder / "output.txt"):
            yield f"http://{HERE}:{port}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
