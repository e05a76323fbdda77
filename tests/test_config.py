"""The configurator: what files and flags may say, and the errors for what they may not."""
import dataclasses
import glob
import importlib
import os
import re
import shlex
import subprocess
import sys
from typing import Literal

import pytest
import torch

import config
import train
from config import AtLeast1, Below1
from config.__main__ import main as config_main
from data.shards import options
from model import GPT, GPTConfig
from sample import SampleConfig
from train import TrainConfig

CONFIGS = sorted(glob.glob("config/[a-z]*.py"))

@dataclasses.dataclass
class Small:
    """Keys of a test."""
    config: str = ""  # path
    steps: int = 3  # how many; with a # in it
    rate: float = 0.5  # how fast
    name: str = "a"  # of whom
    loud: bool = False  # or not
    share: Below1 = 0.5  # of all
    size: AtLeast1 = 1  # of it
    color: Literal["red", "blue"] = "red"  # of it

def write(tmp_path, text):
    path = tmp_path / "some.py"
    path.write_text(text)
    return str(path)

def test_defaults_file_flags_in_this_order(tmp_path):
    path = write(tmp_path, '"""doc"""\n_half = 2\nsteps = 4 * _half\nrate = 1\nname = "b"\n')
    cfg = config.load(Small, [path, "--name=c d", "--loud=True", "--rate=1e-3"])
    assert cfg == Small(config=path, steps=8, rate=1e-3, name="c d", loud=True)
    assert type(config.load(Small, [path]).rate) is float  # 1 in the file

@pytest.mark.parametrize("word, key, value", [
    ("--name=12", "name", "12"),  # a str field takes the text as it is
    ("--name=", "name", ""),
    ("--rate=-2", "rate", -2.0),
    ("--loud=FALSE", "loud", False),
    ("--steps=2e3", "steps", 2000),
])
def test_values_of_flags(word, key, value):
    got = getattr(config.load(Small, [word]), key)
    assert got == value and type(got) is type(value)

@pytest.mark.parametrize("words, message", [
    ("--stepz=1", "unknown key 'stepz' in --stepz=1; did you mean 'steps'?"),
    ("--qqqq=1", "unknown key 'qqqq' in --qqqq=1; see --help"),
    ("--steps=x", "steps='x' in --steps=x is not of type int"),
    ("--steps=1.5", "steps='1.5' in --steps=1.5 is not of type int"),
    ("--steps=True", "is not of type int"),
    ("--steps=1e999", "is not of type int"),
    ("--steps=-1", "steps=-1 in --steps=-1 is out of range; use 0 <= steps < 9223372036854775808"),
    ("--steps=1e30", "in --steps=1e30 is out of range; use 0 <= steps < "),
    ("--rate=1e999", "rate=inf in --rate=1e999 is out of range"),
    ("--share=1", "share=1.0 in --share=1 is out of range; use 0 <= share < 1"),
    ("--share=x", "share='x' in --share=x is not of type float"),
    ("--size=0", "size=0 in --size=0 is out of range; use 1 <= size < "),
    ("--loud=1", "loud='1' in --loud=1 is not of type bool"),
    ("--loud a.py", "flag '--loud' has no value; write --loud=True"),
    ("--laud", "unknown key 'laud' in --laud; did you mean 'loud'?"),
    ("--steps --loud=True", "flag '--steps' has no value; write --steps=..."),
    ("--steps 200", "flag '--steps' has no value; write --steps=200"),
    ("missing.py", "there is no config file 'missing.py'; there are config/addition_small.py, "),
    ("quickstart", "there is no config file 'quickstart'; did you mean config/quickstart.py?"),
    ("--config=a.py", "give the config file without a flag: a.py, not --config=a.py"),
    ("a.py b.py", "expected one config file, got a.py b.py; write options as --key=value"),
])
def test_wrong_flags(words, message):
    with pytest.raises(ValueError) as error:
        config.load(Small, words.split())
    assert message in str(error.value) and "\n" not in str(error.value)

