"""The decoder written again from the paper: float64, one sequence, one row of attention at a time.

Knows nothing of the library but the names of the weights. The pseudo scores stand in their own columns.
"""

import math
from typing import Any

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def logits(weights: Weights, c: dict[str, Any], tokens: Tensor) -> Tensor:
    """Logits (T, vocabulary) for the tokens (T,) of one document; ``c`` holds the settings."""
    w = {name: t.double() for name, t in weights.items()}
    x = w["model.embed_tokens.weight"][tokens]
    k = c["artificial_tokens"] if c["remedy"] == "artificial_token" else 0
    if k:
        zeros = torch.zeros(k, c["hidden_size"], dtype=torch.float64)
        x = torch.cat([zeros if c["artificial_zero"] else w["model.artificial.weight"], x])
    x = add_positions(w, c, x)
    for layer in range(c["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        x = x + attention(w, p + "self_attn.", c, rms(x, w[p + "input_layernorm.weight"], c))
        x = x + feed_forward(w, p + "mlp.", c, rms(x, w[p + "post_attention_layernorm.weight"], c))
    x = rms(x, w["model.norm.weight"], c)[k:]
    head = w["model.embed_tokens.weight"] if c["tie_word_embeddings"] else w["lm_head.weight"]
    return x @ head.T


def rms(x: Tensor, weight: Tensor, c: dict[str, Any]) -> Tensor:
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + c["rms_norm_eps"]) * weight


def feed_forward(w: Weights, p: str, c: dict[str, Any], x: Tensor) -> Tensor:
    up = x @ w[p + "up_proj.weight"].T
    silu = {"silu": lambda t: t / (1 + torch.exp(-t)), "relu": lambda t: t.clamp(min=0)}[c["hidden_act"]]
    inner = silu(x @ w[p + "gate_proj.weight"].T) * up if c["gated"] else silu(up)
    return inner @ w[p + "down_proj.weight"].T


def add_positions(w: Weights, c: dict[str, Any], x: Tensor) -> Tensor:
    n, width = x.shape
    if c["position"] == "learned":
        return x + w["model.positions.table.weight"][:n]
    if c["position"] == "sinusoidal":
        rows = []
        for i in range(n):
            angles = [i / 10000 ** (2 * m / width) for m in range(width // 2)]
            rows.append([math.sin(a) for a in angles] + [math.cos(a) for a in angles])
        return x * math.sqrt(width) + torch.tensor(rows, dtype=torch.float64)
    return x


def rotate(x: Tensor, theta: float) -> Tensor:
    """Each pair (m, m + D/2) is a complex number, turned by position / theta^(2m/D)."""
    n, d = x.shape
    speed = torch.tensor([theta ** (-2 * m / d) for m in range(d // 2)], dtype=torch.float64)
    turned = torch.complex(x[:, : d // 2], x[:, d // 2 :]) * torch.exp(1j * torch.arange(n)[:, None] * speed)
    return torch.cat([turned.real, turned.imag], -1)


def attention(w: Weights, p: str, c: dict[str, Any], x: Tensor) -> Tensor:
    heads, groups, d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    q, k, v = (x @ w[p + f"{name}_proj.weight"].T for name in "qkv")
    outs = []
    for h in range(heads):
        g = h // (heads // groups)
        qh, kh, vh = q[:, h * d : (h + 1) * d], k[:, g * d : (g + 1) * d], v[:, g * d : (g + 1) * d]
        if c["position"] == "rope":
            qh, kh = rotate(qh, c["rope_theta"]), rotate(kh, c["rope_theta"])
        scores = qh @ kh.T / math.sqrt(d) + relative(w, c, h, len(x))
        outs.append(torch.stack([weigh(scores[i], i, h, w, p, c) @ vh for i in range(len(x))]))
    return torch.cat(outs, -1) @ w[p + "o_proj.weight"].T


def relative(w: Weights, c: dict[str, Any], h: int, n: int) -> Tensor:
    """What ALiBi or T5 add to the scores of a head."""
    bias = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        for j in range(i + 1):
            if c["position"] == "alibi":
                bias[i, j] = -alibi(c["num_attention_heads"])[h] * (i - j)
            if c["position"] == "t5":
                bias[i, j] = w["model.positions.buckets.weight"][bucket(i - j, c), h]
    return bias


def bucket(distance: int, c: dict[str, Any]) -> int:
    exact = c["t5_buckets"] // 2
    if distance < exact:
        return distance
    far = exact + math.floor(math.log(distance / exact) / math.log(c["t5_max_distance"] / exact) * exact)
    return min(far, c["t5_buckets"] - 1)


def alibi(heads: int, base: float = 0.5) -> list[float]:
    """The published recursion for head counts that are no power of two."""
    if math.log2(heads).is_integer():
        return [base ** (8 * (h + 1) / heads) for h in range(heads)]
    below = 2 ** math.floor(math.log2(heads))
    return alibi(below, base) + alibi(2 * below, base)[0::2][: heads - below]


def decay(c: dict[str, Any], h: int) -> float:
    if isinstance(c["gamma"], list):
        return c["gamma"][h]
    return alibi(c["num_attention_heads"], c["gamma"])[h] if c["headwise"] else c["gamma"]


def pseudo_columns(i: int, h: int, c: dict[str, Any]) -> list[float]:
    """Row i + 1 of P right of its diagonal: columns up to the horizon, or one column past it."""
    base, gamma, row = float(c["base"]), decay(c, h), i + 1
    if c["horizon"] == "infinite":
        return [base - j * gamma for j in range(row, row + math.ceil(60 / gamma))]
    if row > c["horizon"]:
        return [base - row * gamma]
    return [base - (j - 1) * gamma for j in range(row + 1, c["horizon"] + 1)]


def weigh(scores: Tensor, i: int, h: int, w: Weights, p: str, c: dict[str, Any]) -> Tensor:
    """The weights of row i: softmax over visible scores and the columns of the remedy, second mask."""
    first = 0 if c["sliding_window"] is None else max(0, i + 1 - c["sliding_window"])
    extra: list[float] = {
        "stablemask": lambda: pseudo_columns(i, h, c),
        "softmax_plus_one": lambda: [0.0],
        "learned_sink": lambda: [float(w[p + "sinks"][h])],
    }.get(c["remedy"], list)()
    row = torch.cat([scores[first : i + 1], torch.tensor(extra, dtype=torch.float64)]).softmax(0)
    weights = torch.zeros(len(scores), dtype=torch.float64)
    weights[first : i + 1] = row[: i + 1 - first]
    if c["remedy"] == "urpe":
        for j in range(first, i + 1):
            weights[j] *= w[p + "toeplitz"][h, i - j]
    return weights
