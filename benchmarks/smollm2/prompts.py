"""Prompts in six categories, made from words and patterns of our own: any number of them, no two alike, the same ones every time."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

TASKS = [
    "returns the largest number in a list",
    " counts the vowels in a string",
    " reverses a string",
    " checks whether a word is a palindrome",
    "\ncomputes the factorial of a number",
    " returns the first n Fibonacci numbers",
    " removes duplicates from a list",
    " merges two sorted lists",
    "\nsorts a list of words by length",
    " counts how often each word occurs in a text",
    " converts Celsius to Fahrenheit",
    " checks whether a number is prime",
    "\nreturns all even numbers of a list",
    " sums the digits of a number",
    " finds the second largest number in a list",
    " flattens a nested list",
    "\ncapitalizes the first letter of every word",
    " computes the average of a list of numbers",
    " finds the longest word in a sentence",
    "\nreturns the common elements of two lists",
    " checks whether two words are anagrams",
    " rotates a list by one place",
    " splits a list into chunks",
    "\nconverts a number to binary",
    " counts the lines of a file",
    " reads a CSV file into a list of dictionaries",
    " writes a dictionary to a JSON file",
    "\ncomputes the greatest common divisor of two numbers",
    " multiplies two matrices",
    " transposes a matrix",
    " performs a binary search",
    "\nimplements bubble sort",
    " implements insertion sort",
    " validates an email address",
    " generates a random password",
    " counts the words in a sentence",
    "\nremoves all spaces from a string",
    " returns the squares of the numbers from 1 to n",
    " checks whether a year is a leap year",
    "\nfinds the missing number in a sequence",
    " swaps the keys and values of a dictionary",
    " computes the area of a circle",
    "\ncomputes the distance between two points",
    " converts hours to seconds",
    " finds the index of an element in a list",
    " joins a list of words with commas",
    "\nprints the multiplication table of a number",
    " checks whether brackets in a string are balanced",
    " removes punctuation from a text",
    "\nreturns the median of a list",
    " rounds a price to two decimals",
    " counts uppercase letters",
    " zips two lists into a dictionary",
]
CONCEPTS = [
    "gravity",
    " photosynthesis",
    " the water cycle",
    " how a rainbow forms",
    " why the sky is blue",
    " electricity",
    " magnets",
    " the seasons",
    " tides",
    " volcanoes",
    "\nearthquakes",
    " the moon's phases",
    " atoms",
    " cells",
    " DNA",
    " evolution",
    " vaccines",
    " the immune system",
    " how the heart works",
    " how we digest food",
    " sleep",
    "\ndreams",
    " memory",
    " how computers store data",
    " the internet",
    " what an algorithm is",
    " encryption",
    " databases",
    " operating systems",
    " recursion",
    "\nmachine learning",
    " neural networks",
    " open source software",
    " version control",
    " inflation",
    " supply and demand",
    " taxes",
    " how banks work",
    " insurance",
    "\nthe stock market",
    " democracy",
    " the Roman Empire",
    " the Industrial Revolution",
    " the Renaissance",
    " climate change",
    " recycling",
    " renewable energy",
    "\nsolar panels",
    " wind turbines",
    " batteries",
    " how airplanes fly",
    " how ships float",
    " bridges",
    " clocks",
    " the scientific method",
    " probability",
    " averages",
    "\nfractions",
    " prime numbers",
    " geometry",
    " music rhythm",
    " how a piano makes sound",
    " photography",
    " painting with perspective",
    " poetry",
    " how bread rises",
    "\nfermentation",
    " why onions make us cry",
    " how bees make honey",
    " migration of birds",
    " camouflage in animals",
    " hibernation",
    " coral reefs",
    " deserts",
    "\nrain forests",
    " glaciers",
    " rivers",
    " soil",
    " seeds",
    " pollination",
]
AUDIENCES = ["a child", "a high school student", "a beginner", "my grandmother", "someone in a hurry", "a curious friend"]
HEROES = [
    "a young fox",
    " an old sailor",
    " a shy robot",
    " a baker's daughter",
    " a lonely lighthouse keeper",
    " a curious cat",
    " a brave mouse",
    " a retired detective",
    "\na tiny dragon",
    " a clever crow",
    " a forgetful wizard",
    " a boy with a red kite",
    " a girl who loves maps",
    " a clockmaker",
    " a traveling musician",
    " a gardener",
    "\na lost astronaut",
    " a gentle giant",
    " a night nurse",
    " a street painter",
    " a stubborn donkey",
    " a librarian",
    " a snowman",
    " a paper boat",
]
EVENTS = [
    "finds a hidden door",
    " loses a precious ring",
    " makes an unlikely friend",
    " learns to share",
    " gets lost in a storm",
    " discovers a secret garden",
    "\nrepairs an old bridge",
    " wins a race",
    " tells the truth at last",
    " finds a letter in a bottle",
    " saves the village",
    " learns to swim",
    " builds a boat",
    "\nmeets a talking tree",
    " returns home after many years",
    " faces a great fear",
    " solves a riddle",
    " plants a magic seed",
    " hears a strange song",
    "\nhelps a stranger",
]
WHO = [
    "The teacher",
    "My brother",
    "A tired student",
    "The old farmer",
    "Our neighbor",
    "The young doctor",
    "The manager",
    "Her cousin",
    "The driver",
]
WHAT = [
    "writes a long letter",
    " cooks dinner for the family",
    " fixes the broken window",
    " reads a book in the garden",
    " walks to the station",
    "\nplays chess with a friend",
    " paints the kitchen wall",
    " forgets the keys at home",
    " buys fresh bread",
    " cleans the office",
    " waters the flowers",
    "\nanswers the phone",
    " waits for the bus",
    " sings a quiet song",
    " closes the heavy door",
    " explains the new plan",
    " carries two bags",
    " feeds the cat",
]
WHEN = [
    "every morning",
    "on Sundays",
    "after work",
    "before breakfast",
    "in the rain",
    "with great care",
    "without a word",
    "late at night",
]
CHANGES = [
    "Rewrite this sentence in the past tense",
    "Rewrite this sentence in the future tense",
    "Make this sentence a question",
    "Make this sentence more formal",
    "Make this sentence shorter",
    "Make this sentence negative",
]
THINGS = ["apples", "books", "coins", "marbles", "pencils", "cookies", "stickers", "tickets", "eggs", "stamps"]
NAMES = ["Tom", "Anna", "Maria", "Ben", "Lucy", "Sam", "Nina", "Paul"]
ENTITIES = [
    "a book",
    " a movie",
    " a city",
    " a country",
    " a dog",
    " a car",
    " a recipe",
    " a student",
    " a laptop",
    " a planet",
    " a song",
    " a museum",
    " a bicycle",
    " a restaurant",
    "\na football team",
    " a tree",
    " a river",
    " a phone",
    " a train",
    " a game",
]
KEYS = ["name", "color", "price", "age", "country", "size", "weight", "year", "owner", "rating", "type", "language"]
LISTS = [
    "healthy breakfasts",
    " things to pack for a trip",
    " ways to save energy at home",
    " board games",
    " famous inventors",
    " musical instruments",
    " kinds of trees",
    "\nuses of a paper clip",
    " rules of good writing",
    " habits of good students",
    " indoor plants",
    " winter sports",
    " kinds of cheese",
    " planets and one fact about each",
    "\nsteps to make tea",
    " safety rules in a kitchen",
    " gifts for a friend",
    " words that rhyme with cat",
    " animals that live in the sea",
    " reasons to read",
]


def _code(rng: random.Random) -> str:
    task = rng.choice(TASKS).strip()
    form = rng.choice([
        "Write a Python function that {}.",
        "Please write a short Python function that {}, with a docstring.",
        "I need a Python function that {}. Show an example of its use.",
        "Write a Python function that {}, and a test for it.",
        "Write a JavaScript function that {}.",
        "Write a Java method that {}.",
        "Write a function in C that {}.",
        "Write a C++ function that {}.",
        "Write a Go function that {}.",
        "Write a Rust function that {}.",
        "Write a TypeScript function that {}.",
        "Write a Ruby method that {}.",
        "Write a Python function with type hints that {}.",
        "How do I write a function that {} in Python? Explain the code.",
    ])  # fmt: skip
    return form.format(task)


def _arithmetic(rng: random.Random) -> str:
    a, b, c = rng.randint(2, 99), rng.randint(2, 60), rng.randint(2, 12)
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    return rng.choice([
        f"What is {a} + {b}? Show the steps.",
        f"What is {a + b} - {b}? Show the steps.",
        f"What is {a} times {c}? Explain step by step.",
        f"{name} has {a} {thing} and buys {b} more. How many {thing} does {name} have now?",
        f"{name} has {a + b} {thing} and gives away {b}. How many are left?",
        f"A box holds {c} {thing}. How many {thing} are in {b} boxes?",
    ])  # fmt: skip


def _rewriting(rng: random.Random) -> str:
    return f"{rng.choice(CHANGES)}: {rng.choice(WHO)} {rng.choice(WHAT).strip()} {rng.choice(WHEN)}."


def _explaining(rng: random.Random) -> str:
    concept, audience = rng.choice(CONCEPTS).strip(), rng.choice(AUDIENCES)
    form = rng.choice(
        ["Explain {} to {}.", "Can you explain {} in simple words for {}?", "Give {1} a short explanation of {0}."]
    )
    return form.format(concept, audience)


def _stories(rng: random.Random) -> str:
    hero, event = rng.choice(HEROES).strip(), rng.choice(EVENTS).strip()
    return rng.choice(["Write a short story about {} who {}.", "Tell me a story in which {} {}."]).format(hero, event)


def _structured(rng: random.Random) -> str:
    entity, keys = rng.choice(ENTITIES).strip(), ", ".join(rng.sample(KEYS, rng.randint(2, 4)))
    topic, count = rng.choice(LISTS).strip(), rng.choice(["three", "five", "seven"])
    return rng.choice([
        f"Give me a JSON object that describes {entity}, with the keys {keys}.",
        f"Make a markdown table about {entity} with the columns {keys}.",
        f"List {count} {topic} as a numbered list.",
        f"Write a YAML file that describes {entity}, with the keys {keys}.",
    ])  # fmt: skip


CATEGORIES: dict[str, Callable[[random.Random], str]] = {
    "arithmetic": _arithmetic,
    "code": _code,
    "explaining": _explaining,
    "rewriting": _rewriting,
    "stories": _stories,
    "structured": _structured,
}


def prompts(seed: int = 0) -> Iterator[tuple[str, str]]:
    """Category and prompt, the categories in turn, no prompt twice."""
    rng, seen = random.Random(f"prompts/{seed}"), set[str]()
    while True:
        for category, make in CATEGORIES.items():
            prompt = make(rng)
            while prompt in seen:
                prompt = make(rng)
            seen.add(prompt)
            yield category, prompt


def write(path: Path, rows: list[tuple[str, str]]) -> None:
    """A file of chats that wait for their answer."""
    lines = [json.dumps({"messages": [{"role": "user", "content": text}], "category": kind}) + "\n" for kind, text in rows]
    path.write_text("".join(lines), encoding="utf-8")
