"""Written as for vLLM: offline batch inference."""

import sys

from jaxinfer import LLM, SamplingParams

prompts = ["Hello, my name is", "The president of the United States is", "The capital of France is"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8, seed=7)
sizes = {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 64}
llm = LLM(model=sys.argv[1], gpu_memory_utilization=0.8, tensor_parallel_size=1, enforce_eager=False, **sizes)
outputs = llm.generate(prompts, sampling_params)
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
