"""C4, English: the validation split, on which CoPE's 1.4B models are compared (CoPE section 5.7, figure 5).

    python -m data.c4                                # the first 10,000 validation documents, some 5M tokens, as val
    python -m data.c4 --val=364608 --train=10000000  # all of them, and documents of the training split

No paper here trains on C4, so that train is empty by default; a document has some 500 Llama tokens (32,000 of them; needs
`pip install tokenizers`), and end-of-text goes after each. The corpus is streamed: only what is asked for is downloaded,
but a second start streams past the documents that are already written.
"""

from data.shards import command, hub, texts, write_documents

DOWNLOAD = True


def load(split):
    """The corpus as a stream, a datasets.IterableDataset with a column "text"."""
    return hub("allenai/c4", "en", split=split, streaming=True)


def prepare(
    folder, val: int = 10_000, train: int = 0, tokenizer: str = "hf-internal-testing/llama-tokenizer", load=load
):
    """Write the first `val` and `train` documents of the splits that `load` returns into `folder`."""

    def splits():
        counts = {"val": ("validation", val), "train": ("train", train)}
        return {split: texts(load(name), count) for split, (name, count) in counts.items() if count}

    write_documents(folder, splits, tokenizer, expect=500 * (val + train), val=val, train=train)


if __name__ == "__main__":
    command(prepare, __doc__)
