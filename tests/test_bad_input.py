"""Mistakes on the command lines of all scripts. Each ends with one line that names the value and
the remedy, and leaves every file as it was."""
import builtins
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY, contents, fails

import train
from data.shards import Writer

ROOT = Path(__file__).parent.parent
MISSING = "cuda" if torch.backends.mps.is_available() else "mps"  # no machine has both

# A command, and what its line must contain. {name} is a path of the fixture `places`. For train.py,
# the words here change a complete command, see `failure`. A word in capitals sets an environment
# variable, as in a shell

MISTAKES = [
    # the command line
    ("train.py", ["nothing to train; try python train.py config/quickstart.py"]),
    ("train.py --compile", ["'--compile' has no value; write --compile=VALUE"]),
    ("train.py --batch_size=0", ["batch_size=0 in --batch_size=0", "use 1 <= batch_size < 9"]),
    ("train.py quickstart", ["no config file 'quickstart'", "choose ", "config/quickstart.py"]),
    ("train.py {broken}", ["{broken} cannot be read (NameError: ", "correct the file"]),
    ("train.py {wrong_key}", ["unknown key 'eval_iters' in {wrong_key}; choose from: eval_"]),
    ("config/__main__.py", ["name one config file", "see --help"]),
    ("config/__main__.py {wrong_key}", ["{wrong_key} has no table with a heading `flags`"]),
    # training
    ("train.py --dropout=1.5", ["dropout=1.5 must be a fraction; use 0 <= dropout < 1"]),
    ("train.py --min_lr=1 --schedule=cosine", ["min_lr=1.0 is above learning_rate=0.01"]),
    (f"train.py --device={MISSING}", [f"device='{MISSING}', but PyTorch sees none; use --device="]),
    ("train.py --mlp_width=1e13", ["out of memory", "try a smaller --micro_batch"]),
    ("WORLD_SIZE=3 train.py", ["batch_size=4 is not divisible by the 3 processes"]),
    # the data to train on
    ("train.py --data={nothing}", ["no meta.json in {nothing}", "python -m data.NAME"]),
    ("train.py --data=poem.txt", ["`python -m data.text --source=poem.txt`, then use --data=poem"]),
    ("train.py --data=flip_flop@lenght=8", ["'lenght'", "choose from: length"]),
    ("train.py --data=c4", ["may need a download", "`python -m data.c4`"]),
    ("train.py --data={set} --eval_splits=vla", ["no split 'vla'", "it has: train"]),
    ("train.py --data={rows} --block_size=10", ["block_size >= 11"]),
    ("train.py --vocab_size=28", ["vocab_size=28 is less than the 29 of"]),
    # other runs
    ("train.py --init_from={run} --out_dir=", ["name it with --out_dir=..."]),
    ("train.py --init_from={run}/ckpt.pt", ["name its directory, {run}"]),
    ("train.py --init_from={run} --data={rows}", ["the tokenizer", "prepare the data with"]),
    ("train.py --out_dir={run}", ["{run} already holds a run; resume it with --resume=True"]),
    ("train.py --out_dir={gone}", ["{gone} holds the results of a run whose ckpt.pt is gone"]),
    ("train.py --data={cut}", ["meta.json is damaged; delete {cut} and write it again"]),
    ("train.py --init_from={nano}", ["not a checkpoint of this train.py (KeyError)"]),
    ("train.py --out_dir={flipped} --resume=True", ["ckpt.pt is damaged or not a checkpoint of"]),
    ("train.py --out_dir={run} --resume=True --n_layer=3", ["with n_layer=2, not 3; keep it"]),
    ("train.py --out_dir={run} --resume=True --data={moved}/stream", ["in tokenizer; to fine-"]),
    # sample.py
    ("sample.py", ["no run directory given; e.g. python sample.py out/quickstart_pope"]),
    ("sample.py {own}@cope_shared=True", ["{own} has separate weights for", "which layers share"]),
    ("sample.py {run}@cope_npos=9", ["cope_npos in {run}@cope_npos=9 does nothing", "no cope"]),
    ("sample.py {run}@block_size=64 --evaluate=val", ["{run}@block_size=64 acts only on"]),
    ("sample.py {run} --figure=frequency --text={latin}", ["{latin} is not UTF-8", "convert"]),
    ("data/text.py --source={lookup} --source=x", ["source is given twice; keep one"]),
    ("sample.py {run} {task}", ["some of these runs are of text and some of tasks; name one"]),
    ("sample.py {run} --prompt=a", ["'a' is not a symbol of this set"]),
    ("sample.py {run} --evaluate=", ["--evaluate= is empty; see --help"]),
    ("sample.py {run} --evaluate=val --data={rows}", ["{rows} was tokenized with "]),
    ("sample.py {old} --evaluate=val", ["{edited} has changed since {old} was", "in separator"]),
    ("sample.py {run} --evaluate=val --extrapolate=1", ["exclude each other; keep one"]),
    ("sample.py {run} --extrapolate=a", ["extrapolate='a' is not a"]),
    ("sample.py {run} --extrapolate=0.01", ["0.01 times 16 tokens is less than one; use a larger"]),
    ("sample.py {run} --extrapolate=99", ["99 needs 1584 tokens, but", "has 599; use a smaller"]),
    ("sample.py {run} {task} --extrapolate=1", ["holds rows of 12 tokens", "needs a stream"]),
    ("sample.py {run} --report={new}/", ["{new}/' is a folder; name a file in it"]),
    ("sample.py {gone} --figure=curves", ["{gone} has no step in its log yet"]),
    ("sample.py {run} {nothing} --report={new}", ["there is no run directory '{nothing}'"]),
    ("sample.py {empty} --report={new}", ["none of these runs has results", "evaluate them"]),
    ("sample.py {headless} --figure=curves", ["{headless}/log.jsonl does not begin with"]),
    ("train.py --data={partial}", ["{partial}/meta.json is damaged; delete {partial}"]),
    ("sample.py {torn} --report={new}", ["{torn}/results.jsonl is damaged in line 2; delete it"]),
    ("sample.py {run} --figure=gates", ["'gates' has nothing to show of pe='rope'"]),
    ("sample.py {run} --figure=frequency --text=x --split=val", ["text='x' takes the place"]),
    ("sample.py {run} {task} --figure=frequency --out={new}", ["one picture, and there are 2"]),
    # preparing data
    ("data/flip_flop.py --length=7", ["length=7", "even"]),
    ("data/flip_flop.py --length=4 --train=999 --out={moved}/x", ["val=1000: hardly any row is"]),
    ("data/flip_flop.py --out={set}", ["{set} is complete", "delete it"]),
    ("data/flip_flop.py --out={moved}", ["{moved} holds other files; move them"]),
    ("data/flip_flop.py --out={moved}/half", ["{moved}/half.part/notes.txt is in the way"]),
    ("data/flip_flop.py --out={moved}/torn", ["torn.part/meta.json is damaged; delete "]),
    ("data/flip_flop.py --out={moved}/corpus", ["corpus.part was written from another source"]),
    ("data/counting.py --length=0", ["variables=1 must be 1 to 26, and", "length=0 3 or more"]),
    ("data/text.py", ["no text was named", "--source="]),
    ("data/text.py {lookup}", ["'{lookup}' is not key=value; keys: source,"]),
    ("data/text.py --source={lookup}", ["data/lookup is the place of another data set"]),
    ("data/text.py --source={latin}", ["{latin} is not UTF-8", "convert"]),
    ("data/text.py --source={lookup} --tokenizer=gpt9 --out={new}", ["(ValueError: Unknown enc"]),
    ("data/wordcount.py --join=0", ["join=0 stories", "use 1 or more"]),
    ("data/wordcount.py --stories={nothing} --out={moved}/x", ["'{nothing}' does not exist"]),
]

