r"""FineWeb-Edu's sample of 10 billion GPT-2 tokens: 9.8B train, 0.1B val, 0.1B test.

    python -m data.fineweb_edu               # streams, tokenizes on all cores; rerun to resume
    python -m data.fineweb_edu --limit=1000  # a trial with the first 1000 documents
    python -m data.fineweb_edu --tokenizer=mistralai/Mistral-Small-Instruct-2409 \
        --out=data/fineweb_edu_mistral

CARoPE trains on this corpus with GPT-2's tokenizer. ExPE's large models use Mistral's, which has
32,768 tokens, needs `pip install tokenizers`, and has terms that you must accept on the hub. A
shard has 1e8 tokens. The first shard is val and the second is test, as in ExPE (section 3.2).
End-of-text precedes each document. A rerun downloads the documents again that are already written,
but it does not tokenize them again.
"""
from data import command
from data.text import hub, texts, write_documents

DOWNLOAD = True
TOKENS = 10_000_000_000
SHARD_TOKENS = 100_000_000

def load():
    """Returns the corpus as a stream, a datasets.IterableDataset with a column "text"."""
    return hub("HuggingFaceFW/fineweb-edu", name="sample-10BT", split="train", streaming=True)

def prepare(folder, limit: int = None, tokenizer: str = "gpt2", load=load):
    """Writes the set into `folder`, from the first `limit` documents of what `load` returns."""
    size = SHARD_TOKENS
    expect = TOKENS
    if limit is not None:
        # a document has about 1000 tokens, so a trial has about ten shards and not only val
        size = min(SHARD_TOKENS, 100 * limit)
        expect = None
    write_documents(folder, lambda: {"val": texts(load(), limit)}, tokenizer, separator="before",
                    tokens={"val": size, "test": size, "train": None}, expect=expect,
                    shard_tokens=size, limit=limit)

if __name__ == "__main__":
    command(prepare, __doc__)
