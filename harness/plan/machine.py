"""Requirements of a plan that a machine lacks: compilers, or space for states on NVMe."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.config.ds_json import literal, offloaded_to
from harness.errors import ConfigError
from harness.estimate.hardware import find_gpu
from harness.estimate.memory_item import GIB, as_size
from harness.files.folder_lock import remove_left_over
from harness.layout.world import SHARES_GPU, World
from harness.plan.plan import Draft, Plan


def missing_for_cpu_adam() -> str | None:
    """Return the missing tools for compiling DeepSpeed's CPU Adam; None if all are present.

    DeepSpeed's own `is_compatible` does not check for a compiler; the build would then fail inside
    `initialize`, after the model was built.
    """
    compiler, ninja = os.environ.get("CXX", "c++"), ninja_folder() or shutil.which("ninja")
    programs = {"c++": shutil.which(compiler), "ninja": ninja}
    missing = [name for name, path in programs.items() if path is None]
    return f"{', '.join(missing)} not found" if missing else None


def missing_for_compile(accelerator: str) -> str | None:
    """Return the missing tool for torch.compile; None if nothing is missing."""
    if accelerator == "cuda":
        return None if importlib.util.find_spec("triton") else "the package triton (pip install)"
    names = filter(None, (os.environ.get("CXX"), "g++", "clang++"))
    return None if any(map(shutil.which, names)) else "a C++ compiler (apt install g++)"


def ninja_folder() -> str | None:
    """Return the folder of the program that the package ninja installed; None without it.

    The package's file list is correct wherever it is installed. ninja.BIN_DIR only knows the
    interpreter's environment and is "" if the package comes from another one.
    """
    try:
        files = importlib.metadata.files("ninja") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    programs = [Path(os.path.normpath(file.locate())) for file in files if file.name == "ninja"]
    return next((str(path.parent) for path in programs if os.access(path, os.X_OK)), None)


USUAL_NODE = 8
"""Default number of GPUs per node."""


def cluster(
    gpus: int, gpus_per_node: int | None, gpu: str | None, kernels: Sequence[str] = ()
) -> World:
    """Return a world of GPU nodes, whose plan rejects an unknown `gpu`. Raises ConfigError with
    every problem of the arguments.

    `kernels`: packages of STATE_KERNELS that are installed there.
    """
    problems = []
    for flag, size in (("--gpus", gpus), ("--gpus-per-node", gpus_per_node)):
        if size is not None and size < 1:
            problems.append(f"{flag} is {size}: it must be at least 1")
    per_node = min(gpus_per_node or USUAL_NODE, gpus)
    if not problems and gpus > per_node and gpus % per_node:
        problems.append(
            f"--gpus {gpus} is not a multiple of {per_node} GPUs per node: change it or "
            "--gpus-per-node"
        )
    if problems:
        raise ConfigError(problems)
    return World(
        world_size=gpus,
        local_world_size=per_node,
        accelerator="cuda",
        gpu=gpu,
        kernels=tuple(kernels),
    )


def check_gpu(draft: Draft) -> None:
    """Reject a GPU that is not in the table, for a plan of other machines."""
    if (gpu := draft.world.gpu) is not None and not draft.here:
        try:
            find_gpu(gpu)
        except ValueError as error:
            draft.problems.say(f"--gpu: {error}")


_QUANTIZED = "zero_optimization.zero_quantized_gradients"


def check_shared_gpus(draft: Draft) -> None:
    """Reject fewer GPUs than ranks. If ranks share GPUs, reject what counts the GPUs of a node or
    needs several nodes, and note what a rehearsal cannot show.
    """
    world = draft.world
    if world.lacking_gpus:
        gpus = f"{world.lacking_gpus} GPU{'s' * (world.lacking_gpus > 1)}"
        draft.problems.say(
            f"{socket.gethostname()} has {world.local_world_size} ranks, but {gpus} (nvidia-smi): "
            f"start one rank per GPU, or set {SHARES_GPU}=1 to rehearse with several ranks on a GPU"
        )
    if world.ranks_per_gpu == 1:
        return
    if world.local_world_size < world.world_size:
        nodes = f"but there are {world.world_size} ranks on several nodes"
        draft.problems.say(f"{SHARES_GPU}=1 shares the GPUs of one node, {nodes}: unset it")
    if draft.ds.value(_QUANTIZED) is True:
        why = f"DeepSpeed takes the GPUs of a node for its ranks, which share them ({SHARES_GPU})"
        draft.problems.add(_QUANTIZED, why, "set it to false to rehearse")
    draft.note(
        "shared_gpu",
        f"up to {world.ranks_per_gpu} ranks share a GPU ({SHARES_GPU}) and take turns: this "
        "is a rehearsal, whose times, MFU and links say nothing about the job's",
    )


RUNS = "runs"  # parent of new run folders


@dataclass(frozen=True)
class Room:
    """Disk space for a run's checkpoints and export, in bytes."""

    due: int
    """Checkpoints that the run adds: those that it keeps, and the one being written."""
    each: int
    export: int

    @classmethod
    def of(cls, plan: Plan, steps: Sequence[int]) -> Room | None:
        """Return the room that a run needs in addition to its checkpoints, of these `steps`; None
        if their size is unknown.
        """
        if plan.estimate is None:
            return None
        save, inputs = plan.config.save, plan.estimate.inputs
        most = save.keep + save.keep_best + 1
        if plan.steps is not None:
            most += plan.steps // save.keep_every if save.keep_every else 0
            left = plan.steps - max(steps, default=0)
            saves = math.ceil(left / save.every) if save.every else 1
            most = min(most, len(steps) + saves)
        trained = inputs.trained if inputs.adapters else inputs.parameters
        export = inputs.element_bytes * trained if save.export else 0
        return cls(max(1, most - len(steps)), plan.estimate.checkpoint_bytes, export)

    @property
    def bytes(self) -> int:
        """Bytes of all of them."""
        return self.due * self.each + self.export

    @property
    def text(self) -> str:
        """The room as text."""
        checkpoints = f"{self.due} checkpoint{'s' if self.due > 1 else ''} of {as_size(self.each)}"
        export = f" and {as_size(self.export)} of the export" if self.export else ""
        return f"{checkpoints}{export}"


