"""Mistakes in the command lines of all scripts. Each ends with one line that names the value, and
leaves every file as it was."""
import shutil
import sys
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
    ("train.py", "config/quickstart.py"),
    ("train.py --batch_size=0", "--batch_size: 0 must be at least 1"),
    ("train.py quickstart", "no config file 'quickstart'; did you mean config/quickstart.py?"),
    ("train.py config/quickstar.py", "did you mean config/quickstart.py?"),
    ("train.py --resume=yes", "'yes' is neither True nor False (--help"),
    ("train.py --resume some.py", "False; a config file must come before the flags"),
    ("train.py {wrong_key}", "{wrong_key}: unknown options: eval_iters"),
    # training
    ("train.py --pe=roep", "pe='roep'"),
    ("train.py --pe=rope,", "pe='rope,' has an empty name"),
    ("train.py --min_lr=1 --schedule=cosine", "min_lr=1.0"),
    ("train.py --mlp_width=-5", "--mlp_width: '-5' is not an integer from 0"),
    ("train.py --learning_rate=nan", "--learning_rate: nan is not a finite number"),
    ("train.py --grad_clip=-1", "--grad_clip: -1 must be at least 0"),
    ("train.py --min_lr=-0.05", "--min_lr: -0.05 must be at least 0"),
    ("train.py --weight_decay=-1", "--weight_decay: -1 must be at least 0"),
    ("train.py --learning_rate=-1e-3", "--learning_rate: -1e-3 must be at least 0"),
    ("train.py --beta1=1.5", "--beta1: 1.5 must be from 0 to below 1"),
    ("train.py --seed=18446744073709551616", "is not an integer from 0 to 2^63 - 1"),
    ("RANK=1 train.py", "RANK=1 is set in the environment, but there are only 1 processes"),
    (f"train.py --device={MISSING}", f"device='{MISSING}'"),
    ("WORLD_SIZE=3 train.py", "batch_size=4"),
    # the data to train on
    ("train.py --data={nothing}", "{nothing}"),
    ("train.py --data=poem.txt", "poem.txt is not a data set"),
    ("train.py --data=flip_flop@lenght=8", "--lenght=8"),
    ("train.py --data=c4", "python -m data.c4"),
    ("train.py --data={set} --eval_splits=vla", "'vla'"),
    ("train.py --data={rows} --block_size=10", "block_size >= 11"),
    ("train.py --vocab_size=28", "vocab_size=28"),
    ("train.py --data={cut}", "{cut}"),
    ("train.py --data={partial}", "{partial}"),
    # other runs
    ("train.py --init_from={nothing}", "{nothing}"),
    ("train.py --init_from={run} --n_embd=32", "the weights of {run} do not fit a model with pe="),
    ("train.py --init_from={run} --pe=pope", "the weights of {run} do not fit a model with pe='po"),
    ("train.py --pe=rope --cope_npos=7", "cope_npos does nothing for pe='rope'"),
    ("train.py --schedule=constant --decay_iters=2", "decay_iters=2 does nothing with schedule=c"),
    ("train.py --init_from={run} --data={rows}", "{run} was trained with "),
    ("train.py --init_from={nano}", "{nano}/ckpt.pt"),
    ("train.py --out_dir={run}", "{run} already holds a run"),
    ("train.py --out_dir={gone}", "{gone} holds the results of a run whose ckpt.pt is gone"),
    ("train.py --out_dir={half} --resume", "{half}/ckpt.pt"),
    ("train.py --out_dir={run} --resume --data={moved}/stream", "with other data, not {moved}/s"),
    # sample.py
    ("sample.py", "RUN"),
    ("sample.py {nothing}", "{nothing}"),
    ("sample.py {half}", "{half}/ckpt.pt"),
    ("sample.py {run}@rope_scaling=yran", "{run}@rope_scaling=yran: argument --rope_scaling"),
    ("sample.py {run}@rope_factr=8", "{run}@rope_factr=8: rope_factr cannot be changed after"),
    ("sample.py {run}@block_size=8", "block_size cannot be changed after training"),
    ("sample.py {run}@base=8", "only rope_scaling, rope_factor, rope_trained, expe_scale, rel"),
    ("sample.py {run} --extrapolate=one", "'one' is not a list of numbers above 0"),
    ("sample.py {run} --prompt=a", "'a'"),
    ("sample.py {run} --prompt=a --extrapolate=1", "--prompt does nothing with --extrapolate"),
    ("sample.py {run} --window=4", "--window needs --extrapolate"),
    ("sample.py {run} --window=0 --extrapolate=1", "--window: 0 must be at least 1"),
    ("eval/scores.py {run} --splits=vla", "'vla'"),
    ("eval/scores.py {run} --splits=val,", "'val,'"),
    ("eval/report.py {run}/ckpt.pt", "{run}/ckpt.pt is not a file of results"),
    ("eval/report.py {run}/log.jsonl", "{run}/log.jsonl does not hold results, which are in RUN/"),
    ("eval/suite.py rope --jobs=0", "--jobs: 0 must be at least 1"),
    ("eval/suite.py rope --seeds=0", "--seeds: 0 must be at least 1"),
    ("eval/cost.py --rounds=1", "--rounds=1 has no quartiles"),
    ("eval/cost.py --lengths=abc", "--lengths: invalid"),
    ("eval/curves.py loss_by_position {run} --eval_tokens=0", "--eval_tokens: 0 must be at least"),
    ("sample.py {run} --top_k=-1", "--top_k: '-1' is not an integer from 0"),
    ("eval/scores.py {run} --data={rows}", "{rows}"),
    ("eval/scores.py {old} --splits=val", "{edited} has changed since {old}"),
    ("sample.py {run} --extrapolate=0.01", "0 tokens"),
    ("sample.py {run} --extrapolate=99", "1584 tokens"),
    ("sample.py {task} --extrapolate=1", "{rows}"),
    # preparing data
    ("data/flip_flop.py --length=7", "length=7"),
    ("data/flip_flop.py --length=4 --train=999 --out={moved}/x", "val=1000"),
    ("data/flip_flop.py --train=-5 --out={moved}/x", "--train: '-5' is not an integer"),
    ("train.py --data=flip_flop@train=-5", "--train: '-5' is not an integer"),
    ("data/pg19.py --limit=-1 --out={moved}/x", "--limit: '-1' is not an integer"),
    ("data/flip_flop.py --out={set}", "{set}"),
    ("data/flip_flop.py --out={moved}", "{moved}"),
    ("data/counting.py --length=0", "length=0"),
    ("data/text.py", "--source="),
    ("data/text.py {lookup}", "{lookup}"),
    ("data/text.py --source={lookup} --source={latin} --out={new}", "--source is given twice"),
    ("data/text.py --source={lookup}", "data/lookup"),
    ("data/text.py --source={latin}", "{latin}"),
    ("data/text.py --source={short} --out={moved}/x", "{short} is so short that val=0.1 leaves"),
    ("data/text.py --source={short} --val=0.9 --out={moved}/x", "val=0.9 leaves nothing for train"),
    ("data/text.py --source={lookup} --tokenizer=gpt9 --out={new}", "gpt9"),
    ("data/wordcount.py --join=0", "join=0"),
    ("data/wordcount.py --stories={nothing} --out={moved}/x", "{nothing}"),
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
    for run, data, *flags in (("run", "stream", "--pe=rope"), ("task", "rows"), ("old", "edited")):
        words = [f"--data={folder / data}", *TINY, "--max_iters=2", *flags]
        train.main([*words, f"--out_dir={folder / run}"])
    with Writer(folder / "set", 500, "bytes") as writer:
        writer.write("train", np.arange(1000) % 500)
    meta = folder / "edited" / "meta.json"
    meta.write_text(meta.read_text().replace('"separator": 0', '"separator": 1'))
    shutil.copytree(folder / "run", folder / "half")
    path = folder / "half" / "ckpt.pt"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    for name in ("cut", "empty", "gone", "nano", "partial"):
        (folder / name).mkdir()
    (folder / "gone" / "results.jsonl").touch()
    (folder / "cut" / "meta.json").write_text('{"shards": ')
    torch.save({"model": {}, "config": {}}, folder / "nano" / "ckpt.pt")  # like nanoGPT's
    (folder / "partial" / "meta.json").write_text('{"shards": {"train_000000.bin": 9}}')
    (folder / "lookup.txt").write_text("a text")
    (folder / "empty" / "poem.txt").write_text("a text")
    (folder / "short").write_text("four")
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

@pytest.mark.parametrize("command, part", MISTAKES, ids=str)
def test_bad_input(command, part, places, monkeypatch):
    """One line names the value, and nothing is written."""
    before = contents(places["set"].parent)
    line = failure(command, places, monkeypatch)
    assert part.format(**places) in line
    assert contents(places["set"].parent) == before

@pytest.mark.parametrize("module, package, command", [
    ("matplotlib.figure", "matplotlib", "eval/curves.py training {run}"),
    ("wandb", "wandb", "train.py --wandb_project=p"),
    ("lm_eval", "'lm-eval[hf]'", "eval/tasks.py {run} --tasks=blimp"),
])
def test_a_missing_package(module, package, command, places, monkeypatch):
    """One line says what to install."""
    monkeypatch.setitem(sys.modules, module, None)  # so that it cannot be imported
    line = failure(command, places, monkeypatch)
    assert f"which is not installed; run pip install {package}" in line
    shutil.rmtree(places["new"], ignore_errors=True)
