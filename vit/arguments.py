"""The arguments of `python -m vit`: every command, option and default, with its help.

    args = build_parser().parse_args(["explain", "cat.png", "--layer", "3"])

Wrong arguments end the program with exit code 2 and one line. argparse only, so that this takes no time;
what depends on a model (how many layers there are) is checked when there is one.
"""

import argparse
from pathlib import Path

METHODS = (  # of vit/methods.py, whose import takes torch
    "raw", "rollout", "norm_weighted", "gradient_rollout", "chefer", "legrad", "gradcam", "input_gradient",
    "integrated_gradients", "attnlrp", "leave_one_out", "random", "centre",
)  # fmt: skip
_DATA = "DIR|patterns|cifar10"


class Parser(argparse.ArgumentParser):
    """Ends bad input with one line and exit code 2; shows help as it was written."""

    def __init__(self, *args, **options):
        super().__init__(
            *args, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options
        )

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {' '.join(message.split())} (--help shows how it is used)\n")


def build_parser() -> argparse.ArgumentParser:
    """Its `args.command` is the command's name, or None; `args.prog` and `args.default` are the command's."""
    parser = Parser(
        prog="python -m vit",
        description="See where a Vision Transformer looks.",
        epilog=_examples("explain cat.png --out cat-explained.png", "evaluate", "info", "explain --help"),
    )
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def command(name: str, summary: str, *examples: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=summary, description=summary, epilog=_examples(*examples))
        added.set_defaults(command=name, prog=added.prog, default=added.get_default)
        return added

    _explain_arguments(
        command(
            "explain", "Say what is on pictures, and where the model looks.",
            "explain cat.png",
            "explain cat.png --out cat-explained.png --style heat",
            "explain cat.png --method raw --layer 6 --head 3 --token 2,7 --npz cat.npz",
            "explain cat.png --method chefer --target dog --versus cat --out dog.png",
            "explain cat.png --method all --out page.png",
            "explain photos/*.jpg --fit pad --out explained/ --json",
            "explain --data photos/ --npz rows.npz",
        )
    )  # fmt: skip

    _probe_arguments(
        command(
            "probe", "Say what changes the answer: heads switched off, patches covered.",
            "probe cat.png --heads-off 3.1 6.4 --layers",
            "probe cat.png --cover 3,4 3,5 4,4 --fill blur",
            "probe cat.png --cover-most 16 --leave-one-out --head-effects",
        )
    )  # fmt: skip

    _export_arguments(
        command(
            "export", "Keep pictures in the viewer as one HTML file, or play the layers as a GIF or WebP.",
            "export cat.png --html cat.html",
            "export photos/*.jpg --html photos.html --title 'Our holiday'",
            "export cat.png --gif cat.gif --method raw --head 3 --style heat",
        )
    )  # fmt: skip

    evaluate = command(
        "evaluate", "Measure accuracy and calibration on labelled pictures, and name the worst mistakes.",
        "evaluate", "evaluate --data photos/ --json", "evaluate --flip --mistakes 20",
        "evaluate --checkpoint runs/mine/checkpoints/best.safetensors --data patterns",
    )  # fmt: skip
    _checkpoint_arguments(evaluate)
    _pictures_argument(evaluate)
    evaluate.add_argument("--split", choices=("test", "train"), default="test", help="default: test")
    evaluate.add_argument(
        "--flip", action="store_true", help="see each picture mirrored too, and average the logits"
    )
    evaluate.add_argument(
        "--mistakes", type=_from_zero, default=5, metavar="N", help="most confident ones listed; default: 5"
    )

    score = command(
        "score", "Measure how far each method can be trusted: hide what it calls relevant, and see.",
        "score --images 100 --methods chefer,rollout,random",
        "score --checkpoint assets/weights/patterns.safetensors --data patterns",
        "score --json > scores.json",
    )  # fmt: skip
    _checkpoint_arguments(score)
    _pictures_argument(score)
    add = score.add_argument
    add("--split", choices=("test", "train"), default="test", help="default: test")
    add("--methods", type=_names, default=("all",), metavar="all|A,B,...", help="default: all")
    add("--images", type=_from_one, default=1000, metavar="N", help="classes in turn; default: 1000")
    add("--steps", type=_from_one, default=8, metavar="N", help="of each curve; default: 8")
    add("--orders", type=_from_one, default=4, metavar="N", help="random ones beside them; default: 4")
    add(
        "--removals", type=_names, default=("all",), metavar="all|A,B,...",
        help="how patches are hidden: removed, mean, blur, neighbours; default: all, a verdict needs three",
    )  # fmt: skip
    add("--out", type=Path, metavar="FOLDER", help="what is measured is kept here; default: the cache")

    atlas = command(
        "atlas", "Describe every head over many pictures: do heads specialise?",
        "atlas --images 200", "atlas --checkpoint assets/weights/patterns.safetensors --data patterns",
    )  # fmt: skip
    _checkpoint_arguments(atlas)
    _pictures_argument(atlas)
    atlas.add_argument("--split", choices=("test", "train"), default="test", help="default: test")
    atlas.add_argument("--images", type=_from_one, default=1000, metavar="N", help="default: 1000")
    atlas.add_argument("--out", type=Path, metavar="FILE.json", help="all figures, those of offsets too")

    info = command("info", "Describe a checkpoint: shapes, parameters, provenance.", "info", "info --json")
    _checkpoint_arguments(info)

    data = command(
        "data",
        "Fetch CIFAR-10 if it is missing, verify it, say where it is.",
        "data",
        "data --split all",
    )
    _data_argument(data)
    data.add_argument("--split", choices=("test", "train", "all"), default="test", help="default: test")

    convert = command(
        "convert", "Any checkpoint to one safetensors file that says all that is known of it.",
        "convert tutorial.pth mine.safetensors",
        "convert tutorial.pth mine.safetensors --half --fact epochs=80 --fact seed=0 --card mine.md",
    )  # fmt: skip
    convert.add_argument("source", metavar="SOURCE", help="safetensors, or a state dict from torch.save")
    convert.add_argument("out", metavar="OUT.safetensors", type=Path)
    convert.add_argument("--half", action="store_true", help="store float16: half the size")
    _pictures_argument(convert)
    convert.add_argument(
        "--heads", type=_from_one, metavar="N", help="attention heads, if the file says nothing"
    )
    convert.add_argument("--size", type=_two_sizes, metavar="HEIGHT,WIDTH", help="of the pictures, in pixels")
    convert.add_argument("--mean", type=_numbers, metavar="A,B,C", help="of pixels from 0 to 1, per channel")
    convert.add_argument("--std", type=_numbers, metavar="A,B,C", help="the standard deviation, likewise")
    convert.add_argument("--classes", type=_names, metavar="A,B,...", help="class names, in the head's order")
    convert.add_argument(
        "--fact", type=_fact, action="append", default=[], metavar="NAME=VALUE",
        help="how it came about: command, data, epochs, seed, date, licence, ...; as often as needed",
    )  # fmt: skip
    convert.add_argument("--card", type=Path, metavar="FILE.md", help="write a model card as well")
    _device_argument(convert)

    bench = command(
        "bench", "Time maps, rollouts and overlays against a plain pass.",
        "bench", "bench --batches 1 --repeats 200",
    )  # fmt: skip
    bench.add_argument(
        "--batches", type=_sizes, default=(1, 32, 256), metavar="N,...", help="default: 1,32,256"
    )
    bench.add_argument("--repeats", type=_from_one, metavar="N", help="rounds; default: by the batch's size")
    _data_argument(bench, otherwise="random pixels")
    _device_argument(bench)
    bench.add_argument("--json", action="store_true", help="one JSON object")
    return parser


