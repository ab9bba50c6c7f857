"""Finishes a run after its last step."""

from __future__ import annotations

from harness.checkpoint.find import Checkpoint, newest_usable, verified
from harness.checkpoint.store import Store
from harness.data.kept_tokenizer import brings_code
from harness.errors import ExitCode, RunStopped, is_full_disk
from harness.layout.shape import num_parameters
from harness.run.evaluation import evaluate
from harness.run.exporting import ExportOptions, export
from harness.run.run import Run
from harness.run.sampling import sample_text
from harness.run.saving import save

CHECKED_PARAMETERS = 2 * 10**9  # up to here, a forward pass on the host takes minutes
SMALL_CORPUS_TOKENS = 50_000_000  # up to here, counting tokens for the baselines takes seconds


def finish(run: Run) -> None:
    """Show the held-out loss and a sample of text, and export the weights. Collective."""
    plan = run.plan
    loss = evaluate(run) if run.held_out_nats is None else run.held_out_nats
    run.pulse("sample", run.state.step)
    small = run.data.train.tokens <= SMALL_CORPUS_TOKENS
    if run.is_writer and small and loss is not None:
        run.progress.say(
            f"held-out loss {loss:.2f} nats per token; token frequencies alone give "
            f"{run.data.unigram_nats:.2f}, counted pairs of tokens {run.data.bigram_nats:.2f}"
        )
    if plan.config.sample.tokens:
        text = sample_text(
            run.engine.next_token_logits,
            run.data.tokenizer,
            plan.config.sample.prompt or "",
            plan.config.sample.tokens,
            plan.config.data.seq_len,
            plan.config.train.seed,
        )
        run.progress.say(f"sample: {text!r}")
    if plan.config.save.export:
        _export(run)


def _export(run: Run) -> None:
    """Export the last checkpoint on rank 0; the others wait without a time limit. Collective.

    Raises RunStopped (cannot save) on all ranks if the disk is full: the weights are saved.
    """
    plan, folder, problem = run.plan, run.folder.export_dir, None
    checkpoint = _last_checkpoint(run)
    run.watchdog.close()  # an export takes its time
    if run.is_writer:
        options = ExportOptions(
            check=plan.shape is not None and num_parameters(plan.shape) <= CHECKED_PARAMETERS,
            source=plan.model_source,
            trust_remote_code=run.engine.module.is_remote_code() or brings_code(run.data.tokenizer),
        )
        try:
            checked = export(checkpoint, folder, run.folder.tokenizer_dir, options)
            run.progress.say(f"exported {folder}; {checked}")
        except Exception as error:
            if not is_full_disk(error):
                raise
            problem = str(error)
    # srun ends those that are left a minute after the first: all ranks end together.
    if (problem := run.guard.told_by_rank_0(problem)) is not None:
        raise RunStopped(
            ExitCode.CANNOT_SAVE,
            f"all steps are done, and {checkpoint.path} is whole, but it could not be exported "
            f"({problem}): make room, then run: python tools/export_hf.py {run.folder.path}",
        )


def _last_checkpoint(run: Run) -> Checkpoint:
    """Return the checkpoint of the run's step, verified; saved now if no step was taken.

    Collective.
    """
    checkpoint, _ = newest_usable(run.folder.checkpoints_dir)
    if checkpoint is None or checkpoint.state.step != run.state.step:
        save(run)
        checkpoint = verified(Store(run.folder.checkpoints_dir).at(run.state.step))
    return checkpoint
