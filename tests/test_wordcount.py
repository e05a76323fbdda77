"""data/wordcount.py on small text files: every prompt is taken apart again and its answer counted
by hand."""

import collections
import re
import shutil

import numpy as np
import pytest

from data import wordcount
from data.shards import Split
from data.text import tokenizer

pytest.importorskip("nltk")
SENTENCES = [
    "The cat saw Tom.",
    "It didn't run!",
    "tom, TOM and the cat.",
    "Was it the end?",
    "He said nothing to the dog.",
    "Run.",
]


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("stories"), np.random.default_rng(0)
    texts = [
        f"{' '.join(rng.choice(SENTENCES, rng.integers(1, 9)))} Story{i} ended." for i in range(300)
    ]
    (folder / "a.txt").write_text("<|endoftext|>".join(texts[:200]))
    (folder / "sub").mkdir()
    (folder / "sub" / "b.txt").write_text("\n<|endoftext|>\n".join(texts[200:]))
    return folder


def examples(folder, split):
    """(text of the prompt, answer) of every example of a split, by its mask; and the rows."""
    data, decode = Split(folder, split), tokenizer({"tokenizer": "bytes"}).decode
    x, y = data.read(data.windows(data.row_length - 1), data.row_length - 1)
    questions = []
    for tokens, targets in zip(np.concatenate((x, x[:, -1:] * 0 + 256), 1).tolist(), y.tolist()):
        begin = 0
        for end in [t + 1 for t, target in enumerate(targets) if target == 256]:
            answer = [target for target in targets[begin:end] if target != -1]
            assert answer == tokens[end + 1 - len(answer) : end] + [256] and answer[0] == ord(" ")
            prompt = decode(tokens[begin : end + 1 - len(answer)])
            questions.append((prompt, int(decode(answer[1:-1]))))
            begin = end + 1
        assert set(tokens[begin:]) <= {256} and set(targets[begin:]) <= {-1}
    return questions, data


@pytest.mark.parametrize("join", [1, 3])
def test_answers(stories, tmp_path, join):
    wordcount.prepare(
        tmp_path / "set", stories=str(stories), tokenizer="bytes", length=1000, join=join
    )
    seen, numbers, shares = {}, [], []
    for split, count in (("val", 1 if join == 3 else 3), ("train", 99 if join == 3 else 297)):
        questions, data = examples(tmp_path / "set", split)
        assert len(questions) == count and data.meta["vocab_size"] == 257
        if split == "val":
            assert data.rows == count
        else:
            assert data.row_length == 1001
        for text, answer in questions:
            story, word, k = re.fullmatch(
                r"\[INST\] (.*) How many times word '(.*)' mentioned in the last '(\d+)' "
                r"sentences\? \[/INST\]",
                text,
                re.S,
            ).groups()
            sentences = re.findall(r"[^.!?]+[.!?]", story)
            words = re.findall(r"[a-z0-9']+", story.lower())
            counts = collections.Counter(words)
            assert counts[word] == max(counts.values()) and 1 <= int(k) <= len(sentences)
            assert answer == re.findall(
                r"[a-z0-9']+", " ".join(sentences[-int(k) :]).lower()
            ).count(word)
            told = re.findall(r"Story(\d+)", story)
            assert len(set(told)) == join
            numbers += told
            shares.append((int(k) - 0.5) / len(sentences))
            seen[split] = answer
    assert len(numbers) == len(set(numbers)) == 300 // join * join
    assert abs(np.mean(shares) - 0.5) < 5 * 0.29 / len(shares) ** 0.5  # k is uniform


def test_same_seed_same_bytes_and_what_does_not_fit(stories, tmp_path, capsys):
    def contents(name, **how):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        wordcount.prepare(tmp_path / name, stories=str(stories), tokenizer="bytes", **how)
        return {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}

    assert contents("a", length=700) == contents("b", length=700)
    assert contents("c", length=700, seed=1) != contents("a", length=700)
    contents("d", length=250)
    left = int(
        re.search(r"(\d+) left out, longer than a row", capsys.readouterr().out.splitlines()[-1])[1]
    )
    assert (
        0 < left == 300 - sum(len(examples(tmp_path / "d", split)[0]) for split in ("train", "val"))
    )
    every = examples(tmp_path / "a", "train")[0] + examples(tmp_path / "a", "val")[0]
    longest = max(
        len(f"{text} {answer}") + 1 for text, answer in every
    )  # bytes, and the end: the last is no input
    for name, length, out in (("f", longest - 1, 0), ("g", longest - 2, 1)):
        contents(name, length=length)
        assert ("left out" in capsys.readouterr().out) == out
    contents("e", limit=40)
    assert sum(len(examples(tmp_path / "e", split)[0]) for split in ("train", "val")) == 40


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
    with pytest.raises(ValueError, match="3 stories are too few"):
        wordcount.prepare(tmp_path / "a", stories=str(stories), tokenizer="bytes", limit=3, join=3)
    with pytest.raises(ValueError, match="no example fits into length=20"):
        wordcount.prepare(tmp_path / "a", stories=str(stories), tokenizer="bytes", length=20)
    monkeypatch.setitem(__import__("sys").modules, "nltk.tokenize", None)
    with pytest.raises(ImportError, match="pip install nltk"):
        wordcount.prepare(tmp_path / "a", stories=str(stories))


def test_splits_by_k_and_lengths(tmp_path):
    """Figures 8 and 9: val's examples by the number of sentences, and the lengths of stories."""
    (tmp_path / "a.txt").write_text("<|endoftext|>".join(
        f"Story{i} began. " + "It went on. " * (i % 3) for i in range(3000)))
    wordcount.prepare(tmp_path / "set", stories=str(tmp_path), tokenizer="bytes", length=300)
    val, data = examples(tmp_path / "set", "val")
    by_k = collections.defaultdict(list)
    for text, answer in val:
        by_k[f"k{re.search(r'last .(.)', text)[1]}"].append((text, answer))
    wanted = {k for k in by_k if len(by_k[k]) >= 10}
    assert {name.partition("_")[0] for name in data.meta["shards"]} == {"train", "val"} | wanted
    assert wanted and wanted < set(by_k)
    for k in wanted:
        assert examples(tmp_path / "set", k)[0] == by_k[k]
    assert data.meta["sentences"] == {"1": 1000, "2": 1000, "3": 1000}
    assert data.meta["words"] == {"2": 1000, "5": 1000, "8": 1000}