def _explain_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("pictures", nargs="*", metavar="PICTURE", help="PNG, JPEG, WebP, GIF, BMP or TIFF")
    _checkpoint_arguments(parser)
    group = parser.add_argument_group("what is shown (layers, heads, rows and columns count from 1)")
    _view_arguments(group, discard=0.0, methods=(*METHODS, "all"))
    add = group.add_argument
    add("--target", metavar="CLASS", help="explained, by name or number; default: the first predicted")
    add("--versus", metavar="CLASS", help="why the target rather than this class")
    add(
        "--residual", type=_share, default=0.5, metavar="R", help="share of the skip connection; default: 0.5"
    )
    add("--start-layer", type=_from_one, default=1, metavar="K", help="where rollout starts; default: 1")
    group = parser.add_argument_group("how it is drawn")
    _style_arguments(group)
    add = parser.add_argument_group("files (for several pictures: folders)").add_argument
    add("--out", type=Path, metavar="FILE.png", help="the picture explained, for print")
    add("--npz", type=Path, metavar="FILE.npz", help="attention, rollout, logits, relevance as numpy arrays")
    add = parser.add_argument_group("a whole test set").add_argument
    add(
        "--data", nargs="?", const=False, metavar=_DATA,
        help="instead of pictures; --npz then holds the CLS rows of all of them (alone: as `vit data`)",
    )  # fmt: skip
    add("--limit", type=_from_one, metavar="N", help="only the first N")


