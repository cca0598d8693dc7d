"""MoonViT-3d, its merger and its projector in torch: pictures to rows in place of token embeddings.

Parameter names are those of the Hugging Face checkpoint. Shapes below: P patches of a batch laid end to end, B
pictures, C hidden width, H heads of d channels (H d need not equal C), R merged rows of a batch, D width of the text
model. Pictures have one frame, so nothing temporal is added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import Layout, Linear, Norm
from vision_data import Grid

TOWER_EPS = torch.finfo(torch.float32).eps  # the release builds these norms without an epsilon
ROPE_BASE = 10000.0


def config(text_width: int) -> dict[str, Any]:
    """``vision_config`` of Kimi-K3-nano, with the keys of the release."""
    return {
        "activation_func": "gelu_pytorch_tanh",
        "attn_bias": False,
        "init_pos_emb_height": 8,
        "init_pos_emb_time": 4,
        "init_pos_emb_width": 8,
        "linear_bias": False,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "mlp_type": "mlp2",
        "mm_hidden_size": 128,
        "mm_projector_type": "patchmergerv2",
        "norm_type": "rmsnorm",
        "patch_embed_proj_bias": False,
        "patch_size": 14,
        "pos_emb_interpolation_mode": "bilinear",
        "pos_emb_type": "divided_fixed",
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-05,
        "qkv_hidden_size": 192,
        "text_hidden_size": text_width,
        "vt_hidden_size": 128,
        "vt_intermediate_size": 384,
        "vt_num_attention_heads": 3,
        "vt_num_hidden_layers": 3,
    }


def rotation(grids: Sequence[Grid], width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[P, 1, width / 2]`` of the pairs of a head: of every two pairs the first turns by the column,
    the second by the row."""
    theta = ROPE_BASE ** (-4 * torch.arange(width // 4, dtype=torch.float64) / width)
    places = []
    for h, w in grids:
        row, column = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        places.append(torch.stack((column, row), -1).view(-1, 1, 2))
    angle = (torch.cat(places) * theta[:, None]).flatten(1)
    return angle.cos().to(dtype).unsqueeze(1), angle.sin().to(dtype).unsqueeze(1)


def rotated(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """``x [P, H, d]`` with its neighbouring pairs turned."""
    cos, sin = turn
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def waves(n: int, side: int) -> Tensor:
    """``[n, 3, side, side]``: kernels to start with. Each is a slow cosine wave of random direction and colour,
    stronger the faster it is, as edges have less of those: with white noise instead, every channel would see little but
    the patch's mean brightness."""
    u, v = torch.randint(0, 5, (2, n, 1))
    at = math.pi * (torch.arange(side) + 0.5) / side
    wave = torch.cos(v * at).unsqueeze(2) * torch.cos(u * at).unsqueeze(1) * (1 + u + v).unsqueeze(2) / side**2
    return torch.randn(n, 3, 1, 1) * wave.unsqueeze(1)


class PatchEmbed(nn.Module):
    """The product of every patch with one matrix, plus its place on a learned grid, resized to the picture's."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        super().__init__()
        c, side = cfg["vt_hidden_size"], cfg["patch_size"]
        self.proj = nn.Module()
        self.proj.weight = nn.Parameter(waves(c, side))
        self.pos_emb = nn.Module()
        rows, columns = cfg["init_pos_emb_height"], cfg["init_pos_emb_width"]
        self.pos_emb.weight = nn.Parameter(torch.randn(rows, columns, c) * 0.1)

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        table = self.pos_emb.weight.permute(2, 0, 1).unsqueeze(0)
        resized: dict[Grid, Tensor] = {}
        for grid in grids:
            if grid not in resized:
                same = grid == tuple(table.shape[2:])
                place = table if same else F.interpolate(table, grid, mode="bilinear", align_corners=False)
                resized[grid] = place[0].flatten(1).T
        return patches.flatten(1) @ self.proj.weight.flatten(1).T + torch.cat([resized[grid] for grid in grids])


class Mlp(nn.Module):
    def __init__(self, n: int, width: int) -> None:
        super().__init__()
        self.fc0, self.fc1 = Linear(n, width), Linear(width, n, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc1(F.gelu(self.fc0(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, cfg: dict[str, Any]) -> None:
        super().__init__()
        c, qkv, self.n_head = cfg["vt_hidden_size"], cfg["qkv_hidden_size"], cfg["vt_num_attention_heads"]
        self.norm0, self.norm1 = Norm(c, TOWER_EPS), Norm(c, TOWER_EPS)
        self.wqkv, self.wo = Linear(c, 3 * qkv), Linear(qkv, c, 0.5)
        self.mlp = Mlp(c, cfg["vt_intermediate_size"])

    def forward(self, x: Tensor, layout: Layout, turn: tuple[Tensor, Tensor], hidden: Tensor) -> Tensor:
        """``hidden [B, 1, 1, T]`` is -inf where a key is padding."""
        q, k, v = self.wqkv(self.norm0(x)).view(len(x), 3, self.n_head, -1).unbind(1)

        def heads(rows: Tensor) -> Tensor:
            return layout.pad(rows.flatten(1)).unflatten(-1, (self.n_head, -1)).transpose(1, 2)

        q, k, v = heads(rotated(q, turn)), heads(rotated(k, turn)), heads(v)
        score = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + hidden
        o = layout.flat((score.softmax(-1) @ v).transpose(1, 2).flatten(2))
        x = x + self.wo(o)
        return x + self.mlp(self.norm1(x))


class Encoder(nn.Module):
    def __init__(self, cfg: dict[str, Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg["vt_num_hidden_layers"]))
        self.final_layernorm = Norm(cfg["vt_hidden_size"], TOWER_EPS)


class Tower(nn.Module):
    def __init__(self, cfg: dict[str, Any]) -> None:
        super().__init__()
        self.patch_embed, self.encoder = PatchEmbed(cfg), Encoder(cfg)
        self.head_width = cfg["qkv_hidden_size"] // cfg["vt_num_attention_heads"]

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """``patches [P, 3, side, side]`` of all pictures to ``[P, C]``."""
        layout = Layout([h * w for h, w in grids])
        x = self.patch_embed(patches, grids)
        turn = rotation(grids, self.head_width, x.dtype)
        padding = torch.arange(layout.n_col) >= layout.lengths[:, None]
        hidden = torch.zeros(padding.shape, dtype=x.dtype).masked_fill(padding, -torch.inf)[:, None, None]
        for block in self.encoder.blocks:
            x = block(x, layout, turn, hidden)
        return self.encoder.final_layernorm(x)


class Projector(nn.Module):
    def __init__(self, cfg: dict[str, Any]) -> None:
        super().__init__()
        self.kernel = tuple(cfg["merge_kernel_size"])
        n = cfg["mm_hidden_size"] * math.prod(self.kernel)
        self.proj = nn.ModuleDict({"0": Linear(n, n), "2": Linear(n, cfg["text_hidden_size"])})
        self.post_norm = Norm(cfg["text_hidden_size"], cfg["projector_ln_eps"])

    def merged(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:
        """``x [P, C]`` to ``[R, kh kw C]``: every kh x kw square of patches side by side, row by row."""
        kh, kw = self.kernel
        parts = []
        for (h, w), part in zip(grids, x.split([h * w for h, w in grids]), strict=True):
            squares = part.view(h // kh, kh, w // kw, kw, -1).transpose(1, 2)
            parts.append(squares.reshape((h // kh) * (w // kw), -1))
        return torch.cat(parts)

    def forward(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:
        return self.post_norm(self.proj["2"](F.gelu(self.proj["0"](self.merged(x, grids)))))


class Vision(nn.Module):
    """``vision_config`` of a Kimi-K3 ``config.json`` gives all shapes."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        super().__init__()
        self.cfg = cfg
        self.vision_tower, self.mm_projector = Tower(cfg), Projector(cfg)

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Normalised ``patches [P, 3, side, side]`` of pictures with ``grids`` to rows ``[R, D]``."""
        return self.mm_projector(self.vision_tower(patches, grids), grids)
