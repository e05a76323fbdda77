"""
Reads options. A config file overrides the defaults of a dataclass, and --key=value flags override
both.

    cfg = load(TrainConfig, sys.argv[1:])    # e.g. ["config/quickstart.py", "--pe=rope"]

A config file consists of plain assignments. It may begin with `from config.pope_124m import *` and
then say only what differs. The keys are the fields of the dataclass, and --help prints them with
their comments. An unknown key, or a value of the wrong type or out of range, raises ValueError.

    python -m config config/cope_flip_flop.py    # prints the commands for all rows of its table
"""
import ast
import dataclasses
import difflib
import errno
import glob
import inspect
import math
import os
import re
import runpy
import signal
import sys
import traceback
from typing import Annotated, Literal, get_args, get_origin

INT_LIMIT = 2**63
# Each of these is a type, the smallest value of a key, and the first value beyond its range. Other
# numbers must be finite, and other integers are sizes, counts or seeds, which are not negative
AtLeast1 = Annotated[int, 1, INT_LIMIT]
AtLeast0 = Annotated[float, 0, math.inf]
Below1 = Annotated[float, 0, 1]
PATHS = {"data", "init_from", "out", "out_dir", "report", "source", "stories", "tokenizer"}
RANGES = {int: (0, INT_LIMIT), float: (-sys.float_info.max, math.inf)}

def load(cls, argv, **given):
    """Returns an instance of the dataclass cls from the words of a command line. `given` holds
    values that override the defaults. A config file and flags override them in turn. The field
    `config` becomes the path of the config file."""
    if "--help" in argv or "-h" in argv:
        print(usage(cls))
        sys.exit()
    for word in argv:
        if word.startswith("--") and "=" not in word:
            raise ValueError(f"flag {word!r} has no value; write {word}=VALUE, without a space")
    files = [word for word in argv if not word.startswith("--")]
    if len(files) > 1:
        raise ValueError(f"expected one config file, got {' '.join(files)}; "
                         "write options as --key=value")
    values = dict(given)
    for path in files:
        for key, value in assignments(path).items():
            values[key] = typed(cls, key, value, path)
        values["config"] = path
    for word in argv:
        if not word.startswith("--"):
            continue
        key, _, text = word[2:].partition("=")
        values[key] = typed(cls, key, text, word)
        if key == "config":
            raise ValueError(f"give the config file without a flag: {text}, not {word}")
    return cls(**values)

def assignments(path):
    """Returns {name: value} of what a config file assigns. Modules that it imports, and names that
    begin with _, are left out."""
    if not os.path.isfile(path) or not path.endswith(".py"):
        here = os.path.relpath(os.path.dirname(__file__))
        names = sorted(glob.glob("[a-z]*.py", root_dir=here))
        near = difflib.get_close_matches(os.path.basename(path), names, 1) or names
        files = ", ".join(os.path.join(here, name) for name in near)
        raise ValueError(f"there is no config file {path!r}; choose {files}")
    try:
        values = runpy.run_path(path)
    except Exception as error:  # whatever is wrong in it
        fault = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} cannot be read ({fault}); correct the file") from error
    return {key: value for key, value in values.items()
            if key[0] != "_" and not inspect.ismodule(value)}

def typed(cls, key, value, where):
    """Returns the value, with the type of the field `key`. Text is read as a Python literal unless
    the field is a str. Raises ValueError, which names `where`, if there is no such field, or if the
    value has another type or is out of range."""
    types = {field.name: field.type for field in dataclasses.fields(cls)}
    if key not in types:
        near = difflib.get_close_matches(key, types, 3) or types or ["none"]
        raise ValueError(f"unknown key {key!r} in {where}; choose from: {', '.join(near)}")
    kind = without_none(types[key])
    if kind is not types[key] and value in (None, "None"):
        return None
    low, high = RANGES.get(kind, (None, None))
    if get_origin(kind) is Annotated:
        kind, low, high = get_args(kind)
    if get_origin(kind) is Literal:
        kind = str  # model.check_choices checks the choice
    parsed = value
    try:
        if isinstance(value, str) and kind is not str:
            parsed = ast.literal_eval(value.capitalize() if kind is bool else value)
        if kind is float and type(parsed) is int:
            parsed = float(parsed)
    except (ValueError, SyntaxError, TypeError, OverflowError):
        pass  # the value is not a literal, which the check of its type below reports
    if kind is int and type(parsed) is float and parsed.is_integer():
        parsed = int(parsed)  # 1e3 for 1000
    if type(parsed) is not kind:
        raise ValueError(f"{key}={value!r} in {where} is not of type {kind.__name__}")
    if low is not None and not low <= parsed < high:
        raise ValueError(f"{key}={parsed} in {where} is out of range; use {low} <= {key} < {high}")
    if key in PATHS and parsed.split("/")[0] == "~":
        parsed = os.path.expanduser(parsed)  # a shell does not do so after the = of --out_dir=~/run
    return parsed

def without_none(kind):
    """Returns the type in `float | None`, and any other type as it is."""
    others = [part for part in get_args(kind) if part is not type(None)]
    return others[0] if type(None) in get_args(kind) else kind

def usage(cls):
    """Returns the script's docstring, then each field's name, default, choices and comment."""
    comments = {}
    for base in reversed(cls.__mro__[:-1]):
        for line in inspect.getsource(base).splitlines():
            name, colon, rest = line.strip().partition(": ")
            if colon and name.isidentifier() and "  # " in rest:
                comments[name] = rest.split("  # ", 1)[1]
    rows = []
    for field in dataclasses.fields(cls):
        comment = comments.get(field.name, "")
        if get_origin(field.type) is Literal:
            comment = f"{' | '.join(get_args(field.type))}: {comment}"
        rows.append(f"  --{field.name}={field.default!r}  {comment}")
    return "\n".join([sys.modules[cls.__module__].__doc__.strip(), "", cls.__doc__, "", *rows])

def last_line(error):
    """Returns the line that a script prints when it ends with this error. But if the error is a
    bug, raises it again, because its traceback is needed."""
    if is_bug(error):
        raise error
    line = f"{type(error).__name__}: {error}".partition("\n")[0]
    if isinstance(error, ModuleNotFoundError):
        line += f"; try pip install {error.name}"
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        line += "; free some space and give the same command again"
    return line

def end_by_ctrl_c(line):
    """Prints the line and ends the process as Ctrl-C does, so that a shell loop ends too."""
    sys.stdout.flush()
    print(f"\n{line}", file=sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.raise_signal(signal.SIGINT)

def is_bug(error):
    """Returns whether the error is a RuntimeError (but not a lack of memory), or a ValueError that
    no `raise` of this project explains, such as that of `a, b = 1, 2, 3`."""
    if isinstance(error, ValueError) and not isinstance(error, UnicodeError):  # of a text file
        last = traceback.extract_tb(error.__traceback__)[-1]
        project = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        is_ours = (os.path.abspath(last.filename).startswith(project)
                   and "site-packages" not in last.filename)
        return not (is_ours and last.line.startswith("raise"))
    return isinstance(error, RuntimeError) and not ran_out_of_memory(error)

def ran_out_of_memory(error):
    """Returns whether Python or PyTorch reports a lack of memory by this error."""
    words = "allocate memory|out of memory|size calculation overflowed"
    return isinstance(error, MemoryError) or re.search(words, str(error)) is not None
