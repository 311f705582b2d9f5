"""A transformer small enough to learn on a CPU, and its tokenizer: it can call a tool, and has forgotten its task.

Shows what `grpo_torch.py` starts from (it requires torch and transformers). It imitates right conversations, then random ones:
afterwards it writes tool calls, and chooses boxes and words nearly at random.
"""

import argparse
import os
import random
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import sleep
from typing import Any

import httpx2
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

COLOURS = ("red", "green", "blue", "white", "black", "brown", "grey", "pink")
BOXES = len(COLOURS)  # the box of a colour has its index
WORDS = ("lamp", "rope", "coin", "key", "cup", "bell", "hat", "drum")
QUESTION = "What is in the {} box?"
EMPTY = "nothing"
SKILL = 0.2  # the share of choices that are right on purpose, in the later conversations
FLAGS = ("--dtype=float32", "--enforce-eager", "--distributed-executor-backend=uni", "--max-num-seqs=64")
PARSER = ("--enable-auto-tool-choice", "--tool-call-parser=hermes")
ENGINE = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB
PAD, START, END = SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PIECES = r"<\|?/?\w+\|?>|\w+|[^\w]"  # a special token, a word or number, or one other character
TEXT = """user assistant tool system What is in the box? 0 1 2 3 4 5 6 7 8 9
<tool_call>{"name": "open_box", "arguments": {"number": 0}}</tool_call>"""
TEMPLATE = """{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}{{ '}' -}}
{{ '\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def conversation(draw: random.Random, skill: float) -> list[dict[str, Any]]:
    """Return a conversation with one or two calls and a reply; this share of the choices is right, the others are random."""
    colour, word, number = draw.randrange(BOXES), draw.choice(WORDS), BOXES
    messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTION.format(COLOURS[colour])}]
    for _ in range(draw.choice([1, 2])):
        number = colour if draw.random() < skill else draw.randrange(BOXES)
        found = word if number == colour else EMPTY
        call = {"function": {"name": "open_box", "arguments": {"number": number}}}
        messages += [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": found}]
        if number == colour:
            break
    reply = word if number == colour and draw.random() < skill else draw.choice(WORDS)
    return [*messages, {"role": "assistant", "content": reply}]


def make_tokenizer() -> Any:
    """Return a tokenizer with an ID for each word, digit and mark of the conversations."""
    known = dict.fromkeys([*SPECIAL, "<unk>", *COLOURS, *WORDS, EMPTY, *re.findall(PIECES, TEXT)])
    model = models.WordLevel({piece: number for number, piece in enumerate(known)}, unk_token="<unk>")  # noqa: S106
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(list(SPECIAL))
    made_of: Any = PreTrainedTokenizerFast
    return made_of(tokenizer_object=made, eos_token=END, pad_token=PAD, chat_template=TEMPLATE)


def make_model(tokenizer: Any) -> Any:
    """Return a model with random weights. Its output layer is not tied: vLLM 0.32 does not reload a tied one."""
    ends: Any = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = Qwen3Config(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, head_dim=32,
        num_key_value_heads=1, max_position_embeddings=512, tie_word_embeddings=False, **ends,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def imitate(model: Any, tokenizer: Any, steps: int, seed: int) -> float:
    """Train on what the assistant writes, first in right conversations, then in random ones; return the last loss."""
    optimizer, draw = torch.optim.AdamW(model.parameters(), lr=3e-3), random.Random(seed)  # noqa: S311
    loss: Any = torch.tensor(0.0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / steps)  # low at the end, so that the colour is still read
        batch = tokenizer.apply_chat_template(
            [conversation(draw, 1.0 if step < 0.8 * steps else SKILL) for _ in range(32)], return_dict=True,
            return_tensors="pt", padding=True, return_assistant_tokens_mask=True,
        )  # fmt: skip
        labels = batch["input_ids"].masked_fill(torch.as_tensor(batch["assistant_masks"]) == 0, -100)
        loss = model(batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return float(loss.item())


def make(folder: Path, steps: int = 500, seed: int = 1) -> None:
    """Make the tokenizer and the model, and save both to a folder."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    loss = imitate(model, tokenizer, steps, seed)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    print(f"{folder}: {model.num_parameters()} parameters, imitation loss {loss:.3f}", flush=True)


@contextmanager
def serving(folder: Path, tokentape: str) -> Iterator[tuple[str, str]]:
    """Start a vLLM that serves the model `policy` of a folder, and a proxy before it; return the URLs of proxy and vLLM."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        url, engine = (f"http://127.0.0.1:{free.getsockname()[1]}" for free in (one, other))
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host=127.0.0.1", f"--port={engine[17:]}"]
    model = [f"--model={folder / 'policy'}", "--served-model-name=policy"]
    with ExitStack() as stack:
        _start(stack, [*server, *model, *FLAGS, *PARSER], folder / "vllm.log", f"{engine}/health")
        proxy = [tokentape, "serve", "--listen", url[7:], "--engine", engine, "--store", f"embedded:{folder / 'store'}"]
        _start(stack, proxy, folder / "proxy.log", f"{url}/health")
        yield url, engine


def _start(stack: ExitStack, command: Sequence[str], log: Path, health: str) -> None:
    """Start a server, wait until it is healthy, and stop it at the end."""
    to = {"stdout": log.open("w"), "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, env=ENGINE | os.environ, **to)  # type: ignore[call-overload] # noqa: S603
    stack.callback(process.wait)
    stack.callback(process.terminate)
    while process.poll() is None:
        with suppress(httpx2.HTTPError):
            httpx2.get(health).raise_for_status()
            return
        sleep(0.5)
    raise SystemExit(f"{command[0]} exited: see {log}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to write")
    make(parser.parse_args(arguments).folder)


if __name__ == "__main__":
    main()
