"""FineWeb's documents of 4000 tokens or more, as ExPE's small models read them (ExPE, 3.2 and 4.1).

    python -m data.fineweb                   # streams until 700M tokens are there; again: goes on
    python -m data.fineweb --tokens=7000000  # a try

Six sevenths are train, the rest is val and test, in halves: 600M, 50M and 50M Llama tokens
(32,000 of them; needs `pip install tokenizers`). A token of end-of-text goes after each document;
where a split is full, the next one goes on inside the document. Which part of FineWeb and whose
count of tokens the paper leaves open: here its random sample of 10B tokens and the set's own
tokenizer. A second start streams past what was already read.
"""

from data.shards import command
from data.text import hub, texts, write_documents

DOWNLOAD = True
SHORTEST = 4000


def load():
    """The corpus as a stream, a datasets.IterableDataset with a column "text"."""
    return hub("HuggingFaceFW/fineweb", name="sample-10BT", split="train", streaming=True)


def prepare(folder, tokens: int = 700_000_000,
            tokenizer: str = "hf-internal-testing/llama-tokenizer", load=load):
    """Write the set into `folder`. Raises ValueError when `tokens` are too few for three splits."""
    if tokens < 14:
        raise ValueError(f"tokens={tokens} cannot be split; "
                         "one fourteenth is val, another test: give millions")
    part = tokens // 14
    sizes = {"val": part, "test": part, "train": tokens - 2 * part}
    write_documents(folder, lambda: {"val": texts(load())}, tokenizer, tokens=sizes,
                    shortest=SHORTEST)


if __name__ == "__main__":
    command(prepare, __doc__)
