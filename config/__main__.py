"""
Prints the commands that train all runs of the tables in the docstring of a config file:

    python -m config config/cope_flip_flop.py
    python -m config config/cope_flip_flop.py | bash    # trains them one after the other

It reads the tables whose heading begins with `flags`. Each of their rows begins with the flags of a
run, or with `(none: ...)`. Each run is repeated with every seed that the docstring names.
"""
import ast
import os
import re
import shlex

import config


def flags_of_rows(docstring):
    """Yields the flags of each row of the tables, as a list of words."""
    for paragraph in docstring.split("\n\n"):
        heading, *rows = paragraph.strip("\n").splitlines() or [""]
        if heading.split()[:1] == ["flags"]:
            for row in rows:
                words = row.split()
                if words[0].startswith(("--", "(none:")):
                    yield [word for word in words if word.startswith("--")]

def command(path, flags):
    """Returns the command that trains with a config file and these flags. Its run directory is that
    of train.py, with the other flags in its name: out/cope_flip_flop_n_layer=2_rope_seed1338."""
    name = os.path.splitext(os.path.basename(path))[0]
    pe = config.assignments(path)["pe"]
    seed = ""
    for flag in flags:
        key, _, value = flag[2:].partition("=")
        if key == "pe":
            pe = value
        elif key == "seed":
            seed = f"_seed{value}"
        else:
            name += f"_{key}={value}".replace("@", "_")  # sample.py gives @ a special meaning
    out_dir = os.path.join("out", f"{name}_{pe}{seed}")
    return shlex.join(["python", "train.py", path, *flags, f"--out_dir={out_dir}"])

def main(words):
    parser = config.Parser(__doc__)
    parser.add_argument("file", help="config file")
    path = parser.parse_args(words).file
    with open(path, encoding="utf-8-sig") as file:
        docstring = ast.get_docstring(ast.parse(file.read())) or ""
    rows = list(flags_of_rows(docstring))
    if not rows:
        raise config.Mistake(f"the docstring of {path} has no table with a heading `flags`")
    other_seeds = [[word] for word in re.findall(r"--seed=\d+", docstring)]
    for flags in rows:
        for seed in [[]] + other_seeds:
            print(command(path, flags + seed))

if __name__ == "__main__":
    config.run(main)
