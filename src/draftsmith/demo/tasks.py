"""Endless small tasks with one right answer: what the demo's target learns and what it is asked.

Each task is a pure function of a `random.Random`; a sample is one user prompt and its one correct answer. They look like
everyday LLM work (records to JSON, tables, units, dates, small functions, arithmetic in steps, rewriting) and are easy
enough for a model of a few million parameters to learn in minutes. Training and held-out prompts come from disjoint
seeds, and `held_out` also drops any prompt that training has seen.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One prompt with its only right answer, and the kind of task it is."""

    kind: str
    prompt: str
    answer: str

    def messages(self) -> list[dict[str, str]]:
        """The task as a two-turn chat in the usual role/content layout."""
        return [{"role": "user", "content": self.prompt}, {"role": "assistant", "content": self.answer}]


FIRST = [
    "Mira",
    "Tom",
    "Ada",
    "Leo",
    "Nina",
    "Omar",
    "Ruth",
    "Ivan",
    "Lena",
    "Hugo",
    "Sara",
    "Paul",
    "Emma",
    "Karl",
    "Rosa",
    "Adam",
    "Vera",
    "Luis",
    "Anna",
    "Finn",
]
LAST = [
    "Holt",
    "Berg",
    "Silva",
    "Moss",
    "Kaur",
    "Weber",
    "Lund",
    "Costa",
    "Novak",
    "Reed",
    "Ito",
    "Blum",
    "Diaz",
    "Frost",
    "Keller",
    "Marsh",
    "Okafor",
    "Petit",
    "Stone",
    "Young",
]
CITIES = [
    "Oslo",
    "Lima",
    "Paris",
    "Cairo",
    "Delhi",
    "Quito",
    "Turin",
    "Tokyo",
    "Perth",
    "Dakar",
    "Berlin",
    "Austin",
    "Porto",
    "Seoul",
    "Riga",
    "Malmo",
]
JOBS = ["nurse", "pilot", "baker", "teacher", "painter", "lawyer", "driver", "farmer", "singer", "editor", "chemist", "plumber"]
COLORS = ["red", "blue", "green", "black", "white", "yellow", "purple", "orange"]
ITEMS = [
    "pen",
    "lamp",
    "chair",
    "table",
    "cup",
    "plate",
    "book",
    "phone",
    "clock",
    "brush",
    "spoon",
    "knife",
    "shelf",
    "mirror",
    "basket",
    "candle",
]
ANIMALS = ["cat", "dog", "fox", "owl", "hen", "cow", "bee", "ant", "bat", "elk", "goat", "wolf", "bear", "swan", "crab", "frog"]
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
VERBS = ["sees", "likes", "follows", "finds", "draws", "helps", "hears", "meets"]

FIELDS: dict[str, Callable[[random.Random], str | int]] = {
    "name": lambda r: f"{r.choice(FIRST)} {r.choice(LAST)}",
    "city": lambda r: r.choice(CITIES),
    "job": lambda r: r.choice(JOBS),
    "age": lambda r: r.randint(18, 90),
    "color": lambda r: r.choice(COLORS),
    "room": lambda r: r.randint(100, 999),
    "pet": lambda r: r.choice(ANIMALS),
}
COLUMNS: dict[str, Callable[[random.Random], str | int]] = {
    "price": lambda r: r.randint(1, 99),
    "stock": lambda r: r.randint(1, 99),
    "color": lambda r: r.choice(COLORS),
    "city": lambda r: r.choice(CITIES),
}
UNITS = [
    ("metre", "centimetres", 100),
    ("kilometre", "metres", 1000),
    ("kilogram", "grams", 1000),
    ("litre", "millilitres", 1000),
    ("centimetre", "millimetres", 10),
    ("tonne", "kilograms", 1000),
    ("euro", "cents", 100),
]
OPERATIONS = [
    ("sum", "+", "add"),
    ("difference", "-", "subtract"),
    ("product", "*", "multiply"),
    ("quotient", "/", "divide"),
]
PARAMETERS = ["width", "height", "price", "count", "speed", "time", "left", "right", "first", "second", "total", "rate"]


def _record(rng: random.Random) -> dict[str, str | int]:
    names = rng.sample(sorted(FIELDS), rng.randint(3, 5))
    return {name: FIELDS[name](rng) for name in names}


def record_to_json(rng: random.Random) -> Task:
    """`name: Ada Holt` lines to a JSON object."""
    record = _record(rng)
    lines = "\n".join(f"{key}: {value}" for key, value in record.items())
    ask = rng.choice(["Turn this record into JSON.", "Write this record as a JSON object.", "Give me JSON for this record."])
    return Task("record_to_json", f"{ask}\n{lines}", json.dumps(record))


def json_to_record(rng: random.Random) -> Task:
    """A JSON object to a bulleted list."""
    record = _record(rng)
    ask = rng.choice(["List the fields of this JSON.", "Turn this JSON into a list.", "Show this JSON as a list."])
    return Task("json_to_record", f"{ask}\n{json.dumps(record)}", "\n".join(f"- {k}: {v}" for k, v in record.items()))


