"""Write the templated prompts of the shipped conversations.

    python data/smollm2/prompts.py --out outputs/prompts

Makes `train.jsonl` and `eval.jsonl` there: prompts only, six categories, no prompt in both. All
prompts are our own: templates below, filled with topics below. Evaluation has topics, names and
source texts of its own, and in each category templates of its own beside the shared ones.
"""

import random
from functools import partial

from headstart.data.conversations import templated

TOPICS = (
    """
volcanoes; the water cycle; photosynthesis; bees; the Moon; coral reefs; bread baking; chess;
bicycles; bridges; lighthouses; the Roman Empire; jazz music; painting; gardening; recycling;
solar energy; wind power; earthquakes; dinosaurs; whales; penguins; deserts; rainforests; rivers;
the human heart; sleep; vitamins; running; swimming; yoga; football; basketball; tennis; camping;
hiking; fishing; trains; airplanes; ships; the printing press; the telephone; computers; robots;
the internet; libraries; museums; schools; markets; money; taxes; banks; democracy; laws; maps;
calendars; clocks; tea; coffee; chocolate; cheese; rice; potatoes; apples; soup; pasta; spices;
dogs; cats; horses; elephants; butterflies; spiders; owls; trees; flowers; mushrooms; clouds;
snow; thunderstorms; rainbows; stars; Mars; comets; gravity; magnets; electricity; sound; light;
atoms; water; iron; gold; glass; paper; plastic; cotton; silk; shoes; hats; houses; castles;
tents; poetry; novels; theatre; films; photography; dance; violins; pianos; drums; puzzles; kites
""".replace("\n", " ")
    .strip()
    .split("; ")
)
EVAL_TOPICS = (
    """
glaciers; honey; submarines; the Silk Road; tides; origami; pottery; hummingbirds; compasses;
marathons; windmills; opera; bamboo; batteries; telescopes; migration of birds; salt; umbrellas;
subways; fireflies
""".replace("\n", " ")
    .strip()
    .split("; ")
)

NAMES = [
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Felix",
    "Grace",
    "Henry",
    "Iris",
    "Jack",
    "Kate",
    "Leo",
    "Maria",
    "Nina",
    "Oscar",
    "Paul",
    "Rosa",
    "Sam",
    "Tina",
    "Victor",
]
EVAL_NAMES = ["Olga", "Pedro", "Quinn", "Ravi", "Sofia", "Tomas", "Uma", "Walter", "Yara", "Zane"]
PLACES = [
    "park",
    "kitchen",
    "school",
    "office",
    "garden",
    "station",
    "market",
    "beach",
    "library",
    "museum",
    "farm",
    "hospital",
    "village",
    "harbour",
    "theatre",
]
EVAL_PLACES = ["airport", "bakery", "castle", "forest", "hotel", "workshop", "stadium", "pharmacy"]
THINGS = [
    "apples",
    "books",
    "pencils",
    "tickets",
    "cookies",
    "stamps",
    "marbles",
    "bottles",
    "chairs",
    "flowers",
    "stickers",
    "coins",
    "plates",
    "balloons",
    "shirts",
]
EVAL_THINGS = ["lemons", "buttons", "postcards", "candles", "shells", "mugs", "notebooks", "keys"]

