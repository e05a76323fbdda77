"""data/wordcount.py on small text files: every prompt is taken apart again and its answer counted
by hand."""
import collections
import re
import sys

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
    folder, rng, texts = tmp_path_factory.mktemp("stories"), np.random.default_rng(0), []
    for i in range(300):
        texts.append(f"{' '.join(rng.choice(SENTENCES, rng.integers(1, 9)))} Story{i} ended.")
    (folder / "a.txt").write_text("<|endoftext|>".join(texts[:200]))
    (folder / "sub").mkdir()
    (folder / "sub" / "b.txt").write_text("\n<|endoftext|>\n".join(texts[200:]))
    return folder

def examples(folder, split):
    """The text of the prompt and the answer of every example of a split, by its mask."""
    data, decode = Split(folder, split), tokenizer({"tokenizer": "bytes"}).decode
    x, y = data.read(data.windows(data.row_length - 1), data.row_length - 1)
    questions = []
    for tokens, targets in zip(np.concatenate((x, x[:, -1:] * 0 + 256), 1).tolist(), y.tolist()):
        begin = 0
        for end in [t + 1 for t, target in enumerate(targets) if target == 256]:
            answer = [target for target in targets[begin:end] if target != -1]
            first = end + 1 - len(answer)
            assert answer == tokens[first:end] + [256] and answer[0] == ord(" ")
            questions.append((decode(tokens[begin:first]), int(decode(answer[1:-1]))))
            begin = end + 1
        assert set(tokens[begin:]) <= {256} and set(targets[begin:]) <= {-1}
    return questions

@pytest.mark.parametrize("join, val, train", [(1, 3, 297), (3, 1, 99)])
def test_answers(stories, tmp_path, join, val, train):
    how = dict(stories=str(stories), tokenizer="bytes", length=1000, join=join)
    wordcount.prepare(tmp_path, **how)
    questions = examples(tmp_path, "val") + examples(tmp_path, "train")
    assert len(questions) == val + train and Split(tmp_path, "val").rows == val
    meta = Split(tmp_path, "train").meta
    assert meta["vocab_size"] == 257 and meta["row_length"]["train"] == 1001
    numbers, shares = [], []
    prompt = r"\[INST\] (.*) How many times word '(.*)' mentioned in the last '(\d+)' sentences\? "
    for text, answer in questions:
        story, word, k = re.fullmatch(prompt + r"\[/INST\]", text, re.S).groups()
        sentences = re.findall(r"[^.!?]+[.!?]", story)
        counts = collections.Counter(re.findall(r"[a-z0-9']+", story.lower()))
        assert counts[word] == max(counts.values()) and 1 <= int(k) <= len(sentences)
        last = " ".join(sentences[-int(k) :]).lower()
        assert answer == re.findall(r"[a-z0-9']+", last).count(word)
        told = re.findall(r"Story(\d+)", story)
        assert len(set(told)) == join
        numbers += told
        shares.append((int(k) - 0.5) / len(sentences))
    assert len(numbers) == len(set(numbers)) == 300 // join * join  # no story is told twice
    assert abs(np.mean(shares) - 0.5) < 5 * 0.29 / len(shares) ** 0.5  # k is uniform

def test_same_seed_same_bytes_and_what_does_not_fit(stories, tmp_path, capsys):
    def made(name, **how):
        wordcount.prepare(tmp_path / name, stories=str(stories), tokenizer="bytes", **how)
        questions = examples(tmp_path / name, "train") + examples(tmp_path / name, "val")
        return contents(tmp_path / name), questions, capsys.readouterr().out.splitlines()[-1]

    first, questions, _ = made("a", length=700)
    assert first == made("b", length=700)[0] != made("c", length=700, seed=1)[0]
    # bytes, and the end, which is no input
    longest = max(len(f"{text} {answer}") for text, answer in questions)
    _, fit, printed = made("d", length=longest)
    assert len(fit) == 300 and "left out" not in printed
    _, fit, printed = made("e", length=longest - 1)
    assert len(fit) == 299 and "1 left out, longer than a row" in printed
    assert len(made("f", limit=40)[1]) == 40

def test_text_without_marks_is_cut_at_blank_lines(tmp_path):
    paragraphs = [f"Paragraph {i} says {'word ' * 30}." for i in range(50)]
    (tmp_path / "book.txt").write_text("\n\n".join(paragraphs) + "\n\n---\n")
    stories = [story["text"] for story in wordcount.read_folder(tmp_path)]
    assert "\n\n".join(stories).replace("\n\n---", "") == "\n\n".join(paragraphs)
    assert all(800 < len(story) < 1100 for story in stories[:-1])

def test_wrong_input(stories, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no .*txt with text in .*empty; name a folder of stories"):
        wordcount.prepare(tmp_path / "a", stories=str(tmp_path / "empty"))
    how = dict(stories=str(stories), tokenizer="bytes")
    with pytest.raises(ValueError, match="3 stories are too few"):
        wordcount.prepare(tmp_path / "a", **how, limit=3, join=3)
    with pytest.raises(ValueError, match="no example fits into length=20"):
        wordcount.prepare(tmp_path / "a", **how, length=20)
    monkeypatch.setitem(sys.modules, "nltk.tokenize", None)
    with pytest.raises(ImportError, match="pip install nltk"):
        wordcount.prepare(tmp_path / "a", **how)

def test_splits_by_k_and_lengths(tmp_path):
    """Figures 8 and 9: val's examples by the number of sentences, and the lengths of stories."""
    (tmp_path / "a.txt").write_text("<|endoftext|>".join(
        f"Story{i} began. " + "It went on. " * (i % 3) for i in range(3000)))
    wordcount.prepare(tmp_path / "set", stories=str(tmp_path), tokenizer="bytes", length=300)
    by_k = collections.defaultdict(list)
    for text, answer in examples(tmp_path / "set", "val"):
        by_k[f"k{re.search(r'last .(.)', text)[1]}"].append((text, answer))
    wanted, meta = {k for k in by_k if len(by_k[k]) >= 10}, Split(tmp_path / "set", "val").meta
    assert {name.partition("_")[0] for name in meta["shards"]} == {"train", "val"} | wanted
    assert wanted and wanted < set(by_k)
    for k in wanted:
        assert examples(tmp_path / "set", k) == by_k[k]
    assert meta["sentences"] == {"1": 1000, "2": 1000, "3": 1000}
    assert meta["words"] == {"2": 1000, "5": 1000, "8": 1000}
