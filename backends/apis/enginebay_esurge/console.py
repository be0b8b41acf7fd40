"""The console monitor: an engine's figures as a table that updates in place on the terminal."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.table import Table

from enginebay_esurge.observing import Figures
from enginebay_esurge.repeating import Repeater

REFRESH_S = 0.5


class ConsoleMonitor:
    """Shows figures twice a second, by default on standard error. `close` leaves the last table
    visible.
    """

    def __init__(
        self, title: str, read: Callable[[], Figures], console: Console | None = None
    ) -> None:
        self._title, self._read = title, read
        self._live = Live(
            self._table(),
            console=console or Console(stderr=True),
            auto_refresh=False,
            transient=False,
        )
        self._live.start(refresh=True)
        self._repeater = Repeater("esurge-console", REFRESH_S, self._show)

    def close(self) -> None:
        """Show the final figures, and release the terminal."""
        self._repeater.stop()
        self._live.update(self._table())
        self._live.stop()

    def _show(self) -> None:
        self._live.update(self._table(), refresh=True)

    def _table(self) -> Table:
        return figures_table(self._title, self._read())


def figures_table(title: str, figures: Figures) -> Table:
    """Return figures as a table for people."""
    table = Table(title=title, show_header=False)
    rows = {
        "requests": f"{figures.num_running} running, {figures.num_waiting} waiting",
        "ended": f"{figures.num_completed} completed, {figures.num_failed} failed, "
        f"{figures.requests_per_second:.2f} a second",
        "tokens": f"{figures.num_tokens} generated, {figures.tokens_per_second:.1f} a second",
        "last update": f"{figures.num_scheduled_tokens} tokens scheduled",
        "preempted": f"{figures.num_preempted} requests",
        "mean step": f"{figures.mean_batch_size:.1f} rows, {figures.mean_schedule_s * 1e3:.2f} ms "
        f"to schedule, {figures.mean_execute_s * 1e3:.2f} ms to run",
        "mean request": f"{figures.mean_first_token_s * 1e3:.0f} ms to the first token, "
        f"{figures.mean_latency_s * 1e3:.0f} ms in all",
        "cache": f"{figures.num_pages_used} of {figures.num_pages} pages, "
        f"{100 * figures.cache_hit_rate:.1f} % of the prompts found",
    }
    if figures.num_draft_tokens:
        part = 100 * figures.num_accepted_tokens / figures.num_draft_tokens
        rows["drafts"] = (
            f"{figures.num_accepted_tokens} of {figures.num_draft_tokens} tokens held, {part:.1f} %"
        )
    for name, text in rows.items():
        table.add_row(name, text)
    return table
