"""Finishes a run after its last step: held-out loss, sample text, export."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from harness.checkpoint.manifest import Checkpoint
from harness.checkpoint.store import Store, newest_usable, verified
from harness.data.data import Data
from harness.data.packing import IGNORED
from harness.data.tokenizer_files import brings_code
from harness.errors import ExitCode, RunStopped, is_full_disk
from harness.files.paths import script
from harness.files.records import read_lines
from harness.plan.batches import length_events
from harness.plan.text import row
from harness.report.events import no_better
from harness.run.evaluation import evaluate
from harness.run.exporting import ExportDiffers, ExportOptions, export
from harness.run.run import Run
from harness.run.saving import save

TEMPERATURE = 0.8
LIMIT_S = 30.0  # per sample: each token takes a forward pass on all ranks


def show_sample(run: Run, title: str = "sample") -> None:
    """Show and record a text that the model generates: a continuation of sample.prompt, an answer
    to the first held-out question, or the start of a document. Collective.
    """
    config, tokenizer = run.plan.config, run.data.tokenizer
    if not config.sample.tokens:
        return
    run.pulse("sample", run.state.step)
    question = question_of(run)
    answer = continued(
        run.engine.next_token_logits,
        question or run.data.begin or [run.data.eos_id],
        len(tokenizer),
        {run.data.eos_id, *tokenizer.all_special_ids},
        config.sample.tokens,
        None if config.train.carry_state else run.plan.seq_len,
        config.train.seed,
        _clock(LIMIT_S),
    )
    prompt_text, answer_text = str(tokenizer.decode(question)), str(tokenizer.decode(answer))
    run.event("sample", step=run.state.step, title=title, prompt=prompt_text, text=answer_text)
    if config.sample.prompt is None and question:
        run.progress.say(f"{title}: {prompt_text!r} -> {answer_text!r}")
    else:
        run.progress.say(f"{title}:\n{_as_block(prompt_text + answer_text)}")


def question_of(run: Run) -> list[int]:
    """Return the token ids of the prompt; [] to start a document."""
    prompt = run.plan.config.sample.prompt
    if prompt is None:
        return first_question(run.data)
    ids: list[int] = run.data.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    return run.data.begin + ids


def _clock(limit_s: float) -> Callable[[], bool]:
    """Return a function that tells all ranks whether rank 0's time is up. Collective."""
    end = time.monotonic() + limit_s

    def is_up() -> bool:
        answer = [time.monotonic() > end]
        dist.broadcast_object_list(answer)
        return answer[0]

    return is_up


def _as_block(text: str) -> str:
    """Return a text indented; characters that could control a terminal are escaped."""
    shown = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    return "\n".join(f"  | {line}" for line in shown.strip("\n").split("\n"))


def first_question(data: Data) -> list[int]:
    """Return the ids of the first held-out sample before its first target, if any."""
    if not data.held_out.is_masked:
        return []
    sample = data.held_out.batch(0, 1)
    learned = (sample.labels[0] != IGNORED).nonzero()
    if not len(learned) or not learned[0]:
        return []
    ids: list[int] = sample.input_ids[0, : int(learned[0]) + 1].tolist()
    return ids


def continued(
    next_logits: Callable[[torch.Tensor], torch.Tensor],
    ids: list[int],
    vocab_size: int,
    stops: set[Any],
    tokens: int,
    seq_len: int | None,
    seed: int,
    is_up: Callable[[], bool],
) -> list[int]:
    """Return up to `tokens` ids that follow `ids`, the same on every rank. They end before the
    first of `stops`, when the time `is_up`, or if a logit is not finite.

    `next_logits` maps ids (1, n) to logits (vocab_size,). The prefix is recomputed for each token,
    which works in every layout. `seq_len`: number of latest tokens that the model sees, or None.
    """
    generator, made = torch.Generator().manual_seed(seed), list[int]()
    for _ in range(tokens):
        seen = [*ids, *made][-(seq_len or 0) :]
        logits = next_logits(torch.tensor([seen])).cpu()[:vocab_size]
        if not logits.isfinite().all():
            break
        choice = torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=generator)
        if choice.item() in stops:
            break
        made.append(int(choice))
        if is_up():
            break
    return made


