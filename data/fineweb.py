"""FineWeb's documents of 4000 tokens or more, for ExPE's 35M models (ExPE, 3.1 and 4.1).

    python -m data.fineweb                   # streams the corpus until it has 700M tokens
    python -m data.fineweb --tokens=7000000  # a trial

Six sevenths of the tokens are for training, and the rest is halved into val and test. By default,
these are 600M, 50M and 50M tokens of Llama's tokenizer. End-of-text follows each document, and a
split ends with the document that fills it.

The paper does not say which part of FineWeb it reads, nor with which tokenizer it counts the 4000
tokens. We read the random sample of 10B tokens and count with the tokenizer of the data set.
"""
from data import command
from data.documents import LLAMA, hub, write_documents

SHORTEST = 4000

def prepare(
    folder,
    tokens: int = 700_000_000,  # of all splits together
    tokenizer: str = LLAMA,  # "bytes", or a name that tiktoken or the hub knows
):
    def documents():
        for row in hub("HuggingFaceFW/fineweb", name="sample-10BT", split="train", streaming=True):
            yield "val", row["text"]

    fourteenth = tokens // 14
    sizes = {"val": fourteenth, "test": fourteenth, "train": tokens - 2 * fourteenth}
    write_documents(folder, documents(), tokenizer, sizes=sizes, shortest=SHORTEST)

if __name__ == "__main__":
    command(prepare, __doc__)
