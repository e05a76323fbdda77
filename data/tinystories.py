"""TinyStories: 2.1M short stories in the words of a child, and 22,000 more for validation (Eldan
and Li 2023). GPT-2's tokenizer makes about 480M tokens of them.

    python -m data.tinystories               # downloads 1 GB
    python -m data.tinystories --limit=1000  # a trial with the first 1000 stories of each split

End-of-text follows each story.
"""
from data import command
from data.text import hub, texts, write_documents


def prepare(folder, limit: int = None, tokenizer: str = "gpt2"):
    def corpus():
        stories = hub("roneneldan/TinyStories")
        return {"val": texts(stories["validation"], limit), "train": texts(stories["train"], limit)}

    write_documents(folder, corpus, tokenizer, limit=limit)

if __name__ == "__main__":
    command(prepare, __doc__)
