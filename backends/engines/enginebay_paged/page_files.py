"""PageFiles: the disk tier, a folder with a file for each page, which processes share."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import errno
import hashlib
import logging
import math
import os
import secrets
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from enginebay.errors import ConfigError, shown
from enginebay.waits import shut_down
from enginebay_runtime.host_pages import PageStorage

log = logging.getLogger("enginebay.prefix_files")

MAGIC = b"EBpage1\n"
HEAD = struct.Struct("<8s16sQ32s")
"""Magic, name of the file, number of bytes of the content, and the SHA-256 of these three fields
and the content.
"""

THREAD_NAME = "enginebay-prefix-files"
SUFFIX, UNFINISHED = ".page", ".tmp"
MAX_WAITING_BYTES = 256 * 2**20
"""Max bytes of pages that wait to be written; further pages are not written."""

KEPT_SHARE = 0.9
"""Share of max_bytes that stays when the oldest files are removed."""

RETRY_S = 30.0
"""Seconds without writing after an error of the disk."""

CLOSE_S = 10.0
"""Max seconds that `close` spends on writing."""

UNFINISHED_S = 60.0
"""Age of an unfinished file that a process has left behind, in seconds."""


@dataclasses.dataclass
class FileCounts:
    """Numbers of pages since the start: written, read, rejected because the file was damaged, not
    written because of a limit or an earlier error, and failed because of an error of the disk.
    """

    written: int = 0
    read: int = 0
    damaged: int = 0
    dropped: int = 0
    failed: int = 0


class PageFiles(PageStorage):
    """Pages in files of a folder, by hash. A file is written under another name and then renamed,
    so that readers see whole files only; a checksum covers all its bytes. Errors of the disk are
    counted and logged, and never raised.

    A thread writes. Files that were not used for `ttl_s` are not read. When all files together
    have more than `max_bytes`, the least recently used files are removed; files that other
    processes have just written are counted later. Other files in the folder are left alone. Whoever
    can write to the folder can change what a model has read: the folder must belong to the user.
    """

    def __init__(
        self,
        folder: str | Path,
        max_bytes: int,
        ttl_s: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` returns seconds since 1970. ConfigError when `folder` is a file, or no path."""
        self.folder, self.max_bytes, self.ttl_s = _folder(folder), max_bytes, ttl_s
        self.counts = FileCounts()
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._thread = concurrent.futures.ThreadPoolExecutor(1, THREAD_NAME)
        self._num_bytes: int | None = None
        """Bytes of all files, as far as known; None: unknown."""
        self._unseen_bytes = 0
        """Bytes written since the files were counted."""
        self._retry_at_s = -math.inf
        self._closes_at_s: float | None = None

    def path(self, group: str, digest: bytes) -> Path:
        """Return the file of a page."""
        name = _name(group, digest).hex()
        return self.folder / name[:2] / f"{name}{SUFFIX}"

    def keep(self, group: str, digest: bytes, content: bytes, age_s: float) -> None:
        """Write a page later, if not too many wait. Any thread may call this."""
        with self._lock:
            is_full = self._waiting_bytes + len(content) > max(MAX_WAITING_BYTES, len(content))
            if is_full:
                self.counts.dropped += 1
                return
            self._waiting_bytes += len(content)
        used_s = self._clock() - age_s
        self._thread.submit(self._write, group, digest, content, used_s)

    def read(self, group: str, digest: bytes, num_bytes: int) -> bytes | None:
        """Return the content of a page of `num_bytes`. None when there is no file, or the file is
        damaged or too old: then it is removed.
        """
        path = self.path(group, digest)
        try:
            content, used_s = _read(path, HEAD.size + num_bytes)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._failed("read", error)
            return None
        if self.ttl_s is not None and self._clock() - used_s >= self.ttl_s:
            _remove(path)
            return None
        if content is None or not _is_whole(content, _name(group, digest)):
            self.counts.damaged += 1
            log.warning("removed %s: it is damaged", path)
            _remove(path)
            return None
        self.counts.read += 1
        self._touch(path, self._clock())
        return content[HEAD.size :]

    def _touch(self, path: Path, used_s: float) -> None:
        try:
            os.utime(path, (used_s, used_s), follow_symlinks=False)
        except OSError:  # read-only, or removed by another process
            log.debug("the time of %s is not changed", path)

    def _write(self, group: str, digest: bytes, content: bytes, used_s: float) -> None:
        with self._lock:
            self._waiting_bytes -= len(content)
        now_s, path = time.monotonic(), self.path(group, digest)
        is_late = self._closes_at_s is not None and now_s > self._closes_at_s
        size = HEAD.size + len(content)
        if is_late or now_s < self._retry_at_s or size > self.max_bytes * KEPT_SHARE:
            self.counts.dropped += 1
            return
        try:
            if path.exists():
                if used_s > path.lstat().st_mtime:
                    self._touch(path, used_s)
                return
            self._make_room(size)
            self._write_whole(path, _framed(_name(group, digest), content), used_s)
        except OSError as error:
            self._retry_at_s = now_s + RETRY_S
            self._failed("write to", error)

    def _write_whole(self, path: Path, data: bytes, used_s: float) -> None:
        _make(path.parent)
        # Not the process's number: in two containers it may be the same.
        unfinished = path.with_suffix(f".{secrets.token_hex(8)}{UNFINISHED}")
        try:
            unfinished.write_bytes(data)
            os.utime(unfinished, (used_s, used_s))
            unfinished.replace(path)
        except BaseException:
            _remove(unfinished)
            raise
        self.counts.written += 1
        self._num_bytes = (self._num_bytes or 0) + len(data)
        self._unseen_bytes += len(data)

    def _make_room(self, size: int) -> None:
        """Remove the files that were not used for longest, if there is no room for `size` bytes."""
        is_known = self._num_bytes is not None and self._unseen_bytes < self.max_bytes / 16
        if is_known and (self._num_bytes or 0) + size <= self.max_bytes:
            return
        files = sorted(self._files())
        total, self._unseen_bytes = sum(length for _, length, _ in files), 0
        if total + size > self.max_bytes:
            for _, length, path in files:
                if total + size <= self.max_bytes * KEPT_SHARE:
                    break
                _remove(path)
                total -= length
        self._num_bytes = total

    def _files(self) -> list[tuple[float, int, Path]]:
        """Time of the last use, size and path of each page. Removes old unfinished files."""
        found = []
        for path in self.folder.glob("[0-9a-f][0-9a-f]/*"):
            try:
                about = path.lstat()
            except FileNotFoundError:  # removed by another process
                continue
            if not stat.S_ISREG(about.st_mode):
                continue
            if path.suffix == UNFINISHED and _is_ours(path, path.name.partition(".")[0]):
                if time.time() - about.st_ctime > UNFINISHED_S:
                    _remove(path)
            elif path.suffix == SUFFIX and _is_ours(path, path.stem):
                found.append((about.st_mtime, about.st_size, path))
        return found

    def _failed(self, verb: str, error: OSError) -> None:
        self.counts.failed += 1
        log.warning("cannot %s prefix_disk_dir %s: %s", verb, self.folder, error)

    def finish(self) -> None:
        """Wait until the waiting pages are written."""
        self._thread.submit(int).result()

    def close(self) -> None:
        """Write the waiting pages, for CLOSE_S at most, and end the thread."""
        self._closes_at_s = time.monotonic() + CLOSE_S
        shut_down(self._thread, THREAD_NAME)


