"""The configurator: what files and flags may say, and what they are told when they may not."""
import dataclasses
import glob
import os
import re
import shlex

import pytest

import config
from model import GPTConfig
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


@pytest.mark.parametrize("words, message", [
    (["--stepz=1"], "unknown key 'stepz' in --stepz=1; did you mean 'steps'?"),
    (["--qqqq=1"], "unknown key 'qqqq' in --qqqq=1; see --help"),
    (["--steps=x"], "steps='x' in --steps=x is not of type int"),
    (["--steps=1.5"], "steps='1.5' in --steps=1.5 is not of type int"),
    (["--steps=True"], "is not of type int"),
    (["--rate=fast"], "rate='fast' in --rate=fast is not of type float"),
    (["--loud=1"], "loud='1' in --loud=1 is not of type bool"),
    (["--loud=yes"], "is not of type bool"),
    (["--loud"], "flag '--loud' has no value; write --loud=..."),
    (["missing.py"], "config file 'missing.py' does not exist; there are config/"),
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
])
def test_wrong_files(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        config.load(Small, [write(tmp_path, text)])


def test_help_prints_every_key_with_its_comment(capsys):
    with pytest.raises(SystemExit) as stop:
        config.load(Small, ["--help"])
    assert not stop.value.code
    assert "  --steps=3  how many; with a # in it\n" in capsys.readouterr().out
    for cls in (TrainConfig, SampleConfig):
        lines = config.usage(cls).splitlines()
        for field in dataclasses.fields(cls):
            line = next(line for line in lines if line.startswith(f"  --{field.name}="))
            assert len(line.split("  ", 2)[2]) > 5, f"{field.name} has no comment"


def sources():
    return "".join(open(name).read() for name in ("model.py", "train.py", "sample.py"))


@pytest.mark.parametrize("cls", [GPTConfig, TrainConfig, SampleConfig])
def test_every_field_is_read(cls):
    for field in dataclasses.fields(cls):
        assert re.search(rf"cfg\.{field.name}\b", sources()), f"nothing reads {field.name}"


def commands(text):
    """The commands of a docstring or of the README: indented or fenced lines that start one of the scripts."""
    for line in text.replace("\\\n", " ").splitlines():
        line = line.split("  #")[0]
        for part in line.split("&&"):
            words = shlex.split(part) if re.match(r"\s*(python|torchrun) ", part) else []
            for script in ("train.py", "sample.py"):
                if script in words:
                    yield script, words[words.index(script) + 1 :]


@pytest.mark.parametrize("path", sorted(glob.glob("config/[a-z]*.py")) + ["README.md"])
def test_documented_commands_parse(path):
    found = list(commands(open(path).read()))
    assert found
    for script, words in found:
        if any(word in "".join(words) for word in ("NAME", "...", "RUN", "$", "{")):
            continue
        if script == "train.py":
            config.load(TrainConfig, words)
        else:
            config.load(SampleConfig, [word for word in words if word.startswith("--")])
            for run in (word for word in words if not word.startswith("--")):
                for option in filter(None, run.partition("@")[2].split(",")):
                    config.typed(GPTConfig, *option.split("="), run)


@pytest.mark.parametrize("path", sorted(glob.glob("config/[a-z]*.py")))
def test_config_files_have_a_docstring_and_load(path):
    assert os.path.basename(path) in open(path).read().split('"""')[1]
    assert config.load(TrainConfig, [path]).config == path
