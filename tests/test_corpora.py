"""write_documents and the text corpora, against files built by hand, one token at a time.

The corpora are small local files in the original formats. No tokenizer needs a download.
"""
import contextlib
import functools
import importlib
import inspect
import itertools
import json
import multiprocessing
import os
import random
import re
import runpy
import signal
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
from conftest import contents, fails, one_line
from test_data import forked

from data import c4, code, fineweb, fineweb_edu, openwebtext, pg19, shards, tinystories, wikitext103
from data import text as text_corpora
from data.shards import Split
from data.text import load_encoding, texts, tokenizer, write_documents

ROOT = Path(__file__).parent.parent
CORPORA = ("c4 code fineweb fineweb_edu human_genome jsb maestro openwebtext pg19 tinystories "
           "wikitext103 wordcount").split()

def documents(skip, count=300, delay=0.0):
    """Texts of 0 to 400 letters, from number `skip` on. Not all is ASCII, and some spell out the
    separator."""
    for i in range(skip, count):
        time.sleep(delay)
        rng = random.Random(i)
        yield "".join(rng.choices([*"abcdefghijkl é🐍", "<|endoftext|>"], k=rng.randrange(400)))

# name -> (where each part's documents begin, the options of write_documents)
SHAPES = {
    "two parts": ({"val": 0, "train": 7}, {}),
    "an empty part": ({"val": 0, "train": 0}, {}),
    "three, unseparated": ({"train": 0, "val": 30, "test": 37}, {"separator": None}),
    "by tokens": ({"val": 0}, {"tokens": {"val": 3000, "train": None}, "separator": "before"}),
    "budget": ({"val": 0},
               {"tokens": {"val": 2500, "test": 2501, "train": 4000}, "shortest": 150}),
    "budgets of one document": ({"val": 0}, {"tokens": {"val": 5, "test": 1, "dev": 6}}),
    "budget beyond the text": ({"val": 0}, {"tokens": {"val": 5000, "train": 10**9}}),
}

def corpus(shape, count=60):
    """-> the corpus, what is in it, and the options of write_documents."""
    begins, options = SHAPES[shape]
    ends = [*list(begins.values())[1:], count]
    parts = {}
    for (split, first), last in zip(begins.items(), ends):
        parts[split] = lambda skip, first=first, last=last: documents(first + skip, last)
    return parts, {split: list(source(0)) for split, source in parts.items()}, options

def check(folder, parts, shard_tokens=10**9, separator="after", tokens=None, shortest=0):
    """The set holds the corpus {part: texts}, as write_documents describes it."""
    shards, words = {}, {}
    for part, source in parts.items():
        for text in source:
            ids = [*text.encode()]
            if len(ids) < shortest:
                continue
            ids = {"before": [256, *ids], "after": [*ids, 256], None: ids}[separator]
            split = part
            if tokens:
                sizes = {s: sum(map(len, shards.get(s, []))) for s in tokens}
                free = [s for s in tokens if tokens[s] is None or sizes[s] < tokens[s]]
                if not free:
                    break
                split = free[0]
            mine = shards.setdefault(split, [[]])
            if len(mine[-1]) >= shard_tokens:
                mine.append([])
            mine[-1] += ids
            words[split] = words.get(split, 0) + len(re.findall(r"\S+", text))
    want = {}
    for split, lists in shards.items():
        for k, ids in enumerate(lists):
            want[f"{split}_{k:06d}.bin"] = b"".join(t.to_bytes(2, "little") for t in ids)
    got = contents(folder)
    meta = json.loads(got.pop("meta.json"))
    assert got == want
    assert meta["shards"] == {name: len(data) // 2 for name, data in sorted(want.items())}
    assert (meta["tokenizer"], meta["vocab_size"]) == ("bytes", 257)
    assert meta["separator"] == (256 if separator else None)
    assert (meta["row_length"], meta["loss"]) == ({}, "all")
    assert {split: n for split, n in meta["words"].items() if n} == words

@contextlib.contextmanager
def death_at(monkeypatch, moment, after=False):
    """Kills the block before or right after file number `moment`, the folder being last, gets its
    name. `died` tells whether it did."""
    renamed, died = [], []

    def dying(rename):
        def rename_or_die(source, target):
            renamed.append(target)
            now = len(renamed) == moment
            if now and not after:
                raise KeyboardInterrupt
            rename(source, target)
            if now:
                raise KeyboardInterrupt
        return rename_or_die

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dying(os.replace))
        patch.setattr(os, "rename", dying(os.rename))
        try:
            yield died
        except KeyboardInterrupt:
            died.append(True)

