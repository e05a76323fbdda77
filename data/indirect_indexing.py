"""Indirect Indexing: which letter is three places left of the z? (PoPE section 4, appendix B.1)

    python -m data.indirect_indexing                                    # the paper's size
    python -m data.indirect_indexing --letters=20 --shortest=8 --longest=12 --shift=4   # smaller

A row is `<string>,<letter>,<shift>,<target>`, a token per character, such as `qeohzubk,z,-3,e`: a
string of distinct letters, one of them, a signed shift, and the letter that far to the right (+) or
left (-). Only the target carries loss. Pads after it make the rows equally long. The paper draws
shifts uniformly in [-15, 15] and does not say what happens if they leave the string (its first
example is off by one, its third repeats a letter). Here too the shift is uniform, and the letter is
one from which it stays inside.

No row of val or test is in train: such a row is drawn again. With few letters, train holds most
short strings, so val and test have somewhat fewer of them.

splits   train, val, test
options  letters: of [a-zA-Z], to draw from; shortest, longest: length of the string; shift: its
         maximum; train, val, test: rows; seed
"""
import string

import numpy as np

from data import command
from data.rows import write_rows

DOWNLOAD = False
LETTERS = string.ascii_letters
SYMBOLS = [*LETTERS, *string.digits, ",", "+", "-", "_"]  # _ pads
DIGIT, COMMA, PLUS, MINUS, PAD = 52, 62, 63, 64, 65

def generate(rng, rows, letters, shortest, longest, shift):
    """-> tokens, mask, both (rows, longest + 8)."""
    length = rng.integers(shortest, longest + 1, rows)
    text = rng.random((rows, letters)).argsort(axis=1)[:, :longest]  # distinct letters
    s = rng.integers(-shift, shift + 1, rows)
    at = np.maximum(0, -s) + rng.integers(0, length - abs(s))  # from here the shift stays inside
    row = np.arange(rows)
    digits = abs(s)[:, None] // [10, 1] % 10 + DIGIT
    comma, pad = np.full(rows, COMMA), np.full(rows, PAD)
    head = [comma, text[row, at], comma, np.where(s < 0, MINUS, PLUS)]
    target = text[row, at + s]
    short = np.stack(head + [digits[:, 1], comma, target, pad], axis=1)
    long = np.stack(head + [digits[:, 0], digits[:, 1], comma, target], axis=1)
    tokens, mask = np.full((rows, longest + 8), PAD), np.zeros((rows, longest + 8))
    tokens[:, :longest] = np.where(np.arange(longest) < length[:, None], text, PAD)
    tail = np.where(abs(s)[:, None] < 10, short, long)
    np.put_along_axis(tokens, length[:, None] + np.arange(8), tail, axis=1)
    mask[row, length + np.where(abs(s) < 10, 6, 7)] = 1
    return tokens, mask

def prepare(folder, letters: int = 52, shortest: int = 20, longest: int = 40, shift: int = 15,
            train: int = 1_000_000, val: int = 10_000, test: int = 10_000, seed: int = 0):
    """Write the set into `folder`. ValueError: sizes that do not fit each other."""
    if not 0 <= shift < shortest <= longest <= letters <= 52:
        raise ValueError(f"need 0 <= shift={shift} < shortest={shortest} <= longest={longest} <= "
                         f"letters={letters} <= 52: letters do not repeat, every shift must fit")
    how = dict(letters=letters, shortest=shortest, longest=longest, shift=shift)
    splits = dict(train=(train, how), val=(val, how), test=(test, how))
    write_rows(folder, SYMBOLS, seed, generate, **splits)

if __name__ == "__main__":
    command(prepare, __doc__)
