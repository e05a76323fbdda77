"""write_documents and the text corpora, against shards that `check` builds token by token.

The corpora are small local files in the hub's format. No tokenizer needs a download.
"""
import collections
import functools
import importlib
import itertools
import json
import multiprocessing
import os
import random
import re
import signal
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from conftest import contents, one_line

from data import text as text_corpora
from data.shards import Split
from data.text import write_documents
from data.tokenizer import identity, load_encoding, tokenizer, with_checksum


def document(i):
    """A text of up to 400 letters. Not all of it is ASCII, and it may spell out the separator."""
    rng = random.Random(i)
    return "".join(rng.choices([*"abcdefghijkl! é🐍", "<|endoftext|>"], k=rng.randrange(400)))

TEXTS = [document(i) for i in range(300)]

def corpus_of(parts):
    """The function that write_documents takes, for the corpus {part: its texts}."""
    return lambda: {part: lambda skip, texts=texts: texts[skip:] for part, texts in parts.items()}

def check(folder, parts, shard_tokens=100_000_000, separator="after", tokens=None, shortest=0):
    """Asserts that the set holds the corpus {part: texts}, as write_documents describes it."""
    shards = {}  # split: the ids of each of its shards
    written = collections.Counter()  # split: the number of its tokens
    for part, source in parts.items():
        budgets = tokens or {part: None}
        for text in source:
            ids = [*text.encode()]
            if len(ids) < shortest:
                continue
            ids = [256] * (separator == "before") + ids + [256] * (separator == "after")
            free = [s for s, n in budgets.items() if n is None or written[s] < n]
            if not free:
                break
            split = free[0]
            mine = shards.setdefault(split, [[]])
            if len(mine[-1]) >= shard_tokens:
                mine.append([])
            mine[-1] += ids
            written[split] += len(ids)
    want = {}
    for split, lists in shards.items():
        for k, ids in enumerate(lists):
            if ids:
                want[f"{split}_{k:06d}.bin"] = np.array(ids, "<u2").tobytes()
    got = contents(folder)
    meta = json.loads(got.pop("meta.json"))
    assert got == want
    assert (meta["tokenizer"], meta["vocab_size"]) == ("bytes", 257)
    assert meta["separator"] == (256 if separator else None)

def killed_at(moment, function, *arguments, **options):
    """Calls a function in a process that kills itself at call number `moment` to the functions that
    make files durable or give them their names. Returns whether it did."""
    calls = itertools.count(1)

    def or_die(function):
        def call(*arguments):
            if next(calls) == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            function(*arguments)
        return call

    def run():
        for name in ("fsync", "replace", "rename"):
            setattr(os, name, or_die(getattr(os, name)))
        function(*arguments, **options)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0

def drawn_corpus(seed):
    """Returns {part: its texts} and drawn options of write_documents."""
    dice = random.Random(seed)
    how = dict(separator=dice.choice(["before", "after", None]), shortest=dice.choice([0, 150]),
               shard_tokens=dice.choice([400, 2500, 10**6]))
    first, second = sorted(dice.choices(range(41), k=2))
    parts = {"val": TEXTS[:first], "test": TEXTS[first:second], "train": TEXTS[second:40]}
    if dice.random() < 0.5:
        parts = {"val": TEXTS[:40]}
        sizes = [len(text.encode()) for text in TEXTS[:9]]
        separators = 1 if how["separator"] else 0
        exact = sum(size + separators for size in sizes if size >= how["shortest"])
        how["tokens"] = dict(val=dice.choice([exact, dice.randint(1, 6000)]),
                             test=dice.choice([1, dice.randint(1, 6000), 10**9]),
                             train=dice.choice([None, 2000]))
    return parts, how

@pytest.mark.parametrize("seed", range(12))
def test_a_killed_corpus_resumes_with_the_same_files(tmp_path, seed):
    """The files are right, and no shard that was saved is forgotten."""
    parts, how = drawn_corpus(seed)
    corpus = corpus_of(parts)
    write_documents(tmp_path / "whole", corpus, "bytes", **how)
    check(tmp_path / "whole", parts, **how)
    dice = random.Random(seed)
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        shards = {}
        moment = dice.randint(1, 3 * len(contents(tmp_path / "whole")))
        for _ in range(20):
            if not killed_at(moment, write_documents, folder, corpus, "bytes", **how):
                break
            before = shards
            saved = Path(f"{folder}.part") / "meta.json"
            if saved.exists():
                shards = json.loads(saved.read_text())["shards"]
            assert before.items() <= shards.items()
            moment = dice.randint(3, 20)  # fewer would not save a shard
        write_documents(folder, corpus, "bytes", **how)  # which does nothing to a complete set
        assert contents(folder) == contents(tmp_path / "whole")
        assert not Path(f"{folder}.part").exists()

