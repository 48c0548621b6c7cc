"""Attention written out by hand, which no adapter knows: in many ways, of one input or two."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gfsa

B, N, DIM, HEADS = 3, 7, 16, 4


class WrittenAttention(nn.Module):
    """Self-attention whose product with v is written in one of many ways."""

    way = "matmul"

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.mix = nn.Parameter(torch.eye(HEADS) + 0.1)
        self.drop = nn.Dropout(0.5)
        self.proj = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        y = getattr(self, f"by_{self.way}")(q * DIM**-0.5, k, v)
        return self.proj(y.transpose(1, 2).reshape(b, n, DIM))

    def by_matmul(self, q, k, v):
        return torch.matmul(self.drop((q @ k.mT).softmax(dim=-1)), v)

    def by_casts(self, q, k, v):
        attention = F.softmax(q @ k.mT, -1, dtype=torch.promote_types(v.dtype, torch.float32)).to(
            v.dtype
        )
        return attention.masked_fill(attention.isnan(), 0.0).contiguous() @ v

    def by_casts_like_another_tensor(self, q, k, v):
        return F.softmax((q @ k.mT).double(), -1).type_as(q).to(v) @ v

    def by_columns(self, q, k, v):
        return (v.mT @ torch.softmax(q @ k.mT, 3).mT).mT

    def by_einsum(self, q, k, v):
        attention = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
        return torch.einsum("bhij,bjhd->bihd", attention, v.transpose(1, 2)).transpose(1, 2)

    def by_einsum_of_numbers(self, q, k, v):
        attention = (q @ k.mT).softmax(-1)
        return torch.einsum(attention, [0, 1, 2, 3], v, [0, 1, 3, 4], [0, 1, 2, 4])

    def by_mixed_heads(self, q, k, v):
        attention = torch.einsum("bhij,gh->bgij", (q @ k.mT).softmax(-1), self.mix)
        return attention @ v

    def by_merged_heads(self, q, k, v):
        q, k, v = (x.reshape(-1, x.shape[2], x.shape[3]) for x in (q, k, v))
        return torch.bmm(torch.bmm(q, k.mT).softmax(-1), v).view(-1, HEADS, *v.shape[1:])

    def by_sdpa(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, scale=1.0, dropout_p=0.0)

    def by_sdpa_with_groups(self, q, k, v):
        return F.scaled_dot_product_attention(q, k[:, ::2], v[:, ::2], scale=1.0, enable_gqa=True)

    def by_sdpa_merged(self, q, k, v):
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, scale=1.0).unflatten(0, (-1, HEADS))

    def by_head_axis_inside_windows(self, q, k, v):
        q, k, v = (x.unsqueeze(2) for x in (q, k, v))  # (B, H, windows, N, D)
        return ((q @ k.mT).softmax(-1) @ v).squeeze(2)

    def by_joined(self, q, k, v):
        q, k, v = (torch.cat([x[:, :, :1], x[:, :, 1:]], 2) for x in (q, k, v))
        return (q @ k.mT).softmax(-1) @ v

    def by_joined_and_merged(self, q, k, v):
        q, k, v = (torch.cat([x[:, :, :1], x[:, :, 1:]], 2) for x in (q, k, v))
        return self.by_merged_heads(q, k, v)

    def by_one_head_of_values(self, q, k, v):
        return (q @ k.mT).softmax(-1) @ v[:, :1]

    def by_einsum_with_one_head_of_values(self, q, k, v):
        return torch.einsum("bhij,bjd->bhid", (q @ k.mT).softmax(-1), v[:, 0])

    def by_names_of_arguments(self, q, k, v):
        d = k.shape[-1]
        merged = k.flatten(0, 1).mT
        k = F.conv1d(input=merged, weight=torch.ones(d, 1, 1).to(k), groups=d).mT.view_as(k)
        attention = F.softmax(input=torch.matmul(input=q, other=k.mT), dim=-1)
        return torch.matmul(input=attention, other=v)

    def by_softmax_module(self, q, k, v):
        return nn.Dropout(0.0)(nn.Softmax(dim=-1)(q @ k.mT)) @ v

    def by_the_same_index(self, q, k, v):
        order = torch.arange(q.shape[2]).flip(0)
        q, k, v = (x[:, :, order] for x in (q, k, v))
        return ((q @ k.mT).softmax(-1) @ v)[:, :, order]

    def by_written_bias(self, q, k, v):
        scores = q @ k.mT
        scores[:, :, 1:, 1:] = scores[:, :, 1:, 1:] + q[:, :, 1:, :1]
        scores[:, :, 0, 1] = -1.0
        return scores.softmax(-1) @ torch.empty_like(v).copy_(v)

    def by_windows(self, q, k, v):
        q, k, v = (F.pad(x, (0, 0, 0, 1)).unflatten(2, (2, -1)) for x in (q, k, v))
        return ((q @ k.mT).softmax(-1) @ v).flatten(2, 3)[:, :, :N]

    def by_heads_before_samples(self, q, k, v):
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return ((q @ k.mT).softmax(-1) @ v).transpose(0, 1)

    def by_heads_before_samples_in_memory(self, q, k, v):
        q, k, v = (x.transpose(0, 1).contiguous() for x in (q, k, v))
        return ((q @ k.mT).softmax(-1) @ v).transpose(0, 1)

    def by_heads_before_samples_merged(self, q, k, v):
        q, k, v = (x.transpose(0, 1).reshape(-1, x.shape[2], x.shape[3]) for x in (q, k, v))
        y = torch.bmm(torch.bmm(q, k.mT).softmax(-1), v)
        return y.view(HEADS, -1, *v.shape[1:]).transpose(0, 1)

    def by_sdpa_heads_before_samples(self, q, k, v):
        q, k, v = (x.transpose(0, 1).contiguous() for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, scale=1.0).transpose(0, 1)

    # from here on: what must be refused

    def by_two_products(self, q, k, v):
        attention = (q @ k.mT).softmax(-1)
        return F.scaled_dot_product_attention(q, k, attention @ v)

    def by_sdpa_merged_with_groups(self, q, k, v):
        q, k, v = (x.flatten(0, 1) for x in (q, k[:, ::2], v[:, ::2]))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).unflatten(0, (-1, HEADS))

    def by_added_product(self, q, k, v):
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        attention = torch.baddbmm(torch.zeros_like(q @ k.mT), q, k.mT).softmax(-1)
        return torch.baddbmm(v, attention, v, beta=0.5, alpha=2.0).unflatten(0, (-1, HEADS))

    def by_channels(self, q, k, v):
        return ((q.mT @ k).softmax(-1) @ v.mT).mT

    def by_linear_attention(self, q, k, v):
        return q.softmax(-1) @ (k.softmax(-2).mT @ v)

    def by_hand(self, q, k, v):
        scores = (q @ k.mT).exp()
        return (scores / scores.sum(-1, keepdim=True)) @ v

    def by_fewer_keys(self, q, k, v):
        return (q @ k[:, :, 1:].mT).softmax(-1) @ v[:, :, 1:]

    def by_reordered_queries(self, q, k, v):
        return (q.flip(2) @ k.mT).softmax(-1) @ v

    def by_reordered_keys(self, q, k, v):
        order = torch.arange(q.shape[2]).flip(0)
        return (q @ k[:, :, order].mT).softmax(-1) @ v[:, :, order]

    def by_sorted_queries(self, q, k, v):
        top = q.norm(dim=-1).topk(q.shape[2]).indices
        chosen = q.gather(2, top[..., None].expand_as(q))
        return (chosen @ k.mT).softmax(-1) @ v

    def by_rolled_values(self, q, k, v):
        return (q @ k.mT).softmax(-1) @ v.roll(1, 2)

    def by_the_next_sample(self, q, k, v):
        return (q @ k.roll(1, 0).mT).softmax(-1) @ v.roll(1, 0)

    def by_half_and_half(self, q, k, v):
        (q, _), (_, k), (_, v) = (x[:, :, : N - 1].chunk(2, 2) for x in (q, k, v))
        return F.pad((q @ k.mT).softmax(-1) @ v, (0, 0, 0, N - q.shape[2]))

    def by_shifted_keys(self, q, k, v):
        keys = k.clone()
        keys[:, :, 1:] = k[:, :, :-1]
        return (q @ keys.mT).softmax(-1) @ v

    def by_padded_keys(self, q, k, v):
        """As long as before, each at the place of the next."""
        k, v = (F.pad(x, (0, 0, 1, -1)) for x in (k, v))
        return (q @ k.mT).softmax(-1) @ v

    def by_written_keys(self, q, k, v):
        keys = torch.empty_like(k)
        keys[:, :, torch.arange(N).flip(0)] = k
        return (q @ keys.mT).softmax(-1) @ v

    def by_the_same_map_twice(self, q, k, v):
        attention = (q @ k.mT).softmax(-1)
        return attention @ v + attention @ v.square()

    def by_values_of_distances(self, q, k, v):
        attention = (q @ k.mT).softmax(-1)
        near = F.pad(attention, (0, 1))[..., :2]
        return attention @ v + near @ self.mix[:2]

    def by_sink(self, q, k, v):
        sink = torch.zeros_like(q[..., :1])
        return torch.cat([q @ k.mT, sink], -1).softmax(-1)[..., :-1] @ v

    def by_another_product(self, q, k, v):
        turned = torch.tensordot(torch.eye(N).flip(0).to(q), q, dims=([1], [2])).movedim(0, 2)
        return (turned @ k.mT).softmax(-1) @ v

    def by_unbatched_heads(self, q, k, v):
        q, k, v = (x.unflatten(1, (2, 2)) for x in (q, k, v))
        return ((q @ k.mT).softmax(-1) @ v).flatten(1, 2)

    def by_einsum_with_dots(self, q, k, v):
        return torch.einsum("...ij,...jd->...id", (q @ k.mT).softmax(-1), v)


def written(way: str) -> WrittenAttention:
    module = WrittenAttention()
    module.way = way
    return module


WAYS = [
    name.removeprefix("by_")
    for name in vars(WrittenAttention)
    if name.startswith("by_")
]  # fmt: skip
FOLLOWED = WAYS[: WAYS.index("two_products")]
X = torch.randn(B, N, DIM, generator=torch.Generator().manual_seed(0))


def run(model: nn.Module) -> Tensor:
    return model(X.to(next(model.parameters()).dtype))


class Block(nn.Module):
    """One residual layer of written attention."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.attn = written(way)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x)


