"""A small GPT on the demo's dataset. Interrupt it and resume on another number of ranks: the losses are the same.

    make demo
    torchrun --nproc-per-node 2 examples/train_gpt.py demo-data/stdlib      # interrupt it
    python examples/train_gpt.py demo-data/stdlib                           # resumes, now on one rank

The batch of a step is divided among the ranks, so it does not change with their number. The checkpoint contains the
loader's state, so every sample is used exactly once.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import tokenmill
import tokenmill.torch


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_in, self.norm_mid = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm_in(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.norm_mid(x))


class GPT(nn.Module):
    def __init__(self, vocab_size: int, seq_len: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, width), nn.Embedding(seq_len, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        logits = self.norm(self.blocks(x)) @ self.tokens.weight.T / x.shape[-1] ** 0.5
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def average(values: list[torch.Tensor]) -> None:
    """The mean over all ranks. Each has the same number of samples, so this is the mean over the whole batch."""
    if dist.is_initialized():
        for value in values:
            dist.all_reduce(value)
            value.div_(dist.get_world_size())


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("dataset")
    parser.add_argument("--checkpoint", type=Path, default=Path("demo-data/gpt.pt"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--stop-at", type=int, metavar="STEP", help="save a checkpoint there and stop")
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--batch-size", type=int, default=16, help="samples per step, over all ranks")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    if "RANK" in os.environ:  # torchrun sets it
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = tokenmill.torch.find_rank()
    if options.batch_size % world_size:
        raise SystemExit(f"--batch-size {options.batch_size} cannot be divided among {world_size} ranks")
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"

    dataset = tokenmill.open(options.dataset)
    loader = tokenmill.torch.DataLoader(dataset, options.seq_len, options.batch_size // world_size, seed=1)
    torch.manual_seed(1)
    vocab_size = dataset.manifest.tokenizer["vocab_size"]
    model = GPT(vocab_size, options.seq_len, options.width, options.layers, options.heads).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    step = 0
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        step = saved["step"]
        if rank == 0:
            print(f"resumed at step {step} on {world_size} ranks", flush=True)

    last = min(options.steps, options.stop_at or options.steps)
    batches = iter(loader)
    while step < last:
        batch = next(batches)
        loss = model(batch["input_ids"].to(device), batch["labels"].to(device))
        optimizer.zero_grad()
        loss.backward()
        shown = loss.detach()
        average([shown, *(weight.grad for weight in model.parameters())])
        optimizer.step()
        step += 1
        if rank == 0:
            print(f"step {step} loss {shown.item():.7f}", flush=True)
            if step % options.save_every == 0 or step == last:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                whole = options.checkpoint.with_suffix(".tmp")
                torch.save({**state, "loader": loader.state_dict(), "step": step}, whole)
                whole.replace(options.checkpoint)  # an interruption leaves the old one or the new one
                print(f"saved step {step}", flush=True)
    batches.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
