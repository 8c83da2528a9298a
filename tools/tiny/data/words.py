"""Word lists and the seeded source of every random choice, with the split between training and evaluation."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar
from zlib import crc32

from . import rare

T = TypeVar("T")
HELD_OUT = 8  # one candidate in eight belongs to the evaluation split


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = words(
    """Anna Ben Carla David Emma Frank Grace Henry Irene Jack Karen Leo Maria Nina Oscar Paula Quinn Robert Sara Tom
    Uma Victor Wendy Xavier Yara Zoe Adam Bella Chris Diana Eric Fiona George Hannah Ivan Julia Kevin Laura
    Martin Nora Oliver Peter Rosa Simon Tina Alice Bob Clara Daniel Elena Felix Greta Hugo Iris James Kate Lucas
    Mona Nick Olga Paul Rita Sam Tara Walter Amy Brian Cathy Dylan Eva Fred Gina Harry Isaac Jane Ken Lisa Mark
    Nancy Otto Pam Ralph Sue Ted Vera"""
)
CITIES = words(
    """Rome Oslo Paris London Berlin Madrid Vienna Tokyo Cairo Lima Athens Dublin Prague Warsaw Lisbon Boston Chicago
    Denver Dallas Seattle Miami Austin Houston Toronto Ottawa Montreal Sydney Perth Delhi Mumbai Seoul Beijing
    Moscow Helsinki Stockholm Zurich Geneva Munich Hamburg Milan Venice Naples Turin Porto Seville Valencia Lyon
    Nice Brussels Antwerp Rotterdam Utrecht Bergen Malta Nairobi Lagos Accra Tunis Quito Bogota Havana Panama
    Santiago Sofia Riga Vilnius Tallinn Krakow Zagreb Ankara Izmir Tehran Dubai Manila Hanoi Osaka Kyoto Nagoya
    Auckland Wellington"""
)
COUNTRIES = (
    ("France", "Paris"),
    ("Italy", "Rome"),
    ("Spain", "Madrid"),
    ("Germany", "Berlin"),
    ("Austria", "Vienna"),
    ("Norway", "Oslo"),
    ("Sweden", "Stockholm"),
    ("Finland", "Helsinki"),
    ("Denmark", "Copenhagen"),
    ("Poland", "Warsaw"),
    ("Portugal", "Lisbon"),
    ("Greece", "Athens"),
    ("Ireland", "Dublin"),
    ("Hungary", "Budapest"),
    ("Japan", "Tokyo"),
    ("China", "Beijing"),
    ("Egypt", "Cairo"),
    ("Kenya", "Nairobi"),
    ("Peru", "Lima"),
    ("Chile", "Santiago"),
    ("Cuba", "Havana"),
    ("Canada", "Ottawa"),
    ("Russia", "Moscow"),
    ("Turkey", "Ankara"),
    ("Ghana", "Accra"),
    ("Iran", "Tehran"),
    ("Belgium", "Brussels"),
    ("Bulgaria", "Sofia"),
    ("Latvia", "Riga"),
    ("Tunisia", "Tunis"),
    ("South Korea", "Seoul"),
    ("India", "New Delhi"),
    ("Colombia", "Bogota"),
    ("Ecuador", "Quito"),
    ("Croatia", "Zagreb"),
    ("Romania", "Bucharest"),
    ("Serbia", "Belgrade"),
    ("Australia", "Canberra"),
    ("Argentina", "Buenos Aires"),
    ("the United States", "Washington"),
    ("the United Kingdom", "London"),
    ("the Netherlands", "Amsterdam"),
)
NOUNS = words(
    """ticket order invoice user report task note project product customer file folder page image video song book room
    flight hotel ticket event meeting message email contact account payment device sensor lamp door camera
    printer server backup job worker queue table record entry item list card board post comment tag label
    profile team member group channel alarm timer recipe route map package shipment box store price coupon key
    token session report chart graph form survey poll quiz lesson course student teacher patient doctor visit
    car truck train boat plane drone robot machine engine pump valve tank filter heater fan window garden plant
    tree animal dog cat horse bird fish game player match score"""
)
VERBS = words(
    """create delete update get find open close send start stop add remove check move copy rename print scan load save
    export import publish archive restore lock unlock enable disable test build clean merge split sort rate
    review approve reject book cancel assign schedule track measure reset connect"""
)
QUERY_VERBS = words("get find check fetch look_up show query inspect")
ADJECTIVES = words(
    """red blue green black white small big old new fast slow quiet loud warm cold dark bright happy sad soft hard dry
    wet clean empty full heavy light short long round flat sharp sweet fresh young broken open hidden simple
    strange common rare early late local global final first second third last main spare silver golden wooden
    plastic paper iron"""
)
THINGS = words(
    """lamp table chair window door house garden river mountain forest street bridge tower castle market school library
    station hospital kitchen bottle glass cup plate knife spoon box bag shoe hat coat shirt ring clock phone
    camera radio book paper pen pencil letter card map picture mirror candle ladder hammer rope wheel engine
    boat train horse cow sheep bird fish apple pear plum lemon orange grape bread cheese butter milk coffee tea
    sugar salt pepper rice soup cake stone sand snow rain wind cloud star moon sun tree leaf flower grass field
    island beach lake ocean desert valley"""
)
COLORS = words("red blue green yellow black white orange purple brown pink gray silver gold")
# Recall values and keys: short common words, most of them one token after a space.
VALUES = words(
    """apple lemon orange banana cherry tiger lion bear wolf eagle horse rabbit snake whale river ocean mountain forest
    desert island bridge tower castle garden window candle mirror hammer ladder silver golden copper iron stone
    paper purple yellow green black white brown coffee sugar pepper butter cheese bread honey piano guitar
    violin drum trumpet rocket planet comet galaxy winter summer autumn spring thunder storm cloud rain snow
    fire water wind earth metal pencil letter number circle square triangle marble pearl diamond ruby cotton
    velvet leather rubber plastic glass table chair lamp clock phone camera radio engine wheel boat train plane
    truck bicycle market school station hospital doctor teacher farmer soldier king queen prince knight robot
    dragon monkey zebra camel turtle spider beetle ant flower grass leaf tree root seed fruit grape plum peach
    melon carrot potato onion tomato rice corn bean soup cake"""
)
PATH_PARTS = words(
    """src lib app docs test tests data config build tools scripts assets images models utils core api server client
    web admin public private old new tmp logs notes reports plans backup main common shared base engine parser
    reader writer user order report index setup readme changelog license todo draft summary budget settings
    example sample demo index handler helper router worker queue cache store view page form table menu login
    auth session token"""
)
EXTENSIONS = words("py txt md json yaml toml csv js ts html css c h rs go java sh log cfg ini xml sql")
DOMAINS = words(
    """example.com example.org example.net test.example shop.example news.example docs.example mail.example"""
)
UNITS = words("celsius fahrenheit")
LANGUAGES = words("French German Spanish Italian Dutch Polish Swedish Greek Turkish Japanese Chinese Korean")
CURRENCIES = words("USD EUR GBP JPY CHF SEK NOK PLN CAD AUD")
MONTHS = words("January February March April May June July August September October November December")
WEATHER = words("sunny cloudy rainy windy foggy snowy stormy clear hot cold mild dry")
SYLLABLES = words(
    "ba be bo da de do fa fi ga go ka ki ko la le lo ma mi mo na ne no pa pe ra ri ro sa se so ta te to va vi zo zu"
)


def held_out(kind: str, text: str) -> bool:
    """True if `text`, as a thing of this kind, belongs to evaluation and is never trained."""
    return crc32(f"{kind}:{text}".encode()) % HELD_OUT == 0


class Source(random.Random):
    """A seeded random source that only returns things of its split where the split matters.

    `wild` is the chance of a rare word (rare.py) in place of one of the lists. It stays 0 for evaluation, whose cases
    do not change with it.
    """

    def __init__(self, seed: int | str, split: str = "train") -> None:
        if split not in ("train", "eval"):
            raise ValueError(f"split must be 'train' or 'eval', not {split!r}")
        super().__init__(f"{split}/{seed}")
        self.split = split
        self.wild = 0.0

    @property
    def trains(self) -> bool:
        return self.split == "train"

    def pick(self, items: Sequence[str], plain: bool = False) -> str:
        """One of the words, or now and then a rare one; `plain` as paths and addresses want it."""
        if self.wild and self.chance(self.wild):
            return rare.word(self, plain)
        return self.choice(items)

    def pick_name(self, items: Sequence[str]) -> str:
        """One of the names, or now and then a rare one."""
        if self.wild and self.chance(self.wild):
            return rare.name(self)
        return self.choice(items)

    def chance(self, p: float) -> bool:
        return self.random() < p

    def of_split(self, kind: str, make: Callable[[], T], text: Callable[[T], str] = str) -> T:
        """Draw until the thing belongs to this source's split."""
        wanted = self.split == "eval"
        for _ in range(400):
            value = make()
            if held_out(kind, text(value)) == wanted:
                return value
        raise RuntimeError(f"no {kind} of split {self.split} in 400 draws: too few candidates")

    def name(self) -> str:
        return self.of_split("name", lambda: self.pick_name(NAMES))

    def city(self) -> str:
        return self.of_split("city", lambda: self.pick_name(CITIES))

    def phrase(self, low: int = 2, high: int = 4) -> str:
        """A short title of random words, such as "old paper lamp"."""

        def make() -> str:
            count = self.randint(low, high)
            parts = [self.pick(ADJECTIVES) for _ in range(count - 1)] + [self.pick(THINGS)]
            text = " ".join(parts)
            return text.capitalize() if self.chance(0.25) else text

        return self.of_split("phrase", make)

    def word(self) -> str:
        return self.of_split("word", lambda: self.pick(THINGS) if self.chance(0.7) else self.pseudo())

    def pseudo(self, low: int = 2, high: int = 3) -> str:
        return "".join(self.choice(SYLLABLES) for _ in range(self.randint(low, high)))

    def path(self, folder: bool = False) -> str:
        def make() -> str:
            depth = self.randint(0 if not folder else 1, 3)
            parts = [self.pick(PATH_PARTS, plain=True) for _ in range(depth)]
            if self.chance(0.15):
                parts.insert(
                    0, self.choice(("/home/" + self.choice(NAMES).lower(), "/tmp", "/etc", "/var/log", "..", "."))
                )
            if not folder:
                stem = self.pick(PATH_PARTS, plain=True)
                if self.chance(0.3):
                    stem += self.choice(("_", "-", "")) + (
                        self.choice(PATH_PARTS) if self.chance(0.6) else str(self.randint(1, 99))
                    )
                parts.append(f"{stem}.{self.choice(EXTENSIONS)}")
            return "/".join(parts)

        return self.of_split("path", make)

    def email(self) -> str:
        def make() -> str:
            more = self.choice(("", "." + self.pseudo(), str(self.randint(1, 99))))
            return f"{self.pick(NAMES, plain=True).lower()}{more}@{self.choice(DOMAINS)}"

        return self.of_split("email", make)

    def url(self) -> str:
        def make() -> str:
            host = self.choice(("", "www.", "api.", self.choice(PATH_PARTS) + ".")) + self.choice(DOMAINS)
            tail = f"/{self.pick(PATH_PARTS, plain=True)}" if self.chance(0.5) else ""
            return f"https://{host}/{self.pick(PATH_PARTS, plain=True)}{tail}"

        return self.of_split("url", make)

    def integer(self, low: int = 1, high: int = 9999) -> int:
        """Integers over several magnitudes."""

        def make() -> int:
            top = self.choice([t for t in (10, 100, 1000, high) if low <= t <= high] or [high])
            return self.randint(low, top)

        return self.of_split("integer", make) if high - low > 40 else self.randint(low, high)

    def decimal(self) -> float:
        return self.of_split("decimal", lambda: self.randint(1, 9999) / self.choice((10, 100)))

    def date(self) -> str:
        return self.of_split(
            "date", lambda: f"20{self.randint(20, 39)}-{self.randint(1, 12):02d}-{self.randint(1, 28):02d}"
        )

    def clock(self) -> str:
        return self.of_split(
            "clock", lambda: f"{self.randint(0, 23):02d}:{self.choice((0, 5, 10, 15, 20, 30, 40, 45, 50)):02d}"
        )
