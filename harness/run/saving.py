"""Saves a run's checkpoints."""

from __future__ import annotations

from importlib.metadata import version

from harness.checkpoint.manifest import Manifest
from harness.checkpoint.save import Saved
from harness.models.adapters import adapters_of
from harness.models.quantized import described
from harness.run.probe import as_tensors, loss_of, probe_batch
from harness.run.run import Run


def save(run: Run, background: bool = False) -> None:
    """Save the run as it is, once the last save is finished. Raises RunStopped (cannot save)."""
    run.pulse("save", run.state.step)
    finish_save(run)
    plan, probe = run.plan, probe_batch(run.data)
    lora = plan.config.model.lora
    manifest = Manifest(
        state=run.state,
        precision=plan.precision,
        model_config=plan.model_config,
        data_fingerprint=run.data.fingerprint,
        engine=run.engine.scalars(),
        probe_loss=loss_of(run.engine, probe),
        held_out_loss=run.held_out_nats,
        watch=run.judge.state(),
        adapters=adapters_of(run.engine.module, lora, plan.config.model.init_from),
        quantization=described(run.engine.module, lora.quantization) if lora.quantization else {},
        about={
            "world_size": plan.world.world_size,
            "zero_stage": plan.zero_stage,
            "pipeline_stages": plan.grid.pipeline,
            "optimizer": plan.deepspeed["optimizer"],
            "versions": {name: version(name) for name in ("torch", "deepspeed", "transformers")},
        },
    )
    run.saver.start(manifest, run.engine.fragments(), as_tensors(probe), background)
    if not background:
        finish_save(run)
    run.meter.restart()


def finish_save(run: Run) -> None:
    """Wait for the save under way, if there is one, and record it. Raises RunStopped."""
    if run.saver.is_busy:
        run.pulse("save", run.state.step)
    saved = run.saver.finish()
    if saved is not None:
        _record(run, saved)
        run.meter.restart()


def _record(run: Run, saved: Saved) -> None:
    per_s = saved.bytes / saved.seconds
    run.event(
        "saved",
        step=saved.step,
        path=str(saved.path),
        seconds=saved.seconds,
        stall_s=saved.stall_s,
        bytes=saved.bytes,
        bytes_per_s=per_s,
        removed=saved.removed,
    )
    if run.is_writer:
        run.folder.write_status("running", None, saved.step)
        samples = run.state.samples
        run.engine.write_monitors(
            [
                ("save/stall_s", saved.stall_s, samples),
                ("save/bytes", saved.bytes, samples),
                ("save/bytes_per_s", per_s, samples),
            ]
        )
