"""The HTML page of `enginebay compare` in a real browser: plots that fit, and no script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("websockets", reason="websockets is not installed; see `make test-browser`")
from tests.browser.chromium import chromium, find_chromium

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed"),
]

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "assets"
SIZES = "--prompt-len 32 --new-tokens 32 --max-model-len 128 --max-num-seqs 1 --rounds 6"


def test_a_comparison_is_shown_with_plots_at_any_width(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "enginebay",
        "compare",
        "--engine",
        "oengine,vinference,esurge",
    ]
    done = subprocess.run(
        [*command, *SIZES.split(), "--format", "html"], capture_output=True, text=True, check=True
    )
    (tmp_path / "page.html").write_text(done.stdout)
    with chromium(tmp_path / "profile") as tab:
        tab.open(f"file://{tmp_path}/page.html", width=1000, height=1100)
        titles = "[...document.querySelectorAll('svg .title')].map((one) => one.textContent)"
        assert {"first token, ms", "decode tokens/s"} <= set(tab.value(titles))
        assert tab.value("document.scripts.length") == 0
        tab.picture(PICTURES / "compare.png", "ul.legend, div.plots")
        for width in (390, 1400):
            for dark in (False, True):
                tab.resize(width, 900, dark=dark)
                assert tab.value("document.documentElement.scrollWidth") <= width
        assert not tab.errors
