"""Files that others name: what is no regular file is never read, and links stay in their folder."""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from enginebay.errors import CheckpointError, InputError
from enginebay.regular_files import read_regular
from enginebay_lora.peft import CONFIG, TENSORS, read_adapter
from enginebay_models.checkpoint import INDEX_FILE, SINGLE_FILE, find_tensors, read_json
from enginebay_models.opening import open_stored_model
from enginebay_models.source import CheckpointSource
from tests.brief import LEAST

LIMIT_S = 10
MODEL_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    SINGLE_FILE,
    INDEX_FILE,
)


def test_a_file_is_read_up_to_its_largest_size(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_regular(path, 5) == b"12345"
    with pytest.raises(InputError, match="more than 4 bytes"):
        read_regular(path, 4)


def make_strange(path: Path, kind: str, outside: Path) -> None:
    """Put what is no file of the folder at a path."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        outside.write_text("{}")
        path.symlink_to(outside)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_regular_file_is_not_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    make_strange(path, kind, tmp_path)
    with pytest.raises(InputError, match="no regular file"):
        read_regular(path, 100)
    with pytest.raises(CheckpointError, match="no regular file"):
        read_json(path)


def read_folder(folder: Path) -> None:
    """Read all that a model's folder has."""
    source = CheckpointSource(str(folder))
    find_tensors(source.folder)
    assert source.num_token_ids != 0
    assert source.sampling_defaults is not None
    source.load_tokenizer()


def end_of(work: Callable[[], object], pipe: Path) -> BaseException | None:
    """The exception that work ends with, if any. Work that waits for the pipe's writer fails."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        done = pool.submit(work)
        try:
            return done.exception(LIMIT_S)
        except TimeoutError:
            os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))  # its reader goes on
    pytest.fail(f"{pipe.name} was waited for")


@pytest.mark.parametrize("name", MODEL_FILES)
def test_a_pipe_in_the_place_of_a_models_file_is_refused(name: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(LEAST, tmp_path / "model"))
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    error = end_of(lambda: read_folder(folder), folder / name)
    assert isinstance(error, CheckpointError)
    assert name in str(error)


def test_a_pipe_in_the_place_of_a_gguf_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    os.mkfifo(path)
    error = end_of(lambda: open_stored_model(str(path)), path)
    assert isinstance(error, CheckpointError)
    assert "m.gguf" in str(error)


@pytest.mark.parametrize("name", [CONFIG, TENSORS])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "link"])
def test_an_adapter_is_made_of_files_of_its_folder(name: str, kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    if name == TENSORS:
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
        (folder / CONFIG).write_text(json.dumps(config))
    make_strange(folder / name, kind, tmp_path / "outside")
    with pytest.raises(CheckpointError, match=r"is a link to|no regular file"):
        read_adapter(folder, {}, 8, np.dtype(np.float32))


def test_a_snapshot_of_the_hub_links_to_the_files_of_its_repository(tmp_path: Path) -> None:
    folder, blobs = tmp_path / "repo/snapshots/main", tmp_path / "repo/blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    for name in (CONFIG, TENSORS):
        (blobs / name).write_text("{}")
        (folder / name).symlink_to(blobs / name)
    with pytest.raises(CheckpointError, match="peft_type = None"):  # so it was read
        read_adapter(folder, {}, 8, np.dtype(np.float32))


def test_a_path_with_a_nul_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="embedded null"):
        read_adapter(f"{tmp_path}/a\0b", {}, 8, np.dtype(np.float32))
