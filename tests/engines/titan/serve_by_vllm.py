"""Let vLLM continue prompts greedily: ``serve_by_vllm.py FOLDER ANSWER``, in vLLM's environment.

Standard input is a JSON object with ``prompts`` (texts) and ``new_tokens``. ``ANSWER`` becomes a
JSON list with a pair for each prompt: its text and the log-probability of each token.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

# vLLM reads these when it is imported; the engine in this process shows its errors
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main(folder: str, answer: Path) -> None:
    from vllm import LLM, SamplingParams

    job = json.load(sys.stdin)
    llm = LLM(folder, dtype="float32", max_model_len=256, max_num_seqs=8, enforce_eager=True)
    greedy = SamplingParams(
        temperature=0,
        max_tokens=job["new_tokens"],
        ignore_eos=True,
        skip_special_tokens=False,
        logprobs=0,
    )
    outputs = llm.generate(job["prompts"], greedy, use_tqdm=False)
    texts = [(output.outputs[0].text, _logprobs(output.outputs[0])) for output in outputs]
    answer.write_text(json.dumps(texts), encoding="utf-8")
    llm.llm_engine.engine_core.shutdown()


def _logprobs(completion: Any) -> list[float]:
    return [
        row[token].logprob
        for token, row in zip(completion.token_ids, completion.logprobs, strict=True)
    ]


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
