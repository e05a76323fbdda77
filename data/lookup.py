"""Lookup: the same rows of keys and values, asked by content or by position.

    python -m data.lookup                             # our default size
    python -m data.lookup --items=4 --train=16000     # smaller

A row is `items` items, then questions and their answers, such as `d3 m0 a2 k1 a? 2 4< 0`. An item
is one token that holds a key (a letter) and its value (a digit). `a?` asks for the value of key a,
wherever it is. `4<` asks for the value of the item that is four tokens back, whatever it is. Only
the answers carry loss. Both kinds of questions ask for items at the same places, so a row that asks
by content and a row that asks by position differ only in the questions.

Because an item is one token, an answer takes one step of attention, either to a key or to a
distance. data/recall.py needs both, because a value there is the token after its key. Keys are
distinct within a row, values are uniform, and no item is asked for twice. A constant answer is
wrong for three questions in four. No row of another split is in train.

splits   train: each question is of either kind with probability 1/2; content, position: rows of
         the same length with questions of one kind; content_x2, position_x2, content_x3 and
         position_x3: two and three times as many items, of which only the last `items` are asked
         for, because no question in train reaches farther back
options  items, questions: per row; train: rows; test: rows of every other split; seed
"""
import string

import numpy as np

from data import command
from data.rows import write_rows

KEYS = string.ascii_lowercase
VALUES = string.digits[:4]
LONGEST = 3  # the most items in a row, in multiples of `items`
ITEMS = [key + value for key in KEYS for value in VALUES]
BY_CONTENT = [key + "?" for key in KEYS]
ANSWER = len(ITEMS)  # the first id of an answer; items begin at 0
CONTENT = ANSWER + len(VALUES)
POSITION = CONTENT + len(KEYS)

def generate(rng, rows, items, asked, questions, by_position):
    """Returns the tokens and the loss mask, both (rows, items + 2 * questions). The questions ask
    for some of the last `asked` items, each by position with probability `by_position`."""
    keys = rng.random((rows, len(KEYS))).argsort(axis=1)[:, :items]
    values = rng.integers(0, len(VALUES), (rows, items))
    places = items - asked + rng.random((rows, asked)).argsort(axis=1)[:, :questions]
    distances = items + 2 * np.arange(questions) - places  # tokens from a question to its item
    asks_position = rng.random((rows, questions)) < by_position
    content = CONTENT + np.take_along_axis(keys, places, axis=1)
    position = POSITION + distances - 1

    tokens = np.empty((rows, items + 2 * questions), dtype=np.int64)
    tokens[:, :items] = keys * len(VALUES) + values
    tokens[:, items::2] = np.where(asks_position, position, content)
    tokens[:, items + 1 :: 2] = ANSWER + np.take_along_axis(values, places, axis=1)
    mask = np.zeros_like(tokens)
    mask[:, items + 1 :: 2] = 1
    return tokens, mask

def prepare(folder, items: int = 8, questions: int = 4, train: int = 100_000, test: int = 1000,
            seed: int = 0):
    if not 1 <= questions <= items <= len(KEYS) // LONGEST:
        raise ValueError(f"need 1 <= questions={questions} <= items={items} <= "
                         f"{len(KEYS) // LONGEST}, because a row has up to {LONGEST} * items keys")
    known = dict(asked=items, questions=questions)
    splits = dict(train=(train, dict(known, items=items, by_position=0.5)))
    for times in range(1, LONGEST + 1):
        suffix = "" if times == 1 else f"_x{times}"
        longer = dict(known, items=times * items)
        splits[f"content{suffix}"] = test, dict(longer, by_position=0.0)
        splits[f"position{suffix}"] = test, dict(longer, by_position=1.0)
    furthest = items + 2 * (questions - 1)
    by_position = [f"{n}<" for n in range(1, furthest + 1)]
    symbols = ITEMS + list(VALUES) + BY_CONTENT + by_position
    write_rows(folder, symbols, seed, generate, **splits)

if __name__ == "__main__":
    command(prepare, __doc__)
