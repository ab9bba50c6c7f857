"""Chooses the attention implementation of a plan, and rejects one that cannot run."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.config.assignments import CHOSEN, KEPT
from harness.estimate.hardware import Precision, known_gpu
from harness.layout.attention_table import ATTENTIONS, IGNORING_DOCUMENTS, SIZES, WITHOUT_ATTENTION
from harness.layout.families import family_of
from harness.layout.shape import Shape
from harness.layout.tensor import without_sdpa
from harness.layout.world import World
from harness.plan.plan import Draft, Plan

ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop")
"""Model config keys for the dropout probability of attention weights."""


@dataclass(frozen=True)
class AttentionNeeds:
    """Requirements on attention: what it computes, and the device."""

    world: World
    precision: Precision
    model_config: Mapping[str, Any]
    shape: Shape | None
    seq_len: int
    documents: bool
    """True if attention is confined to documents."""
    here: bool = True
    """True if it runs on this machine, whose packages are then checked."""

    @classmethod
    def by(cls, source: Draft | Plan) -> AttentionNeeds:
        """Return a plan's requirements on attention."""
        return cls(
            source.world,
            source.precision,
            source.model_config,
            source.shape,
            source.config.data.seq_len,
            bool(source.config.data.document_mask) or source.facts.has_documents,
            source.here if isinstance(source, Draft) else True,
        )

    @property
    def masked(self) -> str:
        """Implementation to use with a mask: sdpa if it supports the family, or eager."""
        return "eager" if self._lacking else "sdpa"

    def chosen(self) -> tuple[str, str]:
        """Return the implementation that "auto" selects, and the reason."""
        wanted = self._wanted()
        if self.world.accelerator == "cpu":
            why = self._lacking or "a CPU has no faster kernel"
        elif not wanted:
            why = self._lacking or "the causal mask needs no tensor"
        elif problem := next(iter(self.problems("varlen")), None):
            why = f"{wanted}, but varlen cannot be used: {problem}"
        else:
            return "varlen", wanted
        return self.masked, why

    def problems(self, attention: str) -> list[str]:
        """Return the reasons why an implementation cannot be used."""
        row, config = ATTENTIONS[attention], self.model_config
        is_cuda, problems = self.world.accelerator == "cuda", list[str]()
        is_missing = row.package and self.here and not importlib.util.find_spec(row.package)
        if row.package and (not is_cuda or is_missing):
            problems.append(f"it needs a GPU and the package {row.package}")
        if attention == "sdpa" and self._lacking:
            problems.append(self._lacking)
        if row.is_own or (attention != "varlen" and row.is_exact):
            return problems
        if self.shape is not None and not self.shape.family.divides_rows:
            problems.append(f"{config['model_type']} models do not pass it the starts of documents")
        if dropped := [key for key in ATTENTION_DROPOUTS if config.get(key)]:
            problems.append(f"it has no dropout of attention weights ({dropped[0]})")
        if not row.is_exact:
            return problems + self._problems_of_kind()
        return problems + (self._problems_of_kernel() if is_cuda else [])

    def _problems_of_kind(self) -> list[str]:
        """Return what the approximate kinds of attention do not support."""
        model_type = self.model_config["model_type"]
        if self.shape is None:
            kind = "no" if model_type in WITHOUT_ATTENTION else "an unknown kind of"
            return [f"{model_type} models have {kind} attention"]
        lacks = family_of(model_type).sdpa_lacks
        problems = [f"it has no {lacks}, which {model_type} models have"] if lacks else []
        if any(window is not None for window in self.shape.sliding_windows):
            problems.append(f"layers of {model_type} models have sliding windows")
        return problems

    def _problems_of_kernel(self) -> list[str]:
        """Return what flash attention, in torch or the package, does not support."""
        gpu, problems = known_gpu(self.world.gpu), []
        if self.precision == "fp32":
            problems.append("its kernel computes in bf16 or fp16, but the run uses fp32")
        if gpu is not None and gpu.bf16_tflops is None:
            problems.append(f"its kernel needs an Ampere GPU or later, but {gpu.name} is older")
        width = 8 if self.shape is None else self.shape.head_dim
        if width > 256 or width % 8:
            why = "its kernel needs a head size of at most 256 in multiples of 8"
            problems.append(f"{why}, but the model has {width}")
        if importlib.util.find_spec("flash_attn"):
            return problems
        caps = self.model_config.get("attn_logit_softcapping", True) is not None
        if caps and family_of(self.model_config["model_type"]).soft_caps:
            problems.append("torch's kernel does not support soft-capped scores; flash_attn's does")
        if not self.world.has_torch(2, 11):
            why = "does not support windows and scales; torch 2.11's and flash_attn's do"
            problems.append(f"torch {self.world.torch}'s kernel {why}")
        return problems

    def _wanted(self) -> str:
        """Return why sdpa would need a mask or cannot be used; "" if neither."""
        windows = {*(self.shape.sliding_windows if self.shape else ())} - {None}
        if self.documents:
            return "tokens attend within their document"
        if any(window is not None and window <= self.seq_len for window in windows):
            return "layers have a sliding window"
        kind = self.model_config["model_type"]
        return self._lacking if family_of(kind).sdpa_lacks else ""

    @property
    def _lacking(self) -> str:
        """Why torch's attention cannot compute the model; "" if it can."""
        kind = self.model_config["model_type"]
        if lacks := family_of(kind).sdpa_lacks:
            return f"sdpa has no {lacks}, which {kind} models have"
        if "auto_map" in self.model_config:
            return f"it is unknown whether the own code of {kind} models supports sdpa"
        return f"transformers has no sdpa for {kind} models" if without_sdpa(kind) else ""