@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    """A byte-level tokenizer.json, trained here. Its end-of-text token is </s>, as in Llama's."""
    tokenizers = pytest.importorskip("tokenizers")
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = byte_level(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"],
                                             initial_alphabet=byte_level.alphabet())
    trained.train_from_iterator(TEXTS, trainer)
    # settings that a tokenizer.json may contain, and that a corpus must not follow
    trained.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    trained.enable_truncation(20)
    trained.enable_padding(length=20)
    path = str(tmp_path_factory.mktemp("vocabulary") / "tokenizer.json")
    trained.save(path)
    return path

def test_a_tokenizer_file(vocabulary, tmp_path):
    """A text that spells out </s> stays text. Only in a prompt does </s> become the token."""
    encoding = load_encoding(vocabulary)
    text = "def naïve(): return 'κόσμε 🐍' </s> <s>" * 9
    ids = encoding.encode_ordinary(text)
    assert len(ids) > 20 and 0 not in ids and 1 not in ids
    assert encoding.decode(ids) == text
    mine = tokenizer({"tokenizer": vocabulary})
    first, second = encoding.encode_ordinary("ab"), encoding.encode_ordinary("cd")
    assert mine.encode("ab</s>cd") == [*first, 1, *second]
    assert mine.decode(mine.encode(text)) == text

    write_documents(tmp_path / "set", corpus_of({"train": TEXTS}), vocabulary)
    want = []
    for text in TEXTS:
        want += [*encoding.encode_ordinary(text), 1]
    assert np.fromfile(tmp_path / "set" / "train_000000.bin", "<u2").tolist() == want
    meta = Split(tmp_path / "set", "train").meta
    assert (meta["tokenizer"], meta["separator"], meta["vocab_size"]) == (
        f"{vocabulary}#{zlib.crc32(Path(vocabulary).read_bytes()):08x}", 1, 400)

    changed = tmp_path / "tokenizer.json"  # after data were written with it
    changed.write_text(Path(vocabulary).read_text() + " ")
    assert identity(meta["tokenizer"]) == identity(with_checksum(os.path.relpath(vocabulary)))
    with pytest.raises(ValueError, match="it has changed.*; put the file there, as it was when"):
        tokenizer({"tokenizer": meta["tokenizer"].replace(vocabulary, str(changed))})
    changed.write_text(Path(vocabulary).read_text().replace("</s>", "<end>"))
    with pytest.raises(ValueError, match="it must be known and have </s> or <.endoftext.>"):
        tokenizer({"tokenizer": with_checksum(str(changed))})

def wiki(lines, seed):
    """Lines of WikiText's format: headings of several levels, empty lines, and a paragraph that
    looks like a heading."""
    kinds = [" \n", " = a@b = \n", " = = c d = = \n", " =é , b . \n", " = e \n", " f <unk> g \n",
             "  =  h \n"]
    return [" \n", *random.Random(seed).choices(kinds, k=lines - 1)]

WIKI = {"train": wiki(900, 1), "validation": wiki(50, 2), "test": wiki(70, 3)}
SECTIONS = {}  # a section begins with a line that looks like a heading
for split, lines in WIKI.items():
    SECTIONS[split] = re.split("(?m)^(?= = )", "".join(lines))
BOOKS = ["".join(TEXTS[i : i + 8]) for i in range(0, 300, 8)]  # of about 4000 tokens
NEW_ORDER = np.random.default_rng(2357).permutation(300)  # like nanoGPT's
SHUFFLED = [TEXTS[i] for i in NEW_ORDER]
HUB = {  # (data set, configuration or revision): its splits
    ("allenai/c4", "en"): {"train": TEXTS[60:], "validation": TEXTS[:60]},
    ("HuggingFaceFW/fineweb", "sample-10BT"): {"train": BOOKS},
    ("HuggingFaceFW/fineweb-edu", "sample-10BT"): {"train": TEXTS},
    ("Skylion007/openwebtext", None): {"train": TEXTS},
    ("Skylion007/openwebtext", "refs/pr/22"): {"train": TEXTS},
    ("emozilla/pg19-test", None): {"test": BOOKS},
    # the hub has "" for the files' empty lines
    ("Salesforce/wikitext", "wikitext-103-raw-v1"): {
        split: ["" if line == " \n" else line for line in lines] for split, lines in WIKI.items()},
    ("codeparrot/codeparrot-clean-train", None): {"train": TEXTS},
}
CORPORA = [  # a script, its options, what it must write, and how, as `check` takes it
    ("c4", dict(train=100, val=20), {"val": TEXTS[:20], "train": TEXTS[60:160]}, {}),
    ("fineweb", dict(tokens=84_007), {"val": BOOKS},
     dict(shortest=4000, tokens={"val": 6000, "test": 6000, "train": 72_007})),
    ("fineweb_edu", dict(limit=90), {"val": TEXTS[:90]},
     dict(separator="before", shard_tokens=9000,
          tokens={"val": 9000, "test": 9000, "train": None})),
    # `datasets` shuffles the texts, and the first 0.0005, rounded up, are its test part, our val
    ("openwebtext", {}, {"val": SHUFFLED[:1], "train": SHUFFLED[1:]}, {}),
    ("openwebtext", dict(revision="refs/pr/22"), {"val": SHUFFLED[:1], "train": SHUFFLED[1:]}, {}),
    ("pg19", dict(limit=30), {"test": BOOKS[:30]}, {}),
    ("wikitext103", dict(limit=30),
     {"train": SECTIONS["train"][:30], "val": SECTIONS["validation"][:30],
      "test": SECTIONS["test"][:30]}, dict(separator=None)),
    ("code", dict(limit=150), {"val": TEXTS[:150:100], "test": TEXTS[1:150:100],
                               "train": TEXTS[2:100] + TEXTS[102:150]}, {}),
]

