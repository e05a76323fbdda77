"""Echoes: Python's own source, in which spans come again, so that distant text is worth reading.

    python -m data.echo                               # rows of 128 bytes, and the last target
    python -m data.echo --length=1024 --train=5000    # as many bytes in longer rows

A row of train is a piece of the standard library (data/stdlib.py). For every 128 bytes, three spans
of 24 to 48 bytes are overwritten, each with what stands some distance before it. The distances are
drawn evenly in their logarithm, from the length of the span up to what fits into the row. A model
that finds the earlier copy predicts the echo nearly for free, and one that does not pays the price
of new text. All bytes of train carry loss.

The other splits ask how far back a model finds the copy, in text from files that train does not
hold. Each of their rows ends with 32 bytes from elsewhere. In `at256_1024`, where rows have 1024
bytes and the last target, the same 32 bytes also stand 256 bytes before. In `new_1024` they stand
only at the end, so its loss is the price of new text. Only the last 24 of them carry loss, because
the first ones have to tell that something is repeated. All splits have the same rows otherwise, and
the shorter rows are the ends of the longer ones, so all splits have the same targets.

splits   train; new_128, at64_128; new_1024, at64_1024, at128_1024, at256_1024, at512_1024,
         at900_1024
"""
import math

import numpy as np

from config import Mistake
from data import command
from data.shards import Writer, rng
from data.stdlib import SEPARATOR, files

WRITTEN_BY_TRAIN = True
UNIT = "byte"
SPAN = 32  # bytes of a test row that come again
SCORED = 24  # of these, the last ones
DISTANCES = {128: (64,), 1024: (64, 128, 256, 512, 900)}

def generate(random, text, length, echoes):
    """Returns a row of train, `length` tokens of the text with `echoes` echoes."""
    start = random.integers(len(text) - length)
    row = text[start : start + length].copy()
    for _ in range(echoes):
        span = random.integers(24, 49)
        distance = int(math.exp(random.uniform(math.log(span), math.log(length - span))))
        begin = random.integers(distance, length - span + 1)
        row[begin : begin + span] = row[begin - distance :][:span]
    return row

def pieces(random, text, rows, length):
    """Returns pieces of the text, (rows, length)."""
    starts = random.integers(len(text) - length, size=rows)
    return np.stack([text[start : start + length] for start in starts])

def prepare(
    folder,
    length: int = 128,  # targets per row of train
    echoes: int = 3,  # per 128 bytes of train
    train: int = 40_000,  # rows
    test: int = 250,  # rows of every other split
    seed: int = 0,  # other seeds draw other rows
):
    if length < 128:
        raise Mistake(f"length={length} must be at least 128, to hold echoes of 48 bytes")
    texts = {"train": [], "val": []}
    for split, tokens in files():
        texts[split].append(tokens)
    train_text, val_text = (np.concatenate(texts[split]) for split in ("train", "val"))
    with Writer(folder, vocab_size=257, tokenizer="bytes", separator=SEPARATOR) as writer:
        random = rng(seed, 0)
        for _ in range(train):
            row = generate(random, train_text, length + 1, echoes * length // 128)
            writer.write("train", row[None], np.ones((1, length + 1)))
        random = rng(seed, 1)
        rows = pieces(random, val_text, test, max(DISTANCES) + 1)
        spans = pieces(random, val_text, test, SPAN)
        rows[:, -SPAN:] = spans
        mask = np.zeros_like(rows)
        mask[:, -SCORED:] = 1
        for size, distances in DISTANCES.items():
            end = slice(-size - 1, None)
            writer.write(f"new_{size}", rows[:, end], mask[:, end])
            for distance in distances:
                echo = rows.copy()
                echo[:, -distance - SPAN : -distance] = spans
                writer.write(f"at{distance}_{size}", echo[:, end], mask[:, end])

def place(split, length, given):
    """Returns where a split stands in a picture. Only the longest rows have several distances. New
    text, which has no copy, is farthest to the right."""
    name, _, size = split.partition("_")
    if size != str(max(DISTANCES)):
        return dict(axis="")
    found = dict(kind=f"finding a copy in {size} bytes", axis="distance of the copy")
    if name == "new":
        return dict(found, at=2 * length, tick="no copy")
    return dict(found, at=int(name.removeprefix("at")))

if __name__ == "__main__":
    command(prepare, __doc__)
