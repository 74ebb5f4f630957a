"""What is drawn, in words: one wording for the page, the command line, and what both export."""


def percent(share: float) -> str:
    """`91 %`, and one digit more where that says more: `4.2 %`. The space never breaks a line."""
    return f"{100 * share:.0f}\u00a0%" if share >= 0.0995 or share == 0 else f"{100 * share:.1f}\u00a0%"


def token_label(token: str) -> str:
    """`CLS` or `row 3, column 5`, from a token's name `cls` or `3,5`."""
    if token.strip().lower() == "cls":
        return "CLS"
    row, column = (part.strip() for part in token.split(","))
    return f"row {row}, column {column}"


def sentence(
    *,
    method: str,
    token: str,
    layer: int,
    head: int | None,
    looked_at: bool,
    head_fusion: str,
    discard_ratio: float,
    residual: float = 0.5,
    start_layer: int = 0,
) -> str:
    """What a map shows, without a full stop; arguments as those of `vit.explain`, the token by its name."""
    direction = f"Who looks at {token_label(token)}" if looked_at else f"Where {token_label(token)} looks"
    heads = f"{head_fusion} of all heads" if head is None else f"head {head + 1}"
    if method == "raw":
        return f"{direction}: attention of layer {layer + 1}, {heads}"
    span = f"layer {layer + 1}" if start_layer == layer else f"layers {start_layer + 1} to {layer + 1}"
    by = heads if head is None else f"of layer {layer + 1} {heads} alone"
    details = f", weakest {percent(discard_ratio)} left out" if discard_ratio else ""
    details += f", residual {residual:g}" if residual != 0.5 else ""
    return f"{direction}: rollout of {span}, {by}{details}"


def prediction(class_name: str, probability: float) -> str:
    """`frog, 97 %`"""
    return f"{class_name}, {percent(probability)}"


def duration(seconds: float) -> str:
    """`40 s`, `1 min 10 s`, `2 h 5 min`: what people grasp at once."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "min"), (rest if not hours else 0, "s")]
    return " ".join(f"{count:,} {unit}" for count, unit in parts if count) or "0 s"


def megabytes(size_bytes: float) -> str:
    """`3.8 MB`, `120 MB`, `1.2 GB`"""
    if size_bytes >= 1e9:
        return f"{size_bytes / 1e9:,.1f} GB"
    return f"{size_bytes / 1e6:,.0f} MB" if size_bytes >= 1e7 else f"{size_bytes / 1e6:.1f} MB"
