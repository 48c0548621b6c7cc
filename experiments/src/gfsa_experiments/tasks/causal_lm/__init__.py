"""Language modelling with GPT-2-type models."""
