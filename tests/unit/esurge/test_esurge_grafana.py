"""Grafana beside an eSurge: what it is provisioned with, how it is started and ended, and what
happens without one.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from enginebay_esurge import eSurge, grafana
from tests.ports import free_port
from tests.unit.esurge.small import until

prometheus_client = pytest.importorskip("prometheus_client")
yaml = pytest.importorskip("yaml")

pytestmark = pytest.mark.xdist_group("esurge")

# Stands for a server, or for the docker client: it notes how it was called, and answers at the
# port.
PROGRAM = """#!{python}
import http.server, json, os, sys
with open({notes!r}, "a") as file:
    file.write(json.dumps([sys.argv, dict(os.environ), os.getpid()]) + "\\n")
if "stop" in sys.argv:
    sys.exit()
if {fails}:
    sys.exit("the database is locked")
ports = [one.rpartition(":")[2] for one in sys.argv if one.startswith("--web.listen-address=")]
address = ("127.0.0.1", int(ports[0] if ports else os.environ["GF_SERVER_HTTP_PORT"]))
http.server.HTTPServer(address, http.server.SimpleHTTPRequestHandler).serve_forever()
"""

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a program on a PATH that has nothing else, and returns where it writes its notes."""
    folder = tmp_path / "server" / "bin"
    folder.mkdir(parents=True)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def make(name: str, *, fails: bool = False) -> Path:
        notes = tmp_path / f"{name}.notes"
        program = folder / name
        program.write_text(PROGRAM.format(python=sys.executable, notes=str(notes), fails=fails))
        program.chmod(0o755)
        return notes

    return make


@pytest.fixture
def monitored(engine: eSurge) -> Iterator[eSurge]:
    yield engine
    engine.stop_monitoring()


def read(notes: Path) -> list[tuple[list[str], dict[str, str], int]]:
    return [tuple(json.loads(line)) for line in notes.read_text().splitlines()]


def is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def folders(tmp_path: Path) -> list[Path]:
    return list(tmp_path.glob("esurge-grafana-*"))


