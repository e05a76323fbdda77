"""TinyStories: 2.1M short stories in the words of a child, and 22,000 more for validation (Eldan
and Li 2023).

    python -m data.tinystories               # downloads 1 GB; rerun to resume
    python -m data.tinystories --limit=1000  # a trial with the first 1000 stories of each split

End-of-text follows each story. The stories of CoPE's word counting task, data/wordcount.py, are the
same ones.
"""
from data import command
from data.text import hub, texts, write_documents

DOWNLOAD = True
TOKENS = 480_000_000

def load():
    """Returns the corpus, a datasets.DatasetDict of train and validation, each with a column
    "text"."""
    return hub("roneneldan/TinyStories")

def prepare(folder, limit: int = None, tokenizer: str = "gpt2", load=load):
    """Writes the set into `folder`, from the first `limit` stories of each split of the corpus
    that `load` returns."""

    def splits():
        corpus = load()
        return {"val": texts(corpus["validation"], limit), "train": texts(corpus["train"], limit)}

    expect = TOKENS if limit is None else None
    write_documents(folder, splits, tokenizer, expect=expect, limit=limit)

if __name__ == "__main__":
    command(prepare, __doc__)
