"""Kimi-K3's text model in torch, in a form that trains on a CPU.

Parameter names are those of the Hugging Face checkpoint without the ``language_model.`` prefix; the routed experts of a
layer are stacked into ``experts.w1/w2/w3 [n_expert, out, in]``. Linear weights are ``[out, in]`` and have no bias.
Shapes below: N tokens of a batch laid end to end, B sequences, T tokens of the longest one, D hidden, H heads, K head
width, P = H * K.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxfp4 import straight_through

CHUNK = 16  # rows of a KDA chunk: with the gate's lower bound of -5 a factorised exponent stays within +-40
LORA_EPS = 1e-6  # the released code builds the two low-rank norms with its class default, not with rms_norm_eps


class Layout:
    """Where the tokens of a ragged batch lie in a padded ``[B, T]`` grid. Everything but the KDA scan and the attention
    runs on the ``[N, …]`` rows without padding."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.n_row, self.n_col = len(lengths), max(lengths)
        self.lengths = torch.tensor(lengths)
        self.even = min(lengths) == self.n_col
        grid = torch.arange(self.n_col).expand(self.n_row, -1)
        self.place = (grid < self.lengths[:, None]).flatten().nonzero().flatten()

    def pad(self, x: Tensor) -> Tensor:
        """``[N, C]`` to ``[B, T, C]``, zeros where there is no token."""
        if not self.even:
            x = x.new_zeros(self.n_row * self.n_col, x.shape[-1]).index_copy(0, self.place, x)
        return x.view(self.n_row, self.n_col, -1)

    def flat(self, x: Tensor) -> Tensor:
        """``[B, T, C]`` to ``[N, C]``."""
        x = x.reshape(self.n_row * self.n_col, -1)
        return x if self.even else x.index_select(0, self.place)


@dataclass
class LayerCache:
    """What a layer carries past a prefix of even length. KDA: ``a`` = last conv inputs [B, 3, 3P], ``b`` = state
    [B, H, K, K]. MLA: ``a`` = normed latents [B, T, R], ``b`` = shared key part [B, T, rope]."""

    a: Tensor
    b: Tensor

    def expand(self, batch: int) -> LayerCache:
        return LayerCache(self.a.expand(batch, *self.a.shape[1:]), self.b.expand(batch, *self.b.shape[1:]))


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * (linear_beta * torch.tanh(up / linear_beta))


class Linear(nn.Module):
    def __init__(self, n_in: int, n_out: int, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_out, n_in) * gain / math.sqrt(n_in))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Norm(nn.Module):
    def __init__(self, n: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms(x, self.weight, self.eps)


class Conv(nn.Module):
    def __init__(self, n: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, 1, kernel) * 0.25)
        with torch.no_grad():
            self.weight[:, 0, -1] += 0.5


