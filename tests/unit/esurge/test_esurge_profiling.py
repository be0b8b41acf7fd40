"""Profiles of eSurge: exactly so many scheduler updates, files that exist, and nothing left by what
fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import jax
import pytest

from enginebay.serving.observer import Update
from enginebay_esurge import BusyError, eSurge
from tests.unit.esurge.small import GREEDY_ON, LONG, PROMPT, Watcher, until

pytestmark = pytest.mark.xdist_group("esurge")


class Count(Watcher):
    """Counts the updates that are launched while a profile is taken, and those after it."""

    def __init__(self, engine: eSurge) -> None:
        self.engine = engine
        self.inside = self.outside = 0

    def updated(self, update: Update) -> None:
        if self.engine.profiling_active:
            self.inside += 1
        else:
            self.outside += 1


@pytest.fixture
def profiled(real_engine: eSurge) -> Iterator[eSurge]:
    yield real_engine
    real_engine.stop_profiling()


def counted(engine: eSurge) -> Count:
    """A counter that is told before the profiler, so that it sees the update that ends the
    profile.
    """
    count = Count(engine)
    engine.audience.add(count)
    return count


def traces(folder: Path) -> list[Path]:
    return sorted(folder.glob("plugins/profile/*/*.xplane.pb"))


def check_profile_of_four_updates(engine: eSurge, folder: Path) -> None:
    count = counted(engine)
    engine.start_profiling(str(folder), num_batches=4)
    with pytest.raises(RuntimeError, match="is being profiled"):
        engine.start_profiling(folder)
    engine.generate(PROMPT, GREEDY_ON)
    engine.generate(PROMPT, LONG)
    engine.audience.remove(count)
    assert count.inside == 4
    assert count.outside > 4
    assert not engine.profiling_active
    [trace] = traces(folder)
    assert trace.stat().st_size > 1000


def test_a_profile_ends_by_itself_after_exactly_so_many_updates(
    profiled: eSurge, tmp_path: Path
) -> None:  # holds S16
    check_profile_of_four_updates(profiled, tmp_path / "new" / "folder")


@pytest.mark.slow  # an engine of its own
def test_overlapping_execution_changes_nothing_of_it(
    make_real: Callable[..., AbstractContextManager[eSurge]], tmp_path: Path
) -> None:  # holds S16
    with make_real(compile_runner=False, overlap_execution=True) as engine:
        check_profile_of_four_updates(engine, tmp_path)


def test_the_trace_has_the_steps_of_its_updates(
    profiled: eSurge, tmp_path: Path
) -> None:  # holds S16
    profiled.start_profiling(tmp_path, 3, host_tracer_level=2, python_tracer_level=0)
    profiled.generate(PROMPT, LONG)
    [trace] = traces(tmp_path)
    data = jax.profiler.ProfileData.from_file(str(trace))
    names = [event.name for plane in data.planes for line in plane.lines for event in line.events]
    assert sum("Execute" in name for name in names) >= 3


def test_stopping_a_profile_ends_it_before_its_time(
    slow_real_engine: eSurge, tmp_path: Path
) -> None:  # holds S16
    count = counted(slow_real_engine)
    slow_real_engine.start_profiling(tmp_path, 10**6)
    stream = slow_real_engine.stream(PROMPT, LONG)
    next(stream)
    until(
        lambda: count.inside
    )  # without overlap a prompt's token comes before the update that it is part of is told
    slow_real_engine.stop_profiling()
    slow_real_engine.stop_profiling()
    assert len(traces(tmp_path)) == 1
    seen = count.inside
    until(lambda: count.outside)
    assert count.inside == seen > 0
    stream.close()
    slow_real_engine.audience.remove(count)
    time.sleep(1.1)  # a trace is in a folder of the second it ended in
    slow_real_engine.start_profiling(tmp_path)
    slow_real_engine.stop_profiling()
    assert len(traces(tmp_path)) == 2


def test_terminating_ends_a_profile(profiled: eSurge, tmp_path: Path) -> None:  # holds S16
    profiled.start_profiling(tmp_path)
    profiled.terminate()
    assert len(traces(tmp_path)) == 1
    assert not profiled.profiling_active
    profiled.initiate()


def test_what_cannot_be_started_leaves_nothing_active(
    profiled: eSurge, tmp_path: Path
) -> None:  # holds S16
    for num_batches in (0, -1):
        with pytest.raises(ValueError, match="num_batches"):
            profiled.start_profiling(tmp_path, num_batches)
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(ValueError, match="output_dir"):
        profiled.start_profiling(blocked)
    jax.profiler.start_trace(tmp_path / "other")
    try:
        with pytest.raises(BusyError, match="one profile at a time"):
            profiled.start_profiling(tmp_path)
    finally:
        jax.profiler.stop_trace()
    assert not profiled.profiling_active
    assert traces(tmp_path) == []
    profiled.generate(PROMPT, GREEDY_ON)
