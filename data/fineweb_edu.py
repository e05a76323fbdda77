r"""FineWeb-Edu's sample of 10 billion GPT-2 tokens: 9.8B train, 0.1B val, 0.1B test.

    python -m data.fineweb_edu               # streams, tokenises on all cores; rerun to resume
    python -m data.fineweb_edu --limit=1000  # a trial with the first 1000 documents
    python -m data.fineweb_edu --tokenizer=mistralai/Mistral-Small-Instruct-2409 \
        --out=data/fineweb_edu_mistral

CARoPE trains on it with GPT-2's tokenizer, ExPE's large models with Mistral's (32,768 tokens; `pip
install tokenizers`, and you must accept its terms on the hub). Shards have 1e8 tokens. The first is
val and the second test, as in ExPE (section 3.2). End-of-text precedes each document. A rerun
streams past the documents already written: it downloads them again, but does not tokenise them.
"""
from data import command
from data.text import hub, texts, write_documents

DOWNLOAD = True
TOKENS = 10_000_000_000
SHARD_TOKENS = 100_000_000

def load():
    """The corpus as a stream, a datasets.IterableDataset with a column "text"."""
    return hub("HuggingFaceFW/fineweb-edu", name="sample-10BT", split="train", streaming=True)

def prepare(folder, limit: int = None, tokenizer: str = "gpt2", load=load):
    """Write the set into `folder`, from the first `limit` documents of what `load` returns."""
    # a document has about 1000 tokens, so a trial has ten shards too, not just one of validation
    size = SHARD_TOKENS if limit is None else min(SHARD_TOKENS, 100 * limit)
    write_documents(folder, lambda: {"val": texts(load(), limit)}, tokenizer, separator="before",
                    tokens={"val": size, "test": size, "train": None},
                    expect=TOKENS if limit is None else None, shard_tokens=size, limit=limit)

if __name__ == "__main__":
    command(prepare, __doc__)