class UnitLowerInverse(torch.autograd.Function):
    """(I + A)^-1 for strictly lower triangular ``A [..., CHUNK, CHUNK]``, by doubling the size of the inverted blocks.

    Far faster here than batched triangular solves, and without the cancellation of the power series in A."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        inverse = torch.eye(CHUNK, dtype=a.dtype, device=a.device).expand(a.shape).contiguous()
        size = 1
        while size < CHUNK:
            blocks = CHUNK // (2 * size)
            view = inverse.view(*a.shape[:-2], blocks, 2 * size, blocks, 2 * size)
            below = a.view(view.shape).diagonal(dim1=-4, dim2=-2)[..., size:, :size, :].movedim(-1, -3)
            diagonal = view.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
            top, bottom = diagonal[..., :size, :size], diagonal[..., size:, size:]
            diagonal[..., size:, :size] = -(bottom @ below @ top)
            size *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ grad @ transposed)


def convolved(window: Tensor, taps: Tensor, n_head: int) -> tuple[Tensor, Tensor, Tensor]:
    """Causal convolution, SiLU and L2 norms: ``window [B, kernel - 1 + T, 3P]``, ``taps [3P, kernel]`` to q, k, v
    ``[B, H, T, K]``; q carries the factor K^-0.5."""
    kernel = taps.shape[-1]
    n_token = window.shape[1] - kernel + 1
    mixed = window[:, kernel - 1 :] * taps[:, -1]
    for j in range(kernel - 1):
        mixed = mixed + window[:, j : j + n_token] * taps[:, j]
    q, k, v = F.silu(mixed).view(window.shape[0], n_token, 3, n_head, -1).permute(2, 0, 3, 1, 4)
    q = q * (torch.rsqrt((q * q).sum(-1, keepdim=True) + 1e-6) * q.shape[-1] ** -0.5)
    k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6)
    return q, k, v


def gated_norm(o: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """``o [N, H, K]`` normed per head times sigmoid of ``gate [N, P]``."""
    scale = torch.rsqrt(o.square().mean(-1, keepdim=True) + eps)
    return (o * scale * weight).flatten(-2) * torch.sigmoid(gate)


def kda_chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Gated delta rule in chunks. ``q k v g [B, H, T, K]``, ``beta [B, H, T, 1]``, ``state [B, H, K, V]``.

    Returns the reads ``[B, H, T, V]`` and the state after the last token. Needs ``g >= -5``: inside a chunk the
    pairwise decay exp(G_i - G_j) is factorised around the middle row, which keeps both exponents within 40.
    """
    n_batch, n_head, n_token, width = q.shape
    pad = -n_token % CHUNK
    if pad:  # rows with k = 0, beta = 0, g = 0 neither write nor decay
        q, k, v, g, beta = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v, g, beta))
    n_chunk = (n_token + pad) // CHUNK
    q, k, v, g, beta = (x.reshape(n_batch, n_head, n_chunk, CHUNK, x.shape[-1]) for x in (q, k, v, g, beta))
    total = g.cumsum(-2)
    middle = total[..., CHUNK // 2 : CHUNK // 2 + 1, :]
    rise = torch.exp(total - middle)
    k_fall = k * torch.exp(middle - total)
    k_rise = k * rise
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    a = (beta * (k_rise @ k_fall.transpose(-1, -2))).masked_fill(~lower.tril(-1), 0.0)
    b = ((q * rise) @ k_fall.transpose(-1, -2)).masked_fill(~lower, 0.0)
    decay = torch.exp(total)
    inverse = UnitLowerInverse.apply(a)
    u, w = inverse @ (beta * v), inverse @ (beta * k * decay)
    q_decay = q * decay
    last = total[..., -1:, :]
    k_last = (k * torch.exp(last - total)).transpose(-1, -2)
    keep = torch.exp(last).transpose(-1, -2)
    reads = []
    for i in range(n_chunk):
        fresh = u[:, :, i] - w[:, :, i] @ state
        reads.append(q_decay[:, :, i] @ state + b[:, :, i] @ fresh)
        state = keep[:, :, i] * state + k_last[:, :, i] @ fresh
    out = torch.stack(reads, 2).reshape(n_batch, n_head, n_token + pad, -1)
    return out[:, :, :n_token], state


class KDA(nn.Module):
    def __init__(self, cfg: dict[str, Any]) -> None:
        super().__init__()
        lin, d = cfg["linear_attn_config"], cfg["hidden_size"]
        self.n_head, self.width, self.kernel = lin["num_heads"], lin["head_dim"], lin["short_conv_kernel_size"]
        self.bound = lin["gate_lower_bound"]
        p = self.n_head * self.width
        self.q_proj, self.k_proj, self.v_proj = Linear(d, p), Linear(d, p), Linear(d, p)
        self.q_conv1d, self.k_conv1d, self.v_conv1d = Conv(p, self.kernel), Conv(p, self.kernel), Conv(p, self.kernel)
        self.f_a_proj, self.f_b_proj = Linear(d, self.width), Linear(self.width, p, 0.5)
        self.b_proj, self.g_proj = Linear(d, self.n_head), Linear(d, p)
        # Decays from half a token to a few hundred tokens at the start; K3's A_log is one value per head.
        self.A_log = nn.Parameter(torch.empty(self.n_head).uniform_(0.8, 1.6).log())
        self.dt_bias = nn.Parameter(torch.empty(p).uniform_(-7.0, -2.0))
        self.o_norm = Norm(self.width, cfg["rms_norm_eps"])
        self.o_proj = Linear(p, d, 0.5)

    def forward(self, h: Tensor, layout: Layout, cache: LayerCache | None) -> tuple[Tensor, LayerCache]:
        n_batch, n_token = layout.n_row, layout.n_col

        def heads(x: Tensor) -> Tensor:
            return x.view(n_batch, n_token, self.n_head, -1).transpose(1, 2)

        weight = torch.cat((self.q_proj.weight, self.k_proj.weight, self.v_proj.weight))
        taps = torch.cat((self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight)).squeeze(1)
        raw = layout.pad(F.linear(h, weight))
        before = raw.new_zeros(n_batch, self.kernel - 1, raw.shape[-1]) if cache is None else cache.a
        window = torch.cat((before, raw), 1)
        # Padding has g = 0 and beta = 0: its rows neither decay the state nor write to it.
        z = self.f_b_proj(self.f_a_proj(h)) + self.dt_bias
        g = self.bound * torch.sigmoid(self.A_log.exp().repeat_interleave(self.width) * z)
        g = heads(layout.pad(g))
        beta = heads(layout.pad(torch.sigmoid(self.b_proj(h))))
        state = raw.new_zeros(n_batch, self.n_head, self.width, self.width) if cache is None else cache.b
        q, k, v = convolved(window, taps, self.n_head)
        o, state = kda_chunked(q, k, v, g, beta, state)
        o = layout.flat(o.transpose(1, 2)).view(-1, self.n_head, self.width)
        out = self.o_proj(gated_norm(o, self.o_norm.weight, self.g_proj(h), self.o_norm.eps))
        return out, LayerCache(window[:, window.shape[1] - self.kernel + 1 :], state)


class MLA(nn.Module):
    def __init__(self, cfg: dict[str, Any]) -> None:
        super().__init__()
        d, self.n_head, self.rank = cfg["hidden_size"], cfg["num_attention_heads"], cfg["kv_lora_rank"]
        self.nope, self.rope, self.v_width = cfg["qk_nope_head_dim"], cfg["qk_rope_head_dim"], cfg["v_head_dim"]
        q_rank = cfg["q_lora_rank"]
        self.q_a_proj, self.q_a_layernorm = Linear(d, q_rank), Norm(q_rank, LORA_EPS)
        self.q_b_proj = Linear(q_rank, self.n_head * (self.nope + self.rope))
        self.kv_a_proj_with_mqa = Linear(d, self.rank + self.rope)
        self.kv_a_layernorm = Norm(self.rank, LORA_EPS)
        self.kv_b_proj = Linear(self.rank, self.n_head * (self.nope + self.v_width))
        self.g_proj = Linear(d, self.n_head * self.v_width)
        self.o_proj = Linear(self.n_head * self.v_width, d, 0.5)

    def forward(self, h: Tensor, layout: Layout, cache: LayerCache | None) -> tuple[Tensor, LayerCache]:
        n_batch, n_token = layout.n_row, layout.n_col
        q = layout.pad(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(h))))
        q = q.view(n_batch, n_token, self.n_head, self.nope + self.rope).transpose(1, 2)
        latent, shared = self.kv_a_proj_with_mqa(h).split((self.rank, self.rope), -1)
        latent, shared = layout.pad(self.kv_a_layernorm(latent)), layout.pad(shared)
        if cache is not None:
            latent, shared = torch.cat((cache.a, latent), 1), torch.cat((cache.b, shared), 1)
        n_all = latent.shape[1]
        kv = self.kv_b_proj(latent).view(n_batch, n_all, self.n_head, self.nope + self.v_width).transpose(1, 2)
        k = torch.cat((kv[..., : self.nope], shared.unsqueeze(1).expand(-1, self.n_head, -1, -1)), -1)
        score = q @ k.transpose(-1, -2) * (self.nope + self.rope) ** -0.5
        future = torch.ones(n_token, n_all, dtype=torch.bool, device=h.device).triu(n_all - n_token + 1)
        o = score.masked_fill(future, -torch.inf).softmax(-1) @ kv[..., self.nope :]
        o = layout.flat(o.transpose(1, 2))
        return self.o_proj(o * torch.sigmoid(self.g_proj(h))), LayerCache(latent, shared)