def file_bytes(pages: Iterable[int]) -> int:
    """Return the smallest `max_bytes` for the files of pages of these numbers of bytes."""
    return math.ceil(sum(HEAD.size + num_bytes for num_bytes in pages) / KEPT_SHARE)


def _folder(given: str | Path) -> Path:
    """The folder, wherever the process goes later."""
    why = "a file"
    try:
        folder = Path(given).expanduser().absolute()
        if stat.S_ISDIR(_mode(folder)):
            return folder
    except (OSError, ValueError, RuntimeError) as error:
        why = str(error)
    raise ConfigError(
        f"prefix_disk_dir = {shown(str(given))}: {why}",
        "a folder, or a path where one can be made",
        "Set prefix_disk_dir to such a path.",
    )


def _mode(folder: Path) -> int:
    """The mode of a folder; that of a folder when there is nothing yet."""
    try:
        return folder.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return stat.S_IFDIR


def _make(folder: Path) -> None:
    """Make a folder and the missing ones above it, open to their user only."""
    if not folder.is_dir():
        _make(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def _name(group: str, digest: bytes) -> bytes:
    return hashlib.blake2b(digest + group.encode(), digest_size=16).digest()


def _is_ours(path: Path, name: str) -> bool:
    """Whether a file has the name of a page."""
    return (
        len(name) == 32 and not set(name) - set("0123456789abcdef") and name[:2] == path.parent.name
    )


def _checksum(name: bytes, content: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(MAGIC + name + len(content).to_bytes(8, "little"))
    digest.update(content)
    return digest.digest()


def _framed(name: bytes, content: bytes) -> bytes:
    return HEAD.pack(MAGIC, name, len(content), _checksum(name, content)) + content


def _is_whole(data: bytes, name: bytes) -> bool:
    """Whether the bytes of a file are those of the page with this name."""
    content = memoryview(data)[HEAD.size :]
    return data[: HEAD.size] == HEAD.pack(MAGIC, name, len(content), _checksum(name, content))


def _read(path: Path, size: int) -> tuple[bytes | None, float]:
    """The bytes of a file, None unless it is a plain file of `size` bytes, and its time."""
    try:
        # A link is not followed, and a pipe not waited for.
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return None, math.inf
        raise
    about = os.fstat(number)
    if not stat.S_ISREG(about.st_mode) or about.st_size != size:
        os.close(number)  # os.fdopen() would raise for a folder, and leave it open
        return None, about.st_mtime
    with os.fdopen(number, "rb") as file:
        return file.read(size), about.st_mtime


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.debug("%s is not removed: %s", path, error)
