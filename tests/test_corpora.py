"""write_documents and the text corpora, against shards that `check` builds token by token.

The corpora are small local files in the hub's format. No tokenizer needs a download.
"""
import collections
import functools
import importlib
import json
import random
import re
import sys
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import contents, killed_at, one_line

from config import Mistake
from data import command, openwebtext, wikitext103, wordcount
from data import text as own_text
from data.documents import write_documents
from data.shards import Split, Writer, rng
from data.tokenizer import Hub, tokenizer


def document(i):
    """A text of up to 400 letters. Not all of it is ASCII, and it may spell out the separator."""
    rng = random.Random(i)
    return "".join(rng.choices([*"abcdefghijkl! é🐍", "<|endoftext|>"], k=rng.randrange(400)))

TEXTS = [document(i) for i in range(300)]

def documents_of(parts):
    """What write_documents takes, for the corpus {split: its texts}."""
    return [(split, text) for split, texts in parts.items() for text in texts]

def check(folder, parts, shard_tokens=100_000_000, separator="after", sizes=None, shortest=0):
    """Asserts that the set holds the corpus {part: texts}, as write_documents describes it."""
    shards = {}  # split: the ids of each of its shards
    written = collections.Counter()  # split: the number of its tokens
    for part, source in parts.items():
        budgets = sizes or {part: None}
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
        how["sizes"] = dict(val=dice.choice([exact, dice.randint(1, 3000)]),
                            test=dice.choice([1, dice.randint(1, 3000)]),
                            train=dice.choice([None, 200]))
    return parts, how

@pytest.mark.parametrize("seed", range(12))
def test_a_killed_corpus_resumes_with_the_same_files(tmp_path, seed):
    """The files are right, and no shard that was saved is forgotten."""
    parts, how = drawn_corpus(seed)
    corpus = documents_of(parts)
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
            for saved in tmp_path.glob(f"{attempt}.*.part/progress.json"):
                shards = json.loads(saved.read_text())["shards"]
            assert before.items() <= shards.items()
            assert not folder.exists()
            moment = dice.randint(5, 30)  # fewer would not save a shard
        if not folder.exists():
            write_documents(folder, corpus, "bytes", **how)
        assert contents(folder) == contents(tmp_path / "whole")
        assert not list(tmp_path.glob("*.part"))

def test_a_corpus_that_was_cut_short(tmp_path):
    """It is refused, although it has tokens of all splits. Once it is whole, it resumes."""
    documents = documents_of({"val": TEXTS[:30], "train": TEXTS[30:90]})
    for how, part in ((dict(at_least=90), "after 80 documents"),
                      (dict(sizes={"val": 3000, "train": 10**6}), "before train had 1,000,000")):
        with pytest.raises(ValueError) as error:
            write_documents(tmp_path / "set", documents[:80], "bytes", shard_tokens=900, **how)
        one_line(error, part)
        assert not (tmp_path / "set").exists()
    write_documents(tmp_path / "set", documents, "bytes", shard_tokens=900, at_least=90)
    write_documents(tmp_path / "whole", documents, "bytes", shard_tokens=900)
    assert contents(tmp_path / "set") == contents(tmp_path / "whole")

# what may be missing on a machine

@pytest.mark.parametrize("module, install, prepare", [
    ("datasets", "datasets", functools.partial(importlib.import_module("data.pg19").prepare,
                                               tokenizer="bytes")),
    ("tokenizers", "tokenizers", functools.partial(write_documents, documents=[],
                                                   tokenizer_name="some/llama")),
    ("nltk", "nltk", importlib.import_module("data.wordcount").prepare),
    ("miditok", "miditok==3.0.5.post1", importlib.import_module("data.maestro").prepare)])
def test_an_optional_package_is_missing(tmp_path, monkeypatch, module, install, prepare):
    """The line says what to install, and nothing has been downloaded or written before."""
    monkeypatch.setitem(sys.modules, module, None)  # importing it then raises ModuleNotFoundError
    with pytest.raises(Mistake) as error:
        prepare(tmp_path / "set")
    one_line(error, f"this needs {module}, which is not installed; run pip install {install}")
    assert not list(tmp_path.iterdir())

def test_tiktoken_cannot_download(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")  # nothing listens there
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})  # an earlier test may have loaded it
    with pytest.raises(Mistake) as error:
        tokenizer("gpt2")
    one_line(error, "'gpt2' could not be downloaded", "set TIKTOKEN_CACHE_DIR to a folder")

@pytest.mark.parametrize("reason", [OSError("401 Client Error\n\nAccess is restricted"),
                                    Exception("EOF while parsing\na value"), OSError()])
