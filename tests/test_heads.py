"""Both attention paths are the same attention: torch's own, with any mask, and never NaN.

Run: pytest tests/test_heads.py (a few seconds).
"""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from vit.model import MultiHeadAttention

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
B, H, N, D = 3, 2, 5, 8
MASK_SHAPES = [(N, N), (1, 1, N, N), (B, 1, N, N), (B, 1, 1, N), (1, H, 1, N), (B, H, N, N)]


@pytest.fixture
def attention():
    torch.manual_seed(0)
    made = MultiHeadAttention(D, H, dropout=0.0)
    with torch.no_grad():
        made.qkv.weight.mul_(3)  # sharper maps, so that a wrong mask shows
    return made


@pytest.fixture
def tokens():
    return torch.randn(B, N, D, generator=torch.Generator().manual_seed(1))


def by_hand(attention, tokens, mask):
    """One query of one head at a time, over the keys that are open to it only."""
    mask = mask.expand(B, H, N, N)
    q, k, v = (attention.qkv(tokens)).chunk(3, dim=-1)
    maps, read = torch.zeros(B, H, N, N), torch.zeros(B, N, D)
    for b in range(B):
        for h in range(H):
            columns = slice(h * D // H, (h + 1) * D // H)
            for i in range(N):
                open_keys = mask[b, h, i].nonzero().flatten()
                if len(open_keys):
                    scores = k[b, open_keys, columns] @ q[b, i, columns] / (D // H) ** 0.5
                    maps[b, h, i, open_keys] = scores.softmax(-1)
                    read[b, i, columns] = maps[b, h, i] @ v[b, :, columns]
    return read @ attention.out.weight.T, maps


@torch.no_grad()
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32])
@pytest.mark.parametrize("shape", MASK_SHAPES)
def test_masks_block_the_same_in_both_paths(attention, tokens, shape, dtype, training):
    attention.train(training)
    mask = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(2))
    mask = mask * 3 if dtype != torch.float32 else mask * 0.25  # whatever is not 0 is open
    mask[..., 0] = 1  # every query has something to look at
    mask = mask.to(dtype)
    before = mask.clone()
    out, attn_map = attention(tokens, mask=mask, return_attn=True)
    expected_out, expected_map = by_hand(attention, tokens, mask)
    assert_close(attn_map, expected_map, **CLOSE)
    assert_close(out, expected_out, **CLOSE)
    assert_close(attention(tokens, mask=mask), expected_out, **CLOSE)
    assert torch.equal(mask, before)


@torch.no_grad()
@pytest.mark.parametrize("training", [False, True])
def test_no_mask_and_an_open_mask_are_the_same(attention, tokens, training):
    attention.train(training)
    out, attn_map = attention(tokens, return_attn=True)
    expected_out, expected_map = by_hand(attention, tokens, torch.ones(N, N))
    assert_close(out, expected_out, **CLOSE)
    assert_close(attn_map, expected_map, **CLOSE)
    for result in (attention(tokens), attention(tokens, torch.ones(N, N)), attention(tokens, None, False)):
        assert_close(result, expected_out, **CLOSE)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("shape", MASK_SHAPES)
def test_a_query_with_everything_blocked_reads_zeros(attention, tokens, shape, dtype, training):
    attention.train(training)
    mask = torch.ones(shape, dtype=dtype)
    mask[..., -1, :] = 0  # the last query, or with (B, 1, 1, N) and (1, H, 1, N) all of them
    blocked = (mask.expand(B, H, N, N) == 0).all(-1)  # (B, H, N)
    expected_out, expected_map = by_hand(attention, tokens, mask)
    tokens.requires_grad_(True)
    out, attn_map = attention(tokens, mask=mask, return_attn=True)
    fused = attention(tokens, mask=mask)
    assert bool((attn_map[blocked] == 0).all())
    assert bool((out[:, -1] == 0).all())
    assert bool((fused[:, -1] == 0).all())
    assert_close(attn_map, expected_map, **CLOSE)
    assert_close(out, expected_out, **CLOSE)
    assert_close(fused, expected_out, **CLOSE)
    for result in (out, fused):
        (gradient,) = torch.autograd.grad(result.square().sum(), tokens)
        assert bool(gradient.isfinite().all())


@torch.no_grad()
def test_only_the_blocked_head_of_the_blocked_picture_reads_zeros(attention, tokens):
    attention.out.weight.copy_(torch.eye(D))  # so that the output shows what each head read
    mask = torch.ones(B, H, N, N)
    mask[1, 0, 3] = 0
    for out in (attention(tokens, mask), attention(tokens, mask, return_attn=True)[0]):
        assert (out == 0).nonzero().tolist() == [[1, 3, column] for column in range(D // H)]


@torch.no_grad()
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_ours_is_torchs_multihead_attention(tokens, heads):
    torch.manual_seed(3)
    ours = MultiHeadAttention(D, heads, dropout=0.0).eval()
    torchs = nn.MultiheadAttention(D, heads, bias=False, batch_first=True).eval()
    torchs.in_proj_weight.copy_(ours.qkv.weight)
    torchs.out_proj.weight.copy_(ours.out.weight)
    expected_out, expected_map = torchs(tokens, tokens, tokens, average_attn_weights=False)
    out, attn_map = ours(tokens, return_attn=True)
    assert_close(attn_map, expected_map, **CLOSE)
    assert_close(out, expected_out, **CLOSE)
    assert_close(ours(tokens), expected_out, **CLOSE)
