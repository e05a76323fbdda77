"""FineWeb's documents of 4000 tokens or more, for ExPE's small models (ExPE, 3.1 and 4.1).

    python -m data.fineweb                   # streams until it has 700M tokens; rerun to resume
    python -m data.fineweb --tokens=7000000  # a trial

Six sevenths are for training, and the rest is halved into val and test. This makes 600M, 50M and
50M tokens of Llama's tokenizer, which has 32,000 tokens and needs `pip install tokenizers`.
End-of-text follows each document, and a split ends with the document that fills it.

The paper does not say which part of FineWeb it reads, nor with which tokenizer it counts the 4000
tokens. We read the random sample of 10B tokens and count with the set's own tokenizer. A rerun
resumes, but has to download the documents again that it has already read.

splits   train, val, test
options  tokens: of all three splits together; tokenizer
"""
from data import command
from data.text import hub, texts, write_documents

DOWNLOAD = True
SHORTEST = 4000

def load():
    """Returns the corpus as a stream, a datasets.IterableDataset with a column "text"."""
    return hub("HuggingFaceFW/fineweb", name="sample-10BT", split="train", streaming=True)

def prepare(folder, tokens: int = 700_000_000,
            tokenizer: str = "hf-internal-testing/llama-tokenizer", load=load):
    """Writes the set into `folder`. Raises ValueError if `tokens` are too few for three splits."""
    if tokens < 14:
        raise ValueError(f"tokens={tokens} cannot be split, because a fourteenth is for val and "
                         "another for test; ask for millions")
    fourteenth = tokens // 14
    sizes = {"val": fourteenth, "test": fourteenth, "train": tokens - 2 * fourteenth}
    write_documents(folder, lambda: {"val": texts(load())}, tokenizer, tokens=sizes,
                    shortest=SHORTEST)

if __name__ == "__main__":
    command(prepare, __doc__)
