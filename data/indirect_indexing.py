"""Indirect Indexing: which letter is three places left of the z? (PoPE section 4, appendix B.1)

    python -m data.indirect_indexing                                    # the paper's size
    python -m data.indirect_indexing --letters=20 --shortest=8 --longest=12 --shift=4   # smaller

A row is `<string>,<letter>,<shift>,<target>` with one token per character, such as
`qeohzubk,z,-3,e`. It consists of a string of distinct letters, one of these letters, a signed
shift, and the letter that many places to the right (+) or left (-). Only the target carries
loss. Padding after it makes all rows equally long.

The paper draws shifts uniformly in [-15, 15]. It does not say what happens if a shift leaves the
string, and its examples do not help, because the first one is off by one and the third one repeats
a letter. Our shifts are also uniform, and we draw the letter from those that keep the target inside
the string.

No row of val or test is in train, because such a row is drawn again. With few letters, train has
most of the short strings, so val and test have fewer of them.

splits   train, val, test
options  letters: how many of [a-zA-Z] to draw from; shortest, longest: lengths of the string;
         shift: the largest one; train, val, test: rows; seed
"""
import string

import numpy as np

from data import command
from data.rows import write_rows

LETTERS = string.ascii_letters
SYMBOLS = [*LETTERS, *string.digits, ",", "+", "-", "_"]  # _ pads
DIGIT, COMMA, PLUS, MINUS, PAD = 52, 62, 63, 64, 65

def generate(rng, rows, letters, shortest, longest, shift):
    """Returns the tokens and the loss mask, both (rows, longest + 8)."""
    length = rng.integers(shortest, longest + 1, rows)
    text = rng.random((rows, letters)).argsort(axis=1)[:, :longest]  # distinct letters
    s = rng.integers(-shift, shift + 1, rows)
    at = np.maximum(0, -s) + rng.integers(0, length - abs(s))  # so that at + s is in the string
    row = np.arange(rows)
    digits = abs(s)[:, None] // [10, 1] % 10 + DIGIT
    comma = np.full(rows, COMMA)
    pad = np.full(rows, PAD)
    head = [comma, text[row, at], comma, np.where(s < 0, MINUS, PLUS)]
    target = text[row, at + s]
    short = np.stack(head + [digits[:, 1], comma, target, pad], axis=1)
    long = np.stack(head + [digits[:, 0], digits[:, 1], comma, target], axis=1)
    tokens = np.full((rows, longest + 8), PAD)
    mask = np.zeros((rows, longest + 8))
    tokens[:, :longest] = np.where(np.arange(longest) < length[:, None], text, PAD)
    tail = np.where(abs(s)[:, None] < 10, short, long)
    np.put_along_axis(tokens, length[:, None] + np.arange(8), tail, axis=1)
    mask[row, length + np.where(abs(s) < 10, 6, 7)] = 1
    return tokens, mask

def prepare(folder, letters: int = 52, shortest: int = 20, longest: int = 40, shift: int = 15,
            train: int = 1_000_000, val: int = 10_000, test: int = 10_000, seed: int = 0):
    if not 0 <= shift < shortest <= longest <= letters <= 52:
        raise ValueError(f"need 0 <= shift={shift} < shortest={shortest} <= longest={longest} <= "
                         f"letters={letters} <= 52, because letters do not repeat and every shift "
                         "must fit")
    how = dict(letters=letters, shortest=shortest, longest=longest, shift=shift)
    splits = dict(train=(train, how), val=(val, how), test=(test, how))
    write_rows(folder, SYMBOLS, seed, generate, **splits)

if __name__ == "__main__":
    command(prepare, __doc__)