# writing

@pytest.mark.parametrize("shape", SHAPES)
def test_documents_become_the_right_files(tmp_path, shape):
    parts, want, options = corpus(shape)
    write_documents(tmp_path, lambda: parts, "bytes", shard_tokens=400, **options)
    check(tmp_path, want, 400, **options)

def test_no_more_is_read_than_the_budgets_take(tmp_path):
    """Else an endless stream would never end. A document of just the least length counts."""
    def source(skip):
        return itertools.cycle(["four", "five5", "sixsix"])

    how = dict(tokens={"val": 10, "train": 20}, shortest=5)
    write_documents(tmp_path, lambda: {"val": source}, "bytes", **how)
    pair = [*b"five5", 256, *b"sixsix", 256]
    for split, want in (("val", pair), ("train", [*pair, *pair])):
        assert np.fromfile(tmp_path / f"{split}_000000.bin", dtype="<u2").tolist() == want

def test_a_second_start_with_other_arguments_is_refused(tmp_path, monkeypatch, capsys):
    """Otherwise a set could mix two kinds, or not be the one asked for."""
    parts, want, options = corpus("budget")
    arguments = dict(options, tokenizer="bytes", shard_tokens=500, limit=7)
    with death_at(monkeypatch, 8):
        write_documents(tmp_path / "set", lambda: parts, **arguments)
    changes = [{"limit": 8}, {"shortest": 151}, {"tokens": {"val": 2500}}, {"separator": None},
               {"shard_tokens": 501}]
    for name in ("set.part", "set"):
        before = contents(tmp_path / name)
        assert len(before) > 2
        for change in changes:
            with pytest.raises(ValueError) as error:
                write_documents(tmp_path / "set", lambda: 1 / 0, **arguments | change)
            one_line(error, f"{name} was written with", "'limit': 7", str(change)[1:-1], "delete")
        assert contents(tmp_path / name) == before
        capsys.readouterr()
        # the second time, the corpus is not loaded
        load = {"set.part": lambda: parts, "set": lambda: 1 / 0}[name]
        write_documents(tmp_path / "set", load, **arguments)
    line = f"{tmp_path / 'set'} is complete; delete it to write it again\n"
    assert capsys.readouterr().out == line
    check(tmp_path / "set", want, 500, **options)

def test_a_tokenizer_must_fit_uint16(tmp_path, monkeypatch):
    large = types.SimpleNamespace(n_vocab=65537)
    monkeypatch.setattr(text_corpora, "load_encoding", lambda name: large)
    with pytest.raises(ValueError) as error:
        write_documents(tmp_path, lambda: 1 / 0, "cl100k_base")
    one_line(error, "cl100k_base", "65537", "65536")

def test_the_disk_is_looked_at_first(tmp_path, monkeypatch):
    """Before the corpus is loaded. What is already written needs no more room."""
    def disk_has(free):
        usage = types.SimpleNamespace(free=free)
        monkeypatch.setattr(shards.shutil, "disk_usage", lambda path: usage)

    disk_has(19_999_000_000)
    for options in ({"expect": 10**10}, {"tokens": {"val": 10**9, "train": 9 * 10**9}}):
        with pytest.raises(ValueError) as error:
            write_documents(tmp_path / "set", lambda: 1 / 0, "bytes", **options)
        one_line(error, str(tmp_path / "set"), "20 GB", "--out")
    assert not list(tmp_path.iterdir())
    parts, how = corpus("two parts")[0], dict(expect=10_000, shard_tokens=500)
    disk_has(20_000)
    with death_at(monkeypatch, 5) as died:
        write_documents(tmp_path / "half", lambda: parts, "bytes", **how)
    assert died
    disk_has(18_000)  # 1000 tokens are there, the others fit
    write_documents(tmp_path / "half", lambda: parts, "bytes", **how)