CHECKED_PARAMETERS = 2 * 10**9  # a forward pass on the CPU then takes minutes
SMALL_CORPUS_TOKENS = 50_000_000  # counting tokens for the baselines then takes seconds


def finish(run: Run) -> None:
    """Show the held-out loss and a sample of text, then export the weights. Collective."""
    plan = run.plan
    loss = evaluate(run) if run.held_out_nats is None else run.held_out_nats
    _say_loss(run, loss)
    show_sample(run, "sample after training" if plan.config.model.init_from else "sample")
    if plan.config.save.export:
        _export(run)


def _say_loss(run: Run, loss: float | None) -> None:
    """Show and record the held-out loss, the initial one, and those of simple models."""
    if not run.is_writer or loss is None:
        return
    of_pairs = run.plan.config.train.preferences
    unit = f"of {of_pairs}, mean over pairs" if of_pairs else "nats per token"
    text, first = f"held-out loss {loss:.2f} {unit}", None
    if run.state.step and (first := _first_held_out(run)) is not None:
        text += f", {first:.2f} before training"
    if run.data.train.tokens <= SMALL_CORPUS_TOKENS and not of_pairs:
        unigram, bigram = run.data.unigram_nats, run.data.bigram_nats
        run.event("baselines", step=run.state.step, unigram_nats=unigram, bigram_nats=bigram)
        text += f"; a unigram model has {unigram:.2f}, a bigram model {bigram:.2f}"
    run.progress.say(text)
    for event in length_events(run.plan.config, run.progress.total_steps):
        run.progress.say(row("note", event["message"]))
    if first is not None and (problem := no_better(first, loss)) is not None:
        run.event("no_better", step=run.state.step, message=problem)
        run.progress.say(row("note", problem))


def _first_held_out(run: Run) -> float | None:
    """Return the held-out loss before the first step in nats; None if it was not recorded."""
    line = next(iter(read_lines(run.folder.metrics_path, "step")), {})
    value = line.get("eval_loss")
    return value if line.get("step") == 0 and isinstance(value, float) else None


def _export(run: Run) -> None:
    """Export the last checkpoint on rank 0; the others wait without a timeout. Collective.

    Raises RunStopped on all ranks if the disk is full or the export's loss differs.
    """
    plan, folder, stop = run.plan, run.folder.export_dir, None
    checkpoint = _last_checkpoint(run)
    run.watchdog.close()  # an export has no time limit
    if run.is_writer:
        options = ExportOptions(
            most_checked=CHECKED_PARAMETERS,
            merge=plan.config.save.merge,
            source=plan.model_source,
            trust_remote_code=run.engine.module.is_remote_code() or brings_code(run.data.tokenizer),
        )
        command = f"python {script('tools/export_hf.py')} {run.folder.path}"
        try:
            checked = export(checkpoint, folder, run.folder.tokenizer_dir, options)
            run.progress.say(f"exported {folder}; {checked}")
        except ExportDiffers as error:
            problem = f"all steps are done, but {error}; {command} --no-check exports it anyway"
            stop = ExitCode.NO_CHECKPOINT, problem
        except Exception as error:
            if not is_full_disk(error):
                raise
            problem = (
                f"all steps are done and {checkpoint.path} is complete, but it could not be "
                f"exported ({error}): free disk space, then run: {command}"
            )
            stop = ExitCode.CANNOT_SAVE, problem
    # End all ranks together: srun kills the rest a minute after the first has ended.
    if (stop := run.guard.told_by_rank_0(stop)) is not None:
        raise RunStopped(*stop)


def _last_checkpoint(run: Run) -> Checkpoint:
    """Return the verified checkpoint of the current step, saved if needed. Collective."""
    checkpoint, _ = newest_usable(run.folder.checkpoints_dir)
    if checkpoint is None or checkpoint.state.step != run.state.step:
        save(run)
        checkpoint = verified(Store(run.folder.checkpoints_dir).at(run.state.step))
    return checkpoint
