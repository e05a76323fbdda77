"""The configurator and the config files: what they may say, and that every key has an effect. The
errors for all other input are in test_bad_input.py."""
import dataclasses
import glob
import importlib
import os
import re
import shlex
from typing import Literal, get_origin

import pytest
import torch

import checkpoint
import config
import sample
import train
from config.__main__ import main as config_main
from data import SCRIPTS, options
from model import GPT, GPTConfig
from sample import SampleConfig
from train import TrainConfig

CONFIGS = sorted(glob.glob("config/[a-z]*.py"))
WITH_TABLE = [path for path in CONFIGS if "\n    flags " in open(path).read()]
PREPARE = [importlib.import_module(f"data.{name}").prepare for name in sorted(SCRIPTS)]

def build(cfg):
    """Builds the model of a TrainConfig, with no memory for its weights."""
    cfg.vocab_size = cfg.vocab_size or 257
    with torch.device("meta"):
        GPT(cfg)

def test_defaults_file_flags_in_this_order(tmp_path):
    """A str field takes the text as it is, and an integer may be written as 2e3."""
    path = tmp_path / "some.py"
    path.write_text('"""doc"""\n_half = 2\nn_layer = 4 * _half\nlearning_rate = 1\nnorm = "b"\n')
    words = [str(path), "--norm=c d", "--data=12", "--bias=FALSE", "--max_iters=2e3", "--min_lr=1"]
    got = config.load(TrainConfig, words)
    assert got == TrainConfig(config=str(path), n_layer=8, norm="c d", data="12", bias=False,
                              max_iters=2000, learning_rate=1.0, min_lr=1.0)

def refused(function, key, value):
    """The function raises ValueError for --key=value, in one line that names both."""
    with pytest.raises(ValueError) as error:
        function([f"--{key}={value}"])
    line = str(error.value)
    assert "\n" not in line and key in line and value in line

def test_wrong_words_are_refused():
    """An unknown key, a value that is not a number where one is needed, or that is not a choice."""
    for cls, main in ((TrainConfig, train.main), (SampleConfig, sample.main)):
        refused(main, "n_layers", "1")
        for field in dataclasses.fields(cls):
            if get_origin(field.type) is Literal:
                refused(main, field.name, "zzz")
            elif type(field.default) in (int, float):
                for value in ("x", "True", "nan"):
                    refused(main, field.name, value)
    for prepare in PREPARE:
        refused(lambda words: options(prepare, words), "n_layers", "1")
        for key, kind in prepare.__annotations__.items():
            if kind in (int, float):
                refused(lambda words: options(prepare, words), key, "x")

def test_options_of_your_own_are_read_as_annotated():
    def prepare(folder: str, source: "str", n: None | int = None, seed=0) -> None:
        pass

    assert options(prepare, ["--source=a", "n=3"]) == dict(source="a", n=3)
    with pytest.raises(ValueError, match="unknown key 'folder' .* choose from: "):
        options(prepare, ["--folder=a"])
    Own = dataclasses.make_dataclass("Own", [("slope", float | None, None)])  # of a model
    assert [config.load(Own, [f"--slope={text}"]).slope for text in ("2", "None")] == [2.0, None]

@pytest.mark.parametrize("cls", [TrainConfig, SampleConfig])
def test_help_prints_every_key_with_its_comment(cls, capsys):
    with pytest.raises(SystemExit) as stop:
        config.load(cls, ["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert not stop.value.code and cls.__doc__ in lines
    for field in dataclasses.fields(cls):
        start = f"  --{field.name}={field.default!r}  "
        line = next(line for line in lines if line.startswith(start))
        assert len(line.split("  ", 2)[2]) > 5, f"{field.name} has no comment"

@pytest.mark.parametrize("path", WITH_TABLE)
def test_commands_of_a_config(path, capsys):
    """`python -m config FILE`: each row of its tables and each seed makes a model and has a run
    directory of its own."""
    config_main([path])
    lines = capsys.readouterr().out.splitlines()
    directories = set()
    for line in lines:
        cfg = config.load(TrainConfig, shlex.split(line)[2:])
        directories.add(cfg.out_dir)
        if "seed" not in line:  # a seed changes nothing about the model
            build(cfg)
    assert len(directories) == len(lines)
    if path == "config/cope_flip_flop.py":
        assert len(lines) == (10 + 7 * 3) * 3  # ten rows, and seven by three, with three seeds

def commands(text):
    """The commands of a text, (script, words): indented or fenced lines that start python."""
    for line in text.replace("\\\n", " ").splitlines():
        line = re.split(r"\s#", line)[0]
        for part in line.split("&&"):
            words = shlex.split(part) if re.match(r"\s*(python|torchrun) (-|\w+\.py)", part) else []
            for i, word in enumerate(words):
                if word in ("train.py", "sample.py", "kernels.py") or word.startswith("data."):
                    yield word, words[i + 1 :]
                    break
            else:
                assert not words or "pytest" in words, f"what is {line!r}?"

DOCUMENTED = CONFIGS + sorted(glob.glob("data/[a-z]*.py")) + ["README.md", "config/README.md"]

@pytest.mark.parametrize("path", DOCUMENTED)
def test_documented_commands_parse(path):
    """Their keys and data sets exist, their values are possible, and their model can be built."""
    text = open(path).read()
    found = list(commands(text))
    assert found or path == "data/shards.py" or '"""' not in text  # a reader's own config file
    for script, words in found:
        if script.startswith("data."):
            options(importlib.import_module(script).prepare, words, out=str)
        if any(word in "".join(words) for word in ("NAME", "...", "RUN", "$", "{")):
            continue
        if script == "train.py":
            words = [word for word in words if "init_from" not in word]  # there is no such run here
            cfg = train.read_config(words)
            name, _, text = cfg.data.partition("@")
            if os.sep not in name and name != "input":  # neither of these names a script
                options(importlib.import_module(f"data.{name}").prepare, text.split(","))
            build(cfg)
        if script == "sample.py":
            config.load(SampleConfig, [word for word in words if word.startswith("--")])
            for run in (word for word in words if not word.startswith("--")):
                for option in filter(None, run.partition("@")[2].split(",")):
                    config.typed(GPTConfig, *option.split("="), run)

@pytest.mark.parametrize("path", CONFIGS)
def test_config_files_train(path, stream, rows, tmp_path):
    """One step at a small size, on generated data of the config's kind, a stream or masked rows."""
    cfg = config.load(TrainConfig, [path])
    tasks = "flip", "copy", "counting", "indirect", "wordcount", "jsb"
    shrunk = dict(
        n_layer=min(cfg.n_layer, 6), n_head=2, n_embd=32, mlp_width=48 if cfg.mlp_width else 0,
        expe_l=min(cfg.expe_l, 8), block_size=16, vocab_size=32, batch_size=4,
        micro_batch=2 if cfg.micro_batch else 0, max_iters=1, eval_batches=1, eval_splits="val",
        compile=False, device="cpu", out_dir=str(tmp_path),
        data=rows if any(name in cfg.data for name in tasks) else stream)
    train.main([path, *(f"--{key}={value}" for key, value in shrunk.items())])
    assert checkpoint.read(str(tmp_path))["step"] == 1