@pytest.mark.parametrize("text, message", [
    ("stepz = 1", "unknown key 'stepz' in .*some.py; did you mean 'steps'?"),
    ("name = 3", "name=3 in .*some.py is not of type str"),
    ("import os", "unknown key 'os' in "),
    ("eval_iters = 200", "unknown key 'eval_iters' in .*some.py; use --eval_batches"),
])
def test_wrong_files(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        config.load(Small, [write(tmp_path, text)])

@pytest.mark.parametrize("flag, message", [
    ("--eval_only=True", "python sample.py RUN --evaluate=val"),
    ("--always_save_checkpoint=False", "ckpt.pt is always saved"),
    ("--gradient_accumulation_steps=8", "use --micro_batch; "),
    ("--eval_iters=200", "use --eval_batches"),
    ("--decay_lr=False", "use --schedule=constant for no decay"),
    ("--lr_decay_iters=600", "use --max_iters, "),
    ("--wandb_log=True", "use --wandb_project, "),
    ("--dataset=openwebtext", "use --data"),
    ("--start=ROMEO", "use --prompt; "),
    ("--backend=gloo", "nccl on GPUs and gloo on CPUs"),
])
def test_flags_of_nanogpt(flag, message):
    key = flag[2:].partition("=")[0]
    with pytest.raises(ValueError) as error:
        config.load(TrainConfig, ["config/quickstart.py", flag])
    assert f"unknown key '{key}' in {flag}; " in str(error.value) and message in str(error.value)

def test_a_run_directory_has_no_flag_in_sample():
    message = "; a run directory is given without a flag: python sample.py out/..."
    for flag in ("--out_dir=out/x", "--init_from=gpt2"):
        with pytest.raises(ValueError, match=message):
            config.load(SampleConfig, [flag])
        config.load(TrainConfig, [flag])

def test_help_prints_every_key_with_its_comment(capsys):
    with pytest.raises(SystemExit) as stop:
        config.load(Small, ["--help"])
    printed = capsys.readouterr().out
    assert not stop.value.code and printed.startswith(f"{__doc__}\n\nKeys of a test.\n\n  --")
    assert "  --steps=3  how many; with a # in it\n" in printed
    assert "  --color='red'  red | blue: of it\n" in printed
    for cls in (TrainConfig, SampleConfig):
        lines = config.usage(cls).splitlines()
        for field in dataclasses.fields(cls):
            line = next(line for line in lines if line.startswith(f"  --{field.name}="))
            assert len(line.split("  ", 2)[2]) > 5, f"{field.name} has no comment"

def test_help_into_a_closed_pipe():
    process = subprocess.Popen([sys.executable, "-c", "import config, train; "
                                "config.load(train.TrainConfig, ['--help'])"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(60) == 0

@pytest.mark.parametrize("path", CONFIGS)
def test_commands_of_a_config(path, capsys):
    """`python -m config FILE`: each row of its tables and each seed makes a model and has a run
    directory of its own."""
    docstring = open(path).read().split('"""')[1]
    tables = docstring.count("\n    flags ")
    try:
        config_main([path])
    except ValueError as error:
        assert "has no table" in str(error) and not tables
        return
    lines = capsys.readouterr().out.splitlines()
    directories = set()
    for line in lines:
        words = shlex.split(line)
        cfg = config.load(TrainConfig, words[2:])
        build(cfg)
        directories.add(cfg.out_dir)
    assert tables and len(directories) == len(lines)

def test_commands_of_flip_flop(capsys):
    """Ten rows with three seeds; and seven rows and three columns with one."""
    config_main(["config/cope_flip_flop.py"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10 * 3 + 7 * 3
    assert lines[8] == ("python train.py config/cope_flip_flop.py --pe=rope --seed=1339 "
                        "--out_dir=out/cope_flip_flop_rope_seed1339")
    assert lines[-1].endswith("--out_dir=out/cope_flip_flop_n_embd=128_n_layer=2_n_head=2_cope")

@pytest.mark.parametrize("cls", [GPTConfig, TrainConfig, SampleConfig])
def test_every_field_is_read(cls):
    """A flag that nothing reads would be ignored without a word."""
    names = "model.py", "train.py", "sample.py", "eval/figures.py"
    source = "".join(open(name).read() for name in names)
    for field in dataclasses.fields(cls):
        assert re.search(rf"cfg\.{field.name}\b", source), f"nothing reads {field.name}"

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
    """Their keys and data sets exist, and their model can be built."""
    found = list(commands(open(path).read()))
    assert found or path == "data/shards.py"
    for script, words in found:
        if script.startswith("data."):
            takes = importlib.import_module(script).prepare.__annotations__ | {"out": str}
            for word in words:
                takes[word[2:].partition("=")[0]](word.partition("=")[2])
        if any(word in "".join(words) for word in ("NAME", "...", "RUN", "$", "{")):
            continue
        if script == "train.py":
            cfg = config.load(TrainConfig, words)
            name, _, text = cfg.data.partition("@")
            if os.sep not in name and name != "input":  # what its script and the classes make of it
                options(importlib.import_module(f"data.{name}").prepare, text)
            build(cfg)
        if script == "sample.py":
            config.load(SampleConfig, [word for word in words if word.startswith("--")])
            for run in (word for word in words if not word.startswith("--")):
                for option in filter(None, run.partition("@")[2].split(",")):
                    config.typed(GPTConfig, *option.split("="), run)

def build(cfg):
    """The model of a TrainConfig, with no memory for its weights."""
    fields = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(GPTConfig)}
    with torch.device("meta"):
        return GPT(GPTConfig(**fields | dict(vocab_size=cfg.vocab_size or 257)))

@pytest.mark.parametrize("path", CONFIGS)
def test_config_files_train(path, stream, rows, tmp_path, capsys):
    """One step at a small size, on generated data of the config's kind, a stream or masked rows.
    The docstring names the file."""
    assert os.path.basename(path) in open(path).read().split('"""')[1]
    cfg = config.load(TrainConfig, [path])
    tasks = "flip", "copy", "counting", "indirect", "wordcount", "jsb"
    shrunk = dict(
        n_layer=min(cfg.n_layer, 6), n_head=2, n_embd=32, mlp_width=48 if cfg.mlp_width else 0,
        expe_l=min(cfg.expe_l, 8), block_size=16, vocab_size=32, batch_size=4,
        micro_batch=2 if cfg.micro_batch else 0, max_iters=1, eval_interval=9, eval_batches=1,
        eval_splits="val", compile=False, device="cpu", out_dir=str(tmp_path / "out"),
        data=rows if any(name in cfg.data for name in tasks) else stream, log_interval=1)
    train.main([path, *(f"--{key}={value}" for key, value in shrunk.items())])
    printed = capsys.readouterr().out
    for text in ("step 1/1 loss", "step 1: val loss", f"pe={cfg.pe},"):
        assert text in printed
