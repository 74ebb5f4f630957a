"""A run from its first step to its last: clocks, evaluations, checkpoints, guards, stop and pause.

    outcome = start(Run(Path("runs/mine")), preset("demo"), preset_name="demo")
    outcome = resume(Run(Path("runs/mine")))
    outcome.state                      # finished, stopped or failed; status.json says the same

The test set is never opened here: it is for `vit evaluate` and `train report`, at the end. (Of the bundled
samples, which happen to be test pictures, attention is filmed; nothing is decided by them.)
With `epochs` the number of steps is fixed, and a resumed run ends with the weights of one never touched, to
the bit, on the same CPU with as many threads. With `minutes` the share of that time which steps have taken
drives the schedule.
"""

import math
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import torch

from train import film
from train.card import checkpoint, record
from train.clock import Clock, in_words
from train.config import TrainConfig
from train.desk import Desk, require_new
from train.fit import fit_epochs
from train.learner import Learner, Machine, as_tensors
from train.memory import memory_bytes
from train.resuming import has_resume, load_resume, save_resume
from train.runs import (
    Run,
    RunError,
    append_line,
    append_metrics,
    cut_metrics,
    is_full_disk,
    last_status,
    read_config,
    read_metrics,
    write_json,
)
from train.seat import at_work
from train.signals import asked_to_stop
from train.workers import Workers
from vit.checkpoint import save
from vit.datasets import holdout_indices, load_pictures
from vit.download import DataError
from vit.files import folder_bytes
from vit.progress import Bar

MOST_ROLLBACKS = 3
RATE_AFTER_ROLLBACK = 0.5
EXPLODED = 4.0  # times the loss of guessing
TELLING_SECONDS = 0.5  # from one word on how far the pictures are to the next


class Failure(RuntimeError):
    """Why a run ended early; its text is one sentence for status.json."""


@dataclass(frozen=True)
class Outcome:
    state: str  # "finished", "stopped" or "failed"
    reason: str
    step: int
    seconds: float  # spent in steps
    val_accuracy: float | None  # of the last evaluation


def start(
    run: Run,
    config: TrainConfig,
    *,
    preset_name: str = "",
    command: str = "",
    say: Callable[[str], None] = print,
    is_at_work: bool = False,
) -> Outcome:
    """Begin a run in an empty or new directory. RunError where one is there already, or is at work.

    `is_at_work`: the caller is inside `train.seat.at_work(run)`.
    """
    began = (
        time.perf_counter()
    )  # to open the pictures may take long, and counts where minutes are to hold all
    workers = Workers.start(config.device)
    if workers.is_first:
        require_new(run)
    if Path(config.data).is_dir() and run.root.resolve().is_relative_to(Path(config.data).resolve()):
        raise RunError(f"{run.root} lies inside the pictures of {config.data}: choose another --out")
    with Bar() as bar:  # before anything is written: most mistakes are made here
        load_pictures(config.data, "train", progress=_opening(run, bar) if workers.is_first else None)
    told = {"preset_name": preset_name, "command": command, "is_at_work": is_at_work}
    return _work(run, config, workers, began, **told, say=say)


def resume(run: Run, *, say: Callable[[str], None] = print, is_at_work: bool = False) -> Outcome:
    """Go on with a run from its last whole checkpoint, with its own settings. RunError where it cannot."""
    kept = read_config(run)
    unknown = sorted(set(kept["config"]) - {field.name for field in fields(TrainConfig)})
    try:
        if unknown:
            raise ValueError(", ".join(unknown))
        config = TrainConfig(**kept["config"])
    except ValueError as error:
        raise RunError(f"{run.config_file} holds settings unknown to this version: {error}") from error
    began, workers = time.perf_counter(), Workers.start(config.device)
    told = {"preset_name": kept.get("preset", ""), "command": kept.get("command", "")}
    told |= {"is_at_work": is_at_work}
    return _work(run, config, workers, began, **told, say=say, kept=kept)


def _work(run, config, workers, began, *, preset_name, command, say, is_at_work, kept=None) -> Outcome:
    """`kept` is config.json of a run to go on with; None for a new one."""

    def session(desk: Desk | None, tell: Callable[[str], None]) -> _Session:
        return _Session(run, config, workers, desk, tell, preset_name, command, began)

    if not workers.is_first:
        try:
            return session(None, lambda line: None).go(kept)
        finally:
            workers.end()
    try:
        with nullcontext() if is_at_work else at_work(run):
            if kept is None:
                require_new(run)  # another may have begun and ended since it was first asked
            desk = Desk(run)

            def tell(line: str) -> None:
                say(line)
                if desk.is_ours:
                    append_line(run.log_file, f"{datetime.now():%Y-%m-%d %H:%M:%S}  {line}")

            return session(desk, tell).go(kept)
    finally:
        workers.end()