@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("shape", ["two parts", "budget"])
def test_stopped_at_every_renaming(tmp_path, monkeypatch, shape, after):
    """Whenever a process dies, a rerun makes the set that it would have made."""
    parts, want, options = corpus(shape, 40)
    for moment in itertools.count(1):
        folder = tmp_path / str(moment)
        with death_at(monkeypatch, moment, after) as died:
            write_documents(folder, lambda: parts, "bytes", shard_tokens=2500, **options)
        if not died:
            break
        if not folder.exists():
            with pytest.raises(FileNotFoundError):
                Split(folder, "train")
        write_documents(folder, lambda: parts, "bytes", shard_tokens=2500, **options)
        check(folder, want, 2500, **options)
        assert not Path(f"{folder}.part").exists()
    # each shard and the note after it, meta.json, the folder
    assert moment >= 2 * len(list(folder.glob("*.bin"))) + 2

def test_killed_at_random_moments(tmp_path):
    """SIGKILL, which no handler sees, until one start finishes. Complete shards survive."""
    folder, note, rng = tmp_path / "out", tmp_path / "out.part" / "meta.json", random.Random(0)
    how = dict(tokens={"val": 25_000, "test": 24_999, "train": None}, shortest=40,
               shard_tokens=10_000)
    parts, grown = {"val": functools.partial(documents, count=600, delay=0.001)}, []
    while len(grown) < 50 and not folder.exists():
        process = forked(lambda: write_documents(folder, lambda: parts, "bytes", **how))
        # the delays add up to 0.6 s. The time grows, for slow machines
        process.join(rng.uniform(0.05, 0.35) * (1 + len(grown) / 5))
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        noted = json.loads(note.read_text(encoding="utf-8"))["shards"] if note.exists() else {}
        assert all((note.parent / name).exists() for name in noted)
        grown.append(len(noted))
    assert len(grown) >= 3 and grown[:-1] == sorted(grown[:-1])
    check(folder, {"val": documents(0, 600)}, **how)

