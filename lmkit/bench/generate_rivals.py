"""The rival of `lmkit bench generate`: the Llama of Hugging Face transformers with a static cache, greedy."""

from __future__ import annotations

import inspect

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from lmkit.recipe.tables import ModelConfig

# The argument that takes a cache: releases of transformers differ.
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


class TransformersWriter:
    """A model of the same shape as ours, with random weights; compiled as its documentation advises."""

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        context: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        compiled: bool,
    ) -> None:
        assert config.vocab_size is not None
        shape = LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=config.d_ff,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.context_length,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=config.tie_embeddings,
        )
        self.model: nn.Module = LlamaForCausalLM(shape).eval()
        self.model.to(device=device, dtype=dtype)
        self.forward = self.model.forward
        if compiled:
            self.forward = torch.compile(self.forward, mode="reduce-overhead", fullgraph=True)
        self.context, self.capacity = context, config.context_length
        self.cache = StaticCache(config=shape, max_cache_len=self.capacity)
        self.prompt_cache = StaticCache(config=shape, max_cache_len=self.capacity)
        self.tokens = torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
        self.refill()

    @torch.inference_mode()
    def refill(self) -> None:
        """Read a prompt of zeros, as long as the context, for every text."""
        self.cache.reset()
        prompt = self.tokens.new_zeros(len(self.tokens), self.context)
        self.model(prompt, **{CACHE: self.cache}, logits_to_keep=1)

    @torch.inference_mode()
    def step(self) -> None:
        """Write one more token of every text."""
        logits = self.forward(self.tokens, **{CACHE: self.cache}).logits[:, -1]
        self.tokens.copy_(logits.argmax(dim=-1, keepdim=True))

    @torch.inference_mode()
    def first_token(self) -> None:
        """Read one prompt as long as the context and write a token."""
        self.prompt_cache.reset()
        prompt = self.tokens.new_zeros(1, self.context)
        logits = self.model(prompt, **{CACHE: self.prompt_cache}, logits_to_keep=1).logits
        logits[:, -1].argmax(dim=-1).tolist()
