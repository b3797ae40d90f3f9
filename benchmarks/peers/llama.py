# SPDX-License-Identifier: Apache-2.0
"""The Llama of `tessera train` in plain torch: what the peers train. Its sizes are the fields of Hugging Face's config.json."""
import torch
from torch import nn
from torch.nn import functional as F


class Norm(nn.Module):
    def __init__(self, width, epsilon):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + self.epsilon).rsqrt() * self.weight


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


def rotate(x, cosines, sines):
    first, second = x.chunk(2, -1)
    return torch.addcmul(x * cosines, torch.cat((second, first), -1), sines)


class Layer(nn.Module):
    def __init__(self, config, attention):
        super().__init__()
        hidden, inner, self.dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.sharing = heads // kv_heads
        self.attention = attention
        self.norm_attention, self.norm_mlp = (Norm(hidden, config["rms_norm_eps"]) for _ in range(2))
        self.q, self.k, self.v = (linear(hidden, n * self.dim) for n in (heads, kv_heads, kv_heads))
        self.o = linear(heads * self.dim, hidden)
        self.gate, self.up, self.down = linear(hidden, inner), linear(hidden, inner), linear(inner, hidden)

    def attend(self, q, k, v, mask):
        if self.attention == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = torch.matmul(q, k.transpose(2, 3)) * self.dim ** -0.5
        return torch.matmul(torch.softmax(scores + mask, -1), v)

    def mix(self, x, cosines, sines, mask):
        q, k, v = (project(x).view(x.size(0), x.size(1), -1, self.dim) for project in (self.q, self.k, self.v))
        q, k = rotate(q, cosines, sines), rotate(k, cosines, sines)
        if self.sharing > 1:
            k, v = (t.repeat_interleave(self.sharing, dim=2) for t in (k, v))
        mixed = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.o(mixed.transpose(1, 2).reshape(x.size(0), x.size(1), -1))

    def forward(self, x, cosines, sines, mask):
        x = x + self.mix(self.norm_attention(x), cosines, sines, mask)
        h = self.norm_mlp(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """attention: "sdpa", or "math" for scores written out. Calling it with tokens and targets [rows, sequence] gives the mean loss."""

    def __init__(self, config, sequence, attention="sdpa"):
        super().__init__()
        vocabulary, hidden = config["vocab_size"], config["hidden_size"]
        self.embed = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Layer(config, attention) for _ in range(config["num_hidden_layers"]))
        self.norm, self.head = Norm(hidden, config["rms_norm_eps"]), linear(hidden, vocabulary)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=config["initializer_range"])
        if config["tie_word_embeddings"]:
            self.head.weight = self.embed.weight
        half = config["head_dim"] // 2
        angles = torch.outer(torch.arange(sequence).float(), config["rope_theta"] ** -(torch.arange(half) / half))
        self.register_buffer("cosines", torch.cat((angles, angles), 1).cos().unsqueeze(1))
        self.register_buffer("sines", torch.cat((-angles.sin(), angles.sin()), 1).unsqueeze(1))
        self.register_buffer("mask", torch.full((sequence, sequence), float("-inf")).triu(1))

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cosines, self.sines, self.mask)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.reshape(-1, logits.size(-1)), targets.reshape(-1))


def preset(layers, hidden, inner, heads):
    return dict(vocab_size=256, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
                num_key_value_heads=heads, head_dim=hidden // heads, rms_norm_eps=1e-5, rope_theta=10000.0, initializer_range=0.02,
                tie_word_embeddings=False)


PRESETS = {"llama-3m": preset(4, 256, 688, 4), "llama-19m": preset(6, 512, 1376, 8)}
