"""OpenWebText as GPT-2 tokens: 9,035,582,198 for training and 4,434,897 for validation.

    python -m data.openwebtext

The split is nanoGPT's, so that losses can be compared: a fraction of 0.0005 of the documents, drawn
with seed 2357, is for validation. End-of-text follows each document.

In 2025 this set still had a loading script on the hub, which `datasets` refuses since version 4
(github.com/karpathy/nanoGPT/issues/633). If the command still complains of a script, load the set
from the pull request that removes it:

    python -m data.openwebtext --revision=refs/pr/22 --out=data/openwebtext

We could not try this. If the documents are in another order there, the split is not nanoGPT's.

options  tokenizer; revision: a branch or a pull request of the set on the hub
"""
from data import command
from data.text import hub, texts, write_documents


def prepare(folder, tokenizer: str = "gpt2", revision: str = None):
    def corpus():
        documents = hub("Skylion007/openwebtext", split="train", revision=revision)
        parts = documents.train_test_split(test_size=0.0005, seed=2357, shuffle=True)
        return {"val": texts(parts["test"]), "train": texts(parts["train"])}

    write_documents(folder, corpus, tokenizer, revision=revision)

if __name__ == "__main__":
    command(prepare, __doc__)