@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Datasets loads HUB from local files of the hub's format, and nothing from the network."""
    datasets = pytest.importorskip("datasets")
    load = datasets.load_dataset

    def load_dataset(path, name=None, split=None, streaming=False, revision=None):
        column = "content" if "codeparrot" in path else "text"
        files = {}
        for part, values in HUB[path, name or revision].items():
            files[part] = str(tmp_path / f"{part}.parquet")
            datasets.Dataset.from_dict({column: values}).to_parquet(files[part])
        return load("parquet", data_files=files, split=split, streaming=streaming,
                    cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)

@pytest.mark.parametrize("name, options, parts, how", CORPORA)
def test_corpora_of_the_hub(tmp_path, hub, name, options, parts, how):
    """Each corpus is written by a process that dies after its first shard, and then resumed."""
    script = importlib.import_module(f"data.{name}")
    prepare = functools.partial(script.prepare, tmp_path / "set", tokenizer="bytes", **options)
    assert killed_at(4, prepare)
    prepare()
    check(tmp_path / "set", parts, **how)

@pytest.mark.parametrize("seed", range(8))
def test_a_text_becomes_both_splits(tmp_path, monkeypatch, seed):
    """Files of random lines are read in pieces of a random size. The end of each file is for
    validation."""
    dice = random.Random(seed)
    kinds = ["a line\n", "é🐍\r\n", "\n", "x" * 30, " ", "\r", "\u2028", "<|endoftext|>"]
    monkeypatch.setattr(text_corpora, "PIECE", dice.choice([5, 64, 1000]))
    val = dice.choice([0.1, 0.25, 0.9])
    source = tmp_path / "my texts"
    (source / "a").mkdir(parents=True)
    want = {"train": [], "val": []}
    for name in ("a/01.md", "a/02.txt", "b.md"):
        text = "".join(dice.choices(kinds, k=dice.randint(0, 400)))
        (source / name).write_bytes(text.encode())
        cut = round(len(text) * (1 - val))
        want["train"] += [*text[:cut].encode(), 256]
        want["val"] += [*text[cut:].encode(), 256]
    (source / "a" / ".hidden").write_bytes(b"\xe9")
    text_corpora.prepare(tmp_path / "set", source=str(source), val=val)
    for split, tokens in want.items():
        assert np.fromfile(tmp_path / "set" / f"{split}_000000.bin", "<u2").tolist() == tokens

def test_a_long_text_needs_as_much_memory_as_a_short_one(tmp_path, monkeypatch):
    monkeypatch.setattr(text_corpora, "PIECE", 1000)
    small = functools.partial(write_documents, shard_tokens=50_000)
    monkeypatch.setattr(text_corpora, "write_documents", small)
    peaks = []
    for size in (10_000, 300_000, 2_000_000):  # the first run also loads modules
        (tmp_path / "text").write_text("some words of a line\n" * (size // 21))
        tracemalloc.start()
        text_corpora.prepare(tmp_path / str(size), source=str(tmp_path / "text"))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < 1.3 * peaks[1]

def test_a_second_start_with_another_text_is_refused(tmp_path, monkeypatch, capsys):
    """Otherwise a set could mix two texts, or not be the one that was asked for."""
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("a text")
    Path("edited").write_text("A text")  # as long as before
    text_corpora.prepare(tmp_path / "direct", source="text")
    # the split train is saved by then
    assert killed_at(4, text_corpora.prepare, tmp_path / "set", source="text")
    for name in ("set.part", "set"):
        before = contents(name)
        assert len(before) > 1
        with pytest.raises(ValueError) as error:
            text_corpora.prepare(tmp_path / "set", source="edited", val=0.2)
        one_line(error, f"{name} was written from another source or with other options",
                 "in sha256, val; delete it to start over")
        assert contents(name) == before
        text_corpora.prepare(tmp_path / "set", source="text")
    assert "set is complete" in capsys.readouterr().out
    assert contents("set") == contents("direct")
