"""Copy, reverse, add, parity: trained on short strings, tested on longer ones (after Kazemnejad et
al. 2023, "The Impact of Positional Encoding on Length Generalization in Transformers").

    python -m data.strings                                         # copy, up to 20 letters
    python -m data.strings --task=reversed_addition --longest=8    # and so on

A row is a question, `=`, its answer, and pads up to the longest row. Only the answer carries loss.
There is no end mark. n is uniform in [1, longest]. Letters, digits and bits are uniform too. So
short questions repeat.

task                n                    a row
copy                letters              hello=hello
reverse             letters              hello=olleh
addition            digits per number    067+958=1025    leading zeros: the sum has n + 1 digits
reversed_addition   the same             067+958=5201    units first: a carry comes before its use
parity              bits                 10110=1         1 if the number of ones is odd

No row of another split is in train. val redraws such a row, so it has hardly any short questions:
train may hold all of those. With fewer than 2^20 questions, such as the sums of up to 3 digits,
train would hold too many. Then a tenth of them, chosen by a hash, is held out of train, and val
draws from these. If a+b is held out, b+a may still be in train.

splits   train and val; x1.5, x2, x3, x4: n up to that many times `longest`, and above the
         previous split's
options  task; longest; train, val: rows; test: rows of each longer split; seed
         (the paper's sizes differ by task, and its sums have no leading zeros)
"""
import string

import numpy as np

from data import command
from data.rows import write_rows

DOWNLOAD = False
SYMBOLS = [*string.digits, *string.ascii_lowercase, "+", "=", "_"]  # _ pads
PAD = len(SYMBOLS) - 1

def copy(text):
    return text, text

def reverse(text):
    return text, text[::-1]

def addition(digits):
    n = len(digits) // 2
    a, b = digits[:n], digits[n:]
    return f"{a}+{b}", str(int(a) + int(b)).zfill(n + 1)

def reversed_addition(digits):
    question, answer = addition(digits)
    return question, answer[::-1]

def parity(bits):
    return bits, str(bits.count("1") % 2)

# task: the symbols to draw from, how many for n = 1, and what turns them into (question, answer)
TASKS = {"copy": (string.ascii_lowercase, 1, copy), "reverse": (string.ascii_lowercase, 1, reverse),
         "addition": (string.digits, 2, addition),
         "reversed_addition": (string.digits, 2, reversed_addition),
         "parity": ("01", 1, parity)}

def generate(rng, rows, task, shortest, longest):
    """-> tokens, mask, both (rows, the longest row)."""
    alphabet, drawn, solve = TASKS[task]
    length = len("=".join(solve("0" * drawn * longest)))
    tokens, mask = np.full((rows, length), PAD), np.zeros((rows, length))
    counts = rng.integers(shortest, longest + 1, rows)
    letters = rng.integers(0, len(alphabet), (rows, drawn * longest))
    for i, n in enumerate(counts):
        question, answer = solve("".join(alphabet[k] for k in letters[i, : drawn * n]))
        start, end = len(question) + 1, len(question) + 1 + len(answer)
        tokens[i, :end] = [SYMBOLS.index(symbol) for symbol in f"{question}={answer}"]
        mask[i, start:end] = 1
    return tokens, mask

def prepare(folder, task: str = "copy", longest: int = 20, train: int = 100_000, val: int = 1000,
            test: int = 1000, seed: int = 0):
    """Write the set into `folder`. ValueError: an unknown task, or too short for x1.5."""
    if task not in TASKS:
        raise ValueError(f"task={task!r} is unknown; choose one of {', '.join(TASKS)}")
    if longest < 2:
        raise ValueError(f"longest={longest} is too short for x1.5; use 2 or more")
    ends = {"x1.5": longest * 3 // 2, "x2": 2 * longest, "x3": 3 * longest, "x4": 4 * longest}
    alphabet, drawn, _ = TASKS[task]
    questions = sum(len(alphabet) ** (drawn * n) for n in range(1, longest + 1))
    known = dict(task=task, shortest=1, longest=longest)
    splits = dict(train=(train, known), val=(val, known))
    before = longest
    for name, end in ends.items():
        splits[name] = test, dict(task=task, shortest=before + 1, longest=end)
        before = end
    write_rows(folder, SYMBOLS, seed, generate, hold_out=questions < 2**20, **splits)

if __name__ == "__main__":
    command(prepare, __doc__)
