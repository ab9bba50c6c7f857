"""Progress of a run: a live line on a terminal, plain lines elsewhere."""

import sys
import time
from typing import Any, TextIO

from harness import terminal

_KEPT_S = 600.0
_KEPT_SHARE = 0.05


class Progress:
    """A live line on a terminal, which is kept every 10 minutes, every 5 % of the steps and at each
    evaluation; elsewhere a plain line per metrics line.
    """

    def __init__(self, enabled: bool, stream: TextIO | None = None) -> None:
        self.total_steps = 0  # set once the data has been counted
        self.enabled = enabled
        self.stream = stream or sys.stdout
        self._average_s: float | None = None
        self._covered = 0  # columns of the live line
        self._kept_at = time.monotonic()
        self._kept_step: int | None = None

    def step(self, line: dict[str, Any]) -> None:
        """Show one metrics line and the remaining time."""
        parts = [f"step {line['step']:>{len(str(self.total_steps))}}/{self.total_steps}"]
        if "loss" in line:
            parts += self._training_parts(line)
        elif "eval_loss" in line:
            parts.append(_held_out(line))
        width = terminal.columns(self.stream)
        # The last column stays free: some terminals wrap there.
        while width is not None and len(parts) > 1 and len(" | ".join(parts)) >= width:
            parts.pop()
        self._write(" | ".join(parts), keep=width is None or self._stays(line))

    def _stays(self, line: dict[str, Any]) -> bool:
        if self._kept_step is None:
            self._kept_step = line["step"]
        since = line["step"] - self._kept_step
        is_due = since >= max(1.0, _KEPT_SHARE * self.total_steps)
        if not is_due and "eval_loss" not in line and time.monotonic() < self._kept_at + _KEPT_S:
            return False
        self._kept_at, self._kept_step = time.monotonic(), line["step"]
        return True

    def _training_parts(self, line: dict[str, Any]) -> list[str]:
        """Return the parts of a line, most important first."""
        seconds = line["step_time_s"]
        average = seconds if self._average_s is None else 0.9 * self._average_s + 0.1 * seconds
        self._average_s = average
        has_loss = line["loss"] is not None
        parts = [f"loss {line['loss']:.4f}" if has_loss else "no target"]
        if "eval_loss" in line:
            parts.append(_held_out(line))
        parts.append(f"{line['tokens_per_s']:,.0f} tokens/s")
        parts.append(f"{clock(average * (self.total_steps - line['step']))} left")
        if line["loss_scale"] != 1.0:
            parts.append(f"scale {line['loss_scale']:g} skipped {line['skipped_steps']}")
        if has_loss:
            parts.append(f"norm {line['grad_norm']:.3f}")
        if line["mfu"] is not None:
            parts.append(f"mfu {line['mfu']:.1%}")
        parts.append(f"lr {line['learning_rate']:.2e}")
        return parts

    def say(self, text: str) -> None:
        """Print a text permanently."""
        width = terminal.columns(self.stream) if self.enabled else None
        self._write(text if width is None else terminal.wrapped(text, width), keep=True)

    def _write(self, text: str, keep: bool) -> None:
        if not self.enabled:
            return
        width = terminal.columns(self.stream)
        if width is not None:
            first, *rest = text.split("\n")
            first = first.ljust(min(self._covered, width - 1))  # the window may be narrower now
            self._covered = 0 if keep else len(first)
            text = "\r" + "\n".join([first, *rest])
        try:
            self.stream.write(text + ("\n" if keep else ""))
            self.stream.flush()
        except OSError:  # closed terminal, or log on a full disk: the run folder has it all
            self.enabled = False
            terminal.silence(self.stream)


def _held_out(line: dict[str, Any]) -> str:
    accuracy = line.get("eval_preference_accuracy")
    of_pairs = "" if accuracy is None else f", {accuracy:.0%} of pairs right"
    return f"held-out loss {line['eval_loss']:.4f}{of_pairs}"


def clock(seconds: float) -> str:
    """Return seconds as "1:02:03" or "2:03"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
