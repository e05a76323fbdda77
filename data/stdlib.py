"""The Python standard library's own source, as bytes: real text, there wherever Python is.

    python -m data.stdlib

writes data/stdlib/ in a second or two, without a network. A token is a byte, 256 stands after
each file, and every tenth file goes to the validation split. Python versions and distributions
differ in what they install (10 to 35 MB, much of it the library's tests), so losses compare on
one machine, not between two.
"""

import sysconfig
from pathlib import Path

import numpy as np

from data.shards import Writer, command

DOWNLOAD = False  # train.py prepares such a set by itself


def prepare(folder):
    """Write the set into `folder`. Raises FileNotFoundError when the library is installed without
    its source."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = {path.relative_to(library): path for path in library.rglob("*.py")}
    # packages of pip differ from user to user
    others = {"site-packages", "dist-packages"}
    names = sorted(name for name in files if not others & set(name.parts))
    if not names:
        raise FileNotFoundError(f"no *.py files in {library}; "
                                "use a Python that comes with its library's source")
    writer = Writer(folder)
    for i, name in enumerate(names):
        text = np.frombuffer(files[name].read_bytes(), dtype=np.uint8).astype(np.uint16)
        split = "val" if i % 10 == 9 else "train"
        writer.write(split, np.append(text, np.uint16(256)))
    writer.finish(vocab_size=257, tokenizer="bytes", separator=256)
    print(f"{folder}: {len(names):,} files, {sum(writer.shards.values()) / 1e6:.1f} MB")


if __name__ == "__main__":
    command(prepare, __doc__)
