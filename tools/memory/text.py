"""Formats a memory estimate as text."""

from harness.estimate.fit import Ways, advised, with_stage
from harness.estimate.inputs import BY_REFERENCE
from harness.estimate.memory_item import FP32, GIB, PHASES, Interval
from harness.estimate.states import optimizer_class
from harness.estimate.timeline import Estimate, RankTimeline, division_problems, estimate_memory

_BAR = 40  # characters
_BESIDE_A_BAR = 58  # characters of the line beside a bar: name, size, evidence
_MOST_CHANGES = 8
_SMALL = 0.005  # GiB; smaller components get no line


def describe(estimate: Estimate, width: int | None, ways: Ways) -> str:
    """Return the whole report for a terminal's `width`."""
    worst = estimate.worst
    stage = "" if worst.inputs.stage is None else f", pipeline stage {worst.stage}"
    bar = _BAR if width is None else max(8, min(_BAR, width - _BESIDE_A_BAR))
    return "\n".join(
        [
            _setting(estimate),
            "",
            f"Peak on rank {worst.rank}{stage}: {_gib(worst.peak)} GiB allocated, in phase "
            f"{worst.peak_phase}",
            *_bars(worst, worst.peak_phase, bar),
            *_pipeline(estimate),
            "",
            "Phases, GiB on the device",
            *_phases(worst, bar),
            f"The first step adds {_gib(estimate.late_bytes)} GiB of optimizer moments.",
            "",
            "By ZeRO stage, all else equal",
            *_stages(estimate),
            "",
            f"Host memory {_gib(estimate.host_bytes_per_node)} GiB per node of "
            f"{estimate.inputs.gpus_per_node} ranks, NVMe {_gib(estimate.nvme_bytes_per_node)} GiB "
            f"per node, a checkpoint {_gib(estimate.checkpoint_bytes)} GiB on disk",
            "",
            *_device(worst),
            "",
            *_verdict(estimate, ways),
        ]
    )


def _setting(estimate: Estimate) -> str:
    inputs, grid = estimate.inputs, estimate.inputs.grid
    divided = [
        f"{name} over {ranks}, "
        for name, ranks in (
            ("tensors", grid.tensor),
            ("sequences", grid.sequence),
            ("experts", grid.expert),
        )
        if ranks > 1
    ]
    less = " (kernels of mamba-ssm and other packages keep less: --kernels)"
    frozen = f" ({inputs.frozen:,} frozen)" if inputs.frozen else ""
    return (
        f"{inputs.parameters:,} parameters{frozen} in {inputs.precision}, {''.join(divided)}"
        f"ZeRO {inputs.zero.stage} "
        f"({optimizer_class(inputs)}) over {inputs.shards} ranks; micro-batch "
        f"{inputs.micro_batch} x {inputs.seq_len} tokens, {inputs.grad_accum} accumulated, "
        f"checkpointing {inputs.checkpointing}, attention {inputs.attention}, layers "
        f"{inputs.layers_by}{less if inputs.layers_by == BY_REFERENCE else ''}"
    )


def _pipeline(estimate: Estimate) -> list[str]:
    """Return a line for the fullest rank of each pipeline stage."""
    if estimate.inputs.bounds is None:
        return []
    return ["", "Pipeline stages, the fullest rank of each"] + [
        f"  stage {rank.stage:<3} {rank.inputs.shape.num_layers:>4} layers "
        f"{rank.inputs.parameters:>15,} parameters {rank.inputs.in_flight:>4} in flight "
        f"{_gib(rank.peak):>9} GiB at {rank.peak_phase}"
        for rank in estimate.fullest
    ]


def _bars(rank: RankTimeline, phase: str, bar: int) -> list[str]:
    parts = sorted(rank.phase(phase).items(), key=lambda part: -part[1])
    most = parts[0][1]
    return [
        f"  {name:26} {_gib(size):>9}  {'#' * max(1, round(bar * size / most)):{bar}}  "
        f"{rank.evidence(name)}"
        for name, size in parts
        if size / GIB >= _SMALL or size == most
    ]