def test_the_hub_cannot_be_reached(tmp_path, monkeypatch, reason):
    """The libraries' own texts may have several lines."""
    def fails(*_, **__):
        raise reason

    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.setattr(tokenizers, "Tokenizer", SimpleNamespace(from_pretrained=fails))
    with pytest.raises(Mistake) as error:
        tokenizer("some/llama")
    one_line(error, "'some/llama' could not be loaded (", "set HF_HOME to a folder")
    if isinstance(reason, OSError):
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr(datasets, "load_dataset", fails)
        with pytest.raises(Mistake) as error:
            openwebtext.prepare(tmp_path / "set", tokenizer="bytes")
        one_line(error, "Skylion007/openwebtext could not be loaded (", "set HF_HOME to a folder")
        assert not list(tmp_path.iterdir())

def serve(monkeypatch, kind):
    """Puts a small tokenizer in the place of those of the hub. Its end-of-text token is </s>, as in
    Llama's. All kinds but "bytes" put a space before a text: "spaced bytes" as some relatives of
    GPT-2's, "prepend" as Llama 2's, and the others as newer versions of Llama's and as T5's."""
    tokenizers = pytest.importorskip("tokenizers")
    decoders, normalizers = tokenizers.decoders, tokenizers.normalizers
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    metaspace = tokenizers.pre_tokenizers.Metaspace
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    alphabet = []
    if kind in ("bytes", "spaced bytes"):
        alphabet = byte_level.alphabet()
        trained.pre_tokenizer = byte_level(add_prefix_space=kind == "spaced bytes")
        trained.decoder = decoders.ByteLevel()
    elif kind == "prepend":
        trained.normalizer = normalizers.Sequence([
            normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        trained.decoder = decoders.Sequence([
            decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else:
        trained.pre_tokenizer = metaspace(prepend_scheme=kind, split=kind == "always")
        trained.decoder = decoders.Metaspace(prepend_scheme=kind)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"],
                                             initial_alphabet=alphabet)
    trained.train_from_iterator([*TEXTS, *PROMPTS, "0123456789\n"], trainer)
    # settings that a tokenizer may come with, and that a corpus must not follow
    trained.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    trained.enable_truncation(20)
    trained.enable_padding(length=20)
    from_str = tokenizers.Tokenizer.from_str
    from_hub = SimpleNamespace(from_str=from_str,
                               from_pretrained=lambda name: from_str(trained.to_str()))
    monkeypatch.setattr(tokenizers, "Tokenizer", from_hub)

def spelled(codec, ids):
    """Returns the text of ids, with the space that the tokenizer has put before it."""
    text = "".join(codec.inner.id_to_token(int(i)) for i in ids)
    return text.replace("▁", " ").replace("Ġ", " ").replace("Ċ", "\n")

PREFIXING = ["spaced bytes", "prepend", "first", "always"]
PROMPTS = [wordcount.PROMPT.format(story, "the", 12) for story in ("The cat.", "The end?")]

@pytest.mark.parametrize("kind", PREFIXING)
def test_pieces_of_a_text(monkeypatch, tmp_path, kind):
    """A tokenizer that puts a space before a text does so once, and not before each piece."""
    serve(monkeypatch, kind)
    codec = tokenizer("some/llama")
    text = "abc def\ngi! hi jk\n" * 20
    pieces = [text[i : i + 7] for i in range(0, len(text), 7)]
    first, *others = pieces
    assert spelled(codec, codec.encode_document(first)) == " " + first
    ids = [*codec.encode_document(first)]
    for piece in others:
        found = codec.encode_continuation(piece)
        assert spelled(codec, found) == piece == codec.decode_continuation(found)
        ids += [*found]
    assert codec.decode(ids).lstrip(" ") == text

    monkeypatch.setattr(own_text, "PIECE", 7)
    (tmp_path / "mine.txt").write_text(text)
    own_text.prepare(tmp_path / "set", source=str(tmp_path / "mine.txt"), tokenizer="some/llama")
    written = [Split(tmp_path / "set", split).bins[0] for split in ("train", "val")]
    cut = round(0.9 * len(text))
    assert spelled(codec, np.concatenate(written)) == f" {text[:cut]}</s> {text[cut:]}</s>"
    # the sections of WikiText are pieces, and nothing separates them
    documents = documents_of({"val": pieces[:9], "train": pieces[9:]})
    killed_at(3, write_documents, tmp_path / "wiki", documents, "some/llama", separator=None)
    write_documents(tmp_path / "wiki", documents, "some/llama", separator=None)
    for split, part in (("val", pieces[:9]), ("train", pieces[9:])):
        ids = Split(tmp_path / "wiki", split).bins[0]
        assert spelled(codec, ids) == " " + "".join(part)

@pytest.mark.parametrize("kind", PREFIXING)
def test_an_answer_continues_its_prompt(monkeypatch, kind):
    serve(monkeypatch, kind)
    codec = tokenizer("some/llama")
    example = wordcount.make_example("The cat.", lambda story: [story], codec, rng(0, 0))
    prompt, answer = example.tokens[: -example.targets], example.tokens[-example.targets :]
    assert spelled(codec, prompt).endswith("sentences? [/INST]")
    assert spelled(codec, answer) == " 1</s>"
    assert spelled(codec, prompt).startswith(" [INST] The cat.")

def test_a_tokenizer_of_the_hub(monkeypatch, tmp_path):
    """A text that spells out </s> stays text. Only in a prompt does </s> become the token."""
    serve(monkeypatch, "bytes")
    codec = tokenizer("some/llama")
    assert isinstance(codec, Hub)
    assert (codec.separator, codec.vocab_size) == (1, 400)
    text = "def naïve(): return 'κόσμε 🐍' </s> <s>" * 9
    ids = codec.encode_document(text).tolist()
    assert len(ids) > 20 and 0 not in ids and 1 not in ids
    assert codec.decode([*ids, 400, 60000]) == text
    assert codec.encode_continuation(text).tolist() == ids
    first, second = codec.encode_document("ab").tolist(), codec.encode_document("cd").tolist()
    assert codec.encode("ab</s>cd") == [*first, 1, *second]
    write_documents(tmp_path / "set", documents_of({"train": TEXTS}), "some/llama")
    want = []
    for text in TEXTS:
        want += [*codec.encode_document(text), 1]
    assert np.fromfile(tmp_path / "set" / "train_000000.bin", "<u2").tolist() == want

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
BOOKS = ["".join(TEXTS[i : i + 14]) for i in range(0, 300, 8)]  # of 4000 tokens and more
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
    ("roneneldan/TinyStories", None): {"train": TEXTS},
}
CORPORA = [  # a script, its options, what it must write, and how, as `check` takes it
    ("c4", dict(train=100, val=20), {"val": TEXTS[:20], "train": TEXTS[60:160]}, {}),
    ("fineweb", dict(tokens=84_007), {"val": BOOKS},
     dict(shortest=4000, sizes={"val": 6000, "test": 6000, "train": 72_007})),
    ("fineweb_edu", dict(limit=90), {"val": TEXTS[:90]},
     dict(separator="before", shard_tokens=9000,
          sizes={"val": 9000, "test": 9000, "train": None})),
    # `datasets` shuffles the texts, and the first 0.0005, rounded up, are its test part, our val
    ("openwebtext", {}, {"val": SHUFFLED[:1], "train": SHUFFLED[1:]}, {}),
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
    monkeypatch.setattr(openwebtext, "DOCUMENTS", 300)
    monkeypatch.setattr(wikitext103, "LINES", {"train": 900, "val": 50, "test": 70})

@pytest.mark.parametrize("name, options, parts, how", CORPORA)
def test_corpora_of_the_hub(tmp_path, hub, name, options, parts, how):
    """Each corpus is written by a process that dies after its first shard, and then resumed."""
    script = importlib.import_module(f"data.{name}")
    prepare = functools.partial(script.prepare, tmp_path / "set", tokenizer="bytes", **options)
    assert killed_at(5, prepare)
    prepare()
    check(tmp_path / "set", parts, **how)

def test_code_without_a_text(tmp_path, hub, monkeypatch):
    """Rows without a text are left out, and a set without the column is refused in one line."""
    monkeypatch.setitem(HUB["codeparrot/codeparrot-clean-train", None], "train",
                        ["a", None, "b", "c", None])
    code = importlib.import_module("data.code")
    code.prepare(tmp_path / "set", tokenizer="bytes")
    check(tmp_path / "set", {"val": ["a"], "train": ["b", "c"]})
    monkeypatch.setitem(HUB, ("some/set", None), {"train": ["a"]})  # its column is `text`
    with pytest.raises(Mistake) as error:
        code.prepare(tmp_path / "b", dataset="some/set", tokenizer="bytes")
    one_line(error, "some/set has no column `content`, only text; name another one")

def test_openwebtext_without_its_script(tmp_path, hub, monkeypatch, capsys):
    """If the main branch is refused, the pull request is read. Both must have all documents."""
    datasets = pytest.importorskip("datasets")

    def refuse_scripts(path, revision=None, load=datasets.load_dataset, **more):
        if revision is None:
            raise RuntimeError("Dataset scripts are no longer supported, but found openwebtext.py")
        return load(path, revision=revision, **more)

    monkeypatch.setattr(datasets, "load_dataset", refuse_scripts)
    openwebtext.prepare(tmp_path / "set", tokenizer="bytes")
    check(tmp_path / "set", {"val": SHUFFLED[:1], "train": SHUFFLED[1:]})
    printed = capsys.readouterr().out
    assert "no longer supported" in printed
    assert "reading Skylion007/openwebtext at the revision refs/pr/22" in printed
    monkeypatch.setattr(openwebtext, "DOCUMENTS", 301)
    with pytest.raises(ValueError) as error:
        openwebtext.prepare(tmp_path / "again", tokenizer="bytes")
    one_line(error, "openwebtext has 300 rows instead of 301, so it is not the whole set")
    assert not list(tmp_path.glob("again*"))

@pytest.mark.parametrize("name, constant, value, part", [
    ("openwebtext", "DOCUMENTS", 8_013_769, "openwebtext has 300 rows instead of 8,013,769"),
    ("wikitext103", "LINES", {"train": 901}, "wikitext has 900 rows instead of 901"),
    ("wordcount", "TINY_STORIES", 2_119_719, "TinyStories has 300 rows instead of 2,119,719")])
def test_a_part_of_a_corpus_of_the_hub(tmp_path, hub, monkeypatch, name, constant, value, part):
    if name == "wordcount":
        pytest.importorskip("nltk")
    script = importlib.import_module(f"data.{name}")
    monkeypatch.setattr(script, constant, value)
    with pytest.raises(Mistake) as error:
        script.prepare(tmp_path / "set", tokenizer="bytes")
    one_line(error, part, "so it is not the whole set; try again")
    assert not list(tmp_path.glob("set*"))

@pytest.mark.parametrize("name, script", [("DOCUMENTS", "fineweb_edu"), ("BOOKS", "pg19")])
def test_a_corpus_of_the_hub_that_was_cut_short(tmp_path, hub, monkeypatch, name, script):
    module = importlib.import_module(f"data.{script}")
    monkeypatch.setattr(module, name, 301)
    monkeypatch.setattr(module, "SIZE", 5000, raising=False)
    with pytest.raises(ValueError, match="documents, but it should have 301"):
        module.prepare(tmp_path / "set", tokenizer="bytes")

@pytest.mark.parametrize("seed", range(8))
def test_a_text_becomes_both_splits(tmp_path, monkeypatch, seed):
    """Files of random lines are read in pieces of a random size. The end of each file is for
    validation."""
    dice = random.Random(seed)
    kinds = ["a line\n", "é🐍\r\n", "\n", "x" * 30, " ", "\r", "\u2028", "<|endoftext|>"]
    monkeypatch.setattr(own_text, "PIECE", dice.choice([5, 64, 1000]))
    val = dice.choice([0.1, 0.25, 0.9])
    source = tmp_path / "my texts"
    (source / "a").mkdir(parents=True)
    want = {"train": [], "val": []}
    for name in ("a/01.md", "a/02.txt", "b.md"):
        text = "".join(dice.choices(kinds, k=dice.randint(4, 400)))
        (source / name).write_bytes(text.encode("utf-8-sig" if name == "b.md" else "utf-8"))
        cut = round(len(text) * (1 - val))
        want["train"] += [*text[:cut].encode(), 256]
        want["val"] += [*text[cut:].encode(), 256]
    (source / "a" / ".hidden").write_bytes(b"\xe9")
    (source / "empty").write_bytes(b"")
    own_text.prepare(tmp_path / "set", source=str(source), val=val)
    for split, tokens in want.items():
        assert np.fromfile(tmp_path / "set" / f"{split}_000000.bin", "<u2").tolist() == tokens

def test_a_long_text_needs_as_much_memory_as_a_short_one(tmp_path, monkeypatch):
    monkeypatch.setattr(own_text, "PIECE", 1000)
    monkeypatch.setattr(own_text, "Writer", functools.partial(Writer, shard_tokens=50_000))
    peaks = []
    for size in (10_000, 300_000, 2_000_000):  # the first run also loads modules
        (tmp_path / "text").write_text("some words of a line\n" * (size // 21))
        tracemalloc.start()
        own_text.prepare(tmp_path / str(size), source=str(tmp_path / "text"))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < 2 * peaks[1]

def test_a_text_that_was_edited_is_not_passed_over(tmp_path, monkeypatch):
    """A set that is complete may not be that of this text, so the command says so and fails."""
    monkeypatch.setattr("data.__file__", str(tmp_path / "data.py"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("a text")
    monkeypatch.setattr("sys.argv", ["text.py", "--source=mine.txt"])
    command(own_text.prepare, "", own_text.name_of)
    (tmp_path / "mine.txt").write_text("another text")
    with pytest.raises(SystemExit) as stop:
        command(own_text.prepare, "", own_text.name_of)
    assert "mine is complete, perhaps with other options; delete it" in stop.value.code
