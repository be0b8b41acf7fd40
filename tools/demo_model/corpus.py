"""Writes the corpus of the demo model, simple stories and chats in our own words, as JSON lines
from a seed.

Each line is a record with `split` ("train" or "heldout"), `kind` ("story" or "chat") and either
`text` or `messages`. The split follows from the content alone: a hash of who and what a story is
about, or of what the user says in a chat, so no held-out story or question sequence occurs in the
training part.
"""

import argparse
import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NotRequired, TypedDict

import chats
import stories

NUM_STORIES, NUM_CHATS = 24_000, 42_000
HELDOUT_PERCENT = 2
LONG_STORY_SHARE = 0.06
MIDDLE_SHARE = 0.08


class Message(TypedDict):
    """One turn of a chat."""

    role: str
    content: str


class Record(TypedDict):
    """One document of the corpus."""

    split: Literal["train", "heldout"]
    kind: Literal["story", "chat"]
    text: NotRequired[str]
    messages: NotRequired[list[Message]]


def split_of(key: str) -> Literal["train", "heldout"]:
    """Which split a document belongs to; equal keys always land in the same one."""
    digest = hashlib.sha256(key.encode()).digest()
    return "heldout" if int.from_bytes(digest[:4], "big") % 100 < HELDOUT_PERCENT else "train"


def from_the_middle(rng: random.Random, text: str) -> str:
    """The text without its first one to three sentences, for prompts that do not begin at the
    beginning.
    """
    return text.split(". ", rng.randint(1, 3))[-1]


def story_records(seed: int, count: int) -> Iterator[Record]:
    """Tell `count` stories: a few long ones with several episodes, and a few that begin in the
    middle.
    """
    rng = random.Random(f"stories-{seed}")
    for _ in range(count):
        episodes = rng.randint(2, 5) if rng.random() < LONG_STORY_SHARE else 1
        story = stories.make_story(rng, episodes=episodes)
        text = from_the_middle(rng, story.text) if rng.random() < MIDDLE_SHARE else story.text
        yield {"split": split_of(story.key), "kind": "story", "text": text}


def chat_records(seed: int, count: int) -> Iterator[Record]:
    """Hold `count` chats. Chats whose users say the same things share a split."""
    rng = random.Random(f"chats-{seed}")
    for _ in range(count):
        messages: list[Message] = [
            Message(role=m["role"], content=m["content"]) for m in chats.make_chat(rng)
        ]
        key = "\n".join(m["content"] for m in messages if m["role"] == "user")
        yield {"split": split_of(key), "kind": "chat", "messages": messages}


def make_corpus(seed: int, num_stories: int, num_chats: int) -> Iterator[Record]:
    """The whole corpus in a fixed order: first the stories, then the chats."""
    yield from story_records(seed, num_stories)
    yield from chat_records(seed, num_chats)


def write_corpus(path: Path, seed: int, num_stories: int, num_chats: int) -> None:
    """Write the corpus as JSON lines; the file appears under its name only when it is complete."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as out:
        for record in make_corpus(seed, num_stories, num_chats):
            out.write(json.dumps(record, ensure_ascii=False) + "\n")
    partial.replace(path)


def main() -> None:
    """Write the corpus to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stories", type=int, default=NUM_STORIES)
    parser.add_argument("--chats", type=int, default=NUM_CHATS)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    write_corpus(args.out, args.seed, args.stories, args.chats)


if __name__ == "__main__":
    main()
