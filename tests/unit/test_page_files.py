"""The files of the disk tier: damage, other processes, full and read-only disks."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from enginebay.errors import ConfigError
from enginebay_paged import page_files
from enginebay_paged.page_files import HEAD, PageFiles

SIZE = 1000


class Now:
    """A clock of seconds since 1970 that a test sets."""

    def __init__(self) -> None:
        self.now_s = time.time()

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def now() -> Now:
    return Now()


@pytest.fixture
def files(tmp_path: Path, now: Now) -> Iterator[PageFiles]:
    one = PageFiles(tmp_path / "pages", 2**20, ttl_s=100.0, clock=now)
    yield one
    one.close()


def digest(number: int) -> bytes:
    return number.to_bytes(16, "little")


def page(number: int, size: int = SIZE) -> bytes:
    return np.random.default_rng(number).bytes(size)


def keep(files: PageFiles, *numbers: int, age_s: float = 0.0) -> None:
    for number in numbers:
        files.keep("full", digest(number), page(number), age_s)
    files.finish()


def read(files: PageFiles, number: int) -> bytes | None:
    return files.read("full", digest(number), SIZE)


def names(files: PageFiles) -> set[str]:
    return {path.name for path in files.folder.rglob("*") if path.is_file()}


def test_pages_are_found_by_hash_and_group_also_by_another_reader(files: PageFiles) -> None:
    keep(files, 1, 2)
    other = PageFiles(files.folder, 2**20)
    assert [read(one, number) for one in (files, other) for number in (1, 2)] == [
        page(1),
        page(2),
    ] * 2
    assert read(files, 3) is None
    assert files.read("window", digest(1), SIZE) is None
    assert files.read("full", digest(1), SIZE - 1) is None
    assert (files.counts.written, files.counts.damaged) == (2, 1)


def test_folders_that_are_made_are_open_to_their_user_only(tmp_path: Path) -> None:
    files = PageFiles(tmp_path / "above" / "pages", 2**20)
    keep(files, 1)
    made = files.path("full", digest(1)).parents[:3]
    assert [oct(one.stat().st_mode)[-3:] for one in made] == ["700"] * 3
    files.close()


def test_writers_of_one_page_do_not_share_an_unfinished_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes in two containers may have the same number, and write the same page first."""
    written, replace = [], Path.replace

    def noted(path: Path, target: Path) -> Path:
        written.append(path.name)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", noted)
    for _ in range(2):
        files = PageFiles(tmp_path, 2**20)
        keep(files, 1)
        files.close()
        files.path("full", digest(1)).unlink()
    assert len(set(written)) == 2


def damaged(data: bytes, rng: np.random.Generator, kind: int) -> bytes:
    changed = bytearray(data)
    where = int(rng.integers(0, len(data)))
    if kind == 0:
        return data[:where]
    if kind == 1:
        changed[where] ^= 1 << int(rng.integers(0, 8))
    elif kind == 2:
        changed[: HEAD.size] = rng.bytes(HEAD.size)
    elif kind == 3:
        changed[HEAD.size :] = bytes(len(data) - HEAD.size)
    else:
        changed += b"more"
    return bytes(changed)


def test_none_of_two_hundred_damaged_files_is_read_and_none_stays(files: PageFiles) -> None:
    keep(files, *range(200))
    rng, paths = np.random.default_rng(0), [files.path("full", digest(i)) for i in range(200)]
    for number, path in enumerate(paths):
        path.write_bytes(damaged(path.read_bytes(), rng, number % 5))
    assert [read(files, number) for number in range(200)] == [None] * 200
    assert (files.counts.damaged, files.counts.read) == (200, 0)
    assert not names(files)


def test_the_file_of_another_page_is_not_read(files: PageFiles) -> None:
    keep(files, 1, 2)
    files.path("full", digest(1)).replace(files.path("full", digest(2)))
    assert read(files, 2) is None
    assert files.counts.damaged == 1


def test_things_that_are_no_files_are_not_read(files: PageFiles, tmp_path: Path) -> None:
    keep(files, 1, 2, 3)
    good = files.path("full", digest(1)).read_bytes()
    outside = tmp_path / "outside"
    outside.write_bytes(good)
    os.utime(outside, (1.0, 1.0))
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    for number, make in (
        (1, lambda path: path.symlink_to(outside)),
        (2, lambda path: path.mkdir()),
        (3, os.mkfifo),
    ):
        path = files.path("full", digest(number))
        path.unlink()
        make(path)
        keep(files, number)
        assert read(files, number) is None
    assert (outside.read_bytes(), outside.stat().st_mtime) == (good, 1.0)
    assert len(list(Path("/proc/self/fd").iterdir())) == num_open
    keep(files, 1, 3)
    assert [read(files, number) for number in (1, 3)] == [page(1), page(3)], "they were removed"


