"""Source code, for CoPE's experiment on code (section 5.6): any data set of the hub, or a folder of your own.

    python -m data.code                                              # Python files of GitHub
    python -m data.code --source=/path/to/source --out=data/code     # a folder: all the files of the SUFFIXES below
    python -m data.code --source=codeparrot/codeparrot-clean-train --out=data/code   # 50 GB of the same kind

The paper's mix is Llama 2's and private. Here another can be named whose column `column` holds a file per row, and that
needs no login or has one (`hf auth login`). Llama's tokenizer (32,000 tokens; needs `pip install tokenizers`),
end-of-text after each file. The split is by file, every hundredth is val: a folder wants some hundred files, or val is
one or two of them. Files of one project lie in both splits, so that val is easier than code from elsewhere.
"""

from pathlib import Path

from data.shards import command
from data.text import hub, write_documents

DOWNLOAD = True
SUFFIXES = set(".c .cc .cpp .cs .cu .go .h .hpp .java .jl .js .kt .lua .php .pl .py .rb .rs .scala .sh .sql .swift .ts".split())


def load(source, column):
    """-> how many files there are, and a function of a number below that -> the file's text.

    Raises ValueError when the data set has no such column, or the folder no source code.
    """
    if Path(source).is_dir():
        paths = sorted(path for path in Path(source).rglob("*") if path.suffix in SUFFIXES and path.is_file())
        if not paths:
            raise ValueError(f"source={source!r} has no source code, no file with one of {' '.join(sorted(SUFFIXES))}")
        return len(paths), lambda i: paths[i].read_text(encoding="utf-8", errors="replace")
    if Path(source).is_absolute() or source.startswith("."):
        raise FileNotFoundError(f"source={source!r} is no folder; name one, or a data set of the hub (owner/name)")
    corpus = hub(source, split="train")
    if column not in corpus.column_names:
        raise ValueError(f"column={column!r} is not in {source}; it has: {', '.join(corpus.column_names)}")
    return len(corpus), lambda i: corpus[i][column]


def prepare(
    folder, source: str = "codeparrot/codeparrot-clean-valid", column: str = "content", limit: int = None,
    tokenizer: str = "hf-internal-testing/llama-tokenizer",
):
    """Write the set into `folder`, from at most `limit` files of the source. Raises what `load` does."""

    def splits():
        count, text = load(source, column)
        numbers = range(count)[:limit]
        parts = {"val": numbers[::100], "train": [i for i in numbers if i % 100]}
        return {split: lambda skip, part=part: (text(i) for i in part[skip:]) for split, part in parts.items()}

    write_documents(folder, splits, tokenizer, limit=limit, source=source, column=column)


if __name__ == "__main__":
    command(prepare, __doc__)
