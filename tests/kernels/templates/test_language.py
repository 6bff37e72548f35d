# ruff: noqa: E501 - errors stand beside their texts
"""The template language: what it accepts, and errors with place and remedy."""

from __future__ import annotations

import pytest

from ludus.core.errors import DataError
from ludus.kernels.launches import read_launches
from ludus.kernels.templates.expand import expand
from ludus.kernels.templates.expert import expert_kernel, shapes_of
from ludus.kernels.templates.language import Binary, Element, read_kernel
from ludus.tasks.kernels.generated import KINDS, read_generated

MATMUL = "tile 16 for i < out0, j < out1\nv = sum from 0 for k < a1: a[i, k] * b[k, j]\n"
SHAPES = {"a": (30, 20), "b": (20, 10), "out": (30, 10)}


def test_a_kernel_is_read() -> None:
    kernel = read_kernel(MATMUL + "out[i, j] = relu(v - 1.5)")
    ((name, reduction),) = kernel.reductions
    assert (kernel.template, kernel.size, name) == ("tile", 16, "v")
    assert [loop.name for loop in kernel.loops] == ["i", "j"]
    assert (reduction.operator, reduction.start, reduction.loops[0].name) == ("sum", "0", "k")
    assert isinstance(reduction.value, Binary)
    assert isinstance(reduction.value.left, Element)
    assert reduction.value.left.tensor == "a"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1, column 1: a kernel has a line such as `thread 128 for i < out0`"),
        ("thread 64 for i < out0", "line 1, column 1: a kernel has a line such as"),
        ("blok 64 for i < out0\nout[i, 0] = 1", "line 1, column 1: 'blok' is no template (did you mean block"),
        ("block x\nout[0, 0] = 1", "line 1, column 7: the size is a whole number of 6 digits"),
        ("block 64 for i < 99999999\nout[i, 0] = 1", "line 1, column 18: 99999999 is no whole number"),
        ("thread 64 for i < out0 j\nout[i, 0] = 1", "line 1, column 24: 'j' is one too many"),
        ("thread 64 for int < out0\nout[0, 0] = 1", "line 1, column 15: 'int' is no name"),
        ("thread 64 for a0 < out0\nout[0, 0] = 1", "line 1, column 15: 'a0' is there already"),
        ("thread 64 for i < out0, i < out1\nout[i, i] = 1", "line 1, column 25: 'i' is there already"),
        ("thread 64 for i < out0\nv = avg from 0 for k < a1: 1\nout[i, 0] = v", "line 2, column 5: 'avg' is no operator"),
        ("thread 64 for i < out0\nv = sum for k < a1: 1\nout[i, 0] = v", "line 2, column 9: here stands 'from', not 'for'"),
        ("thread 64 for i < out0\nout[i, 0] = a[i, 0", "line 2, column 19: here stands ']', not the end of the line"),
        ("thread 64 for i < out0\nout[i, 0] = a[i]", "line 2, column 13: a has 2 indices, not 1"),
        ("thread 64 for i < out0\nout[i, 0] = c[i, 0]", "line 2, column 13: 'c' is no tensor"),
        ("thread 64 for i < out0\nout[i, 0] = a", "line 2, column 13: 'a' is a tensor: an element of it is a[i, j]"),
        ("thread 64 for i < out0\nout[i, k] = 1", "line 2, column 8: 'k' is not known"),
        ("thread 64 for i < out0\nout[i, 1.5] = 1", "line 2, column 8: 1.5 is no whole number"),
        ("thread 64 for i < out0\nout[i, 0] = geluu(1)", "line 2, column 13: 'geluu' is no function (did you mean gelu"),
        ("thread 64 for i < out0\nout[i, 0] = max(1)", "line 2, column 13: max has 2 arguments, not 1"),
        ("thread 64 for i < out0\nout[i, 0] = 7 % 2", "line 2, column 15: % is for indices and bounds"),
        ("thread 64 for i < out0\nout[i, 0] = pad(1)", "line 2, column 13: pad has one element"),
        ("thread 64 for i < out0\nout[i, 0] = a[i, 0]; return", "line 2, column 20: ';' is no sign of the language"),
        ("thread 64 for i < out0\nout[i, 0] = é", "line 2, column 13: 'é' is no sign of the language"),
        ("thread 64 for i < out0\n" + "v = sum from 0 for k < a1: 1\n" * 9, "line 10, column 1: a kernel has 6 lines"),
        ("thread 64\nout[0, 0] = " + "(" * 99, "line 2, column 33: the expression is nested too deep"),
        ("thread 64\nout[0, 0] = " + "-" * 999 + "1", "line 2, column 32: the expression is nested too deep"),
        ("thread 64\n" + "x" * 3000, "the kernel has 3,010 characters; 2,000 are read at most"),
        ("tile 16 for i < out0\nout[i, 0] = 1", "line 1, column 1: tile has two loops at least"),
        (MATMUL.replace("a[i, k]", "a[j, k]") + "out[i, j] = v", "line 2, column 28: in tile, this factor is the same for every j"),
        (MATMUL.replace("sum", "max") + "out[i, j] = v", "line 2, column 5: tile has one reduction: a sum"),
        (MATMUL + "for k < a1: out[i, k] = v", "line 3, column 5: in tile, the line of out has no loops"),
        ("thread 64 for i < 3\nv = sum from 0 for k < i: 1\nout[v, 0] = v", "line 3, column 5: 'v' is a float"),
    ],
)  # fmt: skip
def test_an_error_has_its_place_and_a_remedy(text: str, message: str) -> None:
    with pytest.raises(DataError) as raised:
        expand(text, SHAPES)
    assert str(raised.value).startswith(message)


def test_numbers_sizes_and_block_are_arguments_so_that_kernels_share_code() -> None:
    texts = [
        ("thread 64 for i < out0, j < out1\nout[i, j] = 0.7 * a[i, j]", (5, 6)),
        ("thread 256 for i < out0, j < out1\nout[i, j] = 2.9 * a[i, j]", (50, 60)),
    ]
    sources = [expand(text, {"a": shape, "out": shape}) for text, shape in texts]
    codes = [source.partition("// launch")[0] for source in sources]
    assert codes[0] == codes[1]
    assert sources[0] != sources[1]


def test_a_longer_name_of_a_tensor_cannot_be_a_word_of_c() -> None:
    shapes = {"float": (4,), "out": (4,)}
    source = expand("thread 64 for i < out0\nout[i] = float[i]", shapes)
    assert "const float *__restrict__ float_" in source
    (launch,) = read_launches(source, shapes).launches
    assert launch.grid == (1, 1, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_expert_knows_every_generated_problem(kind: str) -> None:
    texts = set()
    for task in read_generated(60, kinds=[kind], first_seed=500):  # type: ignore[list-item]
        for seed in range(3):
            text = expert_kernel(task, seed)
            texts.add(text)
            shapes = shapes_of(task)
            assert read_launches(expand(text, shapes), shapes).launches
    assert len(texts) > 5
    with pytest.raises(DataError, match="the expert knows the problems of generated_kernels only"):
        expert_kernel(task.model_copy(update={"data": {"reference": "x"}}))
