"""The 28 prompts of the greedy parity fixture: prose, code, lists, tables and chats of 5 to 1,500 tokens."""

# ruff: noqa: E501

from __future__ import annotations

PROSE = (
    "The harbour wakes before the town does. By four in the morning the first boats have their lamps lit, and men in "
    "oilskins pass crates of ice from hand to hand without a word. A gull walks along the quay as if it owned it. When "
    "the tide turns, the engines start one after another, and the water between the piers folds into long grey "
    "wrinkles that are still moving when the last boat has gone.",
    "Photosynthesis turns light into chemical energy. Chlorophyll absorbs mostly red and blue light, which is why "
    "leaves look green. In the light reactions water is split, oxygen is released, and the energy is stored in ATP and "
    "NADPH; in the Calvin cycle those carriers pay for the fixation of carbon dioxide into sugar. Temperature, water "
    "and the concentration of carbon dioxide all limit how fast this can go.",
    "A good bridge is mostly an argument about where forces go. The arch pushes outward and needs strong abutments; "
    "the suspension cable pulls inward and needs deep anchors; the beam bends and needs depth. Engineers draw the path "
    "of the load before they draw anything else, and only then ask what the bridge should be made of.",
    "In 1854 a doctor in London marked every death from cholera on a street map. The marks clustered around a single "
    "water pump. He had the handle of the pump removed, and although the outbreak was already fading, the map changed "
    "how physicians thought about disease. It is remembered today as one of the first pieces of epidemiology.",
    "To make bread you need flour, water, salt and time. Mix three parts of water with five of flour, add a little "
    "salt and less yeast than you think, and leave the dough alone overnight. In the morning fold it, shape it, let it "
    "rise again, and bake it in the hottest oven you have. The crust should crackle as it cools.",
    "Rivers carry mountains to the sea, slowly. Rain loosens the rock, streams roll the stones, and the stones grind "
    "each other into sand. Where the current slackens the sand drops and builds islands, bars and deltas. A delta is "
    "therefore a record of all the weather that ever fell upstream.",
    "The orchestra tuned to the oboe, as orchestras do, because its pitch wavers less than the others'. Then the "
    "conductor raised both hands and nothing happened for a full two seconds, which is a very long time in a concert "
    "hall. The first note, when it came, was so soft that people leaned forward to find it.",
    "Economists distinguish between the price of a thing and its value. Water is cheap though nobody can live without "
    "it; diamonds are dear though everybody can. The paradox disappears once one asks about the next glass of water "
    "rather than about all water: what we pay follows the last unit, not the first.",
    "Le petit port se réveille avant la ville. Les pêcheurs rangent les filets, le café est déjà chaud, et la lumière "
    "glisse sur l'eau comme une main sur une table. Personne ne parle, mais tout le monde sait ce qu'il doit faire.",
    "Computers store numbers in binary because a switch with two positions is easy to build and hard to misread. Eight "
    "switches make a byte, which can hold 256 different values. Letters, colours and sounds are all written as such "
    "numbers, and a program is nothing but another list of them, read one at a time by a very patient machine.",
)

CODE = (
    'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number."""\n    a, b = 0, 1\n    for _ in range(n):\n'
    "        a, b = b, a + b\n    return a\n\n\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
    "        self.items.append(item)\n\n    def pop(self):\n        if not self.items:\n"
    '            raise IndexError("pop from an empty stack")\n        return self.items.pop()\n\n\n',
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n"
    '        printf("%d squared is %d\\n", i, i * i);\n    }\n    return 0;\n}\n\n',
    "SELECT customer.name, SUM(invoice.total) AS spent\nFROM customer\nJOIN invoice ON invoice.customer_id = customer.id\n"
    "WHERE invoice.date >= '2024-01-01'\nGROUP BY customer.name\nORDER BY spent DESC\nLIMIT 10;\n\n",
    "def quicksort(values):\n    if len(values) <= 1:\n        return values\n    pivot = values[len(values) // 2]\n"
    "    left = [v for v in values if v < pivot]\n    middle = [v for v in values if v == pivot]\n"
    "    right = [v for v in values if v > pivot]\n    return quicksort(left) + middle + quicksort(right)\n\n\n",
    "async function fetchUsers(url) {\n  const response = await fetch(url);\n  if (!response.ok) {\n"
    "    throw new Error(`Request failed: ${response.status}`);\n  }\n  return response.json();\n}\n\n",
)

QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about the sea in winter.",
    "Explain to a ten-year-old why the sky is blue.",
    "List five vegetables that grow well in cold weather, with one sentence about each.",
    "Translate into French: 'The library opens at nine and closes at six.'",
    "Summarize the following text in two sentences.\n\n" + PROSE[1] + "\n\n" + PROSE[3],
)


def _prose(start: int) -> str:
    """About 1,600 tokens of prose that begins with paragraph ``start``, numbered so that no two parts are equal."""
    paragraphs = [PROSE[(start + i * 3) % len(PROSE)] for i in range(2 * len(PROSE))]
    return "\n\n".join(p if i < len(PROSE) else f"Chapter {i}. {p}" for i, p in enumerate(paragraphs))


def _code(start: int) -> str:
    return "".join(f"# Part {i + 1}\n{CODE[(start + i) % len(CODE)]}" for i in range(24))


def _shopping_list() -> str:
    items = ("apples", "flour", "candles", "rope", "paper", "ink", "salt", "honey", "nails", "soap")
    lines = [f"{i + 1}. {(i * 7) % 23 + 1} {items[i % 10]} ({(i * 37) % 90 + 10} cents)" for i in range(150)]
    return "Things to buy before the expedition leaves:\n\n" + "\n".join(lines)


def _table() -> str:
    rows = [f"| {y} | {(y * 7919) % 1000} | {(y * 104729) % 9973 / 100:.2f} |" for y in range(1900, 2000)]
    return "| year | ships | rainfall (cm) |\n|---|---|---|\n" + "\n".join(rows)


TRUNCATED = (
    ("The weather in the mountains", 5),
    ("Once upon a time, in a village by the sea, there lived", 12),
    ("1, 1, 2, 3, 5, 8, 13, 21,", 20),
    (_code(0), 16),
    (_prose(0), 31),
    (_prose(1), 32),
    (_code(1), 33),
    (_prose(2), 63),
    (_shopping_list(), 64),
    (_prose(3), 65),
    (_table(), 127),
    (_code(2), 128),
    (_prose(4), 129),
    (_prose(8), 180),
    (_code(3), 255),
    (_prose(5), 256),
    (_shopping_list(), 257),
    (_prose(6), 400),
    (_table(), 511),
    (_code(4), 700),
    (_prose(7), 1100),
    (_prose(9), 1500),
)
"""(text, tokens at most) of the plain prompts; the chats (``QUESTIONS``) keep their natural length."""
