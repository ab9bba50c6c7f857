"""One step of a pipeline as a picture: what each stage does over time, written as SVG by hand."""

from __future__ import annotations

from harness.plan import Plan
from harness.planning.stages import bubble
from tools.layout.timing import Span, plan_spans, waiting

_COLOURS = {"forward": "#4e79a7", "backward": "#f28e2b"}
_WIDTH, _LEFT, _TOP, _ROW, _GAP = 1160, 70, 44, 26, 6
_READABLE = 16  # pixels; a narrower bar has no room for its number


def svg(plan: Plan) -> str:
    """A row for each stage; a bar's length is its arithmetic, sending takes no time."""
    found = plan_spans(plan)
    scale = (_WIDTH - _LEFT - 10) / max(span.end for span in found)
    stages, batches = plan.grid.pipeline, plan.grad_accum
    drawn = [
        f'<text x="{_LEFT}" y="16">{plan.model_config["model_type"]}, {stages} stages, {batches} '
        f"micro-batches: {waiting(found):.1%} of the step waiting "
        f"({bubble(stages, batches):.1%} with stages equally fast)</text>"
    ]
    for index, (kind, colour) in enumerate(_COLOURS.items()):
        x = _LEFT + 90 * index
        drawn.append(
            f'<rect x="{x}" y="24" width="12" height="12" fill="{colour}"/>'
            f'<text x="{x + 17}" y="34">{kind}</text>'
        )
    for stage in range(stages):
        y = _TOP + stage * (_ROW + _GAP)
        drawn.append(
            f'<text x="8" y="{y + 17}">stage {stage}</text>'
            f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT - 10}" height="{_ROW}" '
            f'fill="#eee"/>'
        )
    drawn += [_bar(span, scale) for span in found]
    height = _TOP + stages * (_ROW + _GAP)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="#fff"/>'
        f"{''.join(drawn)}</svg>\n"
    )


def _bar(span: Span, scale: float) -> str:
    x, width = _LEFT + span.begin * scale, (span.end - span.begin) * scale
    y = _TOP + span.stage * (_ROW + _GAP)
    number = (
        f'<text x="{x + width / 2:.2f}" y="{y + 17}" fill="#fff" text-anchor="middle">'
        f"{span.micro_batch}</text>"
        if width >= _READABLE
        else ""
    )
    return (
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW}" '
        f'fill="{_COLOURS[span.kind]}" stroke="#fff" stroke-width="0.5">'
        f"<title>{span.kind} of micro-batch {span.micro_batch}</title></rect>{number}"
    )
