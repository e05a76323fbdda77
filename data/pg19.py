"""PG-19's test split: 100 whole books, to extrapolate to without training on them (PoPE figure 2).

    python -m data.pg19
    python sample.py RUN ... --data=pg19 --split=test --eval_tokens=2e7 --extrapolate=1,2,4,8,10

The only split is test. The tokenizer must be the run's: PoPE's models read OpenWebText as GPT-2
tokens. End-of-text follows each book. A book has 70,000 words, so few windows contain that token.
"""
from data import command
from data.text import hub, texts, write_documents

DOWNLOAD = True

def load():
    """The corpus, a datasets.Dataset with a column "text", a book in each row."""
    return hub("emozilla/pg19-test", split="test")

def prepare(folder, limit: int = None, tokenizer: str = "gpt2", load=load):
    """Write the set into `folder`, from the first `limit` books of what `load` returns."""
    write_documents(folder, lambda: {"test": texts(load(), limit)}, tokenizer, limit=limit)

if __name__ == "__main__":
    command(prepare, __doc__)
