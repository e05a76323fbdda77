"""JSB Chorales: Bach's chorales for four voices, on a grid of 16th notes (PoPE section 4, B.1).

    python -m data.jsb                                                        # downloads 1.7 MB
    python -m data.jsb --source=/path/Jsb16thSeparated.json --out=data/jsb    # no network
    python -m data.jsb --length=256                                           # shorter rows

A token is one voice's pitch during a 16th note: a MIDI key from 21 to 108, or -1 for silence. As in
the paper, the four voices of a time step come first, soprano to bass, then time moves on. There are
229 pieces to train on, 76 for validation and 77 for testing: 220,912, 73,632 and 75,600 tokens.

A row is a start token, up to `length` tokens of one piece, which all carry loss, and pads, which
carry none. The paper does not say how the first token is predicted; here a pad starts a piece. Nor
does it say what happens to the six pieces longer than 2048 tokens; here they continue in a second
row, which starts with the last token of the first. So every token is a target exactly once.

splits   train, val, test
options  length: tokens per row, a multiple of 4, so that a position always has the same voice;
         source: the file
"""
import json
import math
from pathlib import Path

import numpy as np

from data import command
from data.shards import Writer
from data.text import download

DOWNLOAD = True
URL = ("https://raw.githubusercontent.com/czhuang/JSB-Chorales-dataset/"
       "9a7f733ddb4ed91f48da64ac7f0f621c34aadd4d/Jsb16thSeparated.json")
SHA256 = "79294cc374f9252e95ef4b703161524c1c53dc1f712c236f00f1c1f5d54af5a7"
LOWEST, HIGHEST = 21, 108  # of a piano's 88 keys
SYMBOLS = ["_", "-1", *map(str, range(LOWEST, HIGHEST + 1))]  # _ pads, -1 is silence
PAD, SILENCE, FIRST_KEY = range(3)
SPLITS = {"train": "train", "valid": "val", "test": "test"}  # their names in the file and ours

def serialise(piece):
    """Time steps of four pitches -> tokens, (4 * steps,). ValueError: anything else."""
    keys = {-1: SILENCE} | {key: FIRST_KEY + key - LOWEST for key in range(LOWEST, HIGHEST + 1)}
    for step in piece:
        if len(step) != 4 or not keys.keys() >= set(step):
            need = f"four keys in [{LOWEST}, {HIGHEST}] or -1"
            raise ValueError(f"a time step is {step}, not {need}; take Jsb16thSeparated.json")
    return np.array([keys[key] for step in piece for key in step])

def rows(tokens, length):
    """A piece (n,) -> tokens, mask, both (ceil(n / length), length + 1)."""
    count = math.ceil(len(tokens) / length)
    padded = np.full(1 + count * length, PAD)
    padded[1 : 1 + len(tokens)] = tokens
    table = np.stack([padded[i * length : (i + 1) * length + 1] for i in range(count)])
    mask = table != PAD
    mask[:, 0] = False  # the start: a pad, or a target of the row before
    return table, mask

def prepare(folder, length: int = 2048, source: str = None):
    """Write the set into `folder`. ValueError: the length, the file or the download is bad."""
    if length < 4 or length % 4:
        raise ValueError(f"length={length} is not a multiple of 4, the voices of a time step")
    with Writer(folder, source="Jsb16thSeparated.json") as writer:
        path = Path(source) if source else download(URL, writer.part, SHA256)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            pieces = {ours: content[theirs] for theirs, ours in SPLITS.items()}
        except (ValueError, LookupError, TypeError) as error:
            fault = f"{path} holds no chorales ({type(error).__name__})"
            raise ValueError(f"{fault}; give Jsb16thSeparated.json") from None
        for split, part in pieces.items():
            for piece in part:
                writer.write(split, *rows(serialise(piece), length))
        writer.finish(len(SYMBOLS), {"symbols": SYMBOLS}, separator=PAD)
    sizes = ", ".join(f"{len(part)} {split}" for split, part in pieces.items())
    print(f"{folder}: {sizes} pieces")

if __name__ == "__main__":
    command(prepare, __doc__)
