"""Options and config files: how they are read, which mistakes in them are refused, and that all
config files and documented commands work. The errors for all other input are in
test_bad_input.py."""
import dataclasses
import glob
import importlib
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import types

import pytest
import torch
from conftest import TINY

import config
import train
from config.runs import read_checkpoint
from data import options
from model import GPT, PES, GPTConfig
from train import TrainConfig

CONFIGS = [os.path.join("config", path.name) for path in config.files()]

def build(cfg):
    """Builds the model of a TrainConfig, with no memory for its weights."""
    cfg.vocab_size = cfg.vocab_size or 257
    with torch.device("meta"):
        GPT(cfg)

def test_defaults_file_flags_in_this_order(tmp_path):
    """A flag may have a space or = before its value. A config file may compute its values."""
    path = tmp_path / "some.py"
    path.write_text('"""doc"""\nimport math\n_half = 2\nn_layer = 4 * _half\nlearning_rate = 1\n'
                    'base = math.pi\nnorm = "rmsnorm"\ntie = False\n')
    for words in (["--norm=layernorm", "--data=12", "--max_iters=2e3", "--min_lr=1", "--resume"],
                  ["--norm", "layernorm", "--data", "12", "--resume", "True", "--max_iters", "2000",
                   "--min_lr", "1.0"]):
        assert config.load(TrainConfig, [str(path), *words]) == TrainConfig(
            config=str(path), n_layer=8, norm="layernorm", data="12", tie=False, max_iters=2000,
            learning_rate=1.0, min_lr=1.0, base=3.141592653589793, resume=True)

def test_a_config_file_is_executed_once(tmp_path, stream, monkeypatch):
    """So a seed that it draws is the one that the directory is named after and that is saved."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.py").write_text("import time\n_file = open('calls', 'a')\n_file.write('x')\n"
                                      "_file.close()\nseed = time.time_ns() % 1000003\n")
    train.main(["some.py", f"--data={stream}", *TINY, "--max_iters=1"])
    assert (tmp_path / "calls").read_text() == "x"
    (run,) = (tmp_path / "out").iterdir()
    assert "seed" not in run.name  # it is that of the config file

def test_from_another_directory(tmp_path, monkeypatch):
    """A config file is found in the project, too, and a home directory is written out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    cfg = config.load(TrainConfig, ["config/quickstart.py", "--out_dir=~/runs/a", "--data=~b"])
    assert (cfg.n_embd, cfg.out_dir, cfg.data) == (128, "/home/me/runs/a", "~b")

@pytest.mark.parametrize("name, meant", [
    ("n_layers", "n_layer"), ("max_iter", "max_iters"), ("lr", "learning_rate"), ("zzz", None)])
def test_a_typo_gets_the_nearest_option(name, meant):
    mend = f"did you mean --{meant}?" if meant else "--help shows all options"
    with pytest.raises(config.Mistake, match=re.escape(f"--{name}=1 ({mend})")):
        config.load(TrainConfig, [f"--{name}=1"])

@pytest.mark.parametrize("words, value", [
    (["--n_layers=1"], "--n_layers=1"), (["--max_iter=1"], "--max_iter=1"),
    (["--max_iters=1.5"], "'1.5'"), (["--mlp=zzz"], "'zzz'"), (["--dropout=x"], "'x'"),
    (["--resume=no"], "'no'"), (["--resume", "a.py"], "'a.py'")])
def test_a_wrong_word_is_one_line(words, value, tmp_path):
    """It names the value, and the file if that is where it is."""
    with pytest.raises(config.Mistake, match="--help|did you mean") as error:
        config.load(TrainConfig, words)
    assert value in str(error.value) and "\n" not in str(error.value)
    path = tmp_path / "some.py"
    name, _, value = words[0][2:].partition("=")
    path.write_text(f"{name} = {value!r}")
    if value:
        with pytest.raises(config.Mistake, match=f"^{path}: .*{value}|: unknown options: {name}"):
            config.load(TrainConfig, [str(path)])

