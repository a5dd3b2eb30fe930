"""Code rewards cannot be forged: the program never meets what is expected of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from rill.envs.sandbox import missing, open_sandbox
from rill.envs.sandbox.checks import Checkers

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no sandbox here: {missing()}")

Judge = Callable[..., Awaitable[list[bool]]]


@pytest.fixture
async def judge() -> AsyncIterator[Judge]:
    checkers = Checkers()

    async def judge(code: str, *checks: str, timeout_s: float = 30.0) -> list[bool]:
        program = await open_sandbox()
        try:
            return await checkers.check(program, code, checks, timeout_s)
        finally:
            await program.close()

    yield judge
    await checkers.close()


async def test_checks_pass_and_fail_one_by_one(judge: Judge) -> None:
    passed = await judge("def add(a, b): return a + b", "assert add(1, 2) == 3", "assert add(1, 1) == 3")
    assert passed == [True, False]


LIAR = """
class Yes:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    def __sub__(self, other): return 0.0
    def __abs__(self): return 0.0
    def __float__(self): return 3.0
    def __bool__(self): return True
    def __len__(self): return 3
class Int(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
"""


@pytest.mark.parametrize(
    "answer", ["Yes()", "[1, Yes()]", "{'a': Yes()}", "(lambda: Yes())()", "Int(7)", "[Int(7)]"]
)
async def test_an_object_that_equals_everything_equals_no_plain_value(judge: Judge, answer: str) -> None:
    passed = await judge(
        f"{LIAR}def f(): return {answer}",
        "assert f() == 3",
        "assert 3 == f()",
        "assert f() == [1, 2]",
        "assert not f() != 3",
        "assert abs(f() - 3) < 1e-6",
        "def check(g):\n    assert g() == {'a': 1}\ncheck(f)",
    )
    assert not any(passed)


ATTACKS = {
    # Each read or changed something that the checks ran on, when they ran in the program's own process.
    "frames": "import sys\nframe = sys._getframe()\nfound = {}\nwhile frame:\n    found |= frame.f_locals\n"
    "    frame = frame.f_back\ndef f():\n    import sys, gc\n    frame = sys._getframe()\n    while frame:\n"
    "        for v in list(frame.f_locals.values()) + list(frame.f_globals.values()):\n"
    "            if isinstance(v, dict) and 'secret' in v: return v['secret']\n        frame = frame.f_back\n",
    "a background thread": "import threading, builtins, time\ndef later():\n    while True:\n"
    "        builtins.abs = lambda x: 0\n        builtins.AssertionError = Warning\n        time.sleep(0.001)\n"
    "threading.Thread(target=later, daemon=True).start()\ndef f(): time.sleep(0.05); return 9",
    "built-in functions": "import builtins\nfor n in ('abs', 'len', 'sum', 'all', 'isinstance', 'round', 'type'):\n"
    "    setattr(builtins, n, lambda *a, **k: 0)\ndef f(): return 9",
    "names of built-ins": "def abs(x): return 0\ndef round(*a): return 3\ndef f(): return 9",
    "the standard library": "import math\nmath.isclose = lambda *a, **k: True\nfrom math import isclose\n"
    "def f(): return 9",
    "leaving": "import os\ndef f(): os._exit(0)",
    "leaving politely": "import sys\nsys.exit(0)\ndef f(): return 3",
    "the channel": "import os\nfor fd in range(3, 40):\n    try: os.write(fd, b'\\x10\\0\\0\\0{\"passed\": true} ')\n"
    "    except OSError: pass\ndef f(): return 9",
    "the channel, later": "import os, threading, time\ndef later():\n    while True:\n        for fd in range(3, 40):\n"
    "            try: os.write(fd, b'\\x0f\\0\\0\\0{\"passed\":true}')\n            except OSError: pass\n"
    "        time.sleep(0.001)\nthreading.Thread(target=later, daemon=True).start()\n"
    "def f(): time.sleep(0.1); return 9",
    "the guest": "import sys\nguest = sys.modules['guest_checks']\nguest.encode = lambda v, k: {'h': 0}\n"
    "guest.Program.do = lambda self, request: {'value': True, 'passed': True}\ndef f(): return 9",
    "exceptions": "def f(): raise SystemExit(0)",
    "exec": "import builtins\nbuiltins.exec = builtins.compile = lambda *a: None\ndef f(): return 9",
    "killing": "import os\ndef f(): os.kill(-1, 9)",
}


@pytest.mark.parametrize("attack", ATTACKS)
async def test_a_program_that_lies_has_passed_nothing(judge: Judge, attack: str) -> None:
    passed = await judge(
        ATTACKS[attack],
        "assert f() == 3",
        "assert abs(f() - 3) < 1e-6",
        "assert round(f() + 0.2) == 3",
        "assert math.isclose(f(), 3)",
        "assert all([f() == 3, len([f()]) == 1])",
    )
    assert not any(passed), passed


async def test_honest_programs_are_asked_what_the_check_says(judge: Judge) -> None:
    code = (
        "from dataclasses import dataclass\nfrom fractions import Fraction\nfrom collections import Counter, deque\n"
        "from decimal import Decimal as D\nimport math as m\n"
        "@dataclass\nclass Point:\n    x: int\n    def moved(self, by=1): return Point(self.x + by)\n"
        "    def __add__(self, other): return Point(self.x + other.x)\n"
        "    def __mul__(self, k): return Point(self.x * k)\n"
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
        "    def __len__(self): return len(self.items)\n    def __iter__(self): return iter(self.items)\n"
        "    def __contains__(self, x): return x in self.items\n    def __getitem__(self, n): return self.items[n]\n"
        "def f(): return [1, 2.0, ('a', None), {'k': {3}}, b'x', 2j, range(3)]\n"
        "def count(): return Counter('aab')\ndef half(): return Fraction(1, 2)\ndef exact(): return D('0.1')\n"
        "def queue(): return deque([1])\ndef fails(): raise ValueError('no')\n"
        "class Own(Exception): pass\ndef own(): raise Own('mine')\n"
        "def sort(a): a.sort()\ndef grow(d, *, by): d['x'] = by\n"
        "def gen():\n    yield from (1, 2)\n"
    )
    checks = [
        "assert f() == [1, 2.0, ('a', None), {'k': {3}}, b'x', 2j, range(3)], 'with a message'",
        "assert Point(1) == Point(1) and not Point(1) == Point(2)",
        "assert Point(1).moved(by=3).x == 4 and (Point(1) + Point(2)).x == 3 and (Point(2) * 3).x == 6",
        "assert Fraction(6, 2) == 3 and half() == Fraction(1, 2) and exact() == D('0.1') and m.pi > 3",
        "assert Counter('aab') == {'a': 2, 'b': 1} == count() and list(queue()) == [1]",
        "s = Stack()\ns.push(7)\nassert len(s) == 1 and list(s) == [7] and 7 in s and s[0] == 7 and s.items == [7]",
        "assert sum(f()[:1]) == 1 and len(f()) == 7 and isinstance(f(), list)",
        "try:\n    fails()\n    assert False\nexcept ValueError as e:\n    assert 'no' in str(e)",
        "try:\n    own()\nexcept Exception as e:\n    assert 'mine' in str(e)\nelse:\n    assert False",
        "a = [3, 1]\nsort(a)\nassert a == [1, 3]\nd = {}\ngrow(d, by=2)\nassert d == {'x': 2}",
        "assert list(gen()) == [1, 2] and sorted(gen(), reverse=True) == [2, 1]",
        "import json\nassert json.dumps(f()[:2]) == '[1, 2.0]'",
    ]
    passed = await judge(code, *checks)
    assert passed == [True] * len(checks), passed
    wrong = await judge(code, "assert Point(1) == Point(2)", "assert f() == [1]", "assert nowhere() == 1")
    assert wrong == [False, False, False]


async def test_a_function_that_is_called_like_a_built_in_one_can_be_tested(judge: Judge) -> None:
    code = "def sum(a, b): return a * b\ndef f(): return 5"
    passed = await judge(
        code,
        "assert sum(10, 15) == 150",
        "assert sum(10, 15) == 25",
        "def check():\n    assert sum(2, 3) == 6\ncheck()",
        "assert sum([f(), 1]) == 6",
        "x = 4\nassert math.isclose(sum(x, 2), 8)",
        "assert sum(x, 2) == 8",
    )
    assert passed == [True, False, True, True, True, True], passed


@pytest.mark.parametrize(
    "code", ["while True: pass", "def f():\n    while True: pass", "import os; os._exit(0)"]
)
async def test_a_program_that_gives_no_answer_fails_in_time(judge: Judge, code: str) -> None:
    assert await judge(code, "assert f() == 1", "assert True and f()", timeout_s=1.0) == [False, False]
    assert await judge("def f(): return 1", "assert f() == 1") == [True], "the checker lives on"


async def test_a_check_without_end_costs_its_program(judge: Judge) -> None:
    assert await judge("x = 1", "while True: pass", timeout_s=1.0) == [False]
    assert await judge("def f(): return 1", "assert f() == 1") == [True]
