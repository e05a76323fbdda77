"""WikiText-103: 28,000 good articles, 100M words (Merity et al. 2017; CoPE section 5.5).

    python -m data.wikitext103
    python -m data.wikitext103 --source=/path/to/wikitext-103-raw --out=data/wikitext103

The splits train, val and test are the text of wiki.{train,valid,test}.raw, unchanged and in one
piece, because nothing separates the articles there. Instead of the hub, you can name a folder with
these files; wiki.*.tokens and {train,valid,test}.txt are also read. If a file is missing, its split
is left out.

The loss is per token of GPT-2's BPE, so perplexities exp(loss) can be compared only under one
tokenizer. The perplexity per word is

    exp(loss * tokens / words)

where meta.json has the tokens of a split (the sum of its shards) and its words.

Papers with a vocabulary of words also count the end of a line as a word. There are 3,760 lines in
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
    """Returns the corpus, a datasets.DatasetDict with one line per row, in a column "text"."""
    return hub("Salesforce/wikitext", "wikitext-103-raw-v1")

def files(source):
    """Returns {split: its file} of a folder. Raises FileNotFoundError if it has none of them."""
    splits = {}
    for split, name in FILES.items():
        # if there are several, the last of these is taken
        for file in (f"{name}.txt", f"wiki.{name}.tokens", f"wiki.{name}.raw"):
            path = Path(source) / file
            if path.is_file():
                splits[split] = path
    if not splits:
        raise FileNotFoundError(f"source={source!r} has no wiki.train.raw, wiki.train.tokens or "
                                "train.txt, nor such a file of valid or test; name a folder that "
                                "has one")
    for split in FILES:
        if split not in splits:
            print(f"{source} has no {split} file; that split is left out")
    return splits

def lines_of(rows):
    """Returns the lines of a split of the hub, which has "" for the files' empty lines, " \\n"."""
    return (row["text"] or " \n" for row in rows)

def sections(lines):
    """Yields the lines of each section, joined. A section begins with a heading. Its tokens are
    those that the whole text would get, if the tokenizer splits " =" off from what precedes it."""
    section = []
    for line in lines:
        if line.startswith(" = ") and section:
            yield "".join(section)
            section = []
        section.append(line)
    if section:
        yield "".join(section)

def prepare(folder, source: str = "", limit: int = None, tokenizer: str = "gpt2", load=load):
    """Writes the set into `folder`, from at most `limit` sections of each split."""
    paths = files(source) if source else {}

    def splits():
        lines = {}  # split -> a function that returns its lines
        for split, path in paths.items():
            lines[split] = functools.partial(open, path, encoding="utf-8", newline="\n")
        if not source:
            corpus = load()
            for split, name in ON_THE_HUB.items():
                lines[split] = functools.partial(lines_of, corpus[name])
        return {split: functools.partial(documents, lines[split]) for split in lines}

    def documents(lines, skip):
        return itertools.islice(sections(lines()), skip, limit)

    settings = {"limit": limit, "source": source}
    if source:
        settings["sha256"] = {split: digest([paths[split]]) for split in paths}
    expect = TOKENS if limit is None and not source else None
    write_documents(folder, splits, tokenizer, separator=None, expect=expect, **settings)

if __name__ == "__main__":
    command(prepare, __doc__)
