"""C4, English: CoPE compares its 1.4B models on it (CoPE section 5.7, figure 5).

    python -m data.c4                              # 20M documents to train on, 10,000 to validate
    python -m data.c4 --train=0 --val=364608       # the whole validation split, and nothing else
    python -m data.c4 --train=1000 --val=100       # a trial

The paper trains on Llama 2's private mix and evaluates on C4. Here C4 can stand in for the mix too.
A document has about 500 Llama tokens (vocabulary 32,000; needs `pip install tokenizers`), so the
first command makes 10B. All 364,868,892 documents make less than a fifth of the paper's 1T.
End-of-text follows each. The corpus is streamed, so you download only what you ask for. A rerun
streams past the documents already written.
"""
from data import command
from data.text import hub, texts, write_documents

DOWNLOAD = True

def load(split):
    """The corpus as a stream, a datasets.IterableDataset with a column "text"."""
    return hub("allenai/c4", "en", split=split, streaming=True)

def prepare(folder, train: int = 20_000_000, val: int = 10_000,
            tokenizer: str = "hf-internal-testing/llama-tokenizer", load=load):
    """Write the first `train` and `val` documents of what `load` returns into `folder`."""

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
