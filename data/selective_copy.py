"""Selective copy: copy a sequence without its blanks (Gu and Dao 2023, "Mamba"; CoPE section 5.2).

    python -m data.selective_copy                                             # the paper's size
    python -m data.selective_copy --copy=32 --blanks=32 --train=64000         # smaller

A row has `copy` random letters at random places among the blanks, and then the same letters again
without the blanks. Only this copy carries loss, and nothing marks where it begins. No row of
another split is in train.

splits   train and val: `blanks` blanks; dense: half as many; sparse: twice as many
options  copy: letters per row; blanks; vocabulary: number of symbols, with the blank; train, val,
         dense, sparse: rows, whose numbers are our choice, because the paper gives none; seed
"""
import string

import numpy as np

from data import command
from data.rows import write_rows

BLANK = 0

def generate(rng, rows, copy, blanks, vocabulary):
    """Returns the tokens and the loss mask, both (rows, copy + blanks + copy)."""
    letters = rng.integers(1, vocabulary, (rows, copy))
    places = rng.random((rows, copy + blanks)).argsort(axis=1)[:, :copy]
    places = np.sort(places, axis=1)
    tokens = np.full((rows, copy + blanks + copy), BLANK)
    np.put_along_axis(tokens, places, letters, axis=1)
    tokens[:, copy + blanks :] = letters
    mask = np.zeros_like(tokens)
    mask[:, copy + blanks :] = 1
    return tokens, mask

def prepare(folder, copy: int = 256, blanks: int = 256, vocabulary: int = 16, train: int = 640_000,
            val: int = 1000, dense: int = 1000, sparse: int = 1000, seed: int = 0):
    if copy < 1 or blanks < 0 or not 2 <= vocabulary <= 27:
        raise ValueError(f"copy={copy}, blanks={blanks}, vocabulary={vocabulary} do not make a "
                         "task; use copy >= 1, blanks >= 0, and a vocabulary of 2 (the blank and "
                         "one letter) to 27")
    how = dict(copy=copy, vocabulary=vocabulary)
    symbols = ["."] + list(string.ascii_lowercase[: vocabulary - 1])
    write_rows(folder, symbols, seed, generate,
               train=(train, dict(how, blanks=blanks)),
               val=(val, dict(how, blanks=blanks)),
               dense=(dense, dict(how, blanks=blanks // 2)),
               sparse=(sparse, dict(how, blanks=2 * blanks)))

if __name__ == "__main__":
    command(prepare, __doc__)
