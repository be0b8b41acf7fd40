"""Models come from the hub: a small local server speaks its protocol, and HF_ENDPOINT points
to it.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from enginebay.errors import CheckpointError
from enginebay.weights import WeightFormat
from enginebay_models.llama import family
from enginebay_models.source import CheckpointSource
from tests.parity import tiny

REPO = "tiny/llama"
COMMIT = hashlib.sha1(b"tiny", usedforsecurity=False).hexdigest()


class Hub(http.server.ThreadingHTTPServer):
    """Serves one folder as the repository REPO, and remembers what it was asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        resolve = f"/{REPO}/resolve/"
        if path.startswith(f"/api/models/{REPO}/revision/") or path == f"/api/models/{REPO}":
            siblings = [{"rfilename": f.name} for f in self.files()]
            self.reply(
                json.dumps(
                    {"id": REPO, "modelId": REPO, "sha": COMMIT, "siblings": siblings}
                ).encode()
            )
        elif path.startswith(f"/api/models/{REPO}/tree/"):
            entries = [
                {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": etag(f)}
                for f in self.files()
            ]
            self.reply(json.dumps(entries).encode())
        elif (
            path.startswith(resolve)
            and (file := self.server.folder / path.split("/")[-1]).is_file()
        ):
            headers = {"ETag": f'"{etag(file)}"', "X-Repo-Commit": COMMIT}
            self.reply(file.read_bytes(), headers, with_body=with_body)
        else:
            headers = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
            self.reply(
                b'{"error": "Repository not found"}', headers, status=404, with_body=with_body
            )

    def files(self) -> list[Path]:
        return sorted(self.server.folder.iterdir())

    def reply(
        self,
        body: bytes,
        headers: dict[str, str] | None = None,
        *,
        status: int = 200,
        with_body: bool = True,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Be quiet."""


def etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes(), usedforsecurity=False).hexdigest()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = tiny.write_checkpoint(tmp_path / "repository", "llama-tied")
    (folder / "pytorch_model.bin").write_bytes(b"never fetched")
    (folder / "modeling_custom.py").write_text("raise SystemExit")
    server = Hub(folder)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@contextlib.contextmanager
def fresh_hub(home: Path, endpoint: str, *, offline: bool = False) -> Iterator[None]:
    """As in a process that begins with these variables: huggingface_hub reads them once, when it is
    imported.
    """
    variables = {
        "HF_HOME": str(home),
        "HF_ENDPOINT": endpoint,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": str(int(offline)),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HF_TOKEN", raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        for name in modules_of_the_hub():
            patch.delitem(sys.modules, name)
        try:
            yield
        finally:
            for name in modules_of_the_hub():
                del sys.modules[name]


def modules_of_the_hub() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]


Loaded = tuple[list[str], int, list[int]]


def load(home: Path, endpoint: str, *, offline: bool = False) -> Loaded:
    """Names of the files, number of the weights, and a text's tokens."""
    with fresh_hub(home, endpoint, offline=offline):
        source = CheckpointSource(REPO)
        model = family.build(source.config, dtype="float32")
        weights = source.load_weights(
            model, form=WeightFormat("float32"), place=lambda *_: None, verify=True
        )
        files = sorted(path.name for path in source.folder.iterdir())
        return files, len(weights), source.load_tokenizer().encode("w3 w5")


def test_hub_model_is_fetched_once_and_works_offline(hub: Hub, tmp_path: Path) -> None:
    first = load(tmp_path / "home", hub.url)
    files = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert first[0] == files
    assert first[1] > 0
    assert first[2] == [3, 5]
    fetched = {
        line.rsplit("/", 1)[1]
        for line in hub.requests
        if line.startswith("GET") and "/resolve/" in line
    }
    assert fetched == set(files), "neither pickles nor code are fetched"

    hub.requests.clear()
    assert load(tmp_path / "home", hub.url) == first
    assert hub.requests, "it asks whether there is something newer"
    assert not any(line.startswith("GET") and "/resolve/" in line for line in hub.requests), (
        "fetched twice"
    )

    hub.requests.clear()
    assert load(tmp_path / "home", hub.url, offline=True) == first
    assert not hub.requests


def test_repository_that_is_not_there_is_named(hub: Hub, tmp_path: Path) -> None:
    with fresh_hub(tmp_path / "home", hub.url), pytest.raises(CheckpointError) as refusal:
        CheckpointSource("tiny/lama")
    assert "model 'tiny/lama': there is no such folder, and the hub says: " in str(refusal.value)
    allowed = "Allowed: 'demo', a model's folder, or the id of a repository on the hub"
    assert allowed in str(refusal.value)


@pytest.mark.parametrize("offline", [True, False])
def test_hub_that_cannot_be_reached_is_an_error_with_advice(offline: bool, tmp_path: Path) -> None:
    nowhere = "http://127.0.0.1:9"
    with (
        fresh_hub(tmp_path / "home", nowhere, offline=offline),
        pytest.raises(CheckpointError) as refusal,
    ):
        CheckpointSource(REPO)
    assert f"model '{REPO}': there is no such folder, and the hub could not be reached" in str(
        refusal.value
    )
    assert "HF_ENDPOINT" in str(refusal.value)


@pytest.mark.long
def test_a_process_of_its_own_says_it_in_one_line(tmp_path: Path) -> None:
    variables = {
        "HF_HOME": str(tmp_path),
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HUB_OFFLINE": "0",
    }
    command = [sys.executable, "-m", "enginebay", "explain", "--model", REPO]
    environment = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"}
    done = subprocess.run(
        command,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        f"model '{REPO}': there is no such folder, and the hub could not be reached" in done.stderr
    )
    assert "Traceback" not in done.stderr


def test_name_that_is_no_hub_id(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="it is no hub id"):
        CheckpointSource("a..b/c")
