"""The server's page in a real browser: chats stream, plots move, and nothing is inaccessible."""

from __future__ import annotations

import importlib.resources
import importlib.util
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("websockets", reason="websockets is not installed; see `make test-browser`")
from tests.browser.chromium import Tab, find_chromium
from tests.browser.page_driver import STATE, choose, give_key, page_of_two, reload, say

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
        choose(tab, "max_tokens", "128")
        assert [one for one in tab.errors if "401" not in one] == []
        tab.errors.clear()
        yield tab
        assert not tab.errors


@pytest.fixture
def own_tab(tab: Tab) -> Iterator[Tab]:
    """The same page, which reads no figures meanwhile and so draws none of its own."""
    tab.value("""
        window.plainFetch = window.fetch;
        window.fetch = (address, options) => String(address).startsWith("data")
            ? new Promise(() => {}) : plainFetch(address, options); 1""")
    time.sleep(1.5)  # a reading that has begun ends
    yield tab
    reload(tab)


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
    say(tab, "Tell me a story about a duck.")
    tab.until(f"{STATE}.startsWith('ready')")
    tab.resize(1400, 800)
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
        const canvas = document.querySelector('#steps canvas');
        const image = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        return image.data.reduce((a, b) => a + b, 0);
    })()"""
    before = tab.value(ink)
    tab.until(f"{ink} !== {before}")
    tab.resize(1400, 940)
    assert "kept" in tab.value("document.getElementById('now-pages').textContent")
    reads = tab.value("document.getElementById('now-reads').textContent")
    assert reads.endswith(" GB/s")
    rates = reads.removesuffix(" GB/s").split(" of ")
    assert all(float(rate) > 0.05 for rate in rates)
    assert len(rates) == 2
    tab.until("document.querySelector('#steps .uplot')?.clientWidth > 1300")
    tab.picture(PICTURES / "page_live.png")
    tab.resize(1200, 900)


def test_latency_percentiles_are_those_of_the_requests_before(tab: Tab) -> None:
    lines = tab.value("""import('./plots.js').then(({ percentileLines }) => percentileLines(
        [...Array(10).keys()].map((place) => [20 + place, 100 * (place + 1)])
    ).map((line) => Object.fromEntries(line)))""")
    last = [line["20"] for line in lines]
    assert last == [600, 1000, 1000]
    assert [line["26"] for line in lines] == [900, 1000, 1000]
    assert "4" not in lines[0], "no request ended in the 15 s before"


INVENTED = """
    const clock = Date.now, now = clock() / 1000, plots = new Plots();
    const step = {rows: 2, tokens: 2, prompt_tokens: 0};
    const records = [
        {kind: "prefill", at: now - 8, s: 1, ...step},
        {kind: "decode", at: now - 6, s: 1, ...step},
        {kind: "preempt", at: now - 4, s: 0, rows: 1},
    ];
    const figures = {label: "x", running: 1, waiting: 0, max_num_seqs: 2, compiled: 3,
        compile_s: 2, compiling_s: null, coming: [], num_stand_ins: 0, records, pages: null,
        gigabytes_per_s: 12, roofline_gigabytes_per_s: 30};
    const pixel = (context, x, y) => [...context.getImageData(x, y, 1, 1).data].slice(0, 3).join();
    const named = (name) => {
        const line = document.createElement("canvas").getContext("2d");
        line.fillStyle = getComputedStyle(document.documentElement)
            .getPropertyValue("--" + name);
        line.fillRect(0, 0, 1, 1);
        return pixel(line, 0, 0);
    };
    const lane = (kind, ago) => {
        const {plot} = plots.steps;
        const place = ["preempt", "decode", "prefill", "compile"].indexOf(kind) + 0.5;
        const x = Math.round(plot.valToPos(now - ago, "x", true));
        const y = Math.round(plot.valToPos(place, "y", true));
        return [-2, -1, 0, 1, 2].map((more) => pixel(plot.ctx, x + more, y));
    };
    const redraw = async () => {
        plots.draw("x");
        await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
    };
    Date.now = () => 1000 * now;  // a preemption is two pixels wide
