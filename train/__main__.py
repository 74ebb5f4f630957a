"""python -m train: train, report, measure.

python -m train run --preset demo
python -m train run --preset fast --minutes 10 --out runs/quick
python -m train run --resume --out runs/quick
"""

import argparse
import shlex
import sys
from dataclasses import fields
from datetime import datetime
from pathlib import Path

from train.config import EXPECTED, PRESETS, TrainConfig, preset
from train.runs import Run, RunError
from train.workers import leave
from vit.arguments import Parser
from vit.checkpoint import runs_folder
from vit.device import pick_device
from vit.download import DataError


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
    presets = "; ".join(f"{name}: {what}" for name, what in EXPECTED.items())
    add = run.add_argument
    add("--preset", choices=tuple(PRESETS), help=f"where the settings start; default: fast. {presets}")
    add("--out", metavar="RUN", help="the run's folder; default: a new one under the runs folder")
    add("--resume", action="store_true", help="go on with the run in --out, with its own settings")
    group = run.add_argument_group("settings (each overrides the preset's; shown: the default of `fast`)")
    for field in fields(TrainConfig):
        group.add_argument("--" + field.name.replace("_", "-"), dest=f"set_{field.name}", **_option(field))

    report = command("report", "Write one HTML page about a run.", _report, "report runs/quick")
    report.add_argument("run", metavar="RUN", type=Path)
    report.add_argument("--out", metavar="FILE.html", type=Path, help="default: RUN/report.html")
    report.add_argument("--data", metavar="DIR", help="folder with the pictures; default: as the run used")
    report.add_argument("--device", metavar="D", help="cuda, mps or cpu; default: the first of these")

    bench = command("bench", "Images per second of training steps, and the machine's limit.", _bench, "bench")
    bench.add_argument("--rounds", type=int, default=7, metavar="N", help="default: 7")
    bench.add_argument("--json", action="store_true", help="one JSON object")
    return parser


def _option(field) -> dict:
    facts, default = field.metadata, getattr(PRESETS["fast"], field.name)
    shown = f"{facts['help'].replace('%', '%%')} (default: {default})"
    if field.type is bool:
        return {"action": argparse.BooleanOptionalAction, "default": None, "help": shown}
    if facts["choices"]:
        return {"choices": facts["choices"], "help": shown}
    return {"type": field.type, "metavar": field.type.__name__.upper(), "help": shown}


def _run(args: argparse.Namespace, words: list[str]) -> int:
    from train.loop import resume, start

    changes = {
        name.removeprefix("set_"): value
        for name, value in vars(args).items()
        if name.startswith("set_") and value is not None
    }
    if args.resume:
        if not args.out:
            raise RunError("--resume goes on with the run that --out names: name one")
        if changes or args.preset:
            names = ["preset"] * bool(args.preset) + list(changes)
            given = ", ".join("--" + name.replace("_", "-") for name in names)
            raise RunError(f"--resume keeps the run's own settings: leave out {given}")
        outcome = resume(Run(Path(args.out)), say=_say)
    else:
        name = args.preset or "fast"
        asked = changes.get("device", "auto")
        device = pick_device(None if asked == "auto" else asked).type
        if changes.get("data", "cifar10") not in ("cifar10", "patterns", ""):
            changes["data"] = str(Path(changes["data"]).expanduser().resolve())  # to be found from anywhere
        config = preset(name, device, **changes)
        out = Path(args.out) if args.out else runs_folder() / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
        command = shlex.join(["python", "-m", "train", *words])
        outcome = start(Run(out), config, preset_name=name, command=command, say=_say)
        if not args.out:
            _say(f"The run is in {out}")
    return 1 if outcome.state == "failed" else 0


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
    import json

    from train.bench import bench, bench_lines, bench_values
    from vit.progress import Bar

    with Bar() as progress:
        found = bench(args.rounds, progress=progress)
    print(json.dumps(bench_values(found)) if args.json else "\n".join(bench_lines(found)))
    return 0


if __name__ == "__main__":
    leave(main())
