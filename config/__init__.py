"""
The configurator: defaults of a dataclass, then a config file, then --key=value flags.

    cfg = load(TrainConfig, sys.argv[1:])    # e.g. ["config/quickstart.py", "--pe=rope"]

A config file is plain assignments. It may begin with `from config.pope_124m import *`, and then say
only what differs. Every key is a field of the dataclass, with its type and a comment; --help prints
them all. An unknown key or a value of the wrong type is a ValueError.
"""
import ast
import dataclasses
import difflib
import glob
import inspect
import os
import runpy
import sys

NANOGPT = {  # its keys that we lack: what to do instead
    "always_save_checkpoint": "leave it out, ckpt.pt is always saved",
    "backend": "leave it out, it is nccl on GPUs and gloo on CPUs",
    "dataset": "use --data",
    "decay_lr": "use --schedule=constant for no decay",
    "eval_iters": "use --eval_batches",
    "eval_only": "evaluate a run with python sample.py RUN --evaluate=val",
    "gradient_accumulation_steps": "use --micro_batch; --batch_size is that of a whole step",
    "init_from": "a run directory is given without a flag: python sample.py out/...",
    "lr_decay_iters": "use --max_iters, where the decay always ends",
    "out_dir": "a run directory is given without a flag: python sample.py out/...",
    "start": 'use --prompt; for a file, --prompt="$(cat FILE)"',
    "wandb_log": "use --wandb_project, which turns it on",
}

def load(cls, argv, **given):
    """An instance of the dataclass cls from the words of a command line. `given` holds defaults.
    The field `config` becomes the path of the config file, if there is one."""
    if "--help" in argv or "-h" in argv:
        print(usage(cls))
        sys.exit()
    files = [word for word in argv if not word.startswith("--")]
    for word, after in zip(argv, [*argv[1:], "--"]):
        if word.startswith("--") and "=" not in word:
            value = "..." if after.startswith("--") else after
            value = "True" if type_of(cls, word[2:], word) is bool else value
            raise ValueError(f"flag {word!r} has no value; write {word}={value}")
    if len(files) > 1:
        raise ValueError(f"expected one config file, got {' '.join(files)}; "
                         "write options as --key=value")
    values = dict(given)
    for path in files:
        for key, value in assignments(path).items():
            values[key] = typed(cls, key, value, path)
        values["config"] = path
    for word in argv:
        key, _, text = word[2:].partition("=")
        if word.startswith("--"):
            values[key] = typed(cls, key, text, word)
            if key == "config":
                raise ValueError(f"a config file has no flag; write {text} in place of {word}")
    return cls(**values)

def assignments(path):
    """The names that a config file assigns, without those that begin with an underscore."""
    if not os.path.isfile(path) or not path.endswith(".py"):
        here = os.path.dirname(os.path.abspath(__file__))
        files = [f"config/{name}" for name in sorted(glob.glob("[a-z]*.py", root_dir=here))]
        near = difflib.get_close_matches(path, files, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(files)}"
        raise ValueError(f"there is no config file {path!r}; {hint}")
    return {key: value for key, value in runpy.run_path(path).items() if key[0] != "_"}

def type_of(cls, key, where):
    """The type of a field. ValueError if there is none of that name."""
    fields = {f.name: f.type for f in dataclasses.fields(cls)}
    if key not in fields:
        near = [name for name in fields if "".join(w[:1] for w in name.split("_")) == key]  # lr
        near += difflib.get_close_matches(key, fields, 1)
        hint = f"did you mean {near[0]!r}?" if near else "see --help"
        raise ValueError(f"unknown key {key!r} in {where}; {NANOGPT.get(key, hint)}")
    return fields[key]

def typed(cls, key, value, where):
    """value as the field's type. Text is read as a Python literal unless the field is a str. No int
    may be negative: each is a size, a count or a seed."""
    want, read = type_of(cls, key, where), value
    try:
        if isinstance(value, str) and want is not str:
            read = ast.literal_eval(value.capitalize() if want is bool else value)
    except (ValueError, SyntaxError):
        pass  # of another type, which is refused below
    if {want, type(read)} == {int, float} and read % 1 == 0:  # 1 for 1.0, 1e3 for 1000
        read = want(read)
    if type(read) is not want:
        raise ValueError(f"{key}={value!r} in {where} is not of type {want.__name__}")
    if want is int and read < 0:
        raise ValueError(f"{key}={read} in {where} is negative; use 0 or more")
    return read

def usage(cls):
    """The script's docstring, then each field's name, default and the comment beside it."""
    comments = {}
    for base in reversed(cls.__mro__[:-1]):
        for line in inspect.getsource(base).splitlines():
            name, colon, rest = line.strip().partition(": ")
            if colon and name.isidentifier() and "  # " in rest:
                comments[name] = rest.split("  # ", 1)[1]
    rows = [f"  --{f.name}={f.default!r}  {comments.get(f.name, '')}"
            for f in dataclasses.fields(cls)]
    return "\n".join([sys.modules[cls.__module__].__doc__.strip(), "", cls.__doc__, "", *rows])
