"""The study of pretraining: what its runs leave behind, and what is read from it."""
