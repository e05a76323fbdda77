"""Writes the synthetic tasks, whose rows are drawn at random, and keeps every row of another split
out of train.

    python -m data.flip_flop --length=64    # writes data/flip_flop@length=64
"""
import functools
from pathlib import Path

import numpy as np

from data.shards import Writer, rng

BLOCK = 1000  # rows drawn at a time
ATTEMPTS = 500  # redraws of a block before a task counts as too small


def write_rows(folder, symbols, seed, generate, hold_out=False, **splits):
    """Writes a synthetic task.

    Each split is given as name=(rows, options), and train comes first. generate(random, n,
    **options) draws n rows and returns their tokens and their loss mask, both (n, row_length). The
    same seed gives the same bytes, and a smaller train split is the start of a larger one.

    No row of another split is in train. Most tasks have so many rows that train holds only a few of
    them, so the other splits redraw each row that `is_in_train`. If a task has so few rows that
    train would hold nearly all, hold_out=True makes train redraw each row that `is_held_out`, so
    that some are left to the other splits.

    Raises ValueError if the disk is too small, or if train leaves no rows to another split.
    """
    size = 0
    for rows, options in splits.values():
        row_length = generate(rng(seed, 0), 1, **options)[0].size
        size += 3 * rows * row_length  # two bytes per token and one for its mask
    train_keys = np.zeros(0, dtype=np.uint64)
    with Writer(folder, size=size) as writer:
        for number, (split, (rows, options)) in enumerate(splits.items()):
            must_redraw = functools.partial(is_in_train, train_keys)
            if split == "train":
                must_redraw = is_held_out if hold_out else None
            keys = []
            for start in range(0, rows, BLOCK):
                random = rng(seed, number << 32 | start)
                draw = functools.partial(generate, random, **options)
                tokens, loss = draw(BLOCK)
                if must_redraw is not None and not redraw(tokens, loss, draw, must_redraw):
                    raise ValueError(f"{split}={rows}: hardly any row is left that is not in "
                                     "train; take fewer train rows or a larger task")
                missing = rows - start
                writer.write(split, tokens[:missing], loss[:missing])
                if split == "train":
                    keys.append(row_keys(tokens[:missing]))
            if keys:
                train_keys = np.sort(np.concatenate(keys))
        writer.finish(len(symbols), {"symbols": symbols})
    print(f"{Path(folder)}: " + ", ".join(f"{n:,} {split}" for split, (n, _) in splits.items()))

def redraw(tokens, loss, draw, must_redraw):
    """Replaces, in place, the rows whose keys must_redraw(keys) marks, by rows of draw(n). Returns
    whether none is left after ATTEMPTS."""
    marked = np.flatnonzero(must_redraw(row_keys(tokens)))
    for _ in range(ATTEMPTS - 1):
        if not len(marked):
            break
        tokens[marked], loss[marked] = draw(len(marked))
        marked = marked[must_redraw(row_keys(tokens[marked]))]
    return not len(marked)

def is_in_train(train_keys, keys):
    """Returns which keys, (n,), are among the sorted keys of train."""
    if not len(train_keys):
        return np.zeros(len(keys), dtype=bool)
    places = np.searchsorted(train_keys, keys)
    return train_keys[np.minimum(places, len(train_keys) - 1)] == keys

def is_held_out(keys):
    """Returns which keys, (n,), belong to the tenth of all rows that train never holds."""
    return keys % 10 == 0

def row_keys(tokens):
    """Returns a 64-bit hash of each row, uint64 (n,), of tokens (n, row_length)."""
    weights = rng(0, 0).integers(1, 2**64, 1 + tokens.shape[1], dtype=np.uint64)
    keys = tokens.astype(np.uint64) @ weights[1:] + weights[0]
    return keys ^ keys >> np.uint64(32)
