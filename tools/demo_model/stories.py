"""Renders short stories from the plots and word lists: the prose half of the demo corpus."""

import random
import re
from dataclasses import dataclass, replace

import plots
import story_names as names
import story_words as words

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiouAEIOU])")
_SENTENCE_START = re.compile(r"((?:^|[.!?] )\"?)([a-z])")
_BAD_WEATHER = (
    "It began to rain very hard.",
    "The wind howled and the thunder rolled.",
    "Soon the rain was falling in big drops.",
)


@dataclass(frozen=True, slots=True)
class Character:
    """Someone in a story: the name, what kind of being it is, and the pronouns to use."""

    name: str
    kind: str
    trait: str
    he: str

    @property
    def him(self) -> str:
        """The object form of the pronoun."""
        return "him" if self.he == "he" else "her"

    @property
    def his(self) -> str:
        """The possessive form of the pronoun."""
        return "his" if self.he == "he" else "her"

    def intro(self, verb: str) -> str:
        """How the character is introduced, as in "a shy fox named Pip"."""
        return f"a {self.trait} {self.kind} {verb} {self.name}"


@dataclass(frozen=True, slots=True)
class Story:
    """One story, and the key that decides its split."""

    text: str
    key: str


def invent_word(rng: random.Random) -> str:
    """A word that nobody has seen before, so that the model must copy it rather than know it."""
    return "".join(rng.choices(names.SYLLABLES, k=rng.choice((2, 2, 3))))


def draw_name(rng: random.Random) -> str:
    """A first name: one of the stories', another common one, or an invented one."""
    invented = invent_word(rng).capitalize()
    return rng.choice(
        (rng.choice(names.GIRLS), rng.choice(names.BOYS), rng.choice(names.OTHER_NAMES), invented)
    )


def draw_character(rng: random.Random, kind: str | None = None) -> Character:
    """Draw a character, of the wanted kind where one is given (any animal, "girl" or "boy")."""
    chosen = kind or rng.choice(("girl", "boy", *rng.sample(names.ANIMALS, 3)))
    trait = rng.choice(names.TRAITS)
    if chosen == "girl":
        return Character(rng.choice(names.GIRLS), chosen, trait, "she")
    if chosen == "boy":
        return Character(rng.choice(names.BOYS), chosen, trait, "he")
    return Character(rng.choice(names.PETS), chosen, trait, rng.choice(("he", "she")))


def expand(rng: random.Random, beat: str) -> str:
    """Choose one of the beat's full alternatives and one of each bracketed choice inside it."""
    chosen = rng.choice(beat.split(" | "))
    return _CHOICE.sub(lambda match: rng.choice(match.group(1).split("/")), chosen)


def tidy(text: str) -> str:
    """Repair what slots leave behind: "a" before a vowel and small letters at the start of a
    sentence.
    """
    text = _ARTICLE.sub(r"\1n ", text)
    return _SENTENCE_START.sub(lambda match: match.group(1) + match.group(2).upper(), text)


def _person_slots(hero: Character, friend: Character, verb: str) -> dict[str, str]:
    """The slots that name the two main characters."""
    intro = hero.intro(verb)
    apart = f"the {friend.kind}"
    return {
        "hero": hero.name,
        "he": hero.he,
        "him": hero.him,
        "his": hero.his,
        "He": hero.he.capitalize(),
        "His": hero.his.capitalize(),
        "intro": intro,
        "Intro": intro[0].upper() + intro[1:],
        "friend": friend.name,
        "fhe": friend.he,
        "fhim": friend.him,
        "fhis": friend.his,
        "fHe": friend.he.capitalize(),
        "friend_intro": friend.intro(verb),
        "fkind_clause": f"{apart} " if friend.kind not in ("girl", "boy") else "",
        "fkind_apart": f"{apart}." if friend.kind not in ("girl", "boy") else "from next door.",
        "fkind_comma": f"{apart}. " if friend.kind not in ("girl", "boy") else "from next door. ",
        "fkind_stop": f"{apart}. " if friend.kind not in ("girl", "boy") else "from next door. ",
    }


def _scene_slots(rng: random.Random) -> dict[str, str]:
    """The slots for places, things and the older person who gives advice."""
    preposition, place = rng.choice(words.PLACES)
    colour, thing = rng.choice(words.COLOURS), rng.choice(words.THINGS)
    spots = rng.sample(words.SPOTS, 3)
    elder, elder_he = rng.choice(words.ELDERS)
    return {
        "home": rng.choice(words.HOMES),
        "at_place": f"{preposition} {place}",
        "to_place": f"to {place}",
        "place": place,
        "thing": thing,
        "a_thing": f"a {colour} {thing}",
        "colour": colour,
        "thing2": rng.choice(("blanket", "scarf", "coat", "umbrella")),
        "inspot": rng.choice(words.INDOOR_SPOTS),
        "spot": spots[0],
        "spot2": spots[1],
        "spot3": spots[2],
        "elder": elder,
        "Elder": elder[0].upper() + elder[1:],
        "ehe": elder_he,
        "food": rng.choice(words.FOODS),
        "fear": rng.choice(words.FEARS),
        "skill": rng.choice(words.SKILLS),
        "build": rng.choice(words.BUILDS),
        "plant": rng.choice(words.PLANTS),
        "hurt": rng.choice(words.HURT),
        "find": rng.choice(words.FINDS),
        "treasure": rng.choice(words.TREASURES),
        "weather": rng.choice(words.WEATHER),
        "weather_bad": rng.choice(_BAD_WEATHER),
    }


def _tell(
    rng: random.Random, beats: tuple[str, ...], slots: dict[str, str], keep: float
) -> list[str]:
    """Render the beats of one plot; a beat that may be left out is kept with probability `keep`."""
    told = []
    for beat in beats:
        if beat.startswith("?") and rng.random() > keep:
            continue
        told.append(expand(rng, beat.removeprefix("?")).format(**slots))
    return told


def make_story(
    rng: random.Random,
    *,
    kind: str | None = None,
    name: str | None = None,
    episodes: int = 1,
    keep: float = 0.5,
) -> Story:
    """Tell one story about a hero of the given kind and name; more than one episode makes a long
    story.
    """
    hero = draw_character(rng, kind)
    if name:
        hero = replace(hero, name=name)
    friend = draw_character(rng)
    while friend.name == hero.name:
        friend = draw_character(rng)
    people = _person_slots(hero, friend, rng.choice(("named", "called")))
    shapes = rng.sample(sorted(plots.PLOTS), episodes)
    paragraphs, key = [], [hero.name, hero.kind, friend.name, friend.kind]
    for index, plot in enumerate(shapes):
        slots = people | _scene_slots(rng)
        head = rng.choice(plots.LINKS if index else plots.OPENINGS)
        tail = (rng.choice(plots.CLOSINGS),) if index == episodes - 1 else ()
        sentences = _tell(rng, (head, *plots.PLOTS[plot], *tail), slots, keep)
        paragraphs.append(tidy(" ".join(sentences)))
        key += [plot, slots["place"], slots["a_thing"]]
    return Story("\n\n".join(paragraphs), "/".join(key))
