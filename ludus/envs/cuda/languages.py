"""Languages that a kernel may be written in; each gives CUDA C++ with launch lines.

    language = language_named("cuda")
    source = language.expand(text, problem)      raises SourceError, told to the author

A language is a class with the methods of `Language`, and a row in LANGUAGES.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from ludus.core.errors import LudusError
from ludus.core.modules import load_module
from ludus.core.types import Task
from ludus.kernels.verify.problem import Interface

LanguageName = Literal["cuda", "templates"]

LANGUAGES: dict[str, str] = {
    "cuda": "ludus.envs.cuda.languages:CudaSource",
    "templates": "ludus.envs.cuda.templates:Templates",
}
"""`module:class` of each language."""


class SourceError(LudusError):
    """A text of the author that is no kernel; the message tells the author what is wrong."""


class Language(Protocol):
    """A language of kernels."""

    label: str
    """Label of the code block that the expert writes; empty: it writes the kernel bare."""

    fences: Sequence[str]
    """Labels of code blocks that hold a kernel; an empty one is a block without a label."""

    needs: str
    """A word that every kernel has: a message without a code block is a kernel if it has the word,
    else it is prose. Empty: every message without a code block is a kernel."""

    tables: bool
    """True if a kernel can hold a table of outputs that were learnt by heart: each kernel has
    inputs of its own. False: the kernels of a turn of a task share inputs, and a run of the
    reference."""

    def opening(self, task: Task, interface: Interface, guide: bool) -> str:
        """The text that opens an episode; with `guide` it tells how to write a kernel."""

    def expand(self, text: str, interface: Interface) -> str:
        """The CUDA C++ of a kernel, with its launch lines. Deterministic.

        Errors: SourceError with a message for the author.
        """

    def expert(self, task: Task) -> Sequence[str]:
        """Right kernels of a task in this language, a plain one first, better ones after it; empty:
        the task has no expert."""


class CudaSource:
    """CUDA C++ as it is: device code with launch lines."""

    label = "cuda"
    fences: Sequence[str] = ("", "cuda", "cu", "c", "cpp", "c++")
    needs = "__global__"
    tables = True

    def opening(self, task: Task, interface: Interface, guide: bool) -> str:
        lines = [
            "Write a CUDA kernel that computes the same as this reference.",
            f"```python\n{task.data['reference'].strip()}\n```",
            f"The kernel is given {given(interface)}.",
        ]
        return "\n\n".join([*lines, CUDA_GUIDE] if guide else lines)

    def expand(self, text: str, interface: Interface) -> str:
        return text

    def expert(self, task: Task) -> Sequence[str]:
        from ludus.kernels.expert import WAYS, kernels_for

        return tuple(kernels_for(task)) if task.data.get("kind") in WAYS else ()


def given(interface: Interface) -> str:
    """The arguments of a kernel, in words: `a: float32 [8, 4]; out: float32 [8]`."""
    buffers = [
        f"{name}: {interface.dtypes[name]} {list(shape)}"
        for name, shape in interface.shapes.items()
    ]
    return "; ".join([*buffers, *(f"{name} = {v:g}" for name, v in interface.numbers.items())])


CUDA_GUIDE = """Write device code only: the launches stand in comments, which are read in order:
// launch: kernel<<<(n + 255) / 256, 256>>>(a, out, n)
Grid and block are numbers or tuples such as (16, 16); a third entry is bytes of shared memory. \
Arguments are inputs by name, out, and numbers made of n (the elements of out), a.shape[0], \
+ - * / % min max. A buffer of your own: // scratch: tmp float[1024]"""


def language_named(name: str) -> Language:
    """The language of a name. Errors: KeyError for an unknown one."""
    module, _, attribute = LANGUAGES[name].partition(":")
    made: Language = getattr(load_module(module), attribute)()
    return made
