"""Opens the page of a server in Chromium, and does on it what a person does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.browser.chromium import Tab, chromium
from tests.server.process import ServerProcess

SIZES = ("--max-model-len", "512", "--max-num-seqs", "8")
KEY = "a-key-of-this-test"
STATE = "document.getElementById('state').textContent"


@contextlib.contextmanager
def page_of_two(profile: Path, *flags: str) -> Iterator[Tab]:
    """Yield the page of a server that has the demo model as `one` and as `two`, and KEY."""
    names = ("--served-model-name", "one", "--served-model-name", "two", *flags)
    environment = {"ENGINEBAY_API_KEY": KEY}
    with ServerProcess(
        *names, "--warmup", "lazy", *SIZES, models=("demo", "demo"), environment=environment
    ) as server:
        with chromium(profile) as tab:
            tab.open(f"{server.url}/ui/")
            tab.until(f"{STATE} === 'this server needs an API key'")
            yield tab


def give_key(tab: Tab) -> None:
    """Type the key, and wait for the models."""
    tab.value("document.getElementById('key').focus()")
    tab.type(KEY)
    tab.press("Enter")
    tab.until(f"{STATE}.startsWith('ready')")


def send(tab: Tab, text: str) -> None:
    """Write a message with the keyboard, and send it."""
    tab.value("document.getElementById('message').focus()")
    tab.type(text)
    tab.press("Enter")


def say(tab: Tab, text: str) -> None:
    """Send a message, and wait for the whole answer, or for the error."""
    send(tab, text)  # which disables the button until the end
    tab.until("!document.getElementById('go').disabled")


def choose(tab: Tab, name: str, value: str) -> None:
    """Set the value of a control."""
    tab.value(f"document.getElementById({name!r}).value = {value!r}")


def reload(tab: Tab) -> None:
    """Load the page again, as a person does, and wait for the first figures."""
    tab.value("window.isOld = true")
    tab.call("Page.reload")
    tab.until("!window.isOld && document.readyState === 'complete'")
    tab.until(f"{STATE} !== 'connecting'")
