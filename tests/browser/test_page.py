"""The server's page in a real browser: chats stream, plots move, and nothing is inaccessible."""

from __future__ import annotations

import importlib.resources
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("websockets", reason="websockets is not installed; see `make test-browser`")
from tests.browser.chromium import Tab, find_chromium
from tests.browser.page_driver import STATE, choose, give_key, page_of_two, say

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed"),
    pytest.mark.skipif(
        importlib.util.find_spec("axe_core_python") is None,
        reason="axe-core-python is not installed; `make test-browser` runs this",
    ),
]

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "assets"
PARSERS = ("--tool-parser", "hermes", "--reasoning-parser", "think")
TOOL = {
    "type": "function",
    "function": {
        "name": "set_age",
        "parameters": {
            "type": "object",
            "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["age"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """The page of a server with a key and the demo model twice, under two names."""
    with page_of_two(tmp_path_factory.mktemp("profile"), *PARSERS) as tab:
        give_key(tab)
        assert [one for one in tab.errors if "401" not in one] == []
        tab.errors.clear()
        yield tab
        assert not tab.errors


def facts(tab: Tab) -> str:
    """The line below the last answer."""
    return str(tab.value("[...document.querySelectorAll('.facts')].at(-1).innerText"))


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


def test_everything_comes_from_the_server(tab: Tab) -> None:
    names = tab.value("performance.getEntriesByType('resource').map(one => one.name)")
    assert len(names) > 3
    origin = tab.value("location.origin")
    assert all(name.startswith(f"{origin}/") for name in names)


def test_a_tool_call_is_shown_apart(tab: Tab) -> None:
    choose(tab, "tools", json.dumps([TOOL]))
    choose(tab, "tool_choice", "required")
    say(tab, "How old are you?")
    shown = tab.value("document.querySelector('.call').innerText")
    assert re.fullmatch(r'set_age\(\{"age": ?\d\}\)', shown)
    choose(tab, "tools", "")


def test_tools_that_are_no_json_are_not_sent(tab: Tab) -> None:
    choose(tab, "tools", "no JSON")
    tab.value("document.getElementById('message').focus()")
    tab.type("Hello!")
    tab.press("Enter")
    error = tab.value("document.getElementById('note').innerText")
    choose(tab, "tools", "")
    assert error.startswith("The tools are not JSON")
    assert tab.value("document.getElementById('message').value") == "Hello!"
    tab.value("document.getElementById('message').value = ''")


def test_reasoning_is_shown_apart(tab: Tab) -> None:
    """The request is changed on its way, so that the demo model writes reasoning."""
    tab.value("""
        window.plainFetch = window.fetch;
        window.fetch = (address, options) => {
            if (!String(address).includes("completions")) return plainFetch(address, options);
            const body = {...JSON.parse(options.body), guided_regex: "<think>so</think>yes"};
            return plainFetch(address, {...options, body: JSON.stringify(body)});
        };
    """)
    say(tab, "Think!")
    tab.value("window.fetch = window.plainFetch")
    assert tab.value("[...document.querySelectorAll('.thought')].at(-1).innerText") == "so"
    assert tab.value("[...document.querySelectorAll('.text')].at(-1).innerText") == "yes"


def test_sampling_is_that_of_the_controls(tab: Tab) -> None:
    tab.value("document.getElementById('clear').click()")
    choose(tab, "max_tokens", "5")
    choose(tab, "temperature", "2")
    texts = []
    for seed in ("7", "7", "8"):
        choose(tab, "seed", seed)
        say(tab, "Once upon a time")
        assert facts(tab).startswith("length · 5 tokens")
        texts.append(tab.value("document.querySelector('.text').innerText"))
        tab.value("document.getElementById('clear').click()")
    assert texts[0] == texts[1] != texts[2]
    choose(tab, "max_tokens", "128")
    choose(tab, "temperature", "0")
    choose(tab, "seed", "")


def test_an_answer_is_stopped_with_the_keyboard(tab: Tab) -> None:
    choose(tab, "max_tokens", "400")
    tab.value("document.getElementById('message').focus()")
    tab.type("Tell me a long story.")
    tab.press("Enter")
    tab.until("[...document.querySelectorAll('.text')].at(-1)?.innerText.length > 5")
    tab.value("document.getElementById('stop').focus()")
    tab.press("Enter")
    tab.until("!document.getElementById('go').disabled")
    assert facts(tab).startswith("stopped")
    choose(tab, "max_tokens", "128")
    tab.value("document.getElementById('clear').click()")


def test_two_models_answer_side_by_side(tab: Tab) -> None:
    choose(tab, "other", "two")
    say(tab, "Hello!")  # compiles the programs of the second model, so that the picture shows none
    tab.value("document.getElementById('clear').click()")
    say(tab, "What color is the sky?")
    tab.until(f"{STATE}.startsWith('ready')")
    texts = tab.value("[...document.querySelectorAll('.text')].map(text => text.innerText)")
    assert len(texts) == 2
    assert texts[0] == texts[1]
    tab.picture(PICTURES / "page_chat.png")


def test_an_error_of_the_server_is_shown(tab: Tab) -> None:
    choose(tab, "top_p", "7")
    say(tab, "Hello!")
    assert tab.value("document.getElementById('message').value") == "Hello!"
    choose(tab, "message", "")
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
    rates = tab.value("document.getElementById('now-reads').textContent").split(" of ")
    assert all(float(rate) > 0.05 for rate in rates)
    assert len(rates) == 2
    tab.picture(PICTURES / "page_live.png")


def test_latency_percentiles_are_those_of_the_requests_before(tab: Tab) -> None:
    lines = tab.value("""import('./plots.js').then(({ percentileLines }) => percentileLines(
        [...Array(10).keys()].map((place) => [20 + place, 100 * (place + 1)])
    ).map((line) => Object.fromEntries(line.points)))""")
    last = [line["20"] for line in lines]
    assert last == [600, 1000, 1000]
    assert [line["26"] for line in lines] == [900, 1000, 1000]
    assert "4" not in lines[0], "no request ended in the 15 s before"


def test_steps_and_pages_are_drawn_in_their_colours(tab: Tab) -> None:
    """A model of invented figures, drawn into the canvases of the page while its clock stands."""
    tab.value("document.getElementById('tab-live').click()")
    found = tab.value("""import('./plots.js').then(({ Plots }) => {
        const clock = Date.now, now = clock() / 1000, plots = new Plots();
        Date.now = () => 1000 * now;  // a preemption is one pixel wide
        const step = {rows: 2, tokens: 2, prompt_tokens: 0};
        const records = [
            {kind: "prefill", at: now - 8, s: 1, ...step},
            {kind: "decode", at: now - 6, s: 1, ...step},
            {kind: "preempt", at: now - 4, s: 0, rows: 1},
        ];
        const figures = {label: "x", running: 1, waiting: 0, max_num_seqs: 2, compiled: 3,
            coming: [], num_stand_ins: 0,
            gigabytes_per_s: 12, roofline_gigabytes_per_s: 30};
        plots.add([{...figures, compiled: 1, records: [], pages: null}]);
        plots.add([{...figures, records, pages: {full: [0, 0, -1, 1, 2]}}]);
        plots.draw("x");
        Date.now = clock;
        const pixel = (id, x, y) => [...document.getElementById(id).getContext("2d")
            .getImageData(x, y, 1, 1).data].slice(0, 3).join();
        const width = document.getElementById("steps").width;
        const named = (name) => {
            const line = document.createElement("canvas").getContext("2d");
            line.fillStyle = getComputedStyle(document.documentElement)
                .getPropertyValue("--" + name);
            line.fillRect(0, 0, 1, 1);
            return [...line.getImageData(0, 0, 1, 1).data].slice(0, 3).join();
        };
        const at = (ago) => Math.round(width * (1 - ago / 10));
        return {
            steps: [[at(7.5), 40], [at(5.5), 40], [at(4), 60], [at(0.5), 8]]
                .map(([x, y]) => [-2, -1, 0, 1].map((more) => pixel("steps", x + more, y))),
            wanted: ["prefill", "decode", "preempt", "compile"].map(named),
            pages: [3, 17, 31, 45].map((x) => pixel("pages", x, 3)),
            holders: ["fill", "kept", "decode", "shared"].map(named),
            texts: ["now-pages", "now-rows", "now-reads"]
                .map((id) => document.getElementById(id).textContent),
        };
    })""")
    for near, wanted in zip(found["steps"], found["wanted"], strict=True):
        assert wanted in near
    assert found["pages"] == found["holders"]
    pages = "2 used, 1 of them shared, 1 kept"
    assert found["texts"] == [pages, "1 of 2 run, 0 wait", "12.0 of 30.0"]


def test_the_parts_have_their_reasons(tab: Tab) -> None:
    tab.value("document.getElementById('tab-parts').click()")
    cells = tab.value("[...document.querySelectorAll('#explained td')].map(cell => cell.innerText)")
    assert {"engine", "oengine"} <= set(cells)


def test_tabs_are_reached_by_arrow_keys(tab: Tab) -> None:
    tab.value("document.getElementById('tab-parts').focus()")
    tab.press("ArrowRight")
    assert tab.value("document.activeElement.id") == "tab-chat"
    assert tab.value("document.getElementById('parts').hidden") is True


@pytest.mark.parametrize("name", ["chat", "live", "parts"])
def test_every_control_is_reached_by_the_tab_key_and_shows_that_it_is(tab: Tab, name: str) -> None:
    tab.value(f"document.getElementById('tab-{name}').click()")
    tab.value("""
        window.controls = [...document.querySelectorAll(
            "a[href], button, input, select, textarea, summary, [tabindex='0']"
        )].filter((one) => one.tabIndex >= 0 && !one.disabled && one.checkVisibility());
        document.activeElement.blur();
    """)
    num_controls = tab.value("controls.length")
    assert num_controls >= 3
    reached = set()
    for _ in range(2 * num_controls):
        tab.press("Tab")
        place = tab.value("controls.indexOf(document.activeElement)")
        reached.add(place)
        shown = "getComputedStyle(document.activeElement).outlineStyle !== 'none'"
        assert place < 0 or tab.value(shown), tab.value("document.activeElement.outerHTML")
    missed = [place for place in range(num_controls) if place not in reached]
    assert [tab.value(f"controls[{place}].outerHTML") for place in missed] == []


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