def test_an_unknown_name_in_a_config_file_is_refused(tmp_path):
    """Also if its value has a space, which argparse would take for the path of a config file."""
    path = tmp_path / "some.py"
    for line in ('eval_split = ["val", "train"]', 'run_name = "my run"', "def f(x): pass",
                 'config = "x"', "out_dir = None", 'pe = ["rope", "cope"]'):
        path.write_text(line)
        with pytest.raises(config.Mistake):
            config.load(TrainConfig, [str(path)])

def test_only_mistakes_and_files_are_one_line(monkeypatch, capsys):
    """Everything else is a bug, and keeps its traceback."""
    monkeypatch.setattr("sys.argv", ["/some/where/script.py"])

    def fail(words):
        raise error

    for error in (config.Mistake("a mistake"), FileNotFoundError(2, "none", "x.txt")):
        with pytest.raises(SystemExit) as stop:
            config.run(fail)
        assert stop.value.code == f"script.py: error: {error}"
    for error in (ValueError("a bug"), AssertionError("a bug"), RuntimeError(), KeyError("x")):
        with pytest.raises(type(error)):
            config.run(fail)

def test_what_model_py_refuses_is_one_line(monkeypatch):
    """An assertion of model.py that has a text. A method of somebody's own keeps its traceback."""
    monkeypatch.setattr("sys.argv", ["script.py"])

    class Own(PES["alibi"]):
        def logit_bias(self, *args):
            B, T = args[0].shape

    monkeypatch.setitem(PES, "own", Own)
    with pytest.raises(SystemExit) as stop:
        config.run(lambda words: GPT(GPTConfig(n_head=5)))
    assert stop.value.code == "script.py: error: n_head=5 must divide n_embd=768"
    with pytest.raises(ValueError, match="too many values"):
        config.run(lambda words: GPT(GPTConfig(pe="own", n_layer=1))(torch.zeros(1, 2).long()))

def test_a_closed_pipe_and_an_interrupt():
    """Whoever reads the output has seen enough, and Ctrl-C ends a script as a signal does."""
    for error, status in (("BrokenPipeError", 1), ("KeyboardInterrupt", -signal.SIGINT)):
        code = f"import config\ndef main(words):\n    raise {error}\nconfig.run(main)"
        done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)
        assert (done.returncode, done.stderr) == (status, "")

def test_output_of_a_notebook(monkeypatch):
    """Its stdout cannot be reconfigured."""
    monkeypatch.setattr("sys.argv", ["script.py"])
    monkeypatch.setattr("sys.stdout", types.SimpleNamespace(write=len, flush=int))
    found = []
    config.run(found.append)
    assert found == [[]]

def test_options_of_your_own_are_read_as_annotated():
    def prepare(folder: str, source: "str", n: None | int = None, seed=0) -> None:
        pass

    assert options(prepare, ["--source=a", "--n=3"]) == dict(source="a", n=3)

    @dataclasses.dataclass
    class Own:
        slope: float | None = None  # an option of your own model

    assert [config.load(Own, words).slope for words in (["--slope=2"], [])] == [2.0, None]

