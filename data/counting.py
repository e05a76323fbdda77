"""Counting: the value of a variable after a program of sets, increments and passes (CoPE, 5.3).

    python -m data.counting                            # the paper's size, one variable
    python -m data.counting --variables=5              # harder; Table 3 has three and five
    python -m data.counting --steps=120 --length=192   # smaller

A row is a program such as `pass; a = 0 ; pass; a ++; a ++; print a 2`. The number of its operations
is uniform in [3, steps]. Each operation is drawn with the weights 1 for a set, 7 for an increment
and `w_pass` for a pass. A program increments and prints only the variables that it has set. An
increment past 10 is drawn again. A short program may not set any variable, and it is also drawn
again, with the same number of operations.

Tokens are the words between spaces. Only the last `length` tokens of a program are kept, and a
shorter program is padded at its end. Only the answer carries loss.

No row of another split is in train, because such a row is drawn again. Short programs coincide most
often, so the other splits have fewer of them than train. The best constant answer is 10 in the test
split (wrong for 81% of the rows) and in pass10 (85%), and 0 in pass100 (82%).

splits   train, val and test: w_pass = 50; pass100: w_pass = 100, so that what matters lies farther
         back; pass10: w_pass = 10
options  variables: 1 to 26; steps: the most operations; length: tokens per row; train, val, test
         (which also sets pass100 and pass10): rows; seed
"""
import string

import numpy as np

from data import command
from data.rows import write_rows

SYMBOLS = ["_", "pass;", "print", "=", ";", "++;", *map(str, range(11))]  # _ pads; then a, b, ...
PAD, PASS, PRINT, EQUALS, SEMICOLON, INCREMENT, ZERO = range(7)
A = ZERO + 11  # the id of the first variable
W_SET = 1
W_INCREMENT = 7
LARGEST = 10  # the largest value of a variable

def generate(rng, rows, variables, steps, length, w_pass):
    """Returns the tokens and the loss mask, both (rows, length)."""
    # the words of each operation: pass, then set a, set b, ..., then increment a, increment b, ...
    table = np.full((1 + 2 * variables, 4), PAD)
    table[0, 0] = PASS
    for i in range(variables):
        table[1 + i] = (A + i, EQUALS, ZERO, SEMICOLON)
        table[1 + variables + i, :2] = (A + i, INCREMENT)

    counts = rng.integers(3, steps + 1, rows)
    operations, values = programs(rng, counts, variables, w_pass)
    tokens = np.full((rows, length), PAD)
    mask = np.zeros((rows, length))
    for i, n in enumerate(counts):
        variable = rng.choice(np.flatnonzero(values[i] >= 0))
        words = table[operations[i, :n]].ravel()
        question = (PRINT, A + variable, ZERO + values[i, variable])
        words = np.append(words[words != PAD], question)[-length:]
        tokens[i, : len(words)] = words
        mask[i, len(words) - 1] = 1
    return tokens, mask

def programs(rng, counts, variables, w_pass):
    """Draws one program per row, of counts[row] operations. Returns the operations, (rows,
    max(counts)), as indices into the table of `generate`, and the final values of the variables,
    (rows, variables). A variable that was never set has the value -1. Each program sets at
    least one variable."""
    row = np.arange(len(counts))
    values = np.full((len(counts), variables), -1)
    operations = np.zeros((len(counts), counts.max()), dtype=np.int64)
    for t in range(counts.max()):
        # drawing again until the operation is allowed is the same as drawing with these weights
        is_set = values >= 0
        can_grow = is_set & (values < LARGEST)
        increment = W_INCREMENT * can_grow / np.maximum(is_set.sum(axis=1, keepdims=True), 1)
        passing = np.full((len(row), 1), w_pass)
        setting = np.full((len(row), variables), W_SET / variables)
        weights = np.concatenate((passing, setting, increment), axis=1)
        ends = weights.cumsum(axis=1)
        op = (rng.random((len(row), 1)) * ends[:, -1:] >= ends).sum(axis=1)
        op[t >= counts] = 0  # a program that has ended goes on with pass, which changes nothing
        operations[:, t] = op
        which = (op - 1) % variables
        sets = (op > 0) & (op <= variables)
        grows = op > variables
        values[row[sets], which[sets]] = 0
        values[row[grows], which[grows]] += 1
    empty = (values < 0).all(axis=1)
    if empty.any():
        redrawn, values[empty] = programs(rng, counts[empty], variables, w_pass)
        operations[empty, : redrawn.shape[1]] = redrawn
    return operations, values

def prepare(folder, variables: int = 1, steps: int = 512, length: int = 512, train: int = 10_000,
            val: int = 1000, test: int = 1000, seed: int = 0):
    if not 1 <= variables <= 26 or steps < 3:
        raise ValueError(f"variables={variables} must be 1 to 26, and steps={steps} 3 or more")
    how = dict(variables=variables, steps=steps, length=length)
    splits = dict(
        train=(train, dict(how, w_pass=50)),
        val=(val, dict(how, w_pass=50)),
        test=(test, dict(how, w_pass=50)),
        pass100=(test, dict(how, w_pass=100)),
        pass10=(test, dict(how, w_pass=10)),
    )
    symbols = SYMBOLS + list(string.ascii_lowercase[:variables])
    write_rows(folder, symbols, seed, generate, **splits)

if __name__ == "__main__":
    command(prepare, __doc__)
