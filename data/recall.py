"""Associative recall: which value followed this key, however far back? (MQAR, arXiv:2312.04927)

    python -m data.recall                                                     # our default size
    python -m data.recall --length=48 --pairs=4 --queries=4 --train=64000     # smaller

A row has `length` tokens of pairs and fillers, and then the queries, such as
`. e 7 ; ; a 0 , a 0 e 7`. A pair is a key (a letter) and its value (a digit), and a filler is a
punctuation mark. A query repeats a key of the row and then gives its value, and only this value
carries loss. No two pairs have the same key, and no two queries ask for the same one. Values,
fillers and the places of the pairs are uniform. With one pair and one query, this is a needle in a
haystack. No row of another split is in train.

The paper's setup differs: it puts the pairs side by side, and it draws the distances of the queries
from a power law.

splits   train and val; x2, x4, x8, x16: so many times the length with the same number of pairs, so
         only the distances grow
options  length: tokens before the queries; pairs, queries: per row; filler: how many of the 16
         punctuation marks to use; train, val: rows; test: rows of each longer split; seed
"""
import string

import numpy as np

from data import command
from data.rows import write_rows

SYMBOLS = [*string.ascii_lowercase, *string.digits, *".,;:!?-+*/=<>@#%"]
KEYS = 26  # the numbers of symbols of each kind, in the order of their ids
VALUES = 10
FILLERS = 16

def generate(rng, rows, length, pairs, queries, filler):
    """Returns the tokens and the loss mask, both (rows, length + 2 * queries)."""
    keys = rng.random((rows, KEYS)).argsort(axis=1)[:, :pairs]
    values = KEYS + rng.integers(0, VALUES, (rows, pairs))
    # places are drawn as if a pair were one token, so each is then moved by the pairs before it
    places = rng.random((rows, length - pairs)).argsort(axis=1)[:, :pairs]
    places = np.sort(places, axis=1) + np.arange(pairs)
    tokens = KEYS + VALUES + rng.integers(0, filler, (rows, length + 2 * queries))
    np.put_along_axis(tokens, places, keys, axis=1)
    np.put_along_axis(tokens, places + 1, values, axis=1)
    queried = rng.random((rows, pairs)).argsort(axis=1)[:, :queries]
    tokens[:, length::2] = np.take_along_axis(keys, queried, axis=1)
    tokens[:, length + 1 :: 2] = np.take_along_axis(values, queried, axis=1)
    mask = np.zeros_like(tokens)
    mask[:, length + 1 :: 2] = 1
    return tokens, mask

def prepare(folder, length: int = 256, pairs: int = 16, queries: int = 16, filler: int = 8,
            train: int = 100_000, val: int = 1000, test: int = 1000, seed: int = 0):
    if not 1 <= queries <= pairs <= min(KEYS, length // 2):
        raise ValueError(f"need 1 <= queries={queries} <= pairs={pairs} <= {KEYS}, and a "
                         f"length={length} that holds the pairs")
    if not 1 <= filler <= FILLERS:
        raise ValueError(f"filler={filler} is out of range; use 1 to {FILLERS} kinds of fillers")
    how = dict(pairs=pairs, queries=queries, filler=filler)
    splits = dict(train=(train, dict(how, length=length)), val=(val, dict(how, length=length)))
    for times in (2, 4, 8, 16):
        splits[f"x{times}"] = test, dict(how, length=times * length)
    write_rows(folder, SYMBOLS, seed, generate, **splits)

if __name__ == "__main__":
    command(prepare, __doc__)