def _opening(run: Run, bar: Bar) -> Callable[[int, int, str], None]:
    """Tells those who watch how far the pictures are, and follows their wish to stop."""
    shown = time.monotonic()

    def progress(done: int, total: int, what: str) -> None:
        nonlocal shown
        bar(done, total, what)
        if time.monotonic() - shown < TELLING_SECONDS:
            return
        shown, status = time.monotonic(), last_status(run)
        if status is None or status.state != "waiting":
            return  # nobody asked for it through the page
        if run.stop_file.exists():
            raise RunError("stopped as asked, before it began")
        far = f"{done / total:.0%}" if total else f"{done:,}"
        write_json(run.status_file, asdict(replace(status, heartbeat=time.time(), reason=f"{what}: {far}")))

    return progress


class _Session:
    """One process's work on a run, from opening the data to the last word."""

    def __init__(self, run, config, workers, desk, say, preset_name, command, began):
        self.run, self.config, self.workers, self.desk, self.say = run, config, workers, desk, say
        self.preset_name, self.command = preset_name, command
        self.began = began
        self.step, self.seconds, self.rollbacks = 0, 0.0, 0
        self.folder_bytes = 0
        self.best: tuple[float, int] | None = None  # accuracy, step
        self.val_accuracy: float | None = None
        self.board = None
        self.why_stopped = "stopped as asked"

    # ---- from the outside ----

    def go(self, kept: dict | None) -> Outcome:
        """Everything, and the state that it ends in: errors that people can meet become its reason."""
        try:
            with asked_to_stop(self.desk, alone=self.workers.count == 1):
                self._open(kept)
                self._train()
            state, reason = ("stopped", self.why_stopped) if self.stopped else ("finished", "")
        except (Failure, RunError, DataError, ValueError) as error:
            state, reason = "failed", str(error)
        except torch.OutOfMemoryError:
            state = "failed"
            reason = f"the GPU ran out of memory at step {self.step}: a smaller --batch needs less of it"
        except OSError as error:
            what = (
                "the disk is full" if is_full_disk(error) else f"a file cannot be read or written ({error})"
            )
            unharmed = "; the last checkpoint is unharmed: resume to go on from it"
            state, reason = "failed", what + (unharmed if has_resume(self.run) else "")
        except KeyboardInterrupt:
            state, reason = "stopped", "interrupted; what came after the last checkpoint is lost"
        except RuntimeError:
            if self.workers.count == 1:
                raise  # a fault of ours: it is told below, and its traceback stands in the terminal
            traceback.print_exc()  # it may as well be a fault of ours
            state, reason = (
                "failed",
                f"a worker was lost at step {self.step}; resume to go on from before",
            )
        finally:
            error = sys.exception()
            if error is not None:
                state, reason = "failed", f"an error in the trainer at step {self.step}: {error!r}"
            self._close(state, reason)
        return Outcome(state, reason, self.step, self.seconds, self.val_accuracy)

    def _close(self, state: str, reason: str) -> None:
        if not self.desk:
            return
        self.desk.close(state, reason)  # first: whoever watches the run reads this
        try:
            self.say(f"{state.capitalize()} at step {self.step:,}" + (f": {reason}" if reason else ""))
            if self.board:
                self.board.close()
        except OSError as error:
            print(f"The log of {self.run.root} cannot be written: {error}", file=sys.stderr)

    # ---- before the first step ----

    def _open(self, kept: dict | None) -> None:
        config = self.config
        pictures = load_pictures(config.data, "train")
        train, held = holdout_indices(pictures.labels, config.holdout, config.split_seed)
        if config.holdout and not len(held):
            raise Failure(f"{pictures.name} is too small to hold pictures out: bring more, or --holdout 0")
        self.pictures, self.held = pictures, held
        self.machine = Machine.here(config, self.workers)
        images, labels = as_tensors(pictures.images, pictures.labels, train)
        self.held_images, self.held_labels = as_tensors(pictures.images, pictures.labels, held)
        self.learner = Learner(config, self.machine, images, labels, len(pictures.class_names), self.workers)
        parameters = list(self.learner.model.parameters())
        counts = [sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)]
        if self.desk:
            self.say(f"Total parameters: {counts[0]:,}")
            self.say(f"Trained parameters: {counts[1]:,}")
            for left_out in pictures.left_out:
                self.say(f"Left out: {left_out}")
        if kept is None:
            if config.fit_epochs:
                self._fit()
            if self.desk:
                kept_facts = record(
                    self.learner, pictures, held, preset=self.preset_name, command=self.command
                )
                write_json(self.run.config_file, kept_facts)
        self.steps = self.learner.steps_for(self.config.epochs) if self.config.epochs else None
        if self.desk:
            self._open_film(kept)
        if kept is not None:
            self._pick_up(kept)
        if self.desk:
            self._describe(len(train))
            self._open_board()

    def _pick_up(self, kept: dict) -> None:
        facts = kept["data"]
        if facts.get("digest") != self.pictures.digest:
            raise Failure(f"the pictures of {self.config.data} are not those that this run began with")
        was, now = kept["resolved"], asdict(self.machine)
        differs = [name for name, value in now.items() if was.get(name) != value]
        if differs and self.desk:
            changes = ", ".join(f"{name} was {was.get(name)}, is {now[name]}" for name in differs)
            self.say(f"Not to the bit as it would have been: {changes}")
        if (facts.get("pictures"), facts.get("held_out")) != (len(self.learner.images), len(self.held)):
            raise Failure("other pictures would be held out than when this run began: its settings changed")
        if has_resume(self.run):
            self._load()
        elif read_metrics(self.run):
            raise Failure(f"{self.run.root} has nothing to go on from: its resume files are gone")
        # else it was killed before its first checkpoint: nothing was learnt yet
        if self.desk:
            self.say(f"Resuming from step {self.step:,}")

    def _load(self) -> None:
        """Back to the last whole checkpoint, in memory and in the files that grow."""
        tensors, facts, remark = load_resume(self.run)
        self.learner.load(tensors)
        self.step, self.seconds, self.rollbacks = facts["step"], facts["seconds"], facts["rollbacks"]
        self.best = tuple(facts["best"]) if facts["best"] else None
        self.val_accuracy = facts["val_accuracy"]
        if self.desk:
            if remark:
                self.say(f"Fell back to the checkpoint before: {remark}")
            cut_metrics(self.run, self.step)
            self.film = film.cut(self.film, self.step)
            film.save(self.film, self.run.film_file)
            self._show()

    def _describe(self, trained_on: int) -> None:
        length = f"{self.config.minutes:g} min of steps"
        if self.steps:
            length = f"{self.steps:,} {'step' if self.steps == 1 else 'steps'}"
        self.say(
            f"{self.pictures.name}: {trained_on:,} pictures to learn from, {len(self.held):,} held out; "
            f"{length} of {self.learner.batch} pictures on {self.machine.device}, {self.machine.precision}, "
            f"threads {self.machine.threads}, seed {self.config.seed}"
        )

    def _open_film(self, kept: dict | None) -> None:
        images, labels = film.probes(self.pictures, self.held if len(self.held) else None)
        self.film = film.empty(images, labels, self.pictures.class_names)
        if kept is not None and self.run.film_file.is_file():
            try:
                found = film.load(self.run.film_file)
                if not film.same_pictures(found, self.film):
                    raise ValueError("The recording of attention is that of another run.")
                self.film = found
            except ValueError as error:
                self.say(f"{error} A new one begins here.")

    def _open_board(self) -> None:
        if find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(self.run.root / "tensorboard"), purge_step=self.step + 1)

    def _fit(self) -> None:
        seconds = 60 * self.config.minutes - (time.perf_counter() - self.began)
        epochs, said = fit_epochs(self.learner, self.held_images, self.held_labels, seconds)
        self.config = replace(self.config, epochs=epochs, minutes=0.0, fit_epochs=False)
        self.learner.config = self.config
        self.say(said)

    # ---- the steps ----

    def _train(self) -> None:
        config, learner = self.config, self.learner
        every = config.keep_every * learner.steps_per_epoch
        self.stopped, self.saved_step = False, -1
        self.checkpoint = checkpoint(
            learner, self.pictures, self.held, preset=self.preset_name, command=self.command
        )
        self.losses, self.window_steps = torch.zeros((), device=self.machine.device), 0
        self.trains_since, self.seconds_before, self.paused_seconds = time.perf_counter(), self.seconds, 0.0
        if self.desk:
            self.desk.tell(state="running", device=self.machine.device)
            if self.step == 0:
                self._film()
                self._save()
        places = film.snapshot_progress(config.snapshots)
        clock = Clock(self.seconds, self.machine.kind)
        window_began, before = clock.seconds(), self.workers.agree(self._progress(clock.seconds()))[0]
        while before < 1:  # as the last step saw it: a run ends with an evaluation, whatever the clock says
            self.stopped = self._stop_asked(clock)
            if self.stopped:
                break
            middle = (self.step + 0.5) / self.steps if self.steps else before
            rate = RATE_AFTER_ROLLBACK**self.rollbacks
            self.losses += learner.step(self.step, middle, rate)
            self.window_steps += 1
            self.step += 1
            after = self.workers.agree(self._progress(clock.seconds()))[0]
            evaluate = after >= 1 or _passed(before, after, config.evaluations)
            snapshot = any(before < place <= after for place in places)
            keep = bool(every) and self.step // every > (self.step - 1) // every
            before = after
            save_now = evaluate or keep or self.step % config.checkpoint_steps == 0
            if not (save_now or snapshot or self.step % config.log_steps == 0):
                continue
            loss = self.losses.item() / self.window_steps
            clock.pause()
            if self.desk:
                self.desk.require_ours()
            trouble = self._trouble(loss)
            if trouble:
                self._roll_back(trouble, learner.schedule.lr_scale(middle) * rate)
                clock.spent = self.seconds
                before = self._progress(self.seconds)
            else:
                self.seconds = clock.seconds()
                if self.desk:
                    spent = max(self.seconds - window_began, 1e-9)
                    self._log(loss, middle, rate, after, self.window_steps * learner.batch / spent, evaluate)
                    if snapshot:
                        self._film()
                    if keep:
                        self._keep(f"epoch-{round(self.step / learner.steps_per_epoch):04d}")
                    if save_now:
                        self._save()
            clock.resume()
            self.losses.zero_()
            self.window_steps, window_began = 0, clock.seconds()
        clock.pause()
        self.seconds = clock.seconds()
        self._save_between()

    def _progress(self, seconds: float) -> float:
        return self.step / self.steps if self.steps else min(1.0, seconds / (60 * self.config.minutes))

    def _stop_asked(self, clock: Clock) -> bool:
        """Whether the run is to stop here; waits here while it is paused."""
        if self.desk and self.desk.pause_asked and not self.desk.stop_asked:
            clock.pause()
            self.seconds = clock.seconds()
            self._save_between()
            self.desk.tell(state="paused", images_per_second=0.0)
            self.say(f"Paused at step {self.step:,}")
            since = time.perf_counter()
            while self.desk.pause_asked and not self.desk.stop_asked and not self._limit_reached():
                time.sleep(0.1)
            self.paused_seconds += time.perf_counter() - since
            self.desk.tell(state="running")
            clock.resume()
        stop = bool(self.desk and (self.desk.stop_asked or self._limit_reached()))
        return bool(self.workers.agree(float(stop))[0])

    def _limit_reached(self) -> bool:
        """Whether the run has taken the time, or its folder the room, that its settings allow."""
        minutes, most_mb = self.config.stop_minutes, self.config.stop_mb
        if minutes and time.perf_counter() - self.began > 60 * minutes:
            self.why_stopped = f"stopped after {minutes:g} min, as its settings say"
        elif most_mb and self.folder_bytes > most_mb * 1e6:
            self.why_stopped = f"stopped at {self.folder_bytes / 1e6:,.0f} MB, as its settings say"
        else:
            return False
        return True

    def _trouble(self, loss: float) -> str:
        """What is wrong with the loss or with the weights that the last step left; "" if nothing is."""
        if not math.isfinite(loss):
            return "the loss was not a number"
        if loss > EXPLODED * math.log(self.learner.num_classes):
            return f"the loss was {loss:.3g}"
        finite = torch.stack([p.detach().isfinite().all() for p in self.learner.model.parameters()]).all()
        return "" if finite.item() else "a weight was not a number"  # the next loss would be none either

    def _roll_back(self, trouble: str, rate: float) -> None:
        broken, rollbacks = self.step, self.rollbacks
        if rollbacks == MOST_ROLLBACKS:
            raise Failure(
                f"{trouble} at step {broken} at {rate:.3g} of the learning rate, after going back "
                f"{MOST_ROLLBACKS} times: try a lower --lr and --muon-lr, or --clip 1"
            )
        self._load()
        self.rollbacks = rollbacks + 1
        self.workers.agree(0.0)  # all have read before the first writes
        if self.desk:
            self.say(
                f"{trouble.capitalize()} at step {broken:,}: back to step {self.step:,}, at "
                f"{RATE_AFTER_ROLLBACK**self.rollbacks:g} of the learning rate"
            )
            self._save()  # so that a crash from here on does not forget the lower rate

    def _log(self, loss, progress, rate, after, images_per_second, evaluate) -> None:
        learner = self.learner
        epoch = self.step / learner.steps_per_epoch
        lr = self.config.lr * learner.schedule.lr_scale(progress) * rate
        line = {
            "step": self.step, "epoch": round(epoch, 4), "seconds": round(self.seconds, 3),
            "loss": round(loss, 6), "lr": lr, "images_per_second": round(images_per_second, 2),
        }  # fmt: skip
        if evaluate and len(self.held):
            self.desk.tell(reason="classifying the held-out pictures")
            self.val_accuracy, val_loss = learner.evaluate(self.held_images, self.held_labels)
            self.desk.tell(reason="")
            line |= {"val_accuracy": self.val_accuracy, "val_loss": round(val_loss, 6)}
            if self.best is None or self.val_accuracy > self.best[0]:
                self.best = (self.val_accuracy, self.step)
                self._keep("best")
        append_metrics(self.run, line)
        left = self._seconds_left(after)
        self._show(images_per_second=images_per_second, seconds_left=left)
        if self.board:
            for name in ("loss", "lr", "images_per_second", "val_accuracy", "val_loss"):
                if name in line:
                    self.board.add_scalar(name, line[name], self.step)
        if evaluate:
            judged = f", {self.val_accuracy:.2%} of the held-out pictures right" if len(self.held) else ""
            self.say(
                f"{after:4.0%}  step {self.step:,}, epoch {epoch:.2f}: loss {loss:.4f}{judged}, "
                f"{images_per_second:,.0f} images/s, {in_words(left)} left"
            )

    def _seconds_left(self, progress: float) -> float:
        """By the clock: evaluations, checkpoints and films will take their share as they have so far."""
        now, in_steps = time.perf_counter(), self.seconds - self.seconds_before
        by_clock = now - self.trains_since - self.paused_seconds
        left = self.seconds * (1 - progress) / progress * max(1.0, by_clock / in_steps if in_steps else 1.0)
        if self.config.stop_minutes:
            left = min(left, max(0.0, 60 * self.config.stop_minutes - (now - self.began)))
        return left

    def _show(self, **changes) -> None:
        """Where the run has come to, in its status."""
        self.desk.tell(
            step=self.step, epoch=self.step / self.learner.steps_per_epoch,
            progress=self._progress(self.seconds), seconds=self.seconds,
            val_accuracy=self.val_accuracy, best_accuracy=self.best and self.best[0],
            best_step=self.best and self.best[1], memory_bytes=memory_bytes(self.machine.device), **changes,
        )  # fmt: skip

    def _film(self) -> None:
        learner = self.learner
        self.film = film.record(self.film, learner.best_model, self.step, learner.mean, learner.std)
        film.save(self.film, self.run.film_file)

    # ---- checkpoints ----

    def _save(self) -> None:
        """What people look into, then what the run goes on from: killed in between, it writes both again."""
        if not self.desk:
            return
        self.desk.require_ours()
        facts = {
            "step": self.step, "seconds": self.seconds, "rollbacks": self.rollbacks, "best": self.best,
            "val_accuracy": self.val_accuracy,
        }  # fmt: skip
        self._keep("last")
        save_resume(self.run, self.learner.tensors(), facts)
        if self.config.stop_mb:
            self.folder_bytes = folder_bytes(self.run.root)
        self.saved_step = self.step

    def _save_between(self) -> None:
        """Where a run is paused or stopped, unless its checkpoint is of this step or it is broken."""
        if self.saved_step != self.step and not self._trouble(self.losses.item() / max(self.window_steps, 1)):
            self._save()
            if self.desk:
                self._show()

    def _keep(self, name: str) -> None:
        facts = {
            "step": self.step,
            "epochs": round(self.step / self.learner.steps_per_epoch, 2),
            "date": datetime.now(UTC).date().isoformat(),
        }
        if self.val_accuracy is not None:
            facts["val_accuracy"] = self.val_accuracy
        provenance = dict(self.checkpoint.provenance) | facts
        known = replace(self.checkpoint, provenance=provenance)
        save(self.learner.best_model, known, self.run.checkpoint(name))


def _passed(before: float, after: float, count: int) -> bool:
    """Whether one of `count` even places of a run lies between."""
    return math.floor(after * count + 1e-9) > math.floor(before * count + 1e-9)
