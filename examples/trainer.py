"""Fine-tune with transformers' Trainer; the filters have a learning rate of their own.

pip install '.[transformers]' accelerate;  python examples/trainer.py --steps 60
"""

import argparse
import inspect
import json.decoder

import torch
import transformers

import gfsa

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--filter-lr", type=float, default=1e-2)
parser.add_argument("--logging-steps", type=int, default=20)
parser.add_argument("--out", default="run")


# the one line of code: Trainer, and a rate for the filters
class FilterTrainer(gfsa.FilterRate, transformers.Trainer):
    pass


def text_rows(length: int = 64) -> list[dict[str, torch.Tensor]]:
    """Bytes of a module of Python's standard library, cut into rows."""
    text = inspect.getsource(json.decoder).encode()
    ids = torch.tensor(list(text[: len(text) // length * length])).view(-1, length)
    return [{"input_ids": row, "labels": row} for row in ids]


def main() -> None:
    options = parser.parse_args()
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        vocab_size=256,
        n_positions=64,
        n_embd=64,
        n_layer=4,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config)  # AutoModelForCausalLM.from_pretrained("gpt2")
    print(gfsa.plug(model, K=3))

    arguments = transformers.TrainingArguments(
        options.out,
        max_steps=options.steps,
        learning_rate=options.lr,
        weight_decay=0.1,
        per_device_train_batch_size=8,
        logging_first_step=True,
        logging_steps=min(options.logging_steps, options.steps),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = FilterTrainer(
        model, arguments, train_dataset=text_rows(), filter_lr=options.filter_lr
    )
    trainer.train()  # logs learning_rate and filter_learning_rate

    logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    moved = max(f.theta.abs().max().item() for f in gfsa.filters_of(model).values())
    print(f"loss {logged[0]:.2f} → {logged[-1]:.2f}; filters moved by up to {moved:.3f}")
    trainer.save_model(f"{options.out}/model")  # gfsa.from_pretrained loads it with its filters


if __name__ == "__main__":
    main()
