"""Programs that try to pass assertions without solving the task; and honest ones of every kind."""

import pytest
import pytest_asyncio
from judged import said

from ludus.core.errors import Unscorable
from ludus.core.types import Spec, Task
from ludus.judges import JUDGES

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEY = "r'[0-9a-f]{32}'"
CLAIM = f"""
import os, re
def claim(text):
    for key in set(re.findall({KEY}, text)):
        os.write(1, f"\\n{{key}}null\\n".encode())
        for fd in range(3, 20):
            try:
                os.write(fd, f"\\n{{key}}null\\n".encode())
            except OSError:
                pass
    os._exit(0)
"""
CHEATS = {
    "exit": "raise SystemExit(0)",
    "exit in the call": "import sys\ndef add(a, b): sys.exit(0)",
    "hard exit": "import os\ndef add(a, b): os._exit(0)",
    "equal to all": "class A:\n    def __eq__(self, other): return True\ndef add(a, b): return A()",
    "number equal to all": "class A(int):\n    def __eq__(self, other): return True\n"
    "    __hash__ = int.__hash__\ndef add(a, b): return A(0)",
    "list equal to all": "class A(list):\n    def __eq__(self, other): return True\n"
    "def add(a, b): return A()",
    "class equal to all": "class M(type):\n    def __eq__(self, other): return True\n"
    "class A(metaclass=M): pass\ndef add(a, b): return A",
    "other check": "def check(function): pass\ndef add(a, b): return 0",
    "other builtins": "import builtins\nbuiltins.AssertionError = SystemExit\n"
    "builtins.print = lambda *a, **k: None\ndef add(a, b): return 0",
    "other functions": "import json\njson.dumps = lambda value: 'null'\ndef add(a, b): return 0",
    "own source": CLAIM + "claim(open('main.py').read())",
    "stdin": CLAIM + "os.lseek(0, 0, 0)\nclaim(os.read(0, 99999).decode())",
    "stdin of the call": CLAIM + "def add(a, b):\n    claim(os.read(0, 99999).decode())",
    "stdin of the parent": CLAIM + "def add(a, b):\n    "
    "claim(open(f'/proc/{os.getppid()}/fd/0').read())",
    "stdout of the parent": "import os\ndef add(a, b):\n"
    "    os.write(os.open(f'/proc/{os.getppid()}/fd/1', os.O_WRONLY), b'null')\n    os._exit(0)",
    "memory of the parent": CLAIM + "def add(a, b):\n"
    "    maps = open(f'/proc/{os.getppid()}/maps').read().splitlines()\n"
    "    memory = open(f'/proc/{os.getppid()}/mem', 'rb')\n    found = b''\n"
    "    for line in maps:\n        if ' rw' in line:\n"
    "            low, high = (int(n, 16) for n in line.split()[0].split('-'))\n"
    "            memory.seek(low)\n            found += memory.read(high - low)\n"
    "    claim(found.decode('latin1'))",
    "frames": CLAIM + "import sys\ndef add(a, b):\n    frame, text = sys._getframe(), ''\n"
    "    while frame is not None:\n"
    "        text += repr(frame.f_locals) + repr(frame.f_globals) + repr(frame.f_code.co_consts)\n"
    "        frame = frame.f_back\n    claim(text)",
    "objects": CLAIM + "import gc\ndef add(a, b): claim(repr(gc.get_objects()))",
    "module in the folder": "import pathlib\nfor name in ('math', 'cmath', 'random', 'string'):\n"
    "    pathlib.Path(name + '.py').write_text('import os; os._exit(0)')\ndef add(a, b): return 0",
    "end of the parent": "import os, signal\ndef add(a, b): os.kill(os.getppid(), signal.SIGKILL)",
    "own answer": "import os\nfor fd in range(3, 20):\n    try:\n"
    "        os.write(fd, (3).to_bytes(8, 'little') + b'{}1')\n    except OSError:\n        pass",
}  # fmt: skip
ASSERTION = {"test_list": ["import cmath\nassert add(1, 2) == 3"]}
CHECK = {
    "prompt": 'def add(a, b):\n    """Add."""\n',
    "entry_point": "add",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def judge(layers):
    """One judge for all programs: a cheat must not help the next program either."""
    args = {"run_s": 5, "sandbox": {"name": "jail", "args": {"packages": []}}}
    made = JUDGES.build(Spec(name="code", args=args))
    yield made
    await made.close()


async def judged(judge, code, data):
    return await judge(Task(id="q", data=data), said(f"```python\n{code}\n```"))


@pytest.mark.parametrize("name", CHEATS)
async def test_a_cheat_fails(judge, name):
    for data in (ASSERTION, CHECK):
        score = await judged(judge, CHEATS[name], data)
        assert (score.value, score.parts["found"]) == (0, 1), score.explanation


PAIR = (
    "class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\n    def sum(self): return 7"
)
HONEST = {
    "tuple": ("def f(x): return (x, [x], {x: None})", "f(1) == (1, [1], {1: None})"),
    "set": ("def f(x): return {x, (x, x)}, frozenset()", "f(1) == ({1, (1, 1)}, frozenset())"),
    "counter": ("from collections import Counter\nf = Counter", "f('aab') == {'a': 2, 'b': 1}"),
    "named tuple": ("from collections import namedtuple\nf = namedtuple('f', 'x')", "f(1) == (1,)"),
    "numbers": ("def f(x): return 10 ** 5000 + x, 1j, float('inf')",
                "f(1) == (10 ** 5000 + 1, 1j, math.inf)"),
    "bytes": ("def f(x): return x[::-1]", "f(b'\\xff\\x00') == b'\\x00\\xff'"),
    "generator": ("def f(x):\n    yield x\n    yield x", "list(f(1)) == [1, 1]"),
    "object": (f"{PAIR}\ndef f(pairs): return pairs[0].a + pairs[1].b",
               "f([Pair(1, 2), Pair(3, 4)]) == 5"),
    "attribute": (PAIR, "(Pair(5, 6).a, Pair(5, 6).sum()) == (5, 7)"),
    "error": ("def f(x): return 1 / x",
              "isinstance(caught(f), ZeroDivisionError)"),
    "print": ("def f(x): print('x' * 9999); return x", "f(1) == 1"),
    "main": ("if __name__ == '__main__':\n    def f(x): return x", "f(1) == 1"),
    "name of math": ("def gcd(a, b): return 'mine'", "gcd(1, 2) == 'mine'"),
    "setup": (f"{PAIR}\ndef f(pair): return pair.a", "f(pair) == 9"),
}  # fmt: skip
SETUP = """
def caught(function):
    try:
        function(0)
    except Exception as error:
        return error
"""


@pytest.mark.parametrize("name", HONEST)
async def test_an_honest_program_passes(judge, name):
    code, claim = HONEST[name]
    setup = "pair = Pair(1, 2)\npair.a = 9" if name == "setup" else SETUP
    data = {"test_list": [f"assert {claim}"], "test_setup_code": setup}
    score = await judged(judge, code, data)
    assert score.value == 1, score.explanation


async def test_an_assertion_that_needs_the_programs_process_is_no_score(judge):
    data = {"test_list": ["assert f(lambda x: x) == 1"]}
    with pytest.raises(Unscorable, match="an argument is a function, not plain data"):
        await judged(judge, "def f(g): return g(1)", data)
