"""What a conversation on the page shows and keeps: formatted text, copies, other answers, edits."""

from __future__ import annotations

import importlib.resources
import json
import re
from collections.abc import Iterator

import pytest

pytest.importorskip("websockets", reason="websockets is not installed; see `make test-browser`")
from tests.browser.chromium import Tab, find_chromium
from tests.browser.page_driver import STATE, choose, give_key, page_of_two, reload, say, send

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed"),
]

FORMATTED = """# Title

Some *words* and `code`, see [this](https://example.org/a?b=1&c=2).

```python
def f(x):
    return "<b>" + x
```

| a | b |
|---|---|
| 1 | 2 |

- one
- [x] two"""
HOSTILE = """<img src=x onerror="window.hit=1"><b id=go>bold</b>
[a](javascript:window.hit=2) ![pic](https://example.org/p.png) <javascript:alert(1)>

<script>window.hit=3</script>

<form action=https://example.org><input name=model></form>

[b](data:text/html,hello) <a href="https://example.org" onclick="window.hit=4" id="stop">c</a>"""
ANSWER = "[...document.querySelectorAll('.text')].at(-1)"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with page_of_two(tmp_path_factory.mktemp("profile")) as tab:
        give_key(tab)
        tab.errors.clear()
        yield tab
        assert not tab.errors


@pytest.fixture(autouse=True)
def new_chat(tab: Tab) -> None:
    """Begin a new conversation of short answers."""
    tab.value("document.getElementById('clear').click()")
    choose(tab, "max_tokens", "12")


def answer_with(tab: Tab, text: str) -> None:
    """Ask for an answer, and have it grow in the page as one of the server does."""
    tab.value(f"""
        window.plainFetch = window.fetch;
        window.fetch = async (address, options) => {{
            if (!String(address).includes("completions")) return plainFetch(address, options);
            const pieces = {json.dumps(re.findall(r"(?s).{1,7}", text))};
            const events = pieces.map((content, place) => "data: " + JSON.stringify({{
                choices: [{{
                    delta: {{content}}, finish_reason: place < pieces.length - 1 ? null : "stop",
                }}],
                usage: {{completion_tokens: place + 1}},
            }}) + "\\n\\n");
            return new Response(new Blob([...events, "data: [DONE]\\n\\n"]).stream());
        }}; 1""")
    say(tab, "Go on")
    tab.value("window.fetch = window.plainFetch; 1")


def users(tab: Tab) -> list[str]:
    shown = tab.value("[...document.querySelectorAll('.user')].map((turn) => turn.innerText)")
    return [str(text) for text in shown]


def press(tab: Tab, label: str, place: int = -1) -> None:
    """Press a button with the keyboard, found by its accessible name."""
    buttons = "[...document.querySelectorAll('button')]"
    named = f"{buttons}.filter((one) => (one.ariaLabel ?? one.innerText) === {json.dumps(label)})"
    tab.value(f"{named}.at({place}).focus()")
    tab.press("Enter")


def test_markdown_is_shown_as_what_it_means(tab: Tab) -> None:
    answer_with(tab, FORMATTED)
    assert tab.value(f"{ANSWER}.querySelector('h4').innerText") == "Title"
    link = tab.value(
        f"(({{ href, rel, target }}) => [href, rel, target])({ANSWER}.querySelector('a'))"
    )
    assert link == ["https://example.org/a?b=1&c=2", "noopener noreferrer nofollow", "_blank"]
    assert tab.value(f"{ANSWER}.querySelector('em').innerText") == "words"
    cells = tab.value(f"[...{ANSWER}.querySelectorAll('th, td')].map((cell) => cell.innerText)")
    assert cells == ["a", "b", "1", "2"]
    items = tab.value(f"[...{ANSWER}.querySelectorAll('li')].map((one) => one.innerText)")
    assert [item.strip() for item in items] == ["one", "☑ two"]
    assert tab.value(f"{ANSWER}.querySelector('.bar span').innerText") == "python"
    code = tab.value(f"{ANSWER}.querySelector('pre code').innerText")
    assert code == 'def f(x):\n    return "<b>" + x'
    colours = f"""new Set([...{ANSWER}.querySelectorAll('pre code, pre span')]
        .map((one) => getComputedStyle(one).color)).size"""
    assert tab.value(colours) >= 3


