"""The mutation tool: which changes it makes, and that its report lists exactly the changes that no test notices."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from mutants import Record, choose_tests, function_of, numbers_of
from mutation import Mutant, mutants

TOOL = Path(__file__).parent / "support" / "mutants.py"


def changed(source: str) -> set[str]:
    return {mutant.apply(source) for mutant in mutants("module.py", source)}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = a < b", {"x = a <= b", "x = a >= b"}),
        ("x = a is not b", {"x = a is b"}),
        ("x = a not in b", {"x = a in b"}),
        ("x = a + b", {"x = a - b"}),
        ("x = a // b", {"x = a * b"}),
        ("x = a and b", {"x = a or b"}),
        ("x = not a", {"x = a"}),
        ("x = -a", {"x = a"}),
        ("x = min(a, b)", {"x = max(a, b)"}),
        ("x = np.maximum(a, b)", {"x = np.minimum(a, b)"}),
        ("x = True", {"x = False"}),
        ("x = 3", {"x = 4", "x = 2"}),
        ("x = 0", {"x = 1"}),
        ("x = 0.5", {"x = 1.0", "x = 0.25"}),
        ("x = 'stop'", {"x = 'stop~'"}),
        ("x += a", {"pass", "x -= a"}),
        ("f(a)", {"pass"}),
        ("del a[b]", {"pass"}),
        ("if a:\n    f()", {"if (not (a)):\n    f()", "if a:\n    pass"}),
        (
            "while a < b:\n    break",
            {f"while a {op} b:\n    break" for op in ("<=", ">=")} | {"while a < b:\n    continue"},
        ),
        (
            "def f(a=1):\n    return a",
            {f"def f(a={n}):\n    return a" for n in (0, 2)} | {"def f(a=1):\n    return None"},
        ),
        ("x = 'é' if a else b", {"x = 'é~' if a else b", "x = 'é' if (not (a)) else b"}),
    ],
)
def test_each_kind_of_change(source: str, expected: set[str]) -> None:
    assert changed(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""Docstring."""',
        "class A:\n    x: int\n    '''Attribute.'''",
        "Kind = Literal['a', 'b']",
        "def f(a: Literal['b']) -> None: ...",
        "_log.info('text %d', 3)",
        "@dataclass(frozen=True)\nclass A(Struct, gc=False): ...",
        "x = zip(a, b, strict=True)",
        "if TYPE_CHECKING:\n    import torch",
        "__all__ = ['f']",
        "with a:\n    _log.info('text')",
        "try:\n    x: int\n    '''Attribute.'''\nfinally:\n    pass",
        "x = f'{a}: 3'",
        "del a",
    ],
)
def test_what_changes_no_behaviour_is_left_alone(source: str) -> None:
    assert changed(source) == set()


def test_the_report_names_what_the_tests_do_not_notice(tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    module = tmp_path / "shop" / "price.py"
    module.write_text("def price(num):\n    if num > 10:\n        return num * 2\n    return num * 3\n")
    (tmp_path / "tests" / "shop").mkdir(parents=True)
    (tmp_path / "tests" / "shop" / "test_price.py").write_text(
        "from shop.price import price\n\n\ndef test_price():\n    assert (price(5), price(20)) == (15, 40)\n"
    )
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    before = module.read_text()
    command = [sys.executable, str(TOOL), "shop", "--num", "99", "--root", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = ran.stdout.splitlines()
    survivors = {new for old, new in pairwise(lines) if old == "-    if num > 10:"}
    assert survivors == {f"+    if num {op} {bound}:" for op, bound in ((">", 9), (">", 11), (">=", 10))}
    assert lines[-1] == "shop: 12 mutants, 75% noticed, 0 of them by a timeout"
    assert module.read_text() == before
    assert {path.name for path in tmp_path.iterdir()} == {".git", "shop", "tests"}


SOURCE = """LIMIT = 3


@cached
def outer(a, b=LIMIT):
    def inner():
        return 1

    return inner


class Box:
    size = 2

    def get(self):
        return self.size
"""


@pytest.mark.parametrize(
    ("line", "function"),
    [(1, None), (4, None), (5, None), (7, 6), (9, 4), (12, None), (13, None), (15, None), (16, 15)],
)
def test_the_function_of_a_line_is_the_innermost_one_with_its_decorators(line: int, function: int | None) -> None:
    """Defaults and class attributes are computed outside of it."""
    assert function_of(SOURCE, line) == function


def test_a_mutant_gets_the_tests_that_call_its_function_own_ones_first(tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "box.py").write_text(SOURCE)
    calls = {
        "tests/shop/test_box.py::slow": ["shop/box.py:15"],
        "tests/shop/test_box.py::quick": ["shop/box.py:15", "shop/box.py:4"],
        "tests/shop/test_box.py::limit": [],
        "tests/shop/test_till.py::till": ["shop/box.py:15"],
        "tests/shop/test_till.py::other": ["shop/till.py:14"],
    }
    seconds = dict(zip(calls, (2.0, 1.0, 3.0, 0.5, 0.1), strict=True))
    record = Record(seconds=seconds, calls=calls, modules=[])

    def chosen(line: int, budget: float = 10.0) -> list[str]:
        mutant = Mutant("shop/box.py", line, 0, 0, "")
        return [test.partition("::")[2] for test in choose_tests(tmp_path, mutant, record, budget)]

    assert chosen(16) == ["quick", "slow", "till"]
    assert chosen(16, budget=3.0) == ["quick", "slow"]
    assert chosen(9) == ["quick"]
    assert chosen(7) == ["quick", "slow", "limit", "other", "till"], "no test calls it"
    assert chosen(1) == ["quick", "slow", "limit", "till"]


def test_numbers_of_the_sample() -> None:
    assert numbers_of("", 3) == [0, 1, 2]
    assert numbers_of("0,3-5,9", 5) == [0, 3, 4]