def _phases(rank: RankTimeline, bar: int) -> list[str]:
    return [
        f"  {name:16} {_gib(rank.total(name)):>9}  "
        f"{'#' * round(bar * rank.total(name) / max(rank.peak, 1))}"
        for name in PHASES
    ]


def _stages(estimate: Estimate) -> list[str]:
    lines = []
    for stage in range(4):
        staged = estimate_memory(with_stage(estimate.inputs, stage), estimate.device_bytes)
        here = " <- this run" if stage == estimate.inputs.zero.stage else ""
        note = _refusal(estimate, stage) or staged.verdict
        lines.append(
            f"  stage {stage}  {_gib(staged.worst.peak):>9} GiB at {staged.worst.peak_phase:16} "
            f"{note}{here}"
        )
    return lines


def _refusal(estimate: Estimate, stage: int) -> str | None:
    inputs = estimate.inputs
    if division_problems(with_stage(inputs, stage)):
        return "rejected: DeepSpeed fails in its step"
    if stage == 0 and inputs.precision != "fp32":
        right = inputs.bounds and inputs.precision == "bf16" and inputs.sum_bytes != FP32
        return None if right else "rejected: DeepSpeed computes it wrongly"
    if stage == 3 and inputs.quantization is not None:
        return "rejected: ZeRO 3 cannot shard 4-bit weights"
    return "rejected under pipeline stages" if stage > 1 and inputs.bounds else None


def _device(rank: RankTimeline) -> list[str]:
    """Return the bytes of the fullest GPU as torch and its driver count them."""
    rows = (
        ("allocated", _gib(rank.peak), "in tensors: torch's max_memory_allocated"),
        ("reserved", _span(rank.reserved), "by torch's allocator: max_memory_reserved"),
        ("beside", _span(rank.driver), "CUDA context, kernels, NCCL's buffers"),
        ("shown", _span(rank.shown), "by the driver: nvidia-smi"),
    )
    head = f"On the device of rank {rank.rank}, GiB at least and at most"
    return [head, *(f"  {name:10} {size:>17}  {what}" for name, size, what in rows)]


def _span(interval: Interval) -> str:
    return f"{_gib(interval.low)} to {_gib(interval.high)}"


def _verdict(estimate: Estimate, ways: Ways) -> list[str]:
    if estimate.device_bytes is None:
        return ["No verdict: set the GPU type with --gpu"]
    size, verdict = _gib(estimate.device_bytes), estimate.verdict
    why = {
        "fits": "the upper bound shown by the driver is below the memory of the device",
        "tight": "it fits if torch's allocator finds room in its cache",
        "does not fit": "tensors and the process alone exceed the memory of the device",
    }
    lines = [
        f"Verdict: {verdict}: {why[verdict]}, {size} GiB; the weakest number in the peak is "
        f"{estimate.evidence}. Comparison with published runs: tests/estimate/published/memory.toml"
    ]
    if verdict == "fits":
        return lines
    effect, changes = advised(estimate, ways, _MOST_CHANGES)
    lines.append(f"{effect[0].upper()}{effect[1:]}:" if changes else "No change would help.")
    widest = max((len(change.text) for change in changes), default=0)
    lines += [
        f"  {change.text:{widest}} saves {_gib(change.saved_bytes):>8} GiB -> "
        f"{_gib(change.estimate.worst.peak)} GiB"
        for change in changes
    ]
    lines += [f"Other layouts: {ways.planner}"] if ways.planner else []
    return lines


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f}"


def paper_bytes(parameters: int, stage: int, shards: int) -> float:
    """Return the bytes of model states per rank as the ZeRO paper counts them (arXiv 1910.02054,
    table 1).

    fp16 with Adam takes 2 bytes of weights, 2 of gradients and K = 12 of optimizer states per
    parameter. Stage 1 partitions the states, stage 2 also the gradients, stage 3 everything.
    """
    cut = [shards if stage >= level else 1 for level in (3, 2, 1)]
    return parameters * (2 / cut[0] + 2 / cut[1] + 12 / cut[2])