def _probe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("picture", metavar="PICTURE", help="PNG, JPEG, WebP, GIF, BMP or TIFF")
    _checkpoint_arguments(parser)
    group = parser.add_argument_group("what is changed (layers, heads, rows and columns count from 1)")
    add, several = group.add_argument, {"nargs": "+", "action": "extend", "default": []}
    add("--heads-off", type=_layer_and_head, metavar="L.H", help="heads switched off: layer.head", **several)
    add("--layer-off", type=_from_one, metavar="L", help="layers with all heads switched off", **several)
    add("--only-head", type=_layer_and_head, metavar="L.H", help="every other head is switched off")
    add("--cover", metavar="ROW,COLUMN", help="patches of the picture", **several)
    add(
        "--fill", choices=("removed", "mean", "blur"), default="removed",
        help="what covered patches become: no tokens at all (default), the mean colour, or blurred",
    )  # fmt: skip
    add("--fit", choices=("crop", "pad"), default="crop", help="how a picture is made square; default: crop")
    add = parser.add_argument_group("what is measured besides").add_argument
    add("--layers", action="store_true", help="the most probable class after each layer")
    add("--cover-most", type=_from_zero, metavar="N", help="cover what CLS looks at most, against random")
    add("--leave-one-out", action="store_true", help="what the class loses without each patch")
    add("--head-effects", action="store_true", help="what the class loses without each head")


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pictures", nargs="+", metavar="PICTURE", help="PNG, JPEG, WebP, GIF, BMP or TIFF")
    _checkpoint_arguments(parser)
    group = parser.add_argument_group("files, at least one (GIF and WebP of several pictures: folders)")
    add = group.add_argument
    add("--html", type=Path, metavar="FILE.html", help="all pictures in the viewer; needs no Python")
    add("--gif", type=Path, metavar="FILE.gif", help="a film: a frame for each layer")
    add("--webp", type=Path, metavar="FILE.webp", help="the same film, lossless")
    add("--title", metavar="T", help="the heading of the HTML file")
    group = parser.add_argument_group(
        "what is shown first, and in films (layers, heads, rows and columns count from 1)"
    )
    _view_arguments(group, discard=0.9)
    _style_arguments(parser.add_argument_group("how it is drawn"))