def test_a_local_server_is_started_provisioned_and_ended(
    monitored: eSurge, install: Install, tmp_path: Path
) -> None:  # holds S14
    notes, port = install("grafana-server"), free_port()
    home = tmp_path / "server" / "conf"
    home.mkdir()
    (home / "defaults.ini").touch()
    urls = monitored.start_monitoring(
        prometheus_port=0,
        grafana_port=port,
        grafana_admin_user="me",
        grafana_admin_password="not told",
    )
    assert urls["grafana"] == f"http://localhost:{port}"
    assert urllib.request.urlopen(urls["grafana"], timeout=30).status == 200
    assert monitored.start_monitoring(grafana_port=port) == urls
    [(command, variables, process_id)] = read(notes)
    assert command[1:] == ["--homepath", str(tmp_path / "server")]
    assert "not told" not in " ".join(command)
    assert variables["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert variables["GF_SECURITY_ADMIN_USER"] == "me"
    assert variables["GF_SECURITY_ADMIN_PASSWORD"] == "not told"
    assert variables["GF_AUTH_ANONYMOUS_ENABLED"] == "true"
    provisioning = Path(variables["GF_PATHS_PROVISIONING"])
    [source] = yaml.safe_load((provisioning / "datasources" / "esurge.yaml").read_text())[
        "datasources"
    ]
    assert (source["name"], source["uid"], source["type"]) == (
        "eSurge Prometheus",
        "esurge-prometheus",
        "prometheus",
    )
    assert source["url"] == urls["prometheus"].removesuffix("/metrics")
    [provider] = yaml.safe_load((provisioning / "dashboards" / "esurge.yaml").read_text())[
        "providers"
    ]
    dashboard = json.loads((Path(provider["options"]["path"]) / "esurge.json").read_text())
    check_dashboard(dashboard, "esurge-prometheus", urls["prometheus"])
    [folder] = folders(tmp_path)
    assert Path(variables["GF_PATHS_DATA"]).parent == folder
    monitored.stop_monitoring()
    assert not is_alive(process_id)
    assert not folders(tmp_path)


def test_the_default_data_source_is_a_prometheus_that_scrapes_the_exporter(
    monitored: eSurge, install: Install, tmp_path: Path
) -> None:  # holds S14
    notes, programs = install("grafana-server"), install("prometheus")
    urls = monitored.start_monitoring(prometheus_port=0, grafana_port=free_port())
    [(_, variables, _)] = read(notes)
    provisioning = Path(variables["GF_PATHS_PROVISIONING"])
    [source] = yaml.safe_load((provisioning / "datasources" / "esurge.yaml").read_text())[
        "datasources"
    ]
    [(command, _, process_id)] = read(programs)
    flags = dict(flag.removeprefix("--").split("=", 1) for flag in command[1:])
    assert source["url"] == f"http://{flags['web.listen-address']}"
    assert flags["web.listen-address"].startswith("127.0.0.1:")
    config = yaml.safe_load(Path(flags["config.file"]).read_text())
    [job] = config["scrape_configs"]
    [target] = job["static_configs"][0]["targets"]
    assert f"http://{target}{job['metrics_path']}" == urls["prometheus"]
    monitored.stop_monitoring()
    assert not is_alive(process_id)
    assert not list(tmp_path.glob("esurge-*"))


def test_without_prometheus_a_warning_says_why_the_dashboard_is_empty(
    monitored: eSurge, install: Install, caplog: pytest.LogCaptureFixture
) -> None:  # holds S14
    install("grafana-server")
    with caplog.at_level(logging.WARNING, "enginebay.esurge"):
        assert "grafana" in monitored.start_monitoring(prometheus_port=0, grafana_port=free_port())
    [record] = caplog.records
    assert "prometheus is not on PATH" in record.message
    assert "grafana_datasource_url" in record.message


def check_dashboard(dashboard: dict[str, Any], uid: str, url: str) -> None:
    """Its panels read what is exported, all of it, from the data source of this uid."""
    panels = dashboard["panels"]
    assert {panel["datasource"]["uid"] for panel in panels} == {uid}
    assert len({panel["id"] for panel in panels}) == len(panels)
    read_names = set(
        re.findall(r"esurge_\w+", " ".join(t["expr"] for p in panels for t in p["targets"]))
    )
    text = urllib.request.urlopen(url, timeout=30).read().decode()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    exported = {re.split(r"[ {]", line)[0] for line in lines}
    buckets = re.findall(r"# TYPE (\w+) histogram", text)
    assert read_names <= exported | {f"{name}_bucket" for name in buckets}
    families = {
        re.sub(r"_(bucket|count|sum|created)$", "", name)
        for name in exported
        if "_created" not in name
    }
    assert {name.removesuffix("_bucket") for name in read_names} == families
    assert len(families) == 16


def test_names_addresses_and_anonymous_access_are_the_callers(
    monitored: eSurge, install: Install
) -> None:  # holds S14
    notes = install("grafana-server")
    urls = monitored.start_monitoring(
        enable_prometheus=False,
        grafana_port=free_port(),
        grafana_host="a-name.example",
        grafana_allow_anonymous=False,
        grafana_datasource_name='My "source": #1',
        grafana_datasource_uid="mine",
        grafana_datasource_url="http://elsewhere:9090",
    )
    assert list(urls) == ["grafana"]
    assert urls["grafana"].startswith("http://a-name.example:")
    [(command, variables, _)] = read(notes)
    assert len(command) == 1, "there is no home that one could name"
    assert variables["GF_AUTH_ANONYMOUS_ENABLED"] == "false"
    assert variables["GF_SERVER_HTTP_ADDR"] == "", "others reach it by that name"
    provisioning = Path(variables["GF_PATHS_PROVISIONING"])
    [source] = yaml.safe_load((provisioning / "datasources" / "esurge.yaml").read_text())[
        "datasources"
    ]
    assert (source["name"], source["uid"], source["url"]) == (
        'My "source": #1',
        "mine",
        "http://elsewhere:9090",
    )
    dashboard = (provisioning.parent / "dashboards" / "esurge.json").read_text()
    assert {panel["datasource"]["uid"] for panel in json.loads(dashboard)["panels"]} == {"mine"}


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere a container has a network of its own"
)
def test_a_container_is_started_only_when_asked_for(
    monitored: eSurge, install: Install, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:  # holds S14
    notes, port = install("docker"), free_port()
    with caplog.at_level(logging.WARNING, "enginebay.esurge"):
        assert "grafana" not in monitored.start_monitoring(prometheus_port=0, grafana_port=port)
    assert not notes.exists()
    assert len(caplog.records) == 1
    monitored.stop_monitoring()
    urls = monitored.start_monitoring(
        prometheus_port=0, grafana_port=port, grafana_use_docker=True, grafana_image="some/image:1"
    )
    assert urls["grafana"] == f"http://localhost:{port}"
    [(command, variables, process_id)] = read(notes)
    assert command[1:4] == ["run", "--rm", "--name"]
    assert command[-1] == "some/image:1"
    assert command[command.index("--network") + 1] == "host"
    [folder] = folders(tmp_path)
    assert f"{folder}:{folder}:ro" in command
    assert "GF_SECURITY_ADMIN_PASSWORD" in command
    assert "GF_SECURITY_ADMIN_PASSWORD=" not in " ".join(command)
    assert "GF_PATHS_DATA" not in variables
    for path in folder.rglob("provisioning/**/*"):
        assert path.stat().st_mode & 0o004, "the container's user reads it"
    monitored.stop_monitoring()
    assert not is_alive(process_id)
    assert read(notes)[1][0][1:] == ["stop", "--time", "10", command[4]]
    assert not folders(tmp_path)


@pytest.mark.parametrize("trouble", ["none", "fails", "port"])
def test_without_a_server_there_is_no_address_and_one_warning(
    monitored: eSurge,
    install: Install,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    trouble: str,
) -> None:  # holds S14
    if trouble != "none":
        install("grafana-server", fails=trouble == "fails")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1] if trouble == "port" else free_port()
        with caplog.at_level(logging.WARNING, "enginebay.esurge"):
            urls = monitored.start_monitoring(prometheus_port=0, grafana_port=port)
    assert list(urls) == ["prometheus"]
    [record] = caplog.records
    expected = {"none": "not on PATH", "fails": "the database is locked", "port": f"port {port}"}[
        trouble
    ]
    assert expected in record.message
    assert not folders(tmp_path)