class MLP(nn.Module):
    def __init__(self, cfg: dict[str, Any], width: int) -> None:
        super().__init__()
        d = cfg["hidden_size"]
        self.betas = (cfg["activation_situ_beta"], cfg["activation_situ_linear_beta"])
        self.gate_proj, self.up_proj, self.down_proj = Linear(d, width), Linear(d, width), Linear(width, d, 0.5)

    def forward(self, h: Tensor) -> Tensor:
        return self.down_proj(situ(self.gate_proj(h), self.up_proj(h), *self.betas))


class Router(nn.Module):
    def __init__(self, d: int, n_expert: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_expert, d) / math.sqrt(d))
        self.register_buffer("e_score_correction_bias", torch.zeros(n_expert))


class Experts(nn.Module):
    def __init__(self, n: int, d: int, width: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(n, width, d) / math.sqrt(d))
        self.w3 = nn.Parameter(torch.randn(n, width, d) / math.sqrt(d))
        self.w2 = nn.Parameter(torch.randn(n, d, width) / math.sqrt(width))
        self.rounded = False  # round to MXFP4 in the forward pass

    def weights(self) -> list[Tensor]:
        return [straight_through(w) if self.rounded else w for w in (self.w1, self.w3, self.w2)]


class MoE(nn.Module):
    def __init__(self, cfg: dict[str, Any]) -> None:
        super().__init__()
        d, z, width = cfg["hidden_size"], cfg["routed_expert_hidden_size"], cfg["moe_intermediate_size"]
        self.n_expert, self.top_k = cfg["num_experts"], cfg["num_experts_per_token"]
        self.scale = cfg["routed_scaling_factor"]
        self.betas = (cfg["activation_situ_beta"], cfg["activation_situ_linear_beta"])
        self.gate = Router(d, self.n_expert)
        self.routed_expert_down_proj, self.routed_expert_up_proj = Linear(d, z), Linear(z, d, 0.5)
        self.routed_expert_norm = Norm(z, cfg["rms_norm_eps"])
        self.experts = Experts(self.n_expert, z, width)
        self.shared_experts = MLP(cfg, width * cfg["num_shared_experts"])
        self.load = torch.zeros(self.n_expert)  # tokens per expert since the last balancing step

    def forward(self, h: Tensor) -> Tensor:
        score = torch.sigmoid(F.linear(h, self.gate.weight))
        chosen = (score + self.gate.e_score_correction_bias).topk(self.top_k, -1).indices  # [N, k]
        weight = score.gather(-1, chosen)
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * self.scale
        latent = self.routed_expert_down_proj(h)

        # Sort the (token, expert) pairs by expert and pad every expert to the longest: three batched products.
        expert, order = chosen.flatten().sort(stable=True)
        count = torch.bincount(expert, minlength=self.n_expert)
        if self.training:
            self.load += count
        rows = int(count.max())
        slot = expert * rows + torch.arange(expert.numel(), device=h.device) - (count.cumsum(0) - count)[expert]
        inputs = latent.new_zeros(self.n_expert * rows, latent.shape[-1])
        inputs = inputs.index_copy(0, slot, latent.index_select(0, order // self.top_k))
        inputs = inputs.view(self.n_expert, rows, -1)
        w1, w3, w2 = (w.transpose(1, 2) for w in self.experts.weights())
        outputs = (situ(inputs @ w1, inputs @ w3, *self.betas) @ w2).flatten(0, 1)
        place = torch.empty_like(slot)
        place[order] = slot
        picked = outputs.index_select(0, place).view(-1, self.top_k, latent.shape[-1])
        routed = (picked * weight.unsqueeze(-1)).sum(1)
        routed = self.routed_expert_up_proj(self.routed_expert_norm(routed))
        return routed + self.shared_experts(h)

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Raise the selection bias of experts that got fewer tokens than the mean, lower the others."""
        self.gate.e_score_correction_bias += rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class Score(nn.Module):
    """One mixing point of the attention residuals; only norm * proj matters."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(d))
        self.proj = nn.Parameter(torch.zeros(1, d))


def mix(bank: Sequence[tuple[Tensor, Tensor]], x: Tensor, score: Score, eps: float) -> Tensor:
    """Softmax over the banked streams and ``x [N, D]``; ``bank`` holds (stream, 1 / rms)."""
    entries = [*bank, (x, inverse_rms(x, eps))]
    direction = (score.norm * score.proj).flatten()
    weight = torch.stack([(e @ direction) * r for e, r in entries], -1).softmax(-1)
    out = entries[0][0] * weight[..., :1]
    for i in range(1, len(entries)):
        out = out + entries[i][0] * weight[..., i : i + 1]
    return out


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().mean(-1) + eps)


class Layer(nn.Module):
    def __init__(self, cfg: dict[str, Any], index: int) -> None:
        super().__init__()
        d, eps = cfg["hidden_size"], cfg["rms_norm_eps"]
        self.input_layernorm, self.post_attention_layernorm = Norm(d, eps), Norm(d, eps)
        self.self_attention_res, self.mlp_res = Score(d), Score(d)
        self.self_attn: nn.Module = KDA(cfg) if index + 1 in cfg["linear_attn_config"]["kda_layers"] else MLA(cfg)
        if index >= cfg["first_k_dense_replace"] and index % cfg["moe_layer_freq"] == 0:
            self.block_sparse_moe: MoE | None = MoE(cfg)
        else:
            self.block_sparse_moe = None
            self.mlp = MLP(cfg, cfg["intermediate_size"])

    def ffn(self, h: Tensor) -> Tensor:
        return self.mlp(h) if self.block_sparse_moe is None else self.block_sparse_moe(h)


class Kimi(nn.Module):
    """``text_config`` of a Kimi-K3 ``config.json`` gives all shapes."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        super().__init__()
        self.cfg, d = cfg, cfg["hidden_size"]
        self.embed_tokens = nn.Parameter(torch.randn(cfg["vocab_size"], d) * 0.4)
        self.layers = nn.ModuleList(Layer(cfg, i) for i in range(cfg["num_hidden_layers"]))
        self.output_attn_res = Score(d)
        self.norm = Norm(d, cfg["rms_norm_eps"])
        self.lm_head = nn.Parameter(torch.randn(cfg["vocab_size"], d) / math.sqrt(d))

    def forward(
        self, ids: Tensor, layout: Layout, caches: list[LayerCache] | None = None
    ) -> tuple[Tensor, list[LayerCache]]:
        """Final hidden rows ``[N, D]`` of ``ids [N]`` and what each layer carries on. ``caches`` of one sequence serve
        every sequence of the batch: that is how a common prefix is computed once."""
        return self.run(F.embedding(ids, self.embed_tokens), layout, caches)

    def run(self, x: Tensor, layout: Layout, caches: list[LayerCache] | None = None) -> tuple[Tensor, list[LayerCache]]:
        """The same from rows ``x [N, D]``: token embeddings, or what stands in their place."""
        eps, block = self.cfg["rms_norm_eps"], self.cfg["attn_res_block_size"]
        bank: list[tuple[Tensor, Tensor]] = []
        carried = []
        for i, layer in enumerate(self.layers):
            a = mix(bank, x, layer.self_attention_res, eps) if bank else x
            cache = None if caches is None else caches[i].expand(layout.n_row)
            y, after = layer.self_attn(layer.input_layernorm(a), layout, cache)
            carried.append(after)
            if i % block == 0:
                bank.append((x, inverse_rms(x, eps)))
                x = y
            else:
                x = x + y
            x = x + layer.ffn(layer.post_attention_layernorm(mix(bank, x, layer.mlp_res, eps)))
        return self.norm(mix(bank, x, self.output_attn_res, eps)), carried

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.lm_head)

    def moes(self) -> list[MoE]:
        return [layer.block_sparse_moe for layer in self.layers if layer.block_sparse_moe is not None]

    def round_experts(self, on: bool) -> None:
        for moe in self.moes():
            moe.experts.rounded = on