def test_progress_tells_rate_and_time_left(capsys, monkeypatch):
    clock = iter([0.0, 0.5, 4.0, 8.0])
    monkeypatch.setattr(text_corpora, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    progress = text_corpora.Progress(9_000_000, "tokens", 1_000_000)  # of an earlier run
    for done in (1_500_000, 2_000_000, 5_000_000):
        progress.show(done)
    lines = [line.strip() for line in capsys.readouterr().out.split("\r")]
    assert lines[1:] == ["22%, 2,000,000 tokens, 250,000 a second, 0:00:28 left",
                         "56%, 5,000,000 tokens, 500,000 a second, 0:00:08 left"]

def test_the_source_is_read_a_little_ahead(monkeypatch):
    """Otherwise memory would grow with the corpus. The order stays."""
    taken, ahead, out = 0, [], []
    monkeypatch.setattr(text_corpora, "CORES", 3)

    def source():
        nonlocal taken
        for taken in range(1, 1001):
            yield taken

    for n in text_corpora.in_threads(lambda n: -n, source()):
        out.append(-n)
        ahead.append(taken - len(out))
    assert out == list(range(1, 1001)) and 10 < max(ahead) <= 8 * (2 * 3 + 1)

def test_an_error_in_a_document_ends_the_run(tmp_path):
    """What was saved before it stays saved."""
    def source(skip):
        yield from ["x" * 999] * 100
        raise ConnectionError("the hub is gone")

    with pytest.raises(ConnectionError, match="the hub is gone"):
        write_documents(tmp_path / "set", lambda: {"train": source}, "bytes", shard_tokens=20_000)
    noted = json.loads((tmp_path / "set.part" / "meta.json").read_text())
    assert noted["shards"] and noted["place"] == [0, 20 * len(noted["shards"])]

# tokenizers of the hub

@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    """A byte-level tokenizer.json, trained here. Its end is </s>, as Llama's."""
    tokenizers = pytest.importorskip("tokenizers")
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = byte_level(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"],
                                             initial_alphabet=byte_level.alphabet())
    # line ends are frequent, so there are tokens for several in a row
    trained.train_from_iterator([*documents(0), *wiki(200)], trainer)
    # what a tokenizer.json may bring along and a corpus must not get
    trained.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    trained.enable_truncation(20)
    trained.enable_padding(length=20)
    path = str(tmp_path_factory.mktemp("vocabulary") / "tokenizer.json")
    trained.save(path)
    return path

def test_a_tokenizer_file(vocabulary, tmp_path):
    """Text stays text even where it spells out </s>. Only a prompt's </s> is the token."""
    encoding = load_encoding(vocabulary)
    assert (encoding.n_vocab, encoding.eot_token) == (400, 1)
    text = "def naïve(): return 'κόσμε 🐍' </s> <s>" * 9
    ids = encoding.encode_ordinary(text)
    assert len(ids) > 20 and 0 not in ids and 1 not in ids
    assert encoding.decode(ids) == text
    mine = tokenizer({"tokenizer": vocabulary})
    first, second = encoding.encode_ordinary("ab"), encoding.encode_ordinary("cd")
    assert mine.encode("ab</s>cd") == [*first, 1, *second]
    assert mine.decode(mine.encode(text)) == text
    assert encoding.encode_ordinary(text) == ids  # after the other kind

    write_documents(tmp_path / "set", lambda: {"train": documents}, vocabulary)
    want = []
    for text in documents(0):
        want += [*encoding.encode_ordinary(text), 1]
    split = Split(tmp_path / "set", "train")
    assert split.tokens == len(want)
    assert split.read([0], len(want) - 1)[0].tolist() == [want[:-1]]
    meta = split.meta
    assert (meta["tokenizer"], meta["separator"], meta["vocab_size"]) == (vocabulary, 1, 400)

def test_tokenizers_that_cannot_be_loaded(tmp_path, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")

    def words(name, vocabulary):
        model = tokenizers.models.WordLevel(vocabulary, unk_token="a")
        tokenizers.Tokenizer(model).save(str(tmp_path / name))
        return str(tmp_path / name)

    assert load_encoding(words("gaps.json", {"a": 6, "</s>": 2})).n_vocab == 7  # ids have gaps
    missing = str(tmp_path / "missing.json")
    for name, part in ((missing, "No such file"), (words("b.json", {"a": 0}), "<|endoftext|>")):
        with pytest.raises(ValueError) as error:
            load_encoding(name)
        one_line(error, name, part)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError) as error:
        load_encoding("somebody/other")
    one_line(error, "somebody/other", "pip install tokenizers")

# the scripts

def rows(path, texts, column="text"):
    """A function that loads a local file of these rows, as load_dataset does."""
    datasets, parquet = pytest.importorskip("datasets"), pytest.importorskip("pyarrow.parquet")
    table = {"url": [str(i) for i in range(len(texts))], column: texts}
    parquet.write_table(pytest.importorskip("pyarrow").table(table), path, row_group_size=50)
    how = dict(data_files=str(path), split="train", cache_dir=str(path.parent / "hf"))
    return functools.partial(datasets.load_dataset, "parquet", **how)

def write(module, folder, monkeypatch, moment, **options):
    """Prepare a set twice: in one go, and resumed after a death."""
    module.prepare(folder / "whole", tokenizer="bytes", **options)
    with death_at(monkeypatch, moment) as died:
        module.prepare(folder / "again", tokenizer="bytes", **options)
    assert died
    module.prepare(folder / "again", tokenizer="bytes", **options)
    assert contents(folder / "again") == contents(folder / "whole")
    return folder / "whole"

def test_fineweb_edu(tmp_path, monkeypatch):
    source = list(documents(0))
    load = functools.partial(rows(tmp_path / "corpus.parquet", source), streaming=True)
    monkeypatch.setattr(fineweb_edu, "SHARD_TOKENS", 9000)
    whole = write(fineweb_edu, tmp_path, monkeypatch, 7, load=load)
    check(whole, {"val": source}, 9000, "before", {"val": 9000, "test": 9000, "train": None})
    fineweb_edu.prepare(tmp_path / "try", limit=20, tokenizer="bytes", load=load)
    tokens = {"val": 2000, "test": 2000, "train": None}
    check(tmp_path / "try", {"val": source[:20]}, 2000, "before", tokens)

def test_openwebtext(tmp_path, monkeypatch):
    source = [f"text number {i}" for i in range(2500)]
    load = rows(tmp_path / "corpus.parquet", source)
    monkeypatch.setattr(openwebtext, "SHARD_TOKENS", 9000)
    whole = write(openwebtext, tmp_path, monkeypatch, 5, load=load)
    # datasets': the first 0.0005 of its order, rounded up, are the test part
    order = [source[i] for i in np.random.default_rng(2357).permutation(2500)]
    check(whole, {"val": order[:2], "train": order[2:]}, 9000)
    openwebtext.prepare(tmp_path / "try", limit=100, tokenizer="bytes", load=load)
    order = [source[i] for i in np.random.default_rng(2357).permutation(100)]
    check(tmp_path / "try", {"val": order[:1], "train": order[1:]})

def test_fineweb(tmp_path, monkeypatch):
    source = list(documents(0))
    load = functools.partial(rows(tmp_path / "corpus.parquet", source), streaming=True)
    monkeypatch.setattr(fineweb, "SHORTEST", 250)
    whole = write(fineweb, tmp_path, monkeypatch, 5, tokens=28_005, load=load)
    tokens = {"val": 2000, "test": 2000, "train": 24_005}
    check(whole, {"val": source}, tokens=tokens, shortest=250)
    with pytest.raises(ValueError) as error:
        fineweb.prepare(tmp_path / "none", tokens=13, tokenizer="bytes", load=lambda: 1 / 0)
    one_line(error, "tokens=13")
    sizes = inspect.signature(fineweb.prepare).parameters["tokens"].default
    assert (sizes // 14, sizes - 2 * (sizes // 14)) == (50_000_000, 600_000_000)  # the paper's

def test_c4(tmp_path, monkeypatch):
    texts = list(documents(0))
    corpora = {"validation": rows(tmp_path / "v.parquet", texts[:60]),
               "train": rows(tmp_path / "t.parquet", texts[60:])}

    def load(split):
        return corpora[split](streaming=True)

    whole = write(c4, tmp_path, monkeypatch, 3, val=20, train=100, load=load)
    check(whole, {"val": texts[:20], "train": texts[60:160]})
    c4.prepare(tmp_path / "val", train=0, tokenizer="bytes", load=load)
    check(tmp_path / "val", {"val": texts[:60]})

def test_pg19(tmp_path, monkeypatch):
    books = ["".join(documents(20 * i, 20 * i + 20)) for i in range(10)]
    load = rows(tmp_path / "books.parquet", books)
    check(write(pg19, tmp_path, monkeypatch, 2, load=load), {"test": books})
    pg19.prepare(tmp_path / "try", limit=3, tokenizer="bytes", load=load)
    check(tmp_path / "try", {"test": books[:3]})

def test_tinystories(tmp_path, monkeypatch):
    texts = list(documents(0))
    train = rows(tmp_path / "t.parquet", texts[:250])
    validation = rows(tmp_path / "v.parquet", texts[250:])
    corpus = {"train": train(), "validation": validation()}
    whole = write(tinystories, tmp_path, monkeypatch, 3, load=lambda: corpus)
    check(whole, {"val": texts[250:], "train": texts[:250]})
    tinystories.prepare(tmp_path / "try", limit=30, tokenizer="bytes", load=lambda: corpus)
    check(tmp_path / "try", {"val": texts[250:280], "train": texts[:30]})

def wiki(lines, seed=0):
    """Lines of WikiText's format: headings of several levels, empty lines, and a paragraph that
    looks like a heading."""
    rng = random.Random(seed)
    word = lambda: "".join(rng.choices("abcde@é=", k=rng.randrange(1, 7)))  # noqa: E731
    kinds = [" \n", " = {} = \n", " = = {} {} = = \n", " {} , {} . \n", " = {} \n",
             " {} <unk> {}{} \n", "  =  {} \n"]
    return [" \n", *(rng.choice(kinds).format(word(), word(), word()) for _ in range(lines - 1))]

WIKI = {"train": wiki(900, 1), "val": wiki(50, 2), "test": wiki(70, 3)}

def joined(parts):
    return {split: ["".join(lines)] for split, lines in parts.items()}

def test_wikitext103_from_files(tmp_path, monkeypatch, vocabulary):
    """Sections are tokenised separately, but the tokens are those of the whole text."""
    names = {"train": "wiki.train.raw", "val": "wiki.valid.tokens", "test": "test.txt"}
    for split, name in names.items():
        (tmp_path / name).write_bytes("".join(WIKI[split]).encode())
    (tmp_path / "train.txt").write_text("older")
    whole = write(wikitext103, tmp_path, monkeypatch, 5, source=str(tmp_path))
    check(whole, joined(WIKI), separator=None)
    wikitext103.prepare(tmp_path / "bpe", source=str(tmp_path), tokenizer=vocabulary)
    for split, lines in WIKI.items():
        text, got = "".join(lines), Split(tmp_path / "bpe", split)
        want = load_encoding(vocabulary).encode_ordinary(text)
        assert got.tokens == len(want) < len(text)
        assert got.read([0], len(want) - 1)[0].tolist() == [want[:-1]]
        assert got.meta["words"][split] == len(re.findall(r"\S+", text))
    assert len(list(wikitext103.sections(WIKI["train"]))) > 100

def test_wikitext103_from_rows(tmp_path, monkeypatch):
    corpus = {}
    for split, name in (("train", "train"), ("val", "validation"), ("test", "test")):
        lines = [line if line.strip() else "" for line in WIKI[split]]  # as the hub writes them
        corpus[name] = rows(tmp_path / f"{name}.parquet", lines)()
    whole = write(wikitext103, tmp_path, monkeypatch, 5, load=lambda: corpus)
    check(whole, joined(WIKI), separator=None)

def test_wikitext103_from_a_folder_of_less(tmp_path, capsys):
    with pytest.raises(FileNotFoundError) as error:
        wikitext103.prepare(tmp_path / "out", source=str(tmp_path), tokenizer="bytes")
    one_line(error, str(tmp_path), "wiki.train.raw")
    lines = wiki(60)
    (tmp_path / "valid.txt").write_bytes("".join(lines).encode())
    wikitext103.prepare(tmp_path / "out", source=str(tmp_path), limit=3, tokenizer="bytes")
    assert f"{tmp_path} has no train file; that split is left out\n" in capsys.readouterr().out
    heads = [i for i, line in enumerate(lines) if line.startswith(" = ")]
    check(tmp_path / "out", joined({"val": lines[: heads[2]]}), separator=None)

def of_hundreds(texts):
    """data/code.py's splits."""
    train = [text for i, text in enumerate(texts) if i % 100 not in (0, 1)]
    return {"val": texts[::100], "test": texts[1::100], "train": train}

def test_code_of_a_folder(tmp_path, monkeypatch):
    folder, files = tmp_path / "source", {}
    for i, text in enumerate(documents(0, 250)):
        files[f"{'abc'[i % 3]}/[{i:03d}].{('py', 'rs', 'cu')[i % 3]}"] = text.encode()
    files["b/[001].rs"] = b"int x; // \xe9\n"
    for name, content in {**files, "a/data.json": b"{}", "README": b"no"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "a" / "dir.py").mkdir()
    texts = [files[name].decode(errors="replace") for name in sorted(files)]
    whole = write(code, tmp_path, monkeypatch, 3, source=str(folder))
    check(whole, of_hundreds(texts))
    code.prepare(tmp_path / "try", source=str(folder), limit=150, tokenizer="bytes")
    check(tmp_path / "try", of_hundreds(texts[:150]))
    with pytest.raises(ValueError) as error:
        code.prepare(tmp_path / "none", source=str(folder / "a" / "dir.py"), tokenizer="bytes")
    one_line(error, "dir.py", ".rs")

def test_code_of_the_hub(tmp_path, monkeypatch):
    texts, asked = list(documents(0)), []
    load = rows(tmp_path / "code.parquet", texts, "func")
    monkeypatch.setattr(code, "hub", lambda source, split: asked.append((source, split)) or load())
    whole = write(code, tmp_path, monkeypatch, 3, source="some/code", column="func")
    check(whole, of_hundreds(texts))
    assert set(asked) == {("some/code", "train")}
    with pytest.raises(ValueError) as error:
        code.prepare(tmp_path / "none", source="some/code", tokenizer="bytes")
    one_line(error, "column='content'", "func")

def test_rows_of_a_dataset(tmp_path):
    """A corpus resumes where it stopped, and --limit counts from the first text."""
    source = list(documents(0, 20))
    load = rows(tmp_path / "r.parquet", source)
    for dataset in (load(), load(streaming=True)):
        for limit in (None, 0, 7, 20, 99):
            for skip in (0, 6, 7, 20):
                assert list(texts(dataset, limit)(skip)) == source[:limit][skip:]

def test_a_missing_package_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    out = tmp_path / "out"
    line = fails(str(ROOT / "data" / "c4.py"), "--tokenizer=bytes", f"--out={out}")
    assert "pip install datasets" in line and not list(tmp_path.iterdir())

@pytest.mark.parametrize("name", CORPORA)
def test_train_does_not_download_a_corpus(name):
    module = importlib.import_module(f"data.{name}")
    assert module.DOWNLOAD and f"python -m data.{name}\n" in re.sub(" +#.*", "", module.__doc__)

# worker processes

def die(_):
    os.kill(os.getpid(), signal.SIGKILL)

def test_a_killed_worker_is_one_line():
    with pytest.raises(OSError) as error, text_corpora.workers(abs, 0) as pool:
        list(pool.map(die, range(3)))
    one_line(error, "worker", "killed")

def test_workers_end_with_a_killed_parent(tmp_path, monkeypatch):
    """Otherwise they would wait for work forever."""
    monkeypatch.setattr(text_corpora, "CORES", 2)

    def parent():
        with text_corpora.workers(abs, 0) as pool:
            list(pool.map(abs, range(9)))
            pids = [str(child.pid) for child in multiprocessing.active_children()]
            (tmp_path / "pids").write_text(" ".join(pids))
            die(0)

    process = forked(parent)
    process.join()
    pids = (tmp_path / "pids").read_text().split()
    assert process.exitcode == -signal.SIGKILL and pids
    deadline = time.monotonic() + 30
    for pid in pids:
        path = Path(f"/proc/{pid}/stat")
        while path.exists() and " Z " not in path.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)

# a text of one's own

def test_one_file_becomes_both_splits(tmp_path, capsys):
    text = "".join(documents(0, 40)) + "\r\nthe end"
    source = tmp_path / "input.txt"
    source.write_bytes(text.encode())
    text_corpora.prepare(tmp_path / "set", source=str(source))
    cut = round(len(text) * 0.9)
    check(tmp_path / "set", {"train": [text[:cut]], "val": [text[cut:]]})
    assert f"train.py config/quickstart.py --data={tmp_path / 'set'}/ " in capsys.readouterr().out
    text_corpora.prepare(tmp_path / "set", source=str(source))
    assert "is complete; delete it" in capsys.readouterr().out
    # another text is not taken for this one
    other = tmp_path / "other.txt"
    other.write_bytes(text.encode())
    for how in (dict(source=str(other)), dict(source=str(source), val=0.2)):
        with pytest.raises(ValueError) as error:
            text_corpora.prepare(tmp_path / "set", **how)
        one_line(error, f"{tmp_path / 'set'} was written with", str(source), "delete it", "--out")

def test_files_of_a_folder_become_both_splits(tmp_path):
    files = {f"{'ba'[i % 2]}/{i:02d}.md": text for i, text in enumerate(documents(0, 30))}
    for name, text in {**files, ".git/x": "\xe9", "a/.hidden": "no"}.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("latin-1" if name == ".git/x" else "utf-8"))
    text_corpora.prepare(tmp_path / "set", source=str(tmp_path / "source"), val=0.25)
    parts = {"train": [], "val": []}
    for name in sorted(files):
        cut = round(len(files[name]) * 0.75)
        parts["train"].append(files[name][:cut])
        parts["val"].append(files[name][cut:])
    check(tmp_path / "set", parts)