def _view_arguments(group, discard: float, methods: tuple[str, ...] = ("rollout", "raw")) -> None:
    add = group.add_argument
    add("--method", choices=methods, default="rollout", help="default: rollout")
    add("--layer", type=_from_one, metavar="K", help="default: the last")
    add("--head", type=_from_one, metavar="K", help="default: all, fused")
    add("--token", default="cls", metavar="cls|ROW,COL", help="whose view; default: cls")
    add("--looked-at", action="store_true", help="who looks at the token, not where it looks")
    add("--fusion", choices=("mean", "max", "min"), default="mean", help="of heads; default: mean")
    add(
        "--discard", type=_share, default=discard, metavar="R",
        help=f"share of each row set to 0; default: {discard:g}",
    )  # fmt: skip
    add("--fit", choices=("crop", "pad"), default="crop", help="how a picture is made square; default: crop")


def _style_arguments(group) -> None:
    add = group.add_argument
    add("--style", choices=("light", "heat"), default="light", help="default: light")
    add("--strength", type=_share, metavar="R", help="default: 0.85 for light, 0.6 for heat")
    add("--smooth", action="store_true", help="blend between patches")
    add("--mass", type=_share, metavar="R", help="light only the fewest patches that hold this share")
    add("--scale", choices=("own", "shared"), default="own", help="shared: one for all layers and heads")


def _checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--checkpoint", metavar="FILE", help="safetensors or state dict; default: the bundled one")
    add("--model", metavar="timm:NAME|hf-hub:USER/NAME", help="a Vision Transformer of others; needs timm")
    add("--size", type=_two_sizes, metavar="HEIGHT,WIDTH", help="of its pictures, if not its own")
    add("--random-weights", action="store_true", help="it learned nothing: for tests and teaching")
    _device_argument(parser)
    parser.add_argument("--json", action="store_true", help="JSON instead of text")


def _device_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="D", help="cuda, mps or cpu; default: the first of these")


def _pictures_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", metavar=_DATA,
        help="a folder, pictures made by code, or (default) CIFAR-10 from PATCHLIGHT_DATA, else as fetched",
    )  # fmt: skip


def _data_argument(
    parser: argparse.ArgumentParser, otherwise: str = "PATCHLIGHT_DATA, else as fetched"
) -> None:
    parser.add_argument("--data", metavar="DIR", help=f"folder with the pictures; default: {otherwise}")


def _examples(*lines: str) -> str:
    return "examples:\n" + "\n".join(f"  python -m vit {line}" for line in lines)


# ---- values ---------------------------------------------------------------------------------------------


def _from_one(text: str) -> int:
    return _whole(text, 1)


def _from_zero(text: str) -> int:
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    if text.isascii() and text.isdigit() and least <= int(text[:10]) < 10**9:
        return int(text)
    raise argparse.ArgumentTypeError(f"a whole number from {least} is needed, not {text!r}")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"a number is needed, not {text!r}") from error


def _share(text: str) -> float:
    if not 0 <= (value := _number(text)) <= 1:
        raise argparse.ArgumentTypeError(f"a number from 0 to 1 is needed, not {text}")
    return value


def _layer_and_head(text: str) -> tuple[int, int]:
    layer, point, head = text.partition(".")
    if not point:
        raise argparse.ArgumentTypeError(f"LAYER.HEAD is needed, such as 3.1, not {text!r}")
    return _from_one(layer), _from_one(head)


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(_number(part) for part in text.split(","))


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_from_one(part.strip()) for part in text.split(","))


def _two_sizes(text: str) -> tuple[int, ...]:
    if len(sizes := _sizes(text)) != 2:
        raise argparse.ArgumentTypeError(f"HEIGHT,WIDTH is needed, not {text!r}")
    return sizes


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _fact(text: str) -> tuple[str, str | int | float]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise argparse.ArgumentTypeError(f"NAME=VALUE is needed, not {text!r}")
    for kind in (int, float):
        try:
            number = kind(value)
        except ValueError:
            continue
        if abs(number) < 1e15:  # not "nan", "inf", nor a hash that reads like 12e456
            return name.strip(), number
    return name.strip(), value
