"""Rows in the format of KernelBench and of the AI CUDA Engineer Archive; the problems are ours."""

from __future__ import annotations

from typing import Any

HEAD = "import torch\nimport torch.nn as nn\n\n"
TAIL = """

def get_inputs():
    return [torch.rand(8, 16)]


def get_init_inputs():
    return []
"""


def module(body: str, init: str = "pass", before: str = "") -> str:
    """A reference in KernelBench's form."""
    return (
        f"{HEAD}{before}class Model(nn.Module):\n    def __init__(self):\n        "
        f"super().__init__()\n        {init}\n\n    def forward(self, x):\n        {body}\n{TAIL}"
    )


DOUBLE = module("return x * 2.0")
ROW_SUM = module("return torch.sum(torch.abs(x), dim=1)")
PRODUCT = module("return torch.matmul(x, x.T)")
FUSED = module("return torch.relu(self.scale(x)) + 1.0", init="self.scale = nn.Linear(16, 4)")
STACK = module(
    "for layer in self.layers:\n            x = layer(x)\n        return x",
    init="self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])",
)
FUNCTIONAL = (
    HEAD
    + "def module_fn(x, weight):\n    return torch.relu(x @ weight)\n\n"
    + "class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    + "        self.weight = nn.Parameter(torch.ones(16, 4))\n\n"
    + "    def forward(self, x, fn=module_fn):\n        return fn(x, self.weight)\n"
    + TAIL
)

KERNEL = (
    "#include <torch/extension.h>\n\n__global__ void double_it(const float* x, float* y, int n) {\n"
    "  int i = blockIdx.x * blockDim.x + threadIdx.x;\n  if (i < n) y[i] = 2.0f * x[i];\n}\n"
)


def problem(number: int = 1, code: str = DOUBLE, level: Any = 1, **more: Any) -> dict[str, Any]:
    """A row of KernelBench."""
    return {"code": code, "level": level, "name": f"{number}_ours", "problem_id": number} | more


def kernel(task: int = 1, name: str = "double_base", **more: Any) -> dict[str, Any]:
    """A row of the archive, with all of its columns."""
    return {
        "Op_Name": f"{task}_ours",
        "Level_ID": 1,
        "Task_ID": task,
        "Kernel_Name": name,
        "CUDA_Runtime": 0.011,
        "PyTorch_Native_Runtime": 0.022,
        "PyTorch_Compile_Runtime": 0.033,
        "CUDA_Speedup_Native": 2.0,
        "CUDA_Speedup_Compile": 3.0,
        "CUDA_Code": KERNEL,
        "PyTorch_Code_Module": DOUBLE,
        "PyTorch_Code_Functional": FUNCTIONAL,
        "Correct": True,
        "Max_Diff": 1e-6,
        "Error": None,
        "NCU_Profile": "{}",
        "Torch_Profile": "{}",
        "Clang_Tidy": "{}",
    } | more
