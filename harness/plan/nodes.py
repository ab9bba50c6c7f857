"""Ranks that talk in every layer, and the nodes that they are on."""

from __future__ import annotations

from harness.plan.draft import Draft


def note_nodes(draft: Draft) -> None:
    """Add an event for each axis whose neighbours are not all on one node, and for ZeRO 3 on a GPU
    alone.
    """
    grid, local = draft.grid, draft.world.local_world_size
    alone = grid.world_size == 1 and draft.world.accelerator == "cuda"
    offload = draft.ds.value("zero_optimization.offload_param.device")
    if alone and offload in (None, "none") and draft.ds.value("zero_optimization.stage") == 3:
        draft.note(
            "alone",
            "ZeRO 3 divides nothing on one GPU, and a step took a quarter longer there than under "
            "ZeRO 1: set ds.zero_optimization.stage=1",
        )
    if local >= grid.world_size:
        return
    # The ranks of a group, and how many of them lie between two that follow each other in it.
    groups = {
        "tensor_parallel.autotp_size": (grid.tensor, 1),
        "sequence_parallel_size": (grid.sequence, grid.tensor),
        "expert_parallel.autoep_size": (grid.expert, grid.tensor),
    }
    for key, (size, apart) in groups.items():
        if size > 1 and local % (size * apart):
            within = [n for n in range(1, size) if not (size % n or local % (n * apart))]
            fewer = f"; {within[-1]} would be" if within else ""
            draft.note(
                "across_nodes",
                f"{key} is {size}: {size * apart} neighbouring ranks talk in every layer, and are "
                f"not all within one node of {local}{fewer}",
            )
