"""One step is a function of weights and rows: same rows, same bits; bf16 as torch rounds; flops as the formula says."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.consumers.trainer import model as model_module
from headrace.consumers.trainer.batch import Row, collate, make_row
from headrace.consumers.trainer.flops import matmul_parameters, peak_flops, training_flops
from headrace.consumers.trainer.loss import token_statistics
from headrace.consumers.trainer.master import Master, bf16_bits, learning_rate
from headrace.consumers.trainer.model import LiveModel, load_model
from headrace.consumers.trainer.step import Learner
from headrace.schemas.config import TrainerConfig
from headrace.schemas.errors import ConfigError
from headrace.schemas.score import Ref
from headrace.schemas.weight_hash import set_hash

sys.path.insert(0, str(Path(__file__).parent))
from trainer_world import make_sample, make_trajectory, tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("model"))


def learner(directory: Path, **settings: Any) -> Learner:
    config = TrainerConfig(**{"lr": 1e-3, "warmup_steps": 2, "micro_batch_tokens": 64} | settings)
    return Learner(load_model(directory, dtype=torch.float32, device=CPU), config)


def rows(first: int, count: int = 12) -> list[Row]:
    made = []
    for i in range(first, first + count):
        rng = np.random.default_rng(i)
        trajectory = make_trajectory(rng, f"t{i}")
        made.append(make_row(trajectory, make_sample(trajectory, Ref(0, i), advantage=float(rng.normal()))))
    return made


def test_the_same_rows_give_the_same_bits_also_across_a_reload(directory: Path) -> None:
    straight = learner(directory)
    hashes = []
    for i in range(6):
        straight.step(rows(i * 12))
        hashes.append(set_hash(straight.bits()))
    first = learner(directory)
    for i in range(3):
        first.step(rows(i * 12))
    saved = {name: tensor.clone() for name, tensor in first.tensors().items()}
    second = learner(directory)
    second.load(saved, 3)
    assert set_hash(second.bits()) == hashes[2]
    for i in range(3, 6):
        second.step(rows(i * 12))
        assert set_hash(second.bits()) == hashes[i]
    assert len(set(hashes)) == 6 and second.version == 6


def test_bits_are_torchs_rounding_to_nearest_even() -> None:
    patterns = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(0))
    values = patterns.to(torch.int32).view(torch.float32)
    values = values[~values.isnan()]
    bits = values.view(torch.int32).numpy().view(np.uint32).astype(np.uint64)
    expected = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    assert np.array_equal(bf16_bits(values), expected)
    assert bf16_bits(torch.tensor([1.0 + 2**-8])).tolist() == [0x3F80]  # a tie, to even
    assert bf16_bits(torch.zeros(2, 3)).shape == (2, 3)


def test_the_live_weights_are_the_published_bits(directory: Path) -> None:
    made = learner(directory)
    made.step(rows(0))
    for name, bits in made.bits().items():
        assert np.array_equal(bf16_bits(made.live.parameters[name]), bits)
        assert torch.equal(made.live.parameters[name].to(torch.bfloat16).float(), made.live.parameters[name])
    assert any(not torch.equal(w, made.live.parameters[n]) for n, w in made.master.weights.items())


def test_the_gradient_equals_that_of_one_sequence_at_a_time(directory: Path) -> None:
    given = rows(0, 10)
    made = learner(directory, micro_batch_tokens=40)
    plain = load_model(directory, dtype=torch.float32, device=CPU)
    with torch.no_grad():
        for p in plain.parameters():
            p.copy_(p.to(torch.bfloat16))
    total = torch.zeros(())
    count = sum(r.trained_tokens for r in given)
    for row in given:
        ids = torch.from_numpy(row.token_ids.astype(np.int64))
        logits = plain(input_ids=ids[None], use_cache=False).logits[0]
        logprobs, _ = token_statistics(logits[:-1], ids[1:])
        mask = torch.from_numpy(row.loss_mask[1:].copy())
        weight = (logprobs.detach() - torch.from_numpy(row.behaviour[1:].copy())).exp().clamp(max=2.0)
        terms = -weight * torch.from_numpy(row.advantages[1:].copy()) * logprobs
        total = total + terms[mask].sum() / count
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    result = made.step(given)
    assert result.metrics["loss"] == pytest.approx(total.item(), rel=1e-4)
    assert result.metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_a_gradient_that_is_not_finite_changes_no_weight(directory: Path) -> None:
    made = learner(directory)
    made.step(rows(0))
    before, moments = set_hash(made.bits()), made.tensors()["exp_avg/model.norm.weight"].clone()
    broken = [dataclasses.replace(r, advantages=np.full_like(r.advantages, np.inf)) for r in rows(12)]
    result = made.step(broken)
    assert not result.finite and made.version == 2
    assert set_hash(made.bits()) == before
    assert torch.equal(made.tensors()["exp_avg/model.norm.weight"], moments)
    assert made.step(rows(24)).finite and set_hash(made.bits()) != before


def test_bfloat16_arithmetic_keeps_an_fp32_master(directory: Path) -> None:
    made = learner(directory, dtype="bfloat16")
    made.step(rows(0))
    assert all(p.dtype == torch.bfloat16 for p in made.live.parameters.values())
    assert all(w.dtype == torch.float32 for w in made.master.weights.values())
    assert any(not torch.equal(w.to(torch.bfloat16).float(), w) for w in made.master.weights.values())


def test_adopting_bits_keeps_the_digits_below_bf16_where_they_agree(directory: Path) -> None:
    made = learner(directory)
    made.step(rows(0))
    before = {n: w.detach().clone() for n, w in made.master.weights.items()}
    bits = {n: b.copy() for n, b in made.bits().items()}
    assert made.adopt(bits, 1) == 0
    name = next(iter(bits))
    bits[name].reshape(-1)[3] ^= 1
    assert made.adopt(bits, 7) == 1 and made.version == 7
    assert np.array_equal(made.bits()[name], bits[name])
    different = (made.master.weights[name] != before[name]).flatten()
    assert different.nonzero().flatten().tolist() == [3]


def test_recomputed_activations_give_the_same_step_and_no_dropout(directory: Path) -> None:
    def with_dropout(**settings: Any) -> Learner:
        made = load_model(directory, dtype=torch.float32, device=CPU)
        for module in made.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.5
        return Learner(made, TrainerConfig(lr=1e-3, warmup_steps=2, micro_batch_tokens=64, **settings))

    expected = learner(directory).step(rows(0)).metrics
    assert with_dropout().step(rows(0)).metrics == pytest.approx(expected, rel=1e-5)
    assert with_dropout(gradient_checkpointing=True).step(rows(0)).metrics == pytest.approx(
        expected, rel=1e-5
    )


def test_large_vocabularies_are_done_in_chunks_with_the_same_result(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = learner(directory), learner(directory)
    result = whole.step(rows(0))
    monkeypatch.setattr(model_module, "CHUNK_LOGITS", 17 * 5)
    assert parts.step(rows(0)).metrics == pytest.approx(result.metrics, rel=1e-5)


def test_a_model_with_logits_of_its_own_is_run_whole(directory: Path) -> None:
    class Scaled(torch.nn.Module):
        """A model that scales its logits after the head."""

        base_model_prefix = "model"

        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner, self.config = inner, inner.config

        @property
        def model(self) -> Any:
            return self.inner.model

        def get_output_embeddings(self) -> Any:
            return self.inner.get_output_embeddings()

        def forward(self, **kwargs: Any) -> Any:
            out = self.inner(**kwargs)
            out.logits = out.logits * 0.5
            return out

    inner = load_model(directory, dtype=torch.float32, device=CPU)
    batch = collate(rows(0, 3))
    scaled, _ = LiveModel(Scaled(inner)).evaluate(batch)
    logits = inner(input_ids=batch.input_ids, use_cache=False).logits.flatten(0, 1)[batch.predictors] * 0.5
    assert torch.allclose(scaled, token_statistics(logits, batch.targets)[0], atol=1e-6)


def test_logits_are_divided_by_the_sampling_temperature(directory: Path) -> None:
    made = learner(directory)
    hot = [dataclasses.replace(r, temperature=2.0) for r in rows(0, 3)]
    logprobs, _ = made.live.evaluate(collate(hot))
    batch = collate(rows(0, 3))
    logits = made.live.model(input_ids=batch.input_ids, use_cache=False).logits.flatten(0, 1)[
        batch.predictors
    ]
    assert torch.allclose(logprobs, token_statistics(logits / 2.0, batch.targets)[0], atol=1e-6)


def test_the_learning_rate_warms_up_by_version() -> None:
    config = TrainerConfig(lr=1.0, warmup_steps=4)
    assert [learning_rate(config, v) for v in (1, 2, 4, 9)] == [0.25, 0.5, 1.0, 1.0]


def test_a_master_refuses_another_models_checkpoint(directory: Path) -> None:
    made = learner(directory)
    tensors = dict(made.tensors())
    name = next(iter(tensors))
    with pytest.raises(ValueError, match="the model has"):
        Master(made.master.weights, TrainerConfig()).load(tensors | {name: torch.zeros(1)})


def test_flops_follow_the_formula(directory: Path) -> None:
    made = load_model(directory, dtype=torch.float32, device=CPU)
    parameters = sum(p.numel() for p in made.parameters())
    assert matmul_parameters(made) == parameters  # tied: the head counts once, the look-up not at all
    assert training_flops(made, [3, 5]) == 6 * parameters * 8 + 6 * 1 * 2 * 16 * (9 + 25)
    assert peak_flops(CPU, torch.float32, repeats=1) > 1e8


def test_a_folder_that_is_no_model_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_model(tmp_path, dtype=torch.float32, device=CPU)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(tmp_path, dtype=torch.float32, device=CPU)
