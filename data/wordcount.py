"""WordCount: how often does a word occur in the last k sentences of a story? (CoPE section 5.4
and appendix E)

    python -m data.wordcount             # TinyStories from the hub; about half an hour
    python -m data.wordcount --join=3    # WordCount-hard: three stories per example
    python -m data.wordcount --stories=FOLDER --tokenizer=bytes --out=data/mine  # your own stories

This needs `pip install nltk`, and `datasets` for TinyStories. An example is a prompt and its answer

    [INST] {story} How many times word '{w}' mentioned in the last '{k}' sentences? [/INST] 3

followed by end-of-text. Only the answer and end-of-text carry loss. The word w is the most common
one of the story, k is uniform in [1, number of sentences], and nltk's PunktSentenceTokenizer()
finds the sentences.

The paper leaves three things open. We compare words in lower case. Of equally common words we take
the first. A row of train has as many whole examples as fit, and then padding, whereas a row of val
has one example, so that its sequence error is the fraction of wrong answers.

splits   train, val (1% of the stories); k1, k2, ...: the examples of val that ask about the last k
         sentences, if there are at least ten (Figure 9). meta.json counts the examples
         by their number of sentences and by their number of words (Figure 8)

If you give your own stories, <|endoftext|> separates the stories of a file. In a file without it,
each paragraph is a story. The tokenizer must be that of the model to fine-tune. No story is used
twice.
"""
import collections
import re
from pathlib import Path

import numpy as np

from config import Mistake, optional
from data import command
from data.documents import hub
from data.shards import Writer, rng
from data.text import count_characters, files
from data.tokenizer import tokenizer as load

FEWEST = 10  # a number k gets a split of its own if val has at least this many examples with it
PROMPT = "[INST] {} How many times word '{}' mentioned in the last '{}' sentences? [/INST]"
TINY_STORIES = 2_119_719  # stories in its train split

# tokens: those of the prompt and the answer; targets: how many of the last ones carry loss;
# k: as in the prompt; sentences, words: how many of them the story has
Example = collections.namedtuple("Example", ["tokens", "targets", "k", "sentences", "words"])

def read_stories(source):
    """Returns the stories of a file or a folder of files as rows, [{"text": story}, ...]. Of a
    folder, only *.txt files are read."""
    stories = []
    for path in files(source):
        if path.suffix != ".txt" and path != Path(source):
            continue
        count_characters(path)  # raises Mistake if it is not UTF-8
        text = path.read_text(encoding="utf-8-sig")
        separator = r"<\|endoftext\|>" if "<|endoftext|>" in text else r"\n\s*\n"
        stories += re.split(separator, text)
    return [{"text": story} for story in stories if re.search(r"\w", story)]

def words_of(text):
    return re.findall(r"\w+(?:'\w+)*", text.lower())

def make_example(story, split_sentences, codec, random):
    """Returns an Example. split_sentences(text) returns a list, and `random` is a numpy
    generator."""
    words = words_of(story)
    sentences = split_sentences(story)
    word, _ = collections.Counter(words).most_common(1)[0]
    k = int(random.integers(1, len(sentences) + 1))
    count = sum(words_of(sentence).count(word) for sentence in sentences[-k:])
    prompt = codec.encode_document(PROMPT.format(story, word, k)).tolist()
    answer = [*codec.encode_continuation(f" {count}").tolist(), codec.separator]
    return Example(prompt + answer, len(answer), k, len(sentences), len(words))

def pack(examples, length, end):
    """Yields the tokens and the mask of each row, both (1, length). A row has as many whole
    examples as fit, and then `end` as padding."""
    tokens = []
    mask = []
    for example in examples:
        if len(tokens) + len(example.tokens) > length:
            yield pad(tokens, length, end), pad(mask, length, 0)
            tokens = []
            mask = []
        tokens += example.tokens
        mask += [0] * (len(example.tokens) - example.targets)
        mask += [1] * example.targets
    if tokens:
        yield pad(tokens, length, end), pad(mask, length, 0)

def pad(values, length, end):
    return np.array([values + [end] * (length - len(values))])

def prepare(
    folder,
    stories: str = "",  # a file, or a folder of *.txt, instead of TinyStories
    join: int = 1,  # stories per example
    length: int = 4096,  # tokens per row of train
    tokenizer: str = "gpt2",  # "bytes", or a name that tiktoken or the hub knows
    limit: int = None,  # stories, for a trial
    seed: int = 0,  # other seeds ask other questions
):
    if join < 1:
        raise Mistake(f"join={join} stories do not make an example; use 1 or more")
    if stories:
        corpus = read_stories(stories)
    nltk = optional("nltk")  # if it is missing, nothing is downloaded
    if not stories:
        corpus = hub("roneneldan/TinyStories", split="train", rows=TINY_STORIES)
    codec = load(tokenizer)
    split_sentences = nltk.tokenize.PunktSentenceTokenizer().tokenize
    order = rng(seed, 0).permutation(len(corpus))[:limit]
    if len(order) < 2 * join:
        raise Mistake(f"{len(order)} stories are too few for one example of {join} for training "
                      "and one for validation; give more (and a larger --limit)")
    val_stories = max(len(order) // 100, join)
    # how many examples there are by the number of their sentences, and by that of their words
    counts = {"sentences": collections.Counter(), "words": collections.Counter(), "left_out": 0}

    def examples(numbers):
        """Yields the examples that fit into a row, each of which has `join` of these stories."""
        for first in range(0, len(numbers) - join + 1, join):
            group = numbers[first : first + join].tolist()
            story = " ".join(corpus[i]["text"].strip() for i in group)
            if not words_of(story):
                continue
            example = make_example(story, split_sentences, codec, rng(seed, 1 + group[0]))
            if len(example.tokens) > length + 1:
                counts["left_out"] += 1
                continue
            counts["sentences"][example.sentences] += 1
            counts["words"][example.words] += 1
            yield example

    end = codec.separator
    with Writer(folder, codec.vocab_size, tokenizer, end) as writer:
        val = list(examples(order[:val_stories]))  # in memory, to know the longest
        if not val:
            raise Mistake(f"no example for validation fits into length={length} tokens; increase "
                          "it")
        longest = max(len(example.tokens) for example in val)
        ks = collections.Counter(example.k for example in val)
        frequent = [f"k{k}" for k in sorted(ks) if ks[k] >= FEWEST]
        for split in ["val"] + frequent:
            for example in val:
                if split in ("val", f"k{example.k}"):
                    tokens, mask = next(pack([example], longest, end))
                    writer.write(split, tokens, mask)
        for tokens, mask in pack(examples(order[val_stories:]), length + 1, end):
            writer.write("train", tokens, mask)
        if not writer.written["train"]:
            raise Mistake(f"no example for training fits into length={length} tokens; increase it")
        writer.meta.update(counts)
    print(f"{counts['left_out']:,} examples are left out, because they are longer than a row")

if __name__ == "__main__":
    command(prepare, __doc__)
