"""Source code, for CoPE's experiment on code (section 5.6): any data set on the hub, or a folder.

    python -m data.code                                            # Python files from GitHub
    python -m data.code --source=/path/to/source --out=data/code   # files with the SUFFIXES below
    python -m data.code --source=codeparrot/codeparrot-clean-train --out=data/code   # 50 GB

The paper trains on the code of Llama 2's private mix. Here you can name any data set of the hub
that has one file per row, in a column `column`; if it needs a login, run `hf auth login` first. The
tokenizer is Llama's, which has 32,000 tokens and needs `pip install tokenizers`. End-of-text
follows each file.

Of every hundred files, one is for validation and one for testing, so a folder should have hundreds.
The files of one project land in all three splits. This makes val and test easier than code from
projects that the model has not seen.

splits   train, val, test
options  source: a folder, or a data set of the hub; column: the column with the text of a file;
         limit: the number of files, for a trial; tokenizer
"""
import functools
from pathlib import Path

from data import command
from data.text import digest, hub, write_documents

DOWNLOAD = True
SUFFIXES = [".c", ".cc", ".cpp", ".cs", ".cu", ".go", ".h", ".hpp", ".java", ".jl", ".js", ".kt",
            ".lua", ".php", ".pl", ".py", ".rb", ".rs", ".scala", ".sh", ".sql", ".swift", ".ts"]

def files(folder):
    """Returns the paths of a folder's source code, sorted. Raises ValueError if it has none."""
    paths = []
    for path in sorted(Path(folder).rglob("*")):
        if path.suffix in SUFFIXES and path.is_file():
            paths.append(path)
    if not paths:
        known = " ".join(SUFFIXES)
        raise ValueError(f"source={folder!r} has no source code; name a folder of files that end "
                         f"in one of {known}")
    return paths

def load(source, column):
    """Returns the number of files, and a function that returns the text of file number i. Raises
    ValueError if the data set has no such column or the folder has no source code."""
    if Path(source).is_dir():
        paths = files(source)
        return len(paths), lambda i: paths[i].read_text(encoding="utf-8", errors="replace")
    if Path(source).is_absolute() or source.startswith("."):
        raise FileNotFoundError(f"source={source!r} is not a folder; name one, or a data set of "
                                "the hub (owner/name)")
    corpus = hub(source, split="train")
    if column not in corpus.column_names:
        known = ", ".join(corpus.column_names)
        raise ValueError(f"column={column!r} is not in {source}; choose one of {known}")
    return len(corpus), lambda i: corpus[i][column]

def prepare(folder, source: str = "codeparrot/codeparrot-clean-valid", column: str = "content",
            limit: int = None, tokenizer: str = "hf-internal-testing/llama-tokenizer"):
    """Writes the set into `folder`, from at most `limit` files of the source."""

    def splits():
        count, text = load(source, column)
        numbers = range(count)[:limit]
        train = [i for i in numbers if i % 100 > 1]
        chosen = {"val": numbers[::100], "test": numbers[1::100], "train": train}
        return {split: functools.partial(documents, text, chosen[split]) for split in chosen}

    def documents(text, numbers, skip):
        return (text(i) for i in numbers[skip:])

    settings = {"limit": limit, "source": source, "column": column}
    if Path(source).is_dir():
        settings["sha256"] = digest(files(source)[:limit])
    write_documents(folder, splits, tokenizer, **settings)

if __name__ == "__main__":
    command(prepare, __doc__)
