"""Written as for vLLM: several answers, log-probabilities, stops, defaults of the model."""

import sys

from jaxinfer import LLM, SamplingParams

llm = LLM(model=sys.argv[1], max_num_seqs=4, enable_prefix_caching=True)
params = SamplingParams(n=2, temperature=1.0, logprobs=2, prompt_logprobs=1, stop=["\n"], max_tokens=5, ignore_eos=True)
(result,) = llm.generate("abc", params)
for completion in result.outputs:
    print(completion.index, completion.cumulative_logprob, completion.stop_reason)
    for token_id, logprobs in zip(completion.token_ids, completion.logprobs, strict=True):
        print(token_id, logprobs[token_id].logprob, logprobs[token_id].rank, logprobs[token_id].decoded_token)
print(result.prompt_logprobs[0], len(result.prompt_logprobs), result.num_cached_tokens)

defaults = llm.get_default_sampling_params()
defaults.max_tokens = 4
defaults_output = llm.generate(["x", "y"], defaults, use_tqdm=False)
print([output.request_id for output in defaults_output])
llm.reset_prefix_cache()