def room_remedy(plan: Plan, room: Room, free: float) -> str:
    """Return what to do where only `free` bytes are free."""
    keep, helps = plan.config.save.keep, 2 * room.each + room.export <= free
    fewer = f", or lower save.keep (now {keep})" if keep > 1 and helps else ""
    return (
        f"free space, choose another run.dir{fewer}: a save writes the new checkpoint before it "
        "removes an old one"
    )


def short_of_disk(plan: Plan, steps: Sequence[int]) -> tuple[str, bool]:
    """Return this machine's shortage of disk for the run, "" if there is none, and True if it has
    no room for two checkpoints, or the only one. `steps`: those of the run's checkpoints.
    """
    path = Path(plan.config.run.dir or RUNS)
    folder = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
    room = Room.of(plan, steps)
    free = shutil.disk_usage(folder).free
    if room is None or room.bytes <= free:
        return "", False
    text = f"room is needed for {room.text}, but {as_size(free)} are free in {folder}"
    return f"{text}: {room_remedy(plan, room, free)}", min(2, room.due) * room.each > free


_KEY = "zero_optimization.offload_optimizer"
OPTIMIZER_FOLDER = "optimizer"
"""Prefix of the folders in nvme_path, one per process."""
_USES_AIO = "#include <libaio.h>\nint main() { io_context_t c = 0; return io_setup(1, &c); }\n"


def swap_problems(plan: Plan) -> list[str]:
    """Return this machine's problems with offloading to NVMe; empty if the run does not use it."""
    if offloaded_to(plan.deepspeed, "optimizer") != "nvme":
        return []
    folder = Path(str(literal(plan.deepspeed, f"{_KEY}.nvme_path")))
    needed = plan.estimate.nvme_bytes_per_node if plan.estimate else 0
    return [*_wrong_folder(folder, needed), *libaio_problems()]


def remove_left_swap(plan: Plan) -> None:
    """Remove the optimizer's files that killed runs left on this machine's drive."""
    if offloaded_to(plan.deepspeed, "optimizer") == "nvme":
        folder = Path(str(literal(plan.deepspeed, f"{_KEY}.nvme_path")))
        remove_left_over(folder, OPTIMIZER_FOLDER)


def _wrong_folder(folder: Path, needed: int) -> list[str]:
    elsewhere = f"set ds.{_KEY}.nvme_path to a folder on a local drive"
    try:
        is_folder = folder.is_dir()
    except OSError:  # no permission, or a name that is too long
        is_folder = False
    if not is_folder:
        return [f"{_KEY}.nvme_path is {folder}, which is not a folder here: {elsewhere}"]
    if not os.access(folder, os.W_OK | os.X_OK):
        return [f"{_KEY}.nvme_path is {folder}, where this user cannot write: {elsewhere}"]
    free = shutil.disk_usage(folder).free
    if needed <= free:
        return []
    return [
        f"the optimizer's files need {needed / GIB:.2f} GiB in {folder}, but {free / GIB:.2f} GiB "
        f"are free ({_KEY}.nvme_path): free space, use more nodes, or {elsewhere}"
    ]


def libaio_problems() -> list[str]:
    """Return a problem if libaio, which DeepSpeed's NVMe code needs to build, is missing."""
    command = [os.environ.get("CXX", "c++"), "-x", "c++", "-", "-laio", "-o", os.devnull]
    try:
        done = subprocess.run(command, input=_USES_AIO, capture_output=True, text=True)
    except OSError:
        return [f"{_KEY}.device is 'nvme', which needs a C++ compiler: apt install g++"]
    if done.returncode == 0:
        return []
    return [
        f"{_KEY}.device is 'nvme', which needs libaio and its header: apt install libaio-dev, or "
        "dnf install libaio-devel; or offload to the cpu"
    ]