SOURCES = {text_corpora: [f"{i}.txt" for i in range(4)], code: [f"{i}.py" for i in range(4)],
           wikitext103: ["wiki.train.raw", "test.txt"]}

@pytest.mark.parametrize("module", SOURCES)
def test_an_edited_source_is_refused(tmp_path, monkeypatch, module):
    """Even if it is as long as before. Otherwise half the tokens would come from the old text."""
    source, names, text = tmp_path / "source", SOURCES[module], " = a heading = \n a text \n" * 50
    source.mkdir()
    for name in names:
        (source / name).write_text(text)
    short = functools.partial(module.write_documents, shard_tokens=500)
    monkeypatch.setattr(module, "write_documents", short)
    how = dict(source=str(source), tokenizer="bytes")
    module.prepare(tmp_path / "direct", **how)
    with death_at(monkeypatch, 4):
        module.prepare(tmp_path / "set", **how)
    for name in ("set.part", "set"):
        before = contents(tmp_path / name)
        assert len(before) > 1
        for k, edited in itertools.product((0, -1), (text + "!", text.replace("a text", "A text"))):
            (source / names[k]).write_text(edited)
            with pytest.raises(ValueError) as error:
                module.prepare(tmp_path / "set", **how)
            one_line(error, f"{name} was written with", "sha256", "delete it", "--out")
            (source / names[k]).write_text(text)
        assert contents(tmp_path / name) == before
        module.prepare(tmp_path / "set", **how)
    assert contents(tmp_path / "set") == contents(tmp_path / "direct")

