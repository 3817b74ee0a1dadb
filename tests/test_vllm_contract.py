"""The contract of every engine (test_engines.py), on a real vLLM."""

import pytest
from engine_kit import tiny_model
from test_engines import *  # noqa: F403  (the tests themselves)
from vllm_kit import started

from headrace.producers.engines.vllm.engine import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    tiny_model(5).save_pretrained(directory)
    kept = started(directory)
    yield kept
    kept.end()


@pytest.fixture(params=["stale", "recompute"])
def empty_engine(request, running):
    """vLLM, before its first weights."""
    engine = VllmEngine(running, kv_policy=request.param)
    yield engine
    engine.close()
