"""Associative recall: which value was next to this key, however far back? (MQAR, arXiv:2312.04927)

    python -m data.recall                                                     # our default size
    python -m data.recall --length=48 --pairs=4 --queries=4 --train=64000     # smaller

A row is `length` tokens of pairs and fillers, then queries, such as `. e 7 ; ; a 0 , a 0 e 7`. A
pair is a key (a letter) and its value (a digit). Fillers are punctuation. A query repeats a key of
the row, then gives its value; only the value carries loss. Keys are distinct, and so are the
queried ones. Values and fillers are uniform, and so are the places of the pairs. A query's distance
runs from its key back to the same key in the pair. One pair and one query make a needle in a
haystack. Other setups vary: the paper puts pairs side by side and spaces the queries by a power
law. No row of another split is in train.

splits   train and val; x2, x4, x8, x16: that many times the length, the same number of pairs, so
         only distances grow
options  length: tokens before the queries; pairs, queries: per row; filler: kinds of fillers;
         train, val: rows; test: rows of each longer split; seed
"""
import string

import numpy as np

from data import command
from data.rows import write_rows

DOWNLOAD = False
SYMBOLS = [*string.ascii_lowercase, *string.digits, *".,;:!?-+*/=<>@#%"]
KEYS, VALUES, FILLERS = 26, 10, 16  # how many there are, in the order of their ids

def generate(rng, rows, length, pairs, queries, filler):
    """-> tokens, mask, both (rows, length + 2 * queries)."""
    keys = rng.random((rows, KEYS)).argsort(axis=1)[:, :pairs]
    values = KEYS + rng.integers(0, VALUES, (rows, pairs))
    # draw places as if a pair were one token, then move each pair by the number of pairs before it
    places = rng.random((rows, length - pairs)).argsort(axis=1)[:, :pairs]
    places = np.sort(places, axis=1) + np.arange(pairs)
    tokens = KEYS + VALUES + rng.integers(0, filler, (rows, length + 2 * queries))
    np.put_along_axis(tokens, places, keys, axis=1)
    np.put_along_axis(tokens, places + 1, values, axis=1)
    asked = rng.random((rows, pairs)).argsort(axis=1)[:, :queries]
    tokens[:, length::2] = np.take_along_axis(keys, asked, axis=1)
    tokens[:, length + 1 :: 2] = np.take_along_axis(values, asked, axis=1)
    mask = np.zeros_like(tokens)
    mask[:, length + 1 :: 2] = 1
    return tokens, mask

def prepare(folder, length: int = 256, pairs: int = 16, queries: int = 16, filler: int = 8,
            train: int = 100_000, val: int = 1000, test: int = 1000, seed: int = 0):
    """Write the set into `folder`. ValueError: sizes that do not fit each other."""
    if not 1 <= queries <= pairs <= min(KEYS, length // 2):
        raise ValueError(f"need 1 <= queries={queries} <= pairs={pairs} <= {KEYS}, "
                         f"and length={length} to hold the pairs")
    if not 1 <= filler <= FILLERS:
        raise ValueError(f"filler={filler} is no number of kinds of fillers; use 1 to {FILLERS}")
    how = dict(pairs=pairs, queries=queries, filler=filler)
    splits = dict(train=(train, how | dict(length=length)), val=(val, how | dict(length=length)))
    for times in (2, 4, 8, 16):
        splits[f"x{times}"] = test, how | dict(length=times * length)
    write_rows(folder, SYMBOLS, seed, generate, **splits)

if __name__ == "__main__":
    command(prepare, __doc__)
