"""WikiText-103: 28,000 Wikipedia articles, 100M words (Merity et al. 2017; CoPE, section 5.5).

    python -m data.wikitext103
    python -m data.wikitext103 --limit=100  # a trial with the first 100 sections of each split

The splits train, val and test are the text of wiki.{train,valid,test}.raw, unchanged and in one
piece, because nothing separates the articles there.

The loss is per token of GPT-2's BPE, so perplexities exp(loss) can be compared only under one
tokenizer. The perplexity per word is

    exp(loss * tokens / words)

where meta.json has the tokens of a split (the sum of its shards), and val has 213,886 words and
test 241,211. Papers with a vocabulary of words also count the end of a line as a word. There are
3,760 lines in val and 4,358 in test.
"""
import itertools

from data import command
from data.documents import hub, write_documents

SPLITS = {"train": "train", "val": "validation", "test": "test"}  # our names, and the hub's
LINES = {"train": 1_801_350, "val": 3_760, "test": 4_358}

def sections(lines):
    """Yields the text of each section, which begins with a heading. Tokenized one by one, the
    sections give the tokens of the whole text if the tokenizer splits " =" off from what precedes
    it."""
    section = []
    for line in lines:
        if line.startswith(" = ") and section:
            yield "".join(section)
            section = []
        section.append(line)
    if section:
        yield "".join(section)

def prepare(
    folder,
    limit: int = None,  # sections of each split, for a trial
    tokenizer: str = "gpt2",  # "bytes", or a name that tiktoken or the hub knows
):
    def documents():
        for split, theirs in SPLITS.items():
            rows = hub("Salesforce/wikitext", "wikitext-103-raw-v1", split=theirs,
                       rows=LINES[split])
            # an empty line is " \n" in the files, but "" on the hub
            lines = (row["text"] or " \n" for row in rows)
            for section in itertools.islice(sections(lines), limit):
                yield split, section

    write_documents(folder, documents(), tokenizer, separator=None, limit=limit)

if __name__ == "__main__":
    command(prepare, __doc__)