@pytest.mark.parametrize("width", [390, 1400])
def test_a_formatted_answer_is_accessible_and_fits(tab: Tab, width: int) -> None:
    axe = pytest.importorskip("axe_core_python", reason="`make test-browser` installs it")
    answer_with(tab, FORMATTED + "\n\n```text\n" + "a long line " * 30 + "\n```")
    tab.call("Page.setBypassCSP", enabled=True)
    tab.value((importlib.resources.files(axe) / "axe.min.js").read_text())
    for dark in (False, True):
        tab.resize(width, 800, dark=dark)
        found = tab.value("axe.run().then(r => r.violations.map(v => [v.id, v.nodes[0].target]))")
        assert found == []
        assert tab.value("document.documentElement.scrollWidth") <= width
    tab.call("Page.setBypassCSP", enabled=False)
    tab.resize(1200, 900)


def test_an_answer_runs_nothing_loads_nothing_and_passes_for_no_control(tab: Tab) -> None:
    before = tab.value("performance.getEntriesByType('resource').length")
    answer_with(tab, HOSTILE)
    tags = "img, script, form, input, b, iframe, style, [id], [name], [onclick], [onerror]"
    assert tab.value(f"{ANSWER}.querySelectorAll({json.dumps(tags)}).length") == 0
    links = tab.value(f"[...{ANSWER}.querySelectorAll('a[href]')].map((link) => link.href)")
    assert set(links) <= {"https://example.org/p.png", "https://example.org/"}
    text = tab.value(f"{ANSWER}.innerText")
    assert '<img src=x onerror="window.hit=1">' in text, "it is shown as it was written"
    assert "<script>window.hit=3</script>" in text
    assert tab.value("window.hit ?? 0") == 0
    assert tab.value("document.getElementById('go').type") == "submit"
    names = tab.value("performance.getEntriesByType('resource').map((one) => one.name)")
    assert all("example.org" not in name for name in names[before:])


def test_an_answer_and_its_code_are_copied(tab: Tab) -> None:
    tab.value("""window.copied = [];
        navigator.clipboard.writeText = async (text) => { window.copied.push(text); }; 1""")
    answer_with(tab, FORMATTED)
    press(tab, "Copy the code")
    press(tab, "Copy this answer")
    press(tab, "Copy this message")
    tab.until("window.copied.length === 3")
    code = 'def f(x):\n    return "<b>" + x'
    assert tab.value("window.copied") == [code, FORMATTED, "Go on"]
    tab.until(
        "[...document.querySelectorAll('.foot button')].some((one) => one.innerText === 'Copied')"
    )
    tab.until("![...document.querySelectorAll('button')].some((one) => one.innerText === 'Copied')")


def test_another_answer_takes_the_place_of_the_last_one(tab: Tab) -> None:
    choose(tab, "temperature", "2")
    choose(tab, "seed", "1")
    say(tab, "Once upon a time")
    first = tab.value(f"{ANSWER}.innerText")
    choose(tab, "seed", "2")
    press(tab, "Ask for another answer")
    tab.until("!document.getElementById('go').disabled")
    assert tab.value("document.querySelectorAll('.answer').length") == 1
    assert users(tab) == ["Once upon a time"]
    assert tab.value(f"{ANSWER}.innerText") != first
    choose(tab, "temperature", "0")
    choose(tab, "seed", "")


def test_a_failed_answer_is_asked_for_again(tab: Tab) -> None:
    choose(tab, "top_p", "7")
    say(tab, "Hello!")
    assert tab.value("document.querySelector('.turn.error').innerText")
    choose(tab, "top_p", "1")
    press(tab, "Ask for another answer")
    tab.until("!document.getElementById('go').disabled")
    assert tab.value("document.querySelector('.turn.error')") is None
    assert tab.value("document.getElementById('message').value") == ""
    tab.errors.clear()  # the browser logs the status 400


def test_an_edited_message_is_answered_anew_in_both_columns(tab: Tab) -> None:
    choose(tab, "other", "two")
    say(tab, "First")
    say(tab, "Second")
    press(tab, "Edit this message", 0)
    tab.until("document.activeElement.getAttribute('aria-label') === 'Edited message'")
    tab.type(", and more")
    tab.value("document.querySelector('.edit button').focus()")
    tab.press("Enter")
    tab.until("document.querySelectorAll('.foot .facts').length === 2")
    tab.until("!document.getElementById('go').disabled")
    assert users(tab) == ["First, and more"] * 2
    choose(tab, "other", "")


