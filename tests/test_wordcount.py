"""data/wordcount.py on small text files: every prompt is taken apart again and its answer counted
by hand."""
import collections
import re

import numpy as np
import pytest
from conftest import contents

from data import wordcount
from data.shards import Split
from data.text import tokenizer

pytest.importorskip("nltk")
SENTENCES = ["The cat saw Tom.", "It didn't run!", "tom, TOM and the cat.", "Was it the end?",
             "He said nothing to the dog.", "Run."]

@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stories")
    rng = np.random.default_rng(0)
    texts = []
    for i in range(2000):
        begin = " ".join(rng.choice(SENTENCES, rng.integers(0, 3)))
        texts.append(f"{begin} Story{i} ended.")
    (folder / "a.txt").write_text("<|endoftext|>".join(texts[:900]))
    (folder / "b.txt").write_text("\n<|endoftext|>\n".join(texts[900:]))
    return str(folder)

def examples(folder, split):
    """The text of the prompt and the answer of every example of a split, by its mask."""
    data = Split(folder, split)
    decode = tokenizer({"tokenizer": "bytes"}).decode
    x, y = data.read(data.windows(data.row_length - 1), data.row_length - 1)
    found = []
    for inputs, targets in zip(x.tolist(), y.tolist()):
        tokens = [*inputs, 256]
        begin = 0
        for end in [t + 1 for t, target in enumerate(targets) if target == 256]:
            answer = [target for target in targets[begin:end] if target != -1]
            first = end + 1 - len(answer)
            assert answer == tokens[first:end] + [256] and answer[0] == ord(" ")
            found.append((decode(tokens[begin:first]), int(decode(answer[1:-1]))))
            begin = end + 1
        assert set(tokens[begin:]) <= {256} and set(targets[begin:]) <= {-1}
    return found

PROMPT = re.compile(r"\[INST\] (.*) How many times word '(.*)' mentioned in the last '(\d+)' "
                    r"sentences\? \[/INST\]", re.S)

@pytest.mark.parametrize("join, val, train", [(1, 20, 1980), (3, 6, 660)])
def test_answers(stories, tmp_path, join, val, train):
    how = dict(stories=stories, tokenizer="bytes", length=700, join=join)
    wordcount.prepare(tmp_path / "set", **how)
    questions = {split: examples(tmp_path / "set", split) for split in ("val", "train")}
    assert {split: len(questions[split]) for split in questions} == dict(val=val, train=train)
    meta = Split(tmp_path / "set", "train").meta
    assert meta["vocab_size"] == 257 and meta["row_length"]["train"] == 701
    told = []
    by_k = collections.defaultdict(list)
    lengths = collections.Counter()
    for text, answer in questions["val"] + questions["train"]:
        story, word, k = PROMPT.fullmatch(text).groups()
        sentences = re.findall(r"[^.!?]+[.!?]", story)
        counts = collections.Counter(re.findall(r"[a-z0-9']+", story.lower()))
        assert counts[word] == max(counts.values()) and 1 <= int(k) <= len(sentences)
        last = " ".join(sentences[-int(k) :]).lower()
        assert answer == re.findall(r"[a-z0-9']+", last).count(word)
        told += re.findall(r"Story(\d+)", story)
        lengths[str(len(sentences))] += 1
        if (text, answer) in questions["val"]:
            by_k[f"k{k}"].append((text, answer))
    assert len(told) == len(set(told)) == 2000 // join * join  # no story is told twice
    assert meta["sentences"] == lengths
    # a split of its own for each k with ten examples of val
    names = {name.rpartition("_")[0] for name in meta["shards"]}
    assert "k1" in names or join == 3
    assert names == {"val", "train"} | {k for k in by_k if len(by_k[k]) >= 10}
    for k in names & by_k.keys():
        assert examples(tmp_path / "set", k) == by_k[k]

    wordcount.prepare(tmp_path / "again", **how)
    wordcount.prepare(tmp_path / "other", **how, seed=1)
    assert contents(tmp_path / "again") == contents(tmp_path / "set")
    assert contents(tmp_path / "other") != contents(tmp_path / "set")
