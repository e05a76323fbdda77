"""data/lookup.py: written rows, spelled out in their symbols and answered by a plain loop."""
import collections

import pytest
from test_tasks import read, uniform

from data import lookup


def answers(row, items):
    """The kind, the distance and the value of each question of a row, found by reading it."""
    found = []
    for t in range(items, len(row), 2):
        asked, kind = row[t][:-1], row[t][-1]
        item = row[t - int(asked)] if kind == "<" else next(x for x in row if x[0] == asked)
        distance = t - row.index(item)
        found.append((kind, distance, item[1]))
    return found

@pytest.mark.parametrize("items, questions", [(8, 4), (5, 5), (3, 1)])
def test_lookup(tmp_path, items, questions):
    lookup.prepare(tmp_path, items=items, questions=questions, train=2000, test=500)
    splits = read(tmp_path)
    assert len(splits) == 7
    for split, rows in splits.items():
        name, _, times = split.partition("_x")
        n = items * int(times or 1)
        kinds, values, places = collections.Counter(), collections.Counter(), []
        for row, mask in rows:
            assert len(row) == n + 2 * questions and len({item[0] for item in row[:n]}) == n
            assert mask == [0] * n + [0, 1] * questions
            found = answers(row, n)
            assert [value for _, _, value in found] == row[n + 1 :: 2]
            asked = [n + 2 * q - distance for q, (_, distance, _) in enumerate(found)]
            assert len(set(asked)) == questions and n - items <= min(asked) <= max(asked) < n
            kinds.update(kind for kind, _, _ in found)
            values.update(row[n + 1 :: 2])
            places += asked
        uniform(values, "0123")
        uniform(collections.Counter(places), range(n - items, n))
        if split == "train":
            uniform(kinds, "<?")
        else:
            assert set(kinds) == {dict(content="?", position="<")[name]}

@pytest.mark.parametrize("options", [dict(items=9), dict(questions=0), dict(questions=9)])
def test_sizes_that_make_no_lookup(tmp_path, options):
    with pytest.raises(ValueError) as error:
        lookup.prepare(tmp_path / "set", **options)
    ((name, value),) = options.items()
    assert f"{name}={value}" in str(error.value) and not list(tmp_path.iterdir())
