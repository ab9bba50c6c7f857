"""The trials of a sweep and their states: an Optuna study in a journal file, which survives kills.

All trials are in the journal from the beginning, waiting. Several processes may share it, even on
several nodes.
"""

from __future__ import annotations

import fcntl
import math
import warnings
from pathlib import Path
from typing import Any

import optuna
from optuna.pruners import BasePruner, NopPruner, SuccessiveHalvingPruner
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from tools.sweeps.cost import Record, Used
from tools.sweeps.space import Choice, Dimension, Values
from tools.sweeps.spec import Sweep

JOURNAL = "study.journal"
_NAME = "sweep"
_FIXED = "fixed_params"  # Optuna's attribute of values that are decided
_WHOLE = 1000  # progress is counted in thousandths of a run: trials may differ in steps
_STARTUP = (3, 10)  # random trials before TPE has something to learn from, at least and at most
_STATES = {
    TrialState.WAITING: "waiting",
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "done",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}


class Study:
    """A sweep's trials."""

    def __init__(self, sweep: Sweep) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        self._sweep = sweep
        self._storage = JournalStorage(JournalFileBackend(str(sweep.folder / JOURNAL)))
        self._study = optuna.create_study(
            storage=self._storage, study_name=_NAME, load_if_exists=True, pruner=_pruner(sweep)
        )
        existing = len(self._trials())
        for number, choice in enumerate(sweep.choices()):
            if number >= existing:
                self._enqueue(number, choice or {})

    def records(self) -> list[Record]:
        """Return all trials, by number."""
        return [self._record(number, trial) for number, trial in self._trials().items()]

    def take(self, number: int) -> OpenTrial:
        """Start a trial, or resume an interrupted one; its values are decided now."""
        frozen, seeds = self._trials()[number], self._sweep.seeds
        if frozen.state == TrialState.WAITING:
            self._storage.set_trial_state_values(frozen._trial_id, TrialState.RUNNING)
        fewest, most = _STARTUP
        # The same history gives the same values: each setting has a random state of its own.
        self._study.sampler = optuna.samplers.TPESampler(
            seed=self._sweep.settings.seed + number // len(seeds),
            n_startup_trials=len(seeds)
            * max(fewest, min(most, self._sweep.number_of_settings // 3)),
        )
        first = Trial(self._study, self._first_of(number)._trial_id)
        # Of a setting's trials, whichever starts first decides for all.
        with (self._sweep.folder / "lock.values").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            trial, choice = first, self._values(first)
        if first._trial_id != frozen._trial_id:
            self._storage.set_trial_system_attr(frozen._trial_id, _FIXED, first.params)
            trial = Trial(self._study, frozen._trial_id)
            self._values(trial)
        choice = self._sweep.with_seed(choice, seeds[number % len(seeds)])
        used = self._record(number, frozen).used
        return OpenTrial(self._study, trial, number, choice, used, first._trial_id)

    def _values(self, trial: Trial) -> Choice:
        """Return the values that the sampler, or the queue, decides."""
        return {key: _suggested(trial, key, values) for key, values in self._sweep.space.items()}

    def give_up(self, number: int) -> bool:
        """Record a trial as stopped if its setting was; return True if so."""
        first, trial = self._first_of(number), self._trials()[number]
        is_stopped = first.state == TrialState.PRUNED and not trial.state.is_finished()
        if is_stopped:
            self._storage.set_trial_user_attr(trial._trial_id, "reason", "stopped with its setting")
            self._storage.set_trial_state_values(trial._trial_id, TrialState.PRUNED)
        return is_stopped

    def put_back(self, number: int) -> None:
        """Put a trial that was taken back in the queue; it keeps its values."""
        trial_id = self._trials()[number]._trial_id
        self._storage.set_trial_state_values(trial_id, TrialState.WAITING)

    def retry(self) -> list[int]:
        """Queue failed trials again with the same values; return their numbers."""
        failed = [n for n, trial in self._trials().items() if trial.state == TrialState.FAIL]
        for number in failed:
            self._enqueue(number, self._record(number, self._trials()[number]).choice)
        return failed

    def _enqueue(self, number: int, choice: Choice) -> None:
        space = self._sweep.space
        params = {key: _as_param(choice[key], space[key]) for key in space if key in choice}
        self._study.enqueue_trial(params, user_attrs={"number": number})

    def _first_of(self, number: int) -> FrozenTrial:
        """Return the trial of a setting's first seed."""
        return self._trials()[number - number % len(self._sweep.seeds)]

    def _trials(self) -> dict[int, FrozenTrial]:
        """Return the newest entry of every trial, by its number in the sweep."""
        newest = {
            trial.user_attrs["number"]: trial
            for trial in self._study.get_trials(deepcopy=False)
            if "number" in trial.user_attrs
        }
        return {number: newest[number] for number in sorted(newest)}

    def _record(self, number: int, trial: FrozenTrial) -> Record:
        params = trial.params or trial.system_attrs.get(_FIXED, {})
        space, state, seeds = self._sweep.space, _STATES[trial.state], self._sweep.seeds
        choice = {
            key: _as_text(params[key], values) for key, values in space.items() if key in params
        }
        value = trial.value
        if state != "done":
            value = trial.intermediate_values.get(trial.last_step, math.inf)
        assert value is not None
        attributes = trial.user_attrs
        return Record(
            number,
            "diverged" if value == math.inf and state == "done" else state,
            self._sweep.with_seed(choice, seeds[number % len(seeds)]),
            value,
            Used(*attributes.get("used", ())),
            attributes.get("reason", ""),
        )


class OpenTrial:
    """A trial that this process runs."""

    def __init__(
        self,
        study: optuna.Study,
        trial: Trial,
        number: int,
        choice: Choice,
        used: Used,
        first_id: int,
    ) -> None:
        self.number, self.choice = number, choice
        self.used_before = used  # what earlier attempts at it took
        self._study, self._trial, self._first_id = study, trial, first_id
        self._reported = {*study._storage.get_trial(trial._trial_id).intermediate_values}

    def report(self, share: float, value: float) -> bool:
        """Report the metric after a share of the run; return True if the trial must be stopped.

        The first seed of a setting is compared with the first seeds of others, and decides for all.
        """
        place = round(share * _WHOLE)
        if place in self._reported:  # by an earlier attempt
            return False
        self._reported.add(place)
        self._trial.report(value, place)
        if self._trial._trial_id == self._first_id:
            return self._trial.should_prune()
        first = self._study._storage.get_trial(self._first_id)
        return first.state == TrialState.PRUNED

    def note(self, used: Used) -> None:
        """Record what the trial has used so far."""
        self._trial.set_user_attr("used", [used.steps, used.tokens, used.hours])

    def end(self, state: str, used: Used, reason: str = "", value: float | None = None) -> None:
        """End the trial: done with its metric (infinite if it diverged), pruned or failed."""
        self.note(used)
        self._trial.set_user_attr("reason", reason)
        (ended,) = (of_optuna for of_optuna, name in _STATES.items() if name == state)
        self._study.tell(self._trial, value, ended)


def cut_torn_line(folder: Path) -> None:
    """Remove a line that a killed writer left half-written; call it only if nobody else writes."""
    path = folder / JOURNAL
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


def _pruner(sweep: Sweep) -> BasePruner:
    prune = sweep.settings.prune
    if prune is None:
        return NopPruner()
    return SuccessiveHalvingPruner(
        min_resource=max(1, round(prune.after * _WHOLE)), reduction_factor=prune.factor
    )


def _suggested(trial: Trial, key: str, dimension: Dimension) -> str:
    """Return the text of one of the values."""
    if isinstance(dimension, Values):
        value: Any = trial.suggest_categorical(key, dimension.values)
    elif dimension.is_whole:
        low, high = round(dimension.from_), round(dimension.to)
        value = trial.suggest_int(key, low, high, log=dimension.log)
    else:
        value = trial.suggest_float(key, dimension.from_, dimension.to, log=dimension.log)
    return _as_text(value, dimension)


def _as_text(value: Any, dimension: Dimension) -> str:
    return str(value) if isinstance(dimension, Values) else dimension.text(value)


def _as_param(text: str, dimension: Dimension) -> str | float:
    if isinstance(dimension, Values):
        return text
    return int(text) if dimension.is_whole else float(text)