def test_an_edit_is_cancelled(tab: Tab) -> None:
    say(tab, "First")
    press(tab, "Edit this message")
    tab.type("!")
    tab.value("document.querySelectorAll('.edit button')[1].focus()")
    tab.press("Enter")
    assert users(tab) == ["First"]
    assert tab.value("document.querySelector('.edit')") is None
    assert tab.value("document.activeElement.innerText") == "Edit"


def test_conversations_are_kept_and_shown_again(tab: Tab) -> None:
    listed = (
        "[...document.querySelectorAll('#kept li button:first-child')].map((one) => one.innerText)"
    )
    say(tab, "A first conversation")
    answer, facts = (
        tab.value(f"document.querySelector('{name}').innerText") for name in (".text", ".facts")
    )
    tab.value("document.getElementById('clear').click()")
    assert users(tab) == []
    assert tab.value("document.getElementById('welcome').checkVisibility()")
    say(tab, "A second one")
    assert tab.value(listed)[:2] == ["A second one", "A first conversation"]
    reload(tab)
    tab.until(f"{STATE}.startsWith('ready')")
    assert users(tab) == ["A second one"], "a reload shows the same conversation"
    tab.value("document.querySelectorAll('#kept li button:first-child')[1].focus()")
    tab.press("Enter")
    assert users(tab) == ["A first conversation"]
    assert tab.value("document.querySelector('.text').innerText") == answer
    assert tab.value("document.querySelector('.facts').innerText") == facts
    assert (
        tab.value("document.querySelector('#kept [aria-current]').innerText")
        == "A first conversation"
    )
    choose(tab, "max_tokens", "12")
    say(tab, "Go on")  # the model gets the turns of before
    assert users(tab) == ["A first conversation", "Go on"]
    press(tab, 'Delete the conversation "A first conversation"')
    assert users(tab) == []
    assert "A first conversation" not in tab.value(listed)
    tab.value("document.getElementById('forget').click()")
    assert tab.value("localStorage.getItem('enginebay.chats')") is None
    assert tab.value("document.getElementById('nothing-kept').checkVisibility()")


def test_an_answer_that_is_left_is_kept_as_it_was(tab: Tab) -> None:
    choose(tab, "max_tokens", "400")
    send(tab, "A long story")
    tab.until(f"({ANSWER}?.innerText.length ?? 0) > 5")
    tab.value("document.getElementById('clear').click()")
    tab.until("!document.getElementById('go').disabled")
    assert users(tab) == []
    tab.value("document.querySelector('#kept li button:first-child').click()")
    assert users(tab) == ["A long story"]
    assert tab.value("document.querySelector('.facts').innerText").startswith("stopped")
    assert len(tab.value(f"{ANSWER}.innerText")) > 5


def test_a_conversation_that_another_tab_deletes_returns_when_it_goes_on(tab: Tab) -> None:
    delete = """localStorage.removeItem("enginebay.chats");
        window.dispatchEvent(new StorageEvent("storage")); 1"""
    kept = "localStorage.getItem('enginebay.chats')"
    choose(tab, "max_tokens", "8")
    tab.value("document.getElementById('clear').click()")
    say(tab, "Deleted elsewhere")
    tab.value(delete)
    reload(tab)
    tab.until(f"{STATE}.startsWith('ready')")
    assert tab.value(kept) is None, "a page that is left writes nothing that was kept before"
    say(tab, "Once more")
    tab.value(delete)
    tab.value("document.getElementById('clear').click()")
    assert tab.value(kept) is None
    say(tab, "It goes on")
    tab.value(delete)
    say(tab, "And on")
    assert "It goes on" in tab.value(kept)


def test_a_full_storage_loses_the_oldest_conversations(tab: Tab) -> None:
    say(tab, "An old one")
    tab.value("document.getElementById('clear').click()")
    tab.value("""
        const chats = JSON.parse(localStorage.getItem("enginebay.chats"));
        const long = {role: "user", content: "x".repeat(2400000)};
        for (const one of chats) one.panes[0].turns.push(long);
        localStorage.setItem("enginebay.chats", JSON.stringify(chats.slice(0, 1)));
        localStorage.setItem("filling", "y".repeat(2600000)); 1""")
    say(tab, "A new one")
    kept = "JSON.parse(localStorage.getItem('enginebay.chats')).map((one) => one.title)"
    titles = tab.value(kept)
    tab.value("localStorage.clear(); 1")
    assert titles[0] == "A new one"
