"""Writes the synthetic tasks: rows that a generator draws. No row of another split is in train.

    python -m data.flip_flop --length=64    # writes data/flip_flop@length=64
"""
from pathlib import Path

import numpy as np

from data.shards import Writer, rng


def write_rows(folder, symbols, seed, generate, hold_out=False, **splits):
    """Write a synthetic task.

    Each split, name=(rows, options), gets the tokens and the loss mask, both (rows, row_length), of
    generate(rng, rows, **options). Train comes first. Every row of another split that is also in
    train is drawn again. hold_out: keep a tenth of all rows, chosen by a hash, out of train, which
    would draw nearly all. The same seed gives the same bytes, and a smaller train split is the
    start of a larger one. ValueError: the disk is too small, or train leaves no rows for another
    split.
    """
    size = sum(3 * rows * generate(rng(seed, 0), 1, **how)[0].size for rows, how in splits.values())
    known = np.zeros(1, dtype=np.uint64)  # the keys of train's rows, sorted
    with Writer(folder, size=size) as writer:
        for i, (split, (rows, options)) in enumerate(splits.items()):
            written = [known]
            for start in range(0, rows, 1000):
                random = rng(seed, i << 32 | start)
                tokens, loss = generate(random, 1000, **options)
                again = np.arange(1000)  # the rows to check, then those to redraw
                for _ in range(500):
                    keys = row_keys(tokens[again])
                    if split == "train":
                        again = again[keys % 10 == 0] if hold_out else again[:0]
                    else:
                        again = again[known[np.searchsorted(known[:-1], keys)] == keys]
                    if not len(again):
                        break
                    tokens[again], loss[again] = generate(random, len(again), **options)
                else:
                    raise ValueError(f"{split}={rows}: hardly any row is left that is not in "
                                     "train; take fewer train rows or a larger task")
                tokens, loss = tokens[: rows - start], loss[: rows - start]
                written.append(row_keys(tokens))
                writer.write(split, tokens, loss)
            if split == "train":
                known = np.sort(np.concatenate(written))
        writer.finish(len(symbols), {"symbols": symbols})
    print(f"{Path(folder)}: " + ", ".join(f"{n:,} {split}" for split, (n, _) in splits.items()))

def row_keys(tokens):
    """A 64-bit hash of each row: tokens (rows, row_length) -> uint64 (rows,)."""
    weights = rng(0, 0).integers(1, 2**64, 1 + tokens.shape[1], dtype=np.uint64)
    keys = tokens.astype(np.uint64) @ weights[1:] + weights[0]
    return keys ^ keys >> np.uint64(32)
