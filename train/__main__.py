"""python -m train: train, watch, report, measure.

python -m train run --preset demo
python -m train run --preset fast --minutes 10 --out runs/quick
python -m train list
python -m train stop quick; python -m train resume quick
"""

import argparse
import json
import os
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from datetime import datetime
from pathlib import Path

from train import launch
from train.child import device_kind
from train.config import EXPECTED, PRESETS, TrainConfig, preset
from train.desk import require_new
from train.runs import Run, RunError, last_status, read_config, write_json
from train.runs_command import add_run_commands
from train.seat import at_work
from train.state import look
from vit.arguments import Parser
from vit.download import DataError
from vit.files import runs_folder


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0 finished or stopped as asked, 1 failed, 2 bad input."""
    parser = build_parser()
    words = sys.argv[1:] if arguments is None else arguments
    args = parser.parse_args(words)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        return args.work(args, words)
    except KeyboardInterrupt:
        print("Stopped; no half-written file was left.", file=sys.stderr)
        return 130
    except (RunError, DataError, ValueError, OSError) as error:
        print(f"{args.prog}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m train", description="Train a Vision Transformer, and see how it went.")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def command(name: str, summary: str, work, *examples: str) -> argparse.ArgumentParser:
        epilog = "examples:\n" + "\n".join(f"  python -m train {line}" for line in examples)
        added = commands.add_parser(name, help=summary, description=summary, epilog=epilog)
        added.set_defaults(command=name, prog=added.prog, work=work)
        return added

    run = command(
        "run", "Train a model, or go on training it.", _run,
        "run --preset demo",
        "run --preset fast --minutes 10 --out runs/quick",
        "run --preset tutorial --seed 1 --out runs/tutorial",
        "run --resume --out runs/tutorial",
    )  # fmt: skip
    add = run.add_argument
    add("--out", metavar="RUN", help="the run's folder; default: a new one under the runs folder")
    add("--resume", action="store_true", help="go on with the run in --out, with its own settings")
    _add_settings(run)
    add("--detach", action="store_true", help="start it and return: as the page does; `stop` ends it")

    estimated = command(
        "estimate", "What a run would cost: measures some seconds, writes nothing.", _estimate,
        "estimate --preset demo",
        "estimate --preset fast --embed-dim 512",
    )  # fmt: skip
    estimated.add_argument("--json", action="store_true", help="one JSON object")
    _add_settings(estimated)

    add_run_commands(command)

    report = command("report", "Write one HTML page about a run.", _report, "report runs/quick")
    report.add_argument("run", metavar="RUN", type=Path)
    report.add_argument("--out", metavar="FILE.html", type=Path, help="default: RUN/report.html")
    report.add_argument("--data", metavar="DIR", help="folder with the pictures; default: as the run used")
    report.add_argument("--device", metavar="D", help="cuda, mps or cpu; default: the first of these")

    bench = command("bench", "Images per second of training steps, and the machine's limit.", _bench, "bench")
    bench.add_argument("--rounds", type=int, default=7, metavar="N", help="default: 7")
    bench.add_argument("--json", action="store_true", help="one JSON object")
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """--preset, and a flag for each field of TrainConfig."""
    presets = "; ".join(f"{name}: {what}" for name, what in EXPECTED.items())
    start = f"where the settings start; default: fast. {presets}"
    parser.add_argument("--preset", choices=tuple(PRESETS), help=start)
    group = parser.add_argument_group("settings (each overrides the preset's; shown: the default of `fast`)")
    for field in fields(TrainConfig):
        group.add_argument("--" + field.name.replace("_", "-"), dest=f"set_{field.name}", **_option(field))


def _changes(args: argparse.Namespace) -> dict:
    """The settings that were given."""
    return {
        name.removeprefix("set_"): value
        for name, value in vars(args).items()
        if name.startswith("set_") and value is not None
    }


def _option(field) -> dict:
    facts, default = field.metadata, getattr(PRESETS["fast"], field.name)
    shown = f"{facts['help'].replace('%', '%%')} (default: {default})"
    if field.type is bool:
        return {"action": argparse.BooleanOptionalAction, "default": None, "help": shown}
    if facts["choices"]:
        return {"choices": facts["choices"], "help": shown}
    return {"type": field.type, "metavar": field.type.__name__.upper(), "help": shown}


def _run(args: argparse.Namespace, words: list[str]) -> int:
    changes = _changes(args)
    if args.resume:
        if not args.out:
            raise RunError("--resume goes on with the run that --out names: name one")
        if changes or args.preset:
            names = ["preset"] * bool(args.preset) + list(changes)
            given = ", ".join("--" + name.replace("_", "-") for name in names)
            raise RunError(f"--resume keeps the run's own settings: leave out {given}")
        if args.detach:
            raise RunError("--resume --detach is `python -m train resume RUN`")
        run = Run(Path(args.out))
        read_config(run)
        return _work(run, lambda: _resume(run))
    name = args.preset or "fast"
    if args.detach:
        return _detach(args, name, changes)
    out = Path(args.out) if args.out else runs_folder() / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    run, command = Run(out), shlex.join(["python", "-m", "train", *words])
    require_new(run)
    asked = last_status(run)
    if asked and asked.state == "waiting":  # whoever asked waits for a sign: the rest comes after it
        return _work(run, lambda: _start(run, name, _config(name, changes), command))
    config = _config(name, changes)
    outcome = _work(run, lambda: _start(run, name, config, command))
    if not args.out:
        _say(f"The run is in {out}")
    return outcome


def _work(run: Run, train: Callable[[], str]) -> int:
    """Train while nobody else does; where the page asked for it, it is told why that failed."""
    was_there = run.root.exists()
    if os.environ.get("RANK", "0") != "0":  # of several processes the first alone holds the run
        return _code(train())
    with at_work(run):
        before = last_status(run)
        is_asked = before is not None and before.state == "waiting"
        for stale in (run.stop_file, run.pause_file):
            if not is_asked:  # else they are meant for this process
                stale.unlink(missing_ok=True)
        if before is not None:  # whoever looks at the run learns now which process holds it
            now = replace(before, state="waiting", reason="", pid=os.getpid(), host=socket.gethostname())
            write_json(run.status_file, asdict(replace(now, heartbeat=time.time())))
        try:
            return _code(train())
        except (RunError, DataError, ValueError, OSError) as error:
            now = last_status(run)
            if is_asked and now is not None and now.state == "waiting":
                state = "stopped" if run.stop_file.exists() else "failed"
                write_json(
                    run.status_file, asdict(replace(now, state=state, reason=" ".join(str(error).split())))
                )
                run.stop_file.unlink(missing_ok=True)
            elif before is not None and now is not None and now.state == "waiting":
                write_json(run.status_file, asdict(before))  # it is as it was
            raise
        finally:
            if not was_there and [path.name for path in run.root.glob("*")] == [run.lock_file.name]:
                shutil.rmtree(run.root, ignore_errors=True)  # nothing began there


def _code(state: str) -> int:
    return 1 if state == "failed" else 0


def _resume(run: Run) -> str:
    from train.loop import resume

    return resume(run, say=_say, is_at_work=True).state


def _start(run: Run, name: str, config: TrainConfig, command: str) -> str:
    from train.loop import start

    return start(run, config, preset_name=name, command=command, say=_say, is_at_work=True).state


def _config(name: str, changes: dict) -> TrainConfig:
    kind = device_kind(changes.get("device", "auto"))
    if changes.get("data", "cifar10") not in ("cifar10", "patterns", ""):
        changes = changes | {"data": str(Path(changes["data"]).expanduser().resolve())}  # from anywhere
    return preset(name, kind, **changes)


def _detach(args: argparse.Namespace, preset_name: str, changes: dict) -> int:
    name = ""
    if args.out:
        out = Path(args.out)
        name = out.name
        if out.resolve().parent != runs_folder().resolve():
            raise RunError(
                f"a detached run lies directly under the runs folder: --out {runs_folder() / name}"
            )
    run = launch.start(_config(preset_name, changes), preset_name, name=name)
    _say(f"{run.name} is at work, as process {look(run).status.pid}, in {run.root}")
    _say(f"Watch it: python -m train list, or the page. End it: python -m train stop {run.name}")
    return 0


def _estimate(args: argparse.Namespace, _: list[str]) -> int:
    from train.estimate import estimate_lines, measure

    found = measure(_config(args.preset or "fast", _changes(args)))
    print(json.dumps(asdict(found)) if args.json else "\n".join(estimate_lines(found)))
    if found.problem:
        print(f"{args.prog}: {found.problem}", file=sys.stderr)
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


def _report(args: argparse.Namespace, _: list[str]) -> int:
    from train.report import write_report
    from vit.progress import Bar

    with Bar() as progress:
        out = write_report(args.run, args.out, data=args.data, device=args.device, progress=progress)
    print(f"{out}: {out.stat().st_size:,} bytes")
    return 0


def _bench(args: argparse.Namespace, _: list[str]) -> int:
    from train.bench import bench, bench_lines, bench_values
    from vit.progress import Bar

    with Bar() as progress:
        found = bench(args.rounds, progress=progress)
    print(json.dumps(bench_values(found)) if args.json else "\n".join(bench_lines(found)))
    return 0


if __name__ == "__main__":
    code = main()
    if "torch" not in sys.modules:
        sys.exit(code)
    from train.workers import leave

    leave(code)
