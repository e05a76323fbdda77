"""The configurator: what files and flags may say, and what they are told when they may not."""
import dataclasses
import glob
import importlib
import os
import re
import shlex

import pytest
import torch
from conftest import fails

import config
import train
from data.shards import options
from model import GPT, GPTConfig
from sample import SampleConfig
from train import TrainConfig


@dataclasses.dataclass
class Small:
    """Keys of a test."""

    config: str = ""  # path
    steps: int = 3  # how many; with a # in it
    rate: float = 0.5  # how fast
    name: str = "a"  # of whom
    loud: bool = False  # or not


def write(tmp_path, text):
    path = tmp_path / "some.py"
    path.write_text(text)
    return str(path)


def test_defaults_file_flags_in_this_order(tmp_path):
    path = write(tmp_path, '"""doc"""\n_half = 2\nsteps = 4 * _half\nrate = 1\nname = "b"\n')
    cfg = config.load(Small, [path, "--name=c d", "--loud=True", "--rate=1e-3"])
    assert cfg == Small(config=path, steps=8, rate=1e-3, name="c d", loud=True)
    assert type(config.load(Small, [path]).rate) is float  # 1 in the file
    assert config.load(Small, ["--name=12"]).name == "12"  # a str field takes the text as it is
    assert config.load(Small, ["--name="]).name == ""
    assert config.load(Small, ["--rate=-2"]).rate == -2.0
    assert (
        config.load(Small, ["--loud=true"]).loud is True
        and config.load(Small, ["--loud=true", "--loud=FALSE"]).loud is False
    )
    steps = config.load(Small, ["--steps=2e3"]).steps
    assert steps == 2000 and type(steps) is int


