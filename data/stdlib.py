"""The source of the Python standard library, as bytes: real text that every machine has.

    python -m data.stdlib

This writes data/stdlib/ in a second or two, without a network. A token is a byte, 256 follows each
file, and every tenth file is for validation. Python versions and distributions install different
files (10 to 35 MB, much of it the library's tests), so compare losses only on one machine.
"""

import sysconfig
from pathlib import Path

import numpy as np

from data import command
from data.shards import Writer

DOWNLOAD = False  # train.py prepares such a set by itself

def prepare(folder):
    """Write the set into `folder`. FileNotFoundError: the library has no source here."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = {path.relative_to(library): path for path in library.rglob("*.py")}
    others = {"site-packages", "dist-packages"}  # what pip installs differs from user to user
    names = sorted(name for name in files if not others & set(name.parts))
    if not names:
        raise FileNotFoundError(f"no *.py files in {library}; "
                                "use a Python that comes with its library's source")
    with Writer(folder) as writer:
        for i, name in enumerate(names):
            text = np.frombuffer(files[name].read_bytes(), dtype=np.uint8).astype(np.uint16)
            split = "val" if i % 10 == 9 else "train"
            writer.write(split, np.append(text, np.uint16(256)))
        writer.finish(vocab_size=257, tokenizer="bytes", separator=256)
    print(f"{folder}: {len(names):,} files, {sum(writer.shards.values()) / 1e6:.1f} MB")

if __name__ == "__main__":
    command(prepare, __doc__)
