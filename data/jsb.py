"""JSB Chorales: Bach's chorales for four voices, on a grid of 16th notes (PoPE section 4, B.1).

    python -m data.jsb                                                        # downloads 1.7 MB
    python -m data.jsb --source=/path/Jsb16thSeparated.json    # no network
    python -m data.jsb --length=256                                           # shorter rows

A token is the pitch of one voice during a 16th note: a MIDI key from 21 to 108, or -1 for silence.
As in the paper, the four voices of a time step follow each other, soprano to bass, before the next
time step begins. There are 229 pieces for training, 76 for validation and 77 for testing, with
220,912, 73,632 and 75,600 tokens.

A row is a start token, up to `length` tokens of one piece, and padding. Only the tokens of the
piece carry loss. The paper does not say how the first token is predicted, so we let a padding token
start a piece. Nor does the paper say what happens to the six pieces of more than 2048 tokens. Here
they continue in a second row, which starts with the last token of the first row, so that every
token is a target exactly once.

splits   train, val, test

The length of a row must be a multiple of 4, so that each voice keeps its positions in all rows.
"""
import json
import math
from pathlib import Path

import numpy as np

from config import Mistake
from data import command, download
from data.shards import Writer

URL = ("https://raw.githubusercontent.com/czhuang/JSB-Chorales-dataset/"
       "9a7f733ddb4ed91f48da64ac7f0f621c34aadd4d/Jsb16thSeparated.json")
SHA256 = "79294cc374f9252e95ef4b703161524c1c53dc1f712c236f00f1c1f5d54af5a7"
PITCHES = [-1, *range(21, 109)]  # silence, and the 88 keys of a piano
SYMBOLS = ["_", *map(str, PITCHES)]
PAD = 0
IDS = {pitch: i for i, pitch in enumerate(PITCHES, start=1)}
SPLITS = {"train": "train", "val": "valid", "test": "test"}  # our names, and those in the file

def rows(tokens, length):
    """Returns the rows of a piece (n,) and their mask, both (ceil(n / length), length + 1)."""
    count = math.ceil(len(tokens) / length)
    padded = np.full(1 + count * length, PAD)
    padded[1 : 1 + len(tokens)] = tokens
    table = np.stack([padded[i * length : (i + 1) * length + 1] for i in range(count)])
    mask = table != PAD
    mask[:, 0] = False  # the start token is padding, or it was a target in the previous row
    return table, mask

def prepare(
    folder,
    length: int = 2048,  # tokens per row, without the start token
    source: str = None,  # the file
):
    if length < 1 or length % 4:
        raise Mistake(f"length={length} must be a multiple of 4, which is the number of voices")
    path = Path(source) if source else download(URL, SHA256)
    with Writer(folder, len(SYMBOLS), {"symbols": SYMBOLS}, separator=PAD) as writer:
        try:
            pieces = json.loads(path.read_text(encoding="utf-8"))
            for split, name in SPLITS.items():
                for piece in pieces[name]:
                    keys = [IDS[pitch] for step in piece for pitch in step]
                    tokens, mask = rows(keys, length)
                    writer.write(split, tokens, mask)
        except (ValueError, KeyError, TypeError):
            raise Mistake(f"{path} does not hold the chorales; download {URL}") from None

if __name__ == "__main__":
    command(prepare, __doc__)
