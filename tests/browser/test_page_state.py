"""The page loses nothing that a person typed, and says what an answer waits for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("websockets", reason="websockets is not installed; see `make test-browser`")
from tests.browser.chromium import Tab, find_chromium
from tests.browser.page_driver import KEY, STATE, choose, give_key, page_of_two, reload, say, send

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed"),
]

TURNS = """[...document.querySelectorAll('.pane')].map(
    (pane) => [...pane.querySelectorAll('.user')].map((turn) => turn.innerText))"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with page_of_two(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


def value(tab: Tab, name: str) -> str:
    """The value of a control."""
    return str(tab.value(f"document.getElementById({name!r}).value"))


def test_a_message_that_is_sent_before_a_model_is_known_stays(tab: Tab) -> None:
    send(tab, "Good morning!")
    assert value(tab, "message") == "Good morning!"
    note = tab.value("document.getElementById('note').innerText")
    assert note == "Not sent: no model is known yet (this server needs an API key)."
    give_key(tab)
    assert value(tab, "message") == "Good morning!"
    choose(tab, "max_tokens", "5")
    say(tab, "")
    assert tab.value(TURNS) == [["Good morning!"]]
    assert value(tab, "message") == ""
    assert tab.value("document.getElementById('note').innerText") == ""


def test_a_message_that_is_refused_returns(tab: Tab) -> None:
    choose(tab, "key", "another-key")
    say(tab, "And now?")
    assert value(tab, "message") == "And now?"
    assert "key" in tab.value("document.querySelector('.turn.error').innerText")
    choose(tab, "key", KEY)
    choose(tab, "message", "")


def test_a_conversation_goes_on_when_a_model_is_compared_or_changed(tab: Tab) -> None:
    tab.value("document.getElementById('clear').click()")
    tab.value("""
        window.bodies = [];
        window.plainFetch = window.fetch;
        window.fetch = (address, options) => {
            if (options?.body) bodies.push(JSON.parse(options.body));
            return plainFetch(address, options);
        };
    """)
    say(tab, "First")
    choose(tab, "other", "two")
    say(tab, "Second")
    assert tab.value(TURNS) == [["First", "Second"]] * 2
    heads = "[...document.querySelectorAll('.pane h3')].map((title) => title.innerText)"
    assert tab.value(heads) == ["one", "two"]
    sent = tab.value("bodies.map((one) => [one.model, one.messages.map((turn) => turn.role)])")
    three = ["user", "assistant", "user"]
    assert sent == [["one", ["user"]], ["one", three], ["two", three]]
    choose(tab, "other", "")
    choose(tab, "model", "two")
    say(tab, "Third")
    assert tab.value(TURNS) == [["First", "Second", "Third"]]
    assert tab.value(heads) == ["two"]
    tab.value("window.fetch = window.plainFetch")
    choose(tab, "model", "one")


def test_a_reload_keeps_the_key_the_prompts_and_the_message(tab: Tab) -> None:
    for name, text in (("system", "You are brief."), ("tools", "[]"), ("message", "Half a")):
        tab.value("document.getElementById('texts').open = true")
        tab.value(f"document.getElementById({name!r}).focus()")
        tab.type(text)
    reload(tab)
    tab.until(f"{STATE}.startsWith('ready')")
    kept = {name: value(tab, name) for name in ("key", "system", "tools", "message")}
    assert kept == {"key": KEY, "system": "You are brief.", "tools": "[]", "message": "Half a"}
    assert tab.value("document.getElementById('texts').open"), "a prompt in use is seen"
    stored = "[sessionStorage, localStorage].map((one) => Object.keys(one).sort().join())"
    assert tab.value(stored) == [
        "enginebay.chat,enginebay.key,enginebay.message",
        "enginebay.chats,enginebay.system,enginebay.tools",
    ]
    tab.value("localStorage.clear()")
    for name in ("system", "tools", "message"):
        choose(tab, name, "")


def test_the_header_and_the_answer_say_what_is_waited_for(tab: Tab) -> None:
    """Figures of a server that compiles, and an answer that does not come."""
    tab.value("""
        window.plainFetch = window.fetch;
        window.figures = {compiling_s: 12.3, running: 0, waiting: 3};
        window.fetch = async (address, options) => {
            if (String(address).includes("completions")) {
                return new Promise((_, refuse) => options.signal.addEventListener(
                    "abort", () => refuse(new DOMException("stopped", "AbortError"))));
            }
            const answer = await plainFetch(address, options);
            if (!String(address).startsWith("data")) return answer;
            const data = await answer.json();
            Object.assign(data.models[0], window.figures);
            return new Response(JSON.stringify(data));
        };
    """)
    tab.until(f"{STATE} === 'compiling a program: one; 3 requests wait'")
    send(tab, "Hello?")
    waiting = "document.querySelector('.waiting')?.innerText"
    tab.until(f"{waiting}?.endsWith('s: the server has been compiling a program for 12 s')")
    assert tab.value(waiting).startswith("waiting for the first token, ")
    tab.value("""window.figures = {compiling_s: null, running: 4, waiting: 1, compiled: 7,
        coming: ["decode 8 rows"], num_stand_ins: 2}""")
    tab.until(f"{STATE}.startsWith('ready: one on oengine')")
    tab.until(f"{STATE}.endsWith('; 1 program is still to compile; 1 request waits')")
    tab.value("document.getElementById('tab-live').click()")
    tab.until("document.getElementById('programs').textContent.startsWith('7 programs compiled')")
    assert tab.value("document.getElementById('programs').textContent") == (
        "7 programs compiled, 1 to come, next: decode 8 rows. 2 steps ran in another program, "
        "because theirs was not compiled."
    )
    tab.value("document.getElementById('tab-chat').click()")
    assert tab.value(STATE).endswith("; 1 request waits")
    tab.until(f"{waiting}?.endsWith('s: 4 requests running, 1 waiting')")
    tab.value("document.getElementById('stop').click(); window.fetch = window.plainFetch; 1")
    tab.until("!document.getElementById('go').disabled")
    assert tab.value(waiting) is None


def test_tokens_per_second_leave_out_the_wait_for_the_first_token(tab: Tab) -> None:
    facts = tab.value("""import('./stream.js').then(({ Times }) => {
        const clock = performance.now;
        let now = 0;
        performance.now = () => now;
        const times = new Times();
        const events = [[10, 0], [20000, 1], [21000, 5], [22000, 9]];
        for (const [at, count] of events) {
            now = at;
            times.add({completion_tokens: count}, true);
        }
        now = 30000;
        times.add({completion_tokens: 9}, false);
        performance.now = clock;
        return times.facts();
    })""")
    assert facts == ["9 tokens", "4.0 tokens/s", "first token after 20.00 s"]
