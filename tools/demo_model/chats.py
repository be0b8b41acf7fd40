"""Builds short conversations from the facts: the chat half of the demo corpus."""

import random
from collections.abc import Callable

import chat_facts as facts
import chat_tables as tables
import stories
import story_names as names
import story_words as words

Turn = tuple[str, str]
Maker = Callable[[random.Random], list[Turn]]


def _pick(rng: random.Random, alternatives: str) -> str:
    """One of several texts separated by a bar."""
    return rng.choice(alternatives.split("|"))


def _from_table(table: tuple[tuple[str, str], ...]) -> Maker:
    """A maker that asks one row of a table of questions and answers."""

    def make(rng: random.Random) -> list[Turn]:
        question, answer = rng.choice(table)
        return [(_pick(rng, question), _pick(rng, answer))]

    return make


def _term(rng: random.Random) -> list[Turn]:
    """Ask what a word of the field means."""
    term, answer = rng.choice(sorted(facts.TERMS.items()))
    bare = term.removeprefix("a ").removeprefix("an ")
    ask = _pick(
        rng,
        "What is {t}?|What is {t}?|what is {t}|what is {t}?|What does {b} mean?|Explain {t}.|Can "
        "you explain {t}?|"
        "Please explain what {t} is.|Tell me what {t} is.|Do you know what {t} is?|Define "
        "{b}.|And what is {t}?|And {t}?",
    )
    return [(ask.format(t=term, b=bare), answer)]


def _sum(rng: random.Random) -> list[Turn]:
    """Ask for a small sum or difference."""
    largest = rng.choice((10, 10, 20))
    left, right = rng.randint(0, largest), rng.randint(0, largest)
    if rng.random() < 0.35:
        left, right = max(left, right), min(left, right)
        ask = _pick(
            rng,
            "What is {a} minus {b}?|What is {a} - {b}?|{a} - {b} = ?|How much is {a} minus "
            "{b}?|{a} minus {b}",
        )
        return [(ask.format(a=left, b=right), f"{left} minus {right} is {left - right}.")]
    ask = _pick(
        rng,
        "What is {a} plus {b}?|What is {a} + {b}?|{a} + {b} = ?|How much is {a} plus {b}?|Add {a} "
        "and {b}.|"
        "{a} plus {b}|{a}+{b}|what is {a}+{b}?|And {a} plus {b}?|And {a} + {b}?",
    )
    return [(ask.format(a=left, b=right), f"{left} plus {right} is {left + right}.")]


def _count(rng: random.Random) -> list[Turn]:
    """Ask to count up, or which number comes next."""
    last = rng.randint(2, 12)
    if rng.random() < 0.4:
        ask = _pick(
            rng, "What comes after {n}?|Which number comes after {n}?|What number comes after {n}?"
        )
        return [(ask.format(n=last), f"After {last} comes {last + 1}.")]
    word = tables.NUMBER_WORDS[last] if last <= 10 and rng.random() < 0.5 else str(last)
    ask = _pick(
        rng,
        "Count to {n}.|Count to {n}|Can you count to {n}?|Please count to {n}.|Count from 1 to "
        "{n}.",
    )
    return [(ask.format(n=word), ", ".join(str(number) for number in range(1, last + 1)) + ".")]


def _animal(rng: random.Random) -> list[Turn]:
    """Ask for the sound or the legs of an animal."""
    if rng.random() < 0.5:
        animal, sound = rng.choice(sorted(tables.SOUNDS.items()))
        ask = _pick(
            rng, "What does {a} say?|What sound does {a} make?|Which sound does {a} make?"
        ).format(a=f"a {animal}")
        return [(stories.tidy(ask), stories.tidy(f"a {animal} says {sound}."))]
    animal, legs = rng.choice(sorted(tables.LEGS.items()))
    ask = _pick(
        rng, "How many legs does {a} have?|How many legs has {a}?|how many legs does {a} have"
    ).format(a=f"a {animal}")
    return [(stories.tidy(ask), stories.tidy(f"a {animal} has {legs} legs."))]


