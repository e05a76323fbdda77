"""Writes the synthetic tasks, whose rows are drawn at random. The other splits contain no row of
train.

    python -m data.flip_flop --length=64    # writes data/flip_flop@length=64
"""
import numpy as np

from config import Mistake
from data.shards import Writer, rng

BLOCK = 1000  # rows drawn at a time
ATTEMPTS = 500  # draws of a block before a task counts as too small

def write_rows(folder, symbols, seed, generate, hold_out=False, **splits):
    """Writes a synthetic task.

    Each split is given as name=(rows, options), and train comes first. generate(random, n,
    **options) draws n rows and returns their tokens and their loss mask, both (n, row_length). The
    same seed gives the same bytes, and a smaller train split is the start of a larger one.

    A row of another split that is also in train is drawn again. That suffices for most tasks,
    because train holds only a few of their rows. If a task has so few rows that train would hold
    nearly all of them, hold_out=True keeps a fixed tenth of all rows, chosen by their hash, out of
    train. Raises Mistake if train leaves too few rows to another split.
    """
    in_train = set()  # the keys of its rows

    def is_refused(split, key):
        if split == "train":
            return hold_out and key % 10 == 0
        return key in in_train

    with Writer(folder, len(symbols), {"symbols": symbols}) as writer:
        for number, (split, (rows, options)) in enumerate(splits.items()):
            for start in range(0, rows, BLOCK):
                random = rng(seed, (number << 32) + start)
                tokens, loss = generate(random, BLOCK, **options)
                for _ in range(ATTEMPTS):
                    keys = row_keys(tokens)
                    again = [i for i, key in enumerate(keys) if is_refused(split, key)]
                    if not again:
                        break
                    tokens[again], loss[again] = generate(random, len(again), **options)
                else:
                    raise Mistake(f"{split}={rows}: hardly any row is left that is not in train; "
                                  "take fewer train rows or a larger task")
                missing = rows - start
                writer.write(split, tokens[:missing], loss[:missing])
                if split == "train":
                    in_train.update(keys[:missing])

def row_keys(tokens):
    """Returns a 64-bit hash of each row of tokens (n, row_length), as a list of n integers."""
    weights = rng(0, 0).integers(1, 2**64, 1 + tokens.shape[1], dtype=np.uint64)
    keys = tokens.astype(np.uint64) @ weights[1:] + weights[0]
    return (keys ^ keys >> np.uint64(32)).tolist()