@pytest.fixture(scope="module")
def places(stream, rows, tmp_path_factory):
    """{name: path} of a folder with data, runs, texts and config files."""
    folder = tmp_path_factory.mktemp("places")
    for name in ("stream", "moved/stream", "edited"):
        shutil.copytree(stream, folder / name)
    meta = folder / "moved" / "stream" / "meta.json"
    meta.write_text(meta.read_text().replace("s28", "s29"))
    shutil.copytree(rows, folder / "rows")
    for run, data, *flags in (("run", "stream", "--pe=rope"), ("task", "rows"), ("old", "edited"),
                              ("own", "stream", "--pe=cope", "--cope_shared=False")):
        words = [f"--data={folder / data}", *TINY, "--max_iters=2", *flags]
        train.main([*words, f"--out_dir={folder / run}"])
    writer = Writer(folder / "set")
    writer.write("train", np.arange(1000) % 500)
    writer.finish(vocab_size=500, tokenizer="bytes")
    meta = folder / "edited" / "meta.json"
    meta.write_text(meta.read_text().replace('"separator": 0', '"separator": 1'))
    shutil.copytree(folder / "run", folder / "flipped")
    path = folder / "flipped" / "ckpt.pt"
    path.write_bytes(path.read_bytes().replace(b"batch_size", b"batch_sizd"))
    for name in ("cut", "empty", "gone", "headless", "nano", "partial", "torn",
                 "moved/corpus.part", "moved/half.part", "moved/torn.part"):
        (folder / name).mkdir()
    (folder / "gone" / "log.jsonl").write_text('{"ended": 2}\n')
    (folder / "gone" / "results.jsonl").touch()
    for name in ("cut", "moved/torn.part"):
        (folder / name / "meta.json").write_text('{"shards": ')
    torch.save({"model": {}, "config": {}}, folder / "nano" / "ckpt.pt")  # like nanoGPT's
    (folder / "moved" / "corpus.part" / "meta.json").write_text('{"settings": {"sha256": "a"}}')
    (folder / "moved" / "half.part" / "notes.txt").write_text("of somebody else")
    (folder / "headless" / "log.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (folder / "partial" / "meta.json").write_text('{"shards": {"train_000000.bin": 9}}')
    (folder / "torn" / "results.jsonl").write_text('{}\n{"run": "to{"run": "torn"}\n{}\n')
    (folder / "lookup.txt").write_text("a text")
    (folder / "broken.py").write_text("pe = undefined")
    (folder / "empty" / "poem.txt").write_text("a text")
    (folder / "latin").write_bytes(b"caf\xe9")
    (folder / "wrong_key.py").write_text("import math\neval_iters = 200")
    return {name: folder / name for name in ("new", "nothing")} | {
        path.stem: path for path in folder.iterdir()}

def failure(command, places, monkeypatch):
    """The line that a command fails with, in an empty folder. Without a mistake, train.py works."""
    monkeypatch.chdir(places["empty"])
    monkeypatch.setattr("data.__file__", "data.py")  # sets without a path are located here
    words = [word.format(**places) for word in command.split()]
    while words[0].isupper():
        monkeypatch.setenv(*words.pop(0).split("="))
    script, *words = words
    if script == "train.py" and command != "train.py":
        words = [f"--data={places['stream']}", *TINY, "--pe=rope", f"--out_dir={places['new']}",
                 *words]
    return fails(str(ROOT / script), *words)

@pytest.mark.parametrize("command, parts", MISTAKES, ids=str)
def test_bad_input(command, parts, places, monkeypatch):
    """One line names the mistake, and nothing is written."""
    before = contents(places["set"].parent)
    line = failure(command, places, monkeypatch)
    for part in parts:
        assert part.format(**places) in line
    assert contents(places["set"].parent) == before

@pytest.mark.parametrize("command, library", [
    ("train.py --wandb_project=p --out_dir={moved}/run", "wandb"),
    ("sample.py {run} --figure=frequency", "matplotlib"),
])
def test_a_library_that_is_missing(command, library, places, monkeypatch):
    """The line says what to install."""
    def without_library(name, *rest, real=builtins.__import__):
        if name.split(".")[0] == library:
            raise ModuleNotFoundError(name=library)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_library)
    assert failure(command, places, monkeypatch).endswith(f"pip install {library}")