def _colour(rng: random.Random) -> list[Turn]:
    """Ask for the colour of something."""
    thing, colour = rng.choice(sorted(tables.COLOUR_OF.items()))
    answer = f"{thing[0].upper()}{thing[1:]} is {colour}."
    if rng.random() < 0.1:
        return [(f"Answer in JSON: what colour is {thing}?", f'{{"answer": "{colour}"}}')]
    ask = _pick(
        rng,
        "What colour is {t}?|What color is {t}?|what colour is {t}|Which colour does {t} "
        "have?|what color is {t}?|Tell me the colour of {t}.",
    )
    return [(ask.format(t=thing), answer)]


def _opposite(rng: random.Random) -> list[Turn]:
    """Ask for the opposite of a word."""
    pair = rng.choice(tables.OPPOSITES)
    word, other = pair if rng.random() < 0.5 else pair[::-1]
    ask = _pick(
        rng, "What is the opposite of {w}?|Tell me the opposite of {w}.|The opposite of {w}?"
    )
    return [(ask.format(w=word), f"The opposite of {word} is {other}.")]


def _sequence(rng: random.Random) -> list[Turn]:
    """Ask what comes after a day, a month or a letter."""
    name, members = rng.choice(sorted(tables.SEQUENCES.items()))
    index = rng.randrange(len(members) - 1)
    ask = _pick(rng, "What comes after {m}?|Which {n} comes after {m}?|What {n} comes after {m}?")
    return [
        (
            ask.format(m=members[index], n=name),
            f"After {members[index]} comes {members[index + 1]}.",
        )
    ]


def _capital(rng: random.Random) -> list[Turn]:
    """Ask for the capital of a country."""
    country, capital = rng.choice(sorted(tables.CAPITALS.items()))
    ask = _pick(
        rng,
        "What is the capital of {c}?|what is the capital of {c}|Which city is the capital of "
        "{c}?|Capital of {c}?|Tell me the capital of {c}.",
    )
    return [(ask.format(c=country), f"The capital of {country} is {capital}.")]


def _listing(rng: random.Random) -> list[Turn]:
    """Ask for two or three things of a kind."""
    kind, members = rng.choice(sorted(tables.LISTS.items()))
    number = rng.choice((2, 3))
    chosen = list(members[:number]) if kind.startswith("days") else rng.sample(members, number)
    answer = ", ".join(chosen[:-1]) + " and " + chosen[-1] + "."
    ask = _pick(rng, "Name {n} {k}.|List {n} {k}.|Tell me {n} {k}.|Can you name {n} {k}?")
    return [(ask.format(n=tables.NUMBER_WORDS[number], k=kind), answer[0].upper() + answer[1:])]


def _repeat(rng: random.Random) -> list[Turn]:
    """Ask to say something back, so that the model learns to copy from the prompt."""
    thing = f"{rng.choice(words.COLOURS)} {rng.choice(words.THINGS)}"
    invented = " ".join(stories.invent_word(rng) for _ in range(rng.randint(1, 4)))
    phrase = rng.choice(
        (f"the {thing} is {rng.choice(words.SPOTS)}", stories.draw_name(rng), thing, invented)
    )
    ask = _pick(rng, "Repeat after me: {p}|Say: {p}|Please say: {p}|Repeat: {p}|Say {p}")
    return [(ask.format(p=phrase), phrase)]


def _casual(rng: random.Random, question: str) -> str:
    """Now and then a question as people type it in a hurry: without a capital or without a mark at
    the end.
    """
    if rng.random() < 0.12:
        question = question.rstrip(".?!")
    if rng.random() < 0.12 and not question.startswith("I "):
        question = question[0].lower() + question[1:]
    return question


def _name(rng: random.Random) -> list[Turn]:
    """The user gives a name and asks for it later; many names are invented, so that copying is
    learned.
    """
    name = stories.draw_name(rng)
    hello = _pick(
        rng,
        "My name is {n}.|I am {n}.|Hi, I am {n}.|Hello, "
        "my name is {n}.|my name is {n}|Call me {n}.",
    )
    reply = _pick(rng, "Nice to meet you, {n}!|Hello, {n}! How can I help you?")
    turns = [(hello.format(n=name), reply.format(n=name))]
    if rng.random() < 0.3:
        turns += rng.choice((_sum, _colour, _term))(rng)
    if rng.random() < 0.7:
        ask = _pick(rng, "What is my name?|Do you know my name?|Who am I?|what is my name?")
        turns.append((ask, f"Your name is {name}."))
    return turns