def test_help_prints_every_option_with_its_comment(capsys, monkeypatch):
    """In lines that fit the terminal."""
    monkeypatch.setenv("COLUMNS", "90")
    with pytest.raises(SystemExit) as stop:
        config.load(TrainConfig, ["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert not stop.value.code
    assert max(map(len, lines[lines.index("options:") :])) <= 90
    words = " ".join(" ".join(lines).split())
    for field in dataclasses.fields(TrainConfig):
        if field.name != "config":
            pattern = rf" --{field.name} \S+ (.+?) \[{re.escape(repr(field.default))}\]"
            comment = re.search(pattern, words)
            assert comment and len(comment[1]) > 5, f"{field.name} has no comment"

@pytest.mark.parametrize("path", CONFIGS)
def test_rows_of_a_config(path):
    """If a row of a table in a config's docstring begins with flags, they make a model."""
    for paragraph in open(path).read().split("\n\n"):
        heading, *rows = paragraph.splitlines() or [""]
        for row in rows if heading.split()[:1] == ["flags"] else []:
            flags = itertools.takewhile(lambda word: word.startswith("--"), row.split())
            build(config.load(TrainConfig, [path, *flags]))

def commands(text):
    """The commands of a text, (script, words): indented or fenced lines that start python."""
    for line in re.sub(r"\\\n *", "", text).splitlines():
        line = re.split(r"\s#| {2,}(?=\w)", line.strip())[0]  # without what explains it
        for part in line.split("&&"):
            words = shlex.split(part) if re.match(r"\s*(python|torchrun) (-|\w+\.py)", part) else []
            for i, word in enumerate(words):
                if word in ("train.py", "sample.py", "kernels.py"):
                    yield word.removesuffix(".py"), words[i + 1 :]
                    break
                if word.startswith(("data.", "eval.")):
                    yield word, words[i + 1 :]
                    break
            else:
                assert not words or "pytest" in words, f"what is {line!r}?"

DOCUMENTED = CONFIGS + sorted(glob.glob("data/[a-z]*.py")) + [
    "README.md", "config/README.md", "eval/README.md", "eval/papers.md", "sample.py", "train.py",
    *sorted(glob.glob("eval/[a-z]*.py"))]

WITHOUT_COMMANDS = ("data/shards.py", "data/documents.py", "eval/cbt.py", "eval/draw.py",
                    "eval/records.py", "eval/walk.py", "eval/walk_parts.py", "eval/walk_render.py")

class Parsed(Exception):
    """The command line was understood."""

@pytest.mark.parametrize("path", DOCUMENTED)
def test_documented_commands_parse(path, monkeypatch, tmp_path):
    """Their options and data sets exist, their values are possible, and their model can be built.
    train.py's are read in full. Of the others, only the command line is parsed."""
    def parse(self, words):
        parse_args(self, words)
        raise Parsed

    parse_args = config.Parser.parse_args
    text = open(path).read()
    found = list(commands(text))
    assert found or path in WITHOUT_COMMANDS or '"""' not in text
    for script, words in found:
        words = [re.sub(r"NAME|SET|\{.*?\}", "rope", word) for word in words if word != "..."]
        if "--help" in words or any("..." in word or "$" in word for word in words):
            continue
        if script == "train":
            words = [word for word in words if "init_from" not in word]  # there is no such run here
            # out/ may hold runs
            cfg, *_ = train.read_options([*words, f"--out_dir={tmp_path / 'run'}"])
            name, _, given = cfg.data.partition("@")
            if os.sep not in name and name not in ("input", "rope"):  # these name no script
                prepare = importlib.import_module(f"data.{name}").prepare
                options(prepare, [f"--{option}" for option in given.split(",") if option])
            build(cfg)
        elif script in ("kernels", "data.rope"):
            pass  # these have no options, or stand for any script
        elif script.startswith("data."):
            options(importlib.import_module(script).prepare, words)
        else:
            if script == "eval.tasks":
                pytest.importorskip("lm_eval")
            main = importlib.import_module(script).main
            with monkeypatch.context() as patch, pytest.raises(Parsed):
                for name in ("parse_args", "parse_intermixed_args"):
                    patch.setattr(config.Parser, name, parse)
                main(words)
            for word in words:
                changes = word.partition("@")[2].split(",") if word.startswith("out/") else []
                config.parse(GPTConfig, [f"--{change}" for change in changes if change])

@pytest.mark.parametrize("path", CONFIGS)
def test_config_files_train(path, stream, rows, tmp_path):
    """One step at a small size, on generated data of the config's kind, a stream or masked rows."""
    cfg = config.load(TrainConfig, [path])
    tasks = "flip", "copy", "counting", "indirect", "wordcount", "jsb"
    shrunk = dict(
        n_layer=min(cfg.n_layer, 6), n_head=2, n_embd=32, mlp_width=48 if cfg.mlp_width else 0,
        block_size=16, vocab_size=32, batch_size=4,
        micro_batch=2 if cfg.micro_batch else 0, max_iters=1, eval_batches=1, eval_splits="val",
        compile=False, device="cpu", out_dir=str(tmp_path),
        data=rows if any(name in cfg.data for name in tasks) else stream)
    if cfg.expe_l:
        shrunk["expe_l"] = min(cfg.expe_l, 8)
    train.main([path, *(f"--{key}={value}" for key, value in shrunk.items())])
    assert read_checkpoint(str(tmp_path))["step"] == 1
