"""
Prints the commands that train all runs of the tables in the docstring of a config file:

    python -m config config/cope_flip_flop.py
    python -m config config/cope_flip_flop.py | bash    # trains them one after the other

It reads the tables whose heading begins with `flags`, and no others. Each of their rows begins with
flags, and the heading of a column may be a flag too. Each run is repeated with every seed that the
docstring names.
"""
import ast
import itertools
import os
import re
import shlex
import sys

import config


def runs(docstring):
    """Yields the flags of each run as a list of words."""
    seeds = [[], *([word] for word in re.findall(r"--seed=\d+", docstring))]
    for paragraph in docstring.split("\n\n"):
        lines = [line.split() for line in paragraph.splitlines() if line.strip()]
        if lines and lines[0][0] == "flags":
            heading, *rows = lines
            rows = [row for row in rows if row[0].startswith(("--", "(none:"))]
            columns = [[word] for word in heading if word.startswith("--")]
            for row, column, seed in itertools.product(rows, columns or [[]], seeds):
                yield [word for word in row if word.startswith("--")] + column + seed

def command(path, flags):
    """Returns the command that trains with a config file and these flags. The run directory is
    named after all of them, as in out/cope_flip_flop_n_layer=2_rope_seed1338."""
    options = {"pe": config.assignments(path).get("pe")}
    options.update(flag[2:].partition("=")[::2] for flag in flags)
    pe = options.pop("pe")
    seed = options.pop("seed", None)
    parts = [os.path.splitext(os.path.basename(path))[0]]
    parts += [f"{key}={value}" for key, value in options.items()]
    if pe:
        parts.append(pe)
    if seed:
        parts.append(f"seed{seed}")
    name = "_".join(parts).replace("@", "_")  # sample.py gives @ a special meaning
    out_dir = os.path.join("out", name)
    return shlex.join(["python", "train.py", path, *flags, f"--out_dir={out_dir}"])

def main(argv):
    if "--help" in argv or "-h" in argv:
        print(__doc__.strip())
        return
    if len(argv) != 1:
        raise ValueError("name one config file, such as config/cope_flip_flop.py; see --help")
    config.assignments(argv[0])  # raises ValueError if there is no such file
    with open(argv[0], encoding="utf-8-sig") as file:
        docstring = ast.get_docstring(ast.parse(file.read())) or ""
    commands = [command(argv[0], flags) for flags in runs(docstring)]
    if not commands:
        raise ValueError(f"the docstring of {argv[0]} has no table with a heading `flags`")
    print("\n".join(commands))

if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(config.last_line(error))
