"""OpenWebText as GPT-2 tokens: 9,035,582,198 for training and 4,434,897 for validation.

    python -m data.openwebtext               # downloads, tokenizes on all cores; rerun to resume
    python -m data.openwebtext --limit=1000  # a trial with 1000 documents (same download)

The split is nanoGPT's, so losses can be compared with its: a fraction of 0.0005 of the documents,
drawn with seed 2357, is for validation. End-of-text follows each document.
"""
from data import command
from data.text import hub, texts, write_documents

DOWNLOAD = True
TOKENS = 9_040_017_095
SHARD_TOKENS = 100_000_000

def load():
    """Returns the corpus, a datasets.Dataset with a column "text". The library caches the
    download."""
    return hub("Skylion007/openwebtext", split="train")

def prepare(folder, limit: int = None, tokenizer: str = "gpt2", load=load):
    """Writes the set into `folder`, from at most `limit` documents of what `load` returns."""

    def splits():
        corpus = load()
        if limit is not None:
            corpus = corpus.select(range(min(limit, len(corpus))))
        parts = corpus.train_test_split(test_size=0.0005, seed=2357, shuffle=True)
        return {"val": texts(parts["test"]), "train": texts(parts["train"])}

    expect = TOKENS if limit is None else None
    write_documents(folder, splits, tokenizer, expect=expect, shard_tokens=SHARD_TOKENS,
                    limit=limit)

if __name__ == "__main__":
    command(prepare, __doc__)
