"""All pages, in the order of the menu."""

from __future__ import annotations

from tools.studio_app.page import Page
from tools.studio_pages import (
    checkpointing,
    cleaning,
    data,
    experts,
    hybrid,
    memory,
    optimizers,
    pipeline,
    plan,
    precision,
    problems,
    runs,
    schedules,
    sizes,
    tensor,
    tokenizers,
    zero,
)

PAGES: tuple[Page, ...] = (
    plan.PAGE,
    runs.PAGE,
    problems.PAGE,
    memory.PAGE,
    checkpointing.PAGE,
    zero.PAGE,
    data.PAGE,
    tensor.PAGE,
    pipeline.PAGE,
    hybrid.PAGE,
    experts.PAGE,
    schedules.PAGE,
    optimizers.PAGE,
    precision.PAGE,
    sizes.PAGE,
    tokenizers.PAGE,
    cleaning.PAGE,
)
