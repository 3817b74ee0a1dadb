"""`headrace bench pause` on a model that is small: its figures are there, and they are of updates that took place."""

import json

from headrace.deploy.bench.pause import PauseLoad, measure
from headrace.deploy.bench.random_model import read_bits


def test_all_figures_of_the_embedded_engine_are_there(tmp_path):
    load = PauseLoad(hidden=192, layers=2, vocab=300, rounds=2, requests=2)
    said = []
    found = measure("transformers", tmp_path, load, said.append)
    assert found["params"] == sum(b.size for b in read_bits(tmp_path / "model").values())
    for name in ("copy_ms", "apply_ms", "pause_ms", "load_ms", "reload_ms", "full_pause_ms", "busy_pause_ms"):
        assert found[f"transformers_{name}"] > 0
    for name in ("apply_over_copy", "pause_over_load", "pause_over_reload", "pause_over_full_update"):
        assert found[f"transformers_{name}"] > 0
    assert found["transformers_pause_ms"] >= found["transformers_apply_ms"]
    assert json.dumps(found) and said


def test_the_scripted_engine_is_measured_too(tmp_path):
    found = measure(
        "scripted", tmp_path, PauseLoad(hidden=192, layers=1, vocab=300, rounds=1), lambda _: None
    )
    assert found["scripted_apply_over_copy"] > 0 and "scripted_pause_over_load" not in found
