"""Argument values, split by content: what `held_out` draws, `train` never does."""

from __future__ import annotations

import random
from datetime import date, timedelta

TRAIN, HELD_OUT = "train", "held_out"


def _pool(train: str, held_out: str) -> tuple[list[str], list[str]]:
    return train.split(", "), held_out.split(", ")


POOLS: dict[str, tuple[list[str], list[str]]] = {
    # name: (train, held out)
    "city": _pool(
        "Paris, Tokyo, Lima, Oslo, Cairo, Quito, Delhi, Berlin, Madrid, Accra, Hanoi, Rome, Austin, "
        "Perth, Prague, Lisbon, Nairobi, Boston, Seoul, Vienna, Athens, Toronto, Porto, Naples, Dakar, "
        "Riga",
        "Dublin, Warsaw, Havana, Geneva, Denver, Bergen, Milan, Chicago, Sydney, Zurich",
    ),
    "name": _pool(
        "Anna, Bob, Carla, Dmitri, Eve, Farid, Hugo, Ivan, Jane, Kofi, Lena, Mark, Nora, Omar, Paul, "
        "Rosa, Alice, Ben, Clara, David, Emma, Frank, Helen, Karl",
        "Gita, Tom, Uma, Victor, Wendy, Simon, Olga, Peter",
    ),
    "item": _pool(
        "lamp, chair, kettle, backpack, keyboard, mug, pillow, drill, tent, clock, blanket, helmet, "
        "guitar, monitor, ladder, toaster, jacket, radio, table, phone, wallet, bucket, shovel, heater, "
        "basket, carpet, violin, scooter",
        "desk, printer, umbrella, bicycle, camera, mirror, hammer, teapot",
    ),
    "event": _pool(
        "Dentist, Team meeting, Yoga class, Haircut, Lunch, Book club, Piano lesson, Review, Breakfast, "
        "Concert, Car wash, Training, Dinner, Spanish course, Family visit, Standup",
        "Interview, Doctor, Board meeting, Chess club, Swimming",
    ),
    "account": _pool(
        "savings, checking, holiday, business, family, house, travel, emergency, wedding, shared",
        "pension, household, student",
    ),
    "unanswerable": _pool(
        "Play some jazz, Take a photo of me, Print this page, Turn off the lights, Open the garage door, "
        "Water my plants, Feed the cat, Lock the front door, Read me the news, Walk the dog, Sing a song,"
        " Paint the kitchen, Iron my shirts, Fix my bike, Wash the car, Bake a cake, Clean the windows, "
        "Draw a horse, Mow the lawn, Make the bed, Heat up the oven, Turn up the volume, Ring the "
        "doorbell, Charge my phone",
        "Start the dishwasher, Call a taxi, Vacuum the floor, Close the curtains",
    ),
}


class Draw:
    """Seeded draws of one split. The two splits of any pool or range have no value in common."""

    def __init__(self, rng: random.Random, split: str) -> None:
        self.rng = rng
        self.split = split

    def one(self, pool: str) -> str:
        return self.rng.choice(POOLS[pool][self.split == HELD_OUT])

    def number(self, low: int, high: int) -> int:
        """A whole number in [low, high]; those of the form 3k+2 belong to `held_out`."""
        return self.rng.choice([n for n in range(low, high + 1) if (n % 3 == 2) == (self.split == HELD_OUT)])

    def day(self) -> date:
        """A day of 2027; the day of the month decides the split."""
        return date(2027, self.rng.randint(1, 12), self.number(1, 28))

    def time(self) -> str:
        """``HH:MM`` of the day; the hour decides the split."""
        return f"{self.number(7, 19):02d}:{self.rng.choice((0, 15, 30, 45)):02d}"

    def wording(self, *wordings: str) -> str:
        """One of them; the splits differ in the values that are asked for, not in how."""
        return self.rng.choice(wordings)


def later(day: date, days: int) -> date:
    return day + timedelta(days=days)
