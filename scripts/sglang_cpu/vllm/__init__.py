"""Stand-in for vLLM beside SGLang on a CPU; `make sglang` puts it into .venv-sglang.

On a CPU without AMX, SGLang's modules end by importing layers from vLLM in the place of their own,
which compute with torch there. These modules hand SGLang its own layers back.
"""