CHAT = [
    "What is the best way to learn about {t}?",
    "Can you tell me something interesting about {t}?",
    "I am curious about {t}. Where should I start?",
    "Why are {t} important?",
    "What are the most common mistakes people make with {t}?",
    "Explain {t} to a ten year old child.",
    "Give me five facts about {t}.",
    "How would you describe {t} to someone who has never heard of it?",
    "What are the advantages and disadvantages of {t}?",
    "Hi! My friend {n} loves {t}. What gift could I buy?",
    "What should I know about {t} before my visit to the {p}?",
    "Do you have any tips about {t} for a beginner?",
    "How have {t} changed over the last hundred years?",
    "What questions could I ask an expert on {t}?",
    "Is it true that {t} can change people's lives? How?",
]
EVAL_CHAT = [
    "Summarise what everyone should know about {t} in a few sentences.",
    "{n} asked me about {t} and I did not know what to say. Can you help?",
]
PROSE = [
    "Write a short story about {n} and {t}.",
    "Write a paragraph about {t}.",
    "Write a short essay on the history of {t}.",
    "Write a poem about {t}.",
    "Write a letter from {n} to a friend about {t}.",
    "Describe a day at the {p} in a vivid way.",
    "Write the opening of a novel in which {n} discovers a secret at the {p}.",
    "Write a blog post about {t}.",
    "Write a short dialogue between {n} and {m} about {t}.",
    "Write a speech about the importance of {t}.",
    "Write a product description for a new book about {t}.",
    "Write a news report about an event with {t} at the {p}.",
    "Write a diary entry of {n} after a long day at the {p}.",
]
EVAL_PROSE = [
    "Write a fairy tale in which {t} play a part.",
    "Write a short speech that {n} gives at the {p}.",
]
FUNCTIONS = (
    """
returns the sum of a list of numbers; checks whether a string is a palindrome; counts the vowels
in a string; finds the largest number in a list; reverses a string; computes the factorial of a
number; returns the n-th Fibonacci number; sorts a list of words by length; removes duplicates
from a list; counts how often each word occurs in a text; checks whether a number is prime;
converts Celsius to Fahrenheit; computes the average of a list; merges two sorted lists; finds the
longest word in a sentence; computes the area of a circle; checks whether two strings are
anagrams; flattens a nested list; returns the even numbers of a list; computes the power of a
number; finds the second largest number in a list; capitalises each word of a sentence; counts the
lines of a file; reads a CSV file; writes a list to a file; generates a random password; rolls two
dice; computes the distance between two points; rotates a list by k places; finds the common
elements of two lists; converts a number to binary; validates an email address; finds the missing
number in a list from 1 to n; computes the greatest common divisor of two numbers; implements
binary search; implements bubble sort; implements a stack; implements a queue; implements a linked
list; finds the index of a value in a list; splits a list into chunks of size n; zips two lists
into a dictionary; inverts a dictionary; computes compound interest; converts seconds to hours and
minutes; checks a leap year; prints a multiplication table; counts the digits of a number;
transposes a matrix; multiplies two matrices; replaces every space by a dash; draws a triangle of
stars; simulates a coin toss; parses a date; measures the run time of a function
""".replace("\n", " ")
    .strip()
    .split("; ")
)
EVAL_FUNCTIONS = (
    """
returns the product of a list of numbers; counts the consonants in a string; finds the smallest
number in a list; returns the odd numbers of a list; finds the shortest word in a sentence;
computes the area of a triangle; computes the least common multiple of two numbers; converts miles
to kilometres; implements insertion sort; computes the median of a list; checks whether a list is
sorted; converts a binary string to a number; removes the vowels from a string; returns the last n
elements of a list; counts the words of a sentence; finds the difference of two lists; computes
the perimeter of a rectangle; converts hours to seconds; repeats a string n times; checks whether
a word starts with a capital letter
""".replace("\n", " ")
    .strip()
    .split("; ")
)
CODE = [
    "Write a Python function that {f}.",
    "Write a Python function that {f}, with a docstring and an example.",
    "Write a {g} function that {f}.",
    "Show me a Python program that {f} and explain how it works.",
    "Write a unit test in Python for a function that {f}.",
    "Write a Python class with a method that {f}.",
    "How do I write a function in {g} that {f}?",
    "Write a {g} program that {f}.",
]
EVAL_CODE = ["Please give me Python code that {f}. Only code, no explanation."]
STRUCTURED = [
    "Give me a JSON object that describes {t} with the fields name, description and tags.",
    "List ten words about {t} as a JSON array.",
    "Make a Markdown table about {t} with three columns: item, use, note.",
    "Write a YAML file that describes a person called {n} who works at the {p}.",
    "Write a CSV file with a header and five rows about {t}.",
    "Make a numbered list of seven steps to learn about {t}.",
    "Write a JSON list of five people with name, age and city.  Let the first be {n}.",
    "Write a Markdown document about {t} with three headings and bullet points.",
    "Write an HTML page with a title, a heading and a list about {t}.",
    "Write a shopping list for {n} as bullet points.  It must contain {o}.",
    "Write a weekly timetable for {n} at the {p} as a Markdown table.",
    "Write an XML document that describes {k} {o}.",
]
EVAL_STRUCTURED = ["Write a JSON object with the keys topic, summary and keywords about {t}."]
LANGUAGES = ["JavaScript", "Java", "C", "C++", "Go", "Ruby", "Rust", "TypeScript"]
MATHS = [
    "{n} has {a} {o} and buys {b} more. How many {o} does {n} have now? Think step by step.",
    "{n} had {c} {o} and gave {a} of them to {m}. How many are left?",
    "There are {a} boxes with {b} {o} each. How many {o} are there in total?",
    "A train travels {c} kilometres in {k} hours. What is its average speed?",
    "What is {a} + {b}? Explain each step.",
    "What is {c} - {a}? Explain each step.",
    "What is {a} times {k}? Show your work.",
    "{n} shares {c} {o} equally among {k} friends. How many does each friend get, and how many "
    "are left?",
    "A shirt costs {c} dollars and is {a} percent off. What is the new price?",
    "A rectangle is {a} cm long and {k} cm wide. What are its area and its perimeter?",
    "Solve for x: {k}x + {a} = {c}.",
    "What is {a} percent of {c}?",
    "{n} reads {k} pages a day. How many days does a book of {c} pages take?",
    "List the first {k} multiples of {b}.",
]
EVAL_MATHS = [
    "At the {p}, {n} sells {a} {o} at {k} dollars each. How much money does {n} earn?",
    "{n} is {a} years old and {m} is {b} years old. How old are they together?",
]
SENTENCES = [
    "{n} walked to the {p} early in the morning.",
    "The {p} was quiet, and only a few people were there.",
    "{m} had forgotten to bring the {o}.",
    "It had rained all night, and the streets were still wet.",
    "They talked about {t} for almost an hour.",
    "{n} bought {k} {o} and put them in a bag.",
    "The meeting at the {p} starts at {k} o'clock.",
    "Many visitors come to the {p} to learn about {t}.",
    "{m} thinks that {t} are more important than most people know.",
    "Nobody could explain why the {o} were missing.",
    "The old man at the {p} told them a story about {t}.",
    "In the evening {n} wrote a long letter to {m}.",
    "The price of the {o} has gone up by {a} percent.",
    "Please send the {o} to the {p} before Friday.",
    "The children were excited because they had never seen {t} before.",
    "After lunch {m} went home and fell asleep.",
]
EVAL_SENTENCES = [
    "{n} arrived at the {p} with {k} {o} in a small box.",
    "A sign on the door said that the {p} would be closed for {a} days.",
    "Nobody in the room knew much about {t}, so {m} began to explain.",
    "The {o} were sold out, but {n} found some at the {p}.",
    "{m} promised to return the {o} by the end of the week.",
    "Last year {a} people signed up for the course on {t}.",
    "The manager of the {p} thanked everyone for their patience.",
    "In spite of the bad weather, {n} and {m} enjoyed the day.",
]
REWRITING = [
    "Rewrite the following text in the past tense:\n\n{x}",
    "Correct the spelling and grammar of this text:\n\n{x}",
    "Rewrite this text so that it sounds more formal:\n\n{x}",
    "Repeat the following text, but replace {n} by {l}:\n\n{x}",
    "Copy this text and put each sentence on a line of its own:\n\n{x}",
    "Turn this text into a numbered list, one sentence a line:\n\n{x}",
    "Rewrite the text below in simpler words:\n\n{x}",
    "Summarise this text in one sentence, then repeat it:\n\n{x}",
    "Improve the style of this paragraph, but keep its meaning:\n\n{x}",
    "Rewrite this text as an email from {n} to {m}:\n\n{x}",
]
EVAL_REWRITING = ["Here is a text. Write it again, with a title above it:\n\n{x}"]


