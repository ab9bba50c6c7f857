"""An estimate as text, for people."""

from __future__ import annotations

from harness.estimate.changes import helpful_changes, with_stage
from harness.estimate.dividable import division_problems
from harness.estimate.inputs import FP32, GIB, PHASES
from harness.estimate.states import optimizer_class
from harness.estimate.timeline import (
    MARGIN,
    Estimate,
    RankTimeline,
    estimate_memory,
)

_BAR = 40  # characters
_MOST_CHANGES = 8
_SMALL = 0.005  # GiB; less is not worth a line


def describe(estimate: Estimate) -> str:
    """The whole report."""
    worst = estimate.worst
    return "\n".join(
        [
            _setting(estimate),
            "",
            f"Peak on rank {worst.rank}{_of_stage(worst)}: {_gib(worst.peak)} GiB allocated, in "
            f"phase {worst.peak_phase}; up to {_gib(worst.reserved)} GiB reserved",
            *_bars(worst, worst.peak_phase),
            *_pipeline(estimate),
            "",
            "Phases, GiB on the device",
            *_phases(worst),
            f"The first step adds {_gib(estimate.late_bytes)} GiB of moments that are not there "
            f"before it.",
            "",
            "Under the ZeRO stages, all else equal",
            *_stages(estimate),
            "",
            f"Host memory {_gib(estimate.host_bytes_per_node)} GiB per node of "
            f"{estimate.inputs.gpus_per_node} ranks, NVMe {_gib(estimate.nvme_bytes_per_node)} GiB "
            f"per node, a checkpoint {_gib(estimate.checkpoint_bytes)} GiB on disk",
            "",
            *_verdict(estimate),
        ]
    )


def paper_text(estimate: Estimate) -> str:
    """The ZeRO paper's table for this model: model states only, decimal gigabytes."""
    count, shards = estimate.worst.inputs.parameters, estimate.inputs.shards
    part = "" if count == estimate.inputs.parameters else " of one rank"
    lines = [
        f"ZeRO paper (arXiv 1910.02054): model states of {count:,} parameters{part}, {shards} ranks"
    ]
    for stage in range(4):
        lines.append(f"  stage {stage}  {paper_bytes(count, stage, shards) / 1e9:9.2f} GB")
    return "\n".join(lines)


def _setting(estimate: Estimate) -> str:
    inputs, grid = estimate.inputs, estimate.inputs.grid
    divided = [
        f"{name} over {ranks}, "
        for name, ranks in (("tensors", grid.tensor), ("sequences", grid.sequence))
        if ranks > 1
    ]
    return (
        f"{inputs.parameters:,} parameters in {inputs.precision}, {''.join(divided)}"
        f"ZeRO {inputs.zero.stage} "
        f"({optimizer_class(inputs)}) over {inputs.shards} ranks; micro-batch "
        f"{inputs.micro_batch} x {inputs.seq_len} tokens, {inputs.grad_accum} accumulated, "
        f"checkpointing {inputs.checkpointing}, attention {inputs.attention}"
    )


def _of_stage(rank: RankTimeline) -> str:
    return "" if rank.inputs.stage is None else f", pipeline stage {rank.stage}"


def _pipeline(estimate: Estimate) -> list[str]:
    """The fullest rank of each pipeline stage."""
    if estimate.inputs.bounds is None:
        return []
    return ["", "Pipeline stages, the fullest rank of each"] + [
        f"  stage {rank.stage:<3} {rank.inputs.shape.num_layers:>4} layers "
        f"{rank.inputs.parameters:>15,} parameters {rank.inputs.in_flight:>4} in flight "
        f"{_gib(rank.peak):>9} GiB at {rank.peak_phase}"
        for rank in estimate.fullest
    ]


def _bars(rank: RankTimeline, phase: str) -> list[str]:
    parts = sorted(rank.phase(phase).items(), key=lambda part: -part[1])
    most = parts[0][1]
    return [
        f"  {name:26} {_gib(size):>9}  {'#' * max(1, round(_BAR * size / most)):{_BAR}}  "
        f"{rank.evidence(name)}"
        for name, size in parts
        if size / GIB >= _SMALL or size == most
    ]


def _phases(rank: RankTimeline) -> list[str]:
    return [
        f"  {name:16} {_gib(rank.total(name)):>9}  "
        f"{'#' * round(_BAR * rank.total(name) / max(rank.peak, 1))}"
        for name in PHASES
    ]


def _stages(estimate: Estimate) -> list[str]:
    lines = []
    for stage in range(4):
        other = estimate_memory(with_stage(estimate.inputs, stage), estimate.device_bytes)
        here = " <- this run" if stage == estimate.inputs.zero.stage else ""
        note = _refusal(estimate, stage) or other.verdict
        lines.append(
            f"  stage {stage}  {_gib(other.worst.peak):>9} GiB at {other.worst.peak_phase:16} "
            f"{note}{here}"
        )
    return lines


def _refusal(estimate: Estimate, stage: int) -> str | None:
    inputs = estimate.inputs
    if division_problems(with_stage(inputs, stage)):
        return "refused: DeepSpeed fails in its step"
    if stage == 0 and inputs.precision != "fp32":
        right = inputs.bounds and inputs.precision == "bf16" and inputs.sum_bytes != FP32
        return None if right else "refused: DeepSpeed computes it wrongly"
    return "refused under pipeline stages" if stage > 1 and inputs.bounds else None


def _verdict(estimate: Estimate) -> list[str]:
    if estimate.device_bytes is None:
        return ["No verdict: name the device with --gpu"]
    size = _gib(estimate.device_bytes)
    lines = [
        f"Verdict: {estimate.verdict}: {_gib(estimate.worst.peak)} GiB and about "
        f"{_gib(estimate.process_bytes)} GiB (guessed) for the process on a device of {size} GiB; "
        f"the weakest number in the peak is {estimate.evidence}.",
        "No run on a GPU has been compared with this estimate.",
    ]
    if estimate.verdict == "fits":
        return lines
    changes = helpful_changes(estimate)
    helping = [change for change in changes if change.estimate.verdict == "fits"]
    lines.append(
        f"Single changes that bring the peak below {MARGIN:.0%} of the device:"
        if helping
        else "No single change brings it below the margin; the largest savings:"
    )
    shown = helping or sorted(changes, key=lambda change: -change.saved_bytes)
    for change in shown[:_MOST_CHANGES]:
        lines.append(
            f"  {change.text:52} saves {_gib(change.saved_bytes):>8} GiB -> "
            f"{_gib(change.estimate.worst.peak)} GiB"
        )
    return lines


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f}"


def paper_bytes(parameters: int, stage: int, shards: int, optimizer_bytes: int = 12) -> float:
    """Model states per rank as the ZeRO paper counts them (arXiv 1910.02054, table 1).

    2 bytes of weights, 2 of gradients and K = 12 of optimizer states per parameter, in fp16 with
    Adam; stage 1 divides the states, 2 the gradients too, 3 everything.
    """
    cut = [shards if stage >= level else 1 for level in (3, 2, 1)]
    return parameters * (2 / cut[0] + 2 / cut[1] + optimizer_bytes / cut[2])
