"""Written as for vLLM: chat, the tokenizer, and a rendered template."""

import sys

from jaxinfer import LLM, SamplingParams

llm = LLM(model=sys.argv[1], trust_remote_code=False, dtype="float32", seed=0, max_num_seqs=2)
conversation = [{"role": "user", "content": "Write one line."}]
outputs = llm.chat(conversation, sampling_params=SamplingParams(max_tokens=6, temperature=0.5), use_tqdm=False)
print(outputs[0].outputs[0].text, outputs[0].outputs[0].finish_reason)

tokenizer = llm.get_tokenizer()
rendered = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
ids = tokenizer.encode(rendered, add_special_tokens=False)
output = llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=3))[0]
print(len(output.prompt_token_ids), output.outputs[0].token_ids, output.finished)
