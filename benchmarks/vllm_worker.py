"""vLLM in its own process, for `vllm_sampler.py`; runs in vLLM's environment.

Reads one line of JSON per run: {"prompts": [[id]], "max_tokens": n, "temperature": t,
"logprobs": bool}; answers with a line: {"processor_s", "wall_s", "tokens"}. The first line has the
engine's arguments. It imports only vLLM, and waits in `readline` while other programs are measured.
"""

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    from vllm import LLM, SamplingParams

    llm = LLM(**json.loads(sys.stdin.readline()))

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    say({"ready": True})
    for line in sys.stdin:
        run = json.loads(line)
        prompts = [{"prompt_token_ids": ids} for ids in run["prompts"]]
        params = SamplingParams(
            max_tokens=run["max_tokens"],
            temperature=run["temperature"],
            logprobs=0 if run["logprobs"] else None,  # 0: that of the token itself
            ignore_eos=True,
            detokenize=False,
        )
        wall, used = time.perf_counter(), time.process_time()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        used, wall = time.process_time() - used, time.perf_counter() - wall
        found = [output.outputs[0] for output in outputs]
        tokens = [list(one.token_ids) for one in found]
        if run["logprobs"]:
            assert all(len(one.logprobs) == run["max_tokens"] for one in found)
        say({"processor_s": used, "wall_s": wall, "tokens": tokens})


if __name__ == "__main__":
    main()
