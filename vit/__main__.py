"""The command line: `python -m vit explain | probe | export | evaluate | score | atlas | ...`.

Exit codes: 0 all is well; 2 bad input, with one line on stderr; 130 stopped by Ctrl-C.

Only calling and printing is here; vit/arguments.py has the options. What takes seconds to import is imported
in the functions, so that --help and wrong arguments are answered at once.
"""

import argparse
import json
import os
import sys
import warnings
from dataclasses import asdict

from vit.arguments import build_parser
from vit.download import DataError

_PICTURES_WITH_TRUTH = 1000  # explained, where it is known where the objects are


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code. SystemExit for --help and wrong arguments, as argparse does."""
    parser = build_parser()
    args = parser.parse_args(argv)
    warnings.showwarning = lambda message, *_: print(f"{args.prog}: {message}", file=sys.stderr)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        return _COMMANDS[args.command](args)
    except KeyboardInterrupt:
        print("Stopped; no half-written file was left.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `| head` has seen enough; Python must not complain again when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        message = f"{where}{error.strerror or error}"
    except (ValueError, DataError) as error:
        message = str(error)
    print(f"{args.prog}: {' '.join(message.split())}", file=sys.stderr)
    return 2


# ---- the commands ---------------------------------------------------------------------------------------


def _explain(args: argparse.Namespace) -> int:
    if bool(args.pictures) == (args.data is not None):
        raise ValueError("name one or more pictures, or a data set with --data")
    if args.data is not None:
        _refuse_with_data(args)
    elif args.limit is not None:
        raise ValueError("--limit is for --data, not for single pictures")
    from dataclasses import fields

    from vit.explain_command import Settings, explain_pictures
    from vit.overlay import Style

    settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
    model, checkpoint = _load(args)
    if args.data is not None:
        return _explain_data(args, model, checkpoint, settings)
    failed = explain_pictures(
        args.pictures, model, checkpoint, settings,
        style=Style(args.style, args.strength, args.smooth), out=args.out, npz=args.npz, as_json=args.json,
    )  # fmt: skip
    return 2 if failed else 0


def _refuse_with_data(args: argparse.Namespace) -> None:
    if args.npz is None and not args.json:
        raise ValueError("--data needs --npz FILE.npz, --json, or both")
    if args.npz and args.npz.suffix.lower() != ".npz":
        raise ValueError(f"{args.npz} does not end in .npz")
    for name in (
        "method",
        "layer",
        "head",
        "token",
        "looked_at",
        "target",
        "versus",
        "style",
        "strength",
        "smooth",
        "mass",
        "scale",
        "fit",
        "out",
    ):
        if getattr(args, name) != args.default(name):
            raise ValueError(f"--{name.replace('_', '-')} is for single pictures, not for --data")


def _explain_data(args: argparse.Namespace, model, checkpoint, settings) -> int:
    from functools import partial

    import numpy as np

    from vit.explain_command import explain_data, first, prediction_line
    from vit.files import write_whole
    from vit.progress import Bar

    with Bar() as progress:
        pictures = first(_pictures(args, checkpoint, "test", progress), args.limit)
        arrays = explain_data(model, checkpoint, pictures, settings, progress=progress)
    if args.npz:
        write_whole(args.npz, partial(np.savez, **arrays))
    if args.json:
        odds = np.exp(arrays["logits"] - arrays["logits"].max(axis=1, keepdims=True))
        probabilities = (odds / odds.sum(axis=1, keepdims=True)).tolist()
        for name, row in zip(arrays["ids"].tolist(), probabilities, strict=True):
            print(prediction_line(name, row, checkpoint, as_json=True))
    else:
        print(f"{args.npz}: {len(pictures):,} pictures of {pictures.name}")
    return 0


def _probe(args: argparse.Namespace) -> int:
    from dataclasses import fields

    from vit.probe_command import Probe, probe, probe_lines

    asked = Probe(**{field.name: getattr(args, field.name) for field in fields(Probe)})
    found = probe(args.picture, *_load(args), asked)
    print(json.dumps(found) if args.json else "\n".join(probe_lines(found)))
    return 0


def _export(args: argparse.Namespace) -> int:
    if args.html is args.gif is args.webp is None:
        raise ValueError("name what to write: --html FILE.html, --gif FILE.gif or --webp FILE.webp")
    from dataclasses import fields

    from vit.explain_command import Settings
    from vit.export import TITLE
    from vit.export_command import export_pictures
    from vit.overlay import Style

    names = {field.name for field in fields(Settings)}
    failed = export_pictures(
        args.pictures,
        *_load(args),
        Settings(**{name: value for name, value in vars(args).items() if name in names}),
        style=Style(args.style, args.strength, args.smooth),
        title=TITLE if args.title is None else args.title,
        html=args.html, gif=args.gif, webp=args.webp, as_json=args.json,
    )  # fmt: skip
    return 2 if failed else 0


def _evaluate(args: argparse.Namespace) -> int:
    from vit.evaluate import cached_path, measure, predict
    from vit.progress import Bar
    from vit.report import evaluation_text, evaluation_values, mistake_values
    from vit.truth import mass_lines

    model, checkpoint = _load(args)
    with Bar() as progress:
        pictures = _pictures(args, checkpoint, args.split, progress)
        predictions = predict(model, checkpoint, pictures, flip=args.flip, progress=progress)
    metrics = measure(predictions, checkpoint.class_names)
    if pictures.digest[:12] == checkpoint.provenance.get("data_digest"):
        print(
            f"{checkpoint.name} learned from these very pictures: on others it will be right less often",
            file=sys.stderr,
        )
    found = metrics, checkpoint, pictures.name, mistake_values(predictions, args.mistakes, checkpoint)
    mass = _object_mass(args, model, checkpoint, pictures)
    if args.json:
        print(json.dumps(evaluation_values(*found) | ({"object_mass": asdict(mass)} if mass else {})))
    else:
        print("\n".join([evaluation_text(*found), *(["", *mass_lines(mass)] if mass else [])]))
    if args.flip:
        return 0  # the page shows what one pass says, so only that is kept for it
    try:
        predictions.save(cached_path(checkpoint.id, pictures.digest))
    except OSError as error:
        print(f"The predictions could not be kept for the page: {error}", file=sys.stderr)
    return 0


def _object_mass(args: argparse.Namespace, model, checkpoint, pictures):
    """How much weight lies on the objects, where it is known where they are; else None."""
    from vit.datasets import pattern_masks
    from vit.progress import Bar
    from vit.truth import object_mass

    if args.data != "patterns":
        return None
    n = min(len(pictures), _PICTURES_WITH_TRUTH)
    with Bar() as progress:
        masks = pattern_masks(args.split, progress=progress)[:n]
        return object_mass(model, checkpoint, pictures.images[:n], masks, progress=progress)


def _score(args: argparse.Namespace) -> int:
    from vit.methods import METHODS
    from vit.progress import Bar
    from vit.removal import REMOVALS
    from vit.score import Plan, ranks, score
    from vit.scoreboard import table_lines

    plan = Plan(
        methods=tuple(METHODS) if args.methods == ("all",) else args.methods,
        images=args.images, steps=args.steps, orders=args.orders,
        removals=REMOVALS if args.removals == ("all",) else args.removals,
    )  # fmt: skip
    plan.check()
    rank, world = ranks()
    model, checkpoint = _load(args, say_assumed=rank == 0)
    with Bar() as progress:
        pictures = _pictures(args, checkpoint, args.split, progress)
        found = score(
            model, checkpoint, pictures, plan, folder=args.out, rank=rank, world=world,
            progress=progress if rank == 0 else None,
        )  # fmt: skip
    if found is not None:
        print(json.dumps(asdict(found)) if args.json else "\n".join(table_lines(found)))
    return 0


def _atlas(args: argparse.Namespace) -> int:
    from vit.atlas import atlas, atlas_lines, kept_path
    from vit.progress import Bar

    model, checkpoint = _load(args)
    with Bar() as progress:
        pictures = _pictures(args, checkpoint, args.split, progress)
        found = atlas(model, checkpoint, pictures, args.images, progress=progress)
    for path in filter(None, (kept_path(checkpoint.id), args.out)):
        found.save(path)
    print(json.dumps(asdict(found)) if args.json else "\n".join(atlas_lines(found)))
    return 0


def _info(args: argparse.Namespace) -> int:
    from vit.report import describe_model, info_text

    values = describe_model(*_load(args, say_assumed=False))
    print(json.dumps(values) if args.json else info_text(values))
    return 0


def _data(args: argparse.Namespace) -> int:
    from vit.datasets import main_data
    from vit.progress import Bar

    with Bar() as progress:
        lines = main_data(args.data, ("test", "train") if args.split == "all" else (args.split,), progress)
    print("\n".join(lines))
    return 0


def _convert(args: argparse.Namespace) -> int:
    from vit.convert import convert
    from vit.progress import Bar

    overrides = {"num_heads": args.heads, "img_size": args.size, "class_names": args.classes}
    overrides |= {"mean": args.mean, "std": args.std}
    with Bar() as progress:
        lines = convert(
            args.source, args.out, half=args.half, data=args.data, facts=dict(args.fact), card=args.card,
            device=args.device, progress=progress, **overrides,
        )  # fmt: skip
    print("\n".join(lines))
    return 0


def _bench(args: argparse.Namespace) -> int:
    from vit.bench import bench, bench_lines, bench_values
    from vit.progress import Bar

    with Bar() as progress:
        found = bench(args.batches, args.repeats, args.data, device=args.device, progress=progress)
    print(json.dumps(bench_values(found)) if args.json else "\n".join(bench_lines(found)))
    return 0


def _load(args: argparse.Namespace, say_assumed: bool = True):
    from vit.checkpoint import BUNDLED, load

    if args.model is None:
        for name in ("size", "random_weights"):
            if getattr(args, name):
                raise ValueError(f"--{name.replace('_', '-')} is for --model timm:NAME or hf-hub:USER/NAME")
        model, checkpoint = load(BUNDLED if args.checkpoint is None else args.checkpoint, device=args.device)
    else:
        if args.checkpoint is not None:
            raise ValueError("--checkpoint and --model both name a model: choose one")
        from vit.hub import open_model

        model, checkpoint = open_model(
            args.model, device=args.device, img_size=args.size, random_weights=args.random_weights
        )
    if checkpoint.provenance.get("untrained") and say_assumed:
        print(f"{checkpoint.name} is untrained: {checkpoint.provenance['untrained']}", file=sys.stderr)
    if checkpoint.assumed and say_assumed:
        print(
            f"Assumed, because {checkpoint.name} does not say: {', '.join(checkpoint.assumed)}",
            file=sys.stderr,
        )
    return model, checkpoint


def _pictures(args: argparse.Namespace, checkpoint, split: str, progress):
    from vit.datasets import load_pictures
    from vit.patterns import CLASSES

    named = None if args.data is False else args.data
    if named is None and checkpoint.class_names == CLASSES:
        raise ValueError(
            f"{checkpoint.name} knows the classes of the made patterns, not those of CIFAR-10; name its"
            " pictures with --data patterns"
        )
    return load_pictures(named, split, progress=progress)


_COMMANDS = {
    "explain": _explain,
    "probe": _probe,
    "export": _export,
    "evaluate": _evaluate,
    "score": _score,
    "atlas": _atlas,
    "info": _info,
    "data": _data,
    "convert": _convert,
    "bench": _bench,
}


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # a file's name need not be printable everywhere
    sys.exit(main())
