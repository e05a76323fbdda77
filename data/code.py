"""Source code, for CoPE's experiment on code (section 5.6). It can come from any data set on the
hub that has one file per row.

    python -m data.code                              # 50 GB of Python files from GitHub
    python -m data.code --out=data/code_valid --dataset=codeparrot/codeparrot-clean-valid  # smaller

The paper trains on the code of Llama 2's private mix, which is not public. Of every hundred files,
one is for validation and one for testing. The files of one project land in all three splits, which
makes val and test easier than code from projects that the model has not seen. End-of-text follows
each file.

The data set must have the text of a file in its column `content`. Rows without a text are left out.
If it needs a login, run `hf auth login` first.

splits   train, val, test
"""
from config import Mistake
from data import command
from data.documents import LLAMA, hub, write_documents


def prepare(
    folder,
    dataset: str = "codeparrot/codeparrot-clean-train",  # its name on the hub
    limit: int = None,  # files, for a trial
    tokenizer: str = LLAMA,  # "bytes", or a name that tiktoken or the hub knows
):
    def documents():
        rows = hub(dataset, split="train")
        if "content" not in rows.column_names:
            raise Mistake(f"{dataset} has no column `content`, only "
                          f"{', '.join(rows.column_names)}; name another one with --dataset")
        numbers = range(len(rows))[:limit]
        train = [i for i in numbers if i % 100 > 1]
        for split, chosen in (("val", numbers[::100]), ("test", numbers[1::100]), ("train", train)):
            for row in rows.select(chosen):
                if row["content"] is not None:
                    yield split, row["content"]

    write_documents(folder, documents(), tokenizer, limit=limit, dataset=dataset)

if __name__ == "__main__":
    command(prepare, __doc__)
