"""A process with an engine of vLLM, which receives weights: python vllm_engine.py DIRECTORY ADDRESS PROMPTS.

Prints one line of JSON for each time that it generates: before and after it has received the weights.
"""

from __future__ import annotations

import json
import sys

import fzero as fz


class Receiver:
    """Adds a method to vLLM's workers, as the documentation shows."""

    def receive_weights(self, address: str) -> None:
        self.reload_weights(weights_iterator=fz.hf.receive(address, timeout=300))  # type: ignore[attr-defined]


def main(directory: str, address: str, prompts: str) -> None:
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports] - optional

    engine = LLM(
        directory,
        worker_extension_cls="vllm_engine.Receiver",
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
    )
    greedy = SamplingParams(temperature=0, max_tokens=8, logprobs=1, detokenize=False)

    def generate() -> None:
        found = engine.generate([{"prompt_token_ids": x} for x in json.loads(prompts)], greedy, use_tqdm=False)
        outputs = [x.outputs[0] for x in found]
        logs = [[at[t].logprob for at, t in zip(x.logprobs, x.token_ids, strict=True)] for x in outputs]
        print(json.dumps({"tokens": [[*x.token_ids] for x in outputs], "logprobs": logs}), flush=True)

    generate()
    engine.collective_rpc("receive_weights", args=(address,))
    engine.reset_prefix_cache()
    generate()


if __name__ == "__main__":
    main(*sys.argv[1:])