@pytest.mark.parametrize("words, message", [
    (["--stepz=1"], "unknown key 'stepz' in --stepz=1; did you mean 'steps'?"),
    (["--qqqq=1"], "unknown key 'qqqq' in --qqqq=1; see --help"),
    (["--steps=x"], "steps='x' in --steps=x is not of type int"),
    (["--steps=1.5"], "steps='1.5' in --steps=1.5 is not of type int"),
    (["--steps=True"], "is not of type int"),
    (["--rate=fast"], "rate='fast' in --rate=fast is not of type float"),
    (["--loud=1"], "loud='1' in --loud=1 is not of type bool"),
    (["--loud=yes"], "is not of type bool"),
    (["--steps=-1"], "steps=-1 in --steps=-1 is negative; use 0 or more"),
    (["--steps=-1e3"], "steps=-1000 in --steps=-1e3 is negative"),
    (["--steps=1e999"], "is not of type int"),
    (["--loud"], "flag '--loud' has no value; write --loud=True"),
    (["--laud"], "unknown key 'laud' in --laud; did you mean 'loud'?"),
    (["--loud", "a.py"], "flag '--loud' has no value; write --loud=True"),
    (["--steps"], "flag '--steps' has no value; write --steps=..."),
    (["--steps", "--loud=True"], "flag '--steps' has no value; write --steps=..."),
    (["--steps", "200"], "flag '--steps' has no value; write --steps=200"),
    (["a.py", "--name", "b"], "flag '--name' has no value; write --name=b"),
    (["missing.py"], "there is no config file 'missing.py'; there are config/addition_small.py, "),
    (["quickstart"], "there is no config file 'quickstart'; did you mean config/quickstart.py?"),
    (["--config=a.py"], "a config file has no flag; write a.py in place of --config=a.py"),
    (["config"], "there is no config file 'config'; there are config/"),
    (["README.md"], "there is no config file 'README.md'; there are config/"),
    (["--lr=1"], "unknown key 'lr' in --lr=1; see --help"),
    (["a.py", "b.py"], "expected one config file, got a.py b.py; write options as --key=value"),
])
def test_wrong_flags(words, message):
    with pytest.raises(ValueError) as error:
        config.load(Small, words)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("text, message", [
    ("stepz = 1", "unknown key 'stepz' in .*some.py; did you mean 'steps'?"),
    ("steps = '1'.upper", "steps=.* in .*some.py is not of type int"),
    ("name = 3", "name=3 in .*some.py is not of type str"),
    ("loud = 1", "loud=1 in .*some.py is not of type bool"),
    ("steps = -2", "steps=-2 in .*some.py is negative; use 0 or more"),
    ("import os", "unknown key 'os' in "),
])
def test_wrong_files(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        config.load(Small, [write(tmp_path, text)])


@pytest.mark.parametrize("flag, message", [
    ("--eval_only=True", "python sample.py RUN --evaluate=val"),
    ("--eval_only", "python sample.py RUN --evaluate=val"),
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
    for script, words in (("train.py", ["config/quickstart.py"]), ("sample.py", ["out/x"])):
        line = fails(script, *words, flag)
        assert line.startswith(f"ValueError: unknown key '{key}' in {flag}; ") and message in line


def test_a_run_directory_has_no_flag():
    for flag in ("--out_dir=out/x", "--init_from=gpt2"):
        assert fails("sample.py", flag).endswith(
            "; a run directory is given without a flag: python sample.py out/...")
    cfg = config.load(TrainConfig, ["--out_dir=out/x", "--init_from=out/y"])
    assert (cfg.out_dir, cfg.init_from) == ("out/x", "out/y")


def test_a_file_of_nanogpt(tmp_path):
    with pytest.raises(ValueError, match="unknown key 'eval_iters' in .*some.py; use --eval_batches"):
        config.load(TrainConfig, [write(tmp_path, "eval_iters = 200")])


def test_a_key_by_its_initials():
    for word, key in (("--lr=1", "learning_rate"), ("--wd=1", "weight_decay")):
        with pytest.raises(ValueError, match=f"did you mean '{key}'"):
            config.load(TrainConfig, [word])


def test_help_prints_every_key_with_its_comment(capsys):
    with pytest.raises(SystemExit) as stop:
        config.load(Small, ["--help"])
    assert not stop.value.code
    printed = capsys.readouterr().out
    assert "  --steps=3  how many; with a # in it\n" in printed and printed.startswith(
        f"{__doc__}\n\nKeys of a test.\n\n  --"
    )
    for cls in (TrainConfig, SampleConfig):
        lines = config.usage(cls).splitlines()
        for field in dataclasses.fields(cls):
            line = next(line for line in lines if line.startswith(f"  --{field.name}="))
            assert len(line.split("  ", 2)[2]) > 5, f"{field.name} has no comment"


def sources():
    return "".join(open(name).read() for name in
                   ("model.py", "train.py", "sample.py", "eval/figures.py"))


@pytest.mark.parametrize("cls", [GPTConfig, TrainConfig, SampleConfig])
def test_every_field_is_read(cls):
    for field in dataclasses.fields(cls):
        read = rf'cfg\.{field.name}\b|learnable = .*"{field.name}"'  # ExPE reads these by their names
        assert re.search(read, sources()), f"nothing reads {field.name}"


CONFIGS = sorted(glob.glob("config/[a-z]*.py"))


def commands(text):
    """The commands of a text, (script, words): indented or fenced lines that start python."""
    for line in text.replace("\\\n", " ").splitlines():
        line = re.split(r"\s#", line)[0]
        for part in line.split("&&"):
            words = shlex.split(part) if re.match(r"\s*(python|torchrun) ", part) else []
            for i, word in enumerate(words):
                if word in ("train.py", "sample.py", "kernels.py") or word.startswith("data."):
                    yield word, words[i + 1 :]
                    break
            else:
                assert not words or "pytest" in words, f"what is {line!r}?"


@pytest.mark.parametrize(
    "path", CONFIGS + sorted(glob.glob("data/[a-z]*.py")) + ["README.md", "config/README.md"]
)
def test_documented_commands_parse(path):
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
            meta(cfg)
        if script == "sample.py":
            config.load(SampleConfig, [word for word in words if word.startswith("--")])
            for run in (word for word in words if not word.startswith("--")):
                for option in filter(None, run.partition("@")[2].split(",")):
                    config.typed(GPTConfig, *option.split("="), run)


def meta(cfg, **changes):
    """The model of a TrainConfig without memory for its weights."""
    with torch.device("meta"):
        fields = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(GPTConfig)} | changes
        return GPT(GPTConfig(**fields | dict(vocab_size=fields["vocab_size"] or 257)))


@pytest.mark.parametrize("path", CONFIGS)
def test_config_files_have_a_docstring_and_load(path):
    assert os.path.basename(path) in open(path).read().split('"""')[1]
    assert config.load(TrainConfig, [path]).config == path


@pytest.mark.parametrize("path", CONFIGS)
def test_config_files_train(path, stream, rows, tmp_path, capsys):
    """Two steps at a shrunk size, on generated data: a stream, or masked rows where the config's data are."""
    cfg = config.load(TrainConfig, [path])
    data = (
        rows
        if any(name in cfg.data for name in ("flip", "copy", "counting", "indirect", "wordcount", "jsb"))
        else stream
    )
    shrink = dict(
        n_layer=min(cfg.n_layer, 6),
        n_head=2,
        n_embd=32,
        mlp_width=48 if cfg.mlp_width else 0,
        expe_l=min(cfg.expe_l, 8),
        block_size=16,
        vocab_size=32,
        batch_size=4,
        micro_batch=2 if cfg.micro_batch else 0,
        max_iters=2,
        eval_batches=1,
        eval_splits="val",
        compile=False,
        device="cpu",
        data=data,
        out_dir=str(tmp_path / "out"),
        log_interval=1,
    )
    train.main([path, *(f"--{key}={value}" for key, value in shrink.items())])
    printed = capsys.readouterr().out
    assert "step 2/2 loss" in printed and "step 2: val loss" in printed and f"pe={cfg.pe}," in printed