def test_texts_that_are_none(tmp_path):
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    for name, part in (("latin", "byte 3"), ("empty", "no text"), ("folder", "no text"),
                       ("none", "no text")):
        with pytest.raises(ValueError) as error:
            text_corpora.prepare(tmp_path / "set", source=str(tmp_path / name))
        one_line(error, str(tmp_path / name), part)
    assert not (tmp_path / "set").exists()

def test_from_a_text_to_a_sentence(tmp_path, monkeypatch, capsys):
    """README's three commands, in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("data.__file__", str(tmp_path / "data.py"))  # sets are located beside it
    Path("input.txt").write_text("To be, or not to be, that is the question.\n" * 300)
    small = "--n_layer=1 --n_embd=16 --n_head=2 --max_iters=3 --eval_interval=3 --device=cpu"
    for line in (
        "data/text.py --source=input.txt",
        f"train.py {ROOT}/config/quickstart.py --data=input --out_dir=out/input {small}",
        "sample.py out/input --prompt=To --max_new_tokens=9 --device=cpu",
    ):
        script, *words = line.split()
        monkeypatch.setattr(sys, "argv", [script, *words])
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert "--- out/input, sample 1\nTo" in capsys.readouterr().out
    assert Path("input", "meta.json").exists()
    line = fails(str(ROOT / "train.py"), "--data=input.txt")
    assert "`python -m data.text --source=input.txt`" in line
