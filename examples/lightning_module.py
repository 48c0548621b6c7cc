"""Lightning: plug in __init__, groups in configure_optimizers; its monitor logs both rates.

pip install . lightning;  python examples/lightning_module.py --steps 60
"""

import argparse

import lightning
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional

import gfsa

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--filter-lr", type=float, default=1e-2)
parser.add_argument("--out", default="run")
SYMBOLS, WIDTH = 8, 32


class MostFrequent(lightning.LightningModule):
    """Which symbol occurs most often in a sequence?"""

    def __init__(self, filter_lr: float) -> None:
        super().__init__()
        self.filter_lr = filter_lr
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(SYMBOLS, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, num_layers=3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, SYMBOLS)
        gfsa.plug(self.encoder, K=3)

    def forward(self, symbols: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(symbols)).mean(1))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        symbols, labels = batch
        loss = functional.cross_entropy(self(symbols), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        groups = gfsa.parameter_groups(self, lr=3e-3, filter_lr=self.filter_lr, weight_decay=0.01)
        optimizer = torch.optim.AdamW(groups)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main() -> None:
    options = parser.parse_args()
    lightning.seed_everything(0)
    symbols = torch.randint(SYMBOLS, (2048, 15))
    data = torch.utils.data.TensorDataset(symbols, symbols.mode().values)
    module = MostFrequent(options.filter_lr)
    trainer = lightning.Trainer(
        max_steps=options.steps,
        logger=CSVLogger(options.out),
        callbacks=[LearningRateMonitor()],  # lr-AdamW/weights, lr-AdamW/biases, lr-AdamW/filters
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=32, shuffle=True))
    moved = max(f.theta.abs().max().item() for f in gfsa.filters_of(module).values())
    loss = trainer.callback_metrics["loss"].item()
    print(f"loss {loss:.2f}; filters moved by up to {moved:.3f}")


if __name__ == "__main__":
    main()
