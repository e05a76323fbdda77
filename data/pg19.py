"""PG-19's test split: 100 whole books, on which PoPE measures extrapolation (PoPE, Figure 2).

    python -m data.pg19
    python sample.py RUN ... --data=pg19 --split=test --eval_tokens=2e7 --extrapolate=1,2,4,8,10

There is no train split, because no model trains on these books. The tokenizer must be that of the
run; PoPE's models are trained on OpenWebText as GPT-2 tokens. End-of-text follows each book, but
few windows contain it, because a book has about 70,000 words.
"""
import itertools

from data import command
from data.documents import hub, write_documents

BOOKS = 100

def prepare(
    folder,
    limit: int = None,  # books, for a trial
    tokenizer: str = "gpt2",  # "bytes", or a name that tiktoken or the hub knows
):
    def documents():
        for row in itertools.islice(hub("emozilla/pg19-test", split="test"), limit):
            yield "test", row["text"]

    at_least = BOOKS if limit is None else 0
    write_documents(folder, documents(), tokenizer, at_least=at_least, limit=limit)

if __name__ == "__main__":
    command(prepare, __doc__)
