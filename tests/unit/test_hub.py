"""Models come from the hub: a small local server speaks its protocol, and HF_ENDPOINT points to it."""

from __future__ import annotations

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
from enginebay_models.source import CheckpointSource
from tests.parity import tiny

REPO = "tiny/llama"
COMMIT = hashlib.sha1(b"tiny", usedforsecurity=False).hexdigest()

LOAD = """
import sys
from enginebay.errors import CheckpointError
from enginebay_models.source import CheckpointSource
from enginebay_models.llama import family
try:
    source = CheckpointSource(sys.argv[1])
except CheckpointError as error:
    sys.exit(str(error))
model = family.build(source.config, dtype="float32")
weights = source.load_weights(model, dtype="float32", place=lambda path, spec: None, verify=True)
print(sorted(p.name for p in source.folder.iterdir()), len(weights), source.load_tokenizer().encode("w3 w5"))
"""


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
                json.dumps({"id": REPO, "modelId": REPO, "sha": COMMIT, "siblings": siblings}).encode()
            )
        elif path.startswith(f"/api/models/{REPO}/tree/"):
            entries = [
                {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": etag(f)}
                for f in self.files()
            ]
            self.reply(json.dumps(entries).encode())
        elif path.startswith(resolve) and (file := self.server.folder / path.split("/")[-1]).is_file():
            headers = {"ETag": f'"{etag(file)}"', "X-Repo-Commit": COMMIT}
            self.reply(file.read_bytes(), headers, with_body=with_body)
        else:
            headers = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
            self.reply(b'{"error": "Repository not found"}', headers, status=404, with_body=with_body)

    def files(self) -> list[Path]:
        return sorted(self.server.folder.iterdir())

    def reply(
        self, body: bytes, headers: dict[str, str] | None = None, *, status: int = 200, with_body: bool = True
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


def load(name: str, home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Load a model in a process of its own: huggingface_hub reads its variables once."""
    environment = {
        **os.environ,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        **variables,
    }
    environment.pop("HF_TOKEN", None)
    return subprocess.run(
        [sys.executable, "-c", LOAD, name],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_hub_model_is_fetched_once_and_works_offline(hub: Hub, tmp_path: Path) -> None:
    first = load(REPO, tmp_path / "home", HF_ENDPOINT=hub.url)
    assert first.returncode == 0, first.stderr
    files = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert first.stdout.startswith(str(files))
    assert first.stdout.endswith("[3, 5]\n")
    fetched = {
        line.rsplit("/", 1)[1] for line in hub.requests if line.startswith("GET") and "/resolve/" in line
    }
    assert fetched == set(files), "neither pickles nor code are fetched"

    hub.requests.clear()
    again = load(REPO, tmp_path / "home", HF_ENDPOINT=hub.url)
    assert again.stdout == first.stdout
    assert not any(line.startswith("GET") and "/resolve/" in line for line in hub.requests), "fetched twice"

    hub.requests.clear()
    offline = load(REPO, tmp_path / "home", HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1")
    assert offline.stdout == first.stdout
    assert not hub.requests


def test_repository_that_is_not_there_is_named(hub: Hub, tmp_path: Path) -> None:
    done = load("tiny/lama", tmp_path / "home", HF_ENDPOINT=hub.url)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "model 'tiny/lama': there is no such folder, and the hub says: " in done.stderr
    assert "Allowed: 'demo', a model's folder, or the id of a repository on the hub" in done.stderr


def test_hub_that_cannot_be_reached_is_an_error_with_advice(hub: Hub, tmp_path: Path) -> None:
    offline = load(REPO, tmp_path / "home", HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1")
    closed = load(REPO, tmp_path / "home", HF_ENDPOINT="http://127.0.0.1:9")
    for done in (offline, closed):
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert f"model '{REPO}': there is no such folder, and the hub could not be reached" in done.stderr
        assert "HF_ENDPOINT" in done.stderr


def test_name_that_is_no_hub_id(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="it is no hub id"):
        CheckpointSource("a..b/c")
