"""Supervised fine-tuning with TRL: LoRA, packed rows, and a learning rate for the filters.

pip install '.[peft]' trl;  python examples/trl_sft.py --steps 20
"""

import argparse
import string

import datasets
import peft
import tokenizers
import torch
import transformers
import trl

import gfsa

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--filter-lr", type=float, default=1e-2)
parser.add_argument("--out", default="run")


class FilterTrainer(gfsa.FilterRate, trl.SFTTrainer):
    pass


def character_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token a character, so that the example needs no download."""
    vocabulary = {c: i for i, c in enumerate(["<end>", "<unknown>", *string.printable])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", unk_token="<unknown>"
    )


def main() -> None:
    options = parser.parse_args()
    transformers.set_seed(0)
    tokenizer = character_tokenizer()
    sums = [{"prompt": f"{a}+{b}=", "completion": f"{a + b}"} for a in range(30) for b in range(30)]

    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        eos_token_id=0, pad_token_id=0, bos_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)  # AutoModelForCausalLM.from_pretrained(…)
    gfsa.plug(model, K=3)

    arguments = trl.SFTConfig(
        options.out, max_steps=options.steps, learning_rate=1e-3,
        logging_first_step=True, logging_steps=min(5, options.steps),
        per_device_train_batch_size=4, save_strategy="no", report_to=[], disable_tqdm=True,
        # several examples a row, cut at max_length
        packing=True, packing_strategy="wrapped", max_length=64,
        use_cpu=not torch.cuda.is_available(), bf16=False, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = FilterTrainer(
        model,
        arguments,
        train_dataset=datasets.Dataset.from_list(sums),
        processing_class=tokenizer,
        # peft freezes whatever it does not know: name the filters
        peft_config=peft.LoraConfig(target_modules="all-linear", modules_to_save=["gfsa"]),
        filter_lr=options.filter_lr,
    )
    trainer.train()
    logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    tuned = trainer.model.merge_and_unload()
    moved = max(f.theta.abs().max().item() for f in gfsa.filters_of(tuned).values())
    print(f"loss {logged[0]:.2f} → {logged[-1]:.2f}; filters moved by up to {moved:.3f}")


if __name__ == "__main__":
    main()
