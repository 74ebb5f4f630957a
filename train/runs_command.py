"""python -m train list, pause, resume, stop, delete, again: runs from outside, without waiting for torch."""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from train import launch
from train.runs import Run, RunError
from train.state import find_run, look, look_at_all
from vit.files import runs_folder

_ACTS = {
    "pause": (launch.pause, "Let a run wait after its step; it keeps its memory, and a checkpoint."),
    "resume": (
        launch.resume,
        "Let a paused run go on, or go on in the background with one that ended early.",
    ),
    "stop": (launch.stop, "End a run after its step; it keeps a checkpoint."),
    "delete": (launch.delete, "Delete a run that is not at work, with its checkpoints."),
    "again": (launch.again, "Start a new run in the background with the settings of this one."),
}


def add_run_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add these commands; `command` as in train/__main__.py."""
    listed = command("list", "All runs under the runs folder, and what each is doing.", _list, "list")
    listed.add_argument("--json", action="store_true", help="one JSON object a line")
    for name, (_, what) in _ACTS.items():
        added = command(name, what, _act, f"{name} demo-1", f"{name} runs/demo-1")
        added.add_argument("run", metavar="RUN", help="a run's name as `list` shows it, or its folder")
        if name == "stop":
            added.add_argument("--kill", action="store_true", help="end its process at once, if it hangs")


def _list(args: argparse.Namespace, _: list[str]) -> int:
    seen = look_at_all()
    if args.json:
        for each in seen:
            facts = {"name": each.name, "state": each.word, "reason": each.reason, "wish": each.wish}
            print(json.dumps(facts | {"status": asdict(each.status)}))
        return 0
    if not seen:
        print(f"There is no run under {runs_folder()} yet. Start one: python -m train run --preset demo")
    width = max((len(each.name) for each in seen), default=0)
    for each in seen:
        status = each.status
        judged = f"{status.val_accuracy:6.1%}" if status.val_accuracy is not None else " " * 6
        line = f"{each.name:{width}}  {each.word:8}  {status.progress:4.0%}  step {status.step:>7,}  {judged}"
        print(f"{line}  {each.reason or each.next}")
    return 0


def _act(args: argparse.Namespace, _: list[str]) -> int:
    run = _named(args.run)
    name = run.root.name or run.name  # known now: a deleted folder has none
    if args.command == "stop" and args.kill:
        launch.kill(run)
        print(f"The process of {name} was ended.")
        return 0
    found = _ACTS[args.command][0](run)
    if args.command == "delete":
        print(f"{name} is deleted.")
        return 0
    seen = look(found or run)
    print(f"{seen.name}: {seen.word}" + (f", {seen.reason}" if seen.reason else ""))
    return 0


def _named(text: str) -> Run:
    """A run by its name, or by its folder."""
    path = Path(text)
    if not text.strip():
        raise RunError("the name of the run is empty")
    if path.name == text:
        try:
            return find_run(text)
        except RunError:
            if not path.is_dir():
                raise
    run = Run(path)
    look(run)
    return run