def test_a_server_that_does_not_answer_is_ended(
    monitored: eSurge,
    install: Install,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # holds S14
    notes = install("grafana-server")
    program = tmp_path / "server" / "bin" / "grafana-server"
    program.write_text(
        program.read_text().replace("serve_forever()", "fileno(); import time; time.sleep(600)")
    )
    monkeypatch.setattr(grafana, "START_S", 2.0)
    with caplog.at_level(logging.WARNING, "enginebay.esurge"):
        urls = monitored.start_monitoring(
            enable_prometheus=False, grafana_datasource_url="http://x", grafana_port=free_port()
        )
    assert urls == {}
    assert "did not answer" in caplog.records[0].message
    assert not is_alive(read(notes)[0][2])
    assert not folders(tmp_path)


def test_nothing_to_read_from_is_no_grafana(
    monitored: eSurge, install: Install, caplog: pytest.LogCaptureFixture
) -> None:  # holds S14
    notes = install("grafana-server")
    with caplog.at_level(logging.WARNING, "enginebay.esurge"):
        assert monitored.start_monitoring(enable_prometheus=False) == {}
    assert "grafana_datasource_url" in caplog.records[0].message
    assert not notes.exists()
    threads = {thread.name for thread in threading.enumerate()}
    monitored.stop_monitoring()
    until(lambda: {thread.name for thread in threading.enumerate()} <= threads)