"""
"""A model of invented figures, drawn into the page while its clock stands."""


def with_invented(tab: Tab, script: str) -> Any:
    """The value of a script that draws INVENTED on a tab "Live" without other plots."""
    tab.value("document.getElementById('tab-live').click()")
    places = "document.querySelectorAll('.plot')"
    tab.value(f"{places}.forEach((one) => one.replaceWith(one.cloneNode(false)))")
    drawn = f"{INVENTED} {script} "
    return tab.value(f"import('./plots.js').then(async ({{ Plots }}) => {{ {drawn} }})")


def test_steps_and_pages_are_drawn_in_their_colours(own_tab: Tab) -> None:
    found = with_invented(
        own_tab,
        """
        plots.add([{...figures, compiled: 1, compile_s: 0.5, records: []}]);
        plots.add([{...figures, pages: {full: [0, 0, -1, 1, 2]}}]);
        await redraw();
        const kinds = [["prefill", 7.5], ["decode", 5.5], ["preempt", 4], ["compile", 1]];
        const map = document.querySelector("#pages canvas").getContext("2d");
        Date.now = clock;
        return {
            steps: kinds.map(([kind, ago]) => lane(kind, ago)),
            wanted: kinds.map(([kind]) => named(kind)),
            before: lane("compile", 2),
            pages: [3, 27, 51, 75].map((x) => pixel(map, x, 3)),
            holders: ["fill", "kept", "decode", "shared"].map(named),
            texts: ["now-pages", "now-rows", "now-reads"]
                .map((id) => document.getElementById(id).textContent),
        };
    """,
    )
    for near, wanted in zip(found["steps"], found["wanted"], strict=True):
        assert wanted in near
    assert found["wanted"][3] not in found["before"]
    assert found["pages"] == found["holders"]
    pages = "2 used, 1 of them shared, 1 kept"
    assert found["texts"] == [pages, "1 of 2 run, 0 wait", "12.0 of 30.0 GB/s"]


def test_a_compilation_is_drawn_while_it_lasts(own_tab: Tab) -> None:
    found = with_invented(
        own_tab,
        """
        plots.add([{...figures, compiling_s: 3, records: []}]);
        await redraw();
        const while_it_lasts = [lane("compile", 1.5), lane("compile", 3.5)];
        const said = document.getElementById("programs").textContent;
        Date.now = () => 1000 * (now + 2);
        plots.add([{...figures, compiling_s: null, compile_s: 6, compiled: 4, records: []}]);
        await redraw();
        const later = [lane("compile", -0.5), lane("compile", -1.5)];
        Date.now = clock;
        const num = plots.of.get("x").compiles.length;
        return {colour: named("compile"), while_it_lasts, said, later, num};
    """,
    )
    present, before = found["while_it_lasts"]
    assert found["colour"] in present
    assert found["colour"] not in before
    assert found["said"] == "3 programs compiled. One has been compiling for 3 s."
    assert found["colour"] in found["later"][0]
    assert found["colour"] not in found["later"][1]
    assert found["num"] == 1


def test_plots_have_units_a_legend_and_what_is_under_the_pointer(own_tab: Tab) -> None:
    found = with_invented(
        own_tab,
        """
        const ends = [1, 2, 3].map((k) => ({kind: "end", at: now - 30, s: 1, tokens: 3,
            first_s: k / 10}));
        plots.add([{...figures, gigabytes_per_s: 0, records: []}]);
        await redraw();
        const empty = [...document.querySelectorAll(".empty")].map((one) => one.checkVisibility());
        const said = document.querySelector("#first .empty").innerText;
        plots.add([{...figures, records: [...records, ...ends]}]);
        await redraw();
        const {plot} = plots.charts.first;
        plot.setCursor({left: plot.valToPos(now - 20, "x"), top: 5});
        const legend = Object.fromEntries([...document.querySelectorAll("#first .u-series")].map(
            (line) => [line.querySelector("th").innerText, line.querySelector("td").innerText]));
        const {plot: steps} = plots.steps;
        steps.setCursor({left: steps.valToPos(now - 5.5, "x"), top: steps.valToPos(1.5, "y")});
        Date.now = clock;
        return {empty, said, legend, unit: plot.axes[1].label,
            full: document.querySelector("#first .empty").checkVisibility(),
            over: document.getElementById("over-steps").textContent};
    """,
    )
    assert all(found["empty"])
    assert found["said"].startswith("The time to the first token appears when a request has ended")
    assert found["full"] is False
    assert found["unit"] == "ms"
    assert list(found["legend"]) == ["time", "a request", "p50", "p90", "p99"]
    assert re.fullmatch(r"\d\d:\d\d:\d\d", found["legend"]["time"])
    assert [found["legend"][name] for name in ("p50", "p90", "p99")] == [
        "200 ms",
        "300 ms",
        "300 ms",
    ]
    assert re.fullmatch(
        r"decode, at \d\d:\d\d:\d\d\.\d\d, 2 rows, 2 new tokens, 1\.0 s", found["over"]
    )


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
@pytest.mark.parametrize("width", [360, 390, 1200, 1400])
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
        assert tab.value("document.documentElement.scrollWidth") <= width, name
