"""WordCount: how often does a word occur in the last k sentences of a story? (CoPE section 5.4
and appendix E)

    python -m data.wordcount             # TinyStories from the hub; an hour or two on eight cores
    python -m data.wordcount --join=3    # WordCount-hard: samples of three stories
    python -m data.wordcount --stories=FOLDER --tokenizer=bytes --out=data/mine  # a folder of *.txt

It needs `pip install nltk`, and `datasets` for TinyStories. An example is a prompt and its answer,

    [INST] {story} How many times word '{w}' mentioned in the last '{k}' sentences? [/INST] 3

and end-of-text. The answer and the end carry loss. w is the most common word of the story, k is
uniform in [1, number of sentences], and nltk's PunktSentenceTokenizer() finds the sentences. The
paper leaves three things open. Here words are compared in lower case, the first of equally common
words is taken, and a training row holds as many whole examples as fit, then padding. A validation
row is one example, so its sequence error is the share of wrong answers.

splits   train, val (99 : 1, by story); k1, k2, ...: the val examples that count over k sentences,
         for a k with at least ten (Figure 9). meta.json counts the lengths of all stories, in
         sentences and in words (Figure 8)
options  stories: a folder of text files in place of TinyStories, with <|endoftext|> between the
         stories, or cut at blank lines into pieces of some 800 letters; join: stories per sample,
         none used twice; length: of the training rows, in tokens; tokenizer: that of the model to
         fine-tune; limit: the number of stories, for a trial; seed
"""
import collections
import math
import re
from pathlib import Path

import numpy as np

from data import command
from data.shards import Writer, rng
from data.text import hub, load_encoding, workers

DOWNLOAD = True
PROMPT = "[INST] {} How many times word '{}' mentioned in the last '{}' sentences? [/INST]"

def load():
    """The stories, a datasets.Dataset with a column "text"."""
    return hub("roneneldan/TinyStories", split="train")

def read_folder(folder):
    """The stories of a folder's *.txt files, [{"text": story}, ...]. ValueError: there are none."""
    stories = []
    for path in sorted(Path(folder).rglob("*.txt")):
        text = path.read_text(encoding="utf-8")
        if "<|endoftext|>" in text:
            stories += text.split("<|endoftext|>")
            continue
        piece = ""
        for paragraph in re.split(r"\n\s*\n", text):
            piece += paragraph + "\n\n"
            if len(piece) > 800:
                stories.append(piece)
                piece = ""
        stories.append(piece)
    stories = [{"text": story.strip()} for story in stories if re.search(r"\w", story)]
    if not stories:
        raise ValueError(f"no *.txt with text in {folder}; name a folder of stories")
    return stories

def words(text):
    return re.findall(r"\w+(?:'\w+)*", text.lower())

def question(story, sentences, random):
    """(prompt, answer, k, number of sentences) of a story. `sentences` cuts a text into sentences,
    `random` is a numpy generator."""
    parts = sentences(story)
    word = collections.Counter(words(story)).most_common(1)[0][0]
    k = int(random.integers(1, len(parts) + 1))
    answer = f" {sum(words(part).count(word) for part in parts[-k:])}"
    return PROMPT.format(story, word, k), answer, k, len(parts)

def start_worker(*state):
    global worker
    worker = state

def work(groups):
    """Groups of stories, numbers (n, join) -> examples: (tokens, how many are the answer, k, number
    of sentences, number of words)."""
    corpus, tokenizer, sentences, seed = worker
    encoding, examples = load_encoding(tokenizer), []
    for group in groups.tolist():
        story = " ".join(corpus[i]["text"].strip() for i in group)
        if words(story):
            *texts, k, parts = question(story, sentences, rng(seed, 1 + group[0]))
            prompt, answer = (encoding.encode_ordinary(text) for text in texts)
            tokens = [*prompt, *answer, encoding.eot_token]
            examples.append((tokens, len(answer) + 1, k, parts, len(words(story))))
    return examples

def pack(examples, length, end):
    """Yields rows, tokens and mask, both (1, length): as many whole examples as fit, then `end`."""
    tokens, mask = [], []
    for example, answer, *_ in examples:
        if len(tokens) + len(example) > length:
            yield pad(tokens, length, end), pad(mask, length, 0)
            tokens, mask = [], []
        tokens += example
        mask += [0] * (len(example) - answer) + [1] * answer
    if tokens:
        yield pad(tokens, length, end), pad(mask, length, 0)

def pad(values, length, end):
    return np.array([values + [end] * (length - len(values))])

def prepare(folder, stories: str = "", join: int = 1, length: int = 4096, tokenizer: str = "gpt2",
            limit: int = None, seed: int = 0, load=load):
    """Write the set into `folder`. ValueError: too few stories. ImportError: no nltk."""
    try:
        from nltk.tokenize import PunktSentenceTokenizer
    except ImportError:
        raise ImportError("finding sentences needs a package: pip install nltk") from None
    corpus, encoding = read_folder(stories) if stories else load(), load_encoding(tokenizer)
    order = rng(seed, 0).permutation(len(corpus))[:limit]
    if len(order) < 2 * join:
        raise ValueError(f"{len(order)} stories are too few for training and validation samples of "
                         f"{join}; name more")
    first = max(len(order) // 100, join)  # this many stories are for validation
    end, count = encoding.eot_token, collections.Counter()
    lengths = {"sentences": collections.Counter(), "words": collections.Counter()}

    def examples(split, numbers):
        groups = numbers[: len(numbers) // join * join].reshape(-1, join)
        for block in pool.map(work, np.array_split(groups, math.ceil(len(groups) / 256))):
            for example in block:
                fits = len(example[0]) <= length + 1
                count[split if fits else "left out, longer than a row"] += 1
                if fits:
                    for counter, n in zip(lengths.values(), example[3:]):
                        counter[n] += 1
                    yield example
            counts = ", ".join(f"{n:,} {what}" for what, n in count.items())
            print(f"\r{folder}: {counts}", end=" ", flush=True)

    state = corpus, tokenizer, PunktSentenceTokenizer().tokenize, seed
    with Writer(folder) as writer, workers(start_worker, *state) as pool:
        val = list(examples("val", order[:first]))  # in memory, to know the longest
        if not val:
            raise ValueError(f"no example fits into length={length} tokens; take more")
        longest, ks = max(len(tokens) for tokens, *_ in val), collections.Counter(x[2] for x in val)
        for split in ("val", *(f"k{k}" for k in sorted(ks) if ks[k] >= 10)):
            for example in val:
                if split in ("val", f"k{example[2]}"):
                    writer.write(split, *next(pack([example], longest, end)))
        for row in pack(examples("train", order[first:]), length + 1, end):
            writer.write("train", *row)
        print()
        writer.finish(encoding.n_vocab, tokenizer, end, **lengths)

if __name__ == "__main__":
    command(prepare, __doc__)
