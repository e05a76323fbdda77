"""Flip-Flop: remember one bit through noise (Liu et al. 2023, "Exposing Attention Glitches"; CoPE
section 5.1).

    python -m data.flip_flop                              # the paper's size
    python -m data.flip_flop --length=256 --train=32000   # smaller

A row is a list of (instruction, bit) pairs. w writes its bit. r reads the bit written last.
i is noise. All bits but those read are coin flips. The first instruction is w, the last is r. The
others are independent: i with probability p_i, w and r with (1 - p_i) / 2 each. Only the bits after
r carry loss. No row of another split is in train.

splits   train and val: p_i = 0.8; sparse: 0.98, so the last w is far back; dense: 0.1
options  length: tokens per row; train, val, sparse, dense: rows (by default 10,000 steps of 16
         fresh rows, and the test sets of Liu et al.); seed
"""
import numpy as np

from data import command
from data.rows import write_rows

DOWNLOAD = False
SYMBOLS = ["w", "r", "i", "0", "1"]
W, R, I, ZERO = range(4)

def generate(rng, rows, length, p_i):
    """-> tokens, mask, both (rows, length)."""
    pairs = length // 2
    u = rng.random((rows, pairs))
    instruction = np.where(u < p_i, I, np.where(u < (1 + p_i) / 2, W, R))
    instruction[:, 0], instruction[:, -1] = W, R
    bit = rng.integers(0, 2, (rows, pairs))
    writes = np.where(instruction == W, np.arange(pairs), 0)
    written = np.maximum.accumulate(writes, axis=1)  # where, most recently
    read = instruction == R
    bit = np.where(read, np.take_along_axis(bit, written, axis=1), bit)
    tokens = np.stack((instruction, ZERO + bit), axis=-1).reshape(rows, length)
    return tokens, np.stack((np.zeros_like(read), read), axis=-1).reshape(rows, length)

def prepare(folder, length: int = 512, train: int = 160_000, val: int = 1000, sparse: int = 100_000,
            dense: int = 3000, seed: int = 0):
    """Write the set into `folder`. ValueError: `length` does not hold two pairs."""
    if length < 4 or length % 2:
        raise ValueError(f"length={length} is no number of (instruction, bit) pairs; "
                         "make it even and at least 4")
    write_rows(folder, SYMBOLS, seed, generate,
               train=(train, dict(length=length, p_i=0.8)),
               val=(val, dict(length=length, p_i=0.8)),
               sparse=(sparse, dict(length=length, p_i=0.98)),
               dense=(dense, dict(length=length, p_i=0.1)))

if __name__ == "__main__":
    command(prepare, __doc__)
