"""What several tasks share: data files, the hub, tokenizers, pretrained models, token batches."""
