"""Source code, for CoPE's experiment on code (section 5.6). It can come from any data set on the
hub that has one file per row.

    python -m data.code                              # 50 GB of Python files from GitHub
    python -m data.code --out=data/code_valid --dataset=codeparrot/codeparrot-clean-valid  # smaller

The paper trains on the code of Llama 2's private mix, which is not public. Of every hundred files,
one is for validation and one for testing. The files of one project land in all three splits, which
makes val and test easier than code from projects that the model has not seen. End-of-text follows
each file.

splits   train, val, test
options  dataset: a data set of the hub, with the text of a file in the column `content` (for one
         that needs a login, run `hf auth login` first); limit: the number of files, for a trial;
         tokenizer
"""
from data import command
from data.documents import hub, write_documents


def prepare(folder, dataset: str = "codeparrot/codeparrot-clean-train", limit: int = None,
            tokenizer: str = "hf-internal-testing/llama-tokenizer"):
    def documents():
        rows = hub(dataset, split="train")
        numbers = range(len(rows))[:limit]
        train = [i for i in numbers if i % 100 > 1]
        for split, chosen in (("val", numbers[::100]), ("test", numbers[1::100]), ("train", train)):
            for row in rows.select(chosen):
                yield split, row["content"]

    write_documents(folder, documents(), tokenizer, limit=limit, dataset=dataset)

if __name__ == "__main__":
    command(prepare, __doc__)