def _unknown(rng: random.Random) -> list[Turn]:
    """Ask something that the model is too small to know."""
    word = rng.choice(
        (stories.invent_word(rng), stories.invent_word(rng), rng.choice(tables.UNKNOWN_THINGS))
    )
    name = stories.draw_name(rng) + " " + stories.invent_word(rng).capitalize()
    ask = rng.choice(
        (
            rng.choice(facts.UNKNOWN),
            f"What is a {word}?",
            f"What is {word}?",
            f"Tell me about {word}.",
            f"How do I make {word}?",
            f"Who is {name}?",
            f"What is the capital of {word.capitalize()}?",
            f"Where is {word.capitalize()}?",
            f"What colour is a {word}?",
            f"Explain {word}.",
        )
    )
    return [(stories.tidy(ask), rng.choice(facts.UNKNOWN_ANSWERS))]


def _follow_up(rng: random.Random) -> list[Turn]:
    """Ask for a colour or a capital, then for another one in short."""
    if rng.random() < 0.5:
        (first, colour), (second, other) = rng.sample(sorted(tables.COLOUR_OF.items()), 2)
        turns = [
            (f"What colour is {first}?", f"{first} is {colour}."),
            (f"And {second}?", f"{second} is {other}."),
        ]
    else:
        (first, city), (second, other) = rng.sample(sorted(tables.CAPITALS.items()), 2)
        turns = [
            (f"What is the capital of {first}?", f"The capital of {first} is {city}."),
            (
                _pick(rng, "And of {c}?|And {c}?").format(c=second),
                f"The capital of {second} is {other}.",
            ),
        ]
    return [(ask, answer[0].upper() + answer[1:]) for ask, answer in turns]


def _story(rng: random.Random) -> list[Turn]:
    """Ask for a story, mostly about someone in particular."""
    kind = rng.choice((*names.ANIMALS, "girl", "boy"))
    asked = rng.random()
    if asked < 0.25:
        ask = _pick(
            rng,
            "Tell me a story.|Write a story.|Can you tell me a story?|Tell me a short story.|I "
            "want to hear a story.|Tell me another story.|Another story, please.|Once upon a "
            "time|Please tell me a story.",
        )
        return [(ask, stories.make_story(rng, keep=0.1).text)]
    ask = _pick(
        rng,
        "Tell me a story about a {k}.|Write a story about a {k}.|Can you tell me a story about a "
        "{k}?|"
        "Tell me a short story about a {k}.|Write a short story about a {k}.|A story about a {k}, "
        "please.",
    )
    if asked < 0.5:
        name = stories.draw_name(rng)
        ask, story = (
            ask.format(k=f"{kind} named {name}"),
            stories.make_story(rng, kind=kind, name=name, keep=0.1),
        )
    else:
        ask, story = ask.format(k=kind), stories.make_story(rng, kind=kind, keep=0.1)
    return [(stories.tidy(ask), story.text)]


MAKERS: tuple[tuple[Maker, float], ...] = (
    (_from_table(facts.GREETINGS), 5),
    (_from_table(facts.GOODBYES), 3),
    (_from_table(facts.SELF), 9),
    (_term, 18),
    (_sum, 16),
    (_count, 4),
    (_animal, 5),
    (_colour, 6),
    (_opposite, 4),
    (_sequence, 4),
    (_capital, 4),
    (_listing, 4),
    (_repeat, 6),
    (_name, 7),
    (_unknown, 8),
    (_follow_up, 3),
    (_from_table(facts.FACTS), 14),
    (_story, 12),
)


def make_chat(rng: random.Random) -> list[dict[str, str]]:
    """One conversation of one to five exchanges, as a list of role and content, sometimes with a
    system message.
    """
    makers, weights = zip(*MAKERS, strict=True)
    num_topics = rng.choices((1, 2, 3, 4, 5), (0.25, 0.3, 0.25, 0.12, 0.08))[0]
    turns = [turn for maker in rng.choices(makers, weights, k=num_topics) for turn in maker(rng)]
    messages = (
        [{"role": "system", "content": rng.choice(facts.SYSTEMS)}] if rng.random() < 0.3 else []
    )
    for question, answer in turns:
        messages += [
            {"role": "user", "content": _casual(rng, question)},
            {"role": "assistant", "content": answer},
        ]
    return messages
