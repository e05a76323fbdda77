"""C4, English, on which CoPE compares its 1.4B models (CoPE section 5.7, figure 5).

    python -m data.c4                              # 20M documents to train on, 10,000 to validate
    python -m data.c4 --train=0 --val=364608       # only the validation split, but all of it
    python -m data.c4 --train=1000 --val=100       # a trial

The paper trains on Llama 2's private mix and evaluates on C4. Because that mix is not public, C4
can also serve as training data here. A document has about 500 tokens of Llama's tokenizer, which
has 32,000 tokens and needs `pip install tokenizers`. The first command therefore makes about 10B
tokens; all 364,868,892 documents would make less than a fifth of the paper's 1T. End-of-text
follows each document.

The corpus is streamed, so only the documents that you ask for are downloaded. A rerun resumes, but
has to download the documents again that are already written.
"""
from data import command
from data.text import hub, texts, write_documents

DOWNLOAD = True

def load(split):
    """Returns a split as a stream, a datasets.IterableDataset with a column "text"."""
    return hub("allenai/c4", "en", split=split, streaming=True)

def prepare(folder, train: int = 20_000_000, val: int = 10_000,
            tokenizer: str = "hf-internal-testing/llama-tokenizer", load=load):
    """Writes the first `train` and `val` documents of the two splits that `load` returns into
    `folder`."""

    def splits():
        parts = {}
        if val:
            parts["val"] = texts(load("validation"), val)
        if train:
            parts["train"] = texts(load("train"), train)
        return parts

    write_documents(folder, splits, tokenizer, expect=500 * (train + val), train=train, val=val)

if __name__ == "__main__":
    command(prepare, __doc__)
