"""FSDP 2 with accelerate: plug first, then prepare; the filters are sharded with their layers.

pip install '.[transformers]' accelerate
accelerate launch --multi_gpu --num_processes 2 examples/accelerate_fsdp2.py --steps 20
"""

import argparse

import accelerate
import torch
import transformers
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

import gfsa

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--filter-lr", type=float, default=1e-2)
parser.add_argument("--out", default="run")


def make_accelerator() -> accelerate.Accelerator:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["GPT2Block"],
        cpu_ram_efficient_loading=False,
    )
    if torch.cuda.is_available():
        return accelerate.Accelerator(fsdp_plugin=plugin)
    # accelerate offers FSDP on GPUs; two processes on a CPU go the same way if its state says so
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    return accelerator


def main() -> None:
    options = parser.parse_args()
    accelerator = make_accelerator()
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        vocab_size=256,
        n_positions=32,
        n_embd=64,
        n_layer=4,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config)
    gfsa.plug(model, K=3)  # before prepare: a sharded model takes no new parameters
    optimizer = torch.optim.AdamW(
        gfsa.parameter_groups(model, lr=1e-3, filter_lr=options.filter_lr)
    )
    # each row counts up from somewhere
    rows = (torch.randint(256, (8 * options.steps, 1)) + torch.arange(32)) % 256
    loader = torch.utils.data.DataLoader(rows, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    losses = []
    for ids in loader:
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())

    theta = [f.theta.full_tensor() for f in gfsa.filters_of(model).values()]
    moved = max(whole.abs().max().item() for whole in theta)
    accelerator.print(
        f"loss {losses[0]:.2f} → {losses[-1]:.2f}; filters moved by up to {moved:.3f}"
    )
    gfsa.save(model, f"{options.out}/filters")  # every process calls it; one writes
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
