"""TinyStories: 2.1M short stories in a child's words, 22,000 to validate (Eldan & Li 2023).

    python -m data.tinystories               # downloads 1 GB; run it again to continue
    python -m data.tinystories --limit=1000  # a trial with the first 1000 stories of each split

End-of-text follows each story. CoPE's word counting task is made from the same stories.
"""
from data import command
from data.text import hub, texts, write_documents

DOWNLOAD = True
TOKENS = 480_000_000

def load():
    """The corpus, a datasets.DatasetDict of train and validation with a column "text"."""
    return hub("roneneldan/TinyStories")

def prepare(folder, limit: int = None, tokenizer: str = "gpt2", load=load):
    """Write the set into `folder`, from the first `limit` stories of each split of the corpus
    that `load` returns."""

    def splits():
        corpus = load()
        return {"val": texts(corpus["validation"], limit), "train": texts(corpus["train"], limit)}

    expect = TOKENS if limit is None else None
    write_documents(folder, splits, tokenizer, expect=expect, limit=limit)

if __name__ == "__main__":
    command(prepare, __doc__)
