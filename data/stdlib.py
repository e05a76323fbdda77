"""The source code of the Python standard library, as bytes: real text that every machine has.

    python -m data.stdlib

This writes data/stdlib/ in a second or two, and needs no network. A token is a byte, token 256
follows each file, and every tenth file is for validation. Python versions and distributions install
different files (10 to 35 MB, much of it the library's own tests), so compare losses only between
runs on one machine.
"""
import sysconfig
from pathlib import Path

import numpy as np

from data import command
from data.shards import Writer

WRITTEN_BY_TRAIN = True
UNIT = "byte"  # what the lengths in a picture count
SEPARATOR = 256
OTHERS = {"site-packages", "dist-packages"}  # left out, because they hold what the user installed

def files():
    """Yields (split, tokens) of each file, in which the separator comes last."""
    library = Path(sysconfig.get_paths()["stdlib"])
    names = [path.relative_to(library) for path in library.rglob("*.py")]
    names = sorted(name for name in names if not OTHERS & set(name.parts))
    for i, name in enumerate(names):
        text = np.frombuffer((library / name).read_bytes(), dtype=np.uint8)
        tokens = np.append(text.astype(np.uint16), np.uint16(SEPARATOR))
        yield "val" if i % 10 == 9 else "train", tokens

def prepare(folder):
    with Writer(folder, vocab_size=257, tokenizer="bytes", separator=SEPARATOR) as writer:
        for split, tokens in files():
            writer.write(split, tokens)

if __name__ == "__main__":
    command(prepare, __doc__)
