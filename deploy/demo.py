"""`headrace demo`: the whole loop from nothing, on a task that this machine learns in minutes."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

from ..producers.engines.vllm.local import require_vllm
from ..schemas.config import Config
from ..schemas.config_file import load_config
from ..schemas.errors import ConfigError
from .broker.choice import broker_reason
from .presets import PRESETS, Preset
from .run_dir import clear, locked
from .running import Goal, run
from .settings import FLAGS
from .stack import Plan, python

MARKER = "demo"
"""File in the run's folder that says who made it."""
_ENGINES: dict[str, dict[str, Any]] = {"vllm": {"engine.vllm.args": {"enforce_eager": True}}}
"""Settings beside the preset's, by engine: compiling takes longer than the demo."""


def demo(
    *,
    task: str,
    seed: int,
    steps: int | None,
    target: float | None,
    run_dir: Path | None,
    bootstrap: str | None,
    kafka_home: Path | None,
    overrides: dict[str, Any],
    quiet: bool,
    engine: str | None = None,
) -> dict[str, Any]:
    """Run the demo and return its summary; raises as `running.run` does."""
    started = time.monotonic()
    preset = PRESETS.get(task)
    if preset is None:
        raise ConfigError(f"--task {task!r}: the demo knows {' and '.join(PRESETS)}")
    if engine is not None:
        overrides = {"engine.kind": engine, **_ENGINES.get(engine, {}), **overrides}
    run_dir = (run_dir or Path("runs") / f"demo-{task}-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    config = _config(preset, seed, steps, run_dir, bootstrap, kafka_home, overrides)
    require_vllm(config.engine)
    with locked(run_dir):
        clear(run_dir, marker=MARKER)
        (run_dir / MARKER).touch()
    plan = Plan(
        config=config,
        tasks=list(preset.tasks()),
        prepare=[
            *python("headrace.consumers.trainer.warmstart"),
            *(task, str(seed), str(config.policy.model)),
            *(["--head-size", "32"] if config.engine.kind == "vllm" else []),
        ],
    )
    goal = Goal(
        reward=None if steps is not None and target is None else target or preset.target,
        steps=steps or preset.max_steps,
        seconds=preset.max_seconds * (2 if config.engine.kind == "vllm" else 1),  # its start takes minutes
        steps_suffice=steps is not None,
    )
    return run(
        plan,
        goal,
        title=f"headrace demo: {task}, seed {seed}",
        about=f"broker: {broker_reason(config.kafka)}",
        task=task,
        quiet=quiet,
        started=started,
    )


def _config(
    preset: Preset,
    seed: int,
    steps: int | None,
    run_dir: Path,
    bootstrap: str | None,
    kafka_home: Path | None,
    overrides: dict[str, Any],
) -> Config:
    settings: dict[str, Any] = {
        **preset.settings,
        "run.dir": str(run_dir),
        "run.seed": seed,
        "policy.model": str(run_dir / "model"),
        "trainer.steps": steps or preset.max_steps,
        "kafka.bootstrap": bootstrap,
        "kafka.kafka_home": str(kafka_home.resolve()) if kafka_home is not None else None,
    }
    if bootstrap is not None:
        # Somebody else's broker may hold earlier demos.
        settings["run.namespace"] = f"demo-{uuid.uuid4().hex[:8]}"
    flags = {key: name for key, name in FLAGS.items() if key not in overrides}
    return load_config(overrides={**settings, **overrides}, flags=flags)
