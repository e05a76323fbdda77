"""C4, English, on which CoPE compares its 1.4B models (CoPE, section 5.7 and Figure 5).

    python -m data.c4                              # 20M documents to train on, 10,000 to validate
    python -m data.c4 --train=1000 --val=100       # a trial

The paper trains on the mix of Llama 2, which is not public, and evaluates on C4. Here, models are
trained on C4 as well. A document has about 500 tokens of Llama's tokenizer, so the first command
makes about 10B tokens. All 364,868,892 documents would make less than a fifth of the paper's 1T.
End-of-text follows each document. The corpus is streamed, so only the documents that you ask for
are downloaded.
"""
from data import command
from data.documents import LLAMA, hub, write_documents


def prepare(
    folder,
    train: int = 20_000_000,  # documents
    val: int = 10_000,  # documents
    tokenizer: str = LLAMA,  # "bytes", or a name that tiktoken or the hub knows
):
    def documents():
        corpus = hub("allenai/c4", "en", streaming=True)
        for row in corpus["validation"].take(val):
            yield "val", row["text"]
        for row in corpus["train"].take(train):
            yield "train", row["text"]

    write_documents(folder, documents(), tokenizer, at_least=train + val, train=train, val=val)

if __name__ == "__main__":
    command(prepare, __doc__)
