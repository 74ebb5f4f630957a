"""Patchlight's library: a Vision Transformer and all that looks inside it.

    import vit
    model, checkpoint = vit.load("assets/weights/vit-cifar10.safetensors")
    x = vit.prepare(vit.open_picture("cat.png"), checkpoint)   # (1, 3, 32, 32)
    explanation = vit.explain(model, x)                        # .relevance (1, 8, 8)

Names are imported when first used (PEP 562): `python -m vit --help` and the page's first paint must not
wait the seconds that torch takes.
"""

from importlib import import_module

_HOME = {
    "PatchEmbedding": "model",
    "MultiHeadAttention": "model",
    "TransformerEncoderBlock": "model",
    "VisualTransformer": "model",
    "Trace": "model",
    "pick_device": "device",
    "attention_rollout": "attention",
    "rollout_by_layer": "attention",
    "rollout_by_head": "attention",
    "fuse_heads": "attention",
    "token_row": "attention",
    "token_column": "attention",
    "attention_entropy_bits": "attention",
    "mean_attention_distance_px": "attention",
    "cls_share": "attention",
    "mass_mask": "attention",
    "Explanation": "explanation",
    "explain": "explanation",
    "METHODS": "methods",
    "relevance": "methods",
    "Change": "cause",
    "answer": "cause",
    "leave_one_out": "cause",
    "head_effects": "cause",
    "cover_most": "cause",
    "rank_correlation": "cause",
    "open_picture": "images",
    "PictureError": "images",
    "prepare": "images",
    "Checkpoint": "checkpoint",
    "CheckpointError": "checkpoint",
    "load": "checkpoint",
    "open_model": "hub",
    "save": "checkpoint",
    "draw": "overlay",
    "play_through": "animation",
    "payload_of": "export",
    "export_html": "export",
}
__all__ = list(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'vit' has no attribute {name!r}")
    return getattr(import_module(f"vit.{_HOME[name]}"), name)
