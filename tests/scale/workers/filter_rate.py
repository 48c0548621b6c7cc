"""Run by torchrun: ``gfsa.FilterRate`` where Trainer shards, or DeepSpeed builds the optimizer.

torchrun --standalone --nproc-per-node=2 tests/scale/workers/filter_rate.py MODE FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor

import gfsa

MODEL_LR, FILTER_LR, STEPS, BATCH, VOCABULARY = 1e-3, 0.1, 4, 4, 64


class FilterTrainer(gfsa.FilterRate, transformers.Trainer):
    pass


class ShardedTrainer(FilterTrainer):
    """accelerate has FSDP 2 for GPUs alone; told that it is on, it shards CPU processes too."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.state.distributed_type = DistributedType.FSDP
        self.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["GPT2Block"],
            cpu_ram_efficient_loading=False,
        )
        self.is_fsdp_enabled = True


def model() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=32,
        vocab_size=VOCABULARY,
        n_positions=32,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )
    built = transformers.GPT2LMHeadModel(config)
    gfsa.plug(built)
    return built


def rows() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    drawn = torch.randint(VOCABULARY, (8 * BATCH, 16), generator=generator)
    return [{"input_ids": row, "labels": row} for row in drawn]


def trainer(cls: Any, folder: Path, processes: int, **options: Any) -> Any:
    options = {"save_strategy": "no"} | options
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH // processes,
        learning_rate=MODEL_LR,
        weight_decay=0.1,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=1,
        **options,
    )
    return cls(model(), arguments, train_dataset=rows(), filter_lr=FILTER_LR)


def deepspeed_config(stage: int, with_optimizer: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "zero_optimization": {"stage": stage},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_force_ds_cpu_optimizer": False,
    }
    if with_optimizer:
        names = ("lr", "betas", "eps", "weight_decay")
        # torch's own Adam: DeepSpeed's has to be compiled
        parameters = dict.fromkeys(names, "auto") | {"torch_adam": True}
        config["optimizer"] = {"type": "AdamW", "params": parameters}
    return config


def theta_after(run: Any, folder: Path) -> list[float]:
    """What the run learned, gathered by ``gfsa.save`` and read by every process."""
    gfsa.save(run.model, folder)
    run.accelerator.wait_for_everyone()
    return saved_theta(folder)


def saved_theta(folder: Path) -> list[float]:
    fresh = model()
    gfsa.load(fresh, folder)
    return theta_of(fresh)


def theta_of(model: Any) -> list[float]:
    return torch.cat([f.theta.detach().flatten() for f in gfsa.filters_of(model).values()]).tolist()


def result_of(run: Any, folder: Path, **more: Any) -> dict[str, Any]:
    logged = [row for row in run.state.log_history if "learning_rate" in row]
    return {
        "theta": theta_after(run, folder),
        "groups": [
            [group.get("name"), group["weight_decay"]] for group in run.optimizer.param_groups
        ],
        "rates": [[row["learning_rate"], row["filter_learning_rate"]] for row in logged],
        **more,
    }


def one_loop(prepared: Any, backward: Any) -> None:
    """A pass over the rows in a loop of one's own."""
    run, optimizer, loader = prepared
    for batch in loader:
        backward(run(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()


def accelerate_config(folder: Path) -> dict[str, Any]:
    """accelerate and the optimizer of DeepSpeed's config, for which ``DummyOptim`` stands.

    One process: without a GPU, accelerate starts DeepSpeed on one only.
    """
    from accelerate.utils import DummyOptim

    config = deepspeed_config(stage=3, with_optimizer=True)
    config["gradient_clipping"] = 1.0
    config["optimizer"]["params"] = {"lr": MODEL_LR, "weight_decay": 0.0, "torch_adam": True}
    plugin = accelerate.DeepSpeedPlugin(hf_ds_config=config)
    accelerator = accelerate.Accelerator(deepspeed_plugin=plugin)
    built = model()
    optimizer = DummyOptim(gfsa.parameter_groups(built, lr=MODEL_LR, filter_lr=FILTER_LR))
    loader = torch.utils.data.DataLoader(rows(), batch_size=BATCH)
    prepared = accelerator.prepare(built, optimizer, loader)
    one_loop(prepared, accelerator.backward)
    gfsa.save(prepared[0], folder / "filters")
    accelerator.wait_for_everyone()
    groups = [[group.get("name"), group["lr"]] for group in prepared[1].param_groups]
    return {"theta": saved_theta(folder / "filters"), "groups": groups}


def alone_in_a_loop() -> list[float]:
    built = model()
    optimizer = torch.optim.AdamW(gfsa.parameter_groups(built, lr=MODEL_LR, filter_lr=FILTER_LR))
    loader = torch.utils.data.DataLoader(rows(), batch_size=BATCH)

    def backward(loss: Tensor) -> None:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(built.parameters(), 1.0)

    one_loop((built, optimizer, loader), backward)
    return theta_of(built)


def one_process(folder: Path) -> dict[str, Any]:
    run = trainer(FilterTrainer, folder, processes=1)
    run.train()
    return result_of(run, folder / "filters")


def launched(mode: str, folder: Path, processes: int = 2) -> dict[str, Any]:
    from support.launching import WORKERS, launch

    launcher = ["torchrun", "--standalone", f"--nproc-per-node={processes}"]
    launch(launcher, WORKERS / "filter_rate.py", mode, str(folder))
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def check_against_one_process(found: dict[str, Any], expected: dict[str, Any]) -> None:
    # filters moved by tenths: equal to 1e-4 means the same rate, schedule, decay and clipping
    torch.testing.assert_close(
        torch.tensor(found["theta"]), torch.tensor(expected["theta"]), rtol=0, atol=1e-4
    )
    assert max(map(abs, found["theta"])) > FILTER_LR
    assert found["groups"][-1] == ["filters", 0.0]
    falling = [1 - step / STEPS for step in range(STEPS)]
    wanted = torch.tensor([[MODEL_LR * rate, FILTER_LR * rate] for rate in falling])
    torch.testing.assert_close(torch.tensor(expected["rates"]), wanted)


def main() -> None:
    torch.set_num_threads(1)
    mode, folder = sys.argv[1], Path(sys.argv[2])
    if mode == "accelerate-config":
        (folder / "result.json").write_text(json.dumps(accelerate_config(folder)))
        return
    if mode == "fsdp2":
        run = trainer(ShardedTrainer, folder, processes=2)
        run.train()
        result = result_of(run, folder / "filters")
    else:
        # zero2, zero3, zero2-config, zero3-config
        stage, with_optimizer = int(mode[4]), mode.endswith("-config")
        options = {"deepspeed": deepspeed_config(stage, with_optimizer), "save_steps": STEPS // 2}
        options["save_strategy"] = "steps"
        run = trainer(FilterTrainer, folder, processes=2, **options)
        run.train()
        result = result_of(run, folder / "filters")
        resumed = trainer(FilterTrainer, folder / "resumed", processes=2, **options)
        resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{STEPS // 2}"))
        result["resumed theta"] = theta_after(resumed, folder / "resumed-filters")
    if run.args.process_index == 0:
        (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
