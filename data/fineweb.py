"""FineWeb's documents of 4000 tokens or more, for ExPE's small models (ExPE, 3.1 and 4.1).

    python -m data.fineweb                   # streams until it has 700M tokens; rerun to resume
    python -m data.fineweb --tokens=7000000  # a trial

Six sevenths are train; the rest is half val, half test: 600M, 50M and 50M Llama tokens (vocabulary
32,000; needs `pip install tokenizers`). End-of-text follows each document. A split ends with the
document that fills it. The paper does not say which part of FineWeb it reads, nor with which
tokenizer it counts. Here it is the random sample of 10B tokens, counted with the set's own. A rerun
streams past what was already read.
"""
from data import command
from data.text import hub, texts, write_documents

DOWNLOAD = True
SHORTEST = 4000

def load():
    """The corpus as a stream, a datasets.IterableDataset with a column "text"."""
    return hub("HuggingFaceFW/fineweb", name="sample-10BT", split="train", streaming=True)

def prepare(folder, tokens: int = 700_000_000,
            tokenizer: str = "hf-internal-testing/llama-tokenizer", load=load):
    """Write the set into `folder`. ValueError: too few `tokens` for three splits."""
    if tokens < 14:
        raise ValueError(f"tokens={tokens} cannot be split; "
                         "one fourteenth is val, another test: give millions")
    part = tokens // 14
    sizes = {"val": part, "test": part, "train": tokens - 2 * part}
    write_documents(folder, lambda: {"val": texts(load())}, tokenizer, tokens=sizes,
                    shortest=SHORTEST)

if __name__ == "__main__":
    command(prepare, __doc__)