def _table(rng: random.Random) -> list[list[str]]:
    columns = rng.sample(sorted(COLUMNS), 2)
    items = rng.sample(ITEMS, rng.randint(2, 3))
    return [["item", *columns], *([item, *(str(COLUMNS[c](rng)) for c in columns)] for item in items)]


def csv_to_table(rng: random.Random) -> Task:
    """CSV to a Markdown table."""
    rows = _table(rng)
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "| --- | --- | --- |")
    csv = "\n".join(",".join(row) for row in rows)
    return Task("csv_to_table", f"Write this CSV as a Markdown table.\n{csv}", "\n".join(lines))


def table_to_csv(rng: random.Random) -> Task:
    """A Markdown table to CSV."""
    rows = _table(rng)
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "| --- | --- | --- |")
    table = "\n".join(lines)
    return Task("table_to_csv", f"Write this table as CSV.\n{table}", "\n".join(",".join(row) for row in rows))


def convert_unit(rng: random.Random) -> Task:
    """A unit conversion, with the rule it uses."""
    large, small, factor = rng.choice(UNITS)
    number = rng.randint(2, 999)
    answer = f"1 {large} is {factor} {small}, so {number} {large}s are {number} x {factor} = {number * factor} {small}."
    return Task("convert_unit", f"How many {small} are {number} {large}s?", answer)


def convert_date(rng: random.Random) -> Task:
    """An ISO date in words, part by part."""
    year, month, day = rng.randint(1900, 2099), rng.randint(1, 12), rng.randint(1, 28)
    iso = f"{year}-{month:02d}-{day:02d}"
    answer = f"{iso} is year {year}, month {month} and day {day}. In words: {day} {MONTHS[month - 1]} {year}."
    return Task("convert_date", f"Write the date {iso} in words.", answer)


def small_function(rng: random.Random) -> Task:
    """A two-argument Python function from its description."""
    noun, sign, verb = rng.choice(OPERATIONS)
    one, two = rng.sample(PARAMETERS, 2)
    name = f"{verb}_{rng.choice(['values', 'numbers', one])}"
    prompt = f"Write a Python function {name} that returns the {noun} of {one} and {two}."
    answer = f'def {name}({one}, {two}):\n    """Return the {noun} of {one} and {two}."""\n    return {one} {sign} {two}'
    return Task("small_function", prompt, answer)


def add_in_steps(rng: random.Random) -> Task:
    """Column addition of two three-digit numbers."""
    one, two = rng.randint(100, 999), rng.randint(100, 999)
    carry, lines = 0, []
    for place in range(3):
        digits = [one // 10**place % 10, two // 10**place % 10]
        total = sum(digits) + carry
        terms = " + ".join(str(d) for d in [*digits, *([carry] if carry else [])])
        lines.append(f"{terms} = {total}, write {total % 10}, carry {total // 10}.")
        carry = total // 10
    return Task("add_in_steps", f"Add {one} and {two} step by step.", "\n".join([*lines, f"The sum is {one + two}."]))


def reverse_list(rng: random.Random) -> Task:
    """A list of words backwards."""
    words = rng.sample(rng.choice([ANIMALS, ITEMS, CITIES]), rng.randint(4, 7))
    return Task("reverse_list", f"Reverse this list: {', '.join(words)}", f"Reversed: {', '.join(reversed(words))}")


def replace_word(rng: random.Random) -> Task:
    """A sentence with one word replaced wherever it stands."""
    old, other, new = rng.sample(ANIMALS, 3)
    animals = rng.choice([[old, other], [other, old], [old, old]])
    sentence = " ".join(
        f"{person} {rng.choice(VERBS)} the {rng.choice(COLORS)} {animal}."
        for person, animal in zip(rng.sample(FIRST, 2), animals, strict=True)
    )
    return Task("replace_word", f"Replace {old} with {new}: {sentence}", sentence.replace(f" {old}.", f" {new}."))


KINDS: list[Callable[[random.Random], Task]] = [
    record_to_json,
    json_to_record,
    csv_to_table,
    table_to_csv,
    convert_unit,
    convert_date,
    small_function,
    add_in_steps,
    reverse_list,
    replace_word,
]


def stream(seed: int) -> Iterator[Task]:
    """Endless tasks, every kind equally often, determined by `seed`."""
    rng = random.Random(seed)
    while True:
        yield rng.choice(KINDS)(rng)


def held_out(seed: int, count: int, seen: set[str]) -> list[Task]:
    """`count` tasks, kinds in turn, whose prompts are not in `seen` and do not repeat."""
    rng, taken = random.Random(seed), set(seen)
    tasks: list[Task] = []
    while len(tasks) < count:
        task = KINDS[len(tasks) % len(KINDS)](rng)
        if task.prompt not in taken:
            taken.add(task.prompt)
            tasks.append(task)
    return tasks
