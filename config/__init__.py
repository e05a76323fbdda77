"""
The configurator: defaults of a dataclass, then a config file of plain assignments, then --key=value flags.

    cfg = load(TrainConfig, sys.argv[1:])    # e.g. ["config/quickstart.py", "--pe=rope"]

A file may begin with another's assignments, `from config.pope_124m import *`, and say only what differs.
Every key is a field of the dataclass, typed and commented where it is declared; --help prints them all.
An unknown key or a value of another type is a ValueError, in a file as in a flag.
"""
import ast
import dataclasses
import difflib
import inspect
import math
import os
import sys


def load(cls, argv, **given):
    """An instance of the dataclass cls from the words of a command line; `given` are the script's defaults.
    Its field `config` becomes the path of the config file, if one is named. --help prints the keys."""
    if "--help" in argv or "-h" in argv:
        print(usage(cls))
        sys.exit()
    for word, after in zip(argv, [*argv[1:], "--"]):
        if word.startswith("--") and "=" not in word:
            value = "..." if after.startswith("--") else after
            if type(getattr(cls, word[2:], "")) is bool:
                value = "True"
            raise ValueError(f"flag {word!r} has no value; write {word}={value}")
    values = dict(given)
    files = [word for word in argv if not word.startswith("--")]
    if len(files) > 1:
        raise ValueError(f"expected one config file, got {' '.join(files)}; write options as --key=value")
    for path in files:
        for key, value in assignments(path).items():
            values[key] = typed(cls, key, value, path)
        values["config"] = path
    for word in argv:
        if word.startswith("--"):
            key, _, text = word[2:].partition("=")
            if key == "config":
                raise ValueError(f"a config file has no flag; write {text or 'its path'} in place of {word}")
            values[key] = typed(cls, key, text, word)
    return cls(**values)


def assignments(path):
    """The names that a config file assigns, without those that begin with an underscore."""
    if not os.path.isfile(path):
        near = difflib.get_close_matches(path, known_files(), 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known_files())}"
        raise ValueError(f"config file {path!r} does not exist; {hint}")
    if not path.endswith(".py"):
        raise ValueError(f"config file {path!r} is not Python; write lines of key = value into a .py file")
    names = {"__file__": path}
    try:
        with open(path, encoding="utf-8") as file:
            exec(compile(file.read(), path, "exec"), names)
    except Exception as error:  # whatever its author did
        text = str(error).partition("\n")[0]
        raise ValueError(f"config file {path!r} does not run: {type(error).__name__}: {text}") from error
    return {key: value for key, value in names.items() if not key.startswith("_")}


def typed(cls, key, value, where):
    """value as the field's type. Text from a flag is read as a Python literal unless the field is a str.
    No int may be negative: each is a size, a number of things or a seed."""
    fields = {f.name: f.type for f in dataclasses.fields(cls)}
    if key not in fields:
        near = [name for name in fields if initials(name) == key]  # lr
        near += difflib.get_close_matches(key, fields, 1)
        hint = f"did you mean {near[0]!r}?" if near else "see --help"
        raise ValueError(f"unknown key {key!r} in {where}; {hint}")
    want, read = fields[key], value
    try:
        if isinstance(value, str) and want is not str:
            read = ast.literal_eval(value.capitalize() if want is bool else value)
        if {want, type(read)} == {int, float} and read % 1 == 0:  # 1 for 1.0, 1e3 for 1000
            read = want(read)
    except (ValueError, SyntaxError, MemoryError, RecursionError, OverflowError):
        pass  # of another type, which is refused below
    if type(read) is not want:
        raise ValueError(f"{key}={value!r} in {where} is not of type {want.__name__}")
    if want is float and not math.isfinite(read):
        raise ValueError(f"{key}={value!r} in {where} is not finite; use a number")
    if want is int and read < 0:
        raise ValueError(f"{key}={read} in {where} is negative; use 0 or more")
    return read


def initials(name):
    return "".join(word[:1] for word in name.split("_"))


def usage(cls):
    """The script's docstring, then a line per field: name, default and the comment beside its declaration."""
    comments = {}
    for base in reversed(cls.__mro__[:-1]):
        for line in inspect.getsource(base).splitlines():
            name, colon, rest = line.strip().partition(": ")
            if colon and name.isidentifier() and "  # " in rest:
                comments[name] = rest.split("  # ", 1)[1]
    rows = [f"  --{f.name}={f.default!r}  {comments.get(f.name, '')}" for f in dataclasses.fields(cls)]
    return "\n".join([sys.modules[cls.__module__].__doc__.strip(), "", cls.__doc__, "", *rows])


def known_files():
    here = os.path.dirname(os.path.abspath(__file__))
    return sorted("config/" + name for name in os.listdir(here) if name.endswith(".py") and name[0] != "_")
