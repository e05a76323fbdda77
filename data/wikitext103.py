"""WikiText-103: 28,000 good articles, 100M words (Merity et al. 2017; CoPE section 5.5).

    python -m data.wikitext103
    python -m data.wikitext103 --source=/path/to/wikitext-103-raw --out=data/wikitext103

The splits train, val and test are the text of wiki.{train,valid,test}.raw, unchanged and in one
piece: nothing separates the articles. You can name a folder of such files instead of the hub.
wiki.*.tokens and {train,valid,test}.txt will do too. If a file is missing, so is its split.

The loss is per token of GPT-2's BPE, so compare perplexities exp(loss) only under one tokenizer.
Per word it is

    exp(loss * tokens / words)

with the split's tokens (the sum of its shards) and words, both in meta.json.

Papers with a vocabulary of words also count the end of a line as a word: there are 3,760 lines in
val, 4,358 in test (213,886 and 241,211 words) and 1,801,350 in train.
"""
import functools
import itertools
from pathlib import Path

from data import command
from data.text import digest, hub, write_documents

DOWNLOAD = True
TOKENS = 120_000_000
FILES = {"train": "train", "val": "valid", "test": "test"}
ON_THE_HUB = {"train": "train", "val": "validation", "test": "test"}

def load():
    """The corpus, a datasets.DatasetDict with a column "text", a line in each row."""
    return hub("Salesforce/wikitext", "wikitext-103-raw-v1")

def files(source):
    """A folder -> {split: its file}. FileNotFoundError: there is none."""
    splits = {}
    for split, name in FILES.items():
        for file in (f"{name}.txt", f"wiki.{name}.tokens", f"wiki.{name}.raw"):  # the last one wins
            path = Path(source) / file
            if path.is_file():
                splits[split] = path
    if not splits:
        raise FileNotFoundError(f"source={source!r} has no wiki.train.raw, wiki.train.tokens or "
                                "train.txt, nor such files of valid or test")
    for split in FILES:
        if split not in splits:
            print(f"{source} has no {split} file; that split is left out")
    return splits

def lines_of(rows):
    """The lines of a split of the hub. It has "" where the files have an empty line, " \\n"."""
    return (row["text"] or " \n" for row in rows)

def sections(lines):
    """Lines, joined up to the next heading. A tokenizer that splits off " =" gives the same tokens
    section by section as for the whole text."""
    section = []
    for line in lines:
        if line.startswith(" = ") and section:
            yield "".join(section)
            section = []
        section.append(line)
    if section:
        yield "".join(section)

def prepare(folder, source: str = "", limit: int = None, tokenizer: str = "gpt2", load=load):
    """Write the set into `folder`, from at most `limit` sections of each split."""
    paths = files(source) if source else {}

    def splits():
        parts = {}
        for split, path in paths.items():
            parts[split] = functools.partial(open, path, encoding="utf-8", newline="\n")
        if not source:
            corpus = load()
            for split, name in ON_THE_HUB.items():
                parts[split] = functools.partial(lines_of, corpus[name])
        return {split: functools.partial(documents, lines) for split, lines in parts.items()}

    def documents(lines, skip):
        return itertools.islice(sections(lines()), skip, limit)

    expect = TOKENS if limit is None and not source else None
    origin = {"sha256": {split: digest([paths[split]]) for split in paths}} if source else {}
    write_documents(folder, splits, tokenizer, separator=None, expect=expect, limit=limit,
                    source=source, **origin)

if __name__ == "__main__":
    command(prepare, __doc__)
