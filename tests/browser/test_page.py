"""The server's page in a real browser: chats stream, plots move, and nothing is inaccessible."""

from __future__ import annotations

import importlib.resources
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.process import ServerProcess

pytest.importorskip("websockets", reason="websockets is not installed; see `make test-browser`")
from tests.browser.chromium import Tab, chromium, find_chromium

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed"),
    pytest.mark.skipif(
        importlib.util.find_spec("axe_core_python") is None,
        reason="axe-core-python is not installed; `make test-browser` runs this",
    ),
]

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "assets"
SIZES = ("--max-model-len", "512", "--max-num-seqs", "8")


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """The page of a server with the demo model twice, under two names."""
    names = ("--served-model-name", "one", "--served-model-name", "two")
    profile = tmp_path_factory.mktemp("profile")
    with ServerProcess(*names, "--warmup", "lazy", *SIZES, models=("demo", "demo")) as server:
        with chromium(profile) as tab:
            tab.open(f"{server.url}/ui/")
            tab.until("document.getElementById('state').textContent.startsWith('ready')")
            yield tab
        assert not tab.errors


def say(tab: Tab, text: str) -> None:
    """Write a message with the keyboard, and wait for the whole answer."""
    tab.value("document.getElementById('message').focus()")
    tab.type(text)
    tab.press("Enter")
    tab.until("document.getElementById('message').value === ''")
    tab.until("!document.getElementById('go').disabled")


def choose(tab: Tab, name: str, value: str) -> None:
    tab.value(f"document.getElementById({name!r}).value = {value!r}")


def test_an_answer_streams(tab: Tab) -> None:
    watch = """
        window.lengths = new Set();
        const note = () => window.lengths.add(document.querySelector('.text')?.innerText.length);
        const everything = {subtree: true, childList: true, characterData: true};
        new MutationObserver(note).observe(document.getElementById('panes'), everything);
    """
    tab.value(watch + "1")
    say(tab, "Tell me a story about a duck.")
    assert tab.value("window.lengths.size") > 10
    assert tab.value("document.querySelector('.facts').innerText").startswith("length · 128 tokens")


def test_two_models_answer_side_by_side(tab: Tab) -> None:
    choose(tab, "other", "two")
    say(tab, "What color is the sky?")
    texts = tab.value("[...document.querySelectorAll('.text')].map(text => text.innerText)")
    assert len(texts) == 2
    assert texts[0] == texts[1]
    tab.picture(PICTURES / "page_chat.png")


def test_an_error_of_the_server_is_shown(tab: Tab) -> None:
    choose(tab, "top_p", "7")
    say(tab, "Hello!")
    assert "top_p" in tab.value("document.querySelector('.turn.error').innerText")
    choose(tab, "top_p", "1")
    assert [one for one in tab.errors if "400" not in one] == []  # the browser logs the status
    tab.errors.clear()


def test_plots_move(tab: Tab) -> None:
    tab.value("document.getElementById('tab-live').click()")
    tab.until("document.getElementById('now-first').textContent.includes('p99')")
    ink = """(() => {
        const canvas = document.getElementById('steps');
        const image = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        return image.data.reduce((a, b) => a + b, 0);
    })()"""
    before = tab.value(ink)
    tab.until(f"{ink} !== {before}")
    assert "kept" in tab.value("document.getElementById('now-pages').textContent")
    tab.picture(PICTURES / "page_live.png")


def test_the_parts_have_their_reasons(tab: Tab) -> None:
    tab.value("document.getElementById('tab-parts').click()")
    cells = tab.value("[...document.querySelectorAll('#explained td')].map(cell => cell.innerText)")
    assert {"engine", "oengine"} <= set(cells)


def test_tabs_are_reached_by_arrow_keys(tab: Tab) -> None:
    tab.value("document.getElementById('tab-parts').focus()")
    tab.press("ArrowRight")
    assert tab.value("document.activeElement.id") == "tab-chat"
    assert tab.value("document.getElementById('parts').hidden") is True


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1200])
def test_nothing_is_inaccessible_or_wider_than_the_window(
    tab: Tab, width: int, *, dark: bool
) -> None:
    script = importlib.resources.files("axe_core_python") / "axe.min.js"
    tab.call("Page.setBypassCSP", enabled=True)
    tab.resize(width, 740, dark=dark)
    tab.value(script.read_text())
    for name in ("chat", "live", "parts"):
        tab.value(f"document.getElementById('tab-{name}').click()")
        found = tab.value("axe.run().then(r => r.violations.map(v => [v.id, v.nodes[0].target]))")
        assert found == [], name
        assert tab.value("document.documentElement.scrollWidth") <= width