def decide_attention(draft: Draft) -> None:
    """Resolve model.attention=auto; reject an implementation that cannot compute this model on the
    plan's device, which may differ from this machine's.
    """
    run, attention = draft.config, draft.config.model.attention
    if not draft.model_config:  # already reported
        return
    needs = AttentionNeeds.by(draft)
    is_ignoring = draft.model_config["model_type"] in IGNORING_DOCUMENTS
    is_joined = run.data.batching == "packed" and not run.train.carry_state  # several in a window
    if needs.documents and is_joined and is_ignoring:
        draft.problems.say(ignored_documents(draft))
    _check_sizes(draft)
    problems = [] if attention == "auto" else needs.problems(attention)
    is_kept = run.origin("model.attention") == KEPT
    if attention != "auto" and not is_kept:
        for why in problems:
            draft.problems.add("model.attention", why, f'use "auto" or "{needs.masked}"')
        return
    chosen = attention, "as at the start of the run"
    if not is_kept or problems or not ATTENTIONS[attention].is_exact:
        chosen = needs.chosen()
    attention, draft.attention_why = draft.facts.attention or chosen
    draft.decide({"model.attention": attention}, CHOSEN)


def ignored_documents(source: Draft | Plan) -> str:
    """Return the problem of a model that would attend across document boundaries."""
    kind = source.model_config["model_type"]
    begin = f"model.name={source.config.model.name}: {kind} models ignore document boundaries, but "
    if of_pairs := source.config.train.preferences:
        apart = f"the sides of a pair (train.objective={of_pairs}) must not see each other"
        return f"{begin}{apart}: use another model"
    return (
        f"{begin}tokens attend only within their document (data.document_mask, the default with "
        "prompts): "
        "set data.batching=padded, which has one document in each window, "
        "data.document_mask=false, or use another model"
    )


def _check_sizes(draft: Draft) -> None:
    """Reject sizes that the implementation does not use, or that do not fit the windows."""
    model, seq_len = draft.config.model, draft.config.data.seq_len
    sizes, attention = model.attention_sizes, model.attention
    for name in SIZES:
        if name not in sizes and getattr(model, f"attention_{name}") is not None:
            kinds = [kind for kind, row in ATTENTIONS.items() if name in row.sizes]
            why = f"but model.attention={attention} does not use this size"
            use = f"it is a size of {', '.join(kinds)}"
            draft.problems.add(f"model.attention_{name}", why, use)
    if sizes.get("global", 0) > seq_len:
        why = f"but windows have {seq_len} tokens (data.seq_len)"
        draft.problems.add("model.attention_global", why, f"use at most {seq_len}")
    if attention in ("longformer", "linformer") and sizes["window"] >= seq_len:
        draft.note(
            "exact_attention",
            f"{attention} with model.attention_window={sizes['window']} is exact attention: "
            f"windows have {seq_len} tokens (data.seq_len)",
        )
    if attention == "linformer" and sizes["window"] % sizes["features"]:
        draft.problems.say(
            f"model.attention_window={sizes['window']} is not a multiple of "
            f"model.attention_features={sizes['features']}, linformer's summaries of a block"
        )
