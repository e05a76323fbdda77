"""OpenWebText as GPT-2 tokens: 9,035,582,198 for training and 4,434,897 for validation.

    python -m data.openwebtext

The split is nanoGPT's, so that losses can be compared: a fraction of 0.0005 of the documents, drawn
with seed 2357, is for validation. End-of-text follows each document. Since version 4, `datasets`
refuses sets that have a loading script, as this one had in 2025. If it still has one, pass hub()
the revision of a pull request that converts the set to Parquet.
"""
from data import command
from data.text import hub, texts, write_documents


def prepare(folder, tokenizer: str = "gpt2"):
    def corpus():
        documents = hub("Skylion007/openwebtext", split="train")
        parts = documents.train_test_split(test_size=0.0005, seed=2357, shuffle=True)
        return {"val": texts(parts["test"]), "train": texts(parts["train"])}

    write_documents(folder, corpus, tokenizer)

if __name__ == "__main__":
    command(prepare, __doc__)
