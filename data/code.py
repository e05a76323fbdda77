"""Source code, for CoPE's experiment on code (section 5.6): any data set on the hub, or a folder.

    python -m data.code                                            # Python files from GitHub
    python -m data.code --source=/path/to/source --out=data/code   # files with the SUFFIXES below
    python -m data.code --source=codeparrot/codeparrot-clean-train --out=data/code   # 50 GB

The paper uses Llama 2's private mix. You can name any data set with one file per row, in its column
`column`. If it needs a login, run `hf auth login` first. Llama's tokenizer (32,000 tokens; needs
`pip install tokenizers`), end-of-text after each file. The split is by file: of every hundred, one
is val and one is test, so a folder should have hundreds. A project's files land in all splits, so
val and test are easier than code from elsewhere.
"""
import functools
from pathlib import Path

from data import command
from data.text import digest, hub, write_documents

DOWNLOAD = True
SUFFIXES = (".c .cc .cpp .cs .cu .go .h .hpp .java .jl .js .kt .lua .php .pl .py .rb .rs .scala "
            ".sh .sql .swift .ts").split()

def files(folder):
    """The paths of a folder's source code, sorted. ValueError: there is none."""
    every = sorted(Path(folder).rglob("*"))
    paths = [path for path in every if path.suffix in SUFFIXES and path.is_file()]
    if not paths:
        known = " ".join(SUFFIXES)
        raise ValueError(f"source={folder!r} has no source code, no file with one of {known}")
    return paths

def load(source, column):
    """-> the number of files, and a function from a file's number to its text. ValueError: the data
    set has no such column, or the folder no source code."""
    if Path(source).is_dir():
        paths = files(source)
        return len(paths), lambda i: paths[i].read_text(encoding="utf-8", errors="replace")
    if Path(source).is_absolute() or source.startswith("."):
        raise FileNotFoundError(f"source={source!r} is no folder; "
                                "name one, or a data set of the hub (owner/name)")
    corpus = hub(source, split="train")
    if column not in corpus.column_names:
        known = ", ".join(corpus.column_names)
        raise ValueError(f"column={column!r} is not in {source}; it has: {known}")
    return len(corpus), lambda i: corpus[i][column]

def prepare(folder, source: str = "codeparrot/codeparrot-clean-valid", column: str = "content",
            limit: int = None, tokenizer: str = "hf-internal-testing/llama-tokenizer"):
    """Write the set into `folder`, from at most `limit` files of the source."""

    def splits():
        count, text = load(source, column)
        numbers = range(count)[:limit]
        train = [i for i in numbers if i % 100 > 1]
        parts = {"val": numbers[::100], "test": numbers[1::100], "train": train}
        return {split: functools.partial(documents, text, part) for split, part in parts.items()}

    def documents(text, numbers, skip):
        return (text(i) for i in numbers[skip:])

    origin = {"sha256": digest(files(source)[:limit])} if Path(source).is_dir() else {}
    write_documents(folder, splits, tokenizer, limit=limit, source=source, column=column, **origin)

if __name__ == "__main__":
    command(prepare, __doc__)
