"""
Writes the page of the lesson. This command runs eval/walk.py, and writes what it says, prints and
draws to eval/walk.md and eval/walk_files/:

    python eval/walk_render.py
"""
import contextlib
import io
import re
from pathlib import Path

import walk_parts as parts

SOURCE = Path(__file__).with_name("walk.py")

def cells():
    """Yields the cells of walk.py as pairs of "markdown" or "code" and a text. They begin with
    `# %%`, as editors and Jupytext expect of a script that they open as a notebook."""
    for cell in SOURCE.read_text("utf-8").split("# %%")[1:]:
        kind, _, body = cell.partition("\n")
        if kind == " [markdown]":
            yield "markdown", re.fullmatch(r'r?"""\n(.*)\n"""', body.strip(), re.S)[1]
        else:
            yield "code", body.strip()

def printed_by(code, names):
    """Runs a cell, and returns what it prints as Markdown. Text is indented, so that it is shown
    as it is. A line about a picture becomes the picture, if it is where the page expects it."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, SOURCE.name, "exec"), names)
    blocks = [""]
    for line in printed.getvalue().splitlines():
        picture = re.fullmatch(r"picture .*/(walk_files/\S+): (.*)", line)
        if picture:
            blocks += [f"![{picture[2]}]({picture[1]})", ""]
        else:
            blocks[-1] += f"    {line}\n"
    return [block.rstrip() for block in blocks if block]

def render():
    parts.folder = SOURCE.with_name("walk_files")
    names = {}  # the variables of the lesson
    page = []
    for kind, text in cells():
        if kind == "markdown":
            page.append(text)
        else:
            page += [f"```python\n{text}\n```", *printed_by(text, names)]
    SOURCE.with_suffix(".md").write_text("\n\n".join(page) + "\n", "utf-8")

if __name__ == "__main__":
    render()
