"""The demo's version 0: loadable offline, one token a character, and wrong as often as it says."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headrace.consumers.trainer import warmstart


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(warmstart, "STEPS", 6)


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        warmstart.prepare("calculator", seed, tmp_path / name)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert any(not torch.equal(a[n], c[n]) for n in a)


def test_the_directory_loads_offline_and_a_token_is_a_character(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    warmstart.prepare("addition", 0, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    text = "47+38=[47+38]85>85$"
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text) and tokenizer.decode(ids) == text
    assert len(tokenizer) == model.config.vocab_size == 17
    assert tokenizer.eos_token == "$" and model.config.eos_token_id == tokenizer.eos_token_id
    assert sum(p.numel() for p in model.parameters()) < 80_000


def test_demonstrations_keep_the_format_and_are_right_as_often_as_stated() -> None:
    rng = random.Random(0)
    form = re.compile(r"(\d+)\+(\d+)=\[(\d+)\+(\d+)\](\d+)>(\d+)\$")
    calls = answers = 0
    for _ in range(4000):
        text, own = warmstart.demonstration(rng)
        match = form.fullmatch(text)
        assert match is not None and len(own) == len(text)
        a, b, c, d, result, answer = match.groups()
        assert int(c) + int(d) == int(result)
        assert "".join(ch for ch, mine in zip(text, own, strict=True) if mine) == f"[{c}+{d}]{answer}$"
        calls += (a, b) == (c, d)
        answers += result == answer
    assert calls / 4000 == pytest.approx(warmstart.RIGHT, abs=0.03)
    assert answers / 4000 == pytest.approx(warmstart.RIGHT, abs=0.03)


def test_an_unknown_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no demo task"):
        warmstart.prepare("chess", 0, tmp_path)
