"""The demo's version 0: a 17-token tokenizer, a tiny Qwen3 model, and for the calculator a deliberately bad start.

Calculator, two turns: `47+38=` -> the model calls `[47+38]` -> the environment appends `85>` -> the model
answers `85$`. The demonstrations of the supervised warm start are wrong on purpose: in four of five calls, and in
four of five answers, one digit is replaced. So the model learns the format, and to copy each digit more often than
not; about one rollout in six is right. The climb from there is left to reinforcement learning. Addition
(`2+3=` -> `5`) starts from random weights.

    python -m headrace.consumers.trainer.warmstart TASK SEED DIRECTORY
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END = "$"
"""Ends an answer: the tokenizer's end-of-sequence token."""
CALL_END = "]"
"""Ends a call: a stop token of the rollout."""
PAD = "<pad>"
ALPHABET = [PAD, *"0123456789+=[]>", END]

OPERANDS = range(10, 50)
"""Of the calculator: 1600 prompts."""
RIGHT = 0.2
"""Share of demonstrations whose call is right, and share whose answer is."""
STEPS, BATCH, LEARNING_RATE = 250, 64, 5e-3
INITIALIZER_RANGE = 0.1
"""Larger than usual: with 0.02 so small a model takes hundreds of steps to begin to attend."""

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def prepare(
    task: str,
    seed: int,
    directory: Path,
    *,
    report: Callable[[str], None] = lambda line: None,
    head_size: int = 16,
) -> None:
    """Write the model directory of `task` ("calculator" or "addition"): model, tokenizer, both loadable offline.

    The same seed gives the same weights on the same machine. ValueError for another task.
    """
    if task not in ("calculator", "addition"):
        raise ValueError(f"no demo task {task!r}: calculator or addition")
    from transformers.utils.logging import disable_progress_bar

    tokenizer = make_tokenizer()
    model = make_model(seed, head_size)
    if task == "calculator":
        _train(model, seed, report)
    directory.mkdir(parents=True, exist_ok=True)
    disable_progress_bar()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    report(f"{sum(p.numel() for p in model.parameters())} parameters in {directory}")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; `$` is the end of sequence."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(ALPHABET)}))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(seed: int, head_size: int = 16) -> Any:
    """A Qwen3 of about 75,000 parameters with random weights; vLLM on a CPU wants heads of 32 or more."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    end = ALPHABET.index(END)
    config = Qwen3Config(
        vocab_size=len(ALPHABET),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=64 // head_size,
        num_key_value_heads=32 // head_size,
        head_dim=head_size,
        initializer_range=INITIALIZER_RANGE,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=ALPHABET.index(PAD),
    )
    return Qwen3ForCausalLM(config)


def demonstration(rng: random.Random) -> tuple[str, list[bool]]:
    """One noisy episode as text, and per character whether the model writes it."""
    a, b = rng.choice(OPERANDS), rng.choice(OPERANDS)
    call = _noisy(rng, f"{a}+{b}")
    c, d = call.split("+")
    result = str(int(c) + int(d))
    parts = [
        (f"{a}+{b}=", False),
        (f"[{call}{CALL_END}", True),
        (f"{result}>", False),
        (f"{_noisy(rng, result)}{END}", True),
    ]
    return "".join(text for text, _ in parts), [own for text, own in parts for _ in text]


def _noisy(rng: random.Random, text: str) -> str:
    """`text` as it stands with probability RIGHT; otherwise one of its digits is another one."""
    if rng.random() < RIGHT:
        return text
    at = rng.choice([i for i, c in enumerate(text) if c.isdigit()])
    return text[:at] + rng.choice([c for c in "0123456789" if c != text[at]]) + text[at + 1 :]


def _train(model: Any, seed: int, report: Callable[[str], None]) -> None:
    rng = random.Random(seed)
    ids = {c: i for i, c in enumerate(ALPHABET)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    start = time.monotonic()
    for step in range(1, STEPS + 1):
        inputs, targets = _batch(rng, ids)
        logits = model(input_ids=inputs, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        if step % 50 == 0:
            took = time.monotonic() - start
            report(f"warm start: step {step} of {STEPS}, loss {loss.item():.3f}, {took:.1f} s")


def _batch(rng: random.Random, ids: dict[str, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded episodes [B, S], and the same with -100 wherever the model does not write."""
    episodes = [demonstration(rng) for _ in range(BATCH)]
    shape = (BATCH, max(len(text) for text, _ in episodes))
    inputs = np.zeros(shape, dtype=np.int64)
    targets = np.full(shape, -100, dtype=np.int64)
    for row, (text, own) in enumerate(episodes):
        tokens = np.array([ids[c] for c in text])
        inputs[row, : len(tokens)] = tokens
        targets[row, : len(tokens)] = np.where(own, tokens, -100)
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="headrace.consumers.trainer.warmstart", description=__doc__)
    parser.add_argument("task", choices=("calculator", "addition"))
    parser.add_argument("seed", type=int)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--head-size", type=int, choices=(16, 32), default=16)
    args = parser.parse_args()
    torch.set_num_threads(1)
    prepare(
        args.task,
        args.seed,
        args.directory,
        report=lambda line: print(line, flush=True),
        head_size=args.head_size,
    )


if __name__ == "__main__":
    main()
