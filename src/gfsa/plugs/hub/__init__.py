"""Filters on the Hugging Face Hub: uploaded with a card, downloaded by name."""
