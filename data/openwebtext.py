"""OpenWebText as GPT-2 tokens: 9,035,582,198 for training and 4,434,897 for validation.

    python -m data.openwebtext

The split is nanoGPT's, so that losses can be compared: a fraction of 0.0005 of the documents, drawn
with seed 2357, is for validation. End-of-text follows each document.

In 2025 this set still had a loading script on the hub, which `datasets` has refused since version 4
(github.com/karpathy/nanoGPT/issues/633). If the script is refused, the set is loaded from the pull
request that removes it, and a printed line says so. We could not try this. Either way, the number
of documents is checked, because a converted copy may hold only the first 5 GB of a large set. If
the documents are in another order there, the split is not nanoGPT's.
"""
from config import Mistake
from data import command
from data.documents import hub, write_documents

NAME = "Skylion007/openwebtext"
DOCUMENTS = 8_013_769
WITHOUT_SCRIPT = "refs/pr/22"  # the pull request that removes the loading script

def load():
    """Returns all documents, as a datasets.Dataset."""
    try:
        return hub(NAME, split="train", rows=DOCUMENTS)
    except Mistake as mistake:
        reason = mistake.__cause__
        if not isinstance(reason, RuntimeError):  # by which `datasets` refuses a script
            raise
        print(f"{reason}; reading {NAME} at the revision {WITHOUT_SCRIPT}", flush=True)
        return hub(NAME, split="train", rows=DOCUMENTS, revision=WITHOUT_SCRIPT)

def prepare(
    folder,
    tokenizer: str = "gpt2",  # "bytes", or a name that tiktoken or the hub knows
):
    def documents():
        parts = load().train_test_split(test_size=0.0005, seed=2357, shuffle=True)
        for split, part in (("val", "test"), ("train", "train")):
            for row in parts[part]:
                yield split, row["text"]

    write_documents(folder, documents(), tokenizer)

if __name__ == "__main__":
    command(prepare, __doc__)
