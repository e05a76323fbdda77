"""Writes the synthetic tasks, whose rows are drawn at random. No row of another split is in train.

    python -m data.flip_flop --length=64    # writes data/flip_flop@length=64
"""
import functools

import numpy as np

from config import Mistake
from data.shards import Writer, rng

BLOCK = 1000  # rows drawn at a time
ATTEMPTS = 500  # redraws of a block before a task counts as too small

def write_rows(folder, symbols, seed, generate, hold_out=False, **splits):
    """Writes a synthetic task.

    Each split is given as name=(rows, options), and train comes first. generate(random, n,
    **options) draws n rows and returns their tokens and their loss mask, both (n, row_length). The
    same seed gives the same bytes, and a smaller train split is the start of a larger one.

    The other splits redraw each row that is in train (`is_in_train`). That suffices for most tasks,
    because train holds only a few of their rows. If a task has so few rows that train would hold
    nearly all of them, hold_out=True makes train redraw a fixed tenth (`is_held_out`), which is
    left to the other splits. Raises ValueError if train leaves too few rows to another split.
    """
    train_keys = set()
    with Writer(folder) as writer:
        for number, (split, (rows, options)) in enumerate(splits.items()):
            if split != "train":
                must_redraw = functools.partial(is_in_train, train_keys)
            elif hold_out:
                must_redraw = is_held_out
            else:
                must_redraw = None
            for start in range(0, rows, BLOCK):
                random = rng(seed, (number << 32) + start)
                draw = functools.partial(generate, random, **options)
                tokens, loss = draw(BLOCK)
                if must_redraw is not None and not redraw(tokens, loss, draw, must_redraw):
                    raise Mistake(f"{split}={rows}: hardly any row is left that is not in "
                                     "train; take fewer train rows or a larger task")
                missing = rows - start
                writer.write(split, tokens[:missing], loss[:missing])
                if split == "train":
                    train_keys.update(row_keys(tokens[:missing]).tolist())
        writer.finish(len(symbols), {"symbols": symbols})

def redraw(tokens, loss, draw, must_redraw):
    """Replaces rows in place by new ones of draw(n) until must_redraw(keys) marks none of them.
    Returns whether ATTEMPTS draws were enough."""
    marked = np.flatnonzero(must_redraw(row_keys(tokens)))
    for _ in range(ATTEMPTS - 1):
        if not len(marked):
            break
        tokens[marked], loss[marked] = draw(len(marked))
        marked = marked[must_redraw(row_keys(tokens[marked]))]
    return not len(marked)

def is_in_train(train_keys, keys):
    """Returns whether each key, (n,), belongs to a row of train."""
    return np.array([key in train_keys for key in keys.tolist()])

def is_held_out(keys):
    """Returns whether each key, (n,), belongs to the tenth of all rows that train never holds."""
    return keys % 10 == 0

def row_keys(tokens):
    """Returns a 64-bit hash of each row, uint64 (n,), of tokens (n, row_length)."""
    weights = rng(0, 0).integers(1, 2**64, 1 + tokens.shape[1], dtype=np.uint64)
    keys = tokens.astype(np.uint64) @ weights[1:] + weights[0]
    return keys ^ keys >> np.uint64(32)
