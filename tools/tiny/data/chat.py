"""Chat: greetings, who are you, facts, definitions, lists, small text tasks, follow-ups; with and without thinking."""

from __future__ import annotations

from collections.abc import Callable

from .corpus import Corpus
from .dialog import Dialog
from .phrases import (
    BYES,
    CODE,
    FACTS,
    GREETINGS,
    IDENTITY,
    LISTS,
    NUMBER_WORDS,
    OKS,
    OPPOSITES,
    SYSTEMS,
    THANKS,
    UNKNOWN,
)
from .words import ADJECTIVES, CITIES, COUNTRIES, NAMES, THINGS, Source


def joined(items: list[str]) -> str:
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def article(word: str) -> str:
    return ("an " if word[0] in "aeiou" else "a ") + word


class Chat:
    """Chat exchanges; the definitions it explains are a fixed choice of everyday nouns."""

    def __init__(self, corpus: Corpus) -> None:
        plain = [
            (w, t)
            for w, part, t in corpus.definitions
            if part == "noun" and 4 <= len(w) <= 8 and len(t) <= 60 and ";" not in t
        ]
        step = max(1, len(plain) // 300)
        self.definitions = plain[::step]
        self.paragraphs = corpus.paragraphs
        self.kinds: tuple[tuple[Callable[[Dialog, Source], None], int], ...] = (
            (self.greet, 3),
            (self.identity, 4),
            (self.fact, 5),
            (self.capital, 4),
            (self.define, 3),
            (self.make_list, 3),
            (self.opposite, 2),
            (self.unknown, 4),
            (self.code, 2),
            (self.repeat, 3),
            (self.spell, 1),
            (self.name, 2),
            (self.larger, 2),
            (self.story, 2),
            (self.count, 1),
        )
        self.population = [kind for kind, _ in self.kinds]
        self.weights = [weight for _, weight in self.kinds]

    def conversation(self, rng: Source, system: str | None = None) -> Dialog:
        dialog = Dialog(thinking=rng.chance(0.55))
        dialog.system(rng.choice(SYSTEMS) if system is None and rng.chance(0.4) else system or "")
        # Without tools only the last turn keeps its reasoning, and only that turn has loss.
        for n in range(rng.choice((1, 1, 1, 2, 3) if dialog.thinking else (1, 1, 2, 2, 3, 4))):
            if n and rng.chance(0.3):
                self.close(dialog, rng)
            else:
                self.exchange(dialog, rng)
        return dialog

    def exchange(self, dialog: Dialog, rng: Source) -> None:
        rng.choices(self.population, self.weights)[0](dialog, rng)

    def greet(self, dialog: Dialog, rng: Source) -> None:
        dialog.user(rng.choice(GREETINGS))
        dialog.say(
            "Hello! How can I help you?",
            "The user greets me. I greet back.",
            task="chat",
            equals=["Hello! How can I help you?"],
        )

    def identity(self, dialog: Dialog, rng: Source) -> None:
        questions, answer, thought = rng.choice(IDENTITY) if rng.chance(0.6) else IDENTITY[0]
        dialog.user(rng.choice(questions))
        dialog.say(answer, thought, task="chat", equals=[answer])

    def fact(self, dialog: Dialog, rng: Source) -> None:
        question, answer, key = rng.choice(FACTS)
        shown = question
        if rng.chance(0.15):
            shown = question.lower().rstrip("?")
        elif rng.chance(0.2):
            shown = rng.choice(("I have a question. ", "Tell me: ", "Quick question: ", "Please tell me. ")) + question
        dialog.user(shown)
        dialog.say(answer, "This is a simple question that I can answer.", task="chat", must=[key])

    def capital(self, dialog: Dialog, rng: Source) -> None:
        country, city = rng.choice(COUNTRIES)
        if rng.chance(0.75):
            dialog.user(
                rng.choice(
                    (
                        "What is the capital of {}?",
                        "capital of {}?",
                        "Which city is the capital of {}?",
                        "Tell me the capital of {}.",
                        "Do you know the capital of {}?",
                        "Name the capital of {}.",
                    )
                ).format(country)
            )
            dialog.say(
                f"The capital of {country} is {city}.",
                f"The user asks for the capital of {country}.",
                task="chat",
                must=[city],
            )
        else:
            dialog.user(
                rng.choice(("Where is {}?", "In which country is {}?", "Which country has the capital {}?")).format(
                    city
                )
            )
            dialog.say(
                f"{city} is the capital of {country}.", f"The user asks about {city}.", task="chat", must=[country]
            )

    def define(self, dialog: Dialog, rng: Source) -> None:
        word, text = rng.choice(self.definitions)
        dialog.user(
            rng.choice(
                (
                    "What does {} mean?",
                    "Define {}.",
                    "What is the meaning of {}?",
                    'Explain the word "{}".',
                    "meaning of {}?",
                )
            ).format(word)
        )
        dialog.say(f"The word {word} means: {text}.", f"The user asks for the meaning of {word}.")

    def make_list(self, dialog: Dialog, rng: Source) -> None:
        kind = rng.choice(tuple(LISTS))
        count = rng.randint(2, 5)
        items = LISTS[kind].split()[:count]
        if not rng.trains and not rng.chance(0.5):
            items = rng.sample(LISTS[kind].split(), count)
        number = NUMBER_WORDS[count - 2] if rng.chance(0.6) else str(count)
        dialog.user(
            rng.choice(("List {} {}.", "Name {} {}.", "Give me {} {}.", "Tell me {} {}.", "I need {} {}.")).format(
                number, kind
            )
        )
        if rng.chance(0.5):
            dialog.messages[-1]["content"] += rng.choice((" Use a list.", " One per line.", " As a list, please."))
            dialog.say("\n".join(f"- {item}" for item in items), f"The user wants {number} {kind}.")
        else:
            text = joined(items)
            dialog.say(f"{text[0].upper()}{text[1:]}.", f"The user wants {number} {kind}.")

    def opposite(self, dialog: Dialog, rng: Source) -> None:
        a, b = rng.choice(OPPOSITES)
        if rng.chance(0.5):
            a, b = b, a
        dialog.user(
            rng.choice(("What is the opposite of {}?", "opposite of {}?", "Give me the opposite of {}.")).format(a)
        )
        dialog.say(f"The opposite of {a} is {b}.", f"The opposite of {a} is {b}.", task="chat", must=[b])

    def repeat(self, dialog: Dialog, rng: Source) -> None:
        text = rng.phrase() if rng.chance(0.5) else rng.choice(self.paragraphs[:8000])
        dialog.user(
            rng.choice(
                ("Repeat: {}", "Say {}", "Please repeat this text: {}", "Repeat after me: {}", "Echo {}")
            ).format(f'"{text}"' if rng.chance(0.4) else text)
        )
        dialog.say(text, "The user wants me to repeat the text.")

    def spell(self, dialog: Dialog, rng: Source) -> None:
        word = rng.word()
        dialog.user(rng.choice(("Spell {}.", "How do you spell {}?", "Spell the word {}")).format(word))
        dialog.say("-".join(word), f"I spell {word} letter by letter.")

    def name(self, dialog: Dialog, rng: Source) -> None:
        name = rng.name()
        dialog.user(
            rng.choice(("My name is {}.", "I am {}.", "Hi, I'm {}.", "Call me {}.", "Hello, my name is {}.")).format(
                name
            )
        )
        dialog.say(f"Nice to meet you, {name}!", f"The user is called {name}.", task="chat", must=[name])
        if rng.chance(0.5):
            if rng.chance(0.4):
                self.fact(dialog, rng)
            dialog.user(rng.choice(("What is my name?", "Do you remember my name?", "Who am I?")))
            dialog.say(f"Your name is {name}.", f"The user said the name {name}.", task="chat", must=[name])

    def larger(self, dialog: Dialog, rng: Source) -> None:
        a, b = rng.sample(range(1, rng.choice((20, 100, 1000))), 2)
        big = rng.chance(0.5)
        dialog.user(
            rng.choice(("Which is {}: {} or {}?", "What is {}, {} or {}?")).format("larger" if big else "smaller", a, b)
        )
        value = max(a, b) if big else min(a, b)
        dialog.say(
            f"{value} is {'larger' if big else 'smaller'}.", f"I compare {a} and {b}.", task="chat", must=[str(value)]
        )

    def story(self, dialog: Dialog, rng: Source) -> None:
        name, thing, place, adjective = (
            rng.name(),
            rng.choice(THINGS[:50]),
            rng.choice(CITIES),
            rng.choice(ADJECTIVES[:30]),
        )
        asks = (
            "Tell me a short story about {0}.",
            "Write a story about {0} and a {1}.",
            "Tell me a story about {0}, please.",
        )
        ask = rng.choice(asks)
        if rng.trains:  # nothing that the request does not say: it could not be learned
            thing, place, adjective = thing if ask == asks[1] else "lamp", "the river", "old"
        dialog.user(ask.format(name, thing))
        dialog.say(
            f"One day {name} found {article(adjective)} {thing} near {place}. {name} took it home and showed it "
            f"to a friend. "
            f"The friend said: this {thing} is mine! So {name} gave it back, and they both were happy.",
            f"A short story about {name}.",
            task="chat",
            must=[name],
        )

    def count(self, dialog: Dialog, rng: Source) -> None:
        top = rng.randint(3, 15)
        dialog.user(rng.choice(("Count to {}.", "Please count from 1 to {}.", "Count up to {}")).format(top))
        dialog.say(", ".join(map(str, range(1, top + 1))) + ".", f"I count to {top}.")

    def unknown(self, dialog: Dialog, rng: Source) -> None:
        """Things that such a small model cannot know or do."""
        dialog.user(
            rng.choice(UNKNOWN).format(
                n=rng.choice(NAMES),
                t=rng.choice(THINGS),
                u=rng.choice(THINGS),
                c=rng.choice(CITIES),
                a=rng.choice(ADJECTIVES),
            )
        )
        answer = "I do not know that. I am only a small model."
        dialog.say(answer, "I do not know this.", task="chat", equals=[answer])

    def code(self, dialog: Dialog, rng: Source) -> None:
        request, answer = rng.choice(CODE)
        dialog.user(rng.choice(("{}", "Please {}", "Can you {}", "Show me how to {}")).format(request))
        dialog.say(answer, "The user wants a short program.", task="chat", equals=[answer])

    def close(self, dialog: Dialog, rng: Source) -> None:
        kind = rng.random()
        if kind < 0.5:
            dialog.user(rng.choice(THANKS))
            dialog.say("You are welcome!", "The user says thanks.", task="chat", equals=["You are welcome!"])
        elif kind < 0.7:
            dialog.user(rng.choice(BYES))
            dialog.say("Goodbye!", "The user leaves.", task="chat", equals=["Goodbye!"])
        elif kind < 0.85:
            dialog.user(rng.choice(OKS))
            dialog.say("Is there anything else I can do for you?", "I ask if there is more to do.")
        elif dialog.messages and dialog.messages[-1]["role"] == "assistant":
            last = dialog.messages[-1]["content"]
            dialog.user(
                rng.choice(
                    (
                        "Can you repeat that?",
                        "Say that again.",
                        "Sorry, what did you say?",
                        "Please repeat your last answer.",
                    )
                )
            )
            dialog.say(last, "The user wants my last answer again.")
