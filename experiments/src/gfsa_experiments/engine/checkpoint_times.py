"""After which steps a run writes a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from gfsa_experiments.engine.config import TrainConfig

# checkpoints of an epoch, or of a run that is shorter, that are written at evaluations
_WITHIN_EPOCH = 10


@dataclass
class CheckpointTimes:
    """At the end of each epoch, and within it at evaluations; or every so many steps, as set.

    A run of one epoch would have nothing to resume from otherwise. At an evaluation the loss is
    read anyway, so a checkpoint there leaves the log as it is without one.
    """

    config: TrainConfig
    per_epoch: int
    """Steps of an epoch."""
    total: int
    """Steps of the run."""
    last: int
    """The step of the last checkpoint; where the run begins, if it has none."""

    def kept(self, step: int, evaluates: bool) -> int:
        """How many checkpoints are kept after one that is due now; 0 if none is due.

        Args:
            step: steps done.
            evaluates: whether ``valid`` is evaluated after this step.
        """
        if not self.config.checkpoints:
            return 0
        if step % (self.config.checkpoint_every or self.per_epoch) == 0 or step == self.total:
            # if the newest is damaged, the run goes on from the one before
            return 2
        apart = min(self.per_epoch, self.total) / _WITHIN_EPOCH
        within = evaluates and not self.config.checkpoint_every and step - self.last >= apart
        # of a large model each has gigabytes
        return 1 if within else 0
