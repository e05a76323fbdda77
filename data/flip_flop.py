"""Flip-Flop: remember one bit through noise (Liu et al. 2023, "Exposing Attention Glitches"; CoPE
section 5.1).

    python -m data.flip_flop                              # the paper's size
    python -m data.flip_flop --length=256 --train=32000   # smaller

A row is a list of pairs, each an instruction and a bit. The instruction w writes its bit, r reads
the bit that was written last, and i is noise. All bits that are not read are coin flips. The first
instruction is w and the last is r. The others are independent: i has the probability p_i, and w and
r have (1 - p_i) / 2 each. Only the bits after r carry loss. No row of another split is in train.

splits   train and val: p_i = 0.8; sparse: 0.98, so that the last w is far back; dense: 0.1
options  length: tokens per row; train, val, sparse, dense: rows (the defaults are 10,000 steps of
         16 new rows, and the test sets of Liu et al.); seed
"""
import numpy as np

from data import command
from data.rows import write_rows

SYMBOLS = ["w", "r", "i", "0", "1"]
W, R, I, ZERO = range(4)

def generate(rng, rows, length, p_i):
    """Returns the tokens and the mask, both (rows, length)."""
    pairs = length // 2
    u = rng.random((rows, pairs))
    instruction = np.where(u < p_i, I, np.where(u < (1 + p_i) / 2, W, R))
    instruction[:, 0] = W
    instruction[:, -1] = R
    bit = rng.integers(0, 2, (rows, pairs))
    places_of_w = np.where(instruction == W, np.arange(pairs), 0)
    last_w = np.maximum.accumulate(places_of_w, axis=1)
    is_read = instruction == R
    bit = np.where(is_read, np.take_along_axis(bit, last_w, axis=1), bit)
    tokens = np.stack((instruction, ZERO + bit), axis=-1)  # (rows, pairs, 2)
    mask = np.stack((np.zeros_like(is_read), is_read), axis=-1)
    return tokens.reshape(rows, length), mask.reshape(rows, length)

def prepare(folder, length: int = 512, train: int = 160_000, val: int = 1000, sparse: int = 100_000,
            dense: int = 3000, seed: int = 0):
    if length < 4 or length % 2:
        raise ValueError(f"length={length} does not hold pairs of an instruction and a bit; make "
                         "it even, and 4 or more")
    write_rows(folder, SYMBOLS, seed, generate,
               train=(train, dict(length=length, p_i=0.8)),
               val=(val, dict(length=length, p_i=0.8)),
               sparse=(sparse, dict(length=length, p_i=0.98)),
               dense=(dense, dict(length=length, p_i=0.1)))

if __name__ == "__main__":
    command(prepare, __doc__)