class Filler:
    """Fills templates from one split's words."""

    def __init__(self, rng: random.Random, evaluation: bool):
        self.rng = rng
        self.topics = EVAL_TOPICS if evaluation else TOPICS
        self.names = EVAL_NAMES if evaluation else NAMES
        self.places = EVAL_PLACES if evaluation else PLACES
        self.things = EVAL_THINGS if evaluation else THINGS
        self.functions = EVAL_FUNCTIONS if evaluation else FUNCTIONS
        self.sentences = EVAL_SENTENCES if evaluation else SENTENCES

    def __call__(self, template: str) -> str:
        pick = self.rng.choice
        name, other, third = self.rng.sample(self.names, 3)
        words = {
            "t": pick(self.topics),
            "n": name,
            "m": other,
            "l": third,
            "p": pick(self.places),
            "o": pick(self.things),
            "f": pick(self.functions),
            "g": pick(LANGUAGES),
            "a": self.rng.randint(5, 60),
            "b": self.rng.randint(3, 50),
            "c": self.rng.randint(70, 400),
            "k": self.rng.randint(3, 12),
        }
        if "{x}" in template:
            chosen = self.rng.sample(self.sentences, self.rng.randint(3, 5))
            words["x"] = " ".join(sentence.format(**words) for sentence in chosen)
        return template.format(**words)


TEMPLATES = {
    "chat": (CHAT, EVAL_CHAT),
    "prose": (PROSE, EVAL_PROSE),
    "code": (CODE, EVAL_CODE),
    "structured": (STRUCTURED, EVAL_STRUCTURED),
    "maths": (MATHS, EVAL_MATHS),
    "rewriting": (REWRITING, EVAL_REWRITING),
}


def make(evaluation: bool, per_category: int, seed: int, taken: set[str]) -> list[dict]:
    """`per_category` distinct prompts of each category, none of them in `taken`."""
    rng = random.Random(seed)
    fill = Filler(rng, evaluation)

    def draw(shared: list[str], own: list[str]) -> str:
        # half of the evaluation prompts come from templates that training never sees
        return fill(rng.choice(shared * len(own) + own * len(shared) if evaluation else shared))

    draws = {category: partial(draw, *templates) for category, templates in TEMPLATES.items()}
    return templated.rows(evaluation, draws, per_category, rng, taken)


if __name__ == "__main__":
    what = "write the shipped conversations' prompts"
    templated.write(what, make, "category", train=500, evaluation=20)
