"""Copying and adding: trained on short strings, tested on longer ones (after Kazemnejad et
al. 2023, "The Impact of Positional Encoding on Length Generalization in Transformers").

    python -m data.strings                                         # copy, up to 20 letters
    python -m data.strings --task=reversed_addition --longest=8    # and so on

A row is a question, `=`, its answer, and padding up to the length of the longest row. Only the
answer carries loss, and no end mark follows it. The length n is uniform in [1, longest]. The
letters, digits or bits are uniform as well, so short questions occur many times.

task                n                    a row
copy                letters              hello=hello
addition            digits per number    067+958=1025    the sum has n + 1 digits, so it may begin
                                                         with zeros
reversed_addition   digits per number    067+958=5201    the units come first, so that a carry is
                                                         known before it is needed

No row of another split is in train. Train may have all of the short questions, and val then has
hardly any, because it draws such a row again. A task with fewer than 2^20 questions, such as sums
of numbers of up to 3 digits, would leave too few to val. In such a task, a tenth of all questions,
chosen by a hash, is kept out of train. If a+b is kept out, b+a may still be in train.

splits   train and val; x1.5, x2, x3, x4: n is larger than in the previous split, and at most
         that many times `longest`
options  task; longest; train, val: rows; test: rows of each longer split; seed. In the paper, the
         sizes differ by task, and numbers have no leading zeros
"""
import string

import numpy as np

from data import command
from data.rows import write_rows

SYMBOLS = [*string.digits, *string.ascii_lowercase, "+", "=", "_"]  # _ pads
PAD = len(SYMBOLS) - 1
FEW_QUESTIONS = 2**20  # a task with fewer questions holds some of them out of train

def copy(text):
    return text, text

def addition(digits):
    n = len(digits) // 2
    a, b = digits[:n], digits[n:]
    total = int(a) + int(b)
    return f"{a}+{b}", str(total).zfill(n + 1)

def reversed_addition(digits):
    question, answer = addition(digits)
    return question, answer[::-1]

# for each task: the symbols to draw from, how many of them to draw per unit of n, and the function
# that makes a question and its answer from them
TASKS = {
    "copy": (string.ascii_lowercase, 1, copy),
    "addition": (string.digits, 2, addition),
    "reversed_addition": (string.digits, 2, reversed_addition),
}

def generate(rng, rows, task, shortest, longest):
    """Returns the tokens and the loss mask, both (rows, length of the longest possible row)."""
    alphabet, drawn, solve = TASKS[task]
    length = len("=".join(solve("0" * drawn * longest)))
    tokens = np.full((rows, length), PAD)
    mask = np.zeros((rows, length))
    counts = rng.integers(shortest, longest + 1, rows)
    letters = rng.integers(0, len(alphabet), (rows, drawn * longest))
    for i, n in enumerate(counts):
        text = "".join(alphabet[k] for k in letters[i, : drawn * n])
        question, answer = solve(text)
        start = len(question) + 1
        end = start + len(answer)
        tokens[i, :end] = [SYMBOLS.index(symbol) for symbol in f"{question}={answer}"]
        mask[i, start:end] = 1
    return tokens, mask

def prepare(folder, task: str = "copy", longest: int = 20, train: int = 100_000, val: int = 1000,
            test: int = 1000, seed: int = 0):
    if task not in TASKS:
        raise ValueError(f"task={task!r} is unknown; choose one of {', '.join(TASKS)}")
    if longest < 2:
        raise ValueError(f"longest={longest} must be at least 2, so that x1.5 is longer")
    ends = {"x1.5": longest * 3 // 2, "x2": 2 * longest, "x3": 3 * longest, "x4": 4 * longest}
    alphabet, drawn, _ = TASKS[task]
    questions = sum(len(alphabet) ** (drawn * n) for n in range(1, longest + 1))
    trained = dict(task=task, shortest=1, longest=longest)
    splits = dict(train=(train, trained), val=(val, trained))
    shortest = longest + 1
    for name, end in ends.items():
        splits[name] = test, dict(task=task, shortest=shortest, longest=end)
        shortest = end + 1
    write_rows(folder, SYMBOLS, seed, generate, hold_out=questions < FEW_QUESTIONS, **splits)

if __name__ == "__main__":
    command(prepare, __doc__)
