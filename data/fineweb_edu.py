r"""FineWeb-Edu's sample of 10 billion GPT-2 tokens: 9.8B train, 0.1B val, 0.1B test.

    python -m data.fineweb_edu
    python -m data.fineweb_edu --limit=1000  # a trial with the first 1000 documents
    python -m data.fineweb_edu --tokenizer=mistralai/Mistral-Small-Instruct-2409 \
        --out=data/fineweb_edu_mistral

CARoPE trains on this corpus with GPT-2's tokenizer. ExPE's 135M and 342M models use Mistral's,
which has 32,768 tokens and terms of use that you must accept on the hub. A shard has 1e8 tokens.
The first shard is val and the second is test, and both have ExPE's size (section 3.2). End-of-text
precedes each document.
"""
import itertools

from data import command
from data.documents import hub, write_documents

SIZE = 100_000_000  # tokens of a shard, and of val and test
DOCUMENTS = 9_672_101  # in the sample

def prepare(
    folder,
    limit: int = None,  # documents, for a trial
    tokenizer: str = "gpt2",  # "bytes", or a name that tiktoken or the hub knows
):
    def documents():
        rows = hub("HuggingFaceFW/fineweb-edu", name="sample-10BT", split="train", streaming=True)
        for row in itertools.islice(rows, limit):
            yield "train", row["text"]

    size = SIZE
    at_least = DOCUMENTS
    if limit is not None:
        # a document has about 1000 tokens, so a trial fills about ten shards rather than only val
        size = min(SIZE, 100 * limit)
        at_least = 0
    write_documents(folder, documents(), tokenizer, separator="before",
                    sizes={"val": size, "test": size, "train": None}, at_least=at_least,
                    shard_tokens=size, limit=limit)

if __name__ == "__main__":
    command(prepare, __doc__)