def traced(way: str) -> Block:
    model = Block(way).eval()
    gfsa.plug(model, unknown="trace", wK=0.2)
    return model


class TwoInputs(nn.Module):
    """Attention whose inputs are used as its ``way`` says."""

    way = "cross"

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.attend(*getattr(self, self.way)(x, y))

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        given = ((self.q, queries), (self.k, keys), (self.v, values))
        q, k, v = (
            project(tokens).unflatten(-1, (HEADS, -1)).transpose(1, 2) for project, tokens in given
        )
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)

    def cross(self, x, y):
        return x, y, y

    def cross_with_positions(self, x, y):
        positions = torch.arange(DIM, dtype=x.dtype)
        return x + positions, y + positions, y + positions

    def cross_in_one_tensor(self, x, y):
        both = torch.stack([x, y])
        return both[0], both[1], both[1]

    def cross_in_features(self, x, y):
        queries, keys = torch.cat([x, y], -1).chunk(2, -1)
        return queries, keys, keys

    def cross_in_one_sequence(self, x, y):
        queries, keys = torch.cat([x, y], 1).chunk(2, 1)
        return queries, keys, keys

    def other_values_only(self, x, y):
        return x, x, y

    def positions(self, x, y):
        return x + y, x + y, x

    def positions_in_values(self, x, y):
        return x + y, x + y, x + y

    def unused(self, x, y):
        return x, x, x
