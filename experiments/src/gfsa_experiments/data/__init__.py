"""What several tasks share: own data, known files, tables, corpora, pretrained models."""