def test_unused_pages_are_too_old_after_the_time_to_live(files: PageFiles, now: Now) -> None:
    keep(files, 1)
    keep(files, 2, age_s=60.0)
    now.now_s += 50.0
    assert read(files, 1) == page(1)
    assert read(files, 2) is None
    now.now_s += 99.0
    assert read(files, 1) == page(1), "it was used in between"
    keep(files, 1, age_s=90.0)  # another process wrote it, and evicts it later
    now.now_s += 50.0
    assert read(files, 1) == page(1), "it was used less than 100 s ago"
    now.now_s += 100.0
    assert read(files, 1) is None
    assert not names(files)


def test_the_oldest_files_go_first_and_foreign_files_stay(tmp_path: Path, now: Now) -> None:
    each = SIZE + HEAD.size
    files = PageFiles(tmp_path, 20 * each, clock=now)
    (tmp_path / "00").mkdir()
    foreign = [tmp_path / "notes.txt", tmp_path / "00" / "notes.page", tmp_path / "00" / "x.tmp"]
    for path in foreign:
        path.write_bytes(bytes(50 * each))
    for number in range(50):
        now.now_s += 1.0
        keep(files, number)
        assert read(files, 0) == page(0), "it is used all the time"
        total = sum(path.stat().st_size for path in tmp_path.glob("*/*.page")) - 50 * each
        assert total <= 20 * each
    assert read(files, 49) == page(49)
    assert read(files, 1) is None
    assert all(path.exists() for path in foreign)
    files.close()


WRITING = """
import sys
from pathlib import Path
from tests.unit.test_page_files import SIZE, digest, page
from enginebay_paged.page_files import HEAD, PageFiles

files = PageFiles(Path(sys.argv[1]), 60 * (SIZE + HEAD.size))
for number in range(400):
    files.keep("full", digest(number), page(number), 0.0)
    if number % 7 == 0:
        files.finish()
        found = files.read("full", digest(number), SIZE)
        assert found in (None, page(number))
files.close()
assert (files.counts.damaged, files.counts.failed) == (0, 0), files.counts
"""


@pytest.mark.slow
def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    both = [
        subprocess.Popen(
            [sys.executable, "-c", WRITING, str(tmp_path)], cwd=Path(__file__).parents[2]
        )
        for _ in range(2)
    ]
    assert [one.wait(60) for one in both] == [0, 0]
    total = sum(path.stat().st_size for path in tmp_path.glob("*/*.page"))
    assert 0 < total <= 66 * (SIZE + HEAD.size)
    assert not list(tmp_path.rglob("*.tmp"))
    files = PageFiles(tmp_path, 2**20)
    found = [read(files, number) for number in range(400)]
    assert files.counts.damaged == 0
    assert sum(one is not None for one in found) >= 40


def test_a_full_disk_is_counted_and_tried_again_later(
    files: PageFiles, now: Now, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        keep(files, 1)
        keep(files, 2)
    assert (files.counts.failed, files.counts.dropped) == (1, 1)
    assert not names(files)
    keep(files, 3)
    assert read(files, 3) is None, "it is too early to try again"
    now.now_s -= 3600.0  # the clock is set back, which does not matter
    files._retry_at_s -= page_files.RETRY_S
    keep(files, 4)
    assert read(files, 4) == page(4)


def test_a_folder_that_cannot_be_written_is_read(files: PageFiles) -> None:
    keep(files, 1)
    path = files.path("full", digest(1))
    for folder in (path.parent, files.folder):
        folder.chmod(0o500)
    try:
        assert read(files, 1) == page(1)
        keep(files, 2)
        if os.geteuid():  # root may write everywhere
            assert files.counts.failed == 1
        assert read(files, 1) == page(1)
    finally:
        for folder in (files.folder, path.parent):
            folder.chmod(0o700)


def test_a_folder_that_cannot_be_made_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="a file"):
        PageFiles(tmp_path / "file", 2**20)
    for wrong in ("a\0b", "~nobody-here/pages", "a" * 300, str(tmp_path / "loop")):
        (tmp_path / "loop").unlink(missing_ok=True)
        (tmp_path / "loop").symlink_to("loop")
        with pytest.raises(ConfigError, match="prefix_disk_dir"):
            PageFiles(wrong, 2**20)
    files = PageFiles(tmp_path / "file" / "below", 2**20)
    keep(files, 1)
    assert read(files, 1) is None
    assert files.counts.failed == 2
    files.close()


def test_what_waits_is_bounded_and_unfinished_files_go(
    files: PageFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(files, 1)
    monkeypatch.setattr(page_files, "MAX_WAITING_BYTES", 2 * SIZE)
    monkeypatch.setattr(page_files, "UNFINISHED_S", -1.0)
    left = files.path("full", digest(1)).with_suffix(".77-1.tmp")
    left.write_bytes(b"left by a process that was killed")
    other = PageFiles(files.folder, 2**20)
    blocked = files._thread.submit(time.sleep, 0.2)
    for number in range(2, 9):
        files.keep("full", digest(number), page(number), 0.0)
    assert files.counts.dropped == 5
    blocked.result()
    keep(other, 20)
    assert not left.exists()
